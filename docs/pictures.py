"""Draw the plots of README and of the site: ``make pictures``.

    python -m docs.pictures           # from what is stored in docs/images/data
    python -m docs.pictures --take    # take over first what these programs have left in results/

    make demo                                          quickstart
    python examples/monitor.py, also with --split      monitor-throughput, -timeline, monitor-split-...
    python examples/bayesian.py                        bayesian

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
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from lightning_asgd.cli.command_line import main as lightning_asgd
from lightning_asgd.monitor.metric_log import read
from lightning_asgd.report import pictures
from lightning_asgd.report.picture_style import DARK, PAPER, pyplot

ROOT = Path(__file__).resolve().parent.parent
IMAGES, RESULTS = ROOT / "docs" / "images", ROOT / "results"
DATA = IMAGES / "data"
THEMES = {"light": PAPER, "dark": DARK}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"

# ---------------------------------------------------------------------- what is stored

RUNS = ("monitor", "monitor-split")
DRAWN = ("began", "at_s", "samples", "train_s", "exchange_wait_s", "sync_wait_s", "data_wait_s")


def take() -> None:
    """Store what programs have left, with few digits."""
    for name in ("quickstart", "bayesian"):
        if (file := RESULTS / f"{name}.json").exists():
            store(f"{name}.json", [json.loads(file.read_text())])
    for run in RUNS:
        if (file := RESULTS / run / "asgd.jsonl").exists():
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            store(f"{run}.jsonl", [{**lines[0], "about": {}, "settings": {}}, *thinned(lines)])


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


def bayesian(file: Path) -> None:
    import bayesian

    networks, *band = stored("bayesian")
    bayesian.save_picture(networks, *map(torch.tensor, band), file)


def sizing(file: Path) -> None:
    (command,) = re.findall(r"^\$ lightning-asgd (plan .*) --picture ", (ROOT / "docs/sizing.md").read_text(), re.M)
    lightning_asgd([*shlex.split(command), "--picture", str(file)])


PLOTS: dict[str, Callable[[Path], None]] = {
    "quickstart": quickstart,
    "bayesian": bayesian,
    "sizing": sizing,
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
