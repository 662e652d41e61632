"""What an algorithm is: a rule for one shard, seen as flat vectors. No network, no threads, no clock, no Lightning.

A worker's *payload* arrives at the server, the transforms weigh and change it, the algorithm applies it to the weights,
and the *answer* goes back. Everything is in place on tensors of shape ``(n,)``; servers call it chunk by chunk, so a
rule must work element by element unless it says that it is :attr:`Algorithm.per_tensor`, or not
:attr:`Algorithm.chunked`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_asgd.core.algorithms.compression import Compression
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import Configurable

__all__ = ["MAX_BATCH", "Algorithm", "Answer", "Payload", "Push", "Run", "SampleShares", "Table", "Transform"]

MAX_BATCH = 2.0**53  # samples or tokens that no step trains
_ONE = 1 << 52  # sums of sizes are whole numbers of this part: exact for any from 1 on, whatever their order


class Payload(str, Enum):
    """What a worker pushes for its parameters."""

    DELTA = "delta"
    """Its weights minus those that it has agreed with the servers so far: works with any optimizer."""
    GRADIENT = "gradient"
    """The gradients of its steps since the last push, added up: for optimizers on the server."""
    WEIGHTS = "weights"
    """The weights themselves."""
    LAYERS = "layers"
    """Each layer's gradient as soon as it exists."""
    NONE = "none"
    """Nothing: the weights are shared already."""


class Answer(str, Enum):
    """What a worker gets back for its parameters when it pushes and fetches at once."""

    WEIGHTS = "weights"
    """The server's weights right after its push; the worker continues from them."""
    FORCE = "force"
    """What the rule left in the update; the worker subtracts it."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """What a rule may know of a push beside its tensors.

    Attributes:
        worker: global rank of the sender.
        seq: number of its push in the session, from 1.
        payload: what kind of update it is.
        staleness: versions applied between the fetch it is based on and now.
        steps: optimizer steps in it.
        lr: learning rate of the worker's first parameter group.
        live: number of workers that take part.
        weight: samples of the worker's batches, or what its steps have trained in samples or tokens, divided by the
            mean of all that take part: 1 if all are equal.
        count: number of pushes combined into the update; their mean, by these weights, is given.
        version: of the shard, before this update.
        scale: what one of several aggregated pushes is multiplied with; for :meth:`Transform.merge`, their weight.
        tensor: the module's name of the tensor that it is a part of, for rules that are called tensor by tensor.
    """

    worker: int = 0
    seq: int = 1
    payload: Payload = Payload.DELTA
    staleness: int = 0
    steps: int = 1
    lr: float = 0.0
    live: int = 1
    weight: float = 1.0
    count: int = 1
    version: int = 0
    scale: float = 1.0
    tensor: str = ""


@dataclass
class Table:
    """What a shard knows of the workers.

    Attributes:
        living: workers that take part.
        resting: quiescent workers, at a sync point: no worker waits for them.
        clocks: pushes of each since the last sync point.
        steps: optimizer steps of each in the session.
        speeds: optimizer steps per second that each reports.
        batches: samples in a batch of each, or what each trains in a step; where known.
        gathered: workers whose pushes are being aggregated.
        count: number of these pushes.
        arrivals: when the first push of each of these workers came, in seconds.
        now: the time, on the same clock.
        nsync: optimizer steps between two exchanges, as the user has set them.
    """

    living: set[int] = field(default_factory=set)
    resting: set[int] = field(default_factory=set)
    clocks: Counter[int] = field(default_factory=Counter)
    steps: Counter[int] = field(default_factory=Counter)
    speeds: dict[int, float] = field(default_factory=dict)
    batches: dict[int, float] = field(default_factory=dict)
    gathered: set[int] = field(default_factory=set)
    count: int = 0
    arrivals: list[float] = field(default_factory=list)
    now: float = 0.0
    nsync: int = 0

    @property
    def active(self) -> set[int]:
        """The workers that train now."""
        return self.living - self.resting

    def catch_up(self, workers: set[int]) -> None:
        """Give workers that return the clock of the slowest other one, so that none waits for them to catch up."""
        slowest = min((self.clocks[worker] for worker in self.active - workers), default=0)
        self.clocks |= Counter(dict.fromkeys(workers, slowest))


class SampleShares:
    """The workers that a mean is over, and the sum of their batch sizes: no push needs a look at all of them."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # by worker; 0 if unknown
        self._sum = 0
        self._unknown = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def put(self, worker: int, size: float | None) -> None:
        """Count a worker with the size of its batches, 0 if it has not reported it; with None count it no longer."""
        before = self._sizes.pop(worker, None)
        if before is not None:
            self._sum -= before
            self._unknown -= not before
        if size is not None:
            self._sizes[worker] = exact = round(size * _ONE)
            self._sum += exact
            self._unknown += not exact

    def weight(self, size: float) -> float:
        """What the samples of a worker have to be weighed with for those of all to count the same.

        A worker that has not reported a batch size is taken to have the same as this one.
        """
        mine = round(size * _ONE)
        total = self._sum + self._unknown * mine
        return mine * len(self) / total if mine and total else 1.0


@dataclass(frozen=True)
class Run:
    """Facts that an algorithm may check before a fit.

    Attributes:
        workers: number of workers.
        nodes: number of machines.
        nsync: optimizer steps between two exchanges.
        optimizers: the worker's optimizers.
        precision: the precision, by Lightning's name.
    """

    workers: int
    nodes: int = 1
    nsync: int = 1
    optimizers: Sequence[Any] = ()
    precision: str = "32-true"


@dataclass(frozen=True)
class Transform(Configurable):
    """Changes, delays or drops pushes on the server before the algorithm applies them. Does nothing by itself."""

    slots: ClassVar[tuple[str, ...]] = ()
    """Names of the vectors that it keeps per shard, initially zero."""
    per_tensor: ClassVar[bool] = False
    """Whether it is called tensor by tensor, with slots for each, and changes the mean of aggregated pushes. Transforms
    after it see what :meth:`change` has made of a push."""
    backup: ClassVar[bool] = False
    """Whether it uses ``slots["backup"]``: the weights in the latest reply to the push's worker."""
    gathers: ClassVar[bool] = False
    """Whether it aggregates pushes until :meth:`ready`."""
    waits: ClassVar[bool] = False
    """Whether it may block replies."""
    runs_ahead: ClassVar[bool] = False
    """Whether workers train on while their replies are blocked, until their next exchange of the same fragment."""
    timed: ClassVar[bool] = False
    """Whether :meth:`ready` depends on the time."""
    holds_at_start: ClassVar[bool] = False
    """Whether workers send a request, which may be blocked, before their first step after a sync point."""
    payloads: ClassVar[tuple[Payload, ...]] = (Payload.DELTA, Payload.GRADIENT)
    """The payloads that it supports."""

    def start(self, weights: Tensor) -> dict[str, Tensor]:
        """Create what it keeps: for each tensor if it is ``per_tensor``, else for each shard."""
        return {name: torch.zeros_like(weights) for name in self.slots}

    def weigh(self, push: Push) -> float | None:
        """The factor of the update; None to drop it."""
        return 1.0

    def share(self, batch: float, steps: int) -> float:
        """The weight of a push in the mean of aggregated ones.

        Args:
            batch: samples of a batch, or what a step has trained in samples or tokens.
            steps: optimizer steps in the push.
        """
        return batch

    def change(self, update: Tensor, weights: Tensor, slots: dict[str, Tensor], push: Push) -> None:
        """Change the update in place."""

    def merge(self, mean: Tensor, slots: dict[str, Tensor], push: Push) -> None:
        """Change a tensor's mean of the aggregated pushes in place, before the algorithm applies it."""

    def forget(self, slots: dict[str, Tensor]) -> None:
        """Drop what it keeps of aggregated pushes, which are dropped. Only for transforms that are ``per_tensor``."""

    def ready(self, table: Table) -> bool:
        """Whether to apply the aggregated pushes now."""
        return True

    def holds(self, worker: int, table: Table) -> bool:
        """Whether to block the reply to a worker for now."""
        return False

    def period(self, worker: int, table: Table, nsync: int) -> int:
        """Optimizer steps until the worker's next exchange."""
        return nsync

    def check(self, run: Run) -> None:
        """Raise a :class:`ConfigurationError` if the transform does not suit the run."""


@dataclass(frozen=True)
class Algorithm(Configurable):
    """A rule: what workers push, how a shard changes, what they get back.

    Args:
        transforms: transforms of a push before it is applied, in this order.

    Raises:
        ConfigurationError: the transforms do not fit the algorithm, or each other.
    """

    transforms: Sequence[Transform] = field(default=(), kw_only=True)

    payload: ClassVar[Payload] = Payload.DELTA
    answer: ClassVar[Answer] = Answer.WEIGHTS
    overlap: ClassVar[bool] = True
    """The default of ``overlap``: whether workers train while an exchange is in flight."""
    averages: ClassVar[bool] = False
    """Whether all workers continue from the mean of their weights, as ``nsync="restarted"`` needs."""
    always: ClassVar[tuple[Transform, ...]] = ()
    """Transforms that are part of the algorithm; they come last."""

    def __post_init__(self) -> None:
        given, name = tuple(self.transforms), type(self).__name__
        for transform in given:
            if not isinstance(transform, Transform):
                raise ConfigurationError(
                    f"{name} was given the transform {transform!r}. Expected objects of lightning_asgd.algorithms, "
                    "such as ScaleByStaleness()."
                )
            if self.payload not in transform.payloads:
                raise ConfigurationError(
                    f"{type(transform).__name__} cannot be used with {name}: its workers push {_PLURAL[self.payload]}. "
                    f"Expected {' or '.join(_PLURAL[p] for p in transform.payloads)}."
                )
        if sum(t.gathers for t in (*given, *self.always)) > 1:
            names = ", ".join(type(t).__name__ for t in (*given, *self.always) if t.gathers)
            raise ConfigurationError(f"{name} was given several transforms that aggregate: {names}. Expected one.")
        object.__setattr__(self, "transforms", (*(t for t in given if t not in self.always), *self.always))
        alone = [type(t).__name__ for t in given if t.per_tensor]
        if alone and not any(t.gathers for t in self.transforms):
            raise ConfigurationError(
                f"{name} was given {alone[0]}, which merges aggregated pushes, and no transform that aggregates. "
                "Expected an algorithm in rounds, such as DiLoCo or LocalSGD, or a transform such as SoftSync."
            )

    @property
    def waits(self) -> bool:
        """Whether replies may be blocked for other workers."""
        return any(t.waits for t in self.transforms)

    @property
    def lockstep(self) -> bool:
        """Whether workers wait for blocked replies, so that all advance together."""
        return any(t.waits and not t.runs_ahead for t in self.transforms)

    @property
    def timed(self) -> bool:
        """Whether aggregated pushes may become due as time passes."""
        return any(t.timed for t in self.transforms)

    @property
    def chunked(self) -> bool:
        """Whether :meth:`apply` may be called with pieces of the vectors."""
        return True

    @property
    def per_tensor(self) -> bool:
        """Whether the server calls :meth:`start` and :meth:`apply` for each tensor of the module by itself.

        Of a tensor whose scalars lie on two servers, each calls them for its part.
        """
        return False

    @property
    def knows_tensors(self) -> bool:
        """Whether servers have to know which scalars belong to which tensor of the module."""
        return self.per_tensor or any(t.per_tensor for t in self.transforms)

    @property
    def by_rows(self) -> bool:
        """Whether an update of a table of embeddings may hold only the rows that a worker has changed.

        By default, if nothing is kept, and a weight whose update is zero stays as it is, which is tried.
        """
        plain = self.compressible and self.chunked and self.fragments == 1 and self.mix is None and self.code is None
        if not plain or self.keeps_state or self.knows_tensors or any(t.backup for t in self.transforms):
            return False
        weights, update, push = torch.ones(1), torch.zeros(1), Push(live=2, lr=0.1)
        for transform in self.transforms:
            transform.change(update, weights, {}, push)
        self.apply(weights, update, {}, push)
        return weights.item() == 1

    @property
    def compressible(self) -> bool:
        """Whether pushes may be compressed, since what one loses is added to the next."""
        return self.payload in (Payload.DELTA, Payload.GRADIENT) and self.answer is Answer.WEIGHTS

    @property
    def code(self) -> Compression | None:
        """The codec of pushes, where it is part of the algorithm; None to let users choose a compression."""
        return None

    @property
    def fragments(self) -> int:
        """Parts of the module that are exchanged one after the other, each every ``nsync`` steps."""
        return 1

    @property
    def mix(self) -> float | None:
        """Fraction of its own weights that a worker keeps when it merges a reply; None to rebase its later steps."""
        return None

    @property
    def merge_after(self) -> int:
        """Fewest steps between a push and the merge of its reply."""
        return 0

    def start(self, weights: Tensor) -> dict[str, Any]:
        """Create the state that is kept per vector beside the weights: tensors like these by name.

        It is anything if :attr:`per_tensor` or not :attr:`chunked`. The ``weights``, of shape ``(n,)``, are the tensor
        that :meth:`apply` will be given.
        """
        return {}

    def save(self, slots: dict[str, Any]) -> dict[str, Any]:
        """The part of :meth:`start`'s result for a checkpoint. The caller copies it."""
        return dict(slots)

    def load(self, slots: dict[str, Any], saved: dict[str, Any]) -> None:
        """Restore what :meth:`save` returned."""
        for name, tensor in slots.items():
            tensor.copy_(saved[name])

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """Change the weights in place.

        Args:
            weights: shape ``(n,)``.
            update: the pushed vector, shape ``(n,)``; may be overwritten.
            slots: what :meth:`start` returned.
            push: further facts of the push.
        """
        raise NotImplementedError

    def apply_rows(self, weights: Tensor, rows: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """Change some rows of a table in place, if :attr:`by_rows`; see :meth:`apply`.

        The weights have the shape ``(n, width)``, the rows' numbers ``(k,)``, each once, the update ``(k, width)``.
        """
        changed = weights[rows]
        self.apply(changed.view(-1), update.reshape(-1), slots, push)
        weights[rows] = changed

    def gain(self, slots: dict[str, Any]) -> float:
        """By how much momentum lengthened the latest update, along itself; 0 if that is not known."""
        return 0.0

    def ahead(self, push: Push) -> float:
        """What part of a push is added to the weights that answer it. :meth:`apply` must not change the update then."""
        return 0.0

    @property
    def leaves_weights(self) -> bool:
        """Whether a reply is the shard's weights, or :meth:`ahead` of them: it can restore a lost shard."""
        plain = self.payload in (Payload.DELTA, Payload.GRADIENT) and self.answer is Answer.WEIGHTS
        return plain and not self.waits and not any(t.gathers for t in self.transforms)

    @property
    def keeps_state(self) -> bool:
        """Whether a shard keeps state beside its weights, which no worker has."""
        slots = any(t.slots for t in self.transforms) or self.start(torch.zeros(1))
        return bool(slots or self.keep_at_most)

    def keeps(self, version: int) -> bool:
        """Whether a shard keeps a copy of its weights at a version."""
        return False

    @property
    def keep_at_most(self) -> int:
        """Most copies that are kept; the oldest are dropped."""
        return 0

    def period(self, nsync: int, step: int) -> int:
        """Optimizer steps between two exchanges for a worker that has taken ``step`` of them."""
        return nsync

    def chains(self, workers: int) -> int:
        """Among how many workers the potential is divided that their samplers draw from; for sampling only."""
        return 1

    def check(self, run: Run) -> None:
        """Raise a :class:`ConfigurationError` if the algorithm does not suit the run."""
        for transform in self.transforms:
            transform.check(run)


_PLURAL = {
    Payload.DELTA: "differences of weights",
    Payload.GRADIENT: "gradients",
    Payload.WEIGHTS: "weights",
    Payload.LAYERS: "each layer's gradient at once",
    Payload.NONE: "nothing",
}
