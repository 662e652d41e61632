"""Data sets with shards, and others, counted: is every sample trained once per epoch, and does a slow worker cost time?

    python benchmarks/streams.py                        # about 25 minutes
    python benchmarks/streams.py --only WebDataset      # one kind of data
    python benchmarks/streams.py --speed                # the comparison of speeds only
    python benchmarks/streams.py --page                 # write the table for docs/compatibility.md

Every kind of data is trained for two epochs by one worker, by two and by four of which every other is five times
slower, by three of which one is killed in the first epoch, and in an elastic run that a second worker joins. The module
counts what the servers have applied. A cell is "exact" if every sample was applied twice.

The comparison of speeds: one of two workers sleeps 0.1 s longer per step; each has a loader process, which hides how
long a library takes to read. Epochs of a WebDataset and of an iterable data set of Hugging Face, leased, beside a
map-style copy, beside the fast worker alone, in turns, and beside DDP, once. The exit code is 1 if a cell is not exact,
or if a stream takes more than 1.05 of the map-style copy, or longer than the fast worker alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import CONSOLE, spread
from libraries.overlay import OverlayError, overlay
from ranks import clean_environment
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = Path(__file__).with_name("streams_program.py")
PAGE = Path(__file__).parent / "libraries" / "streams.md"  # a part of docs/compatibility.md: see make compatibility
HEAD = """## Data, counted

`python benchmarks/streams.py` counts how often the servers apply each sample; *exact* means once per epoch. Every other
worker is five times slower. There are no loader processes unless named. It counts with
{cells}.

"""
REQUIREMENTS = {
    "MosaicML": ("mosaicml-streaming>=0.11",),
    "": ("datasets>=4", "webdataset>=1", "litdata>=0.2.60", "torchdata>=0.11", "torch-geometric>=2.6"),
}
CELLS: dict[str, list[str]] = {
    "1 worker": ["--workers=1"],
    "2 workers": ["--workers=2"],
    "4 workers": ["--workers=4"],
    "one of 3 killed": ["--workers=3", "--kill"],
    "one joins": [],
}
KINDS = (
    "map",
    "weighted sampler",
    "batch sampler",
    "own shards",
    "datasets",
    "datasets, iterable",
    "datasets, split_dataset_by_node",
    "WebDataset",
    "WebDataset, batched, WebLoader",
    "LitData",
    "MosaicML streaming",
    "own shards, 2 processes",
    "datasets, iterable, 2 processes",
    "WebDataset, 2 processes",
    "LitData, 2 processes",
    "MosaicML streaming, 2 processes",
    "StatefulDataLoader",
    "CombinedLoader, min_size",
    "CombinedLoader, max_size",
    "CombinedLoader, max_size_cycle",
    "PyTorch Geometric",
)
LIMIT_S = 180.0
STREAMS, TARGET = ("WebDataset", "datasets, iterable"), 1.05


def python_of(kind: str) -> Path:
    """The Python of the environment that has a kind's library."""
    name = kind.partition(" ")[0] if kind.partition(" ")[0] in REQUIREMENTS else ""
    folder = ROOT / "results" / "streams" / ("overlay-" + (name.lower() or "all"))
    return overlay(folder, REQUIREMENTS[name])


def run(kind: str, folder: Path, options: list[str]) -> dict[str, Any] | str:
    """What a program says at its end, or what went wrong."""
    result = folder / "job.json"
    result.unlink(missing_ok=True)
    command = [str(python_of(kind)), str(PROGRAM), kind, str(folder), *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment(), check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S:g} s"
    if not result.exists():
        lines = [line for line in done.stderr.splitlines() if "Error" in line] or [f"exit code {done.returncode}"]
        return lines[-1][:120]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def environment() -> dict[str, str]:
    """Of a program, which is to find this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def join(kind: str, folder: Path) -> dict[str, Any] | str:
    """The same in an elastic run: a second worker joins in the first epoch."""
    result = folder / "job.json"
    result.unlink(missing_ok=True)
    log = folder / "serve.log"
    with log.open("w") as output:
        start = "import sys; from lightning_asgd.cli.command_line import main; sys.exit(main())"
        command = [sys.executable, "-c", start, "serve", "127.0.0.1:0/streams"]
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment())
    workers = []
    try:
        until = time.monotonic() + 60
        while 'run="' not in log.read_text():
            if time.monotonic() > until or server.poll() is not None:
                return "the server did not start"
            time.sleep(0.1)
        address = log.read_text().partition('run="')[2].partition('"')[0]
        for name, pause in (("job", 8.0), ("late", 0.0)):
            options = [f"--run={address}", f"--name={name}", "--step=0.1", "--slow=0.2"]
            with (folder / f"{name}.log").open("w") as output:
                command = [str(python_of(kind)), str(PROGRAM), kind, str(folder), *options]
                workers.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment()))
            time.sleep(pause)
        for worker in workers:
            worker.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S:g} s"
    finally:
        for process in (*workers, server):
            process.terminate()
            process.wait(30)
    if not result.exists():
        lines = [line for line in (folder / "job.log").read_text().splitlines() if "Error" in line]
        return (lines or ["failed"])[-1][:120]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def verdict(found: dict[str, Any] | str) -> str:
    if isinstance(found, str):
        return found
    times = Counter(found["seen"])
    if set(times) == {2}:
        return "exact"
    return ", ".join(f"{count} trained {n} times" for n, count in sorted(times.items()) if n != 2)


def conformance(kinds: list[str], folder: Path) -> dict[str, dict[str, str]]:
    """The table."""
    cells: dict[str, dict[str, str]] = {}
    for kind in kinds:
        cells[kind] = {}
        for cell, options in CELLS.items():
            try:
                found = run(kind, folder, options) if options else join(kind, folder)
            except OverlayError as error:
                found = f"not installed: {str(error).splitlines()[0]}"
            cells[kind][cell] = verdict(found)
            CONSOLE.print(f"  {kind}, {cell}: {cells[kind][cell]}")
    return cells


def speeds(folder: Path, repeats: int) -> bool:
    """Compare epochs with a slow worker. Returns whether the targets are met."""
    alone, leased = ["--workers=1"], ["--workers=2"]
    systems: dict[str, tuple[str, list[str]]] = {"map, A-SGD": ("map, 1 process", leased)}
    for kind in STREAMS:
        systems[f"{kind}, the fast worker alone"] = f"{kind}, 1 process", alone
        systems[f"{kind}, A-SGD"] = f"{kind}, 1 process", leased
    under_ddp = {
        "map, DDP": "map",
        "datasets, iterable, DDP": "datasets, split_dataset_by_node",
        "WebDataset, DDP": "WebDataset",
    }
    systems |= {name: (f"{kind}, 1 process", [*leased, "--ddp", "--epochs=1"]) for name, kind in under_ddp.items()}
    took: dict[str, list[float]] = {name: [] for name in systems}
    common = ["--samples=8000", "--epochs=2", "--step=0.01", "--slow=0.11"]
    for turn in range(repeats):
        for name, (kind, options) in systems.items():
            if turn and name in under_ddp:  # it takes minutes, and once is enough to see that
                continue
            found = run(kind, folder / "speed", [*common, *options])
            if isinstance(found, str):
                CONSOLE.print(f"{name}: {found}")
                continue
            took[name].append(found["epochs"][-1])
            CONSOLE.print(f"  {turn + 1}/{repeats}  {name}: {took[name][-1]:.2f} s")
    table = Table("", "seconds per epoch", "/ map-style, leased", "/ alone", title="one of two workers 0.1 s slower")
    passed = True
    for name, each in took.items():
        mine = next((f"{kind}, the fast worker alone" for kind in STREAMS if name == f"{kind}, A-SGD"), name)
        ratios = [[a / b for a, b in zip(each, took[base], strict=False)] for base in ("map, A-SGD", mine)]
        shown = [spread(r) for r in (each, *ratios)]
        table.add_row(name, *shown[: 3 if mine != name else 2])
        if mine != name:
            passed &= bool(each) and statistics.median(ratios[0]) <= TARGET and statistics.median(ratios[1]) <= 1
    CONSOLE.print(table)
    CONSOLE.print(
        "PASS" if passed else "FAIL", f"streams: at most {TARGET} of the map-style copy, and 1 of the fast worker alone"
    )
    return passed


def page(cells: dict[str, dict[str, str]]) -> str:
    exact = [kind for kind, found in cells.items() if {*found.values()} == {"exact"}]
    lines = textwrap.wrap(f"Exact with all: {'; '.join(exact)}.", 120) if exact else []
    others = [[kind, *found.values()] for kind, found in cells.items() if kind not in exact]
    if others:
        rows = [["data", *CELLS], ["---"] * (1 + len(CELLS)), *others]
        lines += ["", *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS, nargs="+", help="only these kinds of data")
    parser.add_argument("--speed", action="store_true", help="only the comparison of speeds")
    parser.add_argument("--counts", action="store_true", help="only the table")
    parser.add_argument("--repeats", type=int, default=3, help="of the comparison (default %(default)s)")
    parser.add_argument("--page", action="store_true", help="write the table for docs/compatibility.md")
    args = parser.parse_args()
    passed = True
    clean_environment()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "speed").mkdir()
        if not args.speed:
            cells = conformance(list(args.only or KINDS), folder)
            text = page(cells)
            print(text)
            passed &= all(cell == "exact" for row in cells.values() for cell in row.values())
            if args.page:
                PAGE.write_text(HEAD.format(cells="; ".join(CELLS)) + text + "\n")
        if not args.counts:
            passed &= speeds(folder, args.repeats)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
