"""What no server can be faster than: the memory bandwidth of this machine, beside exchanges of shards of any size."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from scale_job import BATCH

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.protocol import Exchange, InitShard, Join, Policy, Reply
from lightning_asgd.core.server.service import Service

GOAL = 3.0  # times as much with the most workers as with the fewest
LOAD = 0.2  # of a core, which the coordinator may take
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 25_000_000)  # scalars of a shard
MOVED, SENT = 16, 8  # bytes per scalar: update and weights are read, weights and answer written; two are sent
ADDED = 12  # bytes per scalar of an addition in place: two vectors are read, one is written
ENOUGH_S, LEAST, MOST = 0.5, 5, 300  # seconds and number of exchanges, and of additions, that are measured


@dataclass(frozen=True)
class Limits:
    """What limits a server.

    Attributes:
        memory: bytes that one core reads and writes per second, by the scalars of the vectors: caches are faster.
        link: bytes that a network carries per second, in each direction; 0 if it is not given.
        exchange_us: microseconds of CPU time of an exchange, by what was measured and by scalars of the shard.
    """

    memory: dict[int, float]
    link: float
    exchange_us: dict[str, dict[int, float]]

    def memory_us(self, scalars: int) -> float:
        """Microseconds in which memory moves what an exchange has to."""
        return scalars * MOVED / self.memory[scalars] * 1e6

    def link_us(self, scalars: int) -> float:
        """Microseconds in which the link carries an update one way, and weights the other way at the same time."""
        return scalars * SENT / 2 / self.link * 1e6 if self.link else 0.0


def memory_bandwidth(scalars: int) -> float:
    """Bytes that one core reads and writes per second where vectors are as long: the best of many additions."""
    weights, update = torch.zeros(scalars), torch.ones(scalars)
    calls = max(1, 100_000 // scalars)  # else the clock would be a part of it
    times: list[float] = []
    while len(times) < LEAST or (calls * sum(times) < ENOUGH_S and len(times) < MOST):
        begun = time.perf_counter()
        for _ in range(calls):
            weights.add_(update)
        times.append((time.perf_counter() - begun) / calls)
    return scalars * ADDED / min(times)


def exchange_us(scalars: int) -> float:
    """The median CPU time of an exchange with one server, in microseconds: an update comes, and weights go back."""
    service = Service()
    service.handle(Join("limits", 0, 1, Policy()))
    service.handle(InitShard("limits", 0, ((Role.PARAMETER, "float32", scalars),), ASGD(), (torch.zeros(scalars),)))
    spent: list[float] = []
    while len(spent) < LEAST or (sum(spent) < ENOUGH_S * 1e6 and len(spent) < MOST):
        update = torch.full((scalars,), 1e-6)
        message = Exchange("limits", 0, len(spent) + 1, len(spent), True, True, (update,), batch=float(BATCH))
        begun = time.thread_time_ns()
        reply = service.handle(message)
        spent.append((time.thread_time_ns() - begun) / 1000)
        if not isinstance(reply, Reply):
            raise RuntimeError(f"An exchange of {scalars} scalars was answered {reply}.")
    service.close()
    return statistics.median(spent)


def measure_limits(link_mbit: float, exchange_us: dict[str, dict[int, float]]) -> Limits:
    """What limits a server here; ``link_mbit`` is the speed of its network in Mbit/s, 0 if it is not given."""
    sizes = sorted({scalars for by_size in exchange_us.values() for scalars in by_size})
    return Limits({scalars: memory_bandwidth(scalars) for scalars in sizes}, link_mbit * 1e6 / 8, exchange_us)


def show_limits(console: Console, limits: Limits) -> None:
    """Print what an exchange costs by the size of the shard, beside what memory and link take for it."""
    table = Table(title="an exchange by the size of the shard, µs of CPU time", title_justify="left")
    link = [f"link, {limits.link * 8e-9:g} Gbit/s"] if limits.link else []
    for column in ("MB of weights", *limits.exchange_us, "memory", *link, "beside memory"):
        table.add_column(column, justify="right")
    for scalars in sorted(limits.memory):
        measured = [by_size[scalars] for by_size in limits.exchange_us.values()]
        least = [limits.memory_us(scalars), *([limits.link_us(scalars)] if limits.link else [])]
        beside = f"x {min(measured) / least[0]:.1f}"
        table.add_row(f"{scalars * 4e-6:g}", *(f"{each:,.0f}" for each in (*measured, *least)), beside)
    console.print(table)
    most, slowest = max(limits.memory.values()) / 1e9, limits.memory[max(limits.memory)] / 1e9
    rates = f"{most:.1f} GB/s in caches, {slowest:.1f} GB/s with the largest"
    console.print(f"memory: update and weights are read, and both written, {MOVED} bytes per scalar: {rates}")
