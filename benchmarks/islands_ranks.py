"""Ranks of islands, forked as :mod:`ranks` does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from islands_program import inside_of
from network import Network
from plain_loop import served
from ranks import free_port, run_ranks

from lightning_asgd import ASGDStrategy
from lightning_asgd.algorithms import Algorithm

RUN, START_S = "islands", 120.0


@dataclass(frozen=True)
class Shape:
    """How many islands there are, and of how many ranks each.

    Attributes:
        inside: "ddp" or "fsdp2". An island of one rank is an ordinary worker.
        joined: whether the islands train together; else Lightning's own strategy trains in each by itself.
    """

    islands: int
    ranks: int
    inside: str = "ddp"
    joined: bool = True

    def __str__(self) -> str:
        name = f"{self.islands}x{self.ranks} {self.inside if self.ranks > 1 else 'workers'}"
        return name if self.joined else f"{name}, not joined"

    @property
    def size(self) -> int:
        """Ranks of all islands."""
        return self.islands * self.ranks


@dataclass(frozen=True)
class Place:
    """One rank's.

    Attributes:
        address: of the run's servers; empty if the islands are not joined.
    """

    shape: Shape
    island: int
    rank: int  # in its island
    address: str
    all: Any  # a barrier for the ranks of all islands

    def strategy(self, nsync: int = 10, algorithm: Algorithm | None = None, **inside: Any) -> Any:
        """A Trainer's; ``inside`` are options of the one inside."""
        shape = self.shape
        run: dict[str, Any] = {"run": self.address, "monitor": False, "algorithm": algorithm}
        if shape.joined and shape.ranks == 1:
            return ASGDStrategy(nsync, **run)
        own = inside_of(shape.inside, shape.ranks, **inside)
        return ASGDStrategy(nsync, island=own, **run) if shape.joined else own

    def together(self) -> pl.Callback:
        """Has all islands begin to train at the same time."""
        return _Together(self.all)


class _Together(pl.Callback):
    def __init__(self, barrier: Any) -> None:
        self.barrier = barrier

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.barrier.wait(START_S)


def run_islands(
    shape: Shape, job: Callable[[Place], dict[str, Any]], seconds: float, network: Network | None = None
) -> list[dict[str, Any]]:
    """Run a job on every rank, and return what they return; see :func:`ranks.run_ranks`.

    With a network the ranks are spread by halves over its two machines, and the servers are on the first one.
    """
    ports = [free_port() for _ in range(shape.islands)]
    with served(RUN, network) if shape.joined else contextlib.nullcontext("") as address:
        barrier = multiprocessing.get_context("fork").Barrier(shape.size)
        places = [Place(shape, *divmod(rank, shape.ranks), address, barrier) for rank in range(shape.size)]
        jobs = [partial(_be, place, job, ports[place.island], network) for place in places]
        return run_ranks(jobs, seconds, launched=False)


def _be(place: Place, job: Callable[[Place], dict[str, Any]], port: int, network: Network | None) -> dict[str, Any]:
    """Become a rank as torchrun starts it."""
    shape, rank, address = place.shape, place.rank, "127.0.0.1"
    if network is not None:
        machines = len(network.names)
        machine = (place.island * shape.ranks + rank) * machines // shape.size
        network.enter(machine)
        if shape.islands < machines:  # an island has ranks on both
            os.environ["GLOO_SOCKET_IFNAME"], address = network.interfaces[machine], network.addresses[0]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if shape.ranks > 1 or not shape.joined:
        about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": shape.ranks, "LOCAL_WORLD_SIZE": shape.ranks}
        os.environ.update({name: str(value) for name, value in about.items()})
        os.environ.update(GROUP_RANK="0", MASTER_ADDR=address, MASTER_PORT=str(port), TORCHELASTIC_RUN_ID=RUN)
    torch.set_num_threads(1)
    return job(place)
