"""A plain loop's object in tests, with servers in this process, and a module that counts how often it saw a sample."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_asgd import AsyncSGD
from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.calls.inprocess import InProcessTransport
from lightning_asgd.core.server.service import Service

__all__ = ["Counts", "Run", "Shards", "numbered"]


class Counts(nn.Module):
    """Learns how often each sample was trained, if the optimizer's learning rate is 1."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(samples))

    def forward(self, numbers: Tensor) -> Tensor:
        return -self.seen[numbers].sum()


def numbered(samples: int) -> TensorDataset:
    """A data set whose samples are their numbers."""
    return TensorDataset(torch.arange(samples))


class Shards:
    """The same in shards of these lengths, which are ``known`` or not."""

    def __init__(self, lengths: Sequence[int], *, known: bool) -> None:
        self.lengths, self.num_shards = lengths, len(lengths)
        if known:
            self.shard_lengths = lengths

    def open_shard(self, epoch: int, shard: int, start: int) -> Iterator[Any]:
        before = sum(self.lengths[:shard])
        return ((number,) for number in range(before + start, before + self.lengths[shard]))


class Run:
    """An elastic run, or a job, whose servers are in this process."""

    def __init__(self, servers: int = 1, *, elastic: bool = True) -> None:
        self.services = [Service(time.monotonic, run="s" if elastic else "") for _ in range(servers)]
        self.transport = InProcessTransport([service.handle for service in self.services])

    @property
    def job(self) -> Any:
        """What a worker knows of it."""
        about = {"attaches": True, "hosts": None, "finder": None, "placed": frozenset()}
        job: Any = SimpleNamespace(session="s", transport="rpc", why="", **about)
        job.num_servers, job.find_run, job.connect = len(self.services), lambda: None, lambda: self.transport
        job.note_failure, job.successor, job.store = lambda rank, **_: None, lambda server: "none", lambda: None
        return job

    def worker(self, module: nn.Module, optimizers: Any, **options: Any) -> AsyncSGD:
        """One that is about to join it."""
        options = {"nsync": 2, "algorithm": ASGD("sum"), **options}
        asgd = AsyncSGD(module, optimizers, run="127.0.0.1:1/s", **options)
        asgd._job = self.job
        return asgd

    def alone(self, module: nn.Module, optimizers: Any, **options: Any) -> AsyncSGD:
        """The only worker of a job."""
        asgd = AsyncSGD(module, optimizers, **{"nsync": 2, "algorithm": ASGD("sum"), **options})
        asgd._job = self.job
        asgd._job.attaches, asgd._job.begin = False, lambda *about, **more: None  # type: ignore[misc, method-assign]
        return asgd

    def close(self) -> None:
        for service in self.services:
            service.close()
