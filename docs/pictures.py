"""Draw the plots of README and of the site: ``make pictures``.

    python -m docs.pictures           # from what is stored in docs/images/data
    python -m docs.pictures --take    # take over first what these programs have left in results/

    make demo                                          quickstart
    python examples/monitor.py, also with --split      monitor-throughput, -timeline, monitor-split-...
    python examples/gan.py, examples/bayesian.py       gan, bayesian
    make algorithms, make rounds                       algorithms, outer_rounds
    python benchmarks/layerwise.py --timeline          layerwise-timeline, as root

The plot of docs/sizing.md is what `lightning-asgd plan` draws for the page's command. Every plot is two files without a
background: NAME-light.svg, which pages name, and NAME-dark.svg, which docs/conf.py adds for the dark theme.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from lightning_asgd.cli.command_line import main as lightning_asgd
from lightning_asgd.monitoring.metric_log import read
from lightning_asgd.report import pictures
from lightning_asgd.report.picture_style import DARK, PAPER, logarithmic, pyplot

ROOT = Path(__file__).resolve().parent.parent
IMAGES, RESULTS = ROOT / "docs" / "images", ROOT / "results"
DATA = IMAGES / "data"
THEMES = {"light": PAPER, "dark": DARK}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"

# ---------------------------------------------------------------------- what is stored

RUNS = ("monitor", "monitor-split")
DRAWN = ("began", "at_s", "samples", "train_s", "exchange_wait_s", "sync_wait_s", "data_wait_s")
ALGORITHMS = {  # that are drawn: colour and dashes
    "ASGD": ("blue", "-"),
    "EASGD": ("green", "-"),
    "LocalSGD": ("purple", (0, (5, 1.5))),
    "SparseLoCo": ("orange", "-"),
    "ASGD('sum')": ("red", (0, (1, 1))),
    "ASGD('sum'), GapAware": ("rose", (0, (3, 1, 1, 1))),
    "Downpour, adam": ("grey", "-"),
}


def take() -> None:
    """Store what programs have left, with few digits."""
    for name in ("quickstart", "gan", "bayesian", "outer_rounds", "layerwise-timeline", "algorithms"):
        if (file := RESULTS / f"{name}.json").exists():
            found = json.loads(file.read_text())
            store(f"{name}.json", [medians(found["runs"]) if name == "algorithms" else found])
    for run in RUNS:
        if (file := RESULTS / run / "asgd.jsonl").exists():
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            store(f"{run}.jsonl", [{**lines[0], "about": {}, "settings": {}}, *thinned(lines)])


def medians(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each task and algorithm, seconds and losses of the run whose last loss is the median."""
    found: dict[str, dict[str, Any]] = {}
    for task in dict.fromkeys(run["task"] for run in runs):
        for name in ALGORITHMS:
            curves = [run["curve"] for run in runs if (run["task"], run["name"]) == (task, name)]
            curves.sort(key=lambda points: points[-1][2])
            for at, _, loss in curves[len(curves) // 2] if curves else []:
                found.setdefault(task, {}).setdefault(name, []).append([at, loss])
    return found


def thinned(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every second line of metrics up to the last one, with what is drawn of them."""
    for line in [line for line in lines if line["kind"] == "figures"][::-2][::-1]:
        yield {**line, "figures": {w: {key: each[key] for key in DRAWN} for w, each in line["figures"].items()}}


def store(name: str, lines: list[Any]) -> None:
    (DATA / name).write_text("".join(json.dumps(rounded(line), separators=(",", ":")) + "\n" for line in lines))


def rounded(value: Any) -> Any:
    """Numbers with four digits after the point at most."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def stored(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


# ---------------------------------------------------------------------- plots


def quickstart(file: Path) -> None:
    import quickstart

    quickstart.save_picture(stored("quickstart"), file)


def gan(file: Path) -> None:
    import gan

    gan.save_picture(gan.data(8000), torch.tensor(stored("gan")), file)


def bayesian(file: Path) -> None:
    import bayesian

    networks, *band = stored("bayesian")
    bayesian.save_picture(networks, *map(torch.tensor, band), file)


def sizing(file: Path) -> None:
    (command,) = re.findall(r"^\$ lightning-asgd (plan .*) --picture ", (ROOT / "docs/sizing.md").read_text(), re.M)
    lightning_asgd([*shlex.split(command), "--picture", str(file)])


def algorithms(file: Path) -> None:
    plt = pyplot()
    figure, both = plt.subplots(1, 2, figsize=(8.5, 4.2), layout="constrained")
    titles = {"digits": "Digits CNN: cross entropy", "characters": "Character model: nats per character"}
    for axes, (task, curves) in zip(both, stored("algorithms").items(), strict=True):
        for name, curve in curves.items():
            colour, dashes = ALGORITHMS[name]
            axes.plot(*zip(*curve, strict=True), color=PAPER[colour], ls=dashes, lw=1.6, label=name)
        losses = [loss for curve in curves.values() for _, loss in curve]
        axes.set(title=titles[task], xlabel="seconds", xlim=(0, 5.2), ylim=(0.9 * min(losses), 1.15 * losses[0]))
        axes.grid(axis="y")
        logarithmic(axes)
    both[0].set_ylabel("held-out loss")
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(file)


def outer_rounds(file: Path) -> None:
    plt, found = pyplot(), stored("outer_rounds")
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.6), layout="constrained")
    for (name, rates), colour in zip(found["goodput"].items(), ("red", "blue"), strict=True):
        places = range(len(rates))
        left.plot(places, [*map(statistics.median, rates)], "o-", ms=4, color=PAPER[colour], label=name)
        left.fill_between(places, [*map(min, rates)], [*map(max, rates)], color=PAPER[colour], alpha=0.2, lw=0)
    left.set_xticks(range(4), ("never", "60", "15", "5"))
    left.set(xlabel="minutes between two losses of a worker", ylabel="goodput", ylim=(0, 1.02), title="64 workers")
    left.legend(loc="lower left")
    for name, curve in found["members"].items():
        colour, dashes = "red" if name.startswith("mean") else "blue", "--" if "2-2-2" in name else "-"
        right.plot(*zip(*curve, strict=True), dashes, color=PAPER[colour], label=name, lw=1.4)
    right.set(
        xlabel="virtual seconds (1 step ~ 1 s)", ylabel="held-out loss", ylim=(None, 3.0), title="2 workers, or 1, 4, 2"
    )
    right.legend()
    for axes in (left, right):
        axes.grid(axis="y")
    figure.savefig(file)


def layerwise_timeline(file: Path) -> None:
    plt, lines = pyplot(), stored("layerwise-timeline")
    figure, axes = plt.subplots(len(lines), 1, figsize=(8, 1.5 * len(lines)), sharex=True, layout="constrained")
    colours = {"forward": PAPER["blue"], "backward": PAPER["orange"], "optimizer": PAPER["green"]}
    for axis, (system, (computing, sending)) in zip(axes, lines.items(), strict=True):
        for what, start, end in computing:
            axis.barh(1, end - start, left=start, height=0.7, color=colours[what], lw=0)
        places = [-0.9 * row / max(1, len(sending) - 1) for row in range(len(sending))]
        axis.hlines(places, *zip(*sending, strict=True), color=PAPER["ink"], lw=1)
        axis.set_yticks([1, -0.45], ["computing", "gradients\nin flight"])
        axis.tick_params(axis="y", length=0)
        axis.set_title(f"{system}: {computing[-1][2] / 2:.2f} s per step", fontsize=10, pad=4)
    axes[-1].set_xlabel("seconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(handles, colours, loc="outside upper right", ncols=3)
    figure.savefig(file)


PLOTS: dict[str, Callable[[Path], None]] = {
    "quickstart": quickstart,
    "gan": gan,
    "bayesian": bayesian,
    "sizing": sizing,
    "algorithms": algorithms,
    "outer_rounds": outer_rounds,
    "layerwise-timeline": layerwise_timeline,
}


def plots() -> Iterator[tuple[str, str]]:
    """Each plot's name, and its SVG with variables for colours."""
    sys.path.insert(0, str(ROOT / "examples"))
    plt = pyplot()
    plt.rcParams.update({"savefig.transparent": True, "svg.hashsalt": "docs"})
    with tempfile.TemporaryDirectory() as folder:
        for name, draw in PLOTS.items():
            with contextlib.redirect_stdout(io.StringIO()):
                draw(file := Path(folder) / f"{name}.svg")
            plt.close("all")
            yield name, pictures.for_page(file.read_text(), name, name)
    for run in RUNS:
        (fit,) = read(DATA / f"{run}.jsonl")
        for picture in pictures.draw(fit):
            if picture.name in ("throughput", "timeline"):
                yield f"{run}-{picture.name}", picture.svg


def twins(svg: str) -> Iterator[tuple[str, str]]:
    """A plot for either theme, as a file of its own."""
    _, _, width, height = re.findall(r'viewBox="([^"]*)"', svg)[0].split()
    about = f'xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="{FONT}"'
    for number, clip in enumerate(re.findall(r'<clipPath id="([^"]*)"', svg)):
        svg = svg.replace(clip, f"clip{number}")  # matplotlib's name may be another one each time
    for theme, colours in THEMES.items():
        own = re.sub(r"var\(--(\w+)\)", lambda found, colours=colours: colours[found[1]], svg)
        yield theme, own.replace("<svg ", f'<svg {about} stroke-linejoin="round" ', 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", action="store_true", help="take over the programs' results first")
    if parser.parse_args().take:
        DATA.mkdir(exist_ok=True)
        take()
    for name, svg in plots():
        for theme, text in twins(svg):
            file = IMAGES / f"{name}-{theme}.svg"
            file.write_text(text)
            print(f"{file.relative_to(ROOT)}: {len(text) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
