"""How many samples or tokens a worker has trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["TrainedUnits"]


class TrainedUnits:
    """Counts batches, and knows which of them are in optimizer steps.

    Args:
        name: of the units, in plural; empty if batches are not counted.
        count: of a batch: a number, or a tensor of one element, which is read when a total is asked for.
    """

    def __init__(self, name: str = "", count: Callable[[Any], Any] = lambda batch: 0) -> None:
        self.name = name
        self._count = count
        self._steps: Any = 0  # in all steps
        self._latest: Any = 0  # in the latest step
        self._batches: Any = 0  # since that step

    def begin(self, batch: Any) -> None:
        """A batch is about to be trained."""
        self._batches = self._batches + self._count(batch)

    def step(self) -> None:
        """An optimizer has taken a step: with it the batches since the one before count."""
        self._latest, self._batches = self._batches, 0
        self._steps = self._steps + self._latest

    def discard(self) -> None:
        """What was trained last does not count: other workers have trained it."""
        self._steps = self._steps - self._latest
        self._latest = self._batches = 0

    @property
    def total(self) -> float:
        """Units in all steps. Waits for the device where batches are counted there."""
        total = self._steps = float(self._steps)
        return total
