"""Every exception this package raises.

::

    ASGDError (RuntimeError)
    ├── ConfigurationError (also ValueError)   a setting is wrong; nothing was started
    ├── SnapshotError                          servers cannot continue from the snapshots in a folder
    ├── LaunchError                            a server or a worker did not start
    ├── ServerLostError                        a server died or does not answer
    ├── WorkerLostError                        a worker died, or this worker was declared dead
    │   └── WorkerAwayError                    this worker missed its heartbeats; it rejoins by itself
    ├── LayoutMismatchError                    workers hold modules of different shape
    ├── ProtocolError                          a message that does not fit the session
    ├── CollectiveMismatchError                workers called different collectives
    ├── CollectiveTimeoutError                 a collective was not answered in time
    └── CollectiveUnavailableError             a collective of torch.distributed that cannot be served there

Each takes one message string, because an exception crosses a process boundary as text only. A message names what
failed, the value, what was expected and what to do.
"""

from __future__ import annotations

__all__ = [
    "ASGDError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CollectiveUnavailableError",
    "ConfigurationError",
    "LaunchError",
    "LayoutMismatchError",
    "ProtocolError",
    "ServerLostError",
    "SnapshotError",
    "WorkerAwayError",
    "WorkerLostError",
    "error_from",
]


class ASGDError(RuntimeError):
    """Root of the tree: catch this to catch every error of this package."""


class ConfigurationError(ASGDError, ValueError):
    """A setting is wrong. Raised before any process is started."""


class SnapshotError(ASGDError):
    """What was written down cannot be read back, or is of another run: snapshots, tables, checkpoints."""


class LaunchError(ASGDError):
    """A server or a worker did not start; the message holds the last lines of its log."""

    final = False
    """Whether no later attempt can succeed, such as for want of a secret."""


class ServerLostError(ASGDError):
    """A server died or did not answer within the time allowed."""

    server: int | None = None
    """Which one, if its connection broke."""
    replaced: int = 0
    """How often it had been replaced when the message was sent that was not answered."""


class WorkerLostError(ASGDError):
    """A worker that others need is gone, or this worker was declared dead by the others."""


class WorkerAwayError(WorkerLostError):
    """This worker missed its heartbeats, and the others continue without it. It rejoins by itself."""


class LayoutMismatchError(ASGDError):
    """The modules of two workers differ; the message names the first parameter that does."""


class ProtocolError(ASGDError):
    """A message does not fit the session, for example one from an earlier session."""


class CollectiveMismatchError(ASGDError):
    """Workers called different collectives where they should have called the same one."""


class CollectiveTimeoutError(ASGDError):
    """A collective was not completed in time; the message names the workers that are missing."""


class CollectiveUnavailableError(ASGDError):
    """A collective of ``torch.distributed`` was called where not all workers take part in it, as in a training step."""


_BY_NAME: dict[str, type[ASGDError]] = {
    cls.__name__: cls
    for cls in (
        ASGDError,
        ConfigurationError,
        SnapshotError,
        LaunchError,
        ServerLostError,
        WorkerLostError,
        WorkerAwayError,
        LayoutMismatchError,
        ProtocolError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        CollectiveUnavailableError,
    )
}


def error_from(name: str, message: str) -> ASGDError:
    """Rebuild an error that a server reported.

    Args:
        name: class name, as in ``type(error).__name__``; an unknown one becomes :class:`ASGDError`.
        message: text of the error.
    """
    cls = _BY_NAME.get(name)
    return cls(message) if cls is not None else ASGDError(f"{name}: {message}")
