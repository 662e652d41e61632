"""Messages of workers in collectives and at sync points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_asgd.protocol.metric_messages import WorkerMetrics
from lightning_asgd.protocol.request import Request

__all__ = ["Contribution", "Pickled", "Place", "SyncReport"]


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
    checkpoints: list[Any]  # what this worker's checkpoint callbacks know about the files
    figures: WorkerMetrics | None = None  # this worker's metrics
    # Per server, of the weights that this worker has taken already, since it knew that all had pushed; None if it has
    # not.
    versions: tuple[int, ...] | None = None
    place: Place | None = None  # where it is; None outside of epochs
    trained: bool = False  # whether it has trained since the last sync point, with or without optimizer steps
    halts: bool = False  # whether it trains no more of the epoch, so that the others should arrive soon


@dataclass(frozen=True)
class Contribution(Request):
    """A worker's part in a collective."""

    seq: int  # number of this worker's collective in the session, counted from 1
    kind: str  # `"barrier"`, `"broadcast"`, `"all_gather"`, ...: must be the same on all workers
    name: str  # what the caller calls it; must be the same on all workers
    payload: Any = None  # a plain value, a tensor, or an object as `Pickled`
    source: int | None = None  # the one worker whose payload is delivered; None: all workers'
    target: int | None = None  # the one worker that it is delivered to, the others get nothing; None: all workers
    timeout_s: float = 1800.0  # seconds after which the servers give up on the missing workers
    stops: bool = False  # whether the worker trains no more, so that the others should arrive soon
    # What the worker was answered by a coordinator that was lost since: it does not wait any more, and the others are
    # to get the same. None if it waits.
    answer: dict[int, Any] | None = None
