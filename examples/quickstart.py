"""Train a digit classifier with A-SGD, and compare it with a single process and with DDP.

    python examples/quickstart.py                      # all three, about a minute
    python examples/quickstart.py --only asgd --fast   # two epochs of A-SGD

No GPU, no download, no server to start. It ends with a table, and a picture in results/quickstart.png.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def train(run: str, epochs: int) -> dict[str, Any] | None:
    """One training run; a Trainer's worker processes execute this script, and so this function, too."""
    from digits import DigitsCNN, Meter, loaders
    from pytorch_lightning import Trainer, seed_everything

    from lightning_asgd import ASGDStrategy

    seed_everything(1)
    meter = Meter()
    options: Any = {"max_epochs": epochs, "callbacks": [meter], "logger": False}
    options |= {"enable_checkpointing": False, "enable_model_summary": False}
    if run == "asgd":  # strategy=... is all that A-SGD needs: the model and the data stay as they are
        trainer = Trainer(accelerator="cpu", devices=2, strategy=ASGDStrategy(nsync=10), **options)
    elif run == "ddp":
        trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", **options)
    else:
        trainer = Trainer(accelerator="cpu", devices=1, **options)
    trainer.fit(DigitsCNN(), *loaders())
    return meter.results() if trainer.is_global_zero else None


# ---------------------------------------------------------------- the comparison: nothing below is needed for A-SGD

NAMES = {"single": "single, 1 process", "ddp": "DDP, 2 processes", "asgd": "A-SGD, 2 workers"}
COLORS = {"single": "#8a8f98", "ddp": "#e08a1e", "asgd": "#2463c4"}
RESULTS = Path(__file__).resolve().parent.parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare A-SGD with a single process and with DDP.")
    parser.add_argument("--fast", action="store_true", help="2 epochs instead of 10")
    parser.add_argument("--only", choices=NAMES, help="train with this one only")
    parser.add_argument("--run", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    epochs = 2 if args.fast else 10
    if args.run:
        result = train(args.run, epochs)
        if result is not None:
            args.json.write_text(json.dumps(result))
    else:
        results = {run: in_new_process(run, args.fast) for run in NAMES if args.only in (None, run)}
        print_table(results, epochs)
        RESULTS.mkdir(exist_ok=True)
        save_picture(results, RESULTS / "quickstart.png")


def in_new_process(run: str, fast: bool) -> dict[str, Any]:
    """Train in a process of its own: torch.distributed, which DDP sets up, stays in its process for good."""
    print(f"\n=== {NAMES[run]}", flush=True)
    stale = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in stale and not k.startswith("LIGHTNING_ASGD_")}
    env["OMP_NUM_THREADS"] = "1"  # one torch thread per process, so that the three can be compared
    env["PYTHONWARNINGS"] = "ignore::FutureWarning"  # of Lightning's calls into torch
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--run", run, "--json", str(file), *(["--fast"] if fast else [])]
        subprocess.run(command, env=env, check=True)
        return json.loads(file.read_text())


def print_table(results: dict[str, dict[str, Any]], epochs: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"\nAfter {epochs} epochs, batch 16 per process, 1 torch thread per process, {os.cpu_count()} cores",
        title_justify="left",
    )
    table.add_column("", no_wrap=True)
    for column in ("accuracy", "samples/s", "exchanges", "staleness\nmean", "\nlargest"):
        table.add_column(column, justify="right")
    for run, r in results.items():
        cells = [f"{r['accuracy'][-1]:.3f}", f"{r['samples_per_s']:.0f}"]
        if stale := r["staleness"]:
            mean = sum(s * n for s, n in enumerate(stale)) / sum(stale)
            cells += [str(r["exchanges"]), f"{mean:.2f}", str(len(stale) - 1)]
        table.add_row(NAMES[run], *cells, *[""] * (5 - len(cells)), style="bold" if run == "asgd" else "")
    Console().print(table)


def save_picture(results: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10})
    plt.rcParams.update({"axes.titlelocation": "left", "axes.titlepad": 14, "axes.titleweight": "bold"})
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained", width_ratios=(1.4, 1, 1))
    fig.get_layout_engine().set(wspace=0.08, w_pad=0.1, h_pad=0.1)
    for run, r in results.items():
        left.plot(range(1, len(r["accuracy"]) + 1), r["accuracy"], "o-", ms=4, color=COLORS[run], label=NAMES[run])
    left.set(title="Validation accuracy", xlabel="epoch")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.grid(axis="y", alpha=0.3)
    left.legend(frameon=False, loc="lower right")

    rates = [r["samples_per_s"] for r in results.values()]
    bars = middle.bar(range(len(rates)), rates, color=[COLORS[run] for run in results], width=0.6)
    middle.bar_label(bars, fmt="{:,.0f}", padding=2)
    middle.set_xticks(range(len(rates)), [NAMES[run].replace(", ", "\n") for run in results])
    middle.set(title="Training samples per second", xlim=(-0.6, max(len(rates), 3) - 0.4))

    stale = results.get("asgd", {}).get("staleness", [])
    bars = right.bar(range(len(stale)), stale, color=COLORS["asgd"], width=0.6)
    right.bar_label(bars, padding=2)
    right.set(title="Pushes of A-SGD by staleness", xlabel="versions behind the server", xticks=range(len(stale)))
    right.set(xlim=(-0.6, max(len(stale), 3) - 0.4))
    for axes in (middle, right):
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="x", length=0)
    fig.savefig(path, dpi=150)
    print(f"Saved {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
