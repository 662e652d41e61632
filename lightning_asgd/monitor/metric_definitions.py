"""Rates, means and shares between two reports of metrics, for one worker and for all together. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_asgd.core.protocol import WorkerMetrics


@dataclass(frozen=True)
class Window:
    """Two reports of one worker's metrics, and the time between them.

    Attributes:
        after: the later report.
        before: the earlier report; by default all zero, as when training began.
    """

    after: WorkerMetrics
    before: WorkerMetrics = field(default_factory=WorkerMetrics)

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.after.at_s - self.before.at_s

    def of(self, *names: str) -> float:
        """By how much sums have grown: fields of :class:`WorkerMetrics`, all added up."""
        return float(sum(getattr(self.after, name) - getattr(self.before, name) for name in names))

    def per_s(self, *names: str) -> float:
        """The same per second."""
        return self.of(*names) / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Metric:
    """Something that is logged, of every worker and of all.

    Attributes:
        unit: of its value.
        meaning: in a few words.
        value: from the workers' windows; None if there is none.
    """

    unit: str
    meaning: str
    value: Callable[[Sequence[Window]], float | None]


def _rate(*names: str) -> Callable[[Sequence[Window]], float]:
    return lambda windows: sum(window.per_s(*names) for window in windows)


def _ratio(above: Sequence[str], below: Sequence[str]) -> Callable[[Sequence[Window]], float | None]:
    def value(windows: Sequence[Window]) -> float | None:
        number = sum(window.of(*below) for window in windows)
        return sum(window.of(*above) for window in windows) / number if number > 0 else None

    return value


def _total(name: str) -> Callable[[Sequence[Window]], float]:
    return lambda windows: float(sum(getattr(window.after, name) for window in windows))


def _mean(name: str) -> Callable[[Sequence[Window]], float | None]:
    """Over the workers that have a value above 0."""

    def value(windows: Sequence[Window]) -> float | None:
        known = [value for window in windows if (value := getattr(window.after, name)) > 0]
        return sum(known) / len(known) if known else None

    return value


def _updates_per_s(windows: Sequence[Window]) -> float:
    return sum(window.per_s("pushes") - window.per_s("refused", "repeated") for window in windows)


def _largest_staleness(windows: Sequence[Window]) -> float | None:
    return max((float(window.after.staleness_max) for window in windows if window.after.pushes), default=None)


def _tokens_per_s(windows: Sequence[Window]) -> float | None:
    return sum(window.per_s("tokens") for window in windows) if any(window.after.tokens for window in windows) else None


def _hits(windows: Sequence[Window]) -> float | None:
    fetched = _ratio(["rows_fetched"], ["rows_read"])(windows)
    return None if fetched is None else max(0.0, 1.0 - fetched)


_WAITS = ("exchange_wait_s", "sync_wait_s", "data_wait_s")
_BYTES = ("bytes_pushed", "bytes_fetched")

METRICS: dict[str, Metric] = {
    "epoch": Metric("epochs", "epochs trained, including the fraction of the current one", _mean("epoch")),
    "samples_per_s": Metric("samples/s", "samples trained per second", _rate("samples")),
    "tokens_per_s": Metric("tokens/s", "tokens trained per second, where they are counted", _tokens_per_s),
    "train_loss": Metric("", "mean training loss", _ratio(["loss_sum"], ["losses"])),
    "updates_per_s": Metric("1/s", "updates that the servers applied per second", _updates_per_s),
    "updates/refused": Metric("updates", "rejected so far, because they held NaN or infinity", _total("refused")),
    "updates/repeated": Metric("updates", "duplicates so far, already applied by a server", _total("repeated")),
    "staleness/mean": Metric("versions", "mean staleness of the updates", _ratio(["staleness_sum"], ["pushes"])),
    "staleness/max": Metric("versions", "largest staleness so far", _largest_staleness),
    "exchange/round_trip_s": Metric(
        "s", "mean time from sending an exchange until its reply is merged", _ratio(["round_trip_s"], ["exchanges"])
    ),
    "exchange/wait_s": Metric(
        "s", "mean time that training waited for an exchange", _ratio(["exchange_wait_s"], ["exchanges"])
    ),
    "exchange/bytes": Metric("bytes", "mean size of an exchange, both directions", _ratio(_BYTES, ["exchanges"])),
    "traffic/bytes_per_s": Metric("bytes/s", "bytes exchanged per second, both directions", _rate(*_BYTES)),
    "wait/share": Metric("", "share of the training thread's time that it spent waiting", _ratio(_WAITS, ["at_s"])),
    "wait/exchange": Metric("", "part of that share: for the servers' replies", _ratio(["exchange_wait_s"], ["at_s"])),
    "wait/sync": Metric(
        "", "part of that share: at sync points, for servers and other workers", _ratio(["sync_wait_s"], ["at_s"])
    ),
    "wait/data": Metric("", "part of that share: for data", _ratio(["data_wait_s"], ["at_s"])),
    "tables/hits": Metric(
        "", "share of the rows of served tables that batches used and that were not fetched for them", _hits
    ),
    "tables/age": Metric(
        "steps",
        "mean age of the rows that batches used: steps since they were fetched",
        _ratio(["row_ages"], ["rows_read"]),
    ),
    "nsync": Metric("steps", "current number of optimizer steps between two exchanges", _mean("nsync")),
    "outer_gain": Metric(
        "", "by how much outer momentum lengthened the servers' latest update; 1 without momentum", _mean("outer_gain")
    ),
    "gain": Metric("", "by how much the worker's latest optimizer step was lengthened", _mean("gain")),
    "distance": Metric("", "norm of the worker's parameters minus the servers', measured recently", _mean("distance")),
}
"""By name. Those with a mean are over all workers' exchanges, batches or seconds, not a mean of the workers' means."""


def measures(windows: Sequence[Window]) -> dict[str, float]:
    """All metrics of these workers that have a value."""
    values = {name: metric.value(windows) for name, metric in METRICS.items()} if windows else {}
    return {name: value for name, value in values.items() if value is not None}


class Windows:
    """A sliding window of every worker's metrics.

    Args:
        seconds: the least length of a window, once a worker has trained for that long. A rate over a shorter time, as
            between two reports close to a sync point, would mean little.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._figures: dict[int, deque[WorkerMetrics]] = {}

    def update(self, figures: Mapping[int, WorkerMetrics]) -> None:
        """Add metrics, by worker; if they are not new, the worker's window stays as it is."""
        for worker, new in figures.items():
            known = self._figures.get(worker)
            if known is None or known[-1].began != new.began:  # it has begun, perhaps again
                known = self._figures[worker] = deque([WorkerMetrics(began=new.began)])
            if new.at_s > known[-1].at_s:
                known.append(new)
            while len(known) > 2 and new.at_s - known[1].at_s >= self._seconds:
                known.popleft()

    def of(self, workers: Iterable[int]) -> dict[int, Window]:
        """Windows by worker, of those of them that have one."""
        known = {worker: self._figures[worker] for worker in workers if worker in self._figures}
        return {worker: Window(figures[-1], figures[0]) for worker, figures in known.items()}


def staleness(figures: Iterable[WorkerMetrics]) -> dict[int, int]:
    """Updates of all workers by staleness; see :attr:`WorkerMetrics.staleness`."""
    counts: Counter[int] = Counter()
    for each in figures:
        counts.update(each.staleness)
    return dict(sorted(counts.items()))


def bars(histogram: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """A histogram's counts, empty bins included, and one edge more than counts; see :attr:`WorkerMetrics.staleness`."""
    edges = [0]
    while edges[-1] <= max(histogram, default=0):
        edges.append(edges[-1] + 1 if edges[-1] < 16 else 2 * edges[-1])
    return [histogram.get(edge, 0) for edge in edges[:-1]], edges
