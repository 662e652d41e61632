"""Train digits with a worker that is slowed down during training, and write a report that shows the effect.

    python examples/monitor.py            # about half a minute; results/monitor/report/report.html
    python examples/monitor.py --split    # every worker trains a fixed part of the data, as under DDP: watch it wait
    python examples/monitor.py --fast     # a few seconds

The first two commands write what `make pictures TAKE=1` draws for docs/monitoring.md.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from digits import DigitsCNN, loaders
from pytorch_lightning import Callback, Trainer, seed_everything
from pytorch_lightning.loggers import CSVLogger

from lightning_asgd import ASGDMonitor, ASGDStrategy
from lightning_asgd.report.command import report

RESULTS = Path(__file__).resolve().parent.parent / "results"


class Slowed(Callback):
    """Worker 1 sleeps in every step of the middle third of the epochs, as if another program took its processor."""

    def __init__(self, epochs: int, seconds: float) -> None:
        self.slow = range(epochs // 3, 2 * epochs // 3)
        self.seconds = seconds

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and trainer.current_epoch in self.slow:
            time.sleep(self.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="A-SGD, watched.")
    parser.add_argument("--split", action="store_true", help="give every worker a fixed part of the data")
    parser.add_argument("--fast", action="store_true", help="6 epochs instead of 60")
    args = parser.parse_args()
    epochs = 6 if args.fast else 60
    torch.set_num_threads(1)
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ASGDStrategy(nsync=5, data="split" if args.split else "leases"),
        max_epochs=epochs,
        logger=CSVLogger(RESULTS, name="", version="monitor-split" if args.split else "monitor"),
        callbacks=[ASGDMonitor(every_n_seconds=0.25), Slowed(epochs, 0.01)],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsCNN(lr=0.002), *loaders())
    if trainer.is_global_zero:
        report(trainer.log_dir)


if __name__ == "__main__":
    main()
