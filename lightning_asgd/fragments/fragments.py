"""A module's fragments while no worker trains: what workers and servers have of them is read, restored and replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.core.worker.replica import Replica
from lightning_asgd.core.worker.shard_client import ShardClient, restore_shards
from lightning_asgd.sampling.messages import Samples


def kept_samples(connection: Connection) -> list[tuple[int, list[tuple[Tensor, ...]]]]:
    """Weights that all servers have kept, oldest version first: with each, one tensor per server and group."""
    futures = [connection.post(server, Samples(*connection.sender)) for server in connection.servers]
    kept = [dict(connection.result(server, future)) for server, future in enumerate(futures)]
    common = set(kept[0]).intersection(*kept[1:])
    return [(version, [shard[version] for shard in kept]) for version in sorted(common)]


class Fragments:
    """The fragments of one worker's module, each with its shards on the servers and its replica."""

    def __init__(self, parts: Sequence[tuple[ShardClient, Replica]]) -> None:
        self._parts = parts

    def samples(self) -> list[dict[str, Tensor]]:
        """See :class:`Synchronizer`, here and below. Algorithms that keep any exchange the module as a whole."""
        shards, replica = self._parts[0]
        return [replica.read(weights) for _, weights in kept_samples(shards.connection)]

    def state(self) -> list[list[Any]]:
        """What servers keep besides the weights."""
        return [shards.state() for shards, _ in self._parts]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Have the servers take it back."""
        restore_shards([shards for shards, _ in self._parts], state)

    def changed(self) -> list[str]:
        """Names of the weights that a program has changed."""
        return [name for _, replica in self._parts for name in replica.changed()]

    def weights(self) -> list[list[tuple[Tensor, ...]]]:
        """Copies of the module's weights."""
        return [replica.weights() for _, replica in self._parts]

    def replace(self, weights: Sequence[Sequence[tuple[Tensor, ...]]], *, sends: bool) -> None:
        """Have the servers take these."""
        for (shards, replica), mine in zip(self._parts, weights, strict=True):
            replica.forget_parked()
            if sends:
                shards.replace(mine)
