"""How a worker enters a session, lives in it and leaves it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning_asgd.core.foundation.process_name import this_process
from lightning_asgd.core.protocol.metrics import WorkerMetrics
from lightning_asgd.core.protocol.request import Request

__all__ = [
    "BOOTSTRAPPED",
    "FIRST_ORDER",
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
    "forget_old_orders",
]

BOOTSTRAPPED = "founded"
"""Name of the :class:`RunMetadata` which shows that a run has weights."""

FIRST_ORDER = "order of "
"""What names of :class:`RunMetadata` begin with that say who opened an epoch."""

_EPOCHS = 4  # whose openers are known: workers are in the same one, or in the one before

PROTOCOL = 35
"""Version of these messages. A server rejects a worker with another version."""


def forget_old_orders(metadata: dict[str, Any]) -> None:
    """Forget who opened earlier epochs, of which a run may have any number."""
    for name in [name for name in metadata if name.startswith(FIRST_ORDER)][:-_EPOCHS]:
        del metadata[name]


@dataclass(frozen=True)
class Policy:
    """What a session does about workers that are silent or gone."""

    silence_s: float = 0.0  # seconds without a heartbeat after which a worker counts as away; 0: never
    min_workers: int = 1  # with fewer of them the session is ended
    abort: bool = False  # whether the session ends as soon as a worker is away or gone
    another_chief: bool = False  # whether another worker may become chief; if not, the chief's end ends the session
    elsewhere_s: float = 0.0  # for how long silent workers may still continue elsewhere; 0: they cannot
    chief: int = 0  # the worker that logs and writes checkpoints at first; as far as the joining worker knows


@dataclass(frozen=True)
class Join(Request):
    """A worker enters a session."""

    world_size: int  # number of workers of the session; 0 in an elastic run, see `Attach`
    policy: Policy = Policy()  # the same from all workers; the first one's counts
    again: bool = False  # whether the worker knows that it was suspected, and starts over with the servers' weights
    # The session that this one continues, with the same workers; workers that are gone there are gone here.
    after: str = ""
    server: int = 0  # number of the server that this is sent to
    restore: bool = False  # whether this server replaces a lost one within the session
    holding: tuple[int, ...] = ()  # in an elastic run, the workers that hold the weights, as far as this one knows
    admitted: int = 0  # the highest number that it knows to be given
    protocol: int = PROTOCOL  # version of the messages the worker speaks
    replaces: bool = False  # whether the process may replace one that has died or is silent
    since: int | None = None  # number of the collective after which such a worker takes part in all


@dataclass(frozen=True)
class Joined:
    """Answer to :class:`Join`."""

    pid: int  # the server's process
    incarnation: int = 0  # how often this worker was declared away
    pushed: int = 0  # number of the worker's latest push that the server has seen
    late: bool = False  # whether the process replaces one that has died or is silent
    collectives: int = 0  # number of the latest collective that was completed, where it does


@dataclass(frozen=True)
class RankHeld:
    """Answer to :class:`Join` with ``replaces`` while another process is the worker."""

    process: str  # its name
    silent_s: float  # seconds since it was last heard


@dataclass(frozen=True)
class Attach:
    """A worker asks to join an elastic run; answered once the run has weights, or this worker is to bring them."""

    session: str  # name of the run
    about: str  # the worker's machine, process and device, as a text for users
    # What the run does about workers that miss their heartbeats; the first worker's policy applies.
    policy: Policy = Policy()
    protocol: int = PROTOCOL  # version of the messages the worker speaks
    process: str = field(default_factory=this_process, kw_only=True)  # see `Request`


@dataclass(frozen=True)
class Attached:
    """Answer to :class:`Attach`."""

    worker: int  # the worker's number, which no other has had or will have
    bootstraps: bool  # whether the run has no weights yet: this worker brings them, and the others wait for that
    notes: dict[str, Any]  # what the workers have published for each other: see `RunMetadata`
    heard: int = 0  # number of events before the worker joined
    chief: int = 0  # the worker that logs and writes checkpoints
    processes: dict[int, str] = field(default_factory=dict)  # of the workers that took part before, by name


@dataclass(frozen=True)
class RunMetadata(Request):
    """What the workers of a run publish for each other, and for workers that join later. The last write wins."""

    name: str  # what it is about; `BOOTSTRAPPED` and `FIRST_ORDER` are those that servers know
    value: Any = None  # a plain value, or an object as `Pickled`; None to read only
    first: bool = False  # whether an earlier value stays, if there is one (put-if-absent)


@dataclass(frozen=True)
class Heartbeat(Request):
    """Sent a few times within :attr:`Policy.silence_s`."""

    urgent: ClassVar[bool] = True  # behind weights it might arrive too late

    heard: int = 0  # number of events that the worker has received
    figures: WorkerMetrics | None = None  # the worker's latest metrics, for the coordinator; None if it has none


@dataclass(frozen=True)
class HeartbeatReply:
    """Answer to :class:`Heartbeat`."""

    news: tuple[str, ...] = ()  # events of workers since the last heartbeat, as texts for users
    living: Collection[int] = ()  # workers that take part; as `Ranks`, here and below
    # The latest metrics of every worker, for the chief, which logs them; empty for the others.
    figures: dict[int, WorkerMetrics] = field(default_factory=dict)
    chief: int = 0  # the worker that logs and writes checkpoints
    holding: Collection[int] = ()  # in an elastic run, the workers that hold the weights
    admitted: int = 0  # the highest number that one of them was given
    fenced: bool = False  # whether the sender must rejoin before it trains
    # The first collective whose result a worker may still ask for; repeated if this server is lost.
    needed: int = 0


@dataclass(frozen=True)
class DisconnectWatch(Request):
    """Answered when the session ends; if the server is lost before, the worker learns of it at once."""

    urgent: ClassVar[bool] = True


@dataclass(frozen=True)
class Leave(Request):
    """A worker leaves a session, or another process reports that it is gone."""

    reason: str = ""  # why; empty for an orderly end
    # Whether its process, whose name begins with `process`, is gone: it is in no later session of the job.
    final: bool = False
    details: str = ""  # for the workers' logs, such as the last lines of a traceback


@dataclass(frozen=True)
class Failure:
    """An error as it crosses the wire: class name and text (see :func:`~lightning_asgd.errors.error_from`)."""

    error: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)
