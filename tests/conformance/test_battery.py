"""Every case under DDP and under A-SGD, on both Lightnings."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from tests.conformance.case import Case
from tests.conformance.cases import CASES
from tests.conformance.island_column import found
from tests.conformance.lab import STEPS, VARIANCE, Lab, loss_of
from tests.conformance.page import ISLANDS, PAGE, page
from tests.conformance.pair import ASGD, DDP, ISLAND, Outcome, Pair
from tests.helpers import leaks

PACKAGES = ("pytorch_lightning", "lightning.pytorch")
DEADLINE_S = 60.0


class Battery:
    """Keeps the processes, and what came of every case."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[str, str], Pair] = {}
        self.outcomes: dict[tuple[str, str, str], list[Outcome]] = {}

    def run(self, case: Case, package: str, strategy: str, folder: Path) -> list[Outcome]:
        key = (case.name, package, strategy)
        if key not in self.outcomes:
            where = folder / strategy
            where.mkdir()
            self.outcomes[key] = self.pair(package, strategy).run(case.run, where, DEADLINE_S)
        return self.outcomes[key]

    def pair(self, package: str, strategy: str) -> Pair:
        if (package, strategy) not in self.pairs:
            self.pairs[package, strategy] = Pair(package, strategy)
        return self.pairs[package, strategy]

    def close(self) -> None:
        for pair in self.pairs.values():
            pair.close()


def test_the_page_says_what_the_battery_shows() -> None:
    assert set(ISLANDS) == {name for name, case in CASES.items() if case.ddp}
    assert PAGE.read_text() == page(), "docs/compatibility.md is old: run make compatibility"


@pytest.fixture(scope="module")
def battery() -> Iterator[Battery]:
    with leaks.forbidden():
        battery = Battery()
        yield battery
        battery.close()


LONG = {"compiled", "mlflow", "wandb"}  # 7 to 20 s each, for what they load


def cases(names: list[str], *every: int) -> Iterator[Any]:
    """All on both Lightnings; but on each only one in so many is not slow, and none with 0."""
    for number, name in enumerate(names):
        for package, stride in zip(PACKAGES, every, strict=True):
            usual = stride > 0 and number % stride == 0 and name not in LONG
            since = CASES[name].since
            lacks = Version(importlib.metadata.version("pytorch-lightning")) < Version(since)
            marks = [pytest.mark.skipif(lacks, reason=f"Lightning has it since {since}")]
            yield pytest.param(
                name, package, id=f"{name}-{package}", marks=marks if usual else [*marks, pytest.mark.slow]
            )


@pytest.mark.parametrize(("name", "package"), cases(list(CASES), 1, 32))
def test_case(name: str, package: str, battery: Battery, tmp_path: Path) -> None:
    case = CASES[name]
    ours = battery.run(case, package, ASGD, tmp_path)
    if case.refused:
        for outcome in ours:
            assert re.search(case.refused, outcome.error), outcome.trace or outcome.error
    else:
        for outcome in ours:
            assert not outcome.error, outcome.trace or outcome.error
        check_same_bits(ours)


@pytest.mark.parametrize(("name", "package"), cases([name for name in CASES if CASES[name].ddp], 8, 0))
def test_as_under_ddp(name: str, package: str, battery: Battery, tmp_path: Path) -> None:
    case = CASES[name]
    if Version(torch.__version__) < Version(case.ddp_since):
        pytest.skip(f"DDP trains it since torch {case.ddp_since}")
    theirs = battery.run(case, package, DDP, tmp_path)
    if case.ddp_fails:
        assert all(outcome.error for outcome in theirs)
    else:
        assert not any(outcome.error for outcome in theirs), theirs[0].trace or theirs[1].trace
        if not case.refused:
            compare(case, facts(battery.run(case, package, ASGD, tmp_path)), facts(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ISLANDS if ISLANDS[name] == "equal"])
def test_an_island_ends_with_the_bits_of_ddp(name: str, battery: Battery, tmp_path: Path) -> None:
    pairs = {strategy: battery.pair(PACKAGES[0], strategy) for strategy in (DDP, ISLAND)}
    assert found(CASES[name], pairs, tmp_path) == "equal"


def write(lab: Lab) -> None:
    saver = lab.pl.callbacks.ModelCheckpoint(lab.folder, "written")
    module = lab.regression()
    lab.fit(module, callbacks=[saver], max_epochs=1)


def resume(lab: Lab) -> dict[str, Any]:
    module = lab.regression()
    momentum: list[float] = []

    def look(trainer: Any, *args: Any) -> None:
        (state, *_) = trainer.optimizers[0].state.values()
        momentum.append(float(state["momentum_buffer"].abs().sum()))

    watcher = lab.pl.callbacks.LambdaCallback(on_train_start=look)
    trainer = lab.trainer(callbacks=[watcher], max_epochs=2)
    trainer.fit(module, lab.loader(), ckpt_path=lab.folder / "written.ckpt")
    return {"loss": loss_of(module), "step": trainer.global_step, "momentum": momentum}


@pytest.mark.parametrize(("writer", "reader"), [(DDP, ASGD), (ASGD, DDP)])
def test_checkpoints_cross_over(writer: str, reader: str, battery: Battery, tmp_path: Path) -> None:
    package = PACKAGES[0]
    for outcome in battery.pair(package, writer).run(write, tmp_path, DEADLINE_S):
        assert not outcome.error, outcome.trace
    outcomes = battery.pair(package, reader).run(resume, tmp_path, DEADLINE_S)
    for outcome in outcomes:
        assert not outcome.error, outcome.trace
        assert outcome.facts["step"] == 2 * STEPS
        assert outcome.facts["loss"] < 0.1 * VARIANCE
        assert outcome.facts["momentum"][0] > 0
    assert outcomes[0].records[0].digest == outcomes[1].records[0].digest


def check_same_bits(outcomes: list[Outcome]) -> None:
    """All ranks passed the same sync points, and held the same bits there."""
    zero, one = ([(r.event, r.epoch, r.digest) for r in outcome.records] for outcome in outcomes)
    assert zero == one


def facts(outcomes: list[Outcome]) -> dict[str, Any]:
    """What is compared: worker 0's facts and the sync points it passed."""
    records = outcomes[0].records
    events = [(r.event, r.epoch, r.step) for r in records]
    keys = sorted(records[-1].metrics) if records else []
    return {"events": events, "metrics": keys, **outcomes[0].facts}


def compare(case: Case, ours: dict[str, Any], theirs: dict[str, Any], *, may_be_equal: bool = False) -> None:
    assert ours.keys() == theirs.keys()
    for key in ours:
        if key == "loss":
            assert ours["loss"] <= theirs["loss"] + 0.1 * VARIANCE
        elif key in case.differs:
            assert may_be_equal or ours[key] != theirs[key], f"{key} does not differ: the case says it does"
        else:
            assert ours[key] == theirs[key], key
