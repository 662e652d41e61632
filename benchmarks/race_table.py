"""How races are shown: a table of seconds for every scenario, and a picture of them all."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

__all__ = ["draw", "ratios", "table"]

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


def draw(results: Mapping[str, Runs], label: str, file: Path) -> None:
    """Bars of the medians with a dot for every run, on a logarithmic scale; the results are by the scenario's title."""
    from lightning_asgd.report.picture_style import PAPER, SYSTEM_COLOURS, logarithmic, pyplot

    plt = pyplot()
    figure, axes = plt.subplots(
        1, len(results), figsize=(1 + 2.6 * len(results), 4), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, (title, runs) in zip(axes[0], results.items(), strict=True):
        for place, (system, each) in enumerate(runs.items()):
            times = [r["reached_s"] for r in each]
            axis.bar(place, statistics.median(times), color=SYSTEM_COLOURS.get(system, PAPER["teal"]))
            axis.plot([place] * len(times), times, ".", color=PAPER["ink"], markersize=4)
            axis.text(place, max(times) * 1.04, f"{statistics.median(times):.1f}", ha="center", fontsize=8)
        axis.set_xticks(range(len(runs)), list(runs), fontsize=8, rotation=20)
        axis.set_title(title, fontsize=9)
        logarithmic(axis)
    axes[0][0].set_ylabel(label)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)
