"""Who trains which unit of an epoch: everything once, faster workers more, whoever stops, dies or slows down."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.futures import Future
from torch.utils.data import BatchSampler, RandomSampler

from lightning_asgd.core.foundation.errors import ProtocolError, WorkerAwayError
from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.leases.plan import Plan
from lightning_asgd.core.leases.sampler import in_common_order
from lightning_asgd.core.leases.table import Leases, check_epoch
from lightning_asgd.core.protocol import Epoch, LeaseGrant, LeaseHoldings, LeaseRequest, OpenEpoch
from lightning_asgd.core.worker.session_client import Members
from lightning_asgd.streams.server import StreamLeases


def units(grant: LeaseGrant) -> int:
    return sum(last - first for first, last in grant.ranges)


@dataclass
class Worker:
    """Trains what it is granted, one unit after the other, and claims when it has nothing left."""

    pace: float
    held: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    segment: int = 0
    waits: bool = False
    knows_pace: bool = False
    met_at: list[float] = field(default_factory=list)
    unapplied: int = 0
    size: int = 1
    in_vain: bool = False
    flush: float = 0.0
    flushes: bool = False
    final: bool = False
    claims: int = 0  # but for those at which it waits
    in_vain_claims: int = 0


class Run:
    """An epoch in virtual time, with workers that meet at every segment's end."""

    def __init__(
        self,
        units: int,
        ends: tuple[int, ...],
        paces: list[float],
        sizes: Sequence[int] = (1,),
        *,
        all_train: bool = True,
        flushes: Sequence[float] = (0.0,),
        before: Leases | None = None,
        **epoch: tuple[tuple[int, int], ...],
    ) -> None:
        self.leases = Leases(Epoch("0", units, ends, **epoch), all_train=all_train, before=before)
        self.workers = {
            i: Worker(pace, size=sizes[i % len(sizes)], flush=flushes[i % len(flushes)]) for i, pace in enumerate(paces)
        }
        self.units, self.ends = units, ends
        self.now = 0.0
        self.events: list[tuple[float, int]] = []
        self.leases.update_members(self.workers, 0.0)

    def claim(self, number: int, *, wait: bool = False, stop: bool = False) -> None:
        worker = self.workers[number]
        applied = len(worker.trained) if wait or stop else len(worker.trained) - worker.unapplied
        pace = worker.pace if worker.knows_pace else 0.0
        about = ("s", number, "0", worker.segment, len(worker.trained), applied, pace)
        claim = LeaseRequest(*about, flush=worker.flush, wait=wait, stop=stop, size=worker.size)
        worker.waits = wait
        worker.claims += not wait
        for answered, grant in self.leases.serve(claim, self.now):
            self.answered(answered.worker, grant)

    def answered(self, number: int, grant: LeaseGrant) -> None:
        if number not in self.workers:
            return
        worker = self.workers[number]
        waited, worker.waits = worker.waits, False
        worker.final = grant.final
        if grant.ranges:
            ((first, last),) = grant.ranges
            worker.in_vain = grant.void
            worker.held.extend([] if grant.void else range(first, last))
            heapq.heappush(self.events, (self.now + worker.pace * len(worker.held[: worker.size]), number))
        elif grant.over:
            worker.met_at.append(self.now)
        elif not waited:
            worker.in_vain_claims += 1
            self.flush(number)

    def flush(self, number: int) -> None:
        worker = self.workers[number]
        worker.flushes = True
        heapq.heappush(self.events, (self.now + worker.flush, number))

    def segment(self) -> None:
        """Train until all have met."""
        for number in self.workers:
            self.claim(number)
        self.train()
        for worker in self.workers.values():
            assert len(worker.met_at) == worker.segment + 1
            worker.segment += 1

    def train(self) -> None:
        """Train what is granted, until nobody holds anything or all that do hang."""
        while self.events:
            self.now, number = heapq.heappop(self.events)
            worker = self.workers.get(number)
            if worker is not None and worker.flushes:
                worker.flushes, worker.unapplied = False, 0
                self.claim(number, wait=True)
                continue
            if worker is None or not (worker.held or worker.in_vain):
                continue
            worker.in_vain = False
            step, worker.held = worker.held[: worker.size], worker.held[worker.size :]
            worker.trained += step
            worker.unapplied += len(step)
            worker.knows_pace = True
            if worker.held:
                heapq.heappush(self.events, (self.now + worker.pace * len(worker.held[: worker.size]), number))
            elif worker.final:
                self.flush(number)
            else:
                self.claim(number)
            self.between(number)

    def between(self, number: int) -> None:
        """What else happens after a worker has trained a unit."""

    def tick(self) -> None:
        for answered, grant in self.leases.retry(self.now):
            self.answered(answered.worker, grant)

    def counts(self) -> Counter[int]:
        return Counter(unit for worker in self.workers.values() for unit in worker.trained)


PACES = st.lists(st.floats(0.01, 2.0), min_size=1, max_size=6)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(PACES, SIZES, st.integers(0, 120), st.lists(st.integers(1, 100), max_size=4))
def test_every_unit_is_trained_once_in_its_segment(
    paces: list[float], sizes: list[int], units: int, cuts: list[int]
) -> None:
    workers = len(paces)
    ends: list[int] = []
    for cut in sorted(cuts):
        if cut - (ends[-1] if ends else 0) >= workers:
            ends.append(cut)
    total = (ends[-1] if ends else 0) + workers + units
    ends.append(total)
    run = Run(total, tuple(ends), paces, sizes)
    for index, end in enumerate(ends):
        run.segment()
        assert run.counts() == Counter(range(end)), index
        for worker in run.workers.values():
            assert len(worker.met_at) == index + 1
    assert run.leases.finished == ((0, total),)


@settings(max_examples=100, deadline=None)
@given(PACES.filter(lambda p: len(p) > 1), st.integers(0, 60), st.data())
def test_what_a_dead_worker_had_not_pushed_is_trained_by_others(
    paces: list[float], units: int, data: st.DataObject
) -> None:
    total = len(paces) + units
    run = Run(total, (total,), paces)
    after = data.draw(st.integers(1, total))
    applied: list[int] = []

    def between(number: int) -> None:
        if len(run.workers) == len(paces) and len(run.counts()) >= after:
            worker = run.workers.pop(number)
            applied.extend(worker.trained[: len(worker.trained) - worker.unapplied])
            for answered, grant in run.leases.update_members(run.workers, run.now):
                run.answered(answered.worker, grant)

    run.between = between  # type: ignore[method-assign]
    run.segment()
    assert run.counts() + Counter(applied) == Counter(range(total))
    assert run.leases.finished == ((0, total),)


@settings(max_examples=100, deadline=None)
@given(PACES.filter(lambda p: len(p) > 1), st.integers(0, 60), st.data())
def test_what_a_worker_leaves_is_trained_by_others(paces: list[float], units: int, data: st.DataObject) -> None:
    total = len(paces) + units
    run = Run(total, (total,), paces)
    after = data.draw(st.integers(1, total))
    left: list[int] = []

    def between(number: int) -> None:
        if not left and len(run.counts()) >= after and run.workers[number].held:
            left.append(number)
            run.workers[number].held.clear()
            run.claim(number, stop=True)

    run.between = between  # type: ignore[method-assign]
    run.segment()
    assert run.counts() == Counter(range(total))


@settings(max_examples=150, deadline=None)
@given(PACES, SIZES, st.integers(1, 200), st.randoms(use_true_random=False))
def test_every_unit_is_applied_once_whoever_comes_stops_and_dies(
    paces: list[float], sizes: list[int], units: int, random: Random
) -> None:
    run = Run(units, (units,), paces, sizes, all_train=False)
    applied: list[int] = []  # of workers that are gone
    come: list[int] = []

    def meet() -> None:
        for answered, grant in run.leases.update_members(run.workers, run.now):
            run.answered(answered.worker, grant)

    def between(number: int) -> None:
        worker, event = run.workers[number], random.random()
        if event < 0.05 and len(run.workers) < 8:
            late = len(paces) + len(come)
            come.append(late)
            run.workers[late] = Worker(random.choice(paces), size=random.choice(sizes))
            meet()
            run.claim(late)
        elif event < 0.1 and len(run.workers) > 1 and worker.held:  # stops, and pushes what it has trained
            worker.held.clear()
            worker.unapplied = 0
            run.claim(number, stop=True)
            applied.extend(run.workers.pop(number).trained)
            meet()
        elif event < 0.15 and len(run.workers) > 1:  # dies
            del run.workers[number]
            applied.extend(worker.trained[: len(worker.trained) - worker.unapplied])
            meet()

    run.between = between  # type: ignore[method-assign]
    for number in list(run.workers):
        run.claim(number)
    run.train()
    assert run.counts() + Counter(applied) == Counter(range(units))
    assert run.leases.finished == ((0, units),)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 500), st.integers(1, 500))
def test_what_is_granted_is_cut_into_steps_of_which_none_is_much_smaller_than_need_be(
    batch: int, accumulate: int, first: int, units: int
) -> None:
    plan = Plan(Epoch("0", 1000, (1000,)), range(1000), batch, accumulate)
    batches = list(plan.batches(first, first + units))
    assert [sample for b in batches for sample in b.samples] == list(range(first, first + units))
    steps = [[b for b in batches if b.step == step] for step in dict.fromkeys(b.step for b in batches)]
    assert len(steps) == math.ceil(units / plan.step)
    for step in steps:
        assert [not b.left for b in step] == [False] * (len(step) - 1) + [True]
        assert {b.units for b in step} == {sum(len(b.samples) for b in step)}
        assert [b.left for b in step] == list(range(len(step) - 1, -1, -1))
        assert len(step) <= accumulate
        lengths = [len(b.samples) for b in step]
        assert max(lengths) <= min(batch, min(lengths) + 1)
        assert units < plan.step or 2 * step[0].units >= plan.step


def test_a_worker_that_halts_an_epoch_halts_it_for_those_who_train_and_those_who_come() -> None:
    leases = Leases(Epoch("0", 100, (50, 100)))
    leases.update_members([0, 1, 2], 0.0)
    for worker in (0, 1):
        ((_, grant),) = leases.serve(LeaseRequest("s", worker, "0", 0, 0, 0, 0.0), 0.0)
        assert units(grant) == 1
    ((_, last),) = leases.serve(LeaseRequest("s", 0, "0", 0, 0, 0, 0.1, stop=True, halt=True), 0.1)
    assert last.over
    assert leases.serve(LeaseRequest("s", 1, "0", 0, 1, 0, 0.1, wait=True), 0.1) == []  # its own update is under way
    leases.applied(1, 1)
    ((_, last),) = leases.retry(0.2)
    assert (last.ranges, last.over, last.halted) == ((), True, True)
    ((_, void),) = leases.serve(LeaseRequest("s", 2, "0", 0, 0, 0, 0.0), 0.3)
    assert void.void  # or it would not notice
    ((_, last),) = leases.serve(LeaseRequest("s", 2, "0", 0, 0, 0, 0.1, wait=True), 0.4)
    assert last.halted
    assert leases.finished == ((1, 2),)


def test_who_comes_when_others_hold_all_that_is_left_trains_a_batch_in_vain() -> None:
    """Else its epoch would have no batch: it would count no steps, and go on before the others are through."""
    leases = Leases(Epoch("0", 2, (2,)), all_train=False)
    leases.update_members({0}, 0.0)
    for _ in range(2):
        ((_, grant),) = leases.serve(LeaseRequest("s", 0, "0", 0, 0, 0, 0.1, size=1), 0.0)
        assert grant is not None
        assert (units(grant), grant.void) == (1, False)
    leases.update_members({0, 1}, 0.0)
    ((_, late),) = leases.serve(LeaseRequest("s", 1, "0", 0, 0, 0, 0.0, size=1), 0.0)
    assert late is not None
    assert (late.ranges, late.void) == (((1, 2),), True)
    ((_, after),) = leases.serve(LeaseRequest("s", 1, "0", 0, 0, 0, 0.0, size=1), 0.0)
    assert after is not None
    assert (after.ranges, after.over) == ((), False)
    assert leases.serve(LeaseRequest("s", 1, "0", 0, 0, 0, 0.0, wait=True, size=1), 0.0) == []
    answers = leases.serve(LeaseRequest("s", 0, "0", 0, 2, 2, 0.1, wait=True, size=1), 0.2)
    assert sorted((claim.worker, grant is not None and grant.over) for claim, grant in answers) == [
        (0, True),
        (1, True),
    ]


@pytest.mark.parametrize("shards", [(), (1, 2)], ids=["samples", "shards"])
def test_an_interval_of_a_run_is_over_once_all_servers_have_its_updates(shards: tuple[int, ...]) -> None:
    """There is no sync point, where workers would wait for each other's pushes to the other servers."""
    leases = (StreamLeases if shards else Leases)(Epoch("0", 2, (2,), shards=shards), all_train=False)
    leases.update_members({0, 1}, 0.0)
    for worker in (0, 1):
        ((_, grant),) = leases.serve(LeaseRequest("s", worker, "0", 0, 0, 0, 0.1), 0.0)
        assert units(grant) == 1
        leases.applied(worker, 1)
    assert leases.serve(LeaseRequest("s", 0, "0", 0, 1, 1, 0.1, wait=True), 0.1) == []
    answers = leases.serve(LeaseRequest("s", 1, "0", 0, 1, 1, 0.1, wait=True), 0.2)
    assert sorted((request.worker, grant.over) for request, grant in answers) == [(0, True), (1, True)]


def test_a_worker_that_had_stopped_holds_nothing_up_after_the_coordinator_was_lost() -> None:
    """It reports what it has trained of each range that it was granted: of the second one nothing."""
    epoch = Epoch("0", 20, (20,), done=((0, 4),))
    leases = Leases(epoch, all_train=False)
    leases.reinstate(0, LeaseHoldings(epoch, ((0, 4), (8, 8)), 4, 0, applied=2, stopped=True))
    leases.update_members({0, 1}, 0.0)
    ((_, grant),) = leases.serve(LeaseRequest("s", 1, "0", 0, 0, 0, 0.1, size=16), 0.0)
    assert units(grant) == 16
    ((_, grant),) = leases.serve(LeaseRequest("s", 1, "0", 0, 16, 16, 0.1, wait=True, size=16), 2.0)
    assert grant.over


def test_an_interval_with_fewer_units_than_a_step_for_each_grants_all_of_them_once() -> None:
    """The first worker asks twice before the others do: what is left is reserved for these."""
    leases = Leases(Epoch("0", 8, (8,)))
    leases.update_members({0, 1, 2}, 0.0)
    granted: Counter[int] = Counter()

    def claim(worker: int, trained: int, unit_s: float, now: float, *, wait: bool = False) -> None:
        about = "s", worker, "0", 0, trained, trained, unit_s
        for _, grant in leases.serve(LeaseRequest(*about, wait=wait, size=4), now):
            assert all(first < last for first, last in grant.ranges)
            granted.update(unit for first, last in grant.ranges if not grant.void for unit in range(first, last))

    claim(0, 0, 0.0, 0.0)
    claim(0, 0, 0.0, 0.1)
    claim(0, 2, 0.1, 0.3)
    claim(1, 0, 0.0, 1.0)
    claim(2, 0, 0.0, 1.0)
    for worker in (0, 1, 2):
        claim(worker, leases._workers[worker].granted, 0.1, 2.0 + worker, wait=True)
    assert granted == Counter(range(8))
    assert leases.finished == ((0, 8),)


@pytest.mark.parametrize("returned", [(8, 2), (-4, 2), (36, 44)])
def test_ranges_that_are_none_are_not_taken_back(returned: tuple[int, int]) -> None:
    leases = Leases(Epoch("0", 40, (40,)))
    leases.update_members({0, 1}, 0.0)
    leases.serve(LeaseRequest("s", 0, "0", 0, 0, 0, 0.0, size=10), 0.0)
    with pytest.raises(ProtocolError, match="returns units"):
        leases.serve(LeaseRequest("s", 0, "0", 0, 0, 0, 0.0, size=10, returned=(returned,)), 1.0)
    assert list(leases._workers[0].held) == [(0, 10)]


def test_a_worker_that_hangs_is_waited_for_only_with_what_it_holds() -> None:
    """The others train all but that, although it was the fastest, and the rest once it is declared lost."""
    run = Run(40, (40,), [0.1, 0.1, 0.01])
    hung: list[int] = []

    def between(number: int) -> None:
        if number == 2 and len(run.workers[2].trained) == 5:
            hung.extend(run.workers[2].held)
            run.events = [(time, n) for time, n in run.events if n != 2]
            heapq.heapify(run.events)

    run.between = between  # type: ignore[method-assign]
    for number in run.workers:
        run.claim(number)
    for _ in range(200):
        run.train()
        run.now += 0.25
        run.tick()
    assert set(range(40)) - set(run.counts()) == set(hung)
    assert run.workers[0].waits
    assert run.workers[1].waits
    del run.workers[2]
    for answered, grant in run.leases.update_members(run.workers, run.now):
        run.answered(answered.worker, grant)
    run.train()
    assert run.leases.finished == ((0, 40),)


@pytest.mark.parametrize("paces", [[0.01, 0.04], [0.01, 0.1], [0.01, 0.01], [0.01, 0.01, 0.01, 0.04], [0.01, 1.0]])
def test_an_epoch_lasts_as_long_as_the_sum_of_the_speeds_allows(paces: list[float]) -> None:
    units = 400
    run = Run(2 * units, (units, 2 * units), paces)
    run.segment()
    run.segment()  # now that paces are known
    first, second = max(w.met_at[0] for w in run.workers.values()), max(w.met_at[1] for w in run.workers.values())
    ideal = units / sum(1 / pace for pace in paces)
    # Everybody trains one unit, however long it takes, to notice the segment's end.
    assert second - first <= max(1.03 * ideal, max(paces))


@pytest.mark.parametrize(
    ("paces", "flushes"),
    [
        ([0.01, 0.01], [0.0, 0.5]),
        ([0.01, 0.01], [0.5, 0.5]),
        ([0.04, 0.01], [0.0, 0.5]),
        ([0.01, 0.01, 0.01, 0.02], [0.3, 0.0, 0.1, 0.2]),
        ([0.01, 0.01], [0.0, 6.0]),
    ],
)
def test_who_is_far_from_the_servers_trains_less_so_that_all_have_pushed_at_once(
    paces: list[float], flushes: list[float]
) -> None:
    units = 400
    run = Run(2 * units, (units, 2 * units), paces, flushes=flushes)
    run.segment()
    run.segment()
    first, second = max(w.met_at[0] for w in run.workers.values()), max(w.met_at[1] for w in run.workers.values())
    ideal = (units + sum(f / p for f, p in zip(flushes, paces, strict=True))) / sum(1 / pace for pace in paces)
    # Everybody trains one unit, and pushes it, to notice the segment's end.
    assert second - first <= max(1.03 * ideal, max(p + f for f, p in zip(flushes, paces, strict=True)) + 0.01)


@pytest.mark.parametrize(
    ("paces", "flushes"), [([0.01, 0.01], [0.0]), ([0.01, 0.01], [0.0, 0.2]), ([0.01, 0.04], [0.0])]
)
def test_a_worker_asks_no_more_when_there_is_nothing_to_expect(paces: list[float], flushes: list[float]) -> None:
    run = Run(90, (90,), paces, flushes=flushes)
    run.segment()
    # The last one may come too late for it, since others were faster than they seemed.
    assert sum(worker.in_vain_claims for worker in run.workers.values()) <= 1
    assert sum(worker.claims for worker in run.workers.values()) <= 18
    following = Run(90, (90,), paces, flushes=flushes, before=run.leases)
    for number, worker in following.workers.items():
        worker.knows_pace = True
        following.claim(number)
        assert len(worker.held) > 5  # at once, as paces are known from the epoch before
    following.train()
    assert sum(worker.in_vain_claims for worker in following.workers.values()) <= 1
    assert all(b.claims < a.claims for a, b in zip(run.workers.values(), following.workers.values(), strict=True))
    assert following.now <= run.now + 1e-9


def test_the_pace_of_the_epoch_before_counts_until_a_worker_has_claimed() -> None:
    before = Leases(Epoch("0", 8, (8,)))
    before.update_members([0, 1], 0.0)
    before.serve(LeaseRequest("s", 0, "0", 0, 0, 0, 0.01), 0.0)
    before.serve(LeaseRequest("s", 1, "0", 0, 0, 0, 0.1), 0.0)
    leases = Leases(Epoch("1", 110, (110,)), before=before, now=1.0)
    leases.update_members([0, 1], 1.0)
    ((_, grant),) = leases.serve(LeaseRequest("s", 0, "1", 0, 0, 0, 0.01), 1.0)
    assert units(grant) > 5
    # Who was there in that epoch, and no longer is, has no part.
    leases = Leases(Epoch("2", 110, (110,)), before=leases, now=2.0)
    leases.update_members([0], 2.0)
    ((_, grant),) = leases.serve(LeaseRequest("s", 0, "2", 0, 0, 0, 0.01, size=110), 2.0)
    assert (grant.ranges, grant.ratio) == (((0, 110),), 1.0)
    with pytest.raises(WorkerAwayError):
        leases.serve(
            LeaseRequest("s", 1, "2", 0, 5, 0, 0.1), 2.0
        )  # it has claimed nothing in this epoch, as far as is known


def test_a_unit_is_not_given_to_a_worker_that_all_others_would_have_to_wait_for() -> None:
    run = Run(40, (20, 40), [0.01, 0.5])
    run.segment()
    run.segment()
    assert len(run.workers[1].trained) == 2


@pytest.mark.parametrize(("needs_s", "gets_it"), [(0.15, True), (0.19, False)])
def test_a_worker_that_saves_next_to_nothing_has_to_be_through_sooner(needs_s: float, gets_it: bool) -> None:
    """The other one needs 0.2 s for the rest, as far as is known; it may well be faster."""
    leases = Leases(Epoch("0", 101, (101,)))
    leases.update_members({0, 1}, 0.0)
    leases.serve(LeaseRequest("s", 1, "0", 0, 0, 0, needs_s), 0.0)
    leases.serve(LeaseRequest("s", 0, "0", 0, 0, 0, 0.002), 0.0)
    ((_, grant),) = leases.serve(LeaseRequest("s", 1, "0", 0, 1, 1, needs_s), 0.0)
    assert grant is not None
    assert bool(grant.ranges) is gets_it


def test_no_epoch_of_a_far_worker_and_a_slow_one_ends_in_waiting() -> None:
    """Who is near is through with the last units sooner, but so slow that it saves nothing: each could leave them to
    the other for ever."""
    random = Random(0)
    for _ in range(1000):
        pace = random.uniform(0.001, 0.02)
        paces, flush = [pace, pace * random.uniform(4.0, 12.0)], random.uniform(0.0, 0.3)
        run = Run(60, (60,), paces, flushes=[flush, 0.0])
        run.segment()  # all have met
        assert run.counts() == Counter(range(60)), (paces, flush)


def test_one_that_asks_ahead_does_not_wait() -> None:
    """The slow one is not to take what the other, who still trains, has not asked for yet."""
    leases = Leases(Epoch("0", 21, (21,)))
    leases.update_members({0, 1}, 0.0)
    leases.serve(LeaseRequest("s", 0, "0", 0, 0, 0, 0.1), 0.0)
    trained, now = 0, 0.0
    while now < 0.1:  # until the slow one is through with its step
        ((_, grant),) = leases.serve(LeaseRequest("s", 1, "0", 0, trained, trained, 0.01), now)
        assert grant is not None
        trained, now = grant.ranges[0][1] - 1, now + 0.01 * units(grant)
    now -= 0.01
    assert leases.serve(LeaseRequest("s", 0, "0", 0, 1, 1, 0.1, wait=True), now) == []
    answers = leases.serve(LeaseRequest("s", 1, "0", 0, trained - 1, 0, 0.01), now)
    assert [claim.worker for claim, _ in answers] == [1]


def test_nobody_waits_for_one_that_has_come_and_has_not_begun() -> None:
    """It may load its data for long. Another one, who pushes for 0.1 s, would leave it the rest of the epoch."""
    leases = Leases(Epoch("0", 2, (2,)), all_train=False)
    leases.update_members({1, 2}, 0.0)
    for trained in (0, 1):
        ((_, grant),) = leases.serve(
            LeaseRequest("s", 1, "0", 0, trained, trained, 0.01, flush=0.1, wait=trained > 0), 0.0
        )
        assert grant is not None
        assert grant.ranges == ((trained, trained + 1),)


def test_units_that_a_checkpoint_has_are_not_trained_again() -> None:
    run = Run(20, (10, 20), [1.0, 2.0], done=((0, 3), (5, 10), (12, 14)))
    run.segment()
    run.segment()
    assert run.counts() == Counter([3, 4, 10, 11, *range(14, 20)])


def test_progress_counts_what_has_probably_been_trained() -> None:
    leases = Leases(Epoch("0", 100, (100,)))
    leases.update_members([0, 1], 0.0)
    leases.serve(LeaseRequest("s", 0, "0", 0, 0, 0, 0.0), 0.0)
    leases.serve(LeaseRequest("s", 1, "0", 0, 0, 0, 0.0), 0.0)
    leases.serve(LeaseRequest("s", 0, "0", 0, 1, 0, 0.1), 0.1)  # granted two: 0.25 s of work
    ((_, grant),) = leases.serve(LeaseRequest("s", 1, "0", 0, 1, 0, 0.3), 0.3)
    assert grant.progress == pytest.approx(1 + 2 + 1)
    assert grant.ratio == pytest.approx(1 + 3)  # while this one trains a unit the other trains three


def test_workers_must_have_the_same_epoch_in_mind() -> None:
    leases = Leases(Epoch("3", 8, (4, 8), b"a"))
    with pytest.raises(ProtocolError, match=r"another order of samples for epoch 3.*data='split'"):
        check_epoch(leases.epoch, Epoch("3", 8, (4, 8), b"b"), 1)
    with pytest.raises(ProtocolError, match=r"Worker 1 counts 32 samples per optimizer step.*accumulate_grad_batches"):
        check_epoch(leases.epoch, Epoch("3", 8, (4, 8), b"a", step=32), 1)
    with pytest.raises(ProtocolError, match="Worker 1 has 9 units"):
        check_epoch(leases.epoch, Epoch("3", 9, (4, 9), b"a"), 1)


class Far:
    """A worker's connection to a coordinator that is some seconds away. Time passes here only, and while it trains."""

    restored = (0,)
    sender = ("s", 0)
    world_size = 2

    def __init__(self, leases: Leases, away_s: float) -> None:
        self.leases, self.away_s = leases, away_s
        self.now = self.idle_s = 0.0
        self.claims = 0
        self._under_way: list[tuple[float, Future[Any], LeaseGrant]] = []

    def ask(self, server: int, message: OpenEpoch) -> tuple[tuple[int, int], ...]:
        return self.leases.finished

    def post(self, server: int, message: LeaseRequest, timeout_s: float | None) -> Future[Any]:
        self.claims += 1
        ((_, grant),) = self.leases.serve(replace(message, opens=None), self.now)
        self._under_way.append((self.now + self.away_s, Future(), grant))
        return self._under_way[-1][1]

    def wait(self, future: Future[Any], seconds: float) -> bool:
        before = self.now
        while not future.done():
            self.pass_time(self._under_way[0][0] - self.now)
        self.idle_s += self.now - before
        return True

    def result(self, server: int, future: Future[Any]) -> LeaseGrant:
        self.wait(future, 0.0)
        grant: LeaseGrant = future.wait()
        return grant

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self._under_way and self._under_way[0][0] <= end:
            self.now, future, grant = self._under_way.pop(0)
            future.set_result(grant)
        self.now = end


def far_worker(epoch: Epoch, living: Sequence[int], away_s: float) -> tuple[DataLeases, Far]:
    """Worker 0, and its connection to a coordinator."""
    server = Leases(epoch)
    server.update_members(living, 0.0)
    far = Far(server, away_s)
    client = SimpleNamespace(connection=far, members=[Members()])
    return DataLeases(lambda: client, clock=lambda: far.now), far  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("away_s", [0.001, 0.1, 0.6])
def test_a_worker_asks_before_its_work_is_out_also_where_the_answer_takes_long(away_s: float) -> None:
    epoch = Epoch("0", 400, (400,))
    leases, far = far_worker(epoch, [0], away_s)
    leases.open(Plan(epoch, range(400), 1))
    trained: list[int] = []
    going = True
    while going:
        batch = leases.take()  # as a loader that is one batch ahead
        while batch is not None:
            following = leases.take()
            leases.begin_batch()
            far.pass_time(0.05)
            trained += batch
            leases.end_batch(len(trained))
            batch = following
        going = leases.more(len(trained)) or leases.wait(len(trained))
    assert trained == list(range(400))
    assert far.now == pytest.approx(400 * 0.05 + far.idle_s)
    assert far.idle_s <= 7 * away_s  # at the beginning it does not know that, and at the end nobody else has work


def test_a_worker_that_was_granted_its_last_asks_for_nothing_until_it_has_pushed_that() -> None:
    epoch = Epoch("0", 2, (2,))
    leases, far = far_worker(epoch, [0, 1], 0.1)
    leases.open(Plan(epoch, range(2), 1))
    far.leases.serve(LeaseRequest("s", 1, "0", 0, 0, 0, 0.1), 0.0)
    assert leases.take() == [1]
    assert leases.take() is None
    leases.begin_batch()
    leases.end_batch(1)
    assert not leases.more(0)
    assert far.claims == 1
    far.leases.update_members([0], far.now)
    assert leases.wait(1)  # what the other one held
    assert leases.take() == [0]
    assert far.claims == 2


def test_a_worker_asks_before_an_exchange_that_lasts_longer_than_its_work() -> None:
    epoch = Epoch("0", 400, (400,))
    leases, far = far_worker(epoch, [0], 0.01)
    leases.ask_ahead(10.0)  # before the first epoch
    assert far.claims == 0
    leases.open(Plan(epoch, range(400), 1))
    trained = 0

    def train() -> None:
        nonlocal trained
        leases.take()
        leases.begin_batch()
        far.pass_time(0.05)
        trained += 1
        leases.end_batch(trained)
        leases.more(trained)

    while trained < 3:
        train()
    claims, part = far.claims, leases.part
    assert part is not None
    held = sum(last - first for first, last in part.granted) - trained
    leases.ask_ahead(0.05 * held - 0.01)  # enough for that
    assert far.claims == claims
    leases.ask_ahead(2.0)
    leases.ask_ahead(0.0)  # it has
    assert far.claims == claims + 1
    far.pass_time(0.01)
    far.away_s = 2.0  # the exchange
    while far.now < 1.9:
        train()
    assert far.idle_s < 0.1
    assert trained > 30


def test_a_worker_knows_when_it_will_have_to_push_the_rest() -> None:
    epoch = Epoch("0", 100, (100,))
    leases, far = far_worker(epoch, [0, 1], 0.0)
    assert leases.left_s == math.inf  # nothing is known yet
    far.leases.serve(LeaseRequest("s", 1, "0", 0, 0, 0, 0.1), 0.0)
    leases.open(Plan(epoch, range(100), 1))
    for trained in (1, 2, 3):
        assert leases.more(trained - 1)
        leases.take()
        leases.begin_batch()
        far.pass_time(0.1)
        leases.end_batch(trained)
    leases.ask_ahead(0.4)  # half of it is a push
    assert leases.left_s == pytest.approx((100 - leases.progress) / 2 * 0.1 - 0.2)
    for seconds in (0.5, 30.0, 0.5):  # once a server was lost
        with leases.flushing():
            far.pass_time(seconds)
    leases.more(3)
    assert leases.left_s == pytest.approx((100 - leases.progress) / 2 * 0.1 - 0.5)
    assert leases.progress > 3


def test_a_step_that_has_begun_stays_whole_when_its_worker_is_told_that_it_was_away() -> None:
    """Else Lightning's steps, which come every so many batches, would no longer end with units."""
    epoch = Epoch("0", 12, (12,))
    server = Leases(epoch)
    server.update_members([0], 0.0)
    far = Far(server, 0.0)
    client = SimpleNamespace(connection=far, members=[Members()])
    leases = DataLeases(lambda: client)  # type: ignore[arg-type, return-value]
    leases.open(Plan(epoch, range(12), 1, accumulate=3))
    assert [leases.take() for _ in range(4)] == [[0], [1], [2], [3]]  # the fourth is the second step's first
    assert leases.end_batch(0)
    far.pass_time(0.0)  # what was asked ahead is answered
    server.forget(0, 0.0)
    leases.revoke()
    assert not leases.end_batch(0)  # in vain: others train these
    assert not leases.end_batch(0)
    assert not leases.end_batch(0)
    assert [leases.take() for _ in range(2)] == [[4], [5]]  # the rest of the second step, in vain too
    assert not leases.end_batch(0)
    assert not leases.end_batch(0)
    assert leases.trained == ("0", 0)
    assert [leases.take() for _ in range(3)] == [[0], [1], [2]]
    assert all(leases.end_batch(1) for _ in range(3))
    assert leases.trained == ("0", 3)


def test_the_order_of_an_epoch_changes_no_random_state_also_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(seed: int) -> None:
        raise AssertionError("a device was seeded, whose state nobody puts back")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", touched)
    before = torch.get_rng_state()
    orders = [in_common_order(RandomSampler(range(50)), seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_samplers_own_generator_begins_anew_in_every_epoch(wrapped: bool) -> None:
    """A worker that resumes or joins later has drawn less from it than the others."""

    def sampler(seed: int) -> Any:
        each = RandomSampler(range(50), generator=torch.Generator().manual_seed(seed))
        return BatchSampler(each, 5, drop_last=False) if wrapped else each

    old, new = sampler(7), sampler(7)
    first = [in_common_order(old, seed) for seed in (1, 2, 3)]
    assert in_common_order(new, 3) == first[2]
    assert first[0] != first[1] != first[2]
    assert in_common_order(sampler(8), 3) != first[2]
    assert list(new) == list(sampler(7))  # outside, it continues where it was
