"""The pictures of :mod:`scale` and :mod:`scale_sockets`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scale_limits import MOVED, Limits

from lightning_asgd.report.picture_style import PAPER, SERIES, logarithmic, pyplot

KINDS = ("claim", "exchange", "beat", "contribution", "join", "leave")
GOAL = 3.0  # times as much with the most workers as with the fewest
LOAD = 0.2  # of a core, which the coordinator may take
COLOURS = dict(zip(KINDS, SERIES, strict=False))
Curves = dict[str, dict[int, list[float]]]
"""Microseconds per message of every repeat, by kind of message and number of workers."""


def draw_costs(panel: Any, curves: Curves, title: str) -> None:
    """The cost of each kind of message by the number of workers, and what each may be at most."""
    sizes = sorted({size for by_size in curves.values() for size in by_size})
    for kind in (each for each in KINDS if each in curves):
        known = sorted(curves[kind])
        middle = [statistics.median(curves[kind][size]) for size in known]
        low, high = ([f(curves[kind][size]) for size in known] for f in (min, max))
        panel.fill_between(known, low, high, color=COLOURS[kind], alpha=0.15, lw=0)
        panel.plot(known, middle, color=COLOURS[kind], marker="o", ms=4, lw=1.8)
        panel.plot(known[-1:], [GOAL * middle[0]], color=COLOURS[kind], marker="v", ms=6, mfc="white", ls="")
    panel.set(title=title, xlabel="workers")
    panel.grid(visible=True, which="major", axis="y")
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
    panel.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
    panel.minorticks_off()


def key_to_costs(figure: Any, row: Sequence[Any]) -> None:
    """One key for a row of panels, with their common axis."""
    from matplotlib.lines import Line2D

    logarithmic(row[0])
    row[0].set_ylabel("µs of CPU time per message")
    handles = [Line2D([], [], color=COLOURS[kind], marker="o", ms=4, lw=1.8, label=kind) for kind in KINDS]
    most = f"at most {GOAL:g} times as much as with the fewest workers"
    handles.append(Line2D([], [], color=PAPER["soft"], marker="v", ms=6, mfc="white", ls="", label=most))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), fontsize=9)


def draw_roof(panel: Any, limits: Limits) -> None:
    """What an exchange costs by the size of the shard, and what it cannot cost less than."""
    sizes = sorted(limits.memory)
    megabytes = [scalars * 4 / 1e6 for scalars in sizes]
    memory = [limits.memory_us(n) for n in sizes]
    most = max(us for by_size in limits.exchange_us.values() for us in by_size.values())
    panel.set(xscale="log", xlim=(megabytes[0] / 1.5, megabytes[-1] * 1.5), yscale="log", ylim=(1, 3 * most))
    logarithmic(panel, "x")
    logarithmic(panel)
    panel.fill_between(megabytes, 1e-3, memory, color=PAPER["red"], alpha=0.08, lw=0)
    gigabytes = limits.memory[sizes[-1]] / 1e9
    label = f"memory moves {MOVED} bytes per scalar: {gigabytes:.0f} GB/s, more in caches"
    panel.plot(megabytes, memory, color=PAPER["red"], ls="--", lw=1.5, label=label)
    if limits.link:
        label = f"the link carries {limits.link * 8 / 1e9:g} Gbit/s each way"
        panel.plot(megabytes, [limits.link_us(n) for n in sizes], color=PAPER["purple"], ls=":", lw=1.8, label=label)
    for (name, by_size), colour in zip(limits.exchange_us.items(), ("orange", "gold"), strict=False):
        us = [by_size[n] for n in sizes]
        panel.plot(megabytes, us, color=PAPER[colour], marker="o", ms=5, lw=2, zorder=3, label=name)
    panel.set(title="An exchange by the size of the shard", xlabel="MB of weights on the server")
    panel.set_ylabel("µs of CPU time")
    panel.grid(visible=True, which="major", axis="both")
    panel.legend(loc="upper left", fontsize=9)


def draw_load(panel: Any, load: dict[str, dict[int, float]], step_s: float, goal: float) -> None:
    """How much of a core the coordinator takes, and what it may take at most."""
    sizes = sorted({size for by_size in load.values() for size in by_size})
    for (name, by_size), colour in zip(load.items(), (PAPER["blue"], PAPER["teal"]), strict=False):
        known = sorted(by_size)
        panel.plot(known, [100 * by_size[size] for size in known], color=colour, marker="o", ms=5, lw=2, label=name)
    panel.axhline(100 * goal, color=PAPER["red"], ls="--", lw=1.5)
    panel.text(sizes[0], 100 * goal + 0.6, "the most that it may take", color=PAPER["red"], fontsize=9)
    panel.set(title=f"The coordinator of workers with steps of {step_s:g} s", xlabel="workers", ylabel="% of a core")
    apart = [size for size in sizes if size in (sizes[0], sizes[-1]) or size > sizes[-1] / 10]
    panel.set(ylim=(0, 125 * goal), xticks=apart, xticklabels=[f"{size:,}" for size in apart])
    panel.grid(visible=True, which="major", axis="y")
    panel.legend(loc="center left", fontsize=9)


def draw(
    panels: dict[str, Curves], load: dict[str, dict[int, float]], limits: Limits, step_s: float, path: Path
) -> None:
    """Draw what messages cost, with what limits a shard and the coordinator below."""
    plt = pyplot()
    figure = plt.figure(figsize=(15, 8.6), layout="constrained")
    places = figure.add_gridspec(2, 12)
    share = 12 // len(panels)
    row: list[Any] = []
    for place, (title, curves) in enumerate(panels.items()):
        spot = places[0, place * share : (place + 1) * share]
        row.append(figure.add_subplot(spot, sharey=row[0] if row else None))
        draw_costs(row[-1], curves, title)
    key_to_costs(figure, row)
    draw_roof(figure.add_subplot(places[1, :7]), limits)
    draw_load(figure.add_subplot(places[1, 7:]), load, step_s, LOAD)
    save(figure, path)


def draw_sockets(panels: dict[str, Curves], limits: Limits | None, path: Path) -> None:
    """Draw what messages cost, a panel for each server and transport; and what limits an exchange, if that is known."""
    plt = pyplot()
    columns = len(panels)
    figure = plt.figure(figsize=(15, 4.8 if limits is None else 8.6), layout="constrained")
    places = figure.add_gridspec(1 if limits is None else 2, columns)
    row: list[Any] = []
    for place, (title, curves) in enumerate(panels.items()):
        row.append(figure.add_subplot(places[0, place], sharey=row[0] if row else None))
        draw_costs(row[-1], curves, title)
    key_to_costs(figure, row)
    if limits is not None:
        draw_roof(figure.add_subplot(places[1, :]), limits)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write the picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot().close(figure)
