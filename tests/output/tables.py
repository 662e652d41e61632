"""The tables of docs/output.md, from the calls that print; docs/conf.py puts them there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tests.output.calls import FEW, FILLED, Call, calls, letters, sentences
from tests.output.rows import ELSEWHERE, SOURCES, WHEN

__all__ = ["rows", "tables"]

_SHORT, _LONG = 30, 100  # letters of a text by which it can be recognised; characters that a row shows


def rows() -> Iterator[tuple[str, Call, str]]:
    """Each call with who prints it, and when."""
    known = {function: (who, when) for who, group in WHEN.items() for function, when in group.items()}
    for call in calls():
        if call.function not in ELSEWHERE:
            who, when = known.get(call.function, ("", ""))
            more = sentences(SOURCES[call.function]) if call.function in SOURCES else ()
            yield who, replace(call, texts=(*call.texts, *more)), when


def tables() -> str:
    """A section for each who prints, in Markdown."""
    parts = []
    levels: dict[tuple[str, str, str], set[str]] = {}
    for who, call, when in rows():
        for line in [line for text in call.texts for line in text.splitlines() if letters(line) >= FEW]:
            levels.setdefault((who, when, _shown(line.strip())), set()).add(call.level)
    for who in WHEN:
        parts += [f"## {who}\n", "| line | level | when |", "|---|---|---|"]
        found = sorted(
            (when, text, " or ".join(sorted(level))) for (group, when, text), level in levels.items() if group == who
        )
        parts += [f"| {text} | {level} | {when} |" for when, text, level in found]
        parts.append("")
    return "\n".join(parts)


def _shown(line: str) -> str:
    """The begin of a line, as code: its sentences until it can be recognised."""
    shown = ""
    for sentence in re.split(r"(?<=\.) (?=[A-Z])", line):
        if letters(shown) < _SHORT:
            shown = f"{shown} {sentence}".strip()
    if len(shown) > _LONG:
        shown = f"{shown[:_LONG].rpartition(' ')[0].rstrip(',;:')} {FILLED}"
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"
