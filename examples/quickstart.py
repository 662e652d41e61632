"""Train a digit classifier with DDP and with A-SGD: two equal workers, then one of them slowed down.

    python examples/quickstart.py                      # both, under three minutes
    python examples/quickstart.py --only asgd --fast   # two short fits of A-SGD

With equal workers each trains five times, every time with another fifth of the images for validation: the accuracy is
that of all 1797 images. No download, no server to start. Two GPUs are used where there are two. It ends with a table,
and a picture in results/quickstart.png.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from digits import DigitsCNN, Meter, loaders
from pytorch_lightning import Callback, Trainer, seed_everything

from lightning_asgd import ASGDStrategy
from lightning_asgd.report.picture_style import SYSTEM_COLOURS, pyplot

FOLDS = 5
SLOW_S = 0.02  # that worker 1 sleeps before each batch, where it is slowed down: several times as long as a step


class Slow(Callback):
    """Slows one worker down."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(SLOW_S)


def train(system: str, epochs: int, fold: int, *, slow: bool = False) -> dict[str, Any] | None:
    """Train two workers, which both execute this. Returns, in one of them, what the meter has measured over both."""
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # every fit would say the same
    seed_everything(fold, verbose=False)
    meter = Meter()
    trainer = Trainer(
        accelerator="gpu" if torch.cuda.device_count() > 1 else "cpu",
        devices=2,
        strategy=ASGDStrategy() if system == "asgd" else "ddp",  # all that A-SGD needs
        max_epochs=epochs,
        callbacks=[meter, *([Slow()] if slow else [])],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(DigitsCNN(), *loaders(fold=fold))
    if not trainer.is_global_zero:
        return None
    about = "one of two workers slowed down" if slow else f"fit {fold + 1} of {FOLDS}"
    print(f"  {about}: accuracy {meter.accuracy[-1]:.3f}, {meter.samples_per_s:,.0f} samples/s", flush=True)
    return meter.results()


# ---------------------------------------------------------------- the comparison: nothing below is needed for A-SGD

NAMES = {"ddp": "DDP", "asgd": "A-SGD"}
COLORS = {run: SYSTEM_COLOURS[name] for run, name in NAMES.items()}
RESULTS = Path(__file__).resolve().parent.parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare A-SGD with DDP: equal workers, and a slow one.")
    parser.add_argument("--fast", action="store_true", help="2 epochs instead of 10, and one fit instead of five")
    parser.add_argument("--only", choices=NAMES, help="train with this one only")
    parser.add_argument("--run", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    epochs, folds = (2, 1) if args.fast else (10, FOLDS)
    if args.run:
        equal = [train(args.run, epochs, fold) for fold in range(folds)]
        slow = train(args.run, epochs, 0, slow=True)
        if slow is not None:
            args.json.write_text(json.dumps({"equal": equal, "slow": slow}))
    else:
        results = {run: in_new_process(run, args.fast) for run in NAMES if args.only in (None, run)}
        print_table(results, epochs)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "quickstart.json").write_text(json.dumps(results))
        save_picture(results, RESULTS / "quickstart.png")


def in_new_process(run: str, fast: bool) -> dict[str, Any]:
    """Train in a process of its own: torch.distributed, which DDP sets up, stays in its process for good."""
    print(f"\n=== {NAMES[run]}, 2 workers", flush=True)
    stale = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in stale and not k.startswith("LIGHTNING_ASGD_")}
    env["OMP_NUM_THREADS"] = "1"  # one torch thread per process, so that the two can be compared
    env["PYTHONWARNINGS"] = "ignore"  # of Lightning, of every fit again
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--run", run, "--json", str(file), *(["--fast"] if fast else [])]
        subprocess.run(command, env=env, check=True)
        return json.loads(file.read_text())


def last(fits: list[dict[str, Any]]) -> list[float]:
    """The accuracy that each fit ends with."""
    return [fit["accuracy"][-1] for fit in fits]


def print_table(results: dict[str, dict[str, Any]], epochs: int) -> None:
    from rich.console import Console
    from rich.table import Table

    fits = len(next(iter(results.values()))["equal"])
    table = Table(
        title=f"\n{fits} x {epochs} epochs, batch 16 and 1 torch thread per worker, {os.cpu_count()} cores",
        title_justify="left",
    )
    table.add_column("2 workers", no_wrap=True)
    for column in ("equal:\naccuracy", "\nsamples/s", "one slowed down:\naccuracy", "\nsamples/s"):
        table.add_column(column, justify="right")
    for run, result in results.items():
        accuracy, slow = last(result["equal"]), result["slow"]
        spread = f" ± {stdev(accuracy):.3f}" if len(accuracy) > 1 else ""
        rate = mean(fit["samples_per_s"] for fit in result["equal"])
        cells = [f"{mean(accuracy):.3f}{spread}", f"{rate:,.0f}"]
        cells += [f"{slow['accuracy'][-1]:.3f}", f"{slow['samples_per_s']:,.0f}"]
        table.add_row(NAMES[run], *cells, style="bold" if run == "asgd" else "")
    Console().print(table)


def save_picture(results: dict[str, dict[str, Any]], path: Path) -> None:
    plt = pyplot()
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(9.5, 3.4), layout="constrained", width_ratios=(1, 1.1, 1))
    fig.get_layout_engine().set(wspace=0.12, w_pad=0.1, h_pad=0.1)
    for run, result in results.items():
        epochs = list(zip(*(fit["accuracy"] for fit in result["equal"]), strict=True))
        places = range(1, len(epochs) + 1)
        left.plot(places, [mean(epoch) for epoch in epochs], "o-", ms=4, color=COLORS[run], label=NAMES[run])
        left.fill_between(places, [*map(min, epochs)], [*map(max, epochs)], color=COLORS[run], alpha=0.15, lw=0)
        right.plot(result["slow"]["seconds"], result["slow"]["accuracy"], "o-", ms=4, color=COLORS[run])
    fits = len(next(iter(results.values()))["equal"])
    left.set(title="Equal workers", xlabel=f"epoch (mean and range of {fits} fits)")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.set_ylabel("validation accuracy")
    left.legend(loc="lower right")
    right.set(title="One worker slow", xlabel="seconds of training", xlim=(0, None))
    for axes in (left, right):
        axes.grid(axis="y")

    width = 0.8 / len(results)
    rates = {run: [mean(fit["samples_per_s"] for fit in result["equal"]), result["slow"]["samples_per_s"]]
             for run, result in results.items()}  # fmt: skip
    for number, (run, both) in enumerate(rates.items()):
        offset = (number - (len(rates) - 1) / 2) * width
        bars = middle.bar([case + offset for case in (0, 1)], both, width * 0.92, color=COLORS[run])
        middle.bar_label(bars, fmt="{:,.0f}", padding=2)
    names = ["equal workers", "one worker slow"]
    if len(rates) > 1:
        ratios = [asgd / ddp for ddp, asgd in zip(rates["ddp"], rates["asgd"], strict=True)]
        names = [f"{name}:\nA-SGD {ratio:.1f} x DDP" for name, ratio in zip(names, ratios, strict=True)]
    middle.set_xticks((0, 1), names)
    middle.set(title="Samples per second")
    middle.set_yticks([])
    middle.spines["left"].set_visible(False)
    middle.tick_params(axis="x", length=0)
    fig.savefig(path, dpi=150)
    print(f"Saved {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
