"""Two fits of two workers of which one is killed: ``python -m tests.output.program BETWEEN``.

It prints the argument between the two. In the first one all log records begin with their level and the file that made
them, and hidden ones are shown. In the second one all of Lightning is silenced that can be.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import ASGDStrategy
from tests.helpers.holding import await_file


class Killed(pl.LightningModule):
    """Worker 1 kills itself in its second batch, and worker 0 waits for that in its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches += 1
        if self.batches == 2 and self.global_rank == 0:
            await_file(Path("killed"))
        elif self.batches == 2:
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(logger: Any) -> None:
    Path("killed").unlink(missing_ok=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        strategy=ASGDStrategy(start_method="fork", nsync=2),
        logger=logger,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Killed(), DataLoader(TensorDataset(torch.randn(64, 4)), 4))


if __name__ == "__main__":
    lightning, ours = logging.getLogger("pytorch_lightning"), logging.getLogger("lightning_asgd")
    ours.addHandler(logging.StreamHandler())
    ours.setLevel(logging.INFO)
    for handler in (*lightning.handlers, *ours.handlers):
        handler.setFormatter(logging.Formatter("%(levelname)s %(pathname)s: %(message)s"))
    fit(pl.loggers.CSVLogger("logs", ""))
    sys.stderr.write(f"{sys.argv[1]}\n")
    ours.handlers.clear()
    ours.setLevel(logging.NOTSET)
    lightning.setLevel(logging.ERROR)
    fit(logger=False)
