"""The page of a fit: one HTML file that needs nothing else, and its pictures as files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightning_asgd.monitor.fit_summary import count, duration
from lightning_asgd.monitor.metric_definitions import Window, measures
from lightning_asgd.monitor.metric_log import Fit
from lightning_asgd.report.curves import KINDS, STATES, Fault, faults, places, totals
from lightning_asgd.report.picture_style import DARK, PAPER
from lightning_asgd.report.pictures import FAULT_COLOURS, METRICS, ROWS, Picture, draw

_SMALL = 0.05  # share of the time below which a state needs no explanation
_UNEVEN = 0.15  # difference of two workers' shares at sync points above which they are named


def explained(fit: Fit) -> list[str]:
    """Paragraphs: the shares of all workers' time, then every kind of waiting that took more than a twentieth."""
    workers = totals(fit)
    spent = {state: sum(float(getattr(each, name)) for each in workers.values()) for state, name in STATES.items()}
    alive = sum(each.at_s for each in workers.values())
    if alive <= 0:
        return []
    shares = {state: seconds / alive for state, seconds in spent.items()}
    rest = max(0.0, 1.0 - sum(shares.values()))
    named = [f"{share:.1%} {state}" for state, share in shares.items() if state != "computing"]
    said = [
        f"Of their time, the training threads spent {shares['computing']:.1%} computing, {', '.join(named)}, and "
        f"{rest:.1%} on validations, checkpoints and other callbacks. What took more than a twentieth "
        "of it, and why:"
    ]
    reasons = {"between batches": _between_batches, "waiting at sync points": _at_sync_points}
    reasons["waiting for servers"] = _for_servers
    causes = [reasons[state](fit, spent) for state in reasons if shares[state] >= _SMALL]
    if not causes:
        said[0] = f"{said[0].partition('. ')[0]}. No kind of waiting took more than {_SMALL:.0%}."
    return said + causes


def _between_batches(fit: Fit, spent: Mapping[str, float]) -> str:
    batches = max(1, sum(each.batches for each in totals(fit).values()))
    between, computing = (spent[state] / batches for state in ("between batches", "computing"))
    return (
        f"Between batches: {_time(between)} per batch, beside {_time(computing)} of computing. In that time a worker "
        "fetches its next batch, and the Trainer's loop does its own work: callbacks, loggers and the progress bar. It "
        "hardly depends on the size of a step, so the share is large where steps are short, and on a machine with "
        "fewer cores than processes. Larger batches make it smaller; more loader processes do too if loading is slow, "
        "which lightning-asgd stalls measures."
    )


def _at_sync_points(fit: Fit, spent: Mapping[str, float]) -> str:
    workers = totals(fit)
    epochs = sum(each.epoch for each in workers.values())
    often = f"{_time(spent['waiting at sync points'] / epochs)} per worker and epoch, " if epochs > 0 else ""
    shares = {worker: each.sync_wait_s / each.at_s for worker, each in workers.items() if each.at_s > 0}
    most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
    text = (
        f"At sync points: {often}at validations and at the ends of epochs. There all workers exchange their last "
        "updates and wait for the slowest."
    )
    if shares[most] - shares[least] > _UNEVEN:
        text += f" Worker {most} waited most, {shares[most]:.0%} of its time, and worker {least} {shares[least]:.0%}."
        if fit.settings.get("data") == "split":
            text += " With data='split' every worker trains a fixed part; with data='leases' faster ones train more."
    return text + " Longer epochs and fewer validations make the share smaller."


def _for_servers(fit: Fit, spent: Mapping[str, float]) -> str:
    exchanges = max(1, sum(each.exchanges for each in totals(fit).values()))
    return (
        f"For servers: {_time(spent['waiting for servers'] / exchanges)} per exchange, where a reply had not arrived "
        "when training could not continue without it. A larger nsync or more servers make the share smaller; "
        "lightning-asgd plan computes both."
    )


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


_RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI",
Roboto, "Noto Sans", sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 66rem; margin: 0 auto; padding: 2.2rem 1.1rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.25; font-weight: 650; margin: 0 0 .35rem; overflow-wrap: anywhere; }
h1 span { white-space: nowrap; } h2 { font-size: 1.2rem; font-weight: 650; margin: 2.8rem 0 .5rem; padding-top: .9rem;
border-top: 1px solid var(--line); }
p { margin: .4rem 0; max-width: 46rem; } ul { margin: .3rem 0; padding-left: 1.2rem; max-width: 46rem; }
li { margin: .3rem 0; } .soft, figcaption { color: var(--soft); }
.end { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; border: 1px solid; font-size: .9rem; }
.good { color: var(--green); } .bad { color: var(--red); } .open { color: var(--soft); }
.error { color: var(--red); white-space: pre-wrap; overflow-wrap: anywhere; }
dl { margin: 1.2rem 0; } dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; overflow-wrap: anywhere; }
.facts { display: flex; flex-wrap: wrap; gap: .9rem 2.3rem; }
.facts dd { font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.about { display: grid; grid-template-columns: repeat(auto-fit, minmax(16rem, 1fr)); gap: .7rem 1.6rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr));
gap: 1.6rem 2rem; align-items: start; margin: .6rem 0 1.6rem; }
figure { margin: 0; } figcaption { font-size: .88rem; line-height: 1.45; }
h3 { margin: 0; font-size: 1rem; font-weight: 600; overflow-wrap: anywhere; }
figure svg { display: block; width: 100%; height: auto; margin: .4rem 0; overflow: visible; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.wide { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .36rem .5rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { color: var(--soft); font-weight: 500; vertical-align: bottom; line-height: 1.3; white-space: pre; }
.workers td:nth-child(2), .workers th:nth-child(2), .workers td:nth-child(3), .workers th:nth-child(3),
.settings td, .settings th { text-align: left; }
.all tbody tr:last-child { font-weight: 600; } .settings td { white-space: normal; overflow-wrap: anywhere; }
.settings td:first-child { white-space: nowrap; }
.events { list-style: none; padding: 0; max-width: none; } .events li { margin: .7rem 0; }
.mark { display: inline-block; min-width: 1.5rem; padding: 0 .35rem; border-radius: .7rem; border: 1px solid;
text-align: center; font-size: .8rem; font-weight: 650; margin-right: .5rem; }
.what { overflow-wrap: anywhere; }
pre { font-size: .78rem; line-height: 1.4; max-height: 16rem; overflow: auto; margin: .4rem 0 0; padding: .6rem .8rem;
background: var(--box); border-radius: .4rem; }
@media (max-width: 34rem) { main { padding-top: 1.2rem; } h1 { font-size: 1.4rem; } .facts { gap: .7rem 1.6rem; }
.facts dd { font-size: 1.15rem; } }
@media print { html { font-size: 9.5pt; } body { background: #fff; } main { max-width: none; padding: 0; }
h2 { break-after: avoid; margin-top: 1.4rem; } figure, tr, li, .facts > div { break-inside: avoid; }
.pictures { grid-template-columns: 1fr 1fr; gap: 1rem; } .wide { overflow: visible; }
table { font-size: 7.5pt; } thead th { white-space: pre-line; } th, td { padding: .2rem .3rem; }
pre { max-height: none; white-space: pre-wrap; overflow-wrap: anywhere; } @page { margin: 14mm; } }
"""


def page_style() -> str:
    """Variables for the colours of both themes, and the rules. What is printed is light."""
    light = {**PAPER, "page": "#fcfcfb", "box": "#f2f4f6", "green": "#187a41"}
    dark = {**DARK, "page": "#15181d", "box": "#1e232a"}
    schemes = f":root {{ color-scheme: light; {_variables(light)} }}"
    schemes += (
        f"\n@media screen and (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {_variables(dark)} }} }}"
    )
    return schemes + _RULES


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


_CAPTIONS = {
    "loss-by-seconds": "Mean training loss of all workers. The strong line is the mean over a sliding window of a "
    "fifteenth of the fit, the faint one over each moment alone. Validations and start-up take time too.",
    "loss-by-samples": "The same against the samples that all workers have trained.",
    "throughput": "No line while a worker is absent.",
    "timeline": "What each worker's training thread did with its time. A worker's row is empty while it is absent.",
    "staleness": "How many updates of others the servers had applied since the fetch that an update was based on.",
    "traffic": "Between all workers and all servers, through shared memory where they share a machine.",
}

# Column: the metric of lightning_asgd.monitor.metric_definitions, and how it is written. A line break in a heading
# keeps the table narrow.
_Columns = dict[str, tuple[str, str, float]]
_WORK: _Columns = {
    "samples/s": ("samples_per_s", "{:,.0f}", 1.0),
    "share of\nsamples, %": ("samples/share", "{:.1f}", 100.0),
    "staleness,\nmean": ("staleness/mean", "{:.2f}", 1.0),
    "largest": ("staleness/max", "{:.0f}", 1.0),
    "waiting,\ns": ("waiting/s", "{:,.1f}", 1.0),
    "waiting,\n%": ("waiting", "{:.1f}", 100.0),
    "exchanges": ("exchanges", "{:,.0f}", 1.0),
}
_TIME: _Columns = {
    "computing": ("computing", "{:.1%}", 1.0),
    "waiting\nfor servers": ("wait/exchange", "{:.1%}", 1.0),
    "waiting at\nsync points": ("wait/sync", "{:.1%}", 1.0),
    "between\nbatches": ("wait/data", "{:.1%}", 1.0),
}
_EXCHANGES: _Columns = {
    "updates/s": ("updates_per_s", "{:.1f}", 1.0),
    "refused": ("updates/refused", "{:.0f}", 1.0),
    "repeated": ("updates/repeated", "{:.0f}", 1.0),
    "round trip, ms": ("exchange/round_trip_s", "{:.1f}", 1e3),
    "MB/s": ("traffic/bytes_per_s", "{:.2f}", 1e-6),
    "nsync": ("nsync", "{:.0f}", 1.0),
    "distance": ("distance", "{:.3g}", 1.0),
}


def write(fit: Fit, folder: Path, *, about: str = "") -> Path:
    """Write the page and its pictures into a folder, which is made if it is not there; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw(fit)
    for picture in pictures:
        (folder / f"{picture.name}.png").write_bytes(picture.png)
    page = folder / "report.html"
    page.write_text(_page(fit, pictures, about), encoding="utf-8")
    return page


def _page(fit: Fit, pictures: Sequence[Picture], about: str) -> str:
    happened = faults(fit)
    title = f"{fit.about['model']}, trained with A-SGD" if fit.about.get("model") else "Training with A-SGD"
    parts = ("validation",), ("loss",), ("throughput", "timeline"), ("staleness", "traffic")
    validation, loss, work, rest = (_figures([p for p in pictures if p.name.startswith(names)]) for names in parts)
    sentences = explained(fit)
    causes = f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in sentences[1:])}</ul>" if sentences[1:] else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}, {escape(fit.started)}</title><style>{page_style()}</style></head>\n<body><main>"
        f"<h1>{escape(title).replace('A-SGD', '<span>A-SGD</span>')}</h1>"
        f"{_headline(fit, about)}{_facts(fit)}{_about(fit)}"
        f"<h2>Learning</h2>{_lacking(fit, pictures)}{validation}{loss}"
        f"<h2>Workers</h2>{_marks(fit, happened)}{work}"
        f"{_workers(fit, happened)}<p>{escape(sentences[0]) if sentences else ''}</p>{causes}{_each(fit, _TIME)}"
        f"{_events(happened)}<h2>Exchanges</h2>{rest}{_each(fit, _EXCHANGES)}"
        f"<h2>Settings</h2>{_table(['setting', 'value'], list(fit.settings.items()), 'settings')}"
        "</main></body></html>\n"
    )


def _headline(fit: Fit, about: str) -> str:
    """When it was, and how it ended."""
    how, kind = ("finished", "good") if fit.end == "done" else ("failed", "bad") if fit.end else ("not ended", "open")
    text = "; ".join(part for part in (f"Started {fit.started} on worker 0's clock", about) if part)
    more = ""
    if kind == "bad":
        more = f'<p class="error">{escape(fit.end)}</p>'
    elif kind == "open":
        more = '<p class="soft">The log has no end: the fit has not ended, or was killed.</p>'
    return f'<p><span class="end {kind}">{how}</span> <span class="soft">{escape(text)}.</span></p>{more}'


def _facts(fit: Fit) -> str:
    workers = totals(fit).values()
    whole = measures([Window(each) for each in workers])
    alive, samples = sum(e.at_s for e in workers), sum(e.samples for e in workers)
    seconds = max([fit.entries[-1].at_s, *(e.at_s for e in workers)])  # the chief may have joined later than others
    facts = {
        "trained for": duration(seconds),
        "samples": f"{samples:,}",
        "samples/s, all": f"{samples / seconds:,.0f}" if seconds > 0 else "",
        "epochs": f"{whole.get('epoch', 0.0):.3g}",
        "workers": f"{len(fit.entries[-1].living)} of {max(fit.workers, len(fit.last))}",
        "staleness, mean": f"{whole['staleness/mean']:.2f}" if "staleness/mean" in whole else "",
        "computing": f"{sum(e.train_s for e in workers) / alive:.0%}" if alive > 0 else "",
        "waiting": f"{sum(e.exchange_wait_s + e.sync_wait_s for e in workers) / alive:.0%}" if alive > 0 else "",
    }
    return _list({name: value for name, value in facts.items() if value}, "facts")


def _about(fit: Fit) -> str:
    """What was trained, and how."""
    about, settings = fit.about, fit.settings
    known = places(fit)
    machines, devices = Counter(host for host, _ in known.values()), Counter(device for _, device in known.values())
    lines = {"model": about.get("model", ""), "workers": count(max(fit.workers, len(fit.last)), "worker")}
    if about.get("parameters"):
        frozen = about["parameters"] - about.get("trainable", about["parameters"])
        lines["parameters"] = f"{about['parameters']:,}" + (f", of which {frozen:,} are frozen" if frozen else "")
    if known:
        lines["workers"] += f" on {count(len(machines), 'machine')} ({', '.join(sorted(devices))})"
    if settings.get("num_servers"):
        lines["servers"] = str(settings["num_servers"])
    lines |= {
        "algorithm": settings.get("algorithm", ""),
        "exchanges": _period(settings),
        "data": {"leases": "shared dynamically", "split": "split equally"}.get(str(settings.get("data")), ""),
        "transport": settings.get("transport", ""),
        "precision": about.get("precision", ""),
        "versions": ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items()),
    }
    return _list({name: str(value) for name, value in lines.items() if value}, "about")


def _period(settings: dict[str, Any]) -> str:
    nsync, fetch, push = (settings.get(name) for name in ("nsync", "nfetch", "npush"))
    if nsync == "auto":
        return "period chosen by measurement (nsync='auto')"
    if nsync == "restarted":
        return "period by the theory of parallel restarted SGD (nsync='restarted')"
    if fetch != push:
        return f"push every {push} steps, fetch every {fetch}"
    period = fetch or nsync
    return f"every {period} steps" if period else ""


def _list(lines: dict[str, str], kind: str) -> str:
    each = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in lines.items())
    return f'<dl class="{kind}">{each}</dl>'


def _lacking(fit: Fit, pictures: Sequence[Picture]) -> str:
    """What the pictures of learning do not show, and why."""
    said = []
    number = len({name for _, metrics in fit.validations for name in metrics})
    if not fit.about:
        said.append("The log has no validation metrics: an earlier version of lightning-asgd wrote it.")
    elif not number:
        said.append("There are no validation metrics: no validation ran, or it logged none.")
    elif number > METRICS:
        said.append(f"The first {METRICS} of {number} validation metrics are shown.")
    if not any(each.name == "loss-by-samples" for each in pictures):
        said.append("No training loss was recorded: training_step returned none.")
    return "".join(f'<p class="soft">{escape(each)}</p>' for each in said)


def _figures(pictures: Sequence[Picture]) -> str:
    return f'<div class="pictures">{"".join(_figure(each) for each in pictures)}</div>' if pictures else ""


def _figure(picture: Picture) -> str:
    caption = _CAPTIONS.get(picture.name, "")
    return f"<figure><h3>{escape(picture.title)}</h3>{picture.svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _marks(fit: Fit, happened: Sequence[Fault]) -> str:
    """What the marks in the pictures mean, and which workers they show."""
    most = f"<p>The time of the {ROWS} workers that computed least is shown.</p>" if len(fit.last) > ROWS else ""
    if not happened:
        return most
    kinds = Counter(fault.kind for fault in happened)
    each = ", ".join(f'<b style="color: var(--{FAULT_COLOURS[k]})">{KINDS[k]}</b>' for k in KINDS if k in kinds)
    marks = f"Dashed lines mark what happened to workers and servers ({each}); the list below has their numbers."
    return f"{most}<p>{marks}</p>"


def _workers(fit: Fit, happened: Sequence[Fault]) -> str:
    where, workers = places(fit), totals(fit)
    total = max(1, sum(each.samples for each in workers.values()))
    counts = {k: c for k in ("lost", "replaced", "joined") if (c := Counter(f.worker for f in happened if f.kind == k))}
    rows = []
    for worker, each in workers.items():
        cells = _cells([Window(each)], _WORK, total)
        rows.append(
            [f"{worker}", *where.get(worker, ("", "")), *cells, *(number[worker] or "" for number in counts.values())]
        )
    cells = _cells([Window(each) for each in workers.values()], _WORK, total)
    rows.append(["all", "", "", *cells, *(sum(number.values()) or "" for number in counts.values())])
    table = _table(["worker", "machine", "device", *_WORK, *counts], rows, "workers all")
    note = "Waiting = for servers and at sync points; loading is not included (in the metric asgd/wait/share it is)."
    return f'{table}<p class="soft">{note}</p>'


def _each(fit: Fit, columns: _Columns) -> str:
    """A table of every worker, and of all together."""
    workers = totals(fit)
    rows = [[f"{worker}", *_cells([Window(each)], columns, 1)] for worker, each in workers.items()]
    rows.append(["all", *_cells([Window(each) for each in workers.values()], columns, 1)])
    return _table(["worker", *columns], rows, "all")


def _events(happened: Sequence[Fault]) -> str:
    """What happened to workers and servers; the rest of an event's text, such as a traceback, in smaller print."""
    each = []
    for number, fault in enumerate(happened, 1):
        what, _, more = fault.text.partition("\n")
        mark = f'<span class="mark" style="color: var(--{FAULT_COLOURS[fault.kind]})">{number}</span>'
        text = f'<span class="soft">{duration(fault.at_s)}</span> <span class="what">{escape(what)}</span>'
        each.append(f"<li>{mark}{text}{f'<pre>{escape(more)}</pre>' if more else ''}</li>")
    title = "<h2>Workers and servers that were lost, replaced or joined</h2>"
    return f'{title}<ul class="events">{"".join(each)}</ul>' if each else ""


def _cells(windows: Sequence[Window], columns: _Columns, total: int) -> list[str]:
    """A row's metrics; ``total`` is the number of all workers' samples."""
    values = measures(windows)
    seconds = max(1e-9, sum(each.seconds for each in windows))
    values["samples/share"] = sum(each.after.samples for each in windows) / total
    values["waiting/s"] = sum(each.of("exchange_wait_s", "sync_wait_s") for each in windows)
    values |= {"waiting": values["waiting/s"] / seconds, "computing": sum(e.of("train_s") for e in windows) / seconds}
    values["exchanges"] = float(sum(each.after.exchanges for each in windows))
    return [form.format(factor * values[name]) if name in values else "" for name, form, factor in columns.values()]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], kind: str) -> str:
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
