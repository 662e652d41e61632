from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_asgd import Advanced
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.worker.exchange_period import Pace, Schedule

SECONDS = st.floats(1e-4, 10.0)


@given(SECONDS, SECONDS, st.floats(0.0, 1.0))
def test_the_smallest_period_that_hides_the_exchange_and_costs_little(step: float, rtt_s: float, cost: float) -> None:
    pace = Pace(10)
    for _ in range(9):
        pace.note(1000, step_s=step, trip_s=rtt_s, cost_s=cost)
    period = pace.period
    hidden, cheap = rtt_s <= period * step * 1.0001, cost <= 0.02501 * period * step
    assert period == 10_000 or (hidden and cheap)
    if period > 1:
        assert (period - 1) * step < rtt_s * 1.0001 or 0.025 * (period - 1) * step < cost * 1.0001


@pytest.mark.parametrize(("steps", "expected"), [(0, 2), (64, 2), (128, 4), (320, 10), (640, 20), (10_000, 20)])
def test_early_exchanges_may_cost_more(steps: int, expected: int) -> None:
    pace = Pace(1)
    pace.note(steps, step_s=0.1, trip_s=0.01, cost_s=0.05)
    assert pace.period == expected
    pace.note(steps, step_s=0.1, trip_s=3.0, cost_s=0.05)  # the period hides the exchange at any time
    pace.note(steps, step_s=0.1, trip_s=3.0, cost_s=0.05)
    assert pace.period == 30


def test_it_follows_a_network_that_becomes_slow_and_fast_again_and_ignores_a_single_delay() -> None:
    pace = Pace(10)
    for rtt_s, expected in ((0.02, 2), (1.0, 100), (0.05, 5)):
        for _ in range(9):
            pace.note(1000, step_s=0.01, trip_s=rtt_s, cost_s=0.0)
        assert pace.period == expected
    pace.note(1000, step_s=0.01, trip_s=60.0, cost_s=5.0)
    assert pace.period == 5


def test_before_anything_is_known_it_says_what_it_was_told() -> None:
    pace = Pace(10)
    pace.note(1000, step_s=0.0, trip_s=1.0, cost_s=1.0)
    assert pace.period == 10


def test_settings() -> None:
    config = ExchangeConfig.create(nsync="auto")
    assert config.auto
    assert config.npush == config.nfetch == 10
    assert Schedule(config, lead=0).nsync == 1  # the first exchange soon, so that its cost is known
    assert not ExchangeConfig.create(nsync=10).auto
    with pytest.raises(ValueError, match=r"nsync='auto' was given together with Advanced\(nfetch=3\)"):
        ExchangeConfig.create(nsync="auto", advanced=Advanced(nfetch=3))
    with pytest.raises(ValueError, match="nsync='often'"):
        ExchangeConfig.create(nsync="often")


def test_the_first_exchange_of_a_fragment_comes_earlier_by_its_lead() -> None:
    schedule = Schedule(ExchangeConfig.create(nsync=4), lead=2)
    schedule.since_push = schedule.since_fetch = 1
    assert schedule.due(1) == (False, False)
    schedule.since_push = schedule.since_fetch = 2
    assert schedule.due(2) == (True, True)
    schedule.pushed(2, 10.0, rest=False)
    schedule.since_push = schedule.since_fetch = 3
    assert schedule.due(5) == (False, False)
    schedule.since_push = 4
    assert schedule.due(6) == (True, False)


def test_servers_may_want_another_period() -> None:
    schedule = Schedule(ExchangeConfig.create(nsync=4), lead=0)
    schedule.replied(7)
    assert (schedule.nsync, schedule.npush) == (7, 4)
    schedule.replied(0)
    assert schedule.nsync == 4


def test_an_exchange_will_probably_take_the_shorter_time_of_the_latest_two() -> None:
    schedule = Schedule(ExchangeConfig.create(nsync=4), lead=0)
    took = []
    for trip_s in (3.0, 9.0, 5.0, 1.0):
        schedule.answered(1, step_s=1.0, trip_s=trip_s, cost_s=0.0, sync=False)
        took.append(schedule.trip_s)
    assert took == [3.0, 3.0, 5.0, 1.0]
    schedule.forget_trip()
    assert schedule.trip_s == 0.8


def test_steps_are_timed_from_one_push_to_the_next_but_not_over_a_sync_point() -> None:
    schedule = Schedule(ExchangeConfig.create(nsync=4), lead=0)
    assert schedule.pushed(4, 10.0, rest=False) == (0.0, 0.0)
    schedule.busy_s = 2.0  # of the ten seconds in which five steps were taken
    assert schedule.pushed(9, 20.0, rest=False) == (0.5, 1.6)
    schedule.pause()
    assert schedule.pushed(14, 90.0, rest=False) == (0.0, 0.0)
