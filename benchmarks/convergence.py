"""Does A-SGD reach the accuracy of DDP with the same hyper-parameters?

    python benchmarks/convergence.py             # about three minutes on two cores
    python benchmarks/convergence.py --seeds 1   # a quick look

Digits CNN of examples/digits.py, SGD with learning rate 0.05 and momentum 0.9, batch 16 per worker, 10 epochs. With
each number of workers and each ``nsync``, A-SGD passes if its validation accuracy is at most 0.01 below that of DDP
with the same number of workers (medians over the seeds, accuracy after the last epoch). A seed fixes the first weights
and the order of the data for both.

Prints a table, writes results/convergence.json, and exits with 1 if a row fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

import torch
from common import CONSOLE, prepared
from counts import fit
from pytorch_lightning import seed_everything
from ranks import run_ranks
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from digits import DigitsCNN, Meter, loaders

from lightning_asgd import ASGDStrategy

ROOT = Path(__file__).resolve().parent.parent
RUN_S = 600.0  # for a run to end
Case = tuple[int, int | None]  # workers and nsync, None for DDP


def train(workers: int, nsync: int | None, seed: int, epochs: int) -> dict[str, Any]:
    """Train as one of the workers."""
    torch.set_num_threads(1)
    seed_everything(seed, verbose=False)
    meter, strategy = Meter(), "ddp" if nsync is None else ASGDStrategy(nsync=nsync)
    about = {"devices": workers, "max_epochs": epochs, "callbacks": [meter]}
    fit(DigitsCNN(), loaders(batch_size=16), strategy=strategy, **about)
    return dict(meter.results())


def run_of(case: Case, seed: int, epochs: int) -> dict[str, Any]:
    """One training run."""
    workers, nsync = case
    begun = time.perf_counter()
    result = run_ranks([partial(train, workers, nsync, seed, epochs)] * workers, RUN_S)[0]
    return {"workers": workers, "nsync": nsync, "seed": seed, "seconds": time.perf_counter() - begun, **result}


def describe(case: Case) -> str:
    workers, nsync = case
    return f"{workers} workers, " + ("DDP" if nsync is None else f"A-SGD nsync={nsync}")


def judge(runs: list[dict[str, Any]], cases: list[Case], tolerance: float) -> list[dict[str, Any]]:
    """One row per case: median and range of the last accuracy, and for A-SGD the verdict."""
    rows: list[dict[str, Any]] = []
    for workers, nsync in cases:
        mine = [r for r in runs if (r["workers"], r["nsync"]) == (workers, nsync)]
        last = [r["accuracy"][-1] for r in mine]
        row = {
            "workers": workers,
            "nsync": nsync,
            "median": statistics.median(last),
            "min": min(last),
            "max": max(last),
        }
        if nsync is not None:
            ddp = next(r for r in rows if (r["workers"], r["nsync"]) == (workers, None))
            pushes = [sum(r["staleness"]) for r in mine]
            row["staleness"] = sum(s * n for r in mine for s, n in enumerate(r["staleness"])) / sum(pushes)
            row["difference"] = row["median"] - ddp["median"]
            row["passed"] = row["difference"] >= -tolerance - 1e-6
        rows.append(row)
    return rows


def table_of(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("workers", justify="right")
    table.add_column("strategy", no_wrap=True)
    for column in ("median", "min-max", "to DDP", "staleness"):
        table.add_column(column, justify="right")
    table.add_column("")
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        asgd = row["nsync"] is not None
        table.add_row(
            str(row["workers"]),
            f"A-SGD, nsync {row['nsync']}" if asgd else "DDP",
            f"{row['median']:.3f}",
            f"{row['min']:.3f}-{row['max']:.3f}",
            f"{row['difference']:+.3f}" if asgd else "",
            f"{row['staleness']:.2f}" if asgd else "",
            ("[green]PASS" if row["passed"] else "[bold red]FAIL") if asgd else "",
            end_section=after is not None and after["nsync"] is None,
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare A-SGD's accuracy with DDP's.")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--nsync", type=int, nargs="+", default=[10, 5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--tolerance", type=float, default=0.01)
    args = parser.parse_args()
    cases: list[Case] = [(w, n) for w in args.workers for n in (None, *args.nsync)]
    runs = []
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with prepared(one_thread=True), Progress(*columns, console=CONSOLE) as progress:
        task = progress.add_task("", total=len(cases) * len(args.seeds))
        for case in cases:
            for seed in args.seeds:
                progress.update(task, description=f"{describe(case)}, seed {seed}")
                run = run_of(case, seed, args.epochs)
                runs.append(run)
                progress.console.print(f"{describe(case):26} seed {seed}: {run['accuracy'][-1]:.4f}", highlight=False)
                progress.advance(task)
    rows = judge(runs, cases, args.tolerance)
    settings = {**vars(args), "torch": torch.__version__, "cores": os.cpu_count()}
    (ROOT / "results").mkdir(exist_ok=True)
    (ROOT / "results" / "convergence.json").write_text(
        json.dumps({"settings": settings, "rows": rows, "runs": runs}, indent=1)
    )
    CONSOLE.print(
        table_of(rows, f"\nValidation accuracy of the digits CNN after {args.epochs} epochs, seeds {args.seeds}")
    )
    return 0 if all(row.get("passed", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
