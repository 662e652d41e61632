"""Virtual time: a schedule of events, always in the same order."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualClock:
    """Scheduled events; time jumps from one to the next, in the order of their scheduling. Returns the time in s."""

    def __init__(self) -> None:
        self.now = 0.0
        self._count = 0
        self._coming: list[tuple[float, int, Callable[[], object]]] = []

    def __call__(self) -> float:
        """Seconds since the beginning."""
        return self.now

    def at(self, time_s: float, action: Callable[[], object]) -> None:
        """Schedule a function; a time in the past means now."""
        self._count += 1
        heapq.heappush(self._coming, (max(time_s, self.now), self._count, action))

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        """Call something after a number of seconds; 0 means after everything that is due now."""
        self.at(self.now + delay_s, action)

    def run(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Let time pass until there is nothing more to happen, or nothing more is wanted."""
        while self._coming and wanted():
            self.now, _, action = heapq.heappop(self._coming)
            action()
