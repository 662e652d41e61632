"""``lightning-asgd stalls``: what training waits for, and what would help."""

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

__all__ = ["measure_stalls"]


def measure_stalls(
    *, module: str, steps: int = 50, warm_up: int = 5, repeats: int = 3, files: Path | None = None
) -> int:
    """Measure how long a training step waits for data to be fetched and prepared, and say what would help.

    Args:
        module: a LightningModule, as package.module:Class or script.py:Class, which is made without arguments and gives
            its own train_dataloader; or a function that returns a module and a loader.
        steps: to be timed, per pass.
        warm_up: steps before that.
        repeats: of everything; the fastest of each pass counts.
        files: a folder that the data are read from: the operating system is asked to forget it before each cold pass.
    """
    from lightning_asgd.data_stalls.probe import stalls as measured

    found = measured(*module_and_loader(module), steps=steps, warm_up=warm_up, repeats=repeats, files=files)
    output = console()
    output.print(_time(found))
    output.print(_rates(found))
    output.print(_what_if(found))
    return 0


def _time(found: Stalls) -> Table:
    made = table(f"A step of {found.batch_size:,} samples", "", "seconds per step", "of the step")
    rows = {
        "training": found.synthetic_s,
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
    made = table("What if (predicted)", "", "samples/s", "of now")
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


def _processes(count: int) -> str:
    return f"{count} loader process{'' if count == 1 else 'es'}"
