"""What several_trainers.py runs: calls of Trainers one after the other. Every sample that a call sees goes into a file.

python benchmarks/several_program.py OUT fit:asgd:2 test:none:1
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 48


class Counted(pl.LightningModule):
    """A linear model that notes the samples it sees."""

    def __init__(self, out: Path, number: int) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.out, self.number = out, number

    def _loss(self, batch: Any) -> torch.Tensor:
        x, index = batch
        with self.out.open("a") as file:  # short lines: several processes may write at once
            file.write(json.dumps({"call": self.number, "pid": os.getpid(), "samples": index.tolist()}) + "\n")
        return self.net(x).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._loss(batch)
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def call(out: Path, number: int, what: str) -> None:
    """One call of a new Trainer, such as ``fit:ddp_fork:2``: the call, the strategy, its devices."""
    import lightning_asgd  # noqa: F401  # registers its strategies

    name, strategy, devices = what.split(":")
    more: dict[str, Any] = {} if strategy == "none" else {"strategy": strategy}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(accelerator="cpu", devices=int(devices), max_epochs=1, **more, **quiet)
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(SAMPLES, 4), torch.arange(SAMPLES)), batch_size=4)
    getattr(trainer, name)(Counted(out, number), data)


if __name__ == "__main__":
    for number, what in enumerate(sys.argv[2:]):
        call(Path(sys.argv[1]), number, what)
