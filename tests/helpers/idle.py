"""Whether processes use the processor while nothing happens."""

from __future__ import annotations

import threading

import psutil

__all__ = ["idle_cpu_s"]


def idle_cpu_s(*processes: psutil.Process, windows: int = 3) -> float:
    """The seconds that the busiest process uses within 2 s: the least of a few times, since earlier work may linger."""

    def used() -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in processes]

    least = float("inf")
    for _ in range(windows):
        before = used()
        threading.Event().wait(2.0)
        least = min(least, max(after - b for after, b in zip(used(), before, strict=True)))
        if least < 0.1:
            break
    return least
