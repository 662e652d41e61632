"""Every Python block of the documentation runs: a page's blocks in order, in one namespace, on two ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.lab import Lab
from tests.conformance.pair import Pair
from tests.helpers import pages

NOTEBOOK = pages.DOCS / "tutorials" / "notebook.md"  # one process, which forks the workers by itself
WITH_PYTHON = [page for page in pages.PAGES if pages.blocks(page, "python")]


@dataclass(frozen=True)
class Page:
    """A page as a program."""

    path: Path

    def __call__(self, lab: Lab) -> dict[str, Any]:
        os.chdir(lab.folder)
        if self.path == NOTEBOOK:
            for name in ("LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(name)
            if lab.rank:
                return {}
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for block in pages.blocks(self.path, "python"):
            # As many empty lines before, so that an error names the line of the page.
            code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
            exec(code, namespace)
        return {}


@pytest.mark.parametrize("page", WITH_PYTHON, ids=pages.name_of)
@pytest.mark.timeout(120)
def test_the_code_of_a_page_runs(pair: Pair, page: Path, tmp_path: Path) -> None:
    for outcome in pair.run(Page(page), tmp_path, 90):
        assert not outcome.error, f"{outcome.error}\n{outcome.trace}"


@pytest.fixture(autouse=True)
def _notebook_alone(request: pytest.FixtureRequest, pair: Pair) -> Iterator[None]:
    """The notebook's process gets no variables of a launcher: it is not used for another page."""
    yield
    if request.node.callspec.params["page"] == NOTEBOOK:
        pair.close()
