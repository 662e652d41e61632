"""What a worker trains, and where the time of its training thread goes.

Every moment of a fit is one of these: computing, waiting for the servers' answers, waiting at sync points, waiting for
data, or something else (validations, checkpoints, other callbacks). The training loop reports when batches and
validations begin and end. Waits inside them are timed where they occur, and subtracted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.protocol import WorkerMetrics

_EXACT = 16  # staleness below is counted by itself: histograms stay small however stale pushes become


class Waited(NamedTuple):
    """Seconds that the training thread has waited so far."""

    exchange_s: float = 0.0
    """For the servers' replies while it trained."""
    sync_s: float = 0.0
    """At sync points, for the servers and the other workers."""
    data_s: float = 0.0
    """For data to be granted."""


class Meter:
    """Counts what one worker does in a fit. Used by the training thread only.

    ``epoch`` gives the epochs trained, with the fraction of the current one; ``tokens`` is 0 if they are not counted;
    ``rows`` gives how many rows of served tables were read and fetched, and their ages.
    """

    def __init__(
        self,
        stats: Callable[[], ExchangeStats],
        waited: Callable[[], Waited],
        epoch: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.perf_counter,
        tokens: Callable[[], float] = lambda: 0.0,
        rows: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0),
    ) -> None:
        self._stats = stats
        self._waited = waited
        self._epoch = epoch
        self._tokens = tokens
        self._rows = rows
        self._clock = clock
        self._began = time.time()
        self._zero = self._since = clock()
        self._before = self._standing = waited()  # when training began, and at the latest switch
        self._spent = {"train": 0.0, "data": 0.0, "other": 0.0}
        self._now = "data"
        self._samples = self._batches = self._losses = 0
        self._loss_sum = 0.0
        self._unread: list[Tensor] = []  # losses since the latest figures, where they were computed

    def begin_batch(self) -> None:
        """A batch has been fetched."""
        self._switch("train")

    def end_batch(self, samples: int, loss: Tensor | None = None) -> float:
        """A batch is finished; ``loss`` has one element. Returns seconds on the meter's clock."""
        self._samples += samples
        self._batches += 1
        if loss is not None:
            self._unread.append(loss)
        return self._switch("data")

    def pause(self) -> None:
        """Something other than training begins, such as a validation."""
        self._switch("other")

    def resume(self) -> float:
        """A batch comes next. Returns seconds on the meter's clock."""
        return self._switch("data")

    def read(self) -> WorkerMetrics:
        """The metrics as of now."""
        now = self._switch(self._now)
        self._read_losses()
        waited, stats = self._standing, self._stats()
        read, fetched, ages = self._rows()
        return WorkerMetrics(
            began=self._began,
            at_s=now - self._zero,
            epoch=self._epoch(),
            samples=self._samples,
            tokens=int(self._tokens()),
            batches=self._batches,
            steps=stats.steps,
            loss_sum=self._loss_sum,
            losses=self._losses,
            train_s=self._spent["train"],
            exchange_wait_s=waited.exchange_s - self._before.exchange_s,
            sync_wait_s=waited.sync_s - self._before.sync_s,
            data_wait_s=self._spent["data"] + waited.data_s - self._before.data_s,
            exchanges=stats.exchanges,
            pushes=stats.pushes,
            refused=stats.refused,
            repeated=stats.repeated,
            round_trip_s=stats.round_trip_s,
            bytes_pushed=stats.bytes_pushed,
            bytes_fetched=stats.bytes_fetched,
            staleness_sum=stats.staleness_sum,
            staleness_max=stats.staleness_max,
            staleness=binned(stats.staleness_histogram),
            nsync=stats.nsync,
            distance=stats.distance,
            outer_gain=stats.outer_gain,
            gain=stats.gain,
            rows_read=read,
            rows_fetched=fetched,
            row_ages=ages,
        )

    def _switch(self, to: str) -> float:
        """End what the thread did until now, and begin something."""
        now, waited = self._clock(), self._waited()
        stood = sum(waited) - sum(self._standing)
        self._spent[self._now] += max(0.0, now - self._since - stood)
        self._now, self._since, self._standing = to, now, waited
        return now

    def _read_losses(self) -> None:
        """Add up the losses since the last call: on a GPU this waits for them."""
        if self._unread:
            losses = torch.stack([loss.reshape(()) for loss in self._unread]).float()
            finite = losses[torch.isfinite(losses)].tolist()
            self._loss_sum += sum(finite)  # in 64 bits: a run that diverges has losses whose sum is too large for 32
            self._losses += len(finite)
            self._unread = []


def binned(histogram: Mapping[int, int]) -> dict[int, int]:
    """A histogram's counts by the smallest number of each bin: single numbers below 16, then powers of two."""
    bins: dict[int, int] = {}
    for value, count in sorted(dict(histogram).items()):
        start = value if value < _EXACT else 1 << (value.bit_length() - 1)
        bins[start] = bins.get(start, 0) + count
    return bins
