"""What disks.py trains: weights that count how often each sample was trained.

python benchmarks/disks_program.py run ADDRESS OUT                 # a worker of an elastic run
python benchmarks/disks_program.py job CHECKPOINTS OUT [RESUME]    # a job of two workers that writes checkpoints
python benchmarks/disks_program.py tables FOLDER OUT               # a job with a table on the servers
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import ASGDStrategy, ServedEmbedding, Timeouts
from lightning_asgd.algorithms import ASGD

SAMPLES = 200
EPOCHS = 6
STEP_S = 0.02


class Counts(pl.LightningModule):
    """Each sample's weight grows by one with each of its steps."""

    def __init__(self, tables: str = "") -> None:
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(SAMPLES))
        self.rows = ServedEmbedding(SAMPLES, 1, folder=tables, optimizer="sgd", init_std=0.0) if tables else None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(STEP_S)
        own = 0.0 if self.rows is None else self.rows(batch[0]).sum()
        return -self.seen[batch[0]].sum() - own

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.seen], 1.0)


def main() -> None:
    """Train, and write what was counted."""
    way, place, out, *more = sys.argv[1:]
    about: dict[str, Any] = {"devices": 2}
    strategy = ASGDStrategy(nsync=2, algorithm=ASGD("sum"))
    callbacks: list[Any] = []
    if way == "run":
        about = {"devices": 1}
        strategy = ASGDStrategy(nsync=2, run=place, timeouts=Timeouts(silence_s=10.0))
    elif way == "job":
        callbacks = [ModelCheckpoint(place, every_n_epochs=1, save_top_k=-1)]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=EPOCHS,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        **quiet,
        **about,
    )
    module = Counts(place if way == "tables" else "")
    data = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=4)
    print("BEGUN", flush=True)
    trainer.fit(module, data, ckpt_path=more[0] if more else None)
    if trainer.is_global_zero:
        Path(out).write_text(json.dumps(module.seen.tolist()))


if __name__ == "__main__":
    main()
