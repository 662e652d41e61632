"""Which of several hosts serves an elastic run: real hosts and workers' finders, in a network that a script cuts."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.hosting.host_entry import LEASE_S, HostEntry
from lightning_asgd.hosting.run_finder import RunFinder
from lightning_asgd.hosting.run_host import Action, RunHost

STEP_S, BEAT_S, LOOK_S = 0.2, 1.0, 0.4


class Host:
    """A ``serve`` process: its decisions, what is in its rendezvous, and whether its servers serve."""

    def __init__(self, number: int, now: float, *, first: bool, joins: str = "", lease_s: float = LEASE_S) -> None:
        self.address = f"h{number}:1"
        hosts = (self.address,) if first else (joins,)
        about = int(first), self.address if first else "", hosts
        entry = HostEntry("r", "zmq", 1, self.address, *about, lease_s=lease_s)
        self.core = RunHost(entry, now)
        self.published, self.serves, self.alive = entry, first, True
        self.votes: dict[int, list[int]] = {}
        self.heard: dict[int, float] = {}
        self.left: set[int] = set()
        self.stop = 0

    @property
    def has_workers(self) -> bool:
        electors = self.published.workers
        return 2 * len(set(electors) & self.heard.keys()) > len(electors)


class World:
    """Hosts and workers on machines of their own; links between any two of them can be cut."""

    def __init__(self, hosts: int, workers: int, seed: int = 0, lease_s: float = LEASE_S) -> None:
        self.now, self.chance = 0.0, random.Random(seed)
        parts = (each * lease_s / LEASE_S for each in (STEP_S, BEAT_S, LOOK_S))
        self.step_s, self.beat_s, self.look_s = parts
        self.hosts = [Host(n, 0.0, first=n == 0, joins="h0:1", lease_s=lease_s) for n in range(hosts)]
        self.cuts: set[frozenset[str]] = set()
        self.served: list[list[str]] = []
        self.workers: dict[int, RunFinder] = {}
        self.beats: dict[int, float] = {}
        self.looks: dict[int, float] = {}
        self.searching: set[int] = set()  # workers that look for a host until they have found one
        for number in range(1, workers + 1):
            self.attach(number)
        self.run(3.0)

    def attach(self, number: int, *given: str) -> RunFinder:
        name = f"w{number}"
        ways = [(address.split(":")[0], 1) for address in given or (self.hosts[0].address,)]

        def ask(host: str, port: int, lease_s: float) -> HostEntry | bool | None:
            there = self.at(host)
            if self.is_cut(name, there.address):
                return None
            return there.published if there.alive else False

        def cast(way: tuple[str, int], worker: int, vote: list[int], lease_s: float) -> bool:
            there = self.at(way[0])
            arrives = there.alive and not self.is_cut(name, there.address)
            if arrives:
                there.votes[worker] = vote
            return arrives

        finder = self.workers[number] = RunFinder(ways, ask=ask, cast=cast, clock=lambda: self.now)
        assert finder.look() is not None
        finder.worker, self.beats[number], self.looks[number] = number, 0.0, -1.0
        return finder

    def at(self, host: str) -> Host:
        return next(each for each in self.hosts if each.address.split(":")[0] == host)

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.cuts

    def cut(self, side: Iterable[str]) -> None:
        """Cut all links between one side and the rest."""
        side = set(side)
        all_names = {each.address for each in self.hosts} | {f"w{number}" for number in self.workers}
        self.cuts |= {frozenset((a, b)) for a in side for b in all_names - side}

    def kill(self, host: int) -> None:
        self.hosts[host].alive = self.hosts[host].serves = False

    @property
    def serving(self) -> list[str]:
        return [host.address for host in self.hosts if host.serves]

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            for host in self.chance.sample(self.hosts, len(self.hosts)):
                if host.alive:
                    self._step(host)
            for number, finder in self.workers.items():
                self._work(number, finder)
            self.served.append([h.address for h in self.hosts if h.serves and h.has_workers])
            self.now += self.step_s

    def _step(self, host: Host) -> None:
        for other in self.hosts:
            if other is host:
                continue
            reached = not self.is_cut(host.address, other.address)
            joins = not host.core.entry.serves and host.address not in other.published.hosts
            if reached and other.alive and joins:
                other.core.add(host.address)
            entry = other.published if reached and other.alive else None
            host.core.see(other.address, entry, self.now, ended=reached and not other.alive)
        for worker, (term, number) in host.votes.items():
            host.core.note_vote(worker, term, number, self.now)
        if not host.core.entry.serves and not host.core.entry.ready:
            host.core.be_ready()
        action = host.core.step(self.now, host.heard, left=host.left, stop=host.stop)
        if action is Action.SERVE:
            host.serves, host.heard = True, {}
        elif action is Action.STOP:
            host.serves, host.heard = False, {}
        elif action is Action.ASK_TO_STOP and not self.is_cut(host.address, host.core.rival):
            rival = self.at(host.core.rival.split(":")[0])
            rival.stop = host.core.rival_term
            rival.core.add(host.address)
        host.published = host.core.entry

    def _work(self, number: int, finder: RunFinder) -> None:
        mine = self.at(finder._present.split(":")[0])
        reached = not self.is_cut(f"w{number}", mine.address) and mine.serves
        if reached and mine.core.entry.term == finder.term and number not in self.searching:
            if self.now >= self.beats[number] + self.beat_s:
                self.beats[number] = self.now
                mine.heard[number] = self.now
        elif self.now >= max(self.beats[number] + self.beat_s, self.looks[number] + self.look_s):
            self.looks[number] = self.now
            (self.searching.add if finder.look() is None else self.searching.discard)(number)

    def twice_s(self) -> float:
        """For how long more than one host has served, and had the workers without whose reports servers do nothing."""
        return self.step_s * sum(len(serving) > 1 for serving in self.served)


def test_the_first_host_serves_and_all_know_it() -> None:
    world = World(3, 4)
    assert world.serving == ["h0:1"]
    for host in world.hosts:
        assert host.published.present == "h0:1"
        assert set(host.published.hosts) == {"h0:1", "h1:1", "h2:1"}
        assert host.published.workers == (1, 2, 3, 4)
    assert all(finder.several for finder in world.workers.values()) is False, "they learn of the others when they look"


def test_when_the_present_hosts_process_ends_the_next_one_serves_within_a_second_of_the_votes() -> None:
    world = World(3, 4)
    for finder in world.workers.values():
        finder.look()
    world.kill(0)
    world.run(BEAT_S + 1.0)
    assert world.serving == ["h1:1"]
    assert {finder.term for finder in world.workers.values()} == {2}
    world.kill(1)
    world.run(BEAT_S + 1.0)
    assert world.serving == ["h2:1"]
    assert {host.published.term for host in world.hosts if host.alive} == {3}


def test_a_host_whose_machine_vanishes_is_replaced_once_its_lease_is_over() -> None:
    world = World(2, 3)
    for finder in world.workers.values():
        finder.look()
    world.cut(["h0:1"])
    world.run(LEASE_S + 2 * STEP_S)
    assert world.serving == [], "without standby hosts and workers the first one has killed its servers"
    world.run(3.0)
    assert world.serving == ["h1:1"]
    assert world.twice_s() == 0


def test_with_a_lease_of_a_second_256_workers_have_another_host_within_three() -> None:
    world = World(3, 256, lease_s=1.0)
    for finder in world.workers.values():
        finder.look()
    assert {finder.lease_s for finder in world.workers.values()} == {1.0}
    world.cut(["h0:1"])
    world.run(3.0)
    assert world.serving == ["h1:1"]
    assert {finder.term for finder in world.workers.values()} == {2}
    assert world.twice_s() == 0


def test_a_host_that_returns_with_another_lease_takes_over_that_of_the_run() -> None:
    world = World(2, 3)
    for finder in world.workers.values():
        finder.look()
    world.kill(0)
    world.run(BEAT_S + 2.0)
    world.hosts[0] = Host(0, world.now, first=True, lease_s=1.0)  # started as if there was no run
    world.run(6.0)
    assert world.serving == ["h1:1"]
    assert {host.core.entry.lease_s for host in world.hosts} == {LEASE_S}


def test_a_host_that_has_not_seen_the_present_one_for_a_minute_cannot_take_over_until_it_sees_it_again() -> None:
    world = World(2, 3)
    standby = world.hosts[1].core
    assert standby.may_take_over
    world.cuts = {frozenset(("h0:1", "h1:1"))}
    world.run(30.0)
    assert standby.may_take_over
    world.run(32.0)
    assert not standby.may_take_over
    assert round(standby.silent_s) == 62
    world.cuts.clear()
    world.run(3.0)
    assert standby.may_take_over
    assert world.serving == ["h0:1"]


def test_the_side_of_a_split_with_most_workers_serves_and_the_other_does_not() -> None:
    for with_first, survivor in ((1, "h1:1"), (3, "h0:1")):
        world = World(2, 4)
        for finder in world.workers.values():
            finder.look()
        world.cut(["h0:1", *(f"w{number}" for number in range(1, with_first + 1))])
        world.run(10.0)
        assert world.serving == [survivor]
        assert world.twice_s() == 0
        world.cuts.clear()
        world.run(10.0)
        assert world.serving == [survivor]
        assert {finder.term for finder in world.workers.values()} == {2 if with_first == 1 else 1}


def test_half_of_the_workers_elect_no_host() -> None:
    world = World(2, 4)
    for finder in world.workers.values():
        finder.look()
    world.cut(["h0:1", "w1", "w2"])
    world.run(10.0)
    assert world.serving == []
    world.cuts.clear()
    world.run(10.0)
    assert len(world.serving) == 1


def test_workers_that_only_they_cannot_reach_the_host_have_it_asked_to_stop() -> None:
    world = World(2, 4)
    for finder in world.workers.values():
        finder.look()
    world.cuts |= {frozenset(("h0:1", f"w{number}")) for number in (1, 2, 3)}
    world.run(BEAT_S + 3.0)
    assert world.serving == ["h1:1"]
    assert world.twice_s() == 0


def test_a_standby_host_that_is_lost_is_not_needed() -> None:
    world = World(3, 3)
    world.cut(["h2:1"])
    world.run(30.0)
    assert world.serving == ["h0:1"]
    assert "h2:1" not in world.hosts[0].published.hosts
    world.run(60.0)
    world.workers.clear()
    world.hosts[0].heard = {}
    world.run(10.0)
    assert world.serving == ["h0:1"], "it is forgotten: it may not take over any more"


def test_workers_that_leave_while_a_standby_host_is_lost_end_no_lease() -> None:
    world = World(2, 2)
    world.cut(["h1:1"])
    world.run(10.0)
    world.workers.clear()
    world.hosts[0].heard, world.hosts[0].left = {}, {1, 2}
    world.run(30.0)
    assert world.serving == ["h0:1"], "they elect no host, so none can have taken over"


def test_a_worker_withdraws_its_vote_before_it_uses_the_host_again() -> None:
    world = World(2, 3)
    for finder in world.workers.values():
        finder.look()
    world.cuts |= {frozenset(("h0:1", f"w{number}")) for number in (1, 2, 3)} | {frozenset(("h0:1", "h1:1"))}
    world.run(BEAT_S + 2 * LOOK_S)
    assert world.hosts[1].votes
    world.cuts -= {frozenset(("h0:1", f"w{number}")) for number in (1, 2, 3)}
    world.run(15.0)
    assert world.serving == ["h0:1"]
    assert {term for term, _ in world.hosts[1].votes.values()} == {0}


def test_a_host_that_stops_hands_over_only_where_workers_can_elect_another_one() -> None:
    world = World(2, 1)
    assert world.hosts[0].core.successor == "h1:1"
    world.kill(1)
    world.run(1.0)
    assert world.hosts[0].core.successor == ""
    world = World(2, 1)
    world.workers.clear()
    world.hosts[0].heard, world.hosts[0].left = {}, {1}
    world.run(2.0)
    assert world.hosts[0].core.successor == ""


def test_a_host_that_knows_no_run_never_serves() -> None:
    world = World(1, 3)
    fresh = Host(1, world.now, first=False, joins="h0:1")
    world.hosts.append(fresh)
    world.cut(["h1:1"])
    for number in world.workers:
        fresh.votes[number] = [1, 1]
    world.kill(0)
    world.run(5.0)
    for number in world.workers:
        fresh.votes[number] = [1, 2]
    world.run(5.0)
    assert world.serving == []


def test_a_first_host_that_is_started_again_is_asked_to_stop() -> None:
    world = World(2, 3)
    for finder in world.workers.values():
        finder.look()
    world.kill(0)
    world.run(3.0)
    assert world.serving == ["h1:1"]
    world.hosts[0] = Host(0, world.now, first=True)
    joiner = world.attach(4, "h0:1", "h1:1")
    assert joiner.term == 2, "the host of the highest term"
    world.run(3.0)
    assert world.serving == ["h1:1"]
    assert world.hosts[0].published.present == "h1:1"


def test_a_joining_worker_finds_the_host_by_any_other_and_says_what_is_wrong_if_there_is_none() -> None:
    world = World(2, 3)
    for finder in world.workers.values():
        finder.look()
    world.kill(0)
    world.run(3.0)
    assert world.attach(9, "h0:1", "h1:1").find(0.0) == ("h1", 1)
    world.kill(1)
    lonely = RunFinder([("h0", 1), ("h1", 1)], ask=lambda *way: None, clock=lambda: world.now)
    with pytest.raises(LaunchError, match=r"None of the hosts h0:1, h1:1 serves the run\. Expected one of them"):
        lonely.locate(-1.0)


def test_a_host_with_another_secret_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    world, refusal = World(2, 3), LaunchError("it has another secret")
    ask = world.attach(9, "h0:1", "h1:1")._ask

    def asks(host: str, *way: Any) -> Any:
        return refusal if host == "h1" else ask(host, *way)

    finder = RunFinder([("h0", 1), ("h1", 1)], ask=asks, clock=lambda: world.now)
    assert finder.find(0.0) == finder.find(0.0) == ("h0", 1)
    assert caplog.messages == ["This worker cannot use the host h1:1 of its run: it has another secret"]
    world.kill(0)
    with pytest.raises(LaunchError, match="it has another secret"):
        finder.find(0.0)


@pytest.mark.parametrize("seed", range(10))
def test_two_hosts_do_not_serve_in_any_order_of_faults(seed: int) -> None:
    world = World(3, 5, seed)
    for finder in world.workers.values():
        finder.look()
    names = [each.address for each in world.hosts] + [f"w{number}" for number in world.workers]
    for _ in range(8):
        match world.chance.choice(("cut", "cut", "heal", "kill")):
            case "cut":
                world.cut(world.chance.sample(names, world.chance.randint(1, 4)))
            case "heal":
                world.cuts.clear()
            case "kill" if sum(host.alive for host in world.hosts) > 1:
                world.kill(world.chance.choice([n for n, host in enumerate(world.hosts) if host.alive]))
        world.run(world.chance.uniform(0.2, 12.0))
        assert world.twice_s() == 0, "even a network that is there again finds one host at most"
    world.cuts.clear()
    world.run(30.0)
    assert len(world.serving) <= 1
