"""Which nsync? A sweep with Weights & Biases: with its agent, or without an account.

    python examples/wandb_sweep.py --grid             # the grid of wandb_sweep.yaml, offline, and a table; two minutes
    wandb sweep examples/wandb_sweep.yaml             # with an account: the same grid, run by agents
    python examples/wandb_sweep.py --nsync 5          # one run, as an agent starts it
    python examples/wandb_sweep.py --grid --fast      # a few seconds

A smaller nsync keeps the workers closer together, a larger one costs less. Expect accuracies that hardly differ on this
task, and fewer exchanges with a larger nsync. Offline logs are in results/wandb; `wandb sync` uploads them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from digits import DigitsCNN, Meter, loaders
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.loggers import WandbLogger

from lightning_asgd import ASGDStrategy

RESULTS = Path(__file__).resolve().parent.parent / "results"
SWEEP = Path(__file__).with_suffix(".yaml")


def train(nsync: int, lr: float, epochs: int, offline: bool) -> dict[str, Any] | None:
    """One run; the strategy's own monitor logs staleness, waiting and samples per second beside the accuracy."""
    seed_everything(1)
    meter = Meter()
    RESULTS.mkdir(exist_ok=True)
    logger = WandbLogger(f"nsync {nsync}", RESULTS, offline=offline, project="lightning-asgd")
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ASGDStrategy(nsync=nsync),
        max_epochs=epochs,
        callbacks=[meter],
        logger=logger,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsCNN(lr=lr), *loaders())
    logger.experiment.finish()
    return meter.results() if trainer.is_global_zero else None


def grid() -> Iterator[dict[str, Any]]:
    """The runs of wandb_sweep.yaml."""
    parameters = yaml.safe_load(SWEEP.read_text())["parameters"]
    for values in itertools.product(*(parameter["values"] for parameter in parameters.values())):
        yield dict(zip(parameters, values, strict=True))


def print_table(rows: list[tuple[dict[str, Any], Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0][0], "accuracy", "samples/s", "exchanges")
    for run, result in rows:
        cells = f"{result['accuracy'][-1]:.3f}", f"{result['samples_per_s']:.0f}", str(result["exchanges"])
        table.add_row(*map(str, run.values()), *cells)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="A sweep over nsync.")
    parser.add_argument("--nsync", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--grid", action="store_true", help="all runs of wandb_sweep.yaml in turn, offline")
    parser.add_argument("--fast", action="store_true", help="2 epochs instead of 10; of the grid the first two runs")
    args = parser.parse_args()
    epochs = 2 if args.fast else 10
    if args.grid:
        runs = list(itertools.islice(grid(), 2 if args.fast else None))
        results = [train(**run, epochs=epochs, offline=True) for run in runs]
        if all(results):  # worker 0
            print_table(list(zip(runs, results, strict=True)))
    else:
        train(args.nsync, args.lr, epochs, offline=False)


if __name__ == "__main__":
    main()
