"""A job or an elastic run of simulated workers with the real service, in virtual time: what :mod:`scale` measures."""

from __future__ import annotations

import gc
import heapq
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch.futures import Future

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.protocol import (
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
from lightning_asgd.core.server.service import Service

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
    """Nanoseconds of CPU time and messages, by server and kind.

    Python collects garbage now and then, in the middle of whatever message. Within the few messages of a rare kind that
    would be luck, so it is a kind of its own: ``"garbage"``, per message of any kind.
    """

    ns: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    count: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    collected: int = 0
    begun: int = 0

    def add(self, server: str, kind: str, handle: Callable[[], Any]) -> Any:
        """What a server answers, and what that costs."""
        collected, begun = self.collected, time.thread_time_ns()
        answer = handle()
        took, collected = time.thread_time_ns() - begun, self.collected - collected
        self.ns[server, kind] += took - collected
        self.count[server, kind] += 1
        self.ns[server, "garbage"] += collected
        self.count[server, "garbage"] += 1
        return answer

    def note_collection(self, phase: str, _: Any) -> None:
        """Python begins or ends to collect garbage."""
        if phase == "start":
            self.begun = time.thread_time_ns()
        else:
            self.collected += time.thread_time_ns() - self.begun

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
        kind = KINDS.get(type(message), "other")
        answer = self.costs.add(server, kind, lambda: self.servers[server].handle(message))
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
        about = worker.collective, "sync point", f"{worker.collective}", report
        message = Contribution(*self.about(worker), *about, reduction="report", process=worker.process)
        self.send("coordinator", message, lambda answer: self.passed(worker, answer))

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
        gc.callbacks.append(self.costs.note_collection)
        for number in range(self.size):
            self.enter(number)
            self.settle()
        while self.queue and self.number <= self.epochs and time.process_time() - begun < self.most_s:
            at, _, what = heapq.heappop(self.queue)
            while ticked + TICK_S <= at:
                self.now = ticked = ticked + TICK_S
                for name, server in self.servers.items():
                    self.costs.add(name, "tick", server.tick)
                self.settle()
            self.now = at
            what()
            self.settle()
        gc.callbacks.remove(self.costs.note_collection)
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
