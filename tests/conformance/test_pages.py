"""Every Python block of the documentation runs: a page's blocks in order, in one namespace, on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.lab import Lab
from tests.conformance.pair import Pair
from tests.helpers import pages
from tests.helpers.programs import environment

ROOT = Path(__file__).parents[2]
NOTEBOOK = pages.DOCS / "tutorials" / "notebook.md"  # one process, which forks the workers by itself
WITH_PYTHON = [page for page in pages.PAGES if pages.blocks(page, "python")]


@dataclass(frozen=True)
class Page:
    """A page as a program."""

    path: Path

    def __call__(self, lab: Lab) -> dict[str, Any]:
        os.chdir(lab.folder)
        pages.run(self.path)
        return {}


@pytest.mark.parametrize("page", [page for page in WITH_PYTHON if page != NOTEBOOK], ids=pages.name_of)
def test_the_code_of_a_page_runs(pair: Pair, page: Path, tmp_path: Path) -> None:
    for outcome in pair.run(Page(page), tmp_path, 90):
        assert not outcome.error, f"{outcome.error}\n{outcome.trace}"


def test_the_code_of_the_notebook_runs(tmp_path: Path) -> None:
    """In a process that no other test has used: where an optimizer has taken a step Lightning refuses to fork."""
    code = f"import pathlib; from tests.helpers.pages import run; run(pathlib.Path({str(NOTEBOOK)!r}))"
    environ = environment()
    for name in ("LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)
    program = [sys.executable, "-c", code]
    done = subprocess.run(program, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
