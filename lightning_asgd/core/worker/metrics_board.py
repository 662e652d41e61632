"""The latest metrics of all workers that a worker knows of."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lightning_asgd.core.protocol import WorkerMetrics

_EVENTS = 1000


@dataclass
class MetricsBoard:
    """The latest metrics of the workers that this worker knows of, from heartbeats and sync points.

    The heartbeat's thread and the training thread both write to it. A worker's metrics are replaced as a whole.
    """

    mine: WorkerMetrics | None = None  # this worker's own; None if it takes none
    living: tuple[int, ...] = ()  # workers that take part
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_EVENTS))
    places: dict[int, tuple[str, str]] = field(default_factory=dict)  # machine and device of each worker that is known
    _latest: dict[int, WorkerMetrics] = field(default_factory=dict)

    def note(self, event: str) -> None:
        """Add an event that happened just now."""
        self.events.append((time.monotonic(), event))

    def post(self, worker: int, mine: WorkerMetrics) -> None:
        """Put this worker's own there."""
        self.mine = mine
        self._latest[worker] = mine

    def update(self, figures: Mapping[int, WorkerMetrics | None], living: Iterable[int]) -> None:
        """Add workers' metrics; of two reports of the same worker the later one stays."""
        self.living = tuple(sorted(living))
        for worker, new in figures.items():
            old = self._latest.get(worker)
            if new is not None and (old is None or (new.began, new.at_s) >= (old.began, old.at_s)):
                self._latest[worker] = new

    @property
    def figures(self) -> dict[int, WorkerMetrics]:
        """Figures by worker."""
        return dict(sorted(self._latest.items()))
