"""What users see of a run: what its workers have done, and what a server knows of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

__all__ = ["Status", "StatusRequest", "WorkerMetrics", "WorkerStatus"]


@dataclass(frozen=True)
class WorkerMetrics:
    """What a worker has done in a fit until now.

    Rates are differences of two; see :mod:`lightning_asgd.monitoring.metric_definitions`.

    All are sums since training began, unless stated otherwise. Seconds of computing and of the three kinds of
    standing still add up to ``at_s``, together with what validations, checkpoints and other callbacks took.

    Attributes:
        began: when training began, in seconds since 1970 on the worker's clock.
        at_s: seconds from then until these metrics were taken.
        epoch: epochs trained, including the fraction of the current one; not a sum.
        samples: samples trained.
        batches: batches trained.
        steps: optimizer steps taken.
        loss_sum: training loss of the batches that had a finite one.
        losses: number of these batches.
        train_s: seconds of computing.
        exchange_wait_s: seconds in which training waited for the servers' replies.
        sync_wait_s: seconds in which it waited at sync points, for the servers and the other workers.
        data_wait_s: seconds in which it waited for data.
        exchanges: exchanges that were answered.
        pushes: those of them with an update.
        refused: updates that a server rejected.
        repeated: updates that a server had applied before.
        round_trip_s: seconds from sending the messages to merging the replies.
        bytes_pushed: bytes of updates.
        bytes_fetched: bytes of weights.
        staleness_sum: staleness, in versions, of all pushes.
        staleness_max: the largest; not a sum.
        staleness: pushes by staleness; above 15 by the power of two below it.
        nsync: current number of optimizer steps between two exchanges.
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
class StatusRequest:
    """A status request. The sender need not be a member of the session. Answered with :class:`Status`."""

    urgent: ClassVar[bool] = True


@dataclass(frozen=True)
class WorkerStatus:
    """What the coordinator knows of a worker.

    Attributes:
        worker: its number.
        about: its machine, process and device, if it joined an elastic run.
        away: why no worker waits for it; empty if it takes part.
        silent_s: seconds since its last heartbeat.
        pace_s: seconds that it needs for an optimizer step; 0 if that is not known.
        trained: steps of the present epoch that it has trained.
        figures: its latest metrics, if it is monitored.
    """

    worker: int
    about: str
    away: str
    silent_s: float
    pace_s: float
    trained: int
    figures: WorkerMetrics | None = None


@dataclass(frozen=True)
class Status:
    """What a server knows of its session.

    Attributes:
        session: its name; empty if there is none.
        version: updates that the shard has applied.
        refused: updates that held NaN, infinity or values out of bounds.
        chief: the worker that logs and writes checkpoints; None if there is none.
        epoch: number of the latest epoch; None before the first.
        done: its optimizer steps whose updates have been applied, in batches of the reference size.
        steps: its steps, likewise.
        workers: those that take part or may rejoin.
        news: recent events of workers, as texts for users.
    """

    session: str = ""
    version: int = 0
    refused: int = 0
    chief: int | None = None
    epoch: int | None = None
    done: int = 0
    steps: int = 0
    workers: tuple[WorkerStatus, ...] = ()
    news: tuple[str, ...] = ()
