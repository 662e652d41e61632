"""Pictures of a fit: PNG files, and SVG in the colours of the page that holds it. Narrow, for telephones."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator, PercentFormatter

from lightning_asgd.monitor.metric_definitions import bars, staleness
from lightning_asgd.monitor.metric_log import Fit
from lightning_asgd.report.curves import KINDS, STATES, Curves, Fault, faults, totals
from lightning_asgd.report.picture_style import PAPER, SERIES, STYLE, logarithmic

METRICS = 12  # validation metrics that are drawn
_WIDTH, _HEIGHT, _DPI = 5.0, 2.7, 200  # inches, pixels per inch
ROWS = 12  # workers in the timeline: more would not be readable
_LOGARITHMIC = 30  # ratio of the largest and the smallest loss above which a linear axis would hide the smaller ones
_DOTS = 40  # validations that are drawn as dots
_NEAR = 0.035  # of the time: marks that are nearer share a label
FAULT_COLOURS = dict(zip(KINDS, ("red", "teal", "green", "purple", "soft"), strict=True))
_STATE_COLOURS = {**dict(zip(STATES, ("calm", "orange", "red", "gold"), strict=True)), "validation and other": "rest"}
_STYLE = {**STYLE, "axes.grid": True, "axes.grid.axis": "y", "text.parse_math": False, "axes.formatter.use_mathtext": 0}


@dataclass(frozen=True)
class Picture:
    """A picture and the ``name`` of its file."""

    name: str
    title: str
    png: bytes  # the file, on white
    svg: str  # for an HTML page; its colours are variables: see :data:`picture_style.PAPER`


def draw(fit: Fit) -> list[Picture]:
    """All pictures; without the loss where none was recorded, and without validations where there were none."""
    curves, happened = Curves(fit), faults(fit)
    with mpl.rc_context({**_STYLE, "svg.hashsalt": "report"}):
        drawn = [
            *_validations(fit, curves, happened),
            ("loss-by-seconds", "Training loss over time", _loss(curves, happened, by_samples=False)),
            ("loss-by-samples", "Training loss over samples", _loss(curves, [], by_samples=True)),
            ("throughput", "Samples per second", _throughput(curves, happened)),
            ("timeline", "Where the time went", _timeline(curves, happened)),
            ("staleness", "Staleness", _staleness(fit)),
            ("traffic", "Traffic", _traffic(curves)),
        ]
        return [_picture(name, title, figure) for name, title, figure in drawn if figure is not None]


def _picture(name: str, title: str, figure: Figure) -> Picture:
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=_DPI)
    figure.set_layout_engine("none")  # as it has been found
    without = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(svg, format="svg", transparent=True, metadata=without)
    return Picture(name, title, png.getvalue(), for_page(svg.getvalue(), name, title))


def for_page(svg: str, name: str, title: str) -> str:
    """An SVG file as an element of a page: names that no other picture uses, the page's font and colours."""
    (box,) = re.findall(r'viewBox="[^"]*"', svg[:2000])
    inner = svg[svg.index(">", svg.index("<svg")) + 1 :]
    inner = re.sub(r"<!--.*?-->|<defs>\s*<style.*?</defs>|<metadata>.*?</metadata>", "", inner, flags=re.S)
    inner = re.sub(r'(<[^<>]*\bid=")', rf"\1{name}-", inner)
    inner = re.sub(r'(url\(|href=")#', rf"\1#{name}-", inner).replace("xlink:href", "href")
    inner = re.sub(r"\bfont: (\d+ )?([\d.]+px) [^;\"]*", r"font-size: \2", inner)
    inner = re.sub(r"\bfont-family: [^;\"]*;?", "", inner)
    inner = re.sub(r"<[^<>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), inner)  # a hundredth of a point
    for colour, value in PAPER.items():
        inner = re.sub(rf"(fill|stroke): {value}", rf"\1: var(--{colour})", inner)
    return f'<svg role="img" aria-label="{escape(title)}" {box}>{inner}'


def _blank(height: float = _HEIGHT, rows: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]


def _validations(fit: Fit, curves: Curves, happened: Sequence[Fault]) -> list[tuple[str, str, Figure]]:
    """One picture per metric."""
    names = list(dict.fromkeys(name for _, metrics in fit.validations for name in metrics))
    drawn = []
    for number, name in enumerate(names[:METRICS], 1):
        figure, (axes,) = _blank(2.3)
        points = [(at_s, metrics[name]) for at_s, metrics in fit.validations if name in metrics]
        axes.plot(*zip(*points, strict=True), ".-" if len(points) <= _DOTS else "-", color=PAPER["blue"], lw=1.6)
        axes.margins(y=0.08)
        _time(axes, curves, happened)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
        drawn.append((f"validation-{number}", name, figure))
    return drawn


def _loss(curves: Curves, happened: Sequence[Fault], *, by_samples: bool) -> Figure | None:
    seconds, samples, loss = curves.loss(smooth=False)
    if not len(loss):
        return None
    figure, (axes,) = _blank()
    axes.plot(samples if by_samples else seconds, loss, color=PAPER["faint"], lw=1)
    seconds, samples, smooth = curves.loss(smooth=True)
    axes.plot(samples if by_samples else seconds, smooth, color=PAPER["blue"], lw=1.8)
    axes.set_ylabel("training loss")
    if 0 < min(smooth) * _LOGARITHMIC < max(smooth):
        logarithmic(axes)
    if by_samples:
        axes.set_xlabel("samples trained by all workers")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
    else:
        _time(axes, curves, happened)
    return figure


def _timeline(curves: Curves, happened: Sequence[Fault]) -> Figure:
    shares = {worker: curves.shares(worker) for worker in curves.workers}
    computing = {worker: float(each["computing"].mean()) for worker, each in shares.items()}
    shown = sorted(sorted(shares, key=computing.__getitem__)[:ROWS])
    figure, rows = _blank(1.25 + 0.62 * len(shown), len(shown))
    colours = [PAPER[colour] for colour in _STATE_COLOURS.values()]
    for number, (axes, worker) in enumerate(zip(rows, shown, strict=True)):
        known = list(shares[worker].values())
        known.append(np.clip(curves.rate("at_s", [worker]) - sum(known), 0.0, 1.0))  # while it lives
        parts = [np.append(share, share[-1:]) for share in known]
        axes.stackplot(curves.edges, parts, colors=colours, step="post", lw=0)
        axes.set(ylim=(0, 1), yticks=[])
        axes.tick_params(axis="x", length=0 if axes is not rows[-1] else 3)
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_ylabel(f"worker {worker}", rotation=0, ha="right", va="center")
        _time(axes, curves, happened, label=number == 0)
        axes.set_xlabel(rows[-1].get_xlabel() if axes is rows[-1] else "")
    handles = [mpl.patches.Patch(color=PAPER[colour], label=state) for state, colour in _STATE_COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=2, fontsize=9.5, handlelength=1)
    return figure


def _throughput(curves: Curves, happened: Sequence[Fault]) -> Figure:
    figure, (axes,) = _blank()
    several, named = len(curves.workers) > 1, len(curves.workers) <= len(SERIES)
    for place, worker in enumerate(curves.workers if several else []):
        colour, label = (SERIES[place], f"worker {worker}") if named else (PAPER["faint"], None)
        axes.plot(curves.middles, curves.rate("samples", [worker]), color=colour, lw=1.3, label=label)
    label = "all" if several else None
    axes.plot(curves.middles, curves.rate("samples"), color=PAPER["ink"], lw=1.8, label=label)
    axes.set_ylabel("samples per second")
    _time(axes, curves, happened)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    if several:
        figure.legend(loc="outside upper left", ncols=5, fontsize=9.5, handlelength=1)
    return figure


def _staleness(fit: Fit) -> Figure:
    figure, (axes,) = _blank()
    counts, edges = bars(staleness(totals(fit).values()))
    total = max(1, sum(counts))
    axes.bar(range(len(counts)), [count / total for count in counts], color=PAPER["blue"], width=0.75)
    names = [f"{low}" if high == low + 1 else f"{low}-{high - 1}" for low, high in itertools.pairwise(edges)]
    axes.set_xticks(range(len(counts)), names, rotation=60 if len(names) > 15 else 0)
    axes.set(xlabel="versions behind the servers", ylabel="share of updates", xlim=(-0.7, max(len(counts), 4) - 0.3))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure


def _traffic(curves: Curves) -> Figure:
    figure, (axes,) = _blank()
    pushed, fetched = curves.rate("bytes_pushed") / 1e6, curves.rate("bytes_fetched") / 1e6
    colours, labels = [PAPER["blue"], PAPER["faint"]], ["updates pushed", "weights fetched"]
    axes.stackplot(curves.middles, [pushed, fetched], colors=colours, labels=labels, lw=0)
    axes.set_ylabel("MB per second")
    _time(axes, curves, [])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    figure.legend(loc="outside upper left", ncols=2, fontsize=9.5, handlelength=1)
    return figure


def _time(axes: Any, curves: Curves, happened: Sequence[Fault], *, label: bool = True) -> None:
    """Let the horizontal axis be the fit's time, in a unit that fits, and mark what happened to workers and servers."""
    end = curves.edges[-1]
    unit, seconds = next((u, s) for u, s in (("hours", 3600), ("minutes", 60), ("seconds", 1)) if end > 5 * s or s == 1)
    axes.set(xlim=(0, end), xlabel=unit)
    axes.xaxis.set_major_locator(MultipleLocator(seconds * _step(end / seconds)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / seconds:g}"))
    labels: list[tuple[float, str, str]] = []
    for number, fault in enumerate(happened, 1):
        at, colour = min(fault.at_s, end), PAPER[FAULT_COLOURS[fault.kind]]
        axes.axvline(at, color=colour, lw=1.2, ls=(0, (3, 2)), clip_on=False)
        if labels and at - labels[-1][0] < _NEAR * end:
            labels[-1] = (labels[-1][0], f"{labels[-1][1].partition('-')[0]}-{number}", colour)
        else:
            labels.append((at, str(number), colour))
    for at, text, colour in labels if label else []:
        place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
        axes.text(at, 1.01, text, color=colour, fontsize=8.5, weight="bold", **place)


def _step(length: float) -> float:
    """A round number of which about five go into a length."""
    power = 10.0 ** math.floor(math.log10(length / 5))
    return power * next(round_one for round_one in (1, 2, 5, 10) if 7 * round_one * power >= length)


def _short(value: float, _: Any = None) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):g} {unit}"
    return f"{value:.6g}"
