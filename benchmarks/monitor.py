"""The cost of an ASGDMonitor: samples per second of A-SGD with and without it, and the time that its hooks take.

Both runs have a CSVLogger, and are taken in pairs whose order alternates, so that a machine that gets slower or busier
affects both. Speeds vary from run to run by far more than the 1 % in question, so the hooks are timed as well: what
they take of the training threads' time is the same on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from typing import Any

from common import prepared, verdict
from rich.table import Table
from throughput import CONSOLE, DISTURBED, Patience, Scenario, System, run, train

TARGET = 0.01  # of the samples per second, and of the training threads' time
HOOKS = ("train_epoch_start", "train_batch_start", "train_batch_end", "train_epoch_end")


def watched(scenario: Scenario, system: System, rank: int, last_step: Any, *, watch: bool) -> dict[str, Any]:
    """As :func:`throughput.train`, with a logger, and with a monitor or without."""
    from pytorch_lightning.loggers import CSVLogger

    from lightning_asgd import ASGDMonitor

    monitor = ASGDMonitor()
    seconds = _timed(monitor)
    with tempfile.TemporaryDirectory() as folder:
        logger = CSVLogger(folder)
        begun = time.perf_counter()
        result = train(scenario, system, rank, last_step, callbacks=[monitor] if watch else [], logger=logger)
        return {**result, "hooks": sum(seconds) / (time.perf_counter() - begun)}


def _timed(monitor: Any) -> list[float]:
    """Have a monitor's hooks note how long they take, each in a place of the list."""
    seconds = [0.0] * len(HOOKS)

    def timed(place: int, hook: Any, *args: Any, **about: Any) -> None:
        begun = time.perf_counter()
        hook(*args, **about)
        seconds[place] += time.perf_counter() - begun

    for place, name in enumerate(HOOKS):
        setattr(monitor, f"on_{name}", partial(timed, place, getattr(monitor, f"on_{name}")))
    return seconds


def measure(scenario: Scenario, patience: Patience) -> dict[bool, list[dict[str, Any]]]:
    """Runs without and with a monitor, in pairs."""
    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for repeat in range(scenario.repeats):
        for watch in (False, True) if repeat % 2 == 0 else (True, False):
            while True:
                patience.wait()
                begun = time.monotonic()
                result = run(scenario, System("A-SGD", scenario.nsync[0]), None, partial(watched, watch=watch))
                if not patience.repeat(result, time.monotonic() - begun):
                    break
            runs[watch].append(result)
            what = "with" if watch else "without"
            speed = f"{result['samples_per_s']:7.0f} samples/s"
            CONSOLE.print(f"  {repeat + 1}/{scenario.repeats}  {what:<8} {speed}  hooks {result['hooks']:.3%}")
    return runs


def show(scenario: Scenario, runs: dict[bool, list[dict[str, Any]]]) -> bool:
    """Print a table and the verdict.

    Returns:
        whether the targets are met.
    """
    ratios = [a["samples_per_s"] / b["samples_per_s"] for a, b in zip(runs[True], runs[False], strict=True)]
    hooks = [r["hooks"] for r in runs[True]]
    table = Table("", "median", "min", "max", title=scenario.describe(), title_justify="left")
    for watch, name in ((False, "samples/s without"), (True, "samples/s with")):
        table.add_row(name, *_spread([r["samples_per_s"] for r in runs[watch]], "{:.0f}"))
    table.add_row("with / without", *_spread(ratios, "{:.3f}"))
    table.add_row("hooks' share of the time", *_spread(hooks, "{:.3%}"))
    CONSOLE.print(table)
    if max(statistics.median(r["other_cpu_share"] for r in each) for each in runs.values()) > DISTURBED:
        CONSOLE.print("[yellow]Other programs disturbed this: measure again on an idle machine.[/]")
    passed = statistics.median(ratios) >= 1 - TARGET and statistics.median(hooks) <= TARGET
    verdict(passed, f"target: less than {TARGET:.0%}, of both")
    return passed


def _spread(values: list[float], form: str) -> list[str]:
    return [form.format(f(values)) for f in (statistics.median, min, max)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=9, help="pairs of runs (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="measuring window of a run (default %(default)s)")
    parser.add_argument("--params", type=float, default=0.6e6, help="parameters of the model (default %(default)g)")
    parser.add_argument("--patience", type=float, default=0.0, metavar="SECONDS", help="as for throughput.py")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # one thread per worker
    import pytorch_lightning  # noqa: F401  # once, for all forked ranks

    scenario = Scenario("monitor", params=int(args.params), seconds=args.seconds, repeats=args.repeats)
    CONSOLE.print(f"\n[bold]monitor[/]: {scenario.describe()}  (load {os.getloadavg()[0]:.1f})")
    with prepared():
        return 0 if show(scenario, measure(scenario, Patience(args.patience))) else 1


if __name__ == "__main__":
    sys.exit(main())
