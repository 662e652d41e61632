"""Pictures of a fit, as PNG. They are narrow, so that they can be read on a telephone."""

from __future__ import annotations

import io
import itertools
import math
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator, PercentFormatter

from lightning_asgd.monitoring.metric_definitions import bars, staleness
from lightning_asgd.monitoring.metric_log import Fit
from lightning_asgd.report.curves import STATES, Curves

__all__ = ["draw"]

_WIDTH, _HEIGHT, _DPI = 6.0, 3.5, 200  # inches, pixels per inch
_ROWS = 12  # workers in the timeline: more would not be readable
_LOGARITHMIC = (
    30  # ratio of the largest and the smallest loss above which a linear axis would not show the smaller ones
)
_NAMED = 8  # workers whose lines have a name
_BLUE, _FAINT, _GREY, _INK = "#2f6db5", "#b9cde6", "#d9dde3", "#3c434d"
_COLOURS = dict(zip(STATES, ("#8fb4de", "#e8923a", "#b5485d", "#e3c34f"), strict=True))
_STYLE = {
    "axes.edgecolor": "#9aa1ab",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "font.size": 13,
    "grid.color": "#e6e9ed",
    "legend.frameon": False,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def draw(fit: Fit) -> dict[str, bytes]:
    """PNGs by name; without the loss where none was recorded."""
    curves = Curves(fit)
    pictures = {
        "loss-by-samples": _loss(curves, by_samples=True),
        "loss-by-seconds": _loss(curves, by_samples=False),
        "timeline": _timeline(curves),
        "throughput": _throughput(curves),
        "staleness": _staleness(fit),
        "traffic": _traffic(curves),
    }
    return {name: png for name, png in pictures.items() if png is not None}


def _blank(height: float = _HEIGHT, rows: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI)
    return file.getvalue()


def _styled(make: Any) -> Any:
    def styled(*args: Any, **about: Any) -> Any:
        with mpl.rc_context(_STYLE):
            return make(*args, **about)

    return styled


@_styled
def _loss(curves: Curves, *, by_samples: bool) -> bytes | None:
    seconds, samples, loss = curves.loss(smooth=False)
    if not len(loss):
        return None
    figure, (axes,) = _blank()
    axes.plot(samples if by_samples else seconds, loss, color=_FAINT, lw=1.2)
    seconds, samples, smooth = curves.loss(smooth=True)
    axes.plot(samples if by_samples else seconds, smooth, color=_BLUE, lw=2)
    axes.set_ylabel("training loss")
    if 0 < min(smooth) * _LOGARITHMIC < max(smooth):
        axes.set_yscale("log")
    if by_samples:
        axes.set_xlabel("samples trained by all workers")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
    else:
        _time(axes, curves)
    return _png(figure)


@_styled
def _timeline(curves: Curves) -> bytes:
    shares = {worker: curves.shares(worker) for worker in curves.workers}
    waited = {worker: 1 - float(each["computing"].mean()) for worker, each in shares.items()}
    shown = sorted(sorted(shares, key=lambda worker: -waited[worker])[:_ROWS])
    figure, rows = _blank(1.5 + 0.8 * len(shown), len(shown))
    for axes, worker in zip(rows, shown, strict=True):
        parts = [np.append(share, share[-1:]) for share in shares[worker].values()]
        axes.stackplot(curves.edges, parts, colors=_COLOURS.values(), step="post", lw=0)
        axes.set(ylim=(0, 1), yticks=[], facecolor=_GREY)
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_ylabel(f"worker {worker}", rotation=0, ha="right", va="center")
    _time(rows[-1], curves)
    handles = [mpl.patches.Patch(color=colour, label=state) for state, colour in {**_COLOURS, "other": _GREY}.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, fontsize=12, handlelength=1)
    return _png(figure)


@_styled
def _throughput(curves: Curves) -> bytes:
    figure, (axes,) = _blank()
    colours = mpl.colormaps["viridis"]
    several = len(curves.workers) > 1
    for place, worker in enumerate(curves.workers if several else []):
        colour = colours(0.15 + 0.7 * place / max(1, len(curves.workers) - 1))
        label = f"worker {worker}" if len(curves.workers) <= _NAMED else None
        axes.plot(curves.middles, curves.rate("samples", [worker]), color=colour, lw=1.4, label=label)
    axes.plot(curves.middles, curves.rate("samples"), color=_INK, lw=2, label="all" if several else None)
    axes.set_ylabel("samples per second")
    _time(axes, curves)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    if several:
        figure.legend(loc="outside upper center", ncols=3, fontsize=12, handlelength=1.2)
    return _png(figure)


@_styled
def _staleness(fit: Fit) -> bytes:
    figure, (axes,) = _blank()
    counts, edges = bars(staleness(fit.last.values()))
    total = max(1, sum(counts))
    axes.bar(range(len(counts)), [count / total for count in counts], color=_BLUE, width=0.75)
    names = [f"{low}" if high == low + 1 else f"{low}-{high - 1}" for low, high in itertools.pairwise(edges)]
    axes.set_xticks(range(len(counts)), names, rotation=60 if len(names) > 17 else 0)
    axes.set(
        xlabel="versions behind the servers", ylabel="share of all updates", xlim=(-0.7, max(len(counts), 4) - 0.3)
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return _png(figure)


@_styled
def _traffic(curves: Curves) -> bytes:
    figure, (axes,) = _blank()
    pushed, fetched = curves.rate("bytes_pushed") / 1e6, curves.rate("bytes_fetched") / 1e6
    axes.stackplot(
        curves.middles, [pushed, fetched], colors=[_BLUE, _FAINT], labels=["updates pushed", "weights fetched"], lw=0
    )
    axes.set_ylabel("MB per second")
    _time(axes, curves)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    figure.legend(loc="outside upper center", ncols=2, fontsize=12, handlelength=1)
    return _png(figure)


def _time(axes: Any, curves: Curves) -> None:
    """Let the horizontal axis be the fit's time, in a unit that fits."""
    end = curves.edges[-1]
    unit, seconds = next((u, s) for u, s in (("hours", 3600), ("minutes", 60), ("seconds", 1)) if end > 5 * s or s == 1)
    axes.set(xlim=(0, end), xlabel=unit)
    axes.xaxis.set_major_locator(MultipleLocator(seconds * _step(end / seconds)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / seconds:g}"))


def _step(length: float) -> float:
    """A round number of which about five go into a length."""
    power = 10.0 ** math.floor(math.log10(length / 5))
    return power * next(round_one for round_one in (1, 2, 5, 10) if 7 * round_one * power >= length)


def _short(value: float, _: Any = None) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):g} {unit}"
    return f"{value:g}"
