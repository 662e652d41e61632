"""Servers and workers of one session, all in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_asgd.core.algorithms.asgd import ASGD
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.calls import shared_memory
from lightning_asgd.core.calls.inprocess import InProcessTransport
from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.foundation.layout import Layout, build_layout, dense
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.protocol import InitShard, Join
from lightning_asgd.core.server.service import Service
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.core.worker.exchanger import Exchanger
from lightning_asgd.core.worker.replica_kinds import replica_for
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.shard_client import ShardClient
from lightning_asgd.core.worker.synchronizer import OwnData, Training, WorkFeed, run

T = TypeVar("T")
SESSION = "test"


class Cluster:
    """So many services, and a transport to them that a test may replace."""

    def __init__(self, servers: int = 1, workers: int = 1, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.workers = workers
        self.services = [Service(clock) for _ in range(servers)]
        self.transport: Transport = InProcessTransport([s.handle for s in self.services])

    def client(self, rank: int = 0) -> SessionClient:
        return SessionClient(Connection(self.transport, SESSION, rank, self.workers, timeout_s=10.0))

    def enter(
        self,
        rank: int,
        parameters: Mapping[str, Tensor],
        *,
        clock: Callable[[], float] = lambda: 0.0,
        on_refused: Callable[[], None] = lambda: None,
        lr: Callable[[], float] = lambda: 0.0,
        shared: bool = False,
        measure: bool = False,
        data: WorkFeed | None = None,
        tables: Collection[str] = (),
        **settings: Any,
    ) -> Exchanger:
        """Do for a worker what the strategy does when ``fit`` begins. Worker 0 comes first and brings the weights.

        Args:
            rank: the worker's.
            parameters: its trainable tensors.
            clock: for the exchanger.
            on_refused: for the exchanger.
            lr: for the exchanger.
            shared: whether to exchange through shared memory.
            measure: for the exchanger.
            data: for the exchanger.
            tables: names of the parameters that are exchanged by rows.
            **settings: of :class:`ExchangeConfig`.
        """
        config = ExchangeConfig.create(**settings)
        client = self.client(rank)
        client.join()
        layout = build_layout(parameters.items(), len(self.services), tables)
        blocks = [shared_memory.create(dense(layout.shard(s))) if shared else None for s in range(layout.num_servers)]
        replica = replica_for(config.algorithm, layout, [(parameters, spec.name) for spec in layout.tensors], blocks)
        weights = replica.weights() if rank == 0 else None
        refs = [block.ref if block is not None else None for block in blocks]
        shard_client = ShardClient(client)
        seen = shard_client.initialise(layout, config.algorithm, refs, weights, compression=config.compression)
        assert seen == [ref is not None for ref in refs]
        training = Training(on_refused, lr, data=data or OwnData(), measure=measure)
        exchanger = Exchanger(layout, [(shard_client, replica)], config, training, clock=clock)
        run(exchanger.fetch())
        exchanger.stats = ExchangeStats()
        return exchanger

    def close(self) -> None:
        """End the session, as a server does when it is stopped."""
        for service in self.services:
            service.close()

    def versions(self) -> list[int]:
        return [summary(s)["version"] for s in self.services]

    def counts(self, what: str) -> list[int]:
        return [summary(s)["counts"][what] for s in self.services]


def summary(service: Service) -> dict[str, Any]:
    """The present session of a server: its name, its living workers, the version and counts of its first shard."""
    session = service.session
    shard = session.shards.get(0) if session else None
    return {
        "session": session.members.session if session else None,
        "living": sorted(session.members.living) if session else [],
        "version": shard.version if shard else 0,
        "counts": vars(shard.counts).copy() if shard else {},
    }


def layout_of_floats(n: int, servers: int) -> Layout:
    return build_layout([("w", torch.zeros(n))], servers)


def prepare(
    transport: Transport, session: str, layout: Layout, weights: Sequence[Tensor], *, workers: int, scale: str = "sum"
) -> None:
    """Let every worker join and worker 0 fill the shards, one float group each, as plain messages."""
    for rank in range(workers):
        for s in range(transport.num_servers):
            transport.call(s, Join(session, rank, workers), 10.0).wait()
            first = (weights[s],) if rank == 0 else None
            transport.call(s, InitShard(session, rank, layout.shard(s), ASGD(scale), first), 10.0).wait()


def run_workers(count: int, function: Callable[[int], T], deadline_s: float = 20.0) -> list[T]:
    """Run ``function(rank)`` in so many threads; what any raises, or that any hangs, is raised here."""
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), name=f"worker {rank}") for rank in range(count)]
    for thread in threads:
        thread.daemon = True  # a hanging one fails the test, and must not keep the interpreter
        thread.start()
    for thread in threads:
        thread.join(deadline_s)
    hanging = [thread.name for thread in threads if thread.is_alive()]
    if errors:
        raise next(iter(errors.values()))
    assert not hanging, f"{hanging} did not end within {deadline_s} s"
    return [results[rank] for rank in range(count)]
