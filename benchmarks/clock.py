"""The part of a training that is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl


class Clock(pl.Callback):
    """Notes when batches end, takes down figures when the measured time begins and ends, and then ends the training.

    Args:
        warm_up_s: seconds of training before the measured time.
        seconds: that are measured.
        figures: of the Trainer, at a moment.
        decide: says whether training is over, from whether this worker's time is up, and the number of the batch.
    """

    def __init__(
        self,
        warm_up_s: float,
        seconds: float,
        figures: Callable[[Any], dict[str, float]],
        decide: Callable[[bool, int], bool] = lambda over, _: over,
    ) -> None:
        self.warm_up_s, self.seconds, self.take, self.decide = warm_up_s, seconds, figures, decide
        self.ends: list[float] = []
        self.figures: list[dict[str, float]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.warm = time.monotonic() + self.warm_up_s

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.monotonic()
        self.ends.append(now)
        if not self.figures and now >= self.warm:
            self.figures.append(self.take(trainer))
        if self.decide(now >= self.warm + self.seconds, batch_idx) and not trainer.should_stop:
            trainer.should_stop = True
            self.figures.append(self.take(trainer))

    def answer(self, rank: int) -> dict[str, Any]:
        """When the measured time may begin, when each batch ended, and by how much the figures grew meanwhile."""
        before, after = self.figures[0], self.figures[-1]
        moved = {key: after[key] - before[key] for key in after}
        return {"rank": rank, "warm": self.warm, "ends": self.ends, **moved}
