"""How a worker enters a session, lives in it and leaves it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning_asgd.core.foundation.process_name import this_process
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
    "WorkerMetrics",
    "forget_old_orders",
]


@dataclass(frozen=True)
class WorkerMetrics:
    """What a worker has done in a fit until now: sums since training began, unless stated otherwise.

    Rates are differences of two; see :mod:`lightning_asgd.monitor.metric_definitions`. Seconds of computing and of
    the three kinds of standing still add up to ``at_s``, together with what validations, checkpoints and other
    callbacks took.
    """

    began: float = 0.0  # when training began, in seconds since 1970 on the worker's clock
    at_s: float = 0.0  # seconds from then until these metrics were taken
    epoch: float = 0.0  # epochs trained, including the fraction of the current one; not a sum
    samples: int = 0  # samples trained
    tokens: int = 0  # tokens trained; 0 if they are not counted
    batches: int = 0  # batches trained
    steps: int = 0  # optimizer steps taken
    loss_sum: float = 0.0  # training loss of the batches that had a finite one
    losses: int = 0  # number of these batches
    train_s: float = 0.0  # seconds of computing
    exchange_wait_s: float = 0.0  # seconds in which training waited for the servers' replies
    sync_wait_s: float = 0.0  # seconds in which it waited at sync points, for the servers and the other workers
    data_wait_s: float = 0.0  # seconds in which it waited for data
    exchanges: int = 0  # exchanges that were answered
    pushes: int = 0  # those of them with an update
    refused: int = 0  # updates that a server rejected
    repeated: int = 0  # updates that a server had applied before
    round_trip_s: float = 0.0  # seconds from sending the messages to merging the replies
    bytes_pushed: int = 0  # bytes of updates
    bytes_fetched: int = 0  # bytes of weights
    staleness_sum: float = 0.0  # staleness, in versions, of all pushes
    staleness_max: int = 0  # the largest; not a sum
    # Pushes by staleness; above 15 by the power of two below it.
    staleness: dict[int, int] = field(default_factory=dict)
    nsync: int = 0  # current number of optimizer steps between two exchanges
    distance: float = 0.0  # norm of the worker's parameters minus the servers', when it was measured last; 0 before
    outer_gain: float = 0.0  # by how much momentum lengthened the servers' latest update; 0 if that is not known
    gain: float = 0.0  # by how much the latest step was lengthened; 0 where no optimizer's steps are
    rows_read: int = 0  # rows of served tables that batches used, each once per batch
    rows_fetched: int = 0  # rows that were fetched for them
    row_ages: int = 0  # steps since the rows that batches used had been fetched


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
