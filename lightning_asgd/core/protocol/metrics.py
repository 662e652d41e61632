"""What a worker has done in a fit, as its heartbeats and sync reports hold it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["WorkerMetrics"]


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
