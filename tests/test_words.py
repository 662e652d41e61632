"""One word per thing: words and phrases that the project has given up do not come back.

They are looked for in the code, its comments and texts, and in every page. LEFT records how many remain; these numbers
may only fall.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.helpers.ratchet import complaints
from tests.test_architecture import FILES, ROOT

TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "benchmarks/README.md")
PAGES = (*(ROOT.parent / name for name in TOP), *sorted((ROOT.parent / "docs").rglob("*.md")))

# A pattern, and what to write. Patterns are of whole words; a space also stands for the end of a line. Patterns
# without capitals ignore case.
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
    "through with|is through|are through|was through": "finished",
    "for ever": "forever",
    "nobody|everybody|anybody|somebody": "no worker, all workers, any process, another process",
    "in the midst": "in the middle",
    "without a word": "unexpectedly, without a message",
    "come and go|comes and goes": "join and leave",
    "attach(es)? (itself|themselves)": "attaches, joins",
    "stands still|stood still|stand still": "waits, pauses",
    "gathered pushes|gather pushes|gathers pushes": "aggregated pushes",
    "made again": "reopened, repeated",
    "under way": "in flight, running",
    "join again|joins again|joined again": "rejoin",
    "given beside": "given together with",
    "is told|are told|was told|were told": "receives, learns, knows",
    "takes? notice": "note",
    "gives? way": "is replaced",
    "give or take": "by at most",
    "at hand|at some time": "available, eventually",
    "one's own": "your own",
    "what came|as of late": "results, recently",
    "deals? out|hands? out": "divides, allocates",
    "tells? people|told people": "logs, reports",
    "closes the door": "accepts no more connections",
    "sleeps through|slept through": "is suspended during",
    "goes on|go on|gone on|went on": "continues",
    "accepts no process": "is encrypted and authenticated",
    "it said": "its last output",
    "data by speed|in fixed parts": "data shared dynamically, data split equally",
    "lossy codes?": "lossy codec",
    "the run where that is": "the run's current progress",
    "(refused|rejected) by name": "rejected with an error that names it",
    "the least and the greatest": "min-max",
}
LEFT: dict[str, int] = {}


@functools.cache
def texts() -> dict[Path, str]:
    return {path: path.read_text() for path in (*FILES.values(), *PAGES)}


def places(pattern: str) -> list[str]:
    """Where a pattern is found, as path:line."""
    flags = re.IGNORECASE if pattern == pattern.lower() else 0
    expression = re.compile(rf"(?<![\w`])(?:{pattern})(?!\w)".replace(" ", r"\s+(?:#\s*)?"), flags)
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
