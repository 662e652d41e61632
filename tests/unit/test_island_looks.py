"""When an island's processes next look together what has become of an exchange."""

from __future__ import annotations

import pytest

from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.worker.exchange_period import Schedule
from lightning_asgd.islands.synchronizer import steps_to_look


def schedule(since: int, trip_s: float = 0.0, nsync: int = 10) -> Schedule:
    made = Schedule(ExchangeConfig.create(nsync=nsync), 0)
    made.since_push = made.since_fetch = since
    made.trip_s = trip_s
    return made


@pytest.mark.parametrize(("since", "expected"), [(0, 10), (7, 3), (10, 0), (12, 0)])
def test_without_an_exchange_in_flight_the_next_look_is_when_one_is_due(since: int, expected: int) -> None:
    assert steps_to_look(schedule(since), 100, 90, None, 0.0, offline=1000) == expected


def test_an_exchange_that_was_not_begun_near_a_sync_point_is_looked_at_after_every_step() -> None:
    assert steps_to_look(schedule(10), 100, 100, None, 0.0, offline=1000) == 1
    assert steps_to_look(schedule(11), 101, 100, None, 0.0, offline=1000) == 0


@pytest.mark.parametrize(
    ("since_s", "step_s", "expected"),
    [
        (0.01, 0.0, 1),  # the first one: nothing is known
        (0.0, 0.02, 5),  # the answer is expected in 100 ms
        (0.08, 0.02, 1),
        (0.32, 0.02, 2),  # it is late: after an eighth of the time that has passed
        (0.0, 0.001, 8),  # not later than the next exchange is due
        (0.05, 1.0, 1),  # between any two batches where steps are long
    ],
)
def test_the_answer_is_looked_for_when_it_is_expected(since_s: float, step_s: float, expected: int) -> None:
    assert steps_to_look(schedule(2, trip_s=0.1), 100, 98, since_s, step_s, offline=1000) == expected


def test_a_deferred_exchange_is_noted_once_and_then_looked_at_when_the_answer_is_expected() -> None:
    late = schedule(10, trip_s=1.0)
    assert steps_to_look(late, 100, 95, 0.2, 0.02, offline=1000) == 0
    assert steps_to_look(late, 100, 100, 0.2, 0.02, offline=1000) == 40
    late.since_push += 3
    assert steps_to_look(late, 103, 100, 0.26, 0.02, offline=1000) == 37


def test_no_more_steps_than_allowed_are_taken_without_an_exchange() -> None:
    assert steps_to_look(schedule(10, trip_s=1.0), 100, 100, 0.2, 0.02, offline=15) == 5
    assert steps_to_look(schedule(15, trip_s=1.0), 105, 100, 0.3, 0.02, offline=15) == 0


def test_no_look_is_farther_than_sixty_four_steps() -> None:
    assert steps_to_look(schedule(0, nsync=1000), 100, 100, None, 0.0, offline=1000) == 64
