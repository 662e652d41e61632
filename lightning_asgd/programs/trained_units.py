"""How many samples or tokens a worker has trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class TrainedUnits:
    """Counts batches, and knows which of them are in optimizer steps.

    ``name`` is a plural; empty if batches are not counted. A tensor that ``count`` returns is read for totals only.
    """

    def __init__(self, name: str = "", count: Callable[[Any], Any] = lambda batch: 0) -> None:
        self.name = name
        self._count = count
        self._steps: Any = 0  # in all steps
        self._batches: Any = 0  # since the latest step
        self._step: Any = 0  # in the latest step, or in those that followed the latest batch
        self._stepped = False  # whether it followed the latest batch
        self._batch: Any = 0  # in the latest batch

    def begin(self, batch: Any) -> None:
        """A batch is about to be trained."""
        self._batch, self._stepped = self._count(batch), False
        self._batches = self._batches + self._batch

    def step(self) -> None:
        """An optimizer has taken a step: with it the batches since the one before count."""
        self._step = self._step + self._batches if self._stepped else self._batches  # of another optimizer, maybe
        self._steps, self._batches, self._stepped = self._steps + self._batches, 0, True

    def discard(self) -> None:
        """The latest batch, or the step that followed it, does not count: other workers have trained it."""
        if self._stepped:
            self._steps = self._steps - self._step
        else:
            self._batches = self._batches - self._batch
        self._step = self._batch = 0

    @property
    def total(self) -> float:
        """Units in all steps. Waits for the device where batches are counted there."""
        total = self._steps = float(self._steps)
        return total
