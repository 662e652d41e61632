"""What the gain adds to a worker's step, with AdamW and models of 0.6 and 17 million parameters, on one thread.

    python benchmarks/gain_cost.py

A Trainer without a strategy trains batches of 32 samples. Blocks of ten steps with the gain, in which the optimizer's
states are looked at once as with nsync=10, alternate with blocks without it. Exits with 1 if the median ratio of
neighbouring blocks is above 1.01.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd.gain import Gain

STEPS, BATCH, WORKERS, LIMIT = 10, 32, 4, 1.01
WIDTHS = {"0.6 M": (384, 3 * [448]), "17 M": (1024, 5 * [1920])}


class Model(pl.LightningModule):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.net = nn.Sequential(*layers[:-1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Blocks(pl.Callback):
    """Times blocks of steps, in the order without, with, with, without."""

    def __init__(self) -> None:
        self.took: list[tuple[bool, float]] = []
        self._gain, self._begun = Gain(lambda: WORKERS), 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % STEPS:
            return
        now, number = time.perf_counter(), batch_idx // STEPS
        if number:
            self.took.append((self._gains(number - 1), now - self._begun))
        self._gain.close()
        if self._gains(number):
            self._gain = Gain(lambda: WORKERS)
            self._gain.watch(trainer.optimizers)
        self._begun = time.perf_counter()

    def _gains(self, number: int) -> bool:
        return number % 4 in (1, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    good = True
    for name, (inputs, hidden) in WIDTHS.items():
        pl.seed_everything(0, verbose=False)
        model, blocks = Model([inputs, *hidden, 10]), Blocks()
        samples = (2 * args.pairs + 3) * STEPS * BATCH  # of three more blocks two warm up, and one ends untimed
        data = TensorDataset(torch.randn(4096, inputs), torch.randint(10, (4096,)))
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[blocks], **quiet)
        sampler = torch.utils.data.RandomSampler(data, replacement=True, num_samples=samples)
        trainer.fit(model, DataLoader(data, BATCH, sampler=sampler))
        pairs = [dict(pair) for pair in zip(blocks.took[::2], blocks.took[1::2], strict=False)]
        found = [pair[True] / pair[False] for pair in pairs[1:]]
        plain = [took for gains, took in blocks.took if not gains]
        median = statistics.median(found)
        good &= median <= LIMIT
        print(
            f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters, a step "
            f"{1000 * statistics.median(plain) / STEPS:.1f} ms; with the gain {median:.4f} times as long "
            f"({min(found):.3f} to {max(found):.3f})"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
