"""How races are shown: a table of seconds for every scenario."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.table import Table

__all__ = ["ratios", "table"]

Runs = Mapping[str, list[dict[str, Any]]]  # by system, with the seconds of each as "reached_s"


def ratios(runs: Runs, system: str) -> list[float]:
    """A-SGD's time divided by a system's, per repeat."""
    return [a["reached_s"] / b["reached_s"] for a, b in zip(runs["A-SGD"], runs[system], strict=True)]


def table(title: str, runs: Runs) -> Table:
    """Seconds by system, and A-SGD's share of them."""
    found = Table(title=title, title_justify="left")
    for heading in ("", "median", "min", "max", "A-SGD / this", "min", "max"):
        found.add_column(heading, justify="right" if heading else "left")
    for system, results in runs.items():
        times = [r["reached_s"] for r in results]
        row = [f"{f(times):.2f}" for f in (statistics.median, min, max)]
        if system != "A-SGD":
            row += [f"{f(ratios(runs, system)):.3f}" for f in (statistics.median, min, max)]
        found.add_row(system, *row)
    return found
