"""A run in virtual time: the servers' and the workers' real objects, in one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from lightning_asgd.algorithms.base import Payload, Run
from lightning_asgd.config import ExchangeConfig
from lightning_asgd.errors import ASGDError, ConfigurationError
from lightning_asgd.optim import share_posterior
from lightning_asgd.protocol import Leave
from lightning_asgd.server.service import Service
from lightning_asgd.simulation.clock import VirtualClock
from lightning_asgd.simulation.network import Network, Wires
from lightning_asgd.simulation.problems import Problem
from lightning_asgd.simulation.simulated_worker import Life, SimulatedWorker
from lightning_asgd.simulation.simulation_report import Point, Report, WorkerReport
from lightning_asgd.simulation.speeds import Constant, Speed
from lightning_asgd.validation import at_least, whole
from lightning_asgd.worker.connection import Connection
from lightning_asgd.worker.session_client import SessionClient

__all__ = ["Crash", "Simulation"]

_SESSION = "simulation"
_POINTS = 100  # of the reported loss


@dataclass(frozen=True)
class Crash:
    """A worker that ends at once. What it has sent before arrives.

    When worker 0 is gone the others get a WorkerLostError at the next sync point, as in a real run.

    Args:
        worker: its rank.
        time_s: when.
        detection_s: seconds until the servers learn of it.

    Raises:
        ConfigurationError: a value is out of range.
    """

    worker: int
    time_s: float
    detection_s: float = 0.1

    def __post_init__(self) -> None:
        whole("Crash(worker)", self.worker, 0)
        at_least("Crash(time_s)", self.time_s, 0, finite=True)
        at_least("Crash(detection_s)", self.detection_s, 0, finite=True)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What is to be simulated. The same settings give the same bits.

    Every worker takes ``steps`` steps per epoch. The session's start takes no time, and the first fetch no bytes.

    Args:
        problem: what the workers train.
        workers: number of workers.
        servers: number of servers.
        steps: optimizer steps per worker and epoch.
        epochs: number of epochs; each ends with a sync point.
        exchange: when and how to exchange: settings of :class:`~lightning_asgd.ASGDStrategy` by name (``nsync``,
            ``nfetch``, ``npush``, ``algorithm``, ``scale``, ``overlap``, ``max_offline_steps``).
        optimizer: makes a worker's own optimizer; None for ``SGD(lr=0.1)``.
        speed: how long steps take: of every worker, or one per worker.
        network: the links.
        exchange_s: seconds that training pauses when a reply is merged, in which the packing of the update
            is to be counted.
        epoch_s: seconds between an epoch's sync point and the next epoch's first batch, such as a validation's.
        crashes: workers that end before their time.
        evaluate_every: steps of all workers together between two evaluations of the servers' loss; None: 100 of them.
        seed: of all random numbers.

    Raises:
        ConfigurationError: a value is of the wrong type or out of range, or does not fit the algorithm.

    Example:
        >>> from lightning_asgd.simulation import Constant, Quadratic, Simulation
        >>> report = Simulation(problem=Quadratic(noise=0.0), workers=2, steps=20, speed=Constant(0.5)).run()
        >>> report.time_s, report.steps
        (10.0, 40)
    """

    problem: Problem
    workers: int = 2
    servers: int = 1
    steps: int = 100
    epochs: int = 1
    exchange: dict[str, Any] = field(default_factory=lambda: {"nsync": 10})
    optimizer: Callable[[list[Parameter]], Optimizer] | None = None
    speed: Speed | Sequence[Speed] = field(default_factory=lambda: Constant(1.0))
    network: Network = field(default_factory=Network)
    exchange_s: float = 0.0
    epoch_s: float = 0.0
    crashes: Sequence[Crash] = ()
    evaluate_every: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.problem, Problem):
            raise ConfigurationError(
                f"Simulation(problem={self.problem!r}). Expected a lightning_asgd.simulation.Problem, such as "
                "Quadratic()."
            )
        for name in ("workers", "servers", "steps", "epochs"):
            whole(name, getattr(self, name))
        whole("seed", self.seed, 0)
        if self.evaluate_every is not None:
            whole("evaluate_every", self.evaluate_every)
        at_least("exchange_s", self.exchange_s, 0, finite=True)
        at_least("epoch_s", self.epoch_s, 0, finite=True)
        for crash in self.crashes:
            if crash.worker >= self.workers:
                raise ConfigurationError(
                    f"{crash!r} names a worker that does not exist. Expected a rank below workers={self.workers}."
                )
        self._speeds()
        algorithm = self._config().algorithm
        if algorithm.payload not in (Payload.DELTA, Payload.GRADIENT, Payload.WEIGHTS):
            raise ConfigurationError(
                f"algorithm={algorithm!r} does not exchange weights every nsync steps. Expected one that does, such as "
                "ASGD(): the simulator supports no other."
            )
        self.network.links("workers", self.workers)
        self.network.links("servers", self.servers)

    def run(self) -> Report:
        """Simulate.

        Raises:
            ASGDError: what a worker of a real run would have raised; or the workers wait for each other forever.
            ConfigurationError: the algorithm does not suit such a run.
        """
        return _Running(self).run()

    def _speeds(self) -> list[Speed]:
        """One per worker."""
        speeds = [self.speed] * self.workers if isinstance(self.speed, Speed) else list(self.speed)
        if len(speeds) != self.workers or not all(isinstance(s, Speed) for s in speeds):
            raise ConfigurationError(
                f"speed={self.speed!r} does not fit workers={self.workers}. Expected a Constant, LogNormal or Trace, "
                "or a list with one of these per worker."
            )
        return speeds

    def _config(self) -> ExchangeConfig:
        known = {f.name for f in fields(ExchangeConfig)} - {"timeouts"} | {"nsync", "scale"}
        unknown = set(self.exchange) - known
        if unknown:
            raise ConfigurationError(
                f"exchange={self.exchange!r} has the unknown settings {sorted(unknown)}. Expected some of "
                f"{sorted(known)}."
            )
        return ExchangeConfig.create(**{"nsync": 10, **self.exchange})


class _Running:
    """A running simulation."""

    def __init__(self, plan: Simulation) -> None:
        self.plan = plan
        config, problem, speeds = plan._config(), plan.problem, plan._speeds()
        self.clock = VirtualClock()
        self.services = [Service(self.clock) for _ in range(plan.servers)]
        self.wires = Wires(self.clock, plan.network, plan.workers, [s.handle for s in self.services])
        make = plan.optimizer or (lambda parameters: SGD(parameters, lr=0.1))
        self.workers = [
            SimulatedWorker(
                SessionClient(Connection(self.wires.transport(rank), _SESSION, rank, plan.workers)),
                self.clock,
                problem,
                config,
                make,
                speeds[rank],
                plan.seed,
            )
            for rank in range(plan.workers)
        ]
        for rank, worker in enumerate(self.workers):
            share_posterior([worker.optimizer], rank, config.algorithm.chains(plan.workers))
        optimizers = tuple(w.optimizer for w in self.workers[:1])
        config.algorithm.check(Run(plan.workers, 1, config.npush, optimizers))
        self.losses: list[Point] = []
        self.steps = 0
        self.alive = plan.workers
        total = plan.workers * plan.steps * plan.epochs
        self.every = plan.evaluate_every or max(1, total // _POINTS)

    def run(self) -> Report:
        plan = self.plan
        self.evaluate()
        self.wires.begin()
        for worker in self.workers:
            life = worker.live(
                epochs=plan.epochs,
                steps=plan.steps,
                exchange_s=plan.exchange_s,
                epoch_s=plan.epoch_s,
                stepped=self.count,
            )
            self.clock.after(0.0, partial(self.go_on, worker, life))
        for crash in plan.crashes:
            self.clock.at(crash.time_s, partial(self.crash, crash))
        self.clock.run(lambda: self.alive > 0)
        self.check_that_all_have_ended()
        self.evaluate()
        return self.report()

    # ------------------------------------------------------------------ what happens

    def go_on(self, worker: SimulatedWorker, life: Life) -> None:
        """Run a worker until it has to wait."""
        while not worker.crashed:
            wish = next(life, None)
            if wish is None:
                worker.ended_s = self.clock.now
                self.alive -= 1
                return
            if isinstance(wish, float):
                if wish > 0:
                    self.clock.after(wish, partial(self.go_on, worker, life))
                    return
            elif not all(future.done() for future in wish):
                self.wait(worker, life, wish)
                return

    def wait(self, worker: SimulatedWorker, life: Life, futures: list[Future[Any]]) -> None:
        """Resume a worker once all futures are done."""
        for future in futures:
            if not future.done():
                future.add_done_callback(lambda _: self.clock.after(0.0, partial(self.wait, worker, life, futures)))
                return
        self.go_on(worker, life)

    def count(self) -> None:
        """Note that a worker has taken a step."""
        self.steps += 1
        if self.steps % self.every == 0:
            self.evaluate()

    def crash(self, crash: Crash) -> None:
        """End a worker; the servers learn of it later."""
        worker = self.workers[crash.worker]
        if worker.ended_s is not None:
            return
        worker.crashed, worker.ended_s = True, self.clock.now
        self.alive -= 1
        leave = Leave(_SESSION, crash.worker, f"it crashed after {crash.time_s:g} s")
        for service in self.services:
            self.clock.after(crash.detection_s, partial(service.handle, leave))

    # ------------------------------------------------------------------ results

    def weights(self) -> tuple[Tensor, list[int]]:
        """The servers' weights and versions."""
        shards = [service.session.shards[0] for service in self.services if service.session is not None]
        return torch.cat([shard.weights[0] for shard in shards]), [shard.version for shard in shards]

    def evaluate(self) -> None:
        """Note the loss at the servers' weights."""
        now = self.clock.now
        if self.losses and (self.losses[-1].time_s, self.losses[-1].steps) == (now, self.steps):
            self.losses.pop()
        self.losses.append(Point(now, self.steps, self.plan.problem.loss(self.weights()[0])))

    def check_that_all_have_ended(self) -> None:
        """Raise an error if workers wait forever."""
        waiting = [w.rank for w in self.workers if w.ended_s is None]
        if waiting:
            raise ASGDError(
                f"The simulation is stuck after {self.clock.now:g} s: workers {waiting} wait forever. Expected the "
                f"algorithm to release their replies: check which replies it blocks."
            )

    def report(self) -> Report:
        weights, versions = self.weights()
        wires = self.wires
        survivors = [w for w in self.workers if not w.crashed]
        ends = zip(*(w.epochs_s for w in survivors), strict=True)
        return Report(
            time_s=max(w.ended_s or 0.0 for w in self.workers),
            epochs_s=tuple(max(times) for times in ends),
            workers=tuple(
                WorkerReport(
                    worker=w.rank,
                    crashed=w.crashed,
                    time_s=w.ended_s or 0.0,
                    steps=w.stats.steps,
                    exchanges=w.stats.exchanges,
                    pushes=w.stats.pushes,
                    deferred=w.stats.deferred,
                    wait_s=w.stats.wait_s,
                    sync_wait_s=w.stats.sync_wait_s,
                    meeting_s=w.meeting_s,
                    staleness_mean=w.stats.staleness_mean,
                    staleness_max=w.stats.staleness_max,
                    staleness_histogram=w.stats.staleness_histogram,
                    bytes_sent=wires.to_network[w.rank].nbytes,
                    bytes_received=wires.to_worker[w.rank].nbytes,
                )
                for w in self.workers
            ),
            losses=tuple(self.losses),
            weights=weights,
            versions=tuple(versions),
            server_bytes=tuple((i.nbytes, o.nbytes) for i, o in zip(wires.to_server, wires.from_server, strict=True)),
        )
