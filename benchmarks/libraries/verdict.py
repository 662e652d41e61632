"""Verdicts on A-SGD's trainings of a program, and the tables of all programs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .runner import Cell, Result, Row

__all__ = ["data_table", "library_table", "problems", "samples"]

MARGIN = 0.1  # of what DDP gained on a model that knows nothing
WAYS = {"one": "one process", "ddp": "DDP", "asgd": "A-SGD"}
Line = list[str]


def problems(row: Row, result: Result) -> list[str]:
    """Where A-SGD's trainings differ from what they should do: from one process and from DDP.

    Args:
        row: the program.
        result: its cells.
    """
    if result.refused:
        return [f"cannot be run: {result.refused.splitlines()[-1]}"]
    broken = [f"fails in one process: {one['problem']}" for one in _alone(row, result) if one["problem"]]
    if broken:
        return broken[:1]
    found = []
    for cell in row.cells:
        outcome = result.cells.get(str(cell))
        if cell.way == "asgd" and outcome is not None:
            name = f"{cell.workers} workers, {cell.processes} loader processes: " if row.samples else ""
            found += [name + problem for problem in _problems(row, outcome, result.cells)]
    return found


def _alone(row: Row, result: Result) -> list[Mapping[str, Any]]:
    cells = [result.cells.get(str(cell)) for cell in row.cells if cell.way == "one"]
    return [cell for cell in cells if cell is not None]


def _problems(row: Row, outcome: Mapping[str, Any], cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if row.refused:
        named = outcome["exit"] != 0 and row.refused in outcome["problem"]
        return [] if named else [f"was to be refused by {row.refused}, and was not: {outcome['problem']}"]
    if outcome["exit"] != 0:
        return [f"exit code {outcome['exit']}: {outcome['problem']}"]
    found = []
    if outcome["finished"] < outcome["workers"]:
        died = outcome["workers"] - outcome["finished"]
        found.append(f"{died} of {outcome['workers']} workers died, and the exit code is 0: {outcome['problem']}")
    one, ddp = cells.get("one 1x0"), cells.get("ddp 2x0")
    if row.samples:
        wrong = samples(row, outcome)
        found += [wrong] if wrong != "each once" else []
        return found
    sound = [other for other in (one, ddp) if other and not other["problem"]]
    if sound and _seen(outcome) not in [_seen(other) for other in sound]:
        found.append(
            f"samples per epoch: {_epochs(outcome)}, with {WAYS['ddp' if ddp in sound else 'one']} {_epochs(sound[-1])}"
        )
    for fault, names in _faults(outcome).items():
        if more := names - (_faults(ddp)[fault] if ddp else set()):
            found.append(f"{fault}: {', '.join(sorted(more))}")
    if ddp and "error" in ddp and "error" in outcome:
        worst = ddp["error"] + MARGIN * max(0.0, ddp["trivial"] - ddp["error"])
        if not outcome["error"] <= worst:
            found.append(f"error {outcome['error']:.3g}, with DDP {ddp['error']:.3g}")
    return found


def samples(row: Row, outcome: Mapping[str, Any]) -> str:
    """What an epoch trained of a data set whose samples are known, in words."""
    if outcome["problem"]:
        return outcome["problem"].split(":")[0]
    wrong = []
    for epoch in outcome["epochs"].values():
        twice, missing = epoch["trained"] - epoch["distinct"], row.samples - epoch["distinct"]
        parts = [f"{twice} more than once"] * (twice > 0) + [f"{missing} missing"] * (missing > 0)
        wrong.append(", ".join(parts))
    return next(filter(None, wrong), "each once" if wrong else "none trained")


def _seen(outcome: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [(epoch["trained"], epoch["distinct"]) for epoch in outcome["epochs"].values()]


def _epochs(outcome: Mapping[str, Any]) -> str:
    """Samples per epoch, in words; of equal epochs one."""
    seen = dict.fromkeys(_seen(outcome))
    return ", ".join(f"{t}" if t == d else f"{t} ({d} different)" for t, d in seen) or "none"


def _faults(outcome: Mapping[str, Any]) -> dict[str, set[str]]:
    """Files by what is wrong with them."""
    files = outcome["files"]
    return {
        "written by several workers": {name for name, writers in files.items() if len(writers) > 1},
        "not written by rank 0": {name for name, writers in files.items() if "rank 0" not in writers},
        "a second copy": {name for name in files if re.search(r"-v\d+\.", name)},
    }


def _verdict(row: Row, result: Result) -> str:
    good = "rejected with an error" if row.refused else "each once" if row.samples else "as DDP"
    unfinished = "" if result.refused or all(str(cell) in result.cells for cell in row.cells) else "not run yet"
    return "; ".join(filter(None, [*problems(row, result), unfinished])).replace("|", "/") or good


def library_table(found: Iterable[tuple[Row, Result]]) -> tuple[Line, list[Line]]:
    """Headings and lines of the libraries that train."""
    heads = ["library", "version", "error: one process", "DDP", "A-SGD", "samples per epoch", "DDP", "A-SGD"]
    lines = []
    for row, result in found:
        if row.samples:
            continue
        cells = [result.cells.get(str(cell)) for cell in row.cells]
        errors = [_short(cell, lambda cell: f"{cell['error']:.3g}" if "error" in cell else "failed") for cell in cells]
        counts = [_short(cell, _epochs) for cell in cells]
        lines.append([row.name, _version(row, result), *errors, *counts, _verdict(row, result)])
    return [*heads, "result"], lines


def data_table(found: Iterable[tuple[Row, Result]]) -> tuple[Line, list[Line]]:
    """Headings and lines of the data sets that divide themselves."""
    columns = [("one", 1), ("ddp", 2), ("ddp", 3), ("asgd", 1), ("asgd", 2), ("asgd", 3)]
    heads = [WAYS[way] + (f", {workers} workers" if workers > 1 else "") for way, workers in columns]
    lines = []
    for row, result in found:
        if not row.samples:
            continue
        line = [row.name, _version(row, result)]
        for way, workers in columns:
            cells = [result.cells.get(str(Cell(way, workers, processes))) for processes in (0, 2)]
            texts = dict.fromkeys(_short(cell, lambda cell, row=row: samples(row, cell)) for cell in cells)
            line.append(" / ".join(texts))
        lines.append([*line, _verdict(row, result)])
    return ["data set", "version", *heads, "result"], lines


def _short(cell: Mapping[str, Any] | None, text: Any) -> str:
    return "not run" if cell is None else text(cell)


def _version(row: Row, result: Result) -> str:
    return result.versions.get(row.package, "")
