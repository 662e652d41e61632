"""What a simulation finds out. All times are virtual seconds since the first batch could begin."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Point:
    """The loss at the servers' weights.

    Attributes:
        time_s: when.
        steps: optimizer steps that all workers together had taken.
        loss: the problem's loss.
    """

    time_s: float
    steps: int
    loss: float


@dataclass(frozen=True)
class WorkerReport:
    """One worker's part.

    Attributes:
        worker: its rank.
        crashed: whether it ended before its time.
        time_s: when it ended.
        steps: optimizer steps it took.
        exchanges: exchanges that were answered.
        pushes: those of them with an update.
        deferred: times an exchange was due while the one before was still in flight.
        wait_s: time in which it waited for a reply, without sync points.
        sync_wait_s: time at sync points in which it waited for the servers.
        meeting_s: time at sync points in which it waited for the other workers.
        staleness_mean: of its pushes, in versions.
        staleness_max: of its pushes, in versions.
        staleness_histogram: number of its pushes by staleness, in versions.
        bytes_sent: bytes of tensors that it sent, to all servers together.
        bytes_received: bytes of tensors that it received.
        lease_wait_s: time in which it waited for leases, and at an epoch's end for the others to train theirs.
    """

    worker: int
    crashed: bool
    time_s: float
    steps: int
    exchanges: int
    pushes: int
    deferred: int
    wait_s: float
    sync_wait_s: float
    meeting_s: float
    staleness_mean: float
    staleness_max: int
    staleness_histogram: Counter[int]
    bytes_sent: int
    bytes_received: int
    lease_wait_s: float = 0.0


@dataclass(frozen=True)
class Report:
    """A whole run.

    Attributes:
        time_s: when the last worker ended.
        epochs_s: when each epoch's sync point was over.
        workers: each worker's part.
        losses: the loss at the servers' weights, from the beginning to the end.
        weights: the servers' weights at the end, shape ``(n,)``.
        versions: per server, number of updates that it applied, to all fragments together.
        server_bytes: per server, bytes of tensors received and sent.
        server_work_s: per server, seconds that it worked on messages.
    """

    time_s: float
    epochs_s: tuple[float, ...]
    workers: tuple[WorkerReport, ...]
    losses: tuple[Point, ...]
    weights: Tensor
    versions: tuple[int, ...]
    server_bytes: tuple[tuple[int, int], ...]
    server_work_s: tuple[float, ...] = ()

    @property
    def steps(self) -> int:
        """Optimizer steps of all workers."""
        return sum(w.steps for w in self.workers)

    @property
    def loss(self) -> float:
        """The loss at the end."""
        return self.losses[-1].loss

    @property
    def pushes(self) -> int:
        """Pushes of all workers."""
        return sum(w.pushes for w in self.workers)

    @property
    def staleness_histogram(self) -> Counter[int]:
        """Number of pushes of all workers by staleness, in versions."""
        return sum((w.staleness_histogram for w in self.workers), Counter())

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of all pushes, in versions; 0 if there was none."""
        return sum(w.staleness_mean * w.pushes for w in self.workers) / self.pushes if self.pushes else 0.0

    @property
    def staleness_max(self) -> int:
        """The stalest push, in versions."""
        return max(w.staleness_max for w in self.workers)

    @property
    def wait_s(self) -> float:
        """Time in which workers waited for replies, without sync points, over all workers."""
        return sum(w.wait_s for w in self.workers)

    @property
    def sync_wait_s(self) -> float:
        """Time in which workers waited at sync points, for servers and for each other, over all workers."""
        return sum(w.sync_wait_s + w.meeting_s for w in self.workers)

    @property
    def traffic_bytes(self) -> int:
        """Bytes of tensors that went over the servers' links, both ways."""
        return sum(received + sent for received, sent in self.server_bytes)
