"""The program that :mod:`engines` has torchrun, Kubernetes and SLURM start, as a user would write it.

The environment says which run it joins: LIGHTNING_ASGD_RUN; and with which kind of loop:
ENGINES_LOOP is "trainer", "plain" or "fabric".
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
from counts import ENDLESS, Counts, Diary, fit, numbers
from lightning_fabric import Fabric
from torch.utils.data import TensorDataset

from lightning_asgd import ASGDStrategy, AsyncSGD, FabricASGDStrategy, Timeouts
from lightning_asgd.algorithms import ASGD

SAMPLES, BATCH, STEP_S, NSYNC, SILENCE_S = 2000, 2, 0.02, 5, 4.0
ENGINE = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "SLURM_PROCID")


class Report(Diary):
    """Tells what a worker does; ends training with the epoch that the file ``last`` names."""

    def trained(self, epoch: int, world: int) -> None:
        """A batch was trained."""
        batches = self.told.get("batches", 0) + 1
        self.told["batches"] = batches
        if batches == 1:
            self.tell(first=time.time(), epoch=epoch, world=world)
        elif batches % 20 == 0:
            self.tell(epoch=epoch)

    def is_last(self, epoch: int) -> bool:
        """Whether training is to end with an epoch."""
        last = self.file.parent / "last"
        return last.exists() and epoch >= int(last.read_text())

    def ended(self, epochs: int, module: Counts) -> None:
        """Training has ended."""
        self.tell(ended=True, epochs=epochs, seen=sorted(Counter(module.seen.tolist()).items()))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.trained(trainer.current_epoch, trainer.world_size)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop |= self.is_last(trainer.current_epoch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.ended(trainer.current_epoch, pl_module)


def loop(asgd: Any, report: Report, module: Counts, optimizer: Any, data: TensorDataset) -> None:
    """Train in a loop of the program's own."""
    for epoch in asgd.epochs(ENDLESS):
        for batch in asgd.batches(data, batch_size=BATCH, shuffle=True):
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
            report.trained(epoch, 1)
        if report.is_last(epoch):
            asgd.stop()


def main() -> None:
    folder = Path(sys.argv[1])
    pl.seed_everything(1, verbose=False)
    torch.set_num_threads(1)
    engine = {name: os.environ[name] for name in ENGINE if name in os.environ}
    report = Report(folder / f"{os.environ['ENGINES_NAME']}-{os.getpid()}.json", pid=os.getpid(), engine=engine)
    settings: dict[str, Any] = {"nsync": NSYNC, "algorithm": ASGD("sum"), "timeouts": Timeouts(silence_s=SILENCE_S)}
    module, data, kind = Counts(SAMPLES, STEP_S), TensorDataset(torch.arange(SAMPLES)), os.environ["ENGINES_LOOP"]
    if kind == "trainer":
        fit(module, numbers(SAMPLES, BATCH), strategy=ASGDStrategy(**settings), callbacks=[report])
        return
    optimizer: Any = module.configure_optimizers()
    if kind == "plain":
        with AsyncSGD(module, optimizer, **settings) as asgd:
            loop(asgd, report, module, optimizer, data)
            epochs = asgd.epoch
    else:
        fabric = Fabric(accelerator="cpu", devices=1, strategy=FabricASGDStrategy(**settings))
        fabric.launch()
        _, steps = fabric.setup(module, optimizer)
        strategy: Any = fabric.strategy
        loop(strategy, report, module, steps, data)
        epochs = strategy.epoch
        strategy.teardown()
    report.ended(epochs, module)


if __name__ == "__main__":
    main()
