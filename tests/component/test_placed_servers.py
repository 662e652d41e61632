"""Servers of a job on several nodes: the real decisions of the host and of the nodes, in a simulated network."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from lightning_asgd.core.foundation.errors import ConfigurationError, LaunchError
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.server.process import ServerSettings
from lightning_asgd.hosting import lent_servers
from lightning_asgd.hosting.placed_servers import (
    LEASE_S,
    NodeServers,
    PlacedServers,
    checked_node,
    lease_of,
    node_named,
)
from tests.component.test_lent_servers import STEP_S, Servers, Store


class NodeSupervisor(Servers):
    """Takes the place of the supervisor of a node's servers, or of those that replace them."""

    hot_standby = False

    def __init__(self, *args: Any, **about: Any) -> None:
        super().__init__(*args, **about)
        self.exits: list[int] = []

    @property
    def healthy(self) -> bool:
        return self.alive

    def report_exit(self, session: str, worker: int, reason: str) -> None:
        self.exits.append(worker)


class Overseer:
    """Takes the place of the supervisor of the host's own servers."""

    hot_standby = True
    settings = ServerSettings("eth0", "rpc", "job")

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous


class Hosts:
    """Takes the place of what is known of the workers' processes."""

    rank = 0

    @staticmethod
    def has_returned(rank: int) -> bool:
        return False

    @staticmethod
    def ended() -> dict[int, str]:
        return {1: "its process has ended"}


class Job:
    """The host, and nodes with servers; each reaches the host unless the test cuts it off, suspends or kills it."""

    def __init__(self, servers: int, machines: int) -> None:
        self.now, self.division = 100.0, (servers, machines)
        self.host = Rendezvous(Store())  # type: ignore[arg-type]
        self.overseer: Any = Overseer(self.host)
        self.placed = self.place()
        self.nodes = {node: self.node(node) for node in range(1, machines)}
        self.cut: set[int] = set()
        self.suspended: set[int] = set()
        self.killed: set[int] = set()

    def place(self) -> PlacedServers:
        hosts: Any = Hosts()
        placed = PlacedServers(self.overseer, *self.division, hosts)
        placed.announce()
        return placed

    def node(self, number: int) -> NodeServers:
        return NodeServers(number, Rendezvous(Store()), "eth0")  # type: ignore[arg-type]

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += STEP_S
            for number, node in self.nodes.items():
                if number not in self.suspended | self.killed:
                    if number not in self.cut:
                        node.ask(self.host, self.now)
                    node.step(self.now)
            self.placed.step(self.now)
            numbers = [n for each in Servers.started if each.serve(self.now) for n in range(each.first, each.end)]
            assert len(numbers) == len(set(numbers)), "no server runs twice"

    def kill(self, number: int) -> None:
        """A node's process is killed, and its servers with it."""
        self.killed.add(number)
        for each in Servers.started:
            each.alive &= each.rendezvous is not self.nodes[number].rendezvous

    @property
    def addresses(self) -> list[str]:
        return [self.host.peek_server(key).get("address", "") for key in self.placed.keys]

    def alive(self) -> list[NodeSupervisor]:
        return [each for each in Servers.started if each.serve(self.now)]  # type: ignore[misc]


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_servers, "Supervisor", NodeSupervisor)
    Servers.started = []


def addresses_of(*servers: Servers) -> list[str]:
    return [f"{id(each)}/{key}" for each in servers for key in each.keys(each.number)]


def test_each_node_starts_its_share_and_keeps_it() -> None:
    job = Job(7, 3)
    job.run(1.0)
    one, two = Servers.started
    assert ((one.first, one.number), (two.first, two.number)) == ((2, 2), (4, 3))
    assert not one.succeed
    assert not two.succeed
    assert job.addresses == addresses_of(one, two)
    job.run(3 * LEASE_S)
    assert job.alive() == [one, two]
    assert job.placed.serves(7, 3, job.now)
    assert not job.placed.serves(7, 2, job.now)


def test_a_server_that_its_node_has_replaced_is_found() -> None:
    job = Job(2, 2)
    job.run(1.0)
    (server,) = Servers.started
    server.rendezvous.put(server.keys(1)[0], {"address": "another"})
    job.run(1.0)
    assert job.addresses == ["another"]


def test_workers_learn_that_a_server_cannot_be_started() -> None:
    job = Job(2, 2)
    job.run(1.0)
    (server,) = Servers.started
    server.rendezvous.put(server.keys(1)[0], {"error": "Server 1 ended with exit code 1."})
    job.run(1.0)
    with pytest.raises(LaunchError, match="Server 1 ended with exit code 1"):
        _ = job.addresses


@pytest.mark.parametrize("fate", ["killed", "cut off", "suspended"])
def test_the_host_replaces_the_servers_of_a_lost_node_once_they_must_have_ended(fate: str) -> None:
    job = Job(4, 2)
    job.run(1.0)
    (placed,) = Servers.started
    if fate == "killed":
        job.kill(1)
    elif fate == "cut off":
        job.cut = {1}
    else:
        job.suspended = {1}
    job.run(LEASE_S)
    assert len(Servers.started) == 1
    job.run(3.0)
    _, other = Servers.started
    assert (other.first, other.number, other.succeed) == (2, 2, True)
    assert other.rendezvous is job.host
    assert job.alive() == [other]
    assert job.alive()[0].exits == [1], "it awaits no report of a worker that has ended"
    assert job.addresses == addresses_of(other)
    job.cut = job.suspended = set()
    job.run(3 * LEASE_S)
    assert job.alive() == [other], "the node does not start them again"
    assert not placed.alive
    assert job.placed.serves(4, 2, job.now)


def test_servers_that_their_node_has_ended_are_replaced_at_once() -> None:
    job = Job(2, 2)
    job.run(1.0)
    job.kill(1)
    job.nodes[1].say_ended(job.host)
    job.run(2.0)
    assert len(job.alive()) == 1
    assert job.addresses == addresses_of(*job.alive())


def test_nothing_is_replaced_between_two_fits_and_the_next_one_gets_others() -> None:
    job = Job(2, 2)
    job.run(1.0)
    job.overseer.hot_standby = False
    job.kill(1)
    job.killed, job.nodes[1] = set(), job.node(1)
    job.run(3 * LEASE_S)
    assert len(Servers.started) == 1
    assert not job.placed.serves(2, 2, job.now)
    job.overseer.hot_standby, job.placed = True, job.place()
    job.run(1.0)
    assert job.addresses == addresses_of(*job.alive())
    assert not job.alive()[0].succeed


def test_the_next_process_of_a_node_leaves_an_order_alone_that_was_carried_out() -> None:
    job = Job(2, 2)
    job.run(1.0)
    job.kill(1)
    job.killed, job.nodes[1] = set(), job.node(1)
    job.run(2 * LEASE_S)
    assert [each.rendezvous for each in job.alive()] == [job.host]


@pytest.mark.parametrize("how", ["withdrawn", "another host"])
def test_servers_end_at_once_when_the_host_needs_them_no_longer_or_is_another_one(how: str) -> None:
    job = Job(2, 2)
    job.run(1.0)
    if how == "withdrawn":
        job.placed.close()
    else:
        job.host = Rendezvous(Store())  # type: ignore[arg-type]
    job.run(2 * STEP_S)
    assert not job.alive()


@pytest.mark.parametrize("seed", range(30))
def test_no_server_runs_twice_whatever_happens_to_nodes(seed: int) -> None:
    chance, job = Random(seed), Job(6, 3)
    job.run(2 * STEP_S)
    for _ in range(12):
        job.cut = {node for node in job.nodes if chance.random() < 0.3}
        job.suspended = {node for node in job.nodes if chance.random() < 0.3}
        if chance.random() < 0.1:
            job.kill(chance.choice([*job.nodes]))
        job.run(chance.uniform(STEP_S, 2 * LEASE_S))
    job.cut = job.suspended = set()
    job.run(2 * LEASE_S)
    alive = sorted(job.alive(), key=lambda each: each.first)
    assert sorted(n for each in alive for n in range(each.first, each.end)) == [2, 3, 4, 5]
    assert job.addresses == addresses_of(*alive)


def test_an_error_names_the_node_whose_server_does_not_come() -> None:
    job = Job(3, 3)
    with (
        pytest.raises(LaunchError, match=r"Server 2 did not start within 0 s(?s:.)*Server 2 belongs to node 2, whose"),
        node_named(2, job.placed.keys[1]),
    ):
        job.host.server(2, job.placed.keys[1], 0.0)
    with (
        pytest.raises(LaunchError, match="Server 0 did not start") as raised,
        node_named(0, "server/0"),
    ):
        job.host.server(0, "server/0", 0.0)
    assert "belongs to node" not in str(raised.value)


def test_a_lease_is_as_long_as_a_worker_may_be_silent_and_workers_wait_for_longer() -> None:
    assert [lease_of(silence_s, 120.0) for silence_s in (2.0, 30, 300.0)] == [10.0, 30.0, 60.0]


def test_a_node_has_the_lease_of_the_order() -> None:
    job = Job(2, 2)
    hosts: Any = Hosts()
    job.placed = PlacedServers(job.overseer, 2, 2, hosts, 30.0)
    job.placed.announce()
    job.run(1.0)
    job.cut = {1}
    job.run(29.0)
    assert [each.succeed for each in job.alive()] == [False]
    job.run(3.0)
    assert [each.succeed for each in job.alive()] == [True]
    assert job.placed.serves(2, 2, job.now, 30.0)
    assert not job.placed.serves(2, 2, job.now)


def test_nodes_that_do_not_suit_are_refused() -> None:
    assert checked_node(2, 2, 3, lambda: 1) == 1
    assert checked_node(1, 2, 3, lambda: 1) == 0
    with pytest.raises(ConfigurationError, match="server_machines=3 was given in a job with num_nodes=2"):
        checked_node(3, 2, 0, lambda: 0)
    with pytest.raises(ConfigurationError, match=r"worker 0 is on node 1\. Expected it on node 0"):
        checked_node(2, 2, 0, lambda: 1)


def test_a_node_carries_out_a_new_order_while_servers_of_the_old_one_run() -> None:
    job = Job(2, 2)
    job.run(1.0)
    job.division = (4, 2)
    job.placed = job.place()
    job.run(2.0)
    (new,) = job.alive()
    assert (new.first, new.number) == (2, 2)
    assert job.addresses == addresses_of(new)


def test_if_one_node_was_lost_between_two_fits_the_others_carry_out_the_next_order() -> None:
    job = Job(3, 3)
    job.run(1.0)
    job.overseer.hot_standby = False
    job.cut = {2}
    job.run(LEASE_S + 2.0)
    assert not job.placed.serves(3, 3, job.now)
    job.cut = set()
    job.overseer.hot_standby = True
    job.placed = job.place()
    job.run(2.0)
    assert sorted(each.first for each in job.alive()) == [1, 2]
    assert all(job.addresses)


def test_workers_learn_that_a_node_can_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: NodeSupervisor) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(NodeSupervisor, "start", start)
    job = Job(2, 2)
    job.run(1.0)
    with pytest.raises(LaunchError, match="Node 1: a server's process cannot be started: Cannot allocate memory"):
        job.host.peek_server(job.placed.keys[0])
