"""Samples per second of sparse and dense gradients over slow cables. The part ``links`` of :mod:`rows`.

Every worker is on a machine of its own, and A-SGD's server on another one; all cables of a run have the same speed.
Under DDP the workers' machines are the same, and gloo sends the gradients from one to the next: dense ones in a ring,
sparse ones from each to all. What is counted is a window in which all workers train, as in :mod:`throughput`.

With sparse gradients a process of DDP crashes now and then, within gloo's threads (torch 2.15). Such a run is repeated,
and the crash is counted.

A slow cable does not stop A-SGD's workers: what is due waits, and its steps go into the next push. So the table has the
steps of a push beside samples/s. "A-SGD that waits" takes at most ``NSYNC`` steps while an exchange is in flight, so
that both kinds of gradients train with weights of about the same age.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytorch_lightning as pl
import throughput
import torch
from clock import Clock
from common import spread
from islands_speed import on_cable, ratios
from network import Network, machines
from plain_loop import served
from pytorch_lightning.strategies import DDPStrategy
from ranks import free_port, run_ranks
from rich.markup import escape
from rich.table import Table
from rows_model import ClickModel, ClickNet, Clicks, Market, loader
from throughput import CONSOLE, Scenario, trainer_options

from lightning_asgd import Advanced, ASGDStrategy

__all__ = ["SYSTEMS", "Conditions", "compare", "show_links"]

NSYNC, BATCH, RUN, START_S = 10, 256, "links", 120.0
MARKET, WIDTH = Market(users=100_000, items=20_000), 32
SAMPLES, LENGTH = 500_000, 4_000_000  # distinct ones, and more than are trained
WARM_UP_S = 3.0
TRIES = 6  # of DDP with sparse gradients
Results = dict[str, dict[str, list[dict[str, Any]]]]


@dataclass(frozen=True)
class System:
    """What is compared.

    Attributes:
        asgd: or else DDP.
        sparse: the gradients of tables, or else dense.
        waits: whether a worker waits rather than take more than ``NSYNC`` steps while an exchange is in flight.
    """

    asgd: bool
    sparse: bool
    waits: bool = False


SYSTEMS = {
    "A-SGD, sparse": System(asgd=True, sparse=True),
    "A-SGD, dense": System(asgd=True, sparse=False),
    "A-SGD that waits, sparse": System(asgd=True, sparse=True, waits=True),
    "A-SGD that waits, dense": System(asgd=True, sparse=False, waits=True),
    "DDP, dense": System(asgd=False, sparse=False),
    "DDP, sparse": System(asgd=False, sparse=True),
}


@dataclass(frozen=True)
class Conditions:
    """How it is measured."""

    workers: int
    repeats: int
    seconds: float
    systems: Sequence[str]

    @property
    def scenario(self) -> Scenario:
        """The same for :mod:`throughput`."""
        return Scenario("links", workers=self.workers, batch=BATCH, seconds=self.seconds)


@dataclass(frozen=True)
class Meeting:
    """What the workers of a run have in common.

    Attributes:
        network: the server's machine, and one for each worker.
        address: the server's, or a port for DDP.
        start: all workers wait for each other here.
        last_step: of DDP; see :func:`throughput.train`.
    """

    network: Network
    address: str
    start: Any
    last_step: mmap.mmap


@cache
def clicks() -> Clicks:
    """Samples for training, once for all forked workers."""
    drawn = MARKET.clicks(SAMPLES, 0)[0]
    return Clicks(drawn.users, drawn.items, drawn.clicked, LENGTH)


# ---------------------------------------------------------------------- in a worker's process


class Start(pl.Callback):
    """Begins with all workers at once."""

    def __init__(self, start: Any) -> None:
        self.start = start

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.start.wait(START_S)


def train(system: System, seconds: float, meeting: Meeting, rank: int, workers: int) -> dict[str, Any]:
    """Train on the machine of this rank until the time is up; see :func:`throughput.train`."""
    network, place = meeting.network, 1 + rank
    network.enter(place)
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    options: dict[str, Any] = {"devices": 1}
    if system.asgd:
        bound = {"advanced": Advanced(max_offline_steps=NSYNC)} if system.waits else {}
        options["strategy"] = ASGDStrategy(NSYNC, run=meeting.address, monitor=False, **bound)
    else:
        os.environ.update(MASTER_ADDR=network.addresses[1], MASTER_PORT=meeting.address)
        os.environ.update(NODE_RANK=str(rank), LOCAL_RANK="0", GLOO_SOCKET_IFNAME=network.interfaces[place])
        options |= {"num_nodes": workers, "strategy": DDPStrategy(process_group_backend="gloo")}
    model = ClickModel(ClickNet(MARKET.users, MARKET.items, WIDTH, sparse=system.sparse), "SGD")

    def figures(trainer: Any) -> dict[str, float]:
        return {**throughput._figures(trainer.strategy), "cable": sum(on_cable()), "batches": len(clock.ends)}

    def decide(over: bool, batch: int) -> bool:
        ddp = throughput.System("DDP")
        return over if system.asgd else throughput._all_over(over, ddp, rank, batch, meeting.last_step)

    clock = Clock(WARM_UP_S, seconds, figures, decide)
    pl.Trainer(**trainer_options(), **options, callbacks=[Start(meeting.start), clock]).fit(
        model, loader(clicks(), BATCH)
    )
    return clock.answer(rank)


# ---------------------------------------------------------------------- a run


def run(system: System, conditions: Conditions, network: Network) -> dict[str, Any]:
    """Samples per second of all workers, and bytes that a worker's cable carries per step."""
    workers = conditions.workers
    start, last_step = multiprocessing.get_context("fork").Barrier(workers), mmap.mmap(-1, 8)

    def work(address: str) -> list[dict[str, Any]]:
        meeting = Meeting(network, address, start, last_step)
        jobs = [partial(train, system, conditions.seconds, meeting, rank, workers) for rank in range(workers)]
        return run_ranks(jobs, 2 * START_S + conditions.seconds, launched=False)

    try:
        if system.asgd:
            with served(RUN, network) as address:
                answers = work(address)
        else:
            answers = work(str(free_port()))
    finally:
        last_step.close()
    cable, batches = (sum(answer[name] for answer in answers) for name in ("cable", "batches"))
    return {**throughput._evaluate(conditions.scenario, answers), "cable_per_step": cable / batches}


def try_run(name: str, conditions: Conditions, network: Network) -> dict[str, Any]:
    """As :func:`run`, once more if DDP has crashed on sparse gradients; the result says how often it has."""
    system = SYSTEMS[name]
    tries = TRIES if system.sparse and not system.asgd else 1
    crashes = 0
    while True:
        try:
            return {**run(system, conditions, network), "crashes": crashes}
        except RuntimeError as error:
            crashes += 1
            if crashes == tries:
                raise
            CONSOLE.print(f"  [yellow]{name} crashed[/]: {escape(str(error).strip().splitlines()[-1][:110])}")


def compare(conditions: Conditions, speeds: Sequence[float]) -> Results:
    """Measure all systems in turns, at every speed of the cables in Mbit/s."""
    clicks()
    found: Results = {}
    for mbit in speeds:
        runs = found[f"{mbit:g}"] = {name: [] for name in conditions.systems}
        with machines(1 + conditions.workers, mbit) as network:
            for repeat in range(conditions.repeats):
                for name, results in runs.items():
                    results.append(try_run(name, conditions, network))
                    speed = f"{results[-1]['samples_per_s']:9,.0f} samples/s"
                    CONSOLE.print(f"  {mbit:g} Mbit/s, {repeat + 1}/{conditions.repeats}  {name:<24} {speed}")
    return found


def show_links(conditions: Conditions, found: Results) -> bool:
    """Print the speeds. There is no target."""
    mb = 4 * WIDTH * (MARKET.users + MARKET.items) / 1e6
    for mbit, runs in found.items():
        title = f"{mbit} Mbit/s, {conditions.workers} workers, tables of {mb:.1f} MB, batch {BATCH}: medians (min-max)"
        first = next(iter(runs))
        headings = ("samples/s", f"{first} / this", "steps per push", "bytes per step on a cable", "crashes")
        table = Table("gradients", *headings, title=title, title_justify="left")
        speeds = {name: [each["samples_per_s"] for each in results] for name, results in runs.items()}
        for name, results in runs.items():
            beside = spread(ratios(speeds[first], speeds[name]), 2) if name != first else ""
            steps = spread([each["steps_per_push"] for each in results], 1) if SYSTEMS[name].asgd else ""
            cable = f"{statistics.median(each['cable_per_step'] for each in results):,.0f}"
            crashes = sum(each["crashes"] for each in results)
            table.add_row(name, spread(speeds[name], 0), beside, steps, cable, str(crashes or ""))
        CONSOLE.print(table)
        foreign = throughput.disturbance(runs)
        if foreign > throughput.DISTURBED:
            CONSOLE.print(f"[yellow]Other programs took {foreign:.0%} of a core meanwhile: measure again.[/]")
    return True
