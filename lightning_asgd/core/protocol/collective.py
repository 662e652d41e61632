"""Messages of workers in collectives and at sync points."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_asgd.core.protocol.request import Count, Request, Seconds
from lightning_asgd.core.protocol.session import WorkerMetrics

__all__ = [
    "Contribution",
    "JointReport",
    "JointState",
    "Pickled",
    "Place",
    "Ranks",
    "Reduced",
    "SyncReport",
    "UntrainedState",
    "next_chief",
    "ranks_of",
]


@dataclass(frozen=True)
class UntrainedState:
    """What a worker reports at a sync point of its buffers and frozen parameters."""

    # Of the normalisation layers' statistics: how many batches they have seen since the last sync point, and values.
    statistics: dict[str, tuple[float, Tensor]] = field(default_factory=dict)
    digests: dict[str, bytes] = field(default_factory=dict)  # of what is long, and is sent only where workers differ
    short: Any = None  # the chief's other tensors by name, or `Pickled`; None from the others


@dataclass(frozen=True)
class JointState:
    """What these reports come to."""

    statistics: dict[str, Tensor]  # their means
    differing: frozenset[str]  # names of long tensors that are not the same on all workers
    short: Any  # the chief's; None if it did not report


_MOST_RANKS = 1_000_000


@dataclass(frozen=True)
class Pickled:
    """An object that workers make and open. To servers, which need not have its class, it is bytes."""

    data: bytes


@dataclass(frozen=True)
class Place:
    """Where a worker is in its training, between two batches."""

    ends: bool  # whether its epoch ends here
    validates: bool  # whether it is to validate here
    step: int  # optimizer steps that it has counted
    batches: int  # batches of the epoch that it has counted


@dataclass(frozen=True)
class SyncReport:
    """A worker's report at a sync point."""

    moved: bool  # whether anything was pushed since the last sync point
    should_stop: bool  # whether training is to end
    grown: bool  # whether there are trainable parameters that are not exchanged
    # What the chief's checkpoint callbacks know about the files: a plain value or `Pickled`; None on other workers.
    checkpoints: Any
    figures: WorkerMetrics | None = None  # this worker's metrics
    # Per server, of the weights that this worker took once all had pushed; None if it has not.
    versions: tuple[int, ...] | None = None
    place: Place | None = None  # where it is; None outside of epochs
    trained: bool = False  # whether it has trained since the last sync point, with or without optimizer steps
    halts: bool = False  # whether it trains no more of the epoch, so that the others should arrive soon


@dataclass(frozen=True)
class Ranks(Collection[int]):
    """A set of ranks, which takes few bytes where they follow each other."""

    spans: tuple[tuple[int, int], ...]  # the first and the last rank of each run of consecutive ranks, in order

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Ranks:
        """These ranks."""
        rows = itertools.groupby(enumerate(sorted(ranks)), lambda placed: placed[1] - placed[0])
        found = [[rank for _, rank in row] for _, row in rows]
        return cls(tuple((row[0], row[-1]) for row in found))

    @property
    def can_be(self) -> bool:
        """See :mod:`lightning_asgd.core.protocol.field_types`."""
        edges = [-1, *(edge for first, last in self.spans for edge in (first, last + 1))]
        return all(a < b for a, b in itertools.pairwise(edges)) and edges[-1] <= _MOST_RANKS

    @property
    def expected(self) -> str:
        """See :mod:`lightning_asgd.core.protocol.field_types`."""
        return f"spans of ranks from 0 to {_MOST_RANKS}, in order"

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and any(first <= rank <= last for first, last in self.spans)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(range(first, last + 1) for first, last in self.spans)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.spans)


@dataclass(frozen=True)
class JointReport:
    """What the workers' reports at a sync point come to."""

    workers: Ranks  # that reported
    moved: bool  # whether any has pushed since the last sync point
    should_stop: bool  # whether training is to end for any
    grown: Ranks  # those that have trainable parameters which are not exchanged
    trained: bool  # whether any has trained since the last sync point
    checkpoints: Any  # those of the chief; None if it did not report
    versions: tuple[int, ...] | None  # of the weights that all have taken already, if they are the same
    place: Place | None  # where all are; None outside of epochs
    figures: dict[int, WorkerMetrics] = field(default_factory=dict)  # the workers' metrics by rank, for the chief only


@dataclass(frozen=True)
class Reduced:
    """The result of a collective that reduces, the same for all workers."""

    value: Any
    ranks: Ranks  # that took part


@dataclass(frozen=True)
class Contribution(Request):
    """A worker's part in a collective."""

    seq: Count  # number of this worker's collective in the session, counted from 1
    kind: str  # `"barrier"`, `"broadcast"`, `"all_gather"`, ...: must be the same on all workers
    name: str  # what the caller calls it; must be the same on all workers
    payload: Any = None  # a plain value, a tensor, or an object as `Pickled`; what is reduced is not pickled
    source: int | None = None  # the one worker whose payload is delivered; None: all workers'
    target: int | None = None  # the one worker that it is delivered to, the others get nothing; None: all workers
    timeout_s: Seconds = 1800.0  # seconds after which the servers give up on the missing workers
    stops: bool = False  # whether the worker trains no more, so that the others should arrive soon
    # The answer of a coordinator that was lost, which the others are to get, too; None if this worker waits.
    answer: dict[int, Any] | Reduced | None = None
    # What the coordinator makes of the payloads, see `core/protocol/reductions.py`; empty: workers get the payloads.
    reduction: str = ""

    @property
    def reaches_all(self) -> bool:
        """Whether every worker sends a value and gets those of all."""
        return self.source is None and self.target is None


def next_chief(chief: int, took_part: Collection[int]) -> int:
    """The chief of a job after a collective that these workers took part in.

    A chief is left out only if it is gone. All workers compute it from the same results, so all have the same.
    """
    return chief if chief in took_part else min(took_part, default=chief)


def ranks_of(answer: dict[int, Any] | Reduced) -> Collection[int]:
    """The workers that took part in a collective, by its result."""
    return answer.ranks if isinstance(answer, Reduced) else answer
