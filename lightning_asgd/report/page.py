"""The page of a fit: one HTML file that needs nothing else, and its pictures as files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightning_asgd.monitoring.metric_definitions import Window, measures
from lightning_asgd.monitoring.metric_log import Fit
from lightning_asgd.protocol import WorkerMetrics
from lightning_asgd.report.pictures import draw

__all__ = ["write"]

_CAPTIONS = {
    "loss-by-samples": (
        "Training error per sample",
        "Mean training loss of all workers against the samples that all have trained. The strong line is the mean over "
        "a sliding window of a fifteenth of the fit, the faint one over each moment alone.",
    ),
    "loss-by-seconds": (
        "Training error per second",
        "The same against time, validations and start-up included.",
    ),
    "timeline": (
        "Who waited for what",
        "What each worker's training thread did with its time. Waiting for data includes what the training loop does "
        "between two batches; other are validations, checkpoints and callbacks.",
    ),
    "throughput": ("Throughput", "Samples trained per second. A worker that is gone trains none."),
    "staleness": (
        "Staleness",
        "How many updates of others the servers had applied since the fetch that an update was based on.",
    ),
    "traffic": (
        "Traffic",
        "Bytes between all workers and all servers, through shared memory where they share a machine.",
    ),
}

# Column: the metric of lightning_asgd.monitoring.metric_definitions, and how it is written.
_COLUMNS: dict[str, tuple[str, str, float]] = {
    "samples/s": ("samples_per_s", "{:,.0f}", 1.0),
    "updates/s": ("updates_per_s", "{:.1f}", 1.0),
    "staleness, mean": ("staleness/mean", "{:.2f}", 1.0),
    "largest": ("staleness/max", "{:.0f}", 1.0),
    "round trip, ms": ("exchange/round_trip_s", "{:.1f}", 1e3),
    "waited, %": ("wait/share", "{:.1f}", 100.0),
    "for servers": ("wait/exchange", "{:.1f}", 100.0),
    "at sync points": ("wait/sync", "{:.1f}", 100.0),
    "for data": ("wait/data", "{:.1f}", 100.0),
    "MB/s": ("traffic/bytes_per_s", "{:.2f}", 1e-6),
    "refused": ("updates/refused", "{:.0f}", 1.0),
    "repeated": ("updates/repeated", "{:.0f}", 1.0),
    "nsync": ("nsync", "{:.0f}", 1.0),
    "distance": ("distance", "{:.3g}", 1.0),
}

_STYLE = """
:root { color-scheme: light; --ink: #2b3139; --soft: #69717d; --line: #e3e6ea; --paper: #fbfbfa; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.6rem; font-weight: 600; margin: 0 0 .2rem; }
h2 { font-size: 1.1rem; font-weight: 600; margin: 2.6rem 0 .4rem; }
p { margin: .3rem 0; } .soft, figcaption { color: var(--soft); font-size: .92rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .8rem; margin: 1.4rem 0; }
dt { color: var(--soft); font-size: .82rem; } dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.events { display: block; } .events dd { font-size: 1rem; margin-bottom: .6rem; }
.events pre { font-size: .8rem; overflow-x: auto; margin: .3rem 0; color: var(--soft); }
figure { margin: 0; } figcaption { margin-bottom: .6rem; }
img { width: 100%; height: auto; display: block; background: #fff; border-radius: .4rem;
border: 1px solid var(--line); } .wide { overflow-x: auto; }
.wide:has(> .workers) { width: max-content; min-width: 100%; max-width: calc(100vw - 2rem);
margin-left: 50%; transform: translateX(-50%); }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { color: var(--soft); font-weight: 500; } .workers tbody tr:last-child { font-weight: 600; }
.settings td, .settings th { text-align: left; white-space: normal; }
"""


def write(fit: Fit, folder: Path, *, about: str = "") -> Path:
    """Write the page and its pictures.

    Args:
        fit: has entries.
        folder: made if it is not there; files of the same names are replaced.
        about: a line below the title.

    Returns:
        the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw(fit)
    for name, png in pictures.items():
        (folder / f"{name}.png").write_bytes(png)
    page = folder / "report.html"
    page.write_text(_page(fit, pictures, about))
    return page


def _page(fit: Fit, pictures: dict[str, bytes], about: str) -> str:
    figures = "".join(_figure(name, png) for name, png in pictures.items())
    if "loss-by-samples" not in pictures:
        figures = '<p class="soft">No training loss was recorded: training_step returned none.</p>' + figures
    settings = _table(["setting", ""], [[name, value] for name, value in fit.settings.items()], "settings")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>A-SGD, {escape(fit.started)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>Asynchronous SGD</h1><p class="soft">{escape(_headline(fit, about))}</p>'
        f"{_facts(fit)}{figures}"
        f"<h2>Workers</h2>{_workers(fit.last)}{_events(fit)}<h2>Settings</h2>{settings}"
        "</main></body></html>\n"
    )


def _headline(fit: Fit, about: str) -> str:
    end = {"": "it has not ended, or was killed", "done": ""}.get(fit.end, f"it ended with {fit.end}")
    return "; ".join(part for part in (f"Fit of {fit.started}", about, end) if part)


def _facts(fit: Fit) -> str:
    whole = measures([Window(each) for each in fit.last.values()])
    samples = sum(each.samples for each in fit.last.values())
    facts = {
        "time": _duration(fit.entries[-1].at_s),
        "workers": f"{len(fit.entries[-1].living)} of {fit.workers}",
        "epochs": f"{whole.get('epoch', 0.0):.3g}",
        "samples": f"{samples:,}",
        "samples/s": f"{whole['samples_per_s']:,.0f}",
        "waited": f"{100 * whole.get('wait/share', 0.0):.1f} %",
        "staleness": f"{whole.get('staleness/mean', 0.0):.2f}",
    }
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items()) + "</dl>"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _figure(name: str, png: bytes) -> str:
    title, caption = _CAPTIONS[name]
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<h2>{title}</h2><figure><figcaption>{caption}</figcaption><img alt="{title}" src="{source}"></figure>'


def _workers(figures: dict[int, WorkerMetrics]) -> str:
    rows = [[f"worker {worker}", *_cells([Window(each)])] for worker, each in figures.items()]
    rows.append(["all", *_cells([Window(each) for each in figures.values()])])
    return _table(["", *_COLUMNS], rows, "workers")


def _events(fit: Fit) -> str:
    """What happened to workers and servers; the rest of an event's text, such as a traceback, in smaller print."""
    if not fit.events:
        return ""
    rows = [[_duration(at_s), *text.split("\n", 1)] for at_s, text in fit.events]
    each = "".join(
        f"<dt>{when}</dt><dd>{escape(what)}{f'<pre>{escape(more[0])}</pre>' if more else ''}</dd>"
        for when, what, *more in rows
    )
    return f'<h2>Workers and servers that were lost, replaced or came</h2><dl class="events">{each}</dl>'


def _cells(windows: Sequence[Window]) -> list[str]:
    values = measures(windows)
    return [form.format(factor * values[name]) if name in values else "" for name, form, factor in _COLUMNS.values()]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], kind: str) -> str:
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
