"""What the pages of the documentation hold: fenced blocks of code, and where they stand."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_HIDDEN = re.compile(r"^<!-- (?P<language>python)\n(?P<text>.*?)^-->$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A piece of code on a page.

    Attributes:
        page: its file.
        line: of the page, at which the code begins.
        language: that the fence names.
        text: the code.
    """

    page: Path
    line: int
    language: str
    text: str


def name_of(page: Path) -> str:
    """A page's path in the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[Block]:
    """The code on a page, in order. What a reader need not see stands in a comment: ``<!-- python ... -->``."""
    text = page.read_text()
    found = [*_FENCE.finditer(text), *_HIDDEN.finditer(text)]
    return [
        Block(page, text[: match.start("text")].count("\n") + 1, match["language"], textwrap.dedent(match["text"]))
        for match in sorted(found, key=lambda match: match.start())
        if match["language"] in languages
    ]


def run(page: Path) -> None:
    """Run a page's Python blocks in order, in one namespace."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        # As many empty lines before, so that an error names the line of the page.
        code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
        exec(code, namespace)
