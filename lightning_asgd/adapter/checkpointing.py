"""What a checkpoint holds of a run beside Lightning's own: versions, the servers' state, every worker's optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["KEY", "Resumed", "Resumption", "entry_of", "resumed"]

KEY = "lightning_asgd"
"""Where it stands in the checkpoint."""


@dataclass
class Resumption:
    """What the next fit goes on from. Reading a checkpoint fills it, a fit that sets out takes things out of it.

    Attributes:
        versions: per server, the version to count on from; None to begin with 0.
        servers: what the servers kept beside the weights.
        data: what had been trained of the epoch.
    """

    versions: list[int] | None = None
    servers: Sequence[Any] = ()
    data: Mapping[str, Any] = field(default_factory=dict)

    def take_versions(self) -> list[int] | None:
        """The versions, once."""
        versions, self.versions = self.versions, None
        return versions

    def take_servers(self) -> Sequence[Any]:
        """What the servers kept, once."""
        servers, self.servers = self.servers, ()
        return servers

    def take_data(self) -> Mapping[str, Any]:
        """What had been trained of the epoch, once."""
        data, self.data = self.data, {}
        return data


@dataclass(frozen=True)
class Resumed:
    """What a worker takes from a checkpoint.

    Attributes:
        mine: the worker's own optimizer and scheduler state, by Lightning's keys; empty for worker 0, whose state
            stands where Lightning looks for it.
        versions: per server, the version to count on from.
        servers: what the servers kept beside the weights; empty if it does not fit the run.
        warning: what to tell the user; empty if all fits.
    """

    mine: Mapping[str, Any]
    versions: list[int]
    servers: Sequence[Any] = ()
    warning: str = ""


def entry_of(
    versions: Sequence[int], algorithm: str, servers: Sequence[Any], workers: Mapping[int, Any]
) -> dict[str, Any]:
    """What worker 0 puts under :data:`KEY`."""
    return {
        "versions": list(versions),
        "algorithm": algorithm,
        "servers": list(servers),
        "workers": {rank: state for rank, state in workers.items() if rank != 0},
    }


def resumed(entry: Mapping[str, Any], rank: int, algorithm: str, num_servers: int) -> Resumed:
    """What a worker of this run takes from :func:`entry_of`'s result, which may come from quite another run."""
    mine = entry["workers"].get(rank, {})
    versions = list(entry["versions"])
    writer, servers = entry.get("algorithm", "ASGD"), entry.get("servers", ())
    same = len(versions) == num_servers
    count_on = versions if same else [max(versions)] * num_servers
    if same and writer == algorithm:
        return Resumed(mine, count_on, servers)
    kept = any(group.get("slots") for fragment in servers for shard in fragment for group in shard)
    warning = (
        f"The checkpoint was written by {writer} with {len(versions)} servers, and is read by {algorithm} with "
        f"{num_servers}: what the servers kept beside the weights, such as momentum, starts anew."
    )
    return Resumed(mine, count_on, (), warning if kept else "")
