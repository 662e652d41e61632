from __future__ import annotations

import pytest

from lightning_asgd.core.leases.self_scheduling import Load, finish_s, steps_to_grant


def test_equal_workers_finish_together() -> None:
    assert finish_s([Load(0.0, 1.0, 1)] * 2, 10) == 5.0


def test_units_are_trained_in_whole_steps() -> None:
    assert finish_s([Load(0.0, 1.0, 4)], 5) == 8.0


def test_a_worker_alone_is_granted_half_of_what_is_left_within_a_chunk() -> None:
    assert steps_to_grant(Load(0.0, 0.01, 1), [], 20, 0.0, must=False) == 10
    assert steps_to_grant(Load(0.0, 0.01, 1), [], 1000, 0.0, must=False) == 50  # 0.5 s of work


def test_a_worker_is_granted_enough_until_the_next_answer() -> None:
    assert steps_to_grant(Load(0.0, 0.01, 1), [], 1000, 1.0, must=False) == 200  # twice the round trip


@pytest.mark.parametrize(("must", "steps"), [(False, 0), (True, 1)])
def test_a_much_slower_worker_trains_the_rest_only_if_it_must(must: bool, steps: int) -> None:
    slow, fast = Load(0.0, 1.0, 1), Load(0.95, 0.1, 1)
    assert steps_to_grant(slow, [fast], 1, 0.0, must=must) == steps


def test_nothing_is_granted_that_others_finish_sooner() -> None:
    assert steps_to_grant(Load(0.0, 1.0, 1), [Load(0.0, 0.5, 1)], 1, 0.0, must=True) == 0
