"""docs/output.md lists every line that the package prints: compared with the code and with real programs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from typing import TypeAlias

import pytest

from tests.helpers import programs
from tests.output.calls import FEW, FILLED, calls, letters, strays
from tests.output.rows import ELSEWHERE, HANDED_ON, SOURCES, WHEN
from tests.output.tables import rows

COLUMNS, BETWEEN = 80, "the second fit"
RECORD = re.compile(r"^(?P<level>[A-Z]+) (?P<path>\S+\.py): ", re.MULTILINE)
LEVELS = {"hidden": "INFO", "info": "INFO", "warning": "WARNING", "error": "ERROR", "stdout": "stdout"}

Patterns: TypeAlias = list[tuple[str, re.Pattern[str]]]


def test_every_call_that_prints_has_a_row_and_every_row_a_call() -> None:
    described = Counter([*ELSEWHERE, *(function for group in WHEN.values() for function in group)])
    assert max(described.values()) == 1
    assert {call.function for call in calls()} == set(described), "see tests/output/rows.py"
    assert set(SOURCES) <= set(described) - ELSEWHERE
    assert [call.function for _, call, _ in rows() if not call.texts] == []


def test_nothing_is_printed_in_another_way() -> None:
    assert set(strays()) == HANDED_ON


# ---------------------------------------------------------------------- what programs print


@pytest.fixture(scope="module")
def patterns() -> Patterns:
    """The lines of all rows: the level, and a pattern."""
    lines = [(call.level, line.strip()) for _, call, _ in rows() for text in call.texts for line in text.splitlines()]
    known = [(level, line.split(FILLED)) for level, line in lines if letters(line) >= FEW]
    return [(level, re.compile(".*".join(map(re.escape, parts)))) for level, parts in known]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What two fits and ``serve`` print on their standard output and error."""
    main = "import sys; from lightning_asgd.cli.command_line import main; sys.exit(main(sys.argv[1:]))"
    commands = {
        "fits": ["-m", "tests.output.program", BETWEEN],
        "serve": ["-c", main, "serve", "127.0.0.1:0/my-model"],
    }
    environment = programs.environment(COLUMNS=str(COLUMNS), PYTHONWARNINGS="ignore")
    running = {
        name: subprocess.Popen(
            [sys.executable, *command],
            cwd=tmp_path_factory.mktemp(name),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, command in commands.items()
    }
    serve, shown = running["serve"], ""
    while serve.stdout is not None and (line := serve.stdout.readline()):
        shown += line
        if line.startswith("Transport"):
            serve.send_signal(signal.SIGTERM)
    said = {name: process.communicate(timeout=100) for name, process in running.items()}
    assert {name: process.returncode for name, process in running.items()} == dict.fromkeys(running, 0), said
    output, errors = said["fits"]
    levels, _, silent = errors.partition(f"{BETWEEN}\n")
    return {"levels": (output, levels), "silent": (output, silent), "serve": (shown, said["serve"][1])}


def levels_of(line: str, patterns: Patterns) -> set[str]:
    """The levels of the rows that show a line, as log records have them."""
    found = {part for level, pattern in patterns if pattern.fullmatch(line.strip()) for part in level.split(" or ")}
    if not found and len(sentences := re.split(r"(?<=\.) (?=[A-Z])", line)) > 1:
        return set.intersection(*(levels_of(sentence, patterns) for sentence in sentences))
    return {LEVELS[level] for level in found & LEVELS.keys()}


def test_a_fit_prints_lines_of_the_page_with_these_levels(
    printed: dict[str, tuple[str, str]], patterns: Patterns
) -> None:
    output, said = printed["levels"]
    assert output == ""
    records = [*RECORD.finditer(said)]
    ends = [*(record.start() for record in records[1:]), len(said)]
    texts = [(record, said[record.end() : end]) for record, end in zip(records, ends, strict=True)]
    ours = [(record["level"], text) for record, text in texts if "/lightning_asgd/" in record["path"]]
    lines = [(level, line) for level, text in ours for line in text.splitlines()]
    assert [(level, line) for level, line in lines if level not in levels_of(line, patterns)] == []
    assert [line for _, line in lines if len(line) > COLUMNS] == []
    begins = [text.split("\n")[0] for _, text in ours]
    assert begins[0] == "Transport zmq is encrypted and authenticated (key generated for this job)."
    assert begins[1] == "A-SGD: 2 workers, 1 server, transport zmq (one machine)."
    assert "Worker 1 ended with exit code -9; the others continue without it." in begins[2:-1]
    assert begins[-1].startswith("A-SGD: 2 workers trained for ")


def test_a_silent_lightning_still_shows_warnings(printed: dict[str, tuple[str, str]], patterns: Patterns) -> None:
    output, said = printed["silent"]
    assert output == ""
    assert [line for line in said.splitlines() if "WARNING" not in levels_of(line, patterns)] == []
    assert "Worker 1 ended with exit code -9; the others continue without it." in said
    assert "  1 of 2 workers were lost during this fit:\n  worker 1: its process ended" in said
    assert "nsync=" not in said, "what is no warning is Lightning's to silence"


def test_serve_prints_lines_of_the_page(printed: dict[str, tuple[str, str]], patterns: Patterns) -> None:
    output, said = printed["serve"]
    assert said == ""
    assert [line for line in output.splitlines() if "stdout" not in levels_of(line, patterns)] == []
    assert output.startswith("Run 'my-model' has 1 server at 127.0.0.1:")
