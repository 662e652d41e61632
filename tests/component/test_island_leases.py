"""An island's processes take granted batches by themselves, and see the epoch as the first one does."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_asgd.core.foundation.errors import ServerLostError
from lightning_asgd.core.leases.plan import Plan
from lightning_asgd.core.leases.table import Leases
from lightning_asgd.core.protocol import Epoch, LeaseRequest
from lightning_asgd.core.worker.session_client import Members
from lightning_asgd.islands.leases import IslandLeases, SharedLeases
from tests.component.test_leases import Far

FACTS = ("opened", "segment", "halted", "exhausted", "last", "reached", "dry", "closes", "counts", "progress", "share")


class Process:
    """One process's group. What the first one shares is recorded, and the other one reads it later."""

    def __init__(self, leads: bool, island: Island) -> None:
        self.leads, self.island, self.shared = leads, island, island.shared
        self.read = 0
        self.facts: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def report(self, name: str, fact: Callable[[], Any], learn: Callable[[Any], None]) -> None:
        self.facts[name] = fact, learn

    def share(self, call: Callable[[], Any]) -> Any:
        if self.leads:
            self.island.shares = True
            value = call()
            self.island.shares = False
            self.shared.append(pickle.dumps((value, {name: fact() for name, (fact, _) in self.facts.items()})))
            return value
        value, known = pickle.loads(self.shared[self.read])
        self.read += 1
        for name, fact in known.items():
            self.facts[name][1](fact)
        return value


class Program:
    """What every process runs, as Lightning's loop does, with a loader that may be some batches ahead.

    Events happen on the first process while all look at an exchange, by the number of batches before. They return the
    units whose updates are kept, if these are not all.
    """

    def __init__(self, island: Island, *, leads: bool) -> None:
        self.island, self.group = island, Process(leads, island)
        client = SimpleNamespace(connection=island.far, members=[Members()])
        self.own = SharedLeases(lambda: client, clock=lambda: island.far.now)  # type: ignore[arg-type, return-value]
        self.leases = IslandLeases(self.group, self.own, (0 if leads else 1, 2))  # type: ignore[arg-type]
        self.seen: list[Any] = []  # all that the process did and saw
        self.batches: list[list[int]] = []  # its part of those that count
        self.number = 0

    def look(self) -> None:
        self.seen.append([getattr(self.leases, name) for name in FACTS])

    def run(self) -> None:
        leases, island = self.leases, self.island
        leases.open(Plan(island.epoch, range(island.epoch.units), 2, island.accumulate))
        for _ in island.epoch.ends:
            more = True
            while more:
                self.train()
                more = leases.wait(self.number)
            self.look()
            leases.next_interval()
            self.look()

    def train(self) -> None:
        island, leases, loaded, more = self.island, self.leases, list[Any](), True
        while more:
            while len(loaded) <= island.ahead and (samples := leases.take()) is not None:
                loaded.append(samples)
            if not loaded:
                return
            if (event := island.events.get(self.number)) is not None:
                kept = self.group.share(lambda event=event: event(self))
                self.batches = [batch for batch in self.batches if kept is None or set(batch) <= kept]
            self.number += 1
            leases.begin_batch()
            self.look()
            if self.group.leads:
                island.far.pass_time(0.05)
            samples = loaded.pop(0)
            counts = leases.end_batch(self.number)
            self.seen.append((len(samples), counts))
            if counts:
                self.batches.append(samples)
            more = leases.more(self.number)
            self.look()


class Island:
    """Two processes and the coordinator, in virtual time; another worker holds some units."""

    def __init__(
        self,
        units: int,
        ends: tuple[int, ...],
        *,
        size: int = 2,
        accumulate: int = 1,
        ahead: int = 0,
        away_s: float = 0.0,
    ) -> None:
        self.epoch = Epoch("0", units, ends)
        self.accumulate, self.ahead = accumulate, ahead
        self.server = Leases(self.epoch)
        self.server.update_members([0], 0.0)
        self.far = Far(self.server, away_s)
        self.shared: list[bytes] = []
        self.shares = False  # whether the first process is in a call that is shared
        self.events: dict[int, Callable[[Program], Any]] = {}

    def fence(self, program: Program) -> set[int]:
        """The coordinator takes the island's units, which learns it with the answer of an exchange, and rejoins."""
        self.far.pass_time(self.far.away_s)  # an early request is answered
        self.server.forget(0, self.far.now)
        program.own.revoke()
        self.server.update_members([0], self.far.now)
        return {unit for first, last in self.server.finished for unit in range(first, last)}

    def train(self) -> tuple[Program, Program]:
        """Run the first process, and then the other one with what the first has shared."""
        first, other = (Program(self, leads=leads) for leads in (True, False))
        for each in (first, other):
            each.run()
        assert other.group.read == len(self.shared)
        assert other.seen == first.seen
        return first, other


def trained(*programs: Program) -> Counter[int]:
    return Counter(unit for program in programs for batch in program.batches for unit in batch)


@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_both_processes_see_the_same_epoch_and_train_all_of_it_with_few_decisions(ahead: int, accumulate: int) -> None:
    island = Island(960, (480, 960), accumulate=accumulate, ahead=ahead)
    first, other = island.train()
    assert trained(first, other) == Counter(range(960))
    assert len(first.batches) == 480
    assert len(island.shared) < 480 / 4  # ten steps of 50 ms are known ahead


def test_what_is_known_ahead_is_half_a_second_of_training_at_most() -> None:
    island = Island(400, (400,))
    lengths = []

    def note(program: Program) -> None:
        lengths.append(program.own.known()["_waiting"])  # type: ignore[index]

    island.events = dict.fromkeys(range(3, 150), note)
    island.train()
    assert 8 <= max(map(len, lengths)) <= 10


@pytest.mark.parametrize("seed", range(20))
def test_a_fenced_island_discards_the_same_batches_everywhere_and_every_sample_counts_once(seed: int) -> None:
    random = Random(seed)
    about = {"accumulate": random.choice([1, 1, 2, 3]), "ahead": random.choice([0, 1, 3])}
    island = Island(240, (120, 240), away_s=random.choice([0.0, 0.07]), **about)
    island.events = dict.fromkeys(random.sample(range(1, 100), 2), island.fence)
    first, other = island.train()
    assert trained(first, other) == Counter(range(240))
    assert not all(counts for _, counts in (what for what in first.seen if isinstance(what, tuple)))
    assert len(first.batches) == len(other.batches)


def test_units_that_another_worker_gives_back_are_trained_too() -> None:
    island = Island(40, (40,))
    island.server.update_members([0, 1], 0.0)
    ((_, grant),) = island.server.serve(LeaseRequest("s", 1, "0", 0, 0, 0, 0.05, size=2), 0.0)
    held = [unit for first, last in grant.ranges for unit in range(first, last)]
    assert held

    def leave(program: Program) -> None:
        island.server.update_members([0], island.far.now)

    island.events = {12: leave}
    first, other = island.train()
    assert trained(first, other) == Counter(range(40))


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "every time"])
def test_a_request_that_cannot_be_sent_fails_only_where_all_processes_learn_of_it(lasts: bool) -> None:
    island, failed = Island(240, (240,), away_s=0.2), list[bool]()
    post = island.far.post

    def fail(*message: Any) -> Any:
        if island.shares and not (lasts and failed):
            return post(*message)
        failed.append(island.shares)
        raise ServerLostError("Server 0 is lost")

    island.far.post = fail  # type: ignore[method-assign]
    if lasts:
        with pytest.raises(ServerLostError):
            island.train()
        assert failed[-1]
    else:
        assert trained(*island.train()) == Counter(range(240))
    assert not failed[0]
