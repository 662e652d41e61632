"""Curves over a fit's time, computed from its metric log. Pure.

Metrics are growing sums, known at a few moments for each worker. Between two of them they are assumed to grow evenly,
so that rates and shares follow for any part of the time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import numpy as np

from lightning_asgd.core.protocol import WorkerMetrics
from lightning_asgd.monitor.metric_log import Fit

KINDS = {
    "lost": "worker lost",
    "replaced": "worker replaced",
    "joined": "worker joined or rejoined",
    "server": "server replaced",
    "other": "other",
}
"""By their names, what they are in words."""

_PATTERNS = {  # the first that is found in a text
    "server": r"^A server was lost|^Server \d+ (continues|had no)",
    "replaced": r"^Process .* replaces ",
    "joined": r"has (re)?joined\.",
    "lost": r"^Worker \d+ (is lost[: ]|is lost \(|has left:|sent no heartbeat)",
}
_PLACE = r"^Worker (\d+) \((.+), process \d+, (.+)\) has joined\."
_REPLACED = r"^Process \d+ on (\S+) replaces .* as worker (\d+) "


@dataclass(frozen=True)
class Fault:
    """Something that happened."""

    at_s: float  # seconds since the fit began
    kind: str  # one of :data:`KINDS`
    worker: int | None  # whose process was lost or joined; None for servers
    text: str  # what the workers' logs said


def faults(fit: Fit) -> list[Fault]:
    """In the order of time."""
    found = []
    for at_s, text in sorted(fit.events):
        kind = next((kind for kind, pattern in _PATTERNS.items() if re.search(pattern, text)), "other")
        worker = re.search(r"as worker (\d+)|^Worker (\d+)", text.partition("\n")[0])
        found.append(Fault(at_s, kind, int(worker[1] or worker[2]) if worker else None, text))
    return found


def places(fit: Fit) -> dict[int, tuple[str, str]]:
    """Machine and device of the workers that are known: as the fit began, and as workers joined later."""
    known = {int(worker): (str(place[0]), str(place[1])) for worker, place in fit.about.get("places", {}).items()}
    for _, text in sorted(fit.events):
        if joined := re.search(_PLACE, text):
            known[int(joined[1])] = joined[2], joined[3]
        elif replaced := re.search(_REPLACED, text):
            worker = int(replaced[2])
            known[worker] = replaced[1], known.get(worker, ("", ""))[1]
    return known


_FEWEST, _MOST = 12, 120  # parts that the time is cut into
_KNOWN = 0.9  # of the time is shown at least, even if a living worker has reported nothing since
_WINDOW = 15  # the smoothed loss is a mean over a 15th of them

STATES = {
    "computing": "train_s",
    "waiting for servers": "exchange_wait_s",
    "waiting at sync points": "sync_wait_s",
    "between batches": "data_wait_s",
}
"""What a training thread does, and the field of :class:`WorkerMetrics` that holds for how long.

Between batches it waits for data, and Lightning's loop works: callbacks, loggers, progress bars.
"""

_LATEST = {
    "began",
    "epoch",
    "staleness_max",
    "staleness",
    "nsync",
    "distance",
    "outer_gain",
    "gain",
}  # what is no sum, or no number

Array = Any
"""A NumPy array of float64, of shape ``(parts,)`` unless stated otherwise."""


class Curves:
    """Curves over the time of a fit, which is cut into equal parts.

    Args:
        fit: has entries.

    Attributes:
        workers: all that have ever reported metrics, ascending.
        edges: seconds at which the parts begin and end, shape ``(parts + 1,)``.
    """

    def __init__(self, fit: Fit) -> None:
        self.workers: list[int] = sorted(fit.last)
        self._lives = {worker: _lives(fit, worker) for worker in self.workers}
        ends = {w: max(begin + figures[-1].at_s for begin, figures in lives) for w, lives in self._lives.items()}
        # The latest metrics of a living worker may be a little older than the chief's: it is not gone since.
        known = min((ends[worker] for worker in fit.entries[-1].living if worker in ends), default=0.0)
        end = max(known, _KNOWN * max(ends.values()), 1e-3)
        parts = min(_MOST, max(_FEWEST, len(fit.entries)))
        self.edges: Array = np.linspace(0.0, end, parts + 1)

    @property
    def middles(self) -> Array:
        """Seconds in the middle of every part."""
        return (self.edges[:-1] + self.edges[1:]) / 2

    def total(self, name: str, workers: Sequence[int] | None = None) -> Array:
        """How large a sum is at every edge, shape ``(parts + 1,)``.

        Args:
            name: a field of :class:`WorkerMetrics`.
            workers: added up; None for all.
        """
        total = np.zeros_like(self.edges)
        for worker in self.workers if workers is None else workers:
            for begin, figures in self._lives[worker]:
                times = [begin, *(begin + each.at_s for each in figures)]
                total += np.interp(self.edges, times, [0.0, *(float(getattr(each, name)) for each in figures)])
        return total

    def rate(self, name: str, workers: Sequence[int] | None = None) -> Array:
        """By how much a sum grows per second, in every part; see :meth:`total`."""
        return np.diff(self.total(name, workers)) / np.diff(self.edges)

    def shares(self, worker: int) -> dict[str, Array]:
        """Per state, the share of a worker's time in that state; the rest of 1 is other work."""
        return {state: np.clip(self.rate(name, [worker]), 0.0, 1.0) for state, name in STATES.items()}

    def loss(self, *, smooth: bool) -> tuple[Array, Array, Array]:
        """Mean training loss of all workers.

        Args:
            smooth: over a sliding window around the part; else over the part alone.

        Returns:
            seconds and samples trained by all, in the middle of the parts, and the loss; without parts in which no
            worker trained.
        """
        sums, numbers, samples = self.total("loss_sum"), self.total("losses"), self.total("samples")
        parts = len(self.edges) - 1
        around = parts // _WINDOW // 2 if smooth else 0
        first = np.maximum(np.arange(parts) - around, 0)
        last = np.minimum(np.arange(parts) + around + 1, parts)
        number = numbers[last] - numbers[first]
        known = number > 1e-9
        mean = (sums[last] - sums[first])[known] / number[known]
        return self.middles[known], ((samples[:-1] + samples[1:]) / 2)[known], mean


def _lives(fit: Fit, worker: int) -> list[tuple[float, list[WorkerMetrics]]]:
    """A worker's metrics: one list for each time that it began, with the second at which it did."""
    lives: dict[float, tuple[float, list[WorkerMetrics]]] = {}
    for entry in fit.entries:
        figures = entry.figures.get(worker)
        if figures is None:
            continue
        # Figures are older than the entry by as much as they took to arrive: the least delay is the best guess.
        begin = max(0.0, entry.at_s - figures.at_s)
        known, all_of_them = lives.get(figures.began, (begin, []))
        if not all_of_them or figures.at_s > all_of_them[-1].at_s:
            all_of_them.append(figures)
        lives[figures.began] = min(known, begin), all_of_them
    return list(lives.values())


def totals(fit: Fit) -> dict[int, WorkerMetrics]:
    """The metrics of every worker over the whole fit: a process that replaced a worker's counted from zero."""
    lives = {worker: _lives(fit, worker) for worker in sorted(fit.last)}
    return {worker: reduce(_add, (figures[-1] for _, figures in each)) for worker, each in lives.items()}


def _add(one: WorkerMetrics, two: WorkerMetrics) -> WorkerMetrics:
    """Of two lives, of which the second is the later one."""
    names = {field.name for field in fields(WorkerMetrics)} - _LATEST
    sums: dict[str, Any] = {name: getattr(one, name) + getattr(two, name) for name in names}
    counts = dict(Counter(one.staleness) + Counter(two.staleness))
    return replace(two, staleness_max=max(one.staleness_max, two.staleness_max), staleness=counts, **sums)
