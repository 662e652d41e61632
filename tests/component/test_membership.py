"""Workers that sleep, are away and come back, servers that are lost: nothing is applied twice, nothing is lost.

Real services, clients, exchangers and leases, over a wire on which messages wait until it is their turn. Training unit
u adds 1 to weight u on one server and to weight u on the other, so at the end every weight must be exactly 1.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.futures import Future

from lightning_asgd import Advanced
from lightning_asgd.algorithms import ASGD, Algorithm, Downpour
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.calls import shared_memory
from lightning_asgd.core.calls.shared_memory import SharedBlock
from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.foundation.errors import WorkerLostError
from lightning_asgd.core.foundation.layout import build_layout
from lightning_asgd.core.leases import client as leases_module
from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.leases.plan import Plan
from lightning_asgd.core.protocol import Epoch, Heartbeat, HeartbeatReply, Leave, Policy, SyncReport
from lightning_asgd.core.server.service import Service
from lightning_asgd.core.worker import connection as connection_module
from lightning_asgd.core.worker import session_client as session_module
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.core.worker.exchanger import Exchanger
from lightning_asgd.core.worker.replica import Replica
from lightning_asgd.core.worker.replica_kinds import replica_for
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.shard_client import ShardClient
from lightning_asgd.core.worker.sync_point import synchronize
from lightning_asgd.core.worker.synchronizer import Training, run
from lightning_asgd.recovery import exchange_recovery as recovery_module
from lightning_asgd.recovery.failover_client import FailoverClient
from tests.helpers.turns import Turns

PATIENCE_S = 3.0
UNITS, ENDS = 18, (7, 18)


class Wire:
    """Messages on their way: in order on each connection, in any order between them."""

    def __init__(self, services: list[Service]) -> None:
        self.services = services
        self.queues: dict[tuple[int, int, bool], deque[tuple[Any, Future[Any]]]] = {}
        self.unanswered: list[dict[Future[Any], None]] = [{} for _ in services]  # in the order in which they were sent

    @property
    def busy(self) -> list[tuple[int, int, bool]]:
        return sorted(key for key, queue in self.queues.items() if queue)

    def deliver(self, key: tuple[int, int, bool]) -> None:
        message, future = self.queues[key].popleft()
        waiting = self.unanswered[key[1]]
        answer = self.services[key[1]].handle(message)

        def give(value: Any) -> None:
            if future in waiting:
                del waiting[future]
                future.set_result(value)

        if isinstance(answer, Future):
            answer.add_done_callback(lambda done: give(done.value()))
        else:
            give(answer)

    def kill(self, server: int, successor: Service, handles: Callable[[], bool]) -> None:
        """Let another service take a server's place. What was on its way there is lost, and so are its answers.

        Args:
            server: which one.
            successor: the other service.
            handles: whether the server still does what a message asks for, the answer to which is lost.
        """
        for key in [key for key in self.queues if key[1] == server]:
            for message, _ in self.queues.pop(key):
                if not handles():
                    break
                self.services[server].handle(message)
        self.services[server] = successor
        lost, self.unanswered[server] = self.unanswered[server], {}
        for future in lost:
            future.set_exception(RuntimeError("eof"))


class End(Transport):
    """A worker's end of the wire."""

    def __init__(self, wire: Wire, worker: int) -> None:
        self._wire, self._worker = wire, worker
        self._connected = list(wire.services)

    def prepare(self, server: int, address: str) -> None:
        pass

    def replace(self, server: int) -> None:
        self._connected[server] = self._wire.services[server]

    @property
    def num_servers(self) -> int:
        return len(self._wire.services)

    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        future: Future[Any] = Future()
        if self._connected[server] is not self._wire.services[server]:
            future.set_exception(RuntimeError("broken pipe"))
            return future
        key = (self._worker, server, getattr(message, "urgent", False))
        self._wire.queues.setdefault(key, deque()).append((copy.deepcopy(message), future))
        self._wire.unanswered[server][future] = None
        return future

    def close(self) -> None:
        pass


class World:
    """Servers and workers whose order of events is a seed's.

    Args:
        seed: the same one makes the same world.
        workers: number of them.
        sleeps: whether they fall asleep now and then, for up to 12 s.
        dies: whether the last one never wakes from it.
        kills: servers that are lost, per second and server.
        servers: number of them.
        epochs: number of them.
    """

    algorithm: Algorithm = ASGD("sum")

    def __init__(
        self,
        seed: int,
        workers: int,
        *,
        sleeps: bool,
        dies: bool = False,
        kills: float = 0.0,
        servers: int = 2,
        epochs: int = 1,
    ) -> None:
        self.now = 0.0
        self.epochs = epochs
        self.kills = kills  # of servers, per second
        self.killed = 0
        self.sleeps = sleeps
        self.dies = dies
        self.clock = partial(next, itertools.count(0.0, 0.001))  # or a seed's order would depend on the machine
        self.asleep_until = [0.0] * workers
        self.ended = [False] * workers
        self.clients: dict[int, SessionClient] = {}  # that give signs of life
        self.services = [self.serve() for _ in range(servers)]
        self.wire = Wire(self.services)
        self.turns = Turns(seed, self.asleep)
        self.config = ExchangeConfig.create(
            nsync=self.turns.random.randint(1, 3),
            algorithm=self.algorithm,
            advanced=Advanced(overlap=self.turns.random.random() < 0.5),
        )
        self.weights = [torch.zeros(2 * UNITS) for _ in range(workers)]
        self.shares = self.turns.random.random() < 0.5 and shared_memory.create([]) is not None
        self.replicas: list[Replica] = []
        self.came_back = 0
        self.lost: dict[int, str] = {}  # why
        # By epoch and segment, the weights that workers had at its end.
        self.fetched: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.layout = build_layout([("w", self.weights[0])], len(self.services))
        self.joined = 0
        self.ready = 0
        for rank in range(workers):
            self.turns.add(str(rank), lambda rank=rank: self.live_or_be_lost(rank))  # type: ignore[misc]
        self.turns.add("network", self.network)
        self.turns.add("time", self.time)

    def serve(self, *, succeeds: bool = False) -> Service:
        return Service(lambda: self.now)

    def beat(self, rank: int, service: Service) -> None:
        client = self.clients.get(rank)
        if client is not None:
            answer = service.handle(Heartbeat("s", client.connection.worker))
            if service is self.services[0] and isinstance(answer, HeartbeatReply):
                client.note_heartbeat(answer)

    @property
    def over(self) -> bool:
        return all(self.ended) and all(map(holds_weights, self.services))

    @property
    def begun(self) -> bool:
        """Whether servers may be lost."""
        return self.ready == len(self.ended)

    def asleep(self, name: str) -> bool:
        return name.isdigit() and self.now < self.asleep_until[int(name)]

    def run(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for module in (connection_module, session_module, recovery_module, leases_module):
                patch.setattr(module, "done_within", self.turns.done_within)
            try:
                self.turns.run(lambda: self.over)
                self.weights_at_the_end = server_weights(self)
            finally:
                for replica in self.replicas:
                    replica.close()
                for service in self.services:
                    service.close()

    # ------------------------------------------------------------------ what takes turns

    def network(self) -> None:
        while True:
            self.turns.wait_until(lambda: bool(self.wire.busy))
            self.wire.deliver(self.turns.random.choice(self.wire.busy))

    def time(self) -> None:
        workers = range(len(self.ended))
        while True:
            self.now += 1.0
            for rank in workers:
                if not self.asleep(str(rank)):
                    for service in self.services:
                        self.beat(rank, service)
            for service in self.services:
                service.tick()
            if self.sleeps and self.turns.random.random() < 0.1:
                rank = self.turns.random.choice(workers)
                self.asleep_until[rank] = self.now + self.turns.random.uniform(1.0, 12.0)
                if self.dies and rank == len(workers) - 1 and self.joined == len(workers):  # it never wakes
                    self.asleep_until[rank] = float("inf")
                    self.ended[rank] = True
            begun = self.begun
            for server in range(len(self.services)):
                if begun and self.turns.random.random() < self.kills:
                    self.killed += 1
                    successor = self.serve(succeeds=True)
                    for rank, reason in self.lost.items():
                        successor.report_exit("s", rank, reason)
                    self.wire.kill(server, successor, lambda: self.turns.random.random() < 0.5)
            self.turns.wait_until(lambda: self.turns.random.random() < 0.2)  # training is faster than time-outs

    def live_or_be_lost(self, rank: int) -> None:
        try:
            self.live(rank)
        except WorkerLostError as error:  # what it missed was lost with a server
            if type(error) is not WorkerLostError or not (self.kills and self.sleeps):
                raise
            self.lost[rank] = str(error)
            for service in self.services:
                service.handle(Leave("s", rank, str(error)))
            self.ended[rank] = True

    def replica(self, weight: torch.Tensor, blocks: Sequence[SharedBlock | None]) -> Replica:
        weight.grad = torch.zeros_like(weight)
        made = replica_for(self.algorithm, self.layout, [([weight], 0)], blocks, remembers=True)
        self.replicas.append(made)
        return made

    def live(self, rank: int) -> None:
        """What the strategy does with a worker."""
        workers, weight = len(self.weights), self.weights[rank]
        end = End(self.wire, rank)
        connection = Connection(end, "s", rank, workers)
        client = self.clients[rank] = SessionClient(connection, policy=Policy(silence_s=PATIENCE_S))
        collectives = Collectives(client)
        shards = [self.layout.shard(s) for s in range(len(self.services))]
        blocks = [shared_memory.create(shard) if self.shares else None for shard in shards]
        replica = self.replica(weight, blocks)
        leases = DataLeases(lambda: client, rejoin=lambda: self.come_back(exchanger), clock=self.clock)
        shard_client = ShardClient(client)
        training = Training(data=leases)
        exchanger = Exchanger(self.layout, [(shard_client, replica)], self.config, training, clock=self.clock)
        client.join()
        if rank > 0:
            self.turns.wait_until(lambda: self.joined > 0)
        first = replica.weights() if rank == 0 else None
        refs = [None if block is None else block.ref for block in blocks]
        assert shard_client.initialise(self.layout, self.config.algorithm, refs, first) == [self.shares] * len(refs)
        self.joined += 1
        collectives.barrier("servers have the weights")
        run(exchanger.fetch())
        FailoverClient(client, collectives, exchanger, lambda: leases.part, lambda server: "", lambda run: run())
        self.ready += 1
        run(exchanger.begin())
        for epoch in range(self.epochs):
            leases.open(Plan(Epoch(f"s/{epoch}", UNITS, ENDS), range(UNITS), 1))
            for segment in ENDS:
                self.train_segment(rank, leases, exchanger)
                mine = SyncReport(exchanger.moved, False, False, [])
                synchronize(client, collectives, exchanger, "segment", mine, all_have_pushed=True, always=True)
                self.fetched.setdefault((epoch, segment), []).append(weight.clone())
                run(exchanger.begin())
                leases.next_interval()
        self.ended[rank] = True
        while True:  # others may not have been answered, and what they miss was lost with a server
            self.turns.wait_until(lambda: True)
            client.connection.attend()

    def train_segment(self, rank: int, leases: DataLeases, exchanger: Exchanger) -> None:
        """Train until all of a segment is, and is pushed: what the strategy does with batches."""
        stats, going = exchanger.stats, True
        while going:
            batch = leases.take()  # as a loader that is one batch ahead
            while batch is not None:
                following = leases.take()
                self.turns.wait_until(lambda: True)
                self.before_batch(rank)
                run(exchanger.advance())
                leases.begin_batch()
                assert 0 < len(batch) <= leases.plan.step
                learn(self.weights[rank], batch)
                exchanger.count_step()
                self.turns.wait_until(lambda: True)
                if not leases.end_batch(stats.steps):
                    run(exchanger.fetch())
                batch = following
            going = leases.more(stats.steps - exchanger.unacknowledged)
            if not going:
                run(exchanger.flush())
                going = leases.wait(stats.steps - exchanger.unacknowledged)
                if going:
                    run(exchanger.begin())
        run(exchanger.flush())

    def before_batch(self, rank: int) -> None:
        """What else happens to a worker."""

    def come_back(self, exchanger: Exchanger) -> None:
        self.came_back += 1
        run(exchanger.come_back())


def learn(weight: torch.Tensor, batch: list[int]) -> None:
    """Count a unit that is trained, on either server."""
    step = torch.zeros_like(weight)
    step[[*batch, *(UNITS + unit for unit in batch)]] = 1.0
    weight.add_(step)
    weight.grad.copy_(-step)  # type: ignore[union-attr]


def holds_weights(service: Service) -> bool:
    session = service.session
    return session is not None and 0 in session.shards and session.shards[0].initialised


def server_weights(world: World) -> torch.Tensor:
    parts = [service.session.shards[0].weights for service in world.services]
    return torch.cat([weights[0] for weights in parts if weights])


@pytest.mark.parametrize("seed", range(5))
def test_without_sleep_every_unit_is_applied_once(seed: int) -> None:
    world = World(seed, 3, sleeps=False)
    world.run()
    assert torch.equal(world.weights_at_the_end, torch.ones(2 * UNITS))
    assert world.came_back == 0


class Gradients(World):
    algorithm = Downpour("sgd", lr=1.0, scale="sum")


@pytest.mark.parametrize(("kind", "epochs"), [(World, 1), (Gradients, 1), (World, 3)])
@pytest.mark.parametrize("sleeps", [False, True])
def test_whatever_servers_are_lost_every_unit_is_applied_once(sleeps: bool, kind: type[World], epochs: int) -> None:
    """With two servers a worker that is away may have left half a push: one server is lost, the other is not.

    And if one sleeps just when a server is lost that it alone can tell of its latest push, others train those data
    again, unless they are past the segment: that does not happen for these seeds.
    """
    killed = lost = 0
    for seed in range(30):
        world = kind(seed, 3, sleeps=sleeps, kills=0.04, servers=1 if sleeps else 2, epochs=epochs)
        world.run()
        assert torch.equal(world.weights_at_the_end, torch.full((2 * UNITS,), float(epochs))), seed
        for weights in world.fetched.values() if not sleeps else ():
            assert all(torch.equal(w, weights[0]) for w in weights), seed
        killed += world.killed
        lost += bool(world.lost)
    assert killed > 10
    assert lost == 0  # what a worker has missed that slept is not lost with a server


@pytest.mark.parametrize("dies", [False, True])
def test_whoever_sleeps_every_unit_is_applied_once(dies: bool) -> None:
    came_back = 0
    for seed in range(30):
        world = World(seed, 3, sleeps=True, dies=dies)
        world.run()
        assert torch.equal(world.weights_at_the_end, torch.ones(2 * UNITS)), seed
        came_back += world.came_back
    assert came_back > 10
