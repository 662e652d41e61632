"""What make programs says of given trainings. The training itself is a benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.libraries.catalogue import ROWS
from benchmarks.libraries.overlay import reason
from benchmarks.libraries.runner import SCRIPTS, Cell, Result, Row
from benchmarks.libraries.verdict import data_table, library_table, problems

LIBRARY = Row("library", "script.py", ("library>=1",))
DATA = Row("data", "script.py", (), (Cell("one"), Cell("asgd", 2)), samples=4)


def outcome(workers: int = 1, trained: int = 4, distinct: int = 4, **changes: Any) -> dict[str, Any]:
    epoch = {"trained": trained, "distinct": distinct, "which": ""}
    found = {"exit": 0, "workers": workers, "finished": workers, "problem": "", "epochs": {"0": epoch}}
    return {**found, "files": {"a.ckpt": ["rank 0"]}, "error": 0.2, "trivial": 1.2, **changes}


def result(row: Row, **asgd: Any) -> Result:
    cells = {str(cell): outcome(cell.workers) for cell in row.cells}
    return Result(Path(), cells={**cells, str(row.cells[-1]): outcome(2, **asgd)})


@pytest.mark.parametrize("row", [LIBRARY, DATA])
def test_equal_trainings_have_no_problem(row: Row) -> None:
    assert problems(row, result(row)) == []


@pytest.mark.parametrize(
    ("asgd", "says"),
    [
        ({"exit": 1, "problem": "ValueError: no group"}, "exit code 1: ValueError: no group"),
        ({"finished": 1, "problem": "ValueError: x"}, "1 of 2 workers died, and the exit code is 0: ValueError: x"),
        ({"trained": 8}, "samples per epoch: 8 (4 different), with DDP 4"),
        ({"trained": 3, "distinct": 3}, "samples per epoch: 3, with DDP 4"),
        ({"files": {"a.ckpt": ["another", "rank 0"]}}, "written by several workers: a.ckpt"),
        ({"files": {"a.ckpt": ["another"]}}, "not written by rank 0: a.ckpt"),
        ({"files": {"a-v1.ckpt": ["rank 0"]}}, "a second copy: a-v1.ckpt"),
        ({"error": 0.31}, "error 0.31, with DDP 0.2"),
        ({"error": float("nan")}, "error nan, with DDP 0.2"),
    ],
)
def test_what_differs_from_ddp_is_named(asgd: dict[str, Any], says: str) -> None:
    assert problems(LIBRARY, result(LIBRARY, **asgd)) == [says]


def test_ddps_own_faults_are_not_held_against_it() -> None:
    found = result(LIBRARY, files={"a.ckpt": ["another", "rank 0"]}, error=0.29)
    found.cells["ddp 2x0"] = outcome(2, files={"a.ckpt": ["another", "rank 0"]})
    assert problems(LIBRARY, found) == []


@pytest.mark.parametrize(
    ("asgd", "says"),
    [
        ({"trained": 8}, "4 more than once"),
        ({"trained": 4, "distinct": 2}, "2 more than once, 2 missing"),
        ({"trained": 3, "distinct": 3}, "1 missing"),
        ({"epochs": {}}, "none trained"),
    ],
)
def test_samples_of_a_data_set_are_counted(asgd: dict[str, Any], says: str) -> None:
    assert problems(DATA, result(DATA, **asgd)) == [f"2 workers, 0 loader processes: {says}"]
    assert f"{says} / not run" in data_table([(DATA, result(DATA, **asgd))])[1][0]


def test_a_program_that_fails_alone_is_no_failure_of_asgd() -> None:
    found = result(LIBRARY, exit=1, problem="TypeError: y")
    found.cells["one 1x0"] = outcome(exit=1, problem="TypeError: y")
    assert problems(LIBRARY, found) == ["fails in one process: TypeError: y"]


def test_what_was_not_run_is_not_called_good() -> None:
    found = result(LIBRARY)
    del found.cells["ddp 2x0"]
    assert library_table([(LIBRARY, found)])[1][0][-1] == "not run yet"


@pytest.mark.parametrize(
    ("asgd", "says"),
    [
        ({"exit": 1, "problem": "CollectiveUnavailableError: torch.distributed.all_gather was called ..."}, []),
        (
            {"exit": 1, "problem": "RuntimeError: no"},
            ["was to be refused by CollectiveUnavailableError, and was not: "],
        ),
        ({}, ["was to be refused by CollectiveUnavailableError, and was not: "]),
    ],
)
def test_a_program_that_is_to_be_refused_must_be(asgd: dict[str, Any], says: list[str]) -> None:
    row = Row("library", "script.py", ("library>=1",), refused="CollectiveUnavailableError")
    found = problems(row, result(row, **asgd))
    assert len(found) == len(says)
    assert all(text.startswith(start) for text, start in zip(found, says, strict=True))


def test_pips_reason_is_reported() -> None:
    assert problems(LIBRARY, Result(Path(), refused="a\nERROR: conflict")) == ["cannot be run: ERROR: conflict"]
    output = "Collecting a\nThe conflict is caused by:\n    a 1 depends on torch<2\nERROR: Cannot install a\nWARNING: x"
    assert reason(output) == "ERROR: Cannot install a\na 1 depends on torch<2"


def test_a_cell_is_kept_until_what_it_depends_on_changes(tmp_path: Path) -> None:
    row = ROWS["litdata"]
    cells = {str(cell): {"fingerprint": row.fingerprint(cell)} for cell in row.cells}
    cells["asgd 2x0"]["fingerprint"] = "another lightning_asgd"
    content = {"versions": {}, "refused": "", "cells": cells}
    (tmp_path / "litdata.json").write_text(json.dumps(content))
    assert set(Result.of(row, tmp_path).cells) == set(cells) - {"asgd 2x0"}
    assert row.fingerprint(Cell("ddp", 2)) != row.fingerprint(Cell("asgd", 2))


def test_every_row_has_its_script() -> None:
    assert [row.name for row in ROWS.values() if not (SCRIPTS / row.script).exists()] == []
