"""One word per thing: words and phrases that the project has given up do not come back.

Looked for in the code, its comments and texts, and in every page but the changelog, whose old entries stay. The numbers
of those that are still there only fall.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.helpers.ratchet import complaints
from tests.test_architecture import FILES, ROOT

PAGES = (ROOT.parent / "README.md", ROOT.parent / "CONTRIBUTING.md", *sorted((ROOT.parent / "docs").rglob("*.md")))

# A pattern, and what to write. Patterns are of whole words; a space also stands for the end of a line.
RETIRED = {
    "signs? of life|gives no sign": "heartbeat",
    "Initialise|WorkerView|Beaten|Sharing|Journal": "the new name of the class",
    "lapsed": "fenced",
    "terms": "incarnations, or another word where it has its everyday meaning",
    "lose patience|loses patience|lost patience|lose their patience": "time out",
    "whose word counts|word counts": "authoritative",
    "founder|founders|founds": "bootstrap worker",
    "common (batch )?size|common batch": "reference batch size",
    "as_if_equal": "to_ddp_counters",
    "in a lost one's place|in the place of one that was lost|takes? the place of one": "replacement",
    "spare server|spares?": "hot standby, or previous base of a vector",
    "obituary|obituaries|bury|buried": "exit report, report the exit of",
    "last words|with_last_words": "last output",
    "mend|mends|mended|mending": "fix",
    "unborn|hopeless": "failed at start-up, not restartable",
    "trains? in vain|trained in vain|batch in vain": "discarded",
    "come back|comes back|came back": "rejoin, where a worker does it",
    "lest|whosoever": "so that ... not",
    "anew": "again",
    "whoever": "the noun that it stands for: a worker, a process, a program",
    "so many": "the number's name",
    "sane|ABSURD|absurdly": "within bounds",
    "what (it|they|a collective|collectives|that) (comes?|came) to": "result",
    "through with": "finished",
}
LEFT = {
    "common (batch )?size|common batch": 2,
}


@functools.cache
def texts() -> dict[Path, str]:
    return {path: path.read_text() for path in (*FILES.values(), *PAGES)}


def places(pattern: str) -> list[str]:
    """Where a pattern is found, as path:line."""
    expression = re.compile(rf"(?<![\w`])(?:{pattern})(?!\w)".replace(" ", r"\s+(?:#\s*)?"))
    return [
        f"{path.relative_to(ROOT.parent)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path, text in texts().items()
        for match in expression.finditer(text)
    ]


@pytest.mark.parametrize("pattern", RETIRED)
def test_a_retired_word_does_not_come_back(pattern: str) -> None:
    found = places(pattern)
    recorded = {pattern: LEFT[pattern]} if pattern in LEFT else {}
    said = complaints({pattern: len(found)}, recorded, 0, "LEFT", "places")
    assert not said, "\n".join([*said, f"Write: {RETIRED[pattern]}.", *found])


def test_nothing_is_left_that_is_not_retired() -> None:
    assert LEFT.keys() <= RETIRED.keys()
