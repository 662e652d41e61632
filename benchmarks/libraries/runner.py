"""Runs the programs of the folder scripts, each in its overlay and in a process of its own, and judges what they did.

Every training is a cell of its row. A row's cells are in one JSON file, which is written after each cell: an
interrupted run continues with the next cell, and a finished cell is not run again until the program or the library
changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .overlay import OverlayError, held, overlay

__all__ = ["RANKS", "Cell", "Row", "run_row"]

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"  # apart: a script's folder is the first on its path
DEADLINE_S = 240.0
_KILL_S = 10.0
RANKS = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "LOCAL_",
    "NODE_",
    "GLOBAL_",
    "GROUP_",
    "SLURM_",
    "LIGHTNING_",
    "TORCHELASTIC_",
)


@dataclass(frozen=True)
class Cell:
    """One training of a program."""

    way: str  # "one" process without a strategy, "ddp" or "asgd"
    workers: int = 1
    processes: int = 0

    def __str__(self) -> str:
        return f"{self.way} {self.workers}x{self.processes}"


@dataclass(frozen=True)
class Row:
    """A program.

    Attributes:
        name: as people call the library.
        script: its file in the folder scripts.
        requirements: what pip installs.
        cells: the trainings.
        samples: of an epoch, for a data set that divides itself; 0 for a library that trains.
        refused: the error that A-SGD is to raise, since the program needs all workers in every step; empty for none.
        seed: of its random numbers.
    """

    name: str
    script: str
    requirements: tuple[str, ...]
    cells: tuple[Cell, ...] = (Cell("one"), Cell("ddp", 2), Cell("asgd", 2))
    samples: int = 0
    refused: str = ""
    seed: int = 1

    @property
    def file(self) -> str:
        """Name of the file with its results."""
        return f"{self.name}.json" if self.seed == 1 else f"{self.name}-seed{self.seed}.json"

    @property
    def package(self) -> str:
        """The library: its overlay, which rows may share, has its name."""
        return re.split(r"[^\w-]", self.requirements[0])[0] if self.requirements else "torch"

    def fingerprint(self, cell: Cell) -> str:
        """Changes with the files and versions that a cell's outcome depends on."""
        files = [SCRIPTS / self.script, SCRIPTS / "harness.py"]
        if cell.way == "asgd":
            files += sorted((ROOT / "lightning_asgd").rglob("*.py"))
        digest = hashlib.sha256(repr([self, *held()]).encode())
        for file in files:
            digest.update(file.read_bytes())
        return digest.hexdigest()[:16]


@dataclass
class Result:
    """What is known of a row, as it lies in its file."""

    file: Path
    versions: dict[str, str] = field(default_factory=dict)
    refused: str = ""  # why it cannot be run
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Row, results: Path) -> Result:
        """What earlier calls found out, where that still holds."""
        found = cls(results / row.file)
        if found.file.exists():
            text = json.loads(found.file.read_text())
            found.versions, found.refused = text["versions"], text["refused"]
            for cell in row.cells:
                outcome = text["cells"].get(str(cell))
                if outcome and outcome["fingerprint"] == row.fingerprint(cell):
                    found.cells[str(cell)] = outcome
        return found

    def save(self) -> None:
        """Write the file."""
        content = {name: getattr(self, name) for name in ("versions", "refused", "cells")}
        self.file.write_text(json.dumps(content, indent=1) + "\n")


def run_row(row: Row, results: Path, report: Callable[[str], None], *, again: bool = False, only: str = "") -> Result:
    """Install what a row needs, and run the cells that have not been run.

    Args:
        row: the program.
        results: folder for results and overlays.
        report: is given a line whenever something is done.
        again: whether to run what has been run before.
        only: run the cells whose name holds this.
    """
    results.mkdir(parents=True, exist_ok=True)
    result = Result.of(row, results)
    wanted = [cell for cell in row.cells if only in str(cell)]
    open_cells = [cell for cell in wanted if again or str(cell) not in result.cells]
    if not open_cells:
        return result
    result.refused = ""
    with tempfile.TemporaryDirectory(prefix="programs-", ignore_cleanup_errors=True) as name:
        data = Path(name) / "data"
        data.mkdir()
        try:
            python = _ready(row, results, Path(name) / "prepare", data)
        except OverlayError as error:
            result.refused = str(error)
            result.save()
            report(f"{row.name} cannot be run: {error}")
            return result
        for cell in open_cells:
            fingerprint = row.fingerprint(cell)  # before: the files may change meanwhile
            outcome = _run(row, cell, python, Path(name) / str(cell).replace(" ", "-"), data)
            result.versions |= outcome.pop("versions", {})
            result.cells[str(cell)] = {"fingerprint": fingerprint, **outcome}
            result.save()
            report(f"{row.name}, {cell}: {outcome['seconds']:.0f} s, {describe(outcome)}")
    return result


def _ready(row: Row, results: Path, folder: Path, data: Path) -> Path | str:
    """Install what a row needs, and make its data.

    Returns:
        the Python to run it with.

    Raises:
        OverlayError: one of these cannot be done.
    """
    if not row.requirements:
        return sys.executable
    python = overlay(results / "overlays" / row.package, row.requirements)
    if row.samples:
        made = _run(row, Cell("prepare"), python, folder, data)
        if made["exit"] != 0:
            raise OverlayError(f"its data cannot be made\n{made['output'][-1000:]}\n{made['problem']}")
    return python


def describe(outcome: dict[str, Any]) -> str:
    """A cell's outcome in a line."""
    parts = [f"exit code {outcome['exit']}", f"{outcome['finished']} of {outcome['workers']} ended"]
    if outcome["problem"]:
        parts.append(outcome["problem"])
    if "error" in outcome:
        parts.append(f"error {outcome['error']:.4g} (trivial {outcome['trivial']:.4g})")
    trained = dict.fromkeys(f"{e['trained']} samples, {e['distinct']} different" for e in outcome["epochs"].values())
    parts.append(f"{len(outcome['epochs'])} epochs of {' and of '.join(trained) or 'nothing'}")
    twice = [name for name, writers in outcome["files"].items() if len(writers) > 1]
    parts.append(f"{len(outcome['files'])} files" + (f", by several processes: {', '.join(twice)}" if twice else ""))
    return "; ".join(parts)


def _run(row: Row, cell: Cell, python: Path | str, folder: Path, data: Path) -> dict[str, Any]:
    """Train once, and collect what the processes wrote down."""
    for name in ("work", "seen", "home", "tmp"):
        (folder / name).mkdir(parents=True)
    command = [
        python,
        SCRIPTS / row.script,
        "--way",
        cell.way,
        "--workers",
        cell.workers,
        "--processes",
        cell.processes,
    ]
    command += ["--folder", folder, "--data", data, "--samples", row.samples, "--seed", row.seed]
    began = time.monotonic()
    output = folder / "output.txt"
    code, pid = _script([str(part) for part in command], folder, output)
    text = output.read_text(errors="replace")
    finished = {file.name: json.loads(file.read_text()) for file in (folder / "seen").glob("finished-*")}
    outcome: dict[str, Any] = {
        "exit": code,
        "seconds": time.monotonic() - began,
        "workers": cell.workers,
        "finished": len(finished),
        "problem": "" if code == 0 and len(finished) == cell.workers else _problem(text, code),
        "output": text[-4000:],
        "epochs": _epochs(folder / "seen"),
        "files": _files(folder / "seen", pid),
    }
    return outcome | finished.get(f"finished-{pid}", {})  # of rank 0, the process that the user started


def _script(command: list[str], folder: Path, output: Path) -> tuple[int | None, int]:
    """Run a script in a session of its own.

    Returns:
        its exit code, None if it was not done in time, and its number.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(RANKS)}
    environment |= {"PYTHONPATH": str(ROOT), "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process compiles the whole library
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder / "work", env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(DEADLINE_S), process.pid
        except subprocess.TimeoutExpired:
            return None, process.pid
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):  # whatever the script left, too
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_KILL_S)


def _problem(text: str, code: int | None) -> str:
    """The last line of the output that names an error."""
    if code is None:
        return f"not done within {DEADLINE_S:g} s"
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in text.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return errors[-1][:300] if errors else "a process ended without a message"


def _lines(folder: Path, pattern: str) -> Iterator[tuple[str, Any]]:
    for file in sorted(folder.glob(pattern)):
        whole, _, _ = file.read_text().rpartition("\n")  # a killed process may leave part of a line
        for line in whole.splitlines():
            yield file.name, json.loads(line)


def _epochs(seen: Path) -> dict[str, dict[str, Any]]:
    """By epoch how many samples were trained, how many different ones, and a digest of which."""
    trained: dict[str, Counter[Any]] = {}
    for _, line in _lines(seen, "trained-*"):
        trained.setdefault(str(line["epoch"]), Counter()).update(map(str, line["samples"]))
    return {
        epoch: {
            "trained": sum(counts.values()),
            "distinct": len(counts),
            "which": hashlib.sha256(" ".join(sorted(counts)).encode()).hexdigest()[:16],
        }
        for epoch, counts in sorted(trained.items())
    }


def _files(seen: Path, main: int) -> dict[str, list[str]]:
    """By file which processes wrote it: ``"rank 0"``, ``"another"``."""
    writers: dict[str, set[str]] = {}
    for process, path in _lines(seen, "wrote-*"):
        writers.setdefault(path, set()).add(process)
    return {
        path: sorted("rank 0" if process == f"wrote-{main}" else "another" for process in processes)
        for path, processes in sorted(writers.items())
    }
