"""A run in virtual time: the servers' and the workers' real objects, in one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from lightning_asgd.compression.codes import Auto
from lightning_asgd.core.algorithms.base import Payload, Run
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError
from lightning_asgd.core.foundation.settings import refuse
from lightning_asgd.core.foundation.validation import at_least, whole
from lightning_asgd.core.leases.random_numbers import same_random_numbers
from lightning_asgd.core.protocol import Leave, Policy
from lightning_asgd.core.server.service import Service
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.gain import Gain
from lightning_asgd.sampling.optim import share_posterior
from lightning_asgd.simulation.network import Network, VirtualClock, Wires
from lightning_asgd.simulation.problems import Problem
from lightning_asgd.simulation.report import Point, Report, WorkerReport
from lightning_asgd.simulation.speeds import Constant, Crash, LateWorker, Speed
from lightning_asgd.simulation.worker import LeasedData, LeasedWorker, Life, NamedWeights, SimulatedWorker, Work

_SESSION = "simulation"
_EXCHANGE = ("nsync", "algorithm", "compression", "advanced")
_POINTS = 100  # of the reported loss
_TICK_S = 0.25  # as server processes have it
_BEATS = 5  # heartbeats of a worker within silence_s


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What is to be simulated. The same settings give the same bits.

    Random numbers from the global generators of torch, Python and NumPy begin at ``seed``, too; after a run these are
    as before. An algorithm with fragments, such as ``StreamingDiLoCo(parts=4)``, exchanges the problem's tensors in
    turns, as a real worker does. The optimizer sees the weights as one flat vector.

    Every worker takes ``steps`` steps per epoch; or the samples of an epoch are leased (``data``), and workers send
    heartbeats, as in a real job. The session's start takes no time, and the first fetch no bytes.

    Args:
        problem: what the workers train.
        workers: number of workers, at the start.
        servers: number of servers. The first one coordinates.
        steps: optimizer steps per worker and epoch, if data are not leased.
        epochs: number of epochs; each ends with a sync point.
        exchange: when and how to exchange: arguments of :class:`~lightning_asgd.ASGDStrategy` by name (``nsync``,
            ``algorithm``, ``compression``, ``advanced``).
        optimizer: makes a worker's own optimizer; None for ``SGD(lr=0.1)``.
        speed: how long steps take: of every worker, or one per worker.
        network: the links.
        exchange_s: seconds that training pauses when a reply is merged, in which the packing of the update
            is to be counted. Each fragment's reply counts.
        epoch_s: seconds between an epoch's sync point and the next epoch's first batch, such as a validation's.
        crashes: workers that end before their time.
        data: samples that workers lease, each trained by one of them per epoch; None for ``steps`` per worker.
        elastic: whether this is an elastic run: workers do not meet, and may join. Needs ``data``.
        late_workers: workers that join an elastic run.
        silence_s: seconds without heartbeats after which a worker is excluded, where ``data`` are leased.
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
    exchange: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[list[Parameter]], Optimizer] | None = None
    speed: Speed | Sequence[Speed] = field(default_factory=lambda: Constant(1.0))
    network: Network = field(default_factory=Network)
    exchange_s: float = 0.0
    epoch_s: float = 0.0
    crashes: Sequence[Crash] = ()
    data: LeasedData | None = None
    elastic: bool = False
    late_workers: Sequence[LateWorker] = ()
    silence_s: float = 10.0
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
        at_least("silence_s", self.silence_s, 0, above=True, finite=True)
        self._check_faults()
        self._speeds()
        config = self._config()
        algorithm = config.algorithm
        if isinstance(config.compression, Auto):
            raise ConfigurationError(
                f"exchange={self.exchange!r} asks for the fastest codec, but a simulation has no real links to "
                "measure. Expected compression=None, or a codec by its name, such as compression='int8'."
            )
        if algorithm.payload not in (Payload.DELTA, Payload.GRADIENT, Payload.WEIGHTS):
            raise ConfigurationError(
                f"algorithm={algorithm!r} does not exchange weights every nsync steps. Expected one that does, such as "
                "ASGD(): the simulator supports no other."
            )
        if algorithm.lockstep and self.data is not None and not self.elastic:
            raise ConfigurationError(
                f"data={self.data!r} and algorithm={algorithm!r}, whose workers wait for each other, were given. "
                "Expected data=None: where they wait, each trains a fixed number of steps; or elastic=True."
            )
        self.network.links("workers", self.workers + len(self.late_workers))
        self.network.links("servers", self.servers)

    def _check_faults(self) -> None:
        for crash in self.crashes:
            if crash.worker >= self.workers + len(self.late_workers):
                raise ConfigurationError(
                    f"{crash!r} names a worker that does not exist. Expected a rank below "
                    f"workers={self.workers} plus {len(self.late_workers)} late ones."
                )
            joins_at = [0.0] * self.workers + sorted(late.time_s for late in self.late_workers)
            if crash.worker >= self.workers and crash.time_s <= joins_at[crash.worker]:
                raise ConfigurationError(
                    f"{crash!r} is before worker {crash.worker} joins. Expected time_s > {joins_at[crash.worker]:g}."
                )
            if crash.detection_s is None and self.data is None:
                raise ConfigurationError(
                    f"{crash!r} is to be noticed by missing heartbeats, which workers send only if data are leased. "
                    "Expected detection_s in seconds, or data=LeasedData(...)."
                )
        if self.elastic and self.data is None:
            raise ConfigurationError("elastic=True was given without data. Expected data=LeasedData(...), too.")
        if self.late_workers and not self.elastic:
            raise ConfigurationError(
                f"late_workers={self.late_workers!r} were given without elastic=True. Expected it: no worker can join "
                "a job."
            )

    def run(self) -> Report:
        """Simulate.

        Raises:
            ASGDError: what a worker of a real run would have raised; or the workers wait for each other forever.
            ConfigurationError: the algorithm does not suit such a run.
        """
        with same_random_numbers(self.seed % 2**63):  # dropout draws from a global generator, as may a user's batches
            return Running(self).run()

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
        for name in set(self.exchange) - set(_EXCHANGE):
            refuse(name, self.exchange[name], _EXCHANGE)
        config = ExchangeConfig.create(**self.exchange)
        if config.restarted:
            raise ConfigurationError(
                "exchange={'nsync': 'restarted'}. Expected a number of steps, such as that of the formula."
            )
        return config


class Running:
    """A running simulation."""

    def __init__(self, plan: Simulation) -> None:
        self.plan = plan
        self.config = config = plan._config()
        self.clock = VirtualClock()
        self.services = [Service(self.clock, _SESSION if plan.elastic else "") for _ in range(plan.servers)]
        handlers = [partial(self.handle, server) for server in range(plan.servers)]
        self.wires = Wires(self.clock, plan.network, plan.workers + len(plan.late_workers), handlers)
        self.named = NamedWeights(plan.problem, config.algorithm.fragments, plan.servers)  # the servers'
        self.work = Work(plan.epochs, plan.steps, plan.exchange_s, plan.epoch_s, self.count)
        self.workers: list[SimulatedWorker] = []
        for speed in plan._speeds():
            self.enter(speed)
        optimizers = tuple(w.optimizer for w in self.workers[:1])
        config.algorithm.check(Run(plan.workers, 1, config.npush, optimizers))
        self.losses: list[Point] = []
        self.steps = 0
        self.alive = plan.workers + len(plan.late_workers)
        self.moves_s = 0.0  # until when workers move, as far as is known
        total = plan.workers * plan.steps * plan.epochs
        if plan.data is not None:
            total = plan.data.samples * plan.epochs // plan.data.batch_size
        self.every = plan.evaluate_every or max(1, total // _POINTS)

    def handle(self, server: int, message: Any) -> Any:
        """A server handles a message."""
        return self.services[server].handle(message)

    def enter(self, speed: Speed) -> SimulatedWorker:
        """Have a worker join."""
        plan, index = self.plan, len(self.workers)
        kind, policy = (SimulatedWorker, None) if plan.data is None else (LeasedWorker, self.policy)
        connection = Connection(
            self.wires.transport(index), _SESSION, 0 if plan.elastic else index, 0 if plan.elastic else plan.workers
        )
        make = plan.optimizer or (lambda parameters: SGD(parameters, lr=0.1))
        about = self.clock, plan.problem, self.config, make, speed, plan.seed
        worker = kind(SessionClient(connection, policy=policy), *about)
        if isinstance(worker, LeasedWorker) and plan.data is not None:
            worker.data = plan.data
            worker.announce()
        if self.config.gain:
            Gain(self.peers).watch([worker.optimizer])
        share_posterior([worker.optimizer], index, self.config.algorithm.chains(plan.workers))
        self.workers.append(worker)
        return worker

    def peers(self) -> int:
        """How many workers take part now."""
        return sum(not worker.crashed and worker.ended_s is None for worker in self.workers)

    @property
    def policy(self) -> Policy:
        """What servers do about workers that are lost: an elastic run continues without its first worker."""
        return Policy(self.plan.silence_s, another_chief=self.plan.elastic)

    def run(self) -> Report:
        """Run to the end."""
        plan = self.plan
        self.evaluate()
        self.wires.begin()
        for worker in self.workers:
            self.begin(worker)
        for crash in plan.crashes:
            self.clock.at(crash.time_s, partial(self.crash, crash))
        for late in sorted(plan.late_workers, key=lambda each: each.time_s):
            self.clock.at(late.time_s, partial(self.arrive, late))
        if plan.data is not None or self.config.algorithm.timed:
            self.clock.after(_TICK_S, self.tick)
        self.clock.run(lambda: self.alive > 0)
        self.check_that_all_have_ended()
        self.evaluate()
        return self.report()

    # ------------------------------------------------------------------ what happens

    def begin(self, worker: SimulatedWorker) -> None:
        """Have a worker train, and send heartbeats if its data are leased."""
        self.clock.after(0.0, partial(self.go_on, worker, worker.live(self.work)))
        if isinstance(worker, LeasedWorker):
            period_s = self.plan.silence_s / _BEATS
            part = self.workers.index(worker) / len(self.workers)  # not all at the same time
            self.clock.after(part * period_s, partial(self.beat, worker, period_s))

    def arrive(self, late: LateWorker) -> None:
        """Have a worker join the others in their present epoch."""
        numbers = [w.number for w in self.workers if isinstance(w, LeasedWorker) and w.ended_s is None]
        if not numbers:
            self.alive -= 1  # the run is over
            return
        with self.wires.at_once():
            worker = self.enter(late.speed or self.plan._speeds()[0])
        worker.first = max(numbers)
        self.begin(worker)

    def tick(self) -> None:
        """Do what server processes do a few times a second, while workers move or may be waited for."""
        for service in self.services:
            service.tick()
        if self.clock.now - self.moves_s <= self.patience_s:
            self.clock.after(_TICK_S, self.tick)

    def beat(self, worker: LeasedWorker, period_s: float) -> None:
        """Have a worker send heartbeats."""
        if worker.ended_s is None and self.clock.now - self.moves_s <= self.patience_s:
            worker.beat()
            self.clock.after(period_s, partial(self.beat, worker, period_s))

    @property
    def patience_s(self) -> float:
        """Seconds without a move of any worker after which the simulation is stuck."""
        return max(self.config.timeouts.collective_s, 10 * self.plan.silence_s)

    def go_on(self, worker: SimulatedWorker, life: Life) -> None:
        """Run a worker until it has to wait."""
        self.moves_s = max(self.moves_s, self.clock.now)
        while not worker.crashed:
            wish = next(life, None)
            if wish is None:
                worker.ended_s = self.clock.now
                self.alive -= 1
                if isinstance(worker, LeasedWorker):
                    worker.leave()
                return
            if isinstance(wish, float):
                if wish > 0:
                    self.moves_s = max(self.moves_s, self.clock.now + wish)
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
        if crash.worker >= len(self.workers):
            return  # it has not joined yet
        worker = self.workers[crash.worker]
        if worker.ended_s is not None:
            return
        worker.crashed, worker.ended_s = True, self.clock.now
        self.alive -= 1
        if crash.detection_s is None:
            return
        leave = Leave(_SESSION, worker.rank, f"it crashed after {crash.time_s:g} s")
        for service in self.services:
            self.clock.after(crash.detection_s, partial(service.handle, leave))

    # ------------------------------------------------------------------ results

    def weights(self) -> tuple[Tensor, list[int]]:
        """The servers' weights and versions."""
        held = [service.session.shards for service in self.services if service.session is not None]
        for number in range(len(self.named.fragments)):
            self.named.take(number, [shards[number].weights[0] for shards in held])
        return self.named.flat.detach().clone(), [sum(each.version for each in shards.values()) for shards in held]

    def evaluate(self) -> None:
        """Note the loss at the servers' weights."""
        now = self.clock.now
        if self.losses and (self.losses[-1].time_s, self.losses[-1].steps) == (now, self.steps):
            self.losses.pop()
        self.losses.append(Point(now, self.steps, self.plan.problem.loss(self.weights()[0])))

    def check_that_all_have_ended(self) -> None:
        """Raise an error if workers wait forever."""
        waiting = [index for index, w in enumerate(self.workers) if w.ended_s is None]
        if waiting:
            raise ASGDError(
                f"The simulation is stuck after {self.clock.now:g} s: workers {waiting} wait forever. Expected the "
                f"algorithm to release their replies: check which replies it blocks."
            )

    def report(self) -> Report:
        """What was found out."""
        weights, versions = self.weights()
        wires = self.wires
        survivors = [w for w in self.workers if not w.crashed]
        ends: dict[int, float] = {}
        for worker in survivors:
            for number, time_s in enumerate(worker.epochs_s, worker.first):
                ends[number] = max(time_s, ends.get(number, 0.0))
        return Report(
            time_s=max(w.ended_s or 0.0 for w in self.workers),
            epochs_s=tuple(ends[number] for number in sorted(ends)),
            workers=tuple(
                WorkerReport(
                    worker=index,
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
                    bytes_sent=wires.to_network[index].nbytes,
                    bytes_received=wires.to_worker[index].nbytes,
                    lease_wait_s=w.lease_wait_s,
                )
                for index, w in enumerate(self.workers)
            ),
            losses=tuple(self.losses),
            weights=weights,
            versions=tuple(versions),
            server_bytes=tuple((i.nbytes, o.nbytes) for i, o in zip(wires.to_server, wires.from_server, strict=True)),
            server_work_s=tuple(wires.worked_s),
        )
