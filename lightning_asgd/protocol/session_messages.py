"""How a worker enters a session, lives in it and leaves it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning_asgd.process_name import this_process
from lightning_asgd.protocol.metric_messages import WorkerMetrics
from lightning_asgd.protocol.request import Request

__all__ = [
    "BOOTSTRAPPED",
    "PROTOCOL",
    "Attach",
    "Attached",
    "DisconnectWatch",
    "Failure",
    "Heartbeat",
    "HeartbeatReply",
    "Join",
    "Joined",
    "Leave",
    "Policy",
    "RankHeld",
    "RunMetadata",
]

BOOTSTRAPPED = "founded"
"""Name of the :class:`RunMetadata` that says that a run has weights."""

PROTOCOL = 20
"""Version of these messages. A server refuses a worker that speaks another one."""


@dataclass(frozen=True)
class Policy:
    """What a session does about workers that are silent or gone.

    Attributes:
        silence_s: seconds without a heartbeat after which a worker counts as away; 0: never.
        min_workers: with fewer of them the session is ended.
        abort: whether the session is ended as soon as one is away or gone.
    """

    silence_s: float = 0.0
    min_workers: int = 1
    abort: bool = False


@dataclass(frozen=True)
class Join(Request):
    """A worker enters a session.

    Attributes:
        world_size: number of workers of the session; 0: they come and go, see :class:`Attach`.
        policy: the same from all workers; the first one's counts.
        again: whether the worker was told that it counts as away, and starts over with the servers' weights.
        after: the session that this one goes on from, with the same workers; who is gone there is gone here.
        server: number of the server that this is sent to.
        restore: whether this server replaces one that was lost during the session.
        holding: where workers come and go, those that hold the weights, as far as this one knows.
        admitted: the highest number that it knows to be given.
        protocol: version of the messages the worker speaks.
        replaces: whether the process may replace one that has died or is silent. It then waits for the
            others to train, and joins once more, with ``since``.
        since: number of the collective after which such a worker takes part in all of them; None for other workers.
    """

    world_size: int
    policy: Policy = Policy()
    again: bool = False
    after: str = ""
    server: int = 0
    restore: bool = False
    holding: tuple[int, ...] = ()
    admitted: int = 0
    protocol: int = PROTOCOL
    replaces: bool = False
    since: int | None = None


@dataclass(frozen=True)
class Joined:
    """Answer to :class:`Join`.

    Attributes:
        pid: the server's process.
        incarnation: how often this worker was declared away.
        pushed: number of the worker's latest push that the server has seen.
        late: whether the process replaces one that has died or is silent.
        collectives: number of the latest collective that was completed, where it does.
    """

    pid: int
    incarnation: int = 0
    pushed: int = 0
    late: bool = False
    collectives: int = 0


@dataclass(frozen=True)
class RankHeld:
    """Answer to :class:`Join` with ``replaces`` while another process is the worker.

    Attributes:
        process: its name.
        silent_s: seconds since it was last heard.
    """

    process: str
    silent_s: float


@dataclass(frozen=True)
class Attach:
    """A worker asks to take part in a run whose workers come and go.

    Answered once the run has weights, or once this worker is to bring them.

    Attributes:
        session: name of the run.
        about: the worker's machine, process and device, as a text for users.
        policy: what the run does about workers that are silent; the first worker's counts.
        protocol: version of the messages the worker speaks.
        process: see :class:`Request`.
    """

    session: str
    about: str
    policy: Policy = Policy()
    protocol: int = PROTOCOL
    process: str = field(default_factory=this_process, kw_only=True)


@dataclass(frozen=True)
class Attached:
    """Answer to :class:`Attach`.

    Attributes:
        worker: the worker's number, which no other has had or will have.
        bootstraps: whether the run has no weights yet: this worker brings them, and the others wait for that.
        notes: what the workers have told each other: see :class:`RunMetadata`.
        heard: number of news that were there before.
        chief: the worker that logs and writes checkpoints.
    """

    worker: int
    bootstraps: bool
    notes: dict[str, Any]
    heard: int = 0
    chief: int = 0


@dataclass(frozen=True)
class RunMetadata(Request):
    """What the workers of a run tell each other, and workers that join later. The last write wins.

    Attributes:
        name: what it is about; :data:`BOOTSTRAPPED` is the one that servers read.
        value: a plain value, or an object as :class:`Pickled`; None to ask only.
        first: whether an earlier value stays, if there is one (put-if-absent).
    """

    name: str
    value: Any = None
    first: bool = False


@dataclass(frozen=True)
class Heartbeat(Request):
    """Sent a few times within :attr:`Policy.silence_s`.

    Attributes:
        heard: number of events that the worker has heard of.
        figures: the worker's latest, for the coordinator; None if it takes none.
    """

    urgent: ClassVar[bool] = True  # behind weights it might come too late

    heard: int = 0
    figures: WorkerMetrics | None = None


@dataclass(frozen=True)
class HeartbeatReply:
    """Answer to :class:`Heartbeat`.

    Attributes:
        news: events of workers since the last heartbeat, as texts for users.
        living: workers that take part.
        figures: the latest ones of every worker, for the chief, which logs them; empty for the others.
        chief: the worker that logs and writes checkpoints.
        holding: where workers come and go, those that hold the weights.
        admitted: the highest number that one of them was given.
        fenced: whether the sender must join again before it trains.
        needed: number of the first collective whose result a worker that is away may still ask for; workers repeat
            these results if this server is lost.
    """

    news: tuple[str, ...] = ()
    living: tuple[int, ...] = ()
    figures: dict[int, WorkerMetrics] = field(default_factory=dict)
    chief: int = 0
    holding: tuple[int, ...] = ()
    admitted: int = 0
    fenced: bool = False
    needed: int = 0


@dataclass(frozen=True)
class DisconnectWatch(Request):
    """Answered when the session ends; if the server is lost before, the worker learns of it at once."""

    urgent: ClassVar[bool] = True


@dataclass(frozen=True)
class Leave(Request):
    """A worker leaves a session, or somebody who knows reports that it is gone.

    Attributes:
        reason: why; empty for an orderly end.
        final: whether its process is gone, so that it won't be in later sessions of the same job either. ``process`` is
            what the name of that process begins with, then.
        details: for the workers' logs, such as the last lines of a traceback.
    """

    reason: str = ""
    final: bool = False
    details: str = ""


@dataclass(frozen=True)
class Failure:
    """An error as it crosses the wire: class name and text (see :func:`lightning_asgd.errors.error_from`)."""

    error: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)
