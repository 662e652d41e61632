"""What a message costs the servers, with 16 to 1,024 workers: a claim, an exchange, a heartbeat, ...

    python benchmarks/scale.py                       # a few minutes on one core
    python benchmarks/scale.py --workers 16 64       # fewer workers
    python benchmarks/scale.py --picture scale.png   # draw the curves there

Two servers in one process, without a network: the real service of the coordinator, which has a shard too, and that of
another shard. Simulated workers send them what real ones do, in virtual time: they claim samples of epochs, train at
speeds of their own (a step takes 2 s on average; the slowest worker needs four times as long as the fastest), push and
fetch every ten steps, send heartbeats, wait for each other at the ends of sync intervals, and meet there in a
collective. Meanwhile workers are killed and replaced (in a job), or leave and others join (in an elastic run).

A figure is the CPU time of all messages of a kind, divided by their number: what a message costs with all that it
causes, such as the answers to others that wait. Runs are interleaved; medians, minima and maxima are of repeats.

The goal: from 16 to 1,024 workers a message of no kind costs more than three times as much.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import os
import statistics
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.futures import Future

from lightning_asgd.algorithms import ASGD
from lightning_asgd.layout import Role
from lightning_asgd.protocol import (
    Attach,
    Contribution,
    DisconnectWatch,
    Epoch,
    Exchange,
    Failure,
    Heartbeat,
    InitShard,
    Join,
    LeaseGrant,
    LeaseRequest,
    Leave,
    OpenEpoch,
    Policy,
    RunMetadata,
    SyncReport,
)
from lightning_asgd.server.service import Service

WORKERS = (16, 64, 256, 1024)
GOAL = 3.0  # times as much with the most workers as with the fewest
STEP_S, SLOWEST, BATCH, NSYNC = 2.0, 4.0, 32, 10
STEPS, INTERVALS = 8, 2  # steps of a worker in a sync interval, and intervals of an epoch
TICK_S, SILENCE_S = 0.25, 30.0
CHURNED = 24  # workers that are lost, and as many that join, in every epoch
SCALARS = 1000  # of a shard
GROUPS = ((Role.PARAMETER, "float32", SCALARS),)
KINDS = {
    Join: "join",
    Attach: "join",
    Leave: "leave",
    LeaseRequest: "claim",
    Exchange: "exchange",
    Heartbeat: "beat",
    Contribution: "contribution",
}
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


@dataclass
class Worker:
    """What a simulated worker knows."""

    number: int
    unit_s: float
    process: str
    seq: int = 0  # of its pushes
    collective: int = 0
    segment: int = 0
    trained: int = 0
    applied: int = 0
    steps: int = 0  # since its last push
    events: int = 0  # that it has heard of
    gone: bool = False


@dataclass
class Costs:
    """Nanoseconds of CPU time and messages, by server and kind."""

    ns: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    count: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def us(self) -> dict[tuple[str, str], float]:
        """Microseconds of a message."""
        return {key: self.ns[key] / count / 1000 for key, count in self.count.items()}


class Job:
    """Workers of one session in virtual time, which train ``epochs`` epochs."""

    def __init__(self, size: int, *, elastic: bool, epochs: int, most_s: float) -> None:
        self.size, self.elastic, self.epochs, self.most_s = size, elastic, epochs, most_s
        self.session = "run" if elastic else "job"
        self.now, self.random, self.costs = 0.0, Random(size), Costs()
        run = self.session if elastic else ""
        self.servers = {name: Service(lambda: self.now, run) for name in ("coordinator", "shard")}
        self.policy = Policy(SILENCE_S, another_chief=True)
        self.workers: dict[int, Worker] = {}
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0
        self.ready: list[tuple[Callable[[Any], None], Any]] = []  # answers of the servers, to be taken
        self.started = self.number = 0
        units = INTERVALS * STEPS * BATCH * size
        self.epoch = Epoch("0/0", units, tuple(units * (i + 1) // INTERVALS for i in range(INTERVALS)))

    # ------------------------------------------------------------------ messages

    def send(self, server: str, message: Any, then: Callable[[Any], None] = lambda _: None) -> None:
        """Have a server handle a message; the answer is taken now or, if it comes later, then."""
        begun = time.thread_time_ns()
        answer = self.servers[server].handle(message)
        took, kind = time.thread_time_ns() - begun, KINDS.get(type(message))
        if kind is not None:
            self.costs.ns[server, kind] += took
            self.costs.count[server, kind] += 1
        if isinstance(answer, Future):
            answer.add_done_callback(lambda done: self.ready.append((then, done.value())))  # type: ignore[misc]
        else:
            self.ready.append((then, answer))

    def both(self, make: Callable[[int], Any], then: Callable[[Any], None] = lambda _: None) -> None:
        """Send both servers a message; the coordinator's answer counts."""
        self.send("shard", make(1))
        self.send("coordinator", make(0), then)

    def about(self, worker: Worker) -> tuple[str, int]:
        return self.session, worker.number

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.queue, (self.now + seconds, self.order, what))

    # ------------------------------------------------------------------ a worker's life

    def enter(self, number: int | None = None) -> None:
        """Have a process join: as a worker with a number, as its replacement, or in a run as a new one."""
        self.started += 1
        process, replaces = f"host{self.started % 64}/{self.started}", number in self.workers
        unit_s = STEP_S / BATCH * self.random.uniform(2 / (1 + SLOWEST), 2 * SLOWEST / (1 + SLOWEST))
        if self.elastic:
            attach = Attach(self.session, "a machine", self.policy, process=process)
            self.send("coordinator", attach, lambda a: self.attached(Worker(a.worker, unit_s, process), a.bootstraps))
            return
        assert number is not None
        worker = Worker(number, unit_s, process)

        def join(server: int) -> Join:
            options: dict[str, Any] = {"server": server, "replaces": replaces, "process": process}
            return Join(self.session, number, self.size, self.policy, **options)

        def joined(answer: Any) -> None:
            worker.seq, worker.collective = answer.pushed, answer.collectives
            self.set_up(worker, brings=not number and not replaces)

        self.both(join, joined)

    def attached(self, worker: Worker, bootstraps: bool) -> None:
        """Join the other server of a run too."""
        self.send("shard", Join(*self.about(worker), 0, self.policy, server=1, process=worker.process))
        self.set_up(worker, brings=bootstraps)
        if bootstraps:
            note = RunMetadata(*self.about(worker), "founded", True, process=worker.process)
            self.both(lambda _: note)

    def set_up(self, worker: Worker, *, brings: bool) -> None:
        """Lay out the shards, and begin to train."""
        self.workers[worker.number] = worker

        def lay_out(_: int) -> InitShard:
            weights = (torch.zeros(SCALARS),) if brings else None
            return InitShard(*self.about(worker), GROUPS, ASGD(), weights, process=worker.process)

        self.both(lay_out)
        self.both(lambda _: DisconnectWatch(*self.about(worker), process=worker.process))
        self.later(self.random.uniform(0, SILENCE_S / 5), lambda: self.beat(worker))
        if len(self.workers) == self.size and not self.number:
            self.begin_epoch()
        elif self.number:
            self.open(worker)

    def beat(self, worker: Worker) -> None:
        if not worker.gone:
            sign = Heartbeat(*self.about(worker), worker.events, process=worker.process)
            self.both(lambda _: sign, lambda answer: self.hear(worker, answer))
            self.later(SILENCE_S / 5, lambda: self.beat(worker))

    def hear(self, worker: Worker, answer: Any) -> None:
        worker.events += len(answer.news)

    def begin_epoch(self) -> None:
        """All have met, or have just joined."""
        self.number += 1
        self.epoch = Epoch(f"0/{self.number}", self.epoch.units, self.epoch.ends)
        if self.number > self.epochs:
            return
        for worker in list(self.workers.values()):
            self.open(worker)
        for _ in range(CHURNED):
            self.later(self.random.uniform(0.1, 0.9) * INTERVALS * STEPS * STEP_S, self.churn)

    def open(self, worker: Worker) -> None:
        worker.trained = worker.applied = 0
        worker.segment = worker.collective % INTERVALS
        if not self.elastic:
            self.claim(worker)
            return

        def opened(done: Any) -> None:
            reached = next((last for first, last in done if not first), 0)
            worker.segment = min(bisect_right(self.epoch.ends, reached), INTERVALS - 1)
            self.claim(worker)

        self.send("coordinator", OpenEpoch(*self.about(worker), self.epoch, process=worker.process), opened)

    def claim(self, worker: Worker, *, wait: bool = False) -> None:
        if worker.gone:
            return
        about = self.epoch.key, worker.segment, worker.trained, worker.applied, worker.unit_s if worker.seq else 0.0
        opens = None if self.elastic else self.epoch
        request = LeaseRequest(
            *self.about(worker), *about, 0.01, 0.05, wait=wait, size=BATCH, opens=opens, process=worker.process
        )
        key = self.epoch.key
        self.send("coordinator", request, lambda grant: self.take(worker, grant, key, waited=wait))

    def take(self, worker: Worker, grant: Any, key: str, *, waited: bool) -> None:
        """Train what was granted, or meet the others if the sync interval is over."""
        if worker.gone or key != self.epoch.key:
            return
        if not isinstance(grant, LeaseGrant):
            raise RuntimeError(f"Worker {worker.number} was answered {grant} when it claimed units.")
        units = sum(last - first for first, last in grant.ranges)
        if units and not grant.void:
            self.later(units * worker.unit_s, lambda: self.trained(worker, units, final=grant.final))
        elif units or not (grant.over or waited):
            self.push(worker)
            self.claim(worker, wait=True)
        elif grant.over:
            self.meet(worker)

    def trained(self, worker: Worker, units: int, *, final: bool) -> None:
        if worker.gone:
            return
        worker.trained += units
        worker.steps += -(-units // BATCH)
        if final or worker.steps >= NSYNC:
            self.push(worker)
        self.claim(worker, wait=final)

    def push(self, worker: Worker) -> None:
        """Exchange what was trained since the last time."""
        if worker.applied == worker.trained:
            return
        worker.seq += 1

        def exchange(_: int) -> Exchange:
            about: dict[str, Any] = {"steps": worker.steps, "batch": float(BATCH), "process": worker.process}
            about |= {"epoch": self.epoch.key, "units": worker.trained}
            return Exchange(*self.about(worker), worker.seq, 0, True, True, (torch.zeros(SCALARS),), **about)

        self.both(exchange)
        worker.applied, worker.steps = worker.trained, 0

    def meet(self, worker: Worker) -> None:
        """A sync point: in a run without a collective."""
        if self.elastic:
            self.passed(worker)
            return
        worker.collective += 1
        report = SyncReport(moved=True, should_stop=False, grown=False, checkpoints=[], trained=True)
        about = worker.collective, "all_gather", f"sync point {worker.collective}", report
        self.send(
            "coordinator",
            Contribution(*self.about(worker), *about, process=worker.process),
            lambda answer: self.passed(worker, answer),
        )

    def passed(self, worker: Worker, answer: Any = None) -> None:
        if worker.gone:
            return
        if isinstance(answer, Failure):
            raise RuntimeError(f"Worker {worker.number} was answered {answer} at a sync point.")
        worker.segment += 1
        if worker.segment < INTERVALS:
            self.claim(worker)
        elif all(each.segment == INTERVALS for each in self.workers.values()):
            self.begin_epoch()

    def churn(self) -> None:
        """Kill a worker and replace it, or have one leave the run and another join."""
        there = [w for w in self.workers.values() if w.segment < INTERVALS]
        if not there:
            return
        worker = self.random.choice(there)
        worker.gone, reason = True, "" if self.elastic else "killed"
        if self.elastic:
            del self.workers[worker.number]
        leave = Leave(*self.about(worker), reason, process=worker.process, final=not self.elastic)
        self.both(lambda _: leave)
        self.enter(None if self.elastic else worker.number)

    # ------------------------------------------------------------------ all of it

    def run(self) -> Costs:
        """Train, until ``epochs`` are over or ``most_s`` seconds of CPU time have passed."""
        begun, ticked = time.process_time(), 0.0
        for number in range(self.size):
            self.enter(number)
            self.settle()
        while self.queue and self.number <= self.epochs and time.process_time() - begun < self.most_s:
            at, _, what = heapq.heappop(self.queue)
            while ticked + TICK_S <= at:
                self.now = ticked = ticked + TICK_S
                for name, server in self.servers.items():
                    before = time.thread_time_ns()
                    server.tick()
                    self.costs.ns[name, "tick"] += time.thread_time_ns() - before
                    self.costs.count[name, "tick"] += 1
                self.settle()
            self.now = at
            what()
            self.settle()
        for server in self.servers.values():
            server.close()
        if not self.queue:
            raise RuntimeError(f"With {self.size} workers nothing is left to do in epoch {self.number}.")
        return self.costs

    def settle(self) -> None:
        """Take the answers that have come."""
        while self.ready:
            taken, self.ready = self.ready, []
            for then, answer in taken:
                then(answer)


Figures = dict[tuple[str, str, str], dict[int, list[float]]]
"""Microseconds per message, of every repeat: by kind of job, server and kind of message; by number of workers."""


def measure(sizes: list[int], repeats: int, epochs: int, most_s: float) -> tuple[Figures, dict[tuple[str, int], float]]:
    """The figures, and the share of a core that the coordinator takes, by kind of job and number of workers."""
    figures: Figures = defaultdict(lambda: defaultdict(list))
    load: dict[tuple[str, int], float] = {}
    for repeat in range(repeats):
        for elastic in (False, True):
            for size in sizes:
                job, name = Job(size, elastic=elastic, epochs=epochs, most_s=most_s), "run" if elastic else "job"
                gc.collect()
                gc.freeze()  # what this program holds is not the servers'
                costs = job.run()
                gc.unfreeze()
                for (server, kind), us in costs.us().items():
                    figures[name, server, kind][size].append(us)
                if job.now:
                    spent = sum(ns for (server, _), ns in costs.ns.items() if server == "coordinator") / 1e9
                    load[name, size] = spent / job.now
                whole = "" if job.number > epochs else f"; stopped after {most_s:.0f} s in epoch {job.number}"
                CONSOLE.print(
                    f"  {repeat + 1}/{repeats}  {name}, {size:5} workers: {job.now:4.0f} s of training, "
                    f"{sum(costs.count.values()):7,} messages{whole}"
                )
    return figures, load


def rows(figures: Figures) -> Iterator[tuple[tuple[str, str, str], dict[int, list[float]]]]:
    """The figures in a fixed order."""
    kinds = [*dict.fromkeys(KINDS.values()), "tick"]
    yield from sorted(figures.items(), key=lambda item: (item[0][1], kinds.index(item[0][2]), item[0][0]))


def show(figures: Figures, load: dict[tuple[str, int], float], sizes: list[int]) -> bool:
    """Print the figures, and whether each grows as little as it should; returns whether all do."""
    table = Table(title="µs of CPU time per message: median (min-max)", title_justify="left")
    for column in ("server", "message", "of a", *(f"{size:,} workers" for size in sizes), "growth"):
        table.add_column(column, justify="left" if column in ("server", "message", "of a") else "right", no_wrap=True)
    good, lines = True, []
    for (name, server, kind), by_size in rows(figures):
        cells = [
            f"{statistics.median(us):,.0f} ({min(us):,.0f}-{max(us):,.0f})" if (us := by_size.get(size)) else "-"
            for size in sizes
        ]
        growth = ""
        if by_size.get(sizes[0]) and by_size.get(sizes[-1]):
            ratio = statistics.median(by_size[sizes[-1]]) / statistics.median(by_size[sizes[0]])
            growth = f"x {ratio:.1f}"
            if kind != "tick":  # a few times a second, however many workers there are
                good &= ratio <= GOAL
                verdict = "PASS" if ratio <= GOAL else "FAIL"
                lines.append(f"{verdict}  {server}, {kind} of a {name}: x {ratio:.2f}, at most x {GOAL:g}")
        table.add_row(server, kind, name, *cells, growth)
    CONSOLE.print(table)
    CONSOLE.print(f"from {sizes[0]:,} to {sizes[-1]:,} workers:")
    for line in lines:
        CONSOLE.print(f"  {line}")
    for name in ("job", "run"):
        shares = ", ".join(f"{100 * load[name, size]:.1f} % with {size:,}" for size in sizes if (name, size) in load)
        CONSOLE.print(f"coordinator of a {name}, of one core, with steps of {STEP_S:g} s: {shares}")
    return good


def draw(figures: Figures, sizes: list[int], path: Path) -> None:
    """Draw a panel per server and kind of job: the cost of each kind of message by the number of workers."""
    from lightning_asgd.report.picture_style import PAPER, SERIES, logarithmic, pyplot

    plt = pyplot()
    figure, axes = plt.subplots(1, 4, figsize=(15, 4.4), sharey=True, layout="constrained")
    kinds = list(dict.fromkeys(KINDS.values()))
    panels = [(server, name) for server in ("coordinator", "shard") for name in ("job", "run")]
    for panel, (server, name) in zip(axes, panels, strict=True):
        for kind in kinds:
            by_size = figures.get((name, server, kind), {})
            known = [size for size in sizes if by_size.get(size)]
            if known:
                us = [statistics.median(by_size[size]) for size in known]
                panel.plot(known, us, color=SERIES[kinds.index(kind)], marker="o", ms=4, lw=1.5, label=kind)
        panel.set(title=f"{server}, {'elastic run' if name == 'run' else 'job'}", xlabel="workers")
        panel.grid(visible=True, which="major", axis="y")
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.minorticks_off()
    logarithmic(axes[0])
    axes[0].set_ylabel("µs of CPU time per message", color=PAPER["ink"])
    axes[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    CONSOLE.print(f"picture: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), help="numbers of workers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2, help="epochs of a run (default %(default)s)")
    parser.add_argument("--most", type=float, default=600.0, metavar="S", help="seconds of CPU time of a run, at most")
    parser.add_argument("--picture", type=Path, help="draw the curves there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = sorted(args.workers)
    CONSOLE.print(f"[bold]scale[/]: {args.repeats} repeats (load {os.getloadavg()[0]:.1f})")
    figures, load = measure(sizes, args.repeats, args.epochs, args.most)
    good = show(figures, load, sizes)
    if args.picture:
        draw(figures, sizes, args.picture)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
