"""``nsync="restarted"``: the period of parallel restarted SGD, and what its theorem needs."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_asgd import Advanced
from lightning_asgd.algorithms.averaging import restarted_period
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning.class_trees import rank_zero_warn
from lightning_asgd.core.lightning.loop_counters import steps_of_fit
from lightning_asgd.core.worker.exchange_period import Schedule
from lightning_asgd.programs.restarted_nsync import restarted_nsync

CONFIG = ExchangeConfig.create(nsync="restarted", algorithm="local_sgd")
SGD = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
ADAM = torch.optim.Adam([torch.zeros(1)])


def period(steps: float, workers: int, *optimizers: Any) -> int:
    trainer = SimpleNamespace(estimated_stepping_batches=steps)
    return restarted_nsync(steps_of_fit(trainer, CONFIG), workers, optimizers, rank_zero_warn)


@pytest.fixture(autouse=True)
def rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)


@pytest.mark.parametrize(
    ("steps", "workers", "expected"),
    [(100_000, 8, 3), (1_000_000, 4, 11), (256, 1, 4), (16**4, 16, 2), (10, 16, 1), (10_000, 1, 10)],
)
def test_the_period(steps: int, workers: int, expected: int) -> None:
    assert restarted_period(steps, workers) == expected
    assert expected == 1 or expected * workers**0.75 <= steps**0.25 * (1 + 1e-9) < (expected + 1) * workers**0.75


def test_what_holds_is_not_commented_on() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert period(1_000_000, 4, SGD) == 11
        assert period(10, 1, SGD) == 1


def test_conditions_that_do_not_hold_are_reported() -> None:
    with pytest.warns(UserWarning, match=r"4 workers that take 63 steps .* only from 64 steps"):
        assert period(63, 4, SGD) == 1
    with pytest.warns(UserWarning, match="not about Adam"):
        assert period(1_000_000, 4, SGD, ADAM) == 11
    with pytest.raises(ConfigurationError, match="number of steps, which is inf"):
        period(math.inf, 4, SGD)


def test_only_where_workers_continue_from_their_mean() -> None:
    assert ExchangeConfig.create(nsync="restarted", algorithm="local_sgd").restarted
    with pytest.raises(ConfigurationError, match="Expected algorithm='local_sgd'"):
        ExchangeConfig.create(nsync="restarted")
    with pytest.raises(ConfigurationError, match=r"nsync='restarted' was given together with Advanced\(nfetch=3\)"):
        ExchangeConfig.create(nsync="restarted", advanced=Advanced(nfetch=3))


def test_exchanges_follow_the_period_of_the_fit() -> None:
    schedule = Schedule(ExchangeConfig.create(nsync="restarted", algorithm="local_sgd"), 0, lambda: 3)
    due = []
    for step in range(1, 8):
        schedule.since_push += 1
        schedule.since_fetch += 1
        due.append(schedule.due(step))
        if due[-1] == (True, True):
            schedule.pushed(step, float(step), rest=False)
            schedule.since_fetch = 0
    assert [step for step, each in enumerate(due, 1) if each == (True, True)] == [3, 6]
    assert set(due) == {(True, True), (False, False)}
