"""Cases that change how Lightning's loops go, also with a fixed split of the data, and with one worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.cases import CASES
from tests.conformance.pair import ASGD, DDP, Outcome, Pair
from tests.conformance.test_battery import DEADLINE_S, check_same_bits, compare, facts
from tests.helpers import leaks

NAMES = [
    "accumulation",
    "accumulation_beyond",
    "accumulation_scheduler",
    "backbone",
    "barebones",
    "batch_size_finder",
    "by_time",
    "detect_anomaly",
    "early_stopping",
    "early_stopping_within",
    "ema",
    "every_n_steps",
    "limits",
    "limits_by_fraction",
    "max_steps",
    "min_epochs",
    "overfit",
    "profilers",
    "pruning",
    "rate_finder",
    "reload",
    "sanity",
    "second_fit",
    "stopped_by_all",
    "stopped_by_each",
    "stopped_by_one",
    "swa",
    "swa_with_batch_norm",
    "throughput",
    "timer",
    "validation_by_batches",
    "validation_by_fraction",
    "validation_by_time",
    "weight_averaging",
]
KINDS = {"split": 2, "alone": 1}
BY_CLOCK = {"validation_by_time"}  # never the same twice
QUICK = {("swa_with_batch_norm", "alone"), ("stopped_by_each", "split")}


@pytest.fixture(scope="module", params=["pytorch_lightning"])
def pairs(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Pair]]:
    with leaks.forbidden():
        pairs = {
            (kind, strategy): Pair(request.param, strategy, workers, **({"data": "split"} if strategy == ASGD else {}))
            for kind, workers in KINDS.items()
            for strategy in (ASGD, DDP)
        }
        yield pairs
        for pair in pairs.values():
            pair.close()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if (name, kind) in QUICK else [pytest.mark.slow])
        for kind in KINDS
        for name in NAMES
    ],
)
def test_case(name: str, kind: str, pairs: dict[tuple[str, str], Pair], tmp_path: Path) -> None:
    case = CASES[name]

    def run(strategy: str) -> list[Outcome]:
        folder = tmp_path / strategy
        folder.mkdir()
        return pairs[kind, strategy].run(case.run, folder, DEADLINE_S)

    ours = run(ASGD)
    for outcome in ours:
        assert bool(case.refused) == bool(outcome.error), outcome.trace
    if case.refused:
        return
    if len(ours) > 1:
        check_same_bits(ours)
    if case.ddp or (kind == "alone" and name not in BY_CLOCK):  # one rank waits for no others
        theirs = run(DDP)
        assert not any(outcome.error for outcome in theirs), theirs[0].trace
        compare(case, facts(ours), facts(theirs), may_be_equal=True)
