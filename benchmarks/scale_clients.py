"""Clients of :mod:`scale_sockets`: workers' own code up to the training, several in each forked process.

A client has a worker's transport, membership, leases, shards and collectives. It trains nothing: a step of 2 s is a
leap of the clock that its leases are given, so that it is granted as much at a time as a worker with such steps.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch
from scale_job import BATCH, KINDS, NSYNC, STEP_S

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.foundation.layout import build_layout
from lightning_asgd.core.job import registry
from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.leases.plan import Plan
from lightning_asgd.core.protocol import DisconnectWatch, Epoch, Exchange, Policy, SyncReport
from lightning_asgd.core.server.process import allow_many_connections
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.shard_client import ShardClient

__all__ = ["Place", "live"]

SESSION, SERVERS = "scale", 2
POLICY = Policy(silence_s=3600.0, another_chief=True)  # nobody is missed while others are measured
ENOUGH = 1 << 40  # units of an epoch


@dataclass(frozen=True)
class Place:
    """Where clients take part.

    Attributes:
        transport: its name.
        addresses: of the servers.
        workers: number of clients of the session, in all processes.
        scalars: of a shard.
    """

    transport: str
    addresses: tuple[str, ...]
    workers: int
    scalars: int


class Client:
    """One worker."""

    def __init__(self, place: Place, rank: int) -> None:
        self.place, self.rank = place, rank
        self.now = 0.0  # on the clock of its leases
        self.transport = registry.kind_of(place.transport).connect(place.addresses, "lo")
        self.sent: Counter[str] = Counter()
        self.connection = Connection(self.transport, SESSION, rank, place.workers)
        self.session = SessionClient(self.connection, policy=POLICY)
        self.shards = ShardClient(self.session)
        self.collectives = Collectives(self.session)
        self.leases = DataLeases(lambda: self.session, clock=lambda: self.now)
        self.layout = build_layout([("w", torch.empty(SERVERS * place.scalars, device="meta"))], SERVERS)
        self.versions = [0] * SERVERS
        self.steps = self.acknowledged = self.told = 0

    def join(self, *, replaces: bool) -> None:
        """Join both servers, and lay out the shards."""
        if replaces:
            for server in self.connection.servers:
                joined = self.connection.ask(server, replace(self.session.join_message(server), replaces=True))
                self.session.note_joined(server, joined)
        else:
            self.session.join()
        brings = self.rank == 0 and not replaces
        weights = [(torch.zeros(self.place.scalars),) for _ in self.connection.servers] if brings else None
        self.shards.initialise(self.layout, ASGD(), [None] * SERVERS, weights)
        watch = DisconnectWatch(*self.connection.sender)
        self.watches = [self.connection.post(server, watch, 0.0) for server in self.connection.servers]

    def beat(self) -> None:
        """Send a heartbeat to each server."""
        answer = self.session.beat(self.told, 60.0)
        if answer is None:
            raise RuntimeError(f"The heartbeat of worker {self.rank} was not answered.")
        self.told += len(answer.news)

    def claim(self) -> None:
        """Train a step, and claim more units if there is none."""
        if not self.leases.opened:
            self.leases.open(Plan(Epoch("0/0", ENOUGH, (ENOUGH,)), range(ENOUGH), BATCH))
        if not self.leases.more(self.acknowledged):
            raise RuntimeError(f"Worker {self.rank} was granted nothing.")
        self.leases.take()
        self.leases.begin_batch()
        self.now += STEP_S
        self.steps += 1
        self.leases.end_batch(self.steps)
        self.acknowledged = self.steps - NSYNC

    def exchange(self) -> None:
        """Push to both servers, and fetch."""
        self.session.pushed += 1
        key, units = self.leases.trained
        about: dict[str, Any] = {"steps": NSYNC, "batch": float(BATCH), "epoch": key, "units": units}
        message = Exchange(*self.connection.sender, self.session.pushed, 0, True, True, **about)
        updates = [(torch.full((self.place.scalars,), 1e-6),) for _ in self.connection.servers]
        replies = self.shards.replies(self.shards.exchange(message, self.versions, updates))
        self.versions = [reply.version for reply in replies]

    def contribution(self) -> None:
        """Meet the others."""
        report = SyncReport(moved=True, should_stop=False, grown=False, checkpoints=None, trained=True)
        self.collectives.reduced("sync point", "report", report, "report")

    def leave(self) -> None:
        """Leave as if the process was killed."""
        self.session.leave("it was killed")

    def close(self) -> None:
        self.transport.close()


class Clients:
    """The clients of one process."""

    def __init__(self) -> None:
        self.clients: list[Client] = []
        self.gone: list[Client] = []  # have left

    def join(self, place: Place, ranks: Sequence[int], *, replaces: bool = False) -> int:
        """Have clients join one after the other; returns how many did."""
        for rank in ranks:
            client = Client(place, rank)
            self.clients.append(client)
            client.join(replaces=replaces)
        return len(ranks)

    def leave(self, ranks: Sequence[int]) -> int:
        """Have clients leave; returns how many did."""
        going = [client for client in self.clients if client.rank in ranks]
        self.gone += going
        self.clients = [client for client in self.clients if client not in going]
        for client in going:
            client.leave()
        return len(going)

    def drop(self) -> int:
        """Close the connections of those that have left; returns how many."""
        gone, self.gone = self.gone, []
        for client in gone:
            client.close()
        return len(gone)

    def all_do(self, what: str, rounds: int) -> int:
        """Have all clients do something some times; returns how many messages of that kind a server was sent."""
        sent = 0
        for client in self.clients:
            client.sent.clear()
            _count(client)
        if what == "contribution":  # each waits for all others
            _side_by_side([lambda client=client: _repeat(client.contribution, rounds) for client in self.clients])
        else:
            for _ in range(rounds):
                for client in self.clients:
                    getattr(client, what)()
        for client in self.clients:
            sent += client.sent[what]
        return sent

    def close(self) -> None:
        for client in (*self.clients, *self.gone):
            client.close()


def _count(client: Client) -> None:
    """Count the messages that a client sends to the coordinator, by kind."""
    call = type(client.transport).call

    def counted(server: int, message: Any, timeout_s: float) -> Any:
        client.sent[KINDS.get(type(message), "other")] += server == 0
        return call(client.transport, server, message, timeout_s)

    client.transport.call = counted  # type: ignore[method-assign]


def _repeat(what: Callable[[], None], rounds: int) -> None:
    for _ in range(rounds):
        what()


def _side_by_side(jobs: Sequence[Callable[[], None]]) -> None:
    """Do all at the same time. Raises the first error."""
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def live(pipe: Pipe) -> None:
    """The life of a forked process: it does what the parent says, and answers with numbers of messages."""
    torch.set_num_threads(1)
    allow_many_connections()
    clients = Clients()
    try:
        while True:
            order, *about = pipe.recv()
            if order == "end":
                break
            pipe.send(getattr(clients, order)(*about[0], **about[1]))
    except EOFError:
        pass
    except BaseException:
        pipe.send(f"process {os.getpid()}:\n{traceback.format_exc()}")
    finally:
        clients.close()
        os._exit(0)
