"""Several Trainers in one process, and Trainers in pytest, notebooks and Hydra: what A-SGD and DDP make of them.

    python -m benchmarks.several_trainers                    # all: six minutes
    python -m benchmarks.several_trainers --only pytest      # rows whose names contain this
    python -m benchmarks.several_trainers --page             # and write the table into docs/compatibility.md

A row works if the program ends with exit code 0 and every call has seen every sample exactly once. Exits with 1 if a
row of A-SGD neither works nor is refused by an error of this package within 90 seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.libraries.overlay import overlay
from benchmarks.libraries.runner import RANKS
from benchmarks.programs import ROOT, markdown, show
from benchmarks.several_program import SAMPLES
from lightning_asgd.core.foundation import errors

PAGE = ROOT / "benchmarks" / "libraries" / "several.md"
PROGRAM = ROOT / "benchmarks" / "several_program.py"
OVERLAY = ROOT / "results" / "several"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(RANKS)}
CONSOLE = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
NEEDED = ("pytest-xdist>=3.6", "hydra-core>=1.3")
LIMIT_S = 90.0
OURS = {name for name in vars(errors) if name.endswith("Error")}
WAYS = {"A-SGD": ("asgd", "ddp"), "DDP": ("ddp", "asgd")}
HEAD = f"""## Several Trainers, tests, notebooks and Hydra

Trainers that follow each other in one process (`make several`). *works*: every call sees each of {SAMPLES} samples
exactly once, and the exit code is 0. Forked and spawned workers, as in notebooks, are new processes for each call, so
the number of devices may change.
"""


@dataclass(frozen=True)
class Row:
    """A program; ``S`` in its calls is the strategy, ``O`` the other one."""

    name: str
    calls: tuple[str, ...]
    make: Callable[[str, Path, Path, tuple[str, ...]], list[str]]  # the command, from Python, folder, file and calls


def script(python: str, folder: Path, out: Path, calls: tuple[str, ...]) -> list[str]:
    return [python, str(PROGRAM), str(out), *calls]


def module(python: str, folder: Path, out: Path, calls: tuple[str, ...]) -> list[str]:
    return [python, "-m", "benchmarks.several_program", str(out), *calls]


def _tests(folder: Path, out: Path, calls: tuple[str, ...]) -> None:
    lines = ["from pathlib import Path", "from benchmarks.several_program import call"]
    lines += [f"def test_{i}():\n    call(Path({str(out)!r}), {i}, {each!r})" for i, each in enumerate(calls)]
    (folder / "test_program.py").write_text("\n".join(lines) + "\n")


def plain_pytest(python: str, folder: Path, out: Path, calls: tuple[str, ...]) -> list[str]:
    _tests(folder, out, calls)
    return [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]


def xdist(python: str, folder: Path, out: Path, calls: tuple[str, ...]) -> list[str]:
    return [*plain_pytest(python, folder, out, calls), "-n", "2"]


def notebook(python: str, folder: Path, out: Path, calls: tuple[str, ...]) -> list[str]:
    """Cells in a kernel of their own."""
    cells = ["from pathlib import Path\nfrom benchmarks.several_program import call"]
    cells += [f"call(Path({str(out)!r}), {i}, {each!r})" for i, each in enumerate(calls)]
    program = (
        "import nbformat, nbclient\n"
        f"cells = [nbformat.v4.new_code_cell(each) for each in {cells!r}]\n"
        "nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=120).execute()\n"
    )
    return [python, "-c", program]


def _hydra(folder: Path, out: Path, calls: tuple[str, ...]) -> Path:
    (folder / "conf.yaml").write_text("call: 0\n")
    (folder / "program.py").write_text(
        "import hydra\nfrom pathlib import Path\nfrom benchmarks.several_program import call\n"
        "@hydra.main(config_path='.', config_name='conf', version_base=None)\n"
        f"def main(conf):\n    call(Path({str(out)!r}), conf.call, {list(calls)!r}[conf.call])\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    return folder / "program.py"


def hydra(python: str, folder: Path, out: Path, calls: tuple[str, ...]) -> list[str]:
    return [python, str(_hydra(folder, out, calls))]


def multirun(python: str, folder: Path, out: Path, calls: tuple[str, ...]) -> list[str]:
    jobs = ",".join(map(str, range(len(calls))))
    return [python, str(_hydra(folder, out, calls)), "-m", f"call={jobs}"]


ROWS = (
    Row("fits on the same devices", ("fit:S:2", "fit:S:2"), script),
    Row("fit, validate, test, predict", ("fit:S:2", "validate:S:2", "test:S:2", "predict:S:2"), script),
    Row("fit, then test on one device without a strategy", ("fit:S:2", "test:none:1"), script),
    Row("fits on 1, then 2 devices", ("fit:S:1", "fit:S:2"), script),
    Row("fits on 2, then 3 devices", ("fit:S:2", "fit:S:3"), script),
    Row("fits on 2 devices, then 1", ("fit:S:2", "fit:S:1"), script),
    Row("fits on 1, 3, 2 devices, forked", ("fit:S_fork:1", "fit:S_fork:3", "fit:S_fork:2"), script),
    Row("fits on 1, 3, 2 devices, spawned", ("fit:S_spawn:1", "fit:S_spawn:3", "fit:S_spawn:2"), script),
    Row("the other strategy next", ("fit:S:2", "fit:O:2"), script),
    Row("`python -m`", ("fit:S:2",), module),
    Row("pytest", ("fit:S:2", "fit:S:2"), plain_pytest),
    Row("pytest, forked", ("fit:S_fork:1", "fit:S_fork:2"), plain_pytest),
    Row("pytest-xdist", ("fit:S:2", "fit:S:2"), xdist),
    Row("pytest-xdist, forked", ("fit:S_fork:2", "fit:S_fork:2"), xdist),
    Row("notebook", ("fit:S_notebook:2", "fit:S_notebook:3"), notebook),
    Row("Hydra", ("fit:S:2",), hydra),
    Row("Hydra, multirun", ("fit:S:2", "fit:S:2"), multirun),
    Row("Hydra, multirun, forked", ("fit:S_fork:1", "fit:S_fork:2"), multirun),
)


def judge(code: int | None, said: str, out: Path, calls: int) -> str:
    """What a program did."""
    if code is None:
        return f"not done after {LIMIT_S:g} s"
    if code != 0:
        named = re.findall(r"\b(?!Failed|Launcher)(\w*(?:Error|Exception|Interrupt))\b(?=:|\()", said)
        own = [name for name in named if name in OURS]
        return f"refused: {own[-1]}" if own else (named[-1] if named else f"exit code {code}")
    seen = [defaultdict[int, Counter[int]](Counter) for _ in range(calls)]  # by process
    for line in out.read_text().splitlines() if out.exists() else ():
        row = json.loads(line)
        seen[row["call"]][row["pid"]].update(row["samples"])
    for number, counts in enumerate(seen):
        together = sum(counts.values(), Counter[int]())
        # Without a strategy each process sees all samples.
        parts = [together] if set(together.values()) == {1} else [*counts.values()]
        if not parts or any(len(each) < SAMPLES or set(each.values()) != {1} for each in parts):
            return f"call {number + 1} sees {len(together)} of {SAMPLES} samples"
    return "works"


def run(row: Row, way: str, python: Path) -> str:
    """Run a row's program once."""
    mine, other = WAYS[way]
    calls = tuple(re.sub(r":S", f":{mine}", each).replace(":O:", f":{other}:") for each in row.calls)
    with tempfile.TemporaryDirectory(prefix="several-") as name:
        folder, out = Path(name), Path(name) / "out.jsonl"
        command = row.make(str(python), folder, out, calls)
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**CLEAN, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        code: int | None = None
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
            code = process.returncode
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        found = judge(code, said, out, len(calls))
        CONSOLE.print(f"{row.name}, {way}: {found}" + ("" if found == "works" else f"\n{said[-2000:]}\n"))
        return found


def page(lines: list[list[str]]) -> str:
    """A section of docs/compatibility.md; programs of which both systems make the same share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, *found in lines:
        rows.setdefault(tuple(found), []).append(name)
    merged = [["; ".join(names), *found] for found, names in rows.items()]
    return HEAD + "\n" + markdown(["in one process", *WAYS], merged)


def main() -> int:
    """Run the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--page", action="store_true", help="write the table into docs/compatibility.md")
    args = parser.parse_args()
    python = overlay(OVERLAY, NEEDED)
    rows = [row for row in ROWS if args.only in row.name]
    lines = [[row.name, *(run(row, way, python) for way in WAYS)] for row in rows]
    heads = ["in one process", *WAYS]
    show("Several Trainers", heads, lines)
    if args.page:
        PAGE.write_text(page(lines))
        subprocess.run([sys.executable, "-m", "tests.conformance.page"], cwd=ROOT, check=True)
    return int(any(line[1] != "works" and not line[1].startswith("refused") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
