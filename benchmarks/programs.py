"""Third-party programs, unchanged except for the strategy: one process, DDP and A-SGD compared.

    python -m benchmarks.programs                      # all; over an hour on two cores the first time
    python -m benchmarks.programs --only scvi-tools    # one of them
    python -m benchmarks.programs --only scvi-tools --seeds 5    # as good as under DDP, or was the seed lucky?
    python -m benchmarks.programs --page               # and write the tables into docs/compatibility.md

* Libraries that train: each as its documentation shows, with two workers. What counts is the error of what was trained,
  that every sample is trained once per epoch, that no file is written by two workers, and how the script ends.
* Data sets that divide themselves by rank, with 1, 2, 3 workers and 0, 2 loader processes: no sample is trained twice,
  none is missing.
* Programs that ship with Lightning and torchvision: see demos.py.

Every library is installed into an environment of its own below results/programs/overlays, once. A program's results are
in results/programs/<name>.json. Finished trainings are not run again until the program or lightning_asgd changes.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.libraries.catalogue import ROWS
from benchmarks.libraries.runner import Result, Row, run_row
from benchmarks.libraries.verdict import data_table, library_table, problems

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "programs"
PAGE = ROOT / "benchmarks" / "libraries" / "page.md"
DEMOS = ("LightningTransformer", "LightningLSTM", "torchvision resnet18")
HEAD = """## Third-party programs

Each library as its documentation shows it, on small generated data, with two workers under DDP and two under
`ASGDStrategy(nsync=10)` (`make programs`). Errors are of one seed; lower is better. *as DDP*: the script succeeds,
trains as many samples as without A-SGD, writes no file twice, and its error exceeds DDP's by at most a tenth of what
DDP gained on a model that knows nothing.
"""
DATA = """
Data sets that divide themselves among 2 and 3 workers, with 0 and with 2 loader processes:
"""
CONSOLE = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)


def show(title: str, heads: list[str], lines: list[list[str]]) -> None:
    """Print a table, unless it is empty."""
    if not lines:
        return
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head)
    for line in lines:
        table.add_row(*line)
    CONSOLE.print(table)


def markdown(heads: list[str], lines: list[list[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def page(libraries: list[list[str]], data: list[list[str]]) -> str:
    """A section of docs/compatibility.md, from the tables' lines; data sets with the same results share a row."""
    trained = [[name, version, ddp, asgd, verdict] for name, version, _, ddp, asgd, *_, verdict in libraries]
    rows: dict[tuple[str, str], list[str]] = {}
    for name, version, _, *found, _ in data:
        results = "; ".join(dict.fromkeys(found[:2])), "; ".join(dict.fromkeys(found[2:]))
        rows.setdefault(results, []).append(f"{name} {version}")
    counted = [[", ".join(names), *results] for results, names in rows.items()]
    tables = (
        markdown(["library", "version", "error, DDP", "error, A-SGD", "result"], trained),
        markdown(["data set", "DDP", "A-SGD"], counted),
    )
    return HEAD + "\n" + tables[0] + DATA + "\n" + tables[1]


def write_page(found: list[tuple[Row, Result]]) -> None:
    """Write the tables where the page of what works takes them from, and that page."""
    PAGE.write_text(page(library_table(found)[1], data_table(found)[1]))
    subprocess.run([sys.executable, "-m", "tests.conformance.page"], cwd=ROOT, check=True)


def run_seeds(row: Row, seeds: int) -> None:
    """Train with other seeds too, and print what A-SGD's errors are beside DDP's."""
    ways = ("ddp 2x0", "asgd 2x0")
    lines, differences = [], []
    for seed in range(1, seeds + 1):
        cells = run_row(replace(row, seed=seed), RESULTS, CONSOLE.print).cells
        errors = [cells[way]["error"] for way in ways if "error" in cells.get(way, {})]
        lines.append([str(seed), *(f"{error:.4g}" for error in errors)])
        differences += [errors[1] - errors[0]] if len(errors) == len(ways) else []
    if len(differences) > 1:
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        lines.append(["A-SGD - DDP", "", f"{statistics.fmean(differences):+.4f} ± {error:.4f}"])
    show(f"{row.name}: errors by seed", ["seed", "DDP", "A-SGD"], lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="part of a program's name")
    parser.add_argument(
        "--cells", default="", metavar="TEXT", help='only trainings whose name contains this, such as "asgd 2x0"'
    )
    parser.add_argument("--again", action="store_true", help="run finished trainings again, too")
    parser.add_argument("--seeds", type=int, default=1, help="seeds per library; its errors are means over them")
    parser.add_argument("--page", action="store_true", help="write the tables into docs/compatibility.md")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no training is left behind
    every = (*DEMOS, *ROWS)
    names = [name for name in every if not args.only or args.only in name]
    if not names:
        parser.error(f"--only {args.only}: there is no such program. Expected part of one of {', '.join(every)}.")
    found = []
    for name in names:
        if name in ROWS:
            row = ROWS[name]
            found.append((row, run_row(row, RESULTS, CONSOLE.print, again=args.again, only=args.cells)))
            if args.seeds > 1 and not row.samples and not row.refused:
                run_seeds(row, args.seeds)
    show("Libraries", *library_table(found))
    show("Data sets that divide themselves: 0 / 2 loader processes", *data_table(found))
    wrong = {row.name: problems(row, result) for row, result in found}
    for name, texts in wrong.items():
        for text in texts:
            CONSOLE.print(f"FAIL {name}: {text}")
    if args.page:
        write_page([(row, Result.of(row, RESULTS)) for row in ROWS.values()])
    good = not any(wrong.values())
    for name in names:
        if name in DEMOS:
            command = [sys.executable, ROOT / "benchmarks" / "demos.py", "--only", name]
            good &= subprocess.run(command, check=False).returncode == 0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
