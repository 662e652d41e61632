"""``lightning-asgd stalls``: data-loading bottlenecks, and what would help."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_asgd.cli.console_tables import console, in_seconds, table
from lightning_asgd.cli.user_code import module_and_loader

if TYPE_CHECKING:
    from rich.table import Table

    from lightning_asgd.data_stalls.stalls import Stalls


def measure_stalls(
    *, module: str, steps: int = 50, warm_up: int = 5, repeats: int = 3, files: Path | None = None
) -> int:
    """Measure how long training waits for its data.

    The tables show how long a step waits for data to be fetched from storage and to be prepared, and predict what more
    loader processes, a cache or faster storage would change.

    Args:
        module: a LightningModule, as package.module:Class or script.py:Class, which is created without arguments and
            has a train_dataloader; or a function that returns a module and a loader.
        steps: steps to time in each pass.
        warm_up: steps before the timed steps.
        repeats: how often to measure; the fastest repeat of each pass counts.
        files: folder that the data is read from. The operating system is asked to drop its files from memory before
            each cold pass.
    """
    from lightning_asgd.data_stalls.probe import stalls as measured

    output = console()  # before the measurement: it may lack a package
    found = measured(*module_and_loader(module), steps=steps, warm_up=warm_up, repeats=repeats, files=files)
    output.print(_time(found))
    output.print(_rates(found))
    output.print(_what_if(found))
    output.print(_verdict(found))
    return 0


def _time(found: Stalls) -> Table:
    made = table(f"A step of {found.batch_size:,} samples", "", "seconds per step", "of the step")
    rows = {
        "training": min(found.synthetic_s, found.cold_s),
        "prep stall": found.prep_stall_s,
        "fetch stall": found.fetch_stall_s,
        "the whole step": found.step_s,
    }
    for name, seconds in rows.items():
        made.add_row(name, in_seconds(seconds), f"{seconds / found.step_s:.1%}")
    return made


def _rates(found: Stalls) -> Table:
    made = table("Rates", "", "samples/s")
    rates = {
        "the device takes in": found.device_rate,
        "the loader prepares": found.prep_rate,
        "storage gives": found.fetch_rate,
        "the slowest of these": found.bound,
        "reached": found.batch_size / found.step_s,
    }
    for name, rate in rates.items():
        made.add_row(name, "no limit seen" if math.isinf(rate) else f"{rate:,.0f}")
    return made


def _what_if(found: Stalls) -> Table:
    made = table("What if (predicted)", "", "samples/s", "times as fast")
    now_s = found.predicted_step_s()
    more = max(1, 2 * found.processes)
    steps_s = {
        f"as it is, {_processes(found.processes)}": now_s,
        f"{_processes(more)} ({os.cpu_count()} cores here)": found.predicted_step_s(processes=more),
        "half of the samples cached": found.predicted_step_s(cached=0.5),
        "all samples cached": found.predicted_step_s(cached=1.0),
        "storage twice as fast": found.predicted_step_s(storage=2.0),
        f"{_processes(more)}, all samples cached": found.predicted_step_s(processes=more, cached=1.0),
    }
    for name, seconds in steps_s.items():
        made.add_row(name, f"{found.batch_size / seconds:,.0f}", f"{now_s / seconds:.2f}")
    return made


def _verdict(found: Stalls) -> str:
    """What to do, in a sentence."""
    share = (found.prep_stall_s + found.fetch_stall_s) / found.step_s
    what = f"Data loading takes {share:.1%} of a step"
    if share < 0.05:
        return f"{what}: no change is needed."
    if found.predicted_step_s(cached=1.0) < found.predicted_step_s(processes=max(1, 2 * found.processes)):
        return f"{what}: cache the samples (CachedDataset) or use faster storage."
    return f"{what}: use more loader processes (num_workers)."


def _processes(count: int) -> str:
    return f"{count} loader process{'' if count == 1 else 'es'}"
