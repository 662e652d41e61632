"""What a worker records of its exchanges."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

__all__ = ["UNAPPLIED", "ExchangeRecord", "ExchangeStats", "Verdict"]

_KEPT = 10_000  # records kept; the sums include older ones


class Verdict(str, Enum):
    """What a server did with a push."""

    APPLIED = "applied"
    REPEATED = "repeated"  # applied before: this delivery changed nothing
    REFUSED = "refused"  # it held a NaN or an infinity
    DROPPED = "dropped"  # by a transform
    NONE = "none"  # nothing was pushed


UNAPPLIED = Verdict.REFUSED, Verdict.DROPPED
"""The verdicts on pushes that a server has not applied."""


@dataclass(frozen=True)
class ExchangeRecord:
    """One exchange of one worker.

    Attributes:
        step: optimizer steps this worker had taken when the exchange began.
        versions: version of every shard after it.
        staleness: per server, the updates applied between the fetch this push was based on and the push.
        verdicts: per server, what became of the push.
        round_trip_s: seconds from the message to the answer's being merged.
        wait_s: the part of these seconds in which the training thread waited.
        bytes_pushed: bytes of update sent.
        bytes_fetched: bytes of weights received.
        local_steps: optimizer steps in the push.
        shared: whether the bytes went through shared memory instead of the network.
    """

    step: int
    versions: tuple[int, ...]
    staleness: tuple[int, ...]
    verdicts: tuple[Verdict, ...]
    round_trip_s: float
    wait_s: float
    bytes_pushed: int
    bytes_fetched: int
    local_steps: int
    shared: bool


@dataclass
class ExchangeStats:
    """Sums over all exchanges of a fit, and the last 10,000 records in :attr:`records`.

    ``staleness_mean`` and ``staleness_max`` are over pushes, in versions; ``wait_s`` is the time in which the training
    thread waited for replies, without sync points.
    """

    records: deque[ExchangeRecord] = field(default_factory=lambda: deque(maxlen=_KEPT))
    exchanges: int = 0
    pushes: int = 0
    fetches: int = 0
    refused: int = 0
    repeated: int = 0
    steps: int = 0
    deferred: int = 0  # times an exchange was due while the one before was still in flight
    wait_s: float = 0.0
    sync_wait_s: float = 0.0  # time at sync points in which the training thread waited for the servers
    round_trip_s: float = 0.0
    bytes_pushed: int = 0
    bytes_fetched: int = 0
    staleness_sum: float = 0.0
    staleness_max: int = 0
    staleness_histogram: Counter[int] = field(default_factory=Counter)
    nsync: int = 0  # optimizer steps between two exchanges, as of the latest
    distance: float = 0.0  # norm of this worker's parameters minus the servers', when measured last; 0 before
    outer_gain: float = 0.0  # by how much momentum lengthened the servers' latest update; 0 if that is not known
    gain: float = 0.0  # by how much this worker's latest step was lengthened; 0 where no optimizer's steps are
    lost_workers: dict[int, str] = field(default_factory=dict)  # on worker 0, at the end of the fit
    servers_replaced: int = 0  # lost servers that were replaced while this worker trained

    def add(self, record: ExchangeRecord, *, pushed: bool, fetched: bool) -> None:
        """Count an exchange."""
        self.records.append(record)
        self.exchanges += 1
        self.pushes += pushed
        self.fetches += fetched
        self.wait_s += record.wait_s
        self.round_trip_s += record.round_trip_s
        self.bytes_pushed += record.bytes_pushed
        self.bytes_fetched += record.bytes_fetched
        self.refused += Verdict.REFUSED in record.verdicts
        self.repeated += Verdict.REPEATED in record.verdicts
        if pushed:
            worst = max(record.staleness)
            self.staleness_sum += sum(record.staleness) / len(record.staleness)
            self.staleness_max = max(self.staleness_max, worst)
            self.staleness_histogram[worst] += 1

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of this worker's pushes, in versions; 0 before the first."""
        return self.staleness_sum / self.pushes if self.pushes else 0.0

    def summary(self) -> dict[str, Any]:
        """All sums as plain values, without the records."""
        shallow = {k: v for k, v in vars(self).items() if k not in ("records", "staleness_histogram")}
        return {**shallow, "staleness_mean": self.staleness_mean, "histogram": dict(self.staleness_histogram)}

    def last(self) -> dict[str, Any] | None:
        """The latest record as a dictionary, None before the first exchange."""
        return asdict(self.records[-1]) if self.records else None
