"""A program whose outcome says which samples were lost or trained twice."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

ENDLESS = 1_000_000  # epochs


class Counts(pl.LightningModule):
    """Learns how often each sample was trained."""

    def __init__(self, samples: int, step_s: float) -> None:
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(samples))
        self.step_s = step_s

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.step_s)
        return -self.seen[batch[0]].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Diary(pl.Callback):
    """Writes into a file, which others read meanwhile, what they want to know of a worker."""

    def __init__(self, file: Path, **told: Any) -> None:
        self.file = file
        self.told: dict[str, Any] = told

    def tell(self, **about: Any) -> None:
        """Add to what the file holds."""
        self.told.update(about)
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.told))
        new.rename(self.file)


class Report(Diary):
    """Tells how far a worker is and what came out; ends endless training at an epoch's end once there is a file `stop`.

    Args:
        file: see :class:`Diary`.
        endless: whether there is no last epoch.
        together: whether all workers must decide alike.
    """

    def __init__(self, file: Path, *, endless: bool = True, together: bool = False) -> None:
        super().__init__(file, trains=False, pushes=-1, samples=0)
        self.endless, self.together = endless, together
        self.samples = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.samples += len(batch[0])
        if trainer.strategy.stats.pushes != self.told["pushes"]:
            self.tell(trains=True, pushes=trainer.strategy.stats.pushes, samples=self.samples)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.endless:
            stop = (self.file.parent / "stop").exists()
            trainer.should_stop |= trainer.strategy.broadcast(stop) if self.together else stop

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.tell(
            ended=True,
            epochs=trainer.current_epoch,
            metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
            seen=sorted(Counter(pl_module.seen.tolist()).items()) if isinstance(pl_module, Counts) else [],
            pushes=trainer.strategy.stats.pushes,
            versions=trainer.strategy.fit_session.synchronizer.versions,
        )


def fit(module: Any, data: Any, **options: Any) -> pl.Trainer:
    """Train with a Trainer that prints nothing, on a CPU, and as one worker unless ``options`` say otherwise."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    common = {"accelerator": "cpu", "devices": 1, "max_epochs": ENDLESS, "num_sanity_val_steps": 0}
    trainer = pl.Trainer(**{**common, **dict.fromkeys(off, False), **options})
    trainer.fit(module, *data)
    return trainer


def numbers(samples: int, batch: int) -> tuple[DataLoader[Any]]:
    """The samples of :class:`Counts`, in random order."""
    return (DataLoader(TensorDataset(torch.arange(samples)), batch, shuffle=True),)


def not_once(told: dict[str, Any]) -> int:
    """By how much too often or too seldom samples were applied, in all, if each was to be applied once per epoch."""
    return int(sum(abs(told["epochs"] - times) * samples for times, samples in told["seen"]))
