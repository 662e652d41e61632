"""What workers say in collectives and at sync points."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from lightning_asgd.protocol.metric_messages import WorkerMetrics
from lightning_asgd.protocol.request import Request

__all__ = ["Contribution", "Pickled", "Place", "SyncReport", "next_chief"]


@dataclass(frozen=True)
class Pickled:
    """An object that workers make and open. To servers, which need not have its class, it is bytes."""

    data: bytes


@dataclass(frozen=True)
class Place:
    """Where a worker is in its training, between two batches.

    Attributes:
        ends: whether its epoch ends here.
        validates: whether it is to validate here.
        step: optimizer steps that it has counted.
        batches: batches of the epoch that it has counted.
    """

    ends: bool
    validates: bool
    step: int
    batches: int


@dataclass(frozen=True)
class SyncReport:
    """What a worker says at a sync point.

    Attributes:
        moved: whether anything was pushed since the last one.
        should_stop: whether training is to end.
        grown: whether there are trainable parameters that are not exchanged.
        checkpoints: what this worker's checkpoint callbacks know of the files.
        figures: this worker's.
        versions: per server, of the weights that this worker has taken already, since it knew that all had pushed;
            None if it has not.
        place: where it is; None outside of epochs.
        trained: whether it has trained since the last one, with or without optimizer steps.
        halts: whether it trains no more of the epoch, so that the others are to come soon.
    """

    moved: bool
    should_stop: bool
    grown: bool
    checkpoints: list[Any]
    figures: WorkerMetrics | None = None
    versions: tuple[int, ...] | None = None
    place: Place | None = None
    trained: bool = False
    halts: bool = False


@dataclass(frozen=True)
class Contribution(Request):
    """A worker's part in a collective.

    Attributes:
        seq: number of this worker's collective in the session, counted from 1.
        kind: ``"barrier"``, ``"broadcast"``, ``"all_gather"``, ...: must be the same on all workers.
        name: what the caller calls it; must be the same on all workers.
        payload: a plain value, a tensor, or an object as :class:`Pickled`.
        source: the one worker whose payload is delivered; None: everybody's.
        target: the one worker that it is delivered to, the others get nothing; None: everybody.
        timeout_s: seconds after which the servers give up on the missing workers.
        stops: whether the worker trains no more, so that the others are to come soon.
        answer: what the worker was answered by a coordinator that was lost since: it does not wait any more, and the
            others are to get the same. None if it waits.
    """

    seq: int
    kind: str
    name: str
    payload: Any = None
    source: int | None = None
    target: int | None = None
    timeout_s: float = 1800.0
    stops: bool = False
    answer: dict[int, Any] | None = None

    @property
    def reaches_all(self) -> bool:
        """Whether every worker sends a value and gets those of all."""
        return self.source is None and self.target is None


def next_chief(chief: int, took_part: Collection[int]) -> int:
    """The chief of a job after a collective that these workers took part in.

    A chief is left out only if it is gone. All workers compute it from the same results, so all have the same.
    """
    return chief if chief in took_part else min(took_part, default=chief)
