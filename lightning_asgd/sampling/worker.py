"""How a worker fetches the samples of the posterior."""

from __future__ import annotations

from torch import Tensor

from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.sampling.messages import Samples


def kept_samples(connection: Connection) -> list[tuple[int, list[tuple[Tensor, ...]]]]:
    """Weights that all servers have kept, oldest version first: with each, one tensor per server and group."""
    futures = [connection.post(server, Samples(*connection.sender)) for server in connection.servers]
    kept = [dict(connection.result(server, future)) for server, future in enumerate(futures)]
    common = set(kept[0]).intersection(*kept[1:])
    return [(version, [shard[version] for shard in kept]) for version in sorted(common)]
