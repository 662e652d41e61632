"""The exchanges of an island: what its first process uses in the place of shards and a replica of its own."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.futures import Future

from lightning_asgd.core.algorithms.base import Algorithm
from lightning_asgd.core.foundation.errors import ServerLostError
from lightning_asgd.core.foundation.layout import Layout
from lightning_asgd.core.protocol import Exchange, Reply, Rows, SharedRef
from lightning_asgd.core.worker.connection import COORDINATOR
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.shard_client import ShardClient
from lightning_asgd.islands.part_exchange import PartExchange


class IslandShards(ShardClient):
    """Has every process of the island send its part of an exchange, and sends the exchange itself."""

    def __init__(self, client: SessionClient, part: PartExchange) -> None:
        super().__init__(client, part.fragment, restorable=part.replica.remembers)
        self._part = part
        self._exchanges = 0

    def fill(self, layout: Layout, algorithm: Algorithm, versions: Sequence[int] | None, *, brings: bool) -> None:
        """Allocate the shards; if the island ``brings`` their first values, fill them."""
        self._part.order("init", brings)
        self.initialise(layout, algorithm, [None for _ in self.connection.servers], versions=versions, in_parts=brings)

    def exchange(
        self,
        message: Exchange,
        base_versions: Sequence[int],
        updates: Sequence[tuple[Tensor, ...] | None],
        common: Sequence[str | None] | None = None,
        rows: Sequence[tuple[Rows, ...]] | None = None,
    ) -> list[Future[Any]]:
        """See :class:`ShardClient`; the updates are in the processes' parts."""
        self._exchanges += 1
        self._part.order("send", self._exchanges, message.push)
        message = replace(message, island=self._exchanges, fragment=self.fragment)
        self.latest = [replace(message, base_version=version) for version in base_versions]
        return [self.connection.post(s, each) for s, each in enumerate(self.latest)]

    def arrived_here(self, futures: list[Future[Any]]) -> bool:
        """Whether this process has its part of the answer to an exchange."""
        return self._part.arrived and all(future.done() for future in futures)

    def arrived_everywhere(self, futures: list[Future[Any]]) -> bool:
        """Whether all processes have. They compare that if this one has: it would wait for the others."""
        return self.arrived_here(futures) and self._part.arrived_everywhere()

    def allocate(self, server: int, shared: SharedRef | None) -> bool:
        """Allocate the shard on a lost server's replacement, and have every process bring it what it fetched last."""
        connection = self.connection
        self._part.order("restore", server, connection.transport.addresses[server], connection.replaced[server])
        return super().allocate(server, shared)

    def repeat(self, server: int, message: Exchange) -> Future[Any]:
        """Have every process send its part again, and send the exchange again."""
        self._part.order("resend", server, message.island)
        return super().repeat(server, message)

    def replies(self, futures: list[Future[Any]]) -> list[Reply]:
        """Wait until every process has its part of the answers, too; see :class:`ShardClient`."""
        while True:
            replies = super().replies(futures)
            try:
                self._part.order("receive")
                return replies
            except ServerLostError as error:
                lost, before = error.server or COORDINATOR, list(futures)
                self.connection.recover(error)
                if futures[lost] is before[lost]:
                    futures[lost] = self.repeat(lost, self.latest[lost])

    def answers(self, replies: Sequence[Reply], wire: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """None: every process receives its part of them."""
        return []

    def give_up(self, servers: Collection[int]) -> None:
        """Give up the latest exchange on all processes."""
        self._part.order("forget")


class IslandReplica:
    """The island's weights, seen as the servers' shards: every process has a replica of its part."""

    within_bounds = shares_memory = lags = False
    wire: Sequence[tuple[Tensor, ...]] = ()

    def __init__(self, layout: Layout, part: PartExchange) -> None:
        self.layout = layout
        self.blocks = [None] * layout.num_servers
        self._part = part

    @property
    def remembers(self) -> bool:
        """See :class:`~lightning_asgd.core.worker.replica.Replica`, here and below."""
        return self._part.replica.remembers

    @property
    def arrived(self) -> bool:
        """Whether this process's part of the update is in host memory."""
        return self._part.replica.arrived

    def await_arrival(self) -> None:
        """Wait until the update is in host memory."""
        self._part.replica.await_arrival()

    def took_s(self) -> float:
        """Device seconds of this process."""
        return self._part.replica.took_s()

    def updates(self) -> list[None]:
        """None: they are in the parts."""
        return [None] * self.layout.num_servers

    def row_updates(self, *, push: bool) -> None:
        """None: islands exchange tables as any other parameters."""

    def pack(self, *, thorough: bool = False) -> None:
        """Write the update to the send buffers."""
        self._part.pack_together()

    def fetched(self, server: int) -> None:
        """None: every process brings its part of the weights that were fetched last."""

    def pack_again(self, server: int) -> None:
        """Nothing: the parts are sent by value."""

    def merge(self, answers: Any, *, pushed: bool = True, fresh: bool = False, alone: bool = False) -> None:
        """Take the weights, and keep the steps since the push."""
        self._part.order("merge", pushed, fresh, alone)

    def adopt(self, answers: Any, *, park: bool = False, alone: bool = False) -> None:
        """Take the weights as they are."""
        self._part.order("adopt", park, alone)

    def resume(self) -> None:
        """Bring back what was parked."""
        self._part.order("resume")

    def accrue(self, skipped: bool | Tensor = False) -> None:
        """Note that a step was taken, or skipped, on this process."""
        self._part.accrue(skipped)

    def changed(self) -> list[str]:
        """None: no process has all of the weights."""
        return []

    def distance(self, answers: Any) -> float:
        """Not measured: no process has all of the weights."""
        return math.nan

    def close(self) -> None:
        """Release this process's buffers."""
        self._part.replica.close()
