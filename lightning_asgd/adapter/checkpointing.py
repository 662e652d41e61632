"""What a checkpoint holds of a run beside Lightning's own: versions, the servers' state, every worker's optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_asgd.adapter.class_trees import rank_zero_warn

__all__ = ["KEY", "Resumption", "entry_of"]

KEY = "lightning_asgd"
"""Where it stands in the checkpoint."""


@dataclass
class Resumption:
    """What the next fit goes on from. Reading a checkpoint fills it, a fit that sets out takes things out of it.

    Attributes:
        versions: per server, the version to count on from; None to begin with 0.
        servers: what the servers kept beside the weights; empty if it does not fit the run.
        data: what had been trained of the epoch.
    """

    versions: list[int] | None = None
    servers: Sequence[Any] = ()
    data: Mapping[str, Any] = field(default_factory=dict)

    def read(self, checkpoint: Mapping[str, Any], rank: int, algorithm: str, num_servers: int) -> Mapping[str, Any]:
        """Take what a worker of this run needs from a checkpoint, which may be of quite another run.

        Returns the worker's own optimizer and scheduler state, by Lightning's keys; none for worker 0, whose state
        is where Lightning looks for it.
        """
        entry = checkpoint.get(KEY)
        if not entry:
            return {}
        versions, self.data = list(entry["versions"]), entry.get("data", {})
        writer, servers = entry.get("algorithm", "ASGD"), entry.get("servers", ())
        same = len(versions) == num_servers
        fits = same and writer == algorithm
        self.versions, self.servers = versions if same else [max(versions)] * num_servers, servers if fits else ()
        if not fits and any(group.get("slots") for fragment in servers for shard in fragment for group in shard):
            rank_zero_warn(
                f"The checkpoint was written by {writer} with {len(versions)} servers, and is read by {algorithm} with "
                f"{num_servers}: what the servers kept beside the weights, such as momentum, starts anew."
            )
        mine: Mapping[str, Any] = entry["workers"].get(rank, {})
        return mine

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
