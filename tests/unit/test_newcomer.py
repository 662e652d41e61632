"""What a newcomer's walk takes from the pages, without walking."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import newcomer
from benchmarks.newcomer import MONITORING, ONE_MACHINE, RUNS, TWO_MACHINES, WrongError, block, changed

PROGRAM = block(ONE_MACHINE, "python", "class Digits")


@pytest.mark.parametrize(
    ("page", "words", "there", "gone"),
    [
        (TWO_MACHINES, "num_nodes=2", ["num_nodes=2", "devices=1"], ["devices=2"]),
        (
            RUNS,
            "import ASGDStrategy",
            ["run='10.0.0.1:29400/my-model'", "devices=1"],
            ["devices=2", "strategy=strategy"],
        ),
        (MONITORING, "offline=True", ["import WandbLogger", "logger=WandbLogger("], ["logger=False"]),
    ],
)
def test_a_page_s_arguments_take_the_place_of_the_program_s_own(
    page: Path, words: str, there: list[str], gone: list[str]
) -> None:
    program = changed(PROGRAM, block(page, "python", words))
    compile(program, page.name, "exec")
    assert all(text in program for text in [*there, "trainer.fit(Digits()"])
    assert not any(text in program for text in gone)


def test_a_block_that_is_not_there_or_not_alone_is_an_error() -> None:
    for words, number in (("no such thing", "0"), ("Trainer", "[2-9]")):
        with pytest.raises(WrongError, match=rf"docs/monitoring.md has {number} blocks of python"):
            block(MONITORING, "python", words)


def test_the_names_that_a_page_explains_are_found() -> None:
    assert {"steps", "staleness_mean", "staleness_max", "refused"} <= set(newcomer.keys(ONE_MACHINE))
    assert {"staleness/mean", "workers/alive"} <= set(newcomer.keys(MONITORING))
