"""The program that :mod:`engines` has torchrun, Kubernetes and SLURM start, as a user would write it.

The environment says which run it joins: LIGHTNING_ASGD_SERVER and LIGHTNING_ASGD_RUN_ID.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from counts import Counts, Diary
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import ASGDStrategy, Timeouts
from lightning_asgd.algorithms import ASGD

SAMPLES, BATCH, STEP_S, NSYNC, SILENCE_S = 2000, 2, 0.02, 5, 4.0
ENGINE = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "SLURM_PROCID")


class Report(Diary):
    """Tells what a worker does; ends training with the epoch that the file ``last`` names."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        batches = self.told.get("batches", 0) + 1
        self.told["batches"] = batches
        if batches == 1:
            self.tell(first=time.time(), epoch=trainer.current_epoch, world=trainer.world_size)
        elif batches % 20 == 0:
            self.tell(epoch=trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        last = self.file.parent / "last"
        trainer.should_stop |= last.exists() and trainer.current_epoch >= int(last.read_text())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        seen = sorted(Counter(pl_module.seen.tolist()).items())
        self.tell(ended=True, epochs=trainer.current_epoch, seen=seen)


def main() -> None:
    folder = Path(sys.argv[1])
    pl.seed_everything(1, verbose=False)
    torch.set_num_threads(1)
    engine = {name: os.environ[name] for name in ENGINE if name in os.environ}
    report = Report(folder / f"{os.environ['ENGINES_NAME']}-{os.getpid()}.json", pid=os.getpid(), engine=engine)
    timeouts = Timeouts(silence_s=SILENCE_S)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ASGDStrategy(NSYNC, algorithm=ASGD("sum"), timeouts=timeouts),
        max_epochs=1_000_000,
        callbacks=[report],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Counts(SAMPLES, STEP_S), DataLoader(TensorDataset(torch.arange(SAMPLES)), BATCH, shuffle=True))


if __name__ == "__main__":
    main()
