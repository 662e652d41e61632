"""What crosses the wire between a worker and a server. Knows nothing of how it travels.

Shapes: a shard holds one flat tensor per group of the layout (see :mod:`lightning_asgd.layout`), so every
``tuple[Tensor, ...]`` below has one entry per group, of shape ``(N_g,)`` with the group's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from torch import Tensor

__all__ = [
    "FOUNDED",
    "PROTOCOL",
    "Attach",
    "Attached",
    "Beat",
    "Beaten",
    "Claim",
    "Contribution",
    "Epoch",
    "Exchange",
    "Failure",
    "Figures",
    "Grant",
    "Groups",
    "Held",
    "Initialise",
    "Join",
    "Joined",
    "LayerGradient",
    "Leave",
    "Look",
    "Meeting",
    "Note",
    "Offer",
    "OpenEpoch",
    "Part",
    "Pickled",
    "Policy",
    "Reply",
    "Role",
    "Samples",
    "Settled",
    "ShardState",
    "SharedRef",
    "Verdict",
    "View",
    "Watch",
    "WorkerView",
    "nbytes",
]

FOUNDED = "founded"
"""Name of the :class:`Note` that says that a run has weights."""

_BULKY = 4 << 20  # bytes

PROTOCOL = 15
"""Version of these messages. A server refuses a worker that speaks another one."""


class Role(str, Enum):
    """How a server combines what the workers send for a group of tensors."""

    PARAMETER = "parameter"
    """The algorithm says."""
    AVERAGE = "average"
    """Updates are added, scaled by 1 / live workers (float buffers, such as batch-norm statistics)."""
    LARGEST = "largest"
    """The element-wise largest value is kept (integer buffers, such as ``num_batches_tracked``)."""


Groups = tuple[tuple[Role, str, int], ...]
"""What a vector consists of: per group of tensors its role, dtype name and number of scalars."""


class Verdict(str, Enum):
    """What a server did with a push."""

    APPLIED = "applied"
    REPEATED = "repeated"  # applied before: this delivery changed nothing
    REFUSED = "refused"  # it held a NaN or an infinity
    DROPPED = "dropped"  # a transform did not want it
    NONE = "none"  # nothing was pushed


@dataclass(frozen=True)
class SharedRef:
    """Where another process of the same machine finds a block of shared memory.

    Attributes:
        host: identity of the machine and of its process and network namespaces.
        pid: process that owns the block.
        fd: the block's file descriptor in that process.
        nonce: bytes that stand at the block's start, so that a stale reference is noticed.
        nbytes: size of the block, header included.
    """

    host: str
    pid: int
    fd: int
    nonce: bytes
    nbytes: int


@dataclass(frozen=True)
class Policy:
    """What a session does about workers that are silent or gone.

    Attributes:
        silence_s: seconds without a sign of life after which a worker counts as away; 0: never.
        min_workers: with fewer of them the session is ended.
        abort: whether the session is ended as soon as one is away or gone.
    """

    silence_s: float = 0.0
    min_workers: int = 1
    abort: bool = False


@dataclass(frozen=True)
class Join:
    """A worker enters a session.

    Attributes:
        session: names one run of ``fit``, ``validate``, ``test`` or ``predict``; all its workers send the same.
        worker: global rank.
        world_size: number of workers of the session; 0: they come and go, see :class:`Attach`.
        policy: the same from all workers; the first one's counts.
        again: whether the worker was told that it counts as away, and begins anew with the servers' weights.
        after: the session that this one goes on from, with the same workers; who is gone there is gone here.
        server: number of the server that this is sent to.
        restore: whether this server takes the place of one that was lost in the midst of the session.
        holding: where workers come and go, those that hold the weights, as far as this one knows.
        admitted: the highest number that it knows to be given.
        protocol: version of the messages the worker speaks.
    """

    session: str
    worker: int
    world_size: int
    policy: Policy = Policy()
    again: bool = False
    after: str = ""
    server: int = 0
    restore: bool = False
    holding: tuple[int, ...] = ()
    admitted: int = 0
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Joined:
    """Answer to :class:`Join`.

    Attributes:
        pid: the server's process.
        term: how often this worker was declared away.
    """

    pid: int
    term: int = 0


@dataclass(frozen=True)
class Attach:
    """A worker asks to take part in a run whose workers come and go.

    Answered once the run has weights, or once this worker is to bring them.

    Attributes:
        session: name of the run.
        about: what the worker is, for people: its machine, process and device.
        policy: what the run does about workers that are silent; the first worker's counts.
        protocol: version of the messages the worker speaks.
    """

    session: str
    about: str
    policy: Policy = Policy()
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Attached:
    """Answer to :class:`Attach`.

    Attributes:
        worker: the worker's number, which no other has had or will have.
        founder: whether the run has no weights yet: this worker brings them, and the others wait for that.
        notes: what the workers have told each other: see :class:`Note`.
        heard: number of news that were there before.
        chief: the worker that logs and writes checkpoints.
    """

    worker: int
    founder: bool
    notes: dict[str, Any]
    heard: int = 0
    chief: int = 0


@dataclass(frozen=True)
class Note:
    """What the workers of a run tell each other, and those who come later. The latest word counts.

    Attributes:
        session: name of the run.
        worker: number of the sender.
        name: what it is about; :data:`FOUNDED` is the one that servers heed.
        value: a plain value, or an object as :class:`Pickled`; None to ask only.
        first: whether what was said before counts, if anything was.
    """

    session: str
    worker: int
    name: str
    value: Any = None
    first: bool = False


@dataclass(frozen=True)
class Figures:
    """What a worker has done in a fit until now. Rates are differences of two; see :mod:`lightning_asgd.figures`.

    All are sums since training began, unless something else is said. Seconds of computing and of the three kinds of
    standing still add up to ``at_s``, together with what validations, checkpoints and other callbacks took.

    Attributes:
        began: when training began, in seconds since 1970 on the worker's clock.
        at_s: seconds from then until these figures were taken.
        epoch: epochs trained, with the fraction of the present one; not a sum.
        samples: samples trained.
        batches: batches trained.
        steps: optimizer steps taken.
        loss_sum: training loss of the batches that had a finite one.
        losses: number of these batches.
        train_s: seconds of computing.
        exchange_wait_s: seconds in which training stood still for the servers' answers.
        sync_wait_s: seconds in which it stood still at sync points, for the servers and the other workers.
        data_wait_s: seconds in which it stood still for data.
        exchanges: exchanges that were answered.
        pushes: those of them with an update.
        refused: updates that a server refused.
        repeated: updates that a server had applied before.
        round_trip_s: seconds from the messages to the merging of their answers.
        bytes_pushed: bytes of updates.
        bytes_fetched: bytes of weights.
        staleness_sum: staleness, in versions, of all pushes.
        staleness_max: the largest; not a sum.
        staleness: pushes by staleness; above 15 by the power of two below it.
        nsync: optimizer steps between two exchanges, as of now.
        distance: norm of the worker's parameters minus the servers', when it was measured last; 0 before.
    """

    began: float = 0.0
    at_s: float = 0.0
    epoch: float = 0.0
    samples: int = 0
    batches: int = 0
    steps: int = 0
    loss_sum: float = 0.0
    losses: int = 0
    train_s: float = 0.0
    exchange_wait_s: float = 0.0
    sync_wait_s: float = 0.0
    data_wait_s: float = 0.0
    exchanges: int = 0
    pushes: int = 0
    refused: int = 0
    repeated: int = 0
    round_trip_s: float = 0.0
    bytes_pushed: int = 0
    bytes_fetched: int = 0
    staleness_sum: float = 0.0
    staleness_max: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    nsync: int = 0
    distance: float = 0.0


@dataclass(frozen=True)
class Beat:
    """A sign of life, sent a few times within :attr:`Policy.silence_s`.

    Attributes:
        session: session of the worker.
        worker: global rank of the sender.
        heard: number of news that the worker has been told.
        figures: the worker's latest, for the coordinator; None if it takes none.
    """

    urgent: ClassVar[bool] = True  # behind weights it might come too late

    session: str
    worker: int
    heard: int = 0
    figures: Figures | None = None


@dataclass(frozen=True)
class Beaten:
    """Answer to :class:`Beat`.

    Attributes:
        news: what became of workers since the last time, for people.
        living: workers that take part.
        figures: the latest ones of every worker, for the chief, which logs them; empty for the others.
        chief: the worker that logs and writes checkpoints.
        holding: where workers come and go, those that hold the weights.
        admitted: the highest number that one of them was given.
        lapsed: whether the sender must join again before it trains.
    """

    news: tuple[str, ...] = ()
    living: tuple[int, ...] = ()
    figures: dict[int, Figures] = field(default_factory=dict)
    chief: int = 0
    holding: tuple[int, ...] = ()
    admitted: int = 0
    lapsed: bool = False


@dataclass(frozen=True)
class Initialise:
    """Lay out a server's shard (every worker) and fill it (the first worker).

    Attributes:
        session: session the shard belongs to.
        worker: global rank of the sender.
        groups: ``(role, dtype name, number of scalars in this shard)`` per group.
        algorithm: what the server does with updates (:class:`lightning_asgd.algorithms.Algorithm`).
        weights: initial values, from one worker only; None from the others.
        version: version to start from, more than 0 when resumed from a checkpoint.
        shared: block through which this worker will exchange, None for by-value messages.
        fragment: number of the part of the module that the shard holds its share of.
        compression: code of what is sent by value (:class:`lightning_asgd.compression.Compression`); None for none.
    """

    session: str
    worker: int
    groups: Groups
    algorithm: Any
    weights: tuple[Tensor, ...] | None = None
    version: int = 0
    shared: SharedRef | None = None
    fragment: int = 0
    compression: Any = None


@dataclass(frozen=True)
class Exchange:
    """One push, one fetch, or a push with the fetch that answers it.

    Attributes:
        session: session the shard belongs to.
        worker: global rank of the sender.
        seq: number of this worker's push, counted from 1; a server applies each number once.
        base_version: version of the shard that the update is based on.
        push: whether an update is sent.
        fetch: whether the weights are wanted back.
        update: the update by value, per group a tensor or what a compression has made of it; None if nothing is pushed
            or if it lies in the shared block.
        steps: optimizer steps in the update.
        lr: the worker's learning rate.
        speed: the worker's optimizer steps per second; 0 if it does not know yet.
        nsync: steps between two exchanges, as the worker was told by the user.
        may_wait: whether the answer may be held back until others have come so far.
        rest: whether the worker stops at a sync point now, so that nobody waits for it.
        shared: whether update and answer go through the shared block.
        sane: whether the worker has seen, where the update was in its cache, that all of it is finite and not absurdly
            large; it counts for shared memory only.
        fragment: number of the part of the module that is exchanged.
        full: whether the weights are wanted as they are, not compressed.
        common: at a sync point the name of the weights of the last one, as far as this worker holds them, else empty:
            those are wanted that all take; None elsewhere. See ``streams.Common``.
        epoch: the epoch that the worker claims units of; empty if it does not.
        units: units of it that the worker has trained since it began or came back, those of this push included.
        batch: samples of one of the worker's batches; 0 if it does not know.
    """

    session: str
    worker: int
    seq: int
    base_version: int
    push: bool
    fetch: bool
    update: tuple[Any, ...] | None = None
    steps: int = 0
    lr: float = 0.0
    speed: float = 0.0
    nsync: int = 0
    may_wait: bool = False
    rest: bool = False
    shared: bool = False
    sane: bool = False
    fragment: int = 0
    full: bool = False
    common: str | None = None
    epoch: str = ""
    units: int = 0
    batch: int = 0


def nbytes(parts: Sequence[Tensor | Sequence[Tensor]]) -> int:
    """Bytes of an update or of weights as they are sent: a tensor per group, or a coded group's tensors."""
    return sum(part.nbytes if isinstance(part, Tensor) else sum(tensor.nbytes for tensor in part) for part in parts)


@dataclass(frozen=True)
class Reply:
    """Answer to :class:`Exchange`.

    Attributes:
        version: number of updates the shard has applied, this one included.
        staleness: updates applied between the fetch the push was based on and the push; 0 without a push.
        verdict: what became of the push.
        weights: the shard by value, as the update; None if not asked for or if it lies in the shared block.
        nsync: optimizer steps until the worker's next exchange; 0 if the server has no wish.
        busy_s: seconds that the server was busy with it.
        pushes: per worker, the latest push that the weights hold; empty if they were not asked for.
        epoch: the epoch that ``done`` is about: that of the message, or in a run whose workers come and go the latest.
        done: ranges of units of it whose updates the weights hold.
        terms: how often each worker was declared away; those that never were are left out.
        left: workers that are gone, and why.
    """

    version: int
    staleness: int
    verdict: Verdict
    weights: tuple[Any, ...] | None = None
    nsync: int = 0
    busy_s: float = 0.0
    pushes: dict[int, int] = field(default_factory=dict)
    epoch: str = ""
    done: tuple[tuple[int, int], ...] = ()
    terms: dict[int, int] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)

    @property
    def bulky(self) -> bool:
        """Whether it is worth a message more not to keep it until the next call."""
        return self.weights is not None and nbytes(self.weights) > _BULKY


@dataclass(frozen=True)
class Held:
    """What a worker has of a shard whose server was lost.

    Attributes:
        fragment: number of the part of the module.
        version: of the weights.
        weights: as they were fetched last, one tensor per group.
        pushes: see :class:`Reply`.
        epoch: the epoch that ``done`` is about.
        done: see :class:`Reply`.
    """

    fragment: int
    version: int
    weights: tuple[Tensor, ...]
    pushes: dict[int, int]
    epoch: str = ""
    done: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Part:
    """A worker's part of the present epoch.

    Attributes:
        epoch: which one.
        granted: ranges of units, in the order in which they were granted.
        trained: number of these units that it has trained.
        served: the last segment of which it was granted something.
    """

    epoch: Epoch
    granted: tuple[tuple[int, int], ...]
    trained: int
    served: int


@dataclass(frozen=True)
class Watch:
    """Answered when the session ends; if the server is lost before, the worker learns of it at once.

    Attributes:
        session: session of the worker.
        worker: global rank of the sender.
    """

    urgent: ClassVar[bool] = True

    session: str
    worker: int


@dataclass(frozen=True)
class Offer:
    """What a worker knows of a server that was lost, for the one in its place. Answered when all have told.

    Attributes:
        session: session of the worker.
        worker: global rank of the sender.
        shards: what it holds, per fragment.
        answered: number of its latest collective that was answered.
        part: of the present epoch, if there is one.
        term: how often the lost server had declared this worker away when it joined last.
        terms: see :class:`Reply`, as far as this worker knows.
        left: likewise.
        notes: the last of every :class:`Note` that it knows, for the coordinator.
    """

    session: str
    worker: int
    shards: tuple[Held, ...]
    answered: int = 0
    part: Part | None = None
    term: int = 0
    terms: dict[int, int] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settled:
    """A worker has sent again what the weights do not hold. Answered when all have.

    Attributes:
        session: session of the worker.
        worker: global rank of the sender.
    """

    session: str
    worker: int


@dataclass(frozen=True)
class ShardState:
    """Ask for what a shard keeps beside its weights, or put it back.

    Attributes:
        session: session the shard belongs to.
        worker: global rank of the sender.
        fragment: number of the part of the module.
        state: what was answered when a checkpoint was written; None to ask.
    """

    session: str
    worker: int
    fragment: int = 0
    state: Any = None


@dataclass(frozen=True)
class Look:
    """What is going on? Anybody may ask the coordinator, who need not take part. Answered with :class:`View`."""

    urgent: ClassVar[bool] = True


@dataclass(frozen=True)
class WorkerView:
    """What the coordinator knows of a worker.

    Attributes:
        worker: its number.
        about: its machine, process and device, where it came by itself.
        away: why nobody waits for it; empty if it takes part.
        silent_s: seconds since its last sign of life.
        pace_s: seconds that it needs for an optimizer step; 0 if that is not known.
        trained: steps of the present epoch that it has trained.
        figures: its latest, if it is monitored.
    """

    worker: int
    about: str
    away: str
    silent_s: float
    pace_s: float
    trained: int
    figures: Figures | None = None


@dataclass(frozen=True)
class View:
    """What a server knows of its session.

    Attributes:
        session: its name; empty if there is none.
        version: updates that the shard has applied.
        refused: updates that held NaN, infinity or absurdly large values.
        chief: the worker that logs and writes checkpoints; None if there is none.
        epoch: number of the latest epoch; None before the first.
        done: its optimizer steps whose updates have been applied, in batches of the common size.
        steps: its steps, likewise.
        workers: those that take part or may come back.
        news: what became of workers lately, for people.
    """

    session: str = ""
    version: int = 0
    refused: int = 0
    chief: int | None = None
    epoch: int | None = None
    done: int = 0
    steps: int = 0
    workers: tuple[WorkerView, ...] = ()
    news: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerGradient:
    """One layer's gradient, to be answered with the mean of all workers'.

    Attributes:
        session: session of the worker.
        worker: global rank of the sender.
        phase: number of sync points that the worker has passed.
        step: number of the step since the last one.
        layer: number of the layer.
        gradient: shape ``(n,)``, the layer's parameters one after the other; None: the worker ends the phase.
    """

    session: str
    worker: int
    phase: int
    step: int
    layer: int
    gradient: Tensor | None


@dataclass(frozen=True)
class Pickled:
    """An object that workers make and open. To servers, which need not have its class, it is bytes."""

    data: bytes


@dataclass(frozen=True)
class Meeting:
    """What a worker says at a sync point.

    Attributes:
        moved: whether anything was pushed since the last one.
        should_stop: whether training is to end.
        grown: whether there are trainable parameters that are not exchanged.
        checkpoints: what this worker's checkpoint callbacks know of the files.
        figures: this worker's.
        versions: per server, of the weights that this worker has taken already, since it knew that all had pushed;
            None if it has not.
    """

    moved: bool
    should_stop: bool
    grown: bool
    checkpoints: list[Any]
    figures: Figures | None = None
    versions: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Contribution:
    """A worker's part in a collective.

    Attributes:
        session: session of the collective.
        worker: global rank of the sender.
        seq: number of this worker's collective in the session, counted from 1.
        kind: ``"barrier"``, ``"broadcast"``, ``"all_gather"``, ...: must be the same on all workers.
        name: what the caller calls it; must be the same on all workers.
        payload: a plain value, a tensor, or an object as :class:`Pickled`.
        source: the one worker whose payload is delivered; None: everybody's.
        target: the one worker that it is delivered to, the others get nothing; None: everybody.
        timeout_s: seconds after which the servers give up on the missing workers.
        answer: what the worker was answered by a coordinator that was lost since: it does not wait any more, and the
            others are to get the same. None if it waits.
    """

    session: str
    worker: int
    seq: int
    kind: str
    name: str
    payload: Any = None
    source: int | None = None
    target: int | None = None
    timeout_s: float = 1800.0
    answer: dict[int, Any] | None = None


@dataclass(frozen=True)
class Epoch:
    """What workers share of an epoch. A unit is a sample; or a batch, where a sampler of the user's own makes them.

    Attributes:
        key: which epoch of which fit it is; it ends with the epoch's number.
        units: number of units.
        ends: the numbers of units after which all workers meet, ascending; the last is ``units``.
        order: digest of the units in their order, to compare workers by.
        done: ranges of units that had been trained when the checkpoint was written that the fit resumes from.
        step: units of one optimizer step, in the batch size that all count in.
    """

    key: str
    units: int
    ends: tuple[int, ...]
    order: bytes = b""
    done: tuple[tuple[int, int], ...] = ()
    step: int = 1

    @property
    def number(self) -> int:
        """The epoch's."""
        return int(self.key.rpartition("/")[2])


@dataclass(frozen=True)
class OpenEpoch:
    """A worker begins an epoch, or wants to know how far it is; answered with the ranges of units that are done.

    Where workers meet, the first claim begins it: see :class:`Claim`.

    Attributes:
        session: session of the worker.
        worker: global rank of the sender.
        epoch: the first worker's says what it is, the others' must be the same.
    """

    session: str
    worker: int
    epoch: Epoch


@dataclass(frozen=True)
class Claim:
    """A worker asks for units of the present epoch.

    Attributes:
        session: session of the worker.
        worker: global rank of the sender.
        key: which epoch.
        segment: number of times that all have met in it.
        trained: units that the worker has trained in it since it began, or came back.
        applied: those of them whose updates the servers have.
        pace: seconds that a unit takes it; 0 if it does not know yet.
        trip: seconds in which it is answered.
        flush: seconds in which it pushes what is left when it has trained all that it was granted.
        wait: whether the answer is to be held back until there is a unit for it, or the segment is over.
        stop: whether it wants no more, and gives back what it has not trained.
        size: units of one of its optimizer steps.
        opens: the epoch, with the first claim in it, where workers meet: see :class:`OpenEpoch`.
    """

    urgent: ClassVar[bool] = True  # training stops without the answer: it must not queue behind weights

    session: str
    worker: int
    key: str
    segment: int
    trained: int
    applied: int
    pace: float
    trip: float = 0.0
    flush: float = 0.0
    wait: bool = False
    stop: bool = False
    size: int = 1
    opens: Epoch | None = None


@dataclass(frozen=True)
class Grant:
    """Answer to :class:`Claim`.

    Attributes:
        first: number of the first unit granted.
        last: one past the last; equal to ``first`` if there is none for this worker.
        over: whether all units of the segment are trained and applied.
        progress: units that all have trained so far, as far as is known.
        ratio: units that all train while this worker trains one.
        void: whether the units have been trained by others, and what the worker makes of them is not wanted: one that
            comes late needs a batch to notice that a segment is over.
        final: whether there is probably nothing more for this worker in the segment: when it has trained this it pushes
            the rest, and waits.
        terms: see :class:`Reply`.
        left: see :class:`Reply`.
    """

    first: int = 0
    last: int = 0
    over: bool = False
    progress: float = 0.0
    ratio: float = 1.0
    void: bool = False
    final: bool = False
    terms: dict[int, int] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Samples:
    """Ask for the copies of the weights that the algorithm had the shard keep.

    The answer is a list of ``(version, tuple of one tensor per group)``, oldest first.

    Attributes:
        session: session the shard belongs to.
        worker: global rank of the sender.
    """

    session: str
    worker: int


@dataclass(frozen=True)
class Leave:
    """A worker leaves a session, or somebody who knows reports that it is gone.

    Attributes:
        session: session to leave.
        worker: global rank of the one who leaves.
        reason: why; empty for an orderly end.
        final: whether its process is gone, so that it won't be in later sessions of the same job either.
    """

    session: str
    worker: int
    reason: str = ""
    final: bool = False


@dataclass(frozen=True)
class Failure:
    """An error as it crosses the wire: class name and text (see :func:`lightning_asgd.errors.error_from`)."""

    error: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)
