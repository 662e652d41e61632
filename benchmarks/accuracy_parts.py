"""Where A-SGD loses accuracy early in training: one cause at a time, in virtual time.

    python benchmarks/accuracy_parts.py               # Adam: a quarter of an hour; resumes where it was interrupted
    python benchmarks/accuracy_parts.py --workers 4
    python benchmarks/accuracy_parts.py --optimizer SGD

The CNN, the images and the optimizers of benchmarks/accuracy.py, all in one process. The servers and exchanges are
the real ones, in virtual time, so a seed gives the same bits on any day. Each row adds one cause:

1. one optimizer that takes the mean of all workers' gradients: DDP,
2. an optimizer per worker, whose weights are averaged after every step: *local optimizers*,
3. the same every ten steps: *drift* of the workers' weights,
4. A-SGD every ten steps, with immediate replies: *staleness*, since no worker waits for the other,
5. the same, with replies that arrive some steps later: *merging while training continues*, as the strategy does.

Batch norm's statistics are taken in three ways from the same weights: those of worker 0, as DDP does; the mean over the
workers, as A-SGD does at sync points; and fresh ones from 5,000 images, so that only the weights count. With these the
test loss is shown too, which is less noisy than the accuracy. Differences are taken from row 1 by seed, with their
standard error. Every run is a line of results/accuracy_parts.jsonl, and is not repeated while the functions that train
and test stay as they are.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: the bits do not depend on the machine's cores

import torch
from accuracy import BATCH, CNN, CONSOLE, OPTIMIZERS, ROOT, TESTED, TRAINED, difference, missing_images, read
from ledger import Ledger
from rich.table import Table
from shares import Shares, train_together
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import vector_to_parameters

from lightning_asgd import Advanced
from lightning_asgd.simulation import Link, LogNormal, Network, Simulation

FILE = ROOT / "results" / "accuracy_parts.jsonl"
LATE = Network(workers=Link(latency_s=2.0))  # a step takes one second: the answer comes four to five steps later
ROWS: dict[str, dict[str, Any] | None] = {
    "DDP: one optimizer": None,
    "one each, averaged every step": {"exchange": {"algorithm": "local_sgd", "nsync": 1}},
    "averaged every 10 steps": {"exchange": {"algorithm": "local_sgd", "nsync": 10}},
    "A-SGD, immediate replies": {"exchange": {"nsync": 10, "advanced": Advanced(overlap=False)}},
    "A-SGD, replies 4 steps late": {"exchange": {"nsync": 10}, "network": LATE},
}
STATISTICS = ("worker 0's", "the mean", "fresh")
COLUMNS = (*(f"accuracy, {kind}" for kind in STATISTICS), "loss, fresh")


def images(seed: int, train: tuple[Tensor, Tensor], workers: int) -> Shares:
    """The CNN on the workers' shares of the images."""
    return Shares(lambda: CNN("SGD").net, functional.cross_entropy, train, workers, BATCH, seed)


def train(row: str, problem: Shares, epochs: int, seed: int, optimizer: str) -> Tensor:
    """Train one row's way, and return the final weights, shape ``(n,)``."""
    settings = ROWS[row]
    make: Callable[[Any], Any] = OPTIMIZERS[optimizer]
    if settings is None:
        return train_together(problem, epochs, make)
    plan = Simulation(
        problem=problem,
        workers=problem.workers,
        steps=problem.steps,
        epochs=epochs,
        optimizer=make,
        speed=LogNormal(1.0, 0.1),
        evaluate_every=sys.maxsize,
        seed=seed,
        **settings,
    )
    return plan.run().weights


def accuracies(problem: Shares, weights: Tensor, fresh: Tensor, test: tuple[Tensor, Tensor]) -> list[float]:
    """On the test images, with each kind of statistics; last the loss with fresh ones."""
    ours = [[b.clone() for b in net.buffers()] for net in problem.nets]
    net = problem.nets[0]
    vector_to_parameters(weights, net.parameters())
    mean = [torch.stack([b.float() for b in each]).mean(0) for each in zip(*ours, strict=True)]
    found = []
    for kind in STATISTICS:
        if kind == "fresh":
            norms = [m for m in net if isinstance(m, nn.BatchNorm2d)]
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # the mean over all batches
            with torch.no_grad():
                for images in fresh.split(500):
                    net.train()(images)
        else:
            for buffer, value in zip(net.buffers(), ours[0] if kind == STATISTICS[0] else mean, strict=True):
                buffer.copy_(value)
        net.eval()
        with torch.no_grad():
            outputs = torch.cat([net(images) for images in test[0].split(500)])
        found.append(float((outputs.argmax(1) == test[1]).sum()) / TESTED)
    return [*found, float(functional.cross_entropy(outputs, test[1]))]


def show(found: dict[tuple[str, int], list[float]], about: str) -> None:
    """Print means, and differences from DDP's by seed."""
    first = next(iter(ROWS))
    title = f"{about}: DDP's mean; differences from it by seed, with their standard error"
    table = Table(title=title, min_width=110)
    for heading in ("", "seeds", *COLUMNS):
        table.add_column(heading, justify="right" if heading else "left")
    for row in ROWS:
        mine = {seed: values for (name, seed), values in found.items() if name == row}
        if not mine:
            continue
        values = list(zip(*mine.values(), strict=True))
        texts = [f"{statistics.fmean(each):.4f}" for each in values]
        base = {seed: found[(first, seed)] for seed in mine if (first, seed) in found}
        if row != first and base:
            for index in range(len(COLUMNS)):
                reference = 0 if index < len(STATISTICS) else index  # DDP's own statistics are worker 0's
                mean, error = difference([mine[seed][index] - base[seed][reference] for seed in base])
                texts[index] = f"{mean:+.4f} ± {error:.4f}"
        table.add_row(row, str(len(mine)), *texts)
    CONSOLE.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="Adam")
    parser.add_argument("--file", type=Path, default=FILE)
    args = parser.parse_args()
    if (reason := missing_images()) is not None:
        CONSOLE.print(reason)
        return 2
    torch.set_num_threads(1)
    train_set, test = (read(part, count).tensors for part, count in (("train", TRAINED), ("t10k", TESTED)))
    sources = map(inspect.getsource, (Shares, train_together, images, train, accuracies))
    version = hashlib.sha256("".join([*sources, repr(ROWS)]).encode()).hexdigest()[:12]

    def run(optimizer: str, epochs: int, workers: int, row: str, seed: int) -> list[float]:
        problem = images(seed, train_set, workers)
        weights = train(row, problem, epochs, seed, optimizer)
        return accuracies(problem, weights, train_set[0][:5000], test)

    ledger = Ledger(args.file, lambda key: version)
    for epochs in args.epochs:
        about = args.optimizer, epochs, args.workers
        plan = [(row, seed) for seed in range(1, 1 + args.seeds) for row in ROWS]
        ledger.complete([(*about, *each) for each in plan], run)
        found = {each: ledger.found[(*about, *each)] for each in plan}
        show(found, f"{args.optimizer}, {args.workers} workers, {epochs} epochs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
