"""Leases as if there were very many workers: the same guarantees where only sums over them are looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asgd.core.leases import table as lease_table
from lightning_asgd.core.leases.crowd import Crowd, Member
from lightning_asgd.core.leases.self_scheduling import Load, finish_s
from lightning_asgd.core.protocol import Epoch, LeaseRequest
from lightning_asgd.core.server.pending_replies import Completion
from tests.component.test_leases import (  # noqa: F401  # they are run again, as if workers were many
    Run,
    test_an_epoch_lasts_as_long_as_the_sum_of_the_speeds_allows,
    test_every_unit_is_applied_once_whoever_comes_stops_and_dies,
    test_every_unit_is_trained_once_in_its_segment,
    test_no_epoch_of_a_far_worker_and_a_slow_one_ends_in_waiting,
    test_what_a_dead_worker_had_not_pushed_is_trained_by_others,
    test_what_a_worker_leaves_is_trained_by_others,
    units,
)
from tests.component.test_stream_leases import test_every_sample_is_trained_once  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def many() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease_table, "_FEW", 0)
        patch.setattr(lease_table, "_FIRST", 1)
        yield


LOADS = st.builds(Load, st.floats(0.0, 20.0), st.floats(0.001, 5.0), st.integers(1, 64))
SOLE = Load(0.0, 1e9, 1)  # a worker that trains nothing


@settings(max_examples=300, deadline=None)
@given(st.lists(LOADS, min_size=1, max_size=40), st.integers(1, 5000), st.integers(0, 2), st.floats(0.0, 1e6))
def test_a_crowd_finishes_within_half_a_step_of_what_its_steps_come_to(
    loads: list[Load], units: int, kinds: int, now: float
) -> None:
    crowd = Crowd()
    crowd.now = now
    for index, load in enumerate(loads):
        drift = (index + kinds) % 3 - 1
        crowd.add(Member(drift, load.free_s + load.size * load.unit_s + drift * now, load.unit_s, load.size))
    exact = finish_s(loads, units)
    found = crowd.finish_s(units, SOLE._replace(unit_s=0.001, free_s=1e9), 1e6)
    step = max(load.size * load.unit_s for load in loads)
    assert abs(found - exact) <= step / 2 + 0.003


@settings(max_examples=100, deadline=None)
@given(st.lists(LOADS, min_size=1, max_size=10), st.integers(0, 9))
def test_nothing_is_left_of_members_that_are_removed(loads: list[Load], gone: int) -> None:
    crowd, members = Crowd(), [Member(1, load.free_s, load.unit_s, load.size) for load in loads]
    for member in members:
        crowd.add(member)
    for member in members[gone:]:
        crowd.add(member, -1)
    rest = Crowd()
    for member in members[:gone]:
        rest.add(member)
    assert len(crowd) == len(rest)
    for second in (0.0, 1.0, 50.0):
        assert crowd.are_sooner(1, second, SOLE, 1.0) == rest.are_sooner(1, second, SOLE, 1.0)


@pytest.mark.parametrize("slow", [1.0, 3.0, 10.0])
def test_hundreds_of_workers_train_an_interval_in_the_time_that_their_speeds_allow(slow: float) -> None:
    paces = [0.01 * (1 + (slow - 1) * (n % 7) / 6) for n in range(200)]
    run = Run(2 * 40_000, (40_000, 80_000), paces)
    run.segment()
    run.segment()
    first, second = (max(w.met_at[i] for w in run.workers.values()) for i in (0, 1))
    assert run.counts() == Counter(range(80_000))
    assert second - first <= 1.03 * 40_000 / sum(1 / pace for pace in paces)


@pytest.mark.parametrize("workers", [3, 19, 40])
@pytest.mark.parametrize("step_s", [0.0005, 0.0015, 0.004, 1.0])
@pytest.mark.parametrize("flush", [0.0, 0.005])
def test_one_of_many_that_wait_trains_what_a_lost_worker_has_left(workers: int, step_s: float, flush: float) -> None:
    """Each would leave it to others that are just as fast."""
    size = 4
    leases = lease_table.Leases(Epoch("0", workers * size, (workers * size,)))
    leases.update_members(set(range(workers)), 100.0)

    def claim(worker: int, trained: int, now: float, *, wait: bool) -> list[Completion]:
        about = "s", worker, "0", 0, trained, trained, step_s / size if trained else 0.0
        return leases.serve(LeaseRequest(*about, flush=flush, wait=wait, size=size), now)

    for worker in range(workers):
        ((_, grant),) = claim(worker, 0, 100.0, wait=False)
        assert units(grant) == size
    for worker in range(1, workers):
        assert claim(worker, size, 101.0, wait=True) == []
    answers = leases.update_members(set(range(1, workers)), 102.0)
    assert sum(units(grant) for _, grant in answers) == size


@pytest.mark.parametrize("few", [0, 16])
def test_workers_with_steps_of_a_millisecond_end_an_interval(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_table, "_FEW", few)
    for workers, pace in ((20, 0.0015), (32, 0.001), (32, 0.0005), (64, 0.0015)):
        run = Run(80 * workers + 3, (80 * workers + 3,), [pace / 4] * workers, sizes=(4,))
        run.segment()
        assert run.counts() == Counter(range(80 * workers + 3))


def test_what_changes_by_itself_is_kept_once_for_each_worker() -> None:
    leases = lease_table.Leases(Epoch("0", 10**9, (10**9,)))
    leases.update_members({0, 1}, 0.0)
    for k in range(2000):
        leases.serve(LeaseRequest("s", 0, "0", 0, 0, 0, 1e5, size=4), 1.0 + k)
    assert len(leases._totals._changes) < 100


def test_a_worker_may_be_faster_than_a_clock_can_tell() -> None:
    leases = lease_table.Leases(Epoch("0", 100, (100,)))
    leases.update_members({0, 1}, 0.0)
    for worker in (0, 1):
        leases.serve(LeaseRequest("s", worker, "0", 0, 0, 0, 0.0, size=4), 0.0)
    leases.serve(LeaseRequest("s", 0, "0", 0, 4, 4, 1e-310, wait=True, size=4), 1.0)
    leases.retry(2.0)
    ((_, grant),) = leases.serve(LeaseRequest("s", 1, "0", 0, 4, 4, 0.1, size=4), 3.0)
    assert grant.progress >= 8
