"""Accuracy compared with DDP, early and late in training: a small CNN with batch norm on Fashion-MNIST.

    python benchmarks/accuracy.py                                     # hours; continues where it was interrupted
    python benchmarks/accuracy.py --optimizer Adam --seeds 3          # a part of it
    python benchmarks/accuracy.py --table                             # the results so far

20,000 training images; accuracy on the 10,000 test images after epochs 1, 3 and 10 of one run. SGD with momentum, Adam
and AdamW with two workers, and Adam with four, each by DDP, and by A-SGD with its defaults, with data="split" and with
nsync=10, from the same seeds with the same hyper-parameters. A seed fixes the first weights and the order of the data,
the same for all, so differences are taken by seed and shown with their standard error. The goal: on average no more
than 0.003 below DDP.

Every run is a line of results/accuracy.jsonl. A line is valid as long as the files of lightning_asgd are unchanged;
DDP's lines always are. The images are those of Debian's package dataset-fashion-mnist.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import math
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

import torch
from common import CONSOLE, prepared
from counts import fit
from ledger import Ledger
from pytorch_lightning import Callback, LightningModule, seed_everything
from ranks import run_ranks
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import ASGDStrategy

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "results" / "accuracy.jsonl"
IMAGES = Path("/usr/share/datasets/fashion-mnist")
PACKAGE = "dataset-fashion-mnist"
GOAL = 0.003
READ = (1, 3, 10)  # epochs
TRAINED, TESTED = 20_000, 10_000
BATCH = 64
RUN_S = 3600.0  # for a run to end
WAYS = ("DDP", "leases", "split", "leases, nsync=10")
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


@dataclass(frozen=True)
class Cell:
    """One run."""

    optimizer: str
    workers: int
    way: str
    seed: int

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.workers} workers, {self.way}, seed {self.seed}"


class CNN(LightningModule):
    """Two convolutions with batch norm, two linear layers: 0.1 million parameters."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        correct = (self.net(images).argmax(1) == labels).float().sum()
        self.log("correct", correct, on_epoch=True, reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


class Accuracies(Callback):
    """The accuracy after every epoch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.values.append(float(trainer.callback_metrics["correct"]) / TESTED)


def read(part: str, count: int) -> TensorDataset:
    """The first images and labels of a part, ``"train"`` or ``"t10k"``."""
    with gzip.open(IMAGES / f"{part}-images-idx3-ubyte.gz") as file:
        pixels = torch.frombuffer(bytearray(file.read()[16 : 16 + count * 784]), dtype=torch.uint8)
    with gzip.open(IMAGES / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = torch.frombuffer(bytearray(file.read()[8 : 8 + count]), dtype=torch.uint8)
    images = pixels.view(count, 1, 28, 28).float() / 255
    return TensorDataset((images - 0.286) / 0.353, labels.long())


def missing_images() -> str | None:
    """Why there are no images here, as a sentence; None if there are."""
    if not IMAGES.is_dir():
        return f"{IMAGES} does not exist. Install Debian's package {PACKAGE}: apt-get install {PACKAGE}"
    return None


def train(cell: Cell, epochs: int, data: tuple[TensorDataset, TensorDataset]) -> dict[str, Any]:
    """Train as one of the workers."""
    torch.set_num_threads(1)
    seed_everything(cell.seed, verbose=False)
    way, _, nsync = cell.way.partition(", nsync=")
    strategy = "ddp" if way == "DDP" else ASGDStrategy(int(nsync) if nsync else None, data=way)
    loaders, accuracies = (DataLoader(data[0], BATCH, shuffle=True), DataLoader(data[1], 500)), Accuracies()
    about = {"devices": cell.workers, "max_epochs": epochs, "callbacks": [accuracies]}
    fit(CNN(cell.optimizer), loaders, strategy=strategy, **about)
    return {"accuracies": accuracies.values}


@cache
def digest() -> str:
    """Changes with the files of lightning_asgd."""
    found = hashlib.sha256()
    for file in sorted((ROOT / "lightning_asgd").rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:12]


def cells(optimizers: Iterable[str], workers: int | None, seeds: int | None, ways: Sequence[str]) -> Iterator[Cell]:
    """All runs, seed by seed, so that an interrupted table has equal rows."""
    plan = [("Adam", 2, 10), ("SGD", 2, 10), ("AdamW", 2, 5), ("Adam", 4, 5), ("SGD", 4, 5)]
    for seed in range(1, 1 + max(count for *_, count in plan)):
        for optimizer, number, count in plan:
            chosen = optimizer in optimizers and workers in (None, number)
            if chosen and seed <= min(count, seeds or count):
                yield from (Cell(optimizer, number, way, seed) for way in WAYS if way in ways)


def show(found: dict[Cell, list[float]], epochs: int) -> bool:
    """Print means, and differences from DDP by seed.

    Returns:
        whether the goal is reached wherever there is something to compare.
    """
    table = Table(title="Accuracy, mean over the seeds; difference from DDP and its standard error", min_width=100)
    at = [epoch for epoch in READ if epoch <= epochs]
    for heading in ("", "", "seeds", *(f"epoch {epoch}" for epoch in at), ""):
        table.add_column(heading, justify="right" if heading else "left")
    good = True
    for optimizer, workers in dict.fromkeys((cell.optimizer, cell.workers) for cell in found):
        for way in WAYS:
            mine = {c.seed: v for c, v in found.items() if (c.optimizer, c.workers, c.way) == (optimizer, workers, way)}
            ddp = {seed: found.get(Cell(optimizer, workers, "DDP", seed)) for seed in mine}
            if not mine:
                continue
            texts, fine = [], True
            for epoch in at:
                text = f"{statistics.fmean(v[epoch - 1] for v in mine.values()):.4f}"
                differences = [v[epoch - 1] - base[epoch - 1] for s, v in mine.items() if (base := ddp[s])]
                if way != "DDP" and differences:
                    mean, error = difference(differences)
                    text += f"  {mean:+.4f} ± {error:.4f}"
                    fine &= mean >= -GOAL
                texts.append(text)
            good &= fine
            table.add_row(
                f"{optimizer}, {workers} workers", way, str(len(mine)), *texts, "" if fine else f"[red]below -{GOAL}"
            )
    CONSOLE.print(table)
    return good


def difference(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error, which one value does not tell."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--workers", type=int, help="only cells with this number of workers")
    parser.add_argument("--way", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument(
        "--seeds", type=int, help="at most this number of seeds (default: 10 for Adam and SGD with 2 workers, else 5)"
    )
    parser.add_argument("--epochs", type=int, default=READ[-1])
    parser.add_argument("--table", action="store_true", help="run nothing, print the results so far")
    parser.add_argument("--file", type=Path, default=FILE)
    args = parser.parse_args()
    ledger = Ledger(args.file, lambda key: "" if "DDP" in key else digest())
    if not args.table:
        if (reason := missing_images()) is not None:
            CONSOLE.print(reason)
            return 2
        data = read("train", TRAINED), read("t10k", TESTED)

        def run(epochs: int, *cell: Any) -> Any:
            ranks = [partial(train, Cell(*cell), epochs, data)] * Cell(*cell).workers
            return run_ranks(ranks, RUN_S)[0]["accuracies"]

        with prepared(one_thread=True):
            todo = cells(args.optimizer, args.workers, args.seeds, args.way)
            ledger.complete(((args.epochs, *astuple(cell)) for cell in todo), run)
    found = {Cell(*cell): each for (epochs, *cell), each in ledger.found.items() if epochs == args.epochs}
    return 0 if show(found, args.epochs) else 1


if __name__ == "__main__":
    sys.exit(main())
