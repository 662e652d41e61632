"""Servers that standby hosts lend to the present host: the real decisions of all hosts, in a simulated network."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.server.process import ServerSettings
from lightning_asgd.hosting import lent_servers
from lightning_asgd.hosting.host_entry import LEASE_S, HostEntry
from lightning_asgd.hosting.lent_servers import ServerBorrower, ServerLender, servers_of_machine

STEP_S = 0.2
LATE_S = 0.75  # as a server needs to notice that its lease is over


class Store:
    """Entries of one host's rendezvous."""

    address = ("h", 1)
    serves_torch = False

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        self.entries[key] = value

    def is_foreign(self, key: str) -> bool:
        return False

    def peek(self, key: str, kind: type) -> Any:
        found = self.entries.get(key)
        return found if isinstance(found, kind) else None


class Servers:
    """Takes a supervisor's place: its servers start at once."""

    started: list[Servers]

    def __init__(self, rendezvous: Rendezvous, settings: ServerSettings, *, first: int) -> None:
        self.rendezvous, self.first, self.number, self.succeed = rendezvous, first, 0, False
        self.alive, self.until = True, math.inf
        Servers.started.append(self)

    @property
    def end(self) -> int:
        return self.first + self.number

    def start(self) -> None:
        pass

    def add_servers(self, total: int, *, succeed: bool = False) -> None:
        self.number, self.succeed = total, succeed
        for key in self.keys(total):
            self.rendezvous.put(key, {"address": f"{id(self)}/{key}"})

    def keys(self, number: int) -> list[str]:
        return [f"server/{id(self)}/{self.first + i}" for i in range(number)]

    def check_servers(self) -> None:
        pass

    def extend_lease(self, until: float) -> None:
        assert self.alive
        self.until = until

    def serve(self, now: float) -> bool:
        """Whether they run: they end by themselves a moment after their lease."""
        return self.alive and now <= self.until + LATE_S

    def kill_servers(self) -> None:
        self.alive = False

    def close(self) -> None:
        self.alive = False


class World:
    """A host that serves, and hosts that stand by; each reaches the others unless the test cuts it off."""

    def __init__(self, servers: int, machines: int) -> None:
        self.now, self.hosts = 100.0, [f"h{number}:1" for number in range(1, machines)]
        self.places = {name: Rendezvous(Store()) for name in ("h0:1", *self.hosts)}  # type: ignore[arg-type]
        self.lenders = {name: ServerLender(self.places[name], ServerSettings(), name, LEASE_S) for name in self.hosts}
        self.entry = HostEntry("r", "zmq", servers, "", term=1, present="h0:1", ready=True)
        self.borrower = ServerBorrower(self.entry, self.places["h0:1"], ServerSettings(), machines)
        self.reached = dict.fromkeys(self.hosts, self.now)
        self.cut: set[str] = set()
        self.suspended: set[str] = set()
        self.announced = False

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += STEP_S
            near = [name for name in self.hosts if name not in self.cut | self.suspended]
            for name in near:
                self.lenders[name].renew(self.places["h0:1"], self.now)
                self.reached[name] = self.now
                self.borrower.read(name, self.places[name], self.now)
            if self.announced:
                self.borrower.step(self.now)
            else:
                for name, (key, order) in self.borrower.orders(near, 1, "h0:1", self.now).items():
                    self.places[name].put(key, order)
                self.announced = self.borrower.complete
            for name in (name for name in self.hosts if name not in self.suspended):
                self.lenders[name].step(self.now, replace(self.entry, address=name), self.reached[name])
            numbers = [number for each in Servers.started if each.serve(self.now) for number in self.numbers(each)]
            assert len(numbers) == len(set(numbers)), "no server runs twice"

    @staticmethod
    def numbers(servers: Servers) -> range:
        return range(servers.first, servers.first + servers.number)

    @property
    def addresses(self) -> list[str]:
        return [self.places["h0:1"].peek_server(key).get("address", "") for key in self.borrower.keys]


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_servers, "Supervisor", Servers)
    Servers.started = []


def test_servers_are_divided_among_machines() -> None:
    assert [list(servers_of_machine(5, 2, machine)) for machine in (0, 1)] == [[0, 1], [2, 3, 4]]
    assert [list(servers_of_machine(3, 1, 0))] == [[0, 1, 2]]


def test_each_host_lends_its_part_and_the_present_host_knows_their_addresses() -> None:
    world = World(5, 3)
    world.run(1.0)
    assert world.announced
    assert [list(world.numbers(each)) for each in Servers.started] == [[1, 2], [3, 4]]
    assert not any(each.succeed for each in Servers.started)
    assert world.addresses == [f"{id(each)}/{key}" for each in Servers.started for key in each.keys(2)]
    world.run(30.0)
    assert len(Servers.started) == 2


def test_a_server_that_was_replaced_at_its_lender_is_found() -> None:
    world = World(2, 2)
    world.run(1.0)
    (server,) = Servers.started
    world.places["h1:1"].put(server.keys(1)[0], {"address": "another"})
    world.run(1.0)
    assert world.addresses == ["another"]


def test_the_servers_of_a_lender_that_is_cut_off_end_before_others_take_their_place() -> None:
    world = World(4, 2)
    world.run(1.0)
    (lent,) = Servers.started
    world.cut = {"h1:1"}
    world.run(LEASE_S - 2 * STEP_S)
    assert lent.alive
    world.run(4 * STEP_S)
    assert not lent.alive
    assert len(Servers.started) == 1
    world.run(2.0)
    _, other = Servers.started
    assert (list(world.numbers(other)), other.succeed) == ([2, 3], True)
    assert world.addresses == [f"{id(other)}/{key}" for key in other.keys(2)]
    world.cut = set()
    world.run(10.0)
    assert len(Servers.started) == 2, "the order was given once"


def test_another_host_is_asked_if_one_is_lost_before_it_has_lent_any() -> None:
    world = World(2, 2)
    world.hosts.append("h2:1")
    world.places["h2:1"] = Rendezvous(Store())  # type: ignore[arg-type]
    world.lenders["h2:1"] = ServerLender(world.places["h2:1"], ServerSettings(), "h2:1", LEASE_S)
    world.reached["h2:1"] = world.now
    assert world.borrower.orders(["h1:1"], 1, "h0:1", world.now).keys() == {"h1:1"}
    world.cut = {"h1:1"}
    world.run(1.0)
    assert world.announced
    (server,) = Servers.started
    assert world.addresses == [f"{id(server)}/{server.keys(1)[0]}"]
    assert world.places["h2:1"] is server.rendezvous


def test_a_lender_ends_its_servers_when_another_host_serves() -> None:
    world = World(2, 2)
    world.run(1.0)
    (lent,) = Servers.started
    world.entry = replace(world.entry, term=2, present="h9:1")
    world.run(2 * STEP_S)
    assert not lent.alive


@pytest.mark.parametrize("seed", range(30))
def test_no_server_runs_twice_whatever_is_cut_off(seed: int) -> None:
    chance, world = Random(seed), World(6, 3)
    for _ in range(20):
        world.cut = {name for name in world.hosts if chance.random() < 0.4}
        world.suspended = {name for name in world.hosts if chance.random() < 0.2}
        world.run(chance.uniform(STEP_S, 2 * LEASE_S))
    world.cut = world.suspended = set()
    world.run(2 * LEASE_S)
    alive = [each for each in Servers.started if each.alive]
    assert sorted(number for each in alive for number in world.numbers(each)) == [2, 3, 4, 5]
    assert world.addresses == [f"{id(e)}/{key}" for e in sorted(alive, key=lambda e: e.first) for key in e.keys(2)]
