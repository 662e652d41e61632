"""A simulated worker: the real exchanger, replica and optimizer, and the order in which Lightning's hooks call them.

One whose samples are leased has the real client of leases, which it calls in the order of a training loop.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError, error_from
from lightning_asgd.core.foundation.layout import build_layout
from lightning_asgd.core.foundation.numerics import is_finite
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.foundation.validation import whole
from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.leases.plan import Plan
from lightning_asgd.core.protocol.collective import Contribution, JointReport, SyncReport
from lightning_asgd.core.protocol.lease import Epoch
from lightning_asgd.core.protocol.session import BOOTSTRAPPED, Failure, Heartbeat, HeartbeatReply, Leave
from lightning_asgd.core.worker.connection import COORDINATOR
from lightning_asgd.core.worker.exchanger import Exchanger
from lightning_asgd.core.worker.replica import Replica
from lightning_asgd.core.worker.replica_kinds import replica_for
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.setup import fragments_of
from lightning_asgd.core.worker.shard_client import ShardClient
from lightning_asgd.core.worker.synchronizer import Training, run
from lightning_asgd.simulation.network import VirtualClock
from lightning_asgd.simulation.problems import Problem
from lightning_asgd.simulation.speeds import Speed

Life = Generator["float | list[Future[Any]]", None, Any]
"""What a worker does: it stops for a number of seconds, or until these futures are done."""


@dataclass(frozen=True)
class Work:
    """What workers do in a simulation."""

    epochs: int
    steps: int  # of a worker and epoch, where data are not leased
    exchange_s: float  # seconds that training pauses when a reply is merged, each fragment's by itself
    epoch_s: float  # seconds between the end of an epoch and the beginning of the next
    stepped: Callable[[], None]  # called after every step


class NamedWeights:
    """A problem's flat weights, seen as named tensors, which are exchanged in one fragment or several.

    Args:
        problem: whose first weights they are.
        number: of fragments that the algorithm wants.
        num_servers: over which each fragment is laid out.

    Attributes:
        flat: the weights.
        layout: of all of them.
        fragments: the layout of each fragment, as a real worker makes it.
    """

    def __init__(self, problem: Problem, number: int, num_servers: int) -> None:
        self.flat = Parameter(problem.start())
        self._shapes = problem.shapes() or _pieces(self.flat.numel(), number, num_servers)
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        if sum(sizes) != self.flat.numel():
            raise ConfigurationError(
                f"{type(problem).__name__}.shapes() has {sum(sizes)} scalars, but start() has {self.flat.numel()}. "
                "Expected the shapes of all weights, in their order: correct one of the two."
            )
        ends = list(itertools.accumulate(sizes))
        self._places = {name: slice(end - n, end) for name, n, end in zip(self._shapes, sizes, ends, strict=True)}
        named = {name: self[name] for name in self._shapes}
        self.layout = build_layout(named.items(), num_servers)
        self.fragments = fragments_of(named, number, num_servers)

    def __getitem__(self, name: str) -> Tensor:
        """A tensor, whose values and gradient are parts of the flat ones. An optimizer may have replaced these."""
        place, shape = self._places[name], self._shapes[name]
        tensor = self.flat.detach()[place].view(shape)
        if self.flat.grad is not None:
            tensor.grad = self.flat.grad[place].reshape(shape)
        return tensor

    def take(self, number: int, shards: Sequence[Tensor]) -> None:
        """Take a fragment's values from its shards, one flat tensor per server."""
        layout = self.fragments[number]
        for piece in layout.pieces():
            values = shards[piece.server][piece.offset : piece.offset + piece.length]
            self[layout.tensors[piece.tensor].name].view(-1)[piece.start : piece.start + piece.length].copy_(values)


def _pieces(numel: int, number: int, num_servers: int) -> Mapping[str, tuple[int, ...]]:
    """Tensors of equal sizes for weights that are one tensor, since a fragment holds whole ones."""
    if number == 1:
        return {"weights": (numel,)}
    if numel < number * num_servers:
        raise ConfigurationError(
            f"The algorithm exchanges the weights in parts={number}, but the problem has {numel} of them for "
            f"{num_servers} servers. Expected at least one weight per part and server: choose a larger problem, or "
            "fewer parts or servers."
        )
    return {f"weights.{k}": ((k + 1) * numel // number - k * numel // number,) for k in range(number)}


class SimulatedWorker:
    """One worker, which exists in virtual time.

    Args:
        client: not yet joined.
        clock: virtual time.
        problem: the problem that it trains on.
        config: when to exchange.
        optimizer: makes its optimizer.
        speed: of its steps.
        seed: for its random numbers; other workers draw others from the same.

    Attributes:
        rank: its global rank; in an elastic run its number.
        weights: its own, flat.
        exchanger: the same object as in a real worker.
        crashed: whether it has ended before its time; set from outside.
        ended_s: when it ended, None before; set from outside.
        epochs_s: when its epochs' sync points were over.
        meeting_s: seconds in which it waited for other workers at sync points.
    """

    def __init__(
        self,
        client: SessionClient,
        clock: VirtualClock,
        problem: Problem,
        config: ExchangeConfig,
        optimizer: Callable[[list[Parameter]], Optimizer],
        speed: Speed,
        seed: int,
    ) -> None:
        self.crashed = False
        self.ended_s: float | None = None
        self.epochs_s: list[float] = []
        self.meeting_s = 0.0
        self._named = NamedWeights(problem, config.algorithm.fragments, client.connection.transport.num_servers)
        self.weights = self._named.flat
        self.optimizer = optimizer([self.weights])
        self._client = client
        brings = self._enter()
        self.rank = client.connection.worker
        self._clock = clock
        self._problem = problem
        self._speed = speed
        self._meetings = 0
        chance = random.Random(f"{seed} {self.rank}")
        self._generator = torch.Generator().manual_seed(chance.getrandbits(62))
        self._chance = random.Random(chance.getrandbits(62))
        parts = [self._fill(config, number, brings=brings) for number in range(len(self._named.fragments))]
        self.exchanger = Exchanger(self._named.layout, parts, config, self._training(), clock=clock)
        run(self.exchanger.fetch())
        self.exchanger.stats = ExchangeStats()

    @property
    def stats(self) -> ExchangeStats:
        """What its exchanger counts."""
        return self.exchanger.stats

    first = 0
    """Number of its first epoch."""
    lease_wait_s = 0.0
    """Seconds in which it waited for leases."""

    def _enter(self) -> bool:
        """Join; returns whether this worker brings the first weights."""
        self._client.join()
        return self._client.connection.worker == 0

    def _fill(self, config: ExchangeConfig, number: int, *, brings: bool) -> tuple[ShardClient, Replica]:
        """Allocate a fragment's shards, and fill them if this worker brings the weights."""
        layout, algorithm = self._named.fragments[number], config.algorithm
        by_value = [None] * layout.num_servers
        replica = replica_for(algorithm, layout, [(self._named, spec.name) for spec in layout.tensors], by_value)
        shards = ShardClient(self._client, number)
        first = replica.weights() if brings else None
        shards.initialise(layout, algorithm, by_value, first, compression=config.compression)
        return shards, replica

    def _training(self) -> Training:
        """What exchanges need of the training."""
        return Training(self._heal, self._lr)

    def live(self, work: Work) -> Life:
        """Train all epochs."""
        for number in range(self.first, work.epochs):
            yield from self._epoch(number, work)
            yield from self._sync_point(f"epoch {number}")
            self.epochs_s.append(self._clock.now)
            yield float(work.epoch_s)

    def _epoch(self, number: int, work: Work) -> Life:
        """Train one epoch's steps."""
        yield from self.exchanger.begin()
        for _ in range(work.steps):
            yield from self._train(work)

    def _train(self, work: Work, samples: Sequence[int] | None = None) -> Life:
        """Exchange if that is due, and take a step with some samples, or with a batch of the worker's own."""
        begun = self.stats.exchanges
        yield from self.exchanger.advance()
        if work.exchange_s and self.stats.exchanges > begun:
            yield float(work.exchange_s) * min(self.stats.exchanges - begun, len(self.exchanger.channels))
        yield float(self._speed.seconds(self.stats.steps, self._chance))
        weights = self.weights
        about = weights.detach(), self.rank, self._generator
        _, gradient = self._problem.gradient(*about) if samples is None else self._problem.gradient_of(samples, *about)
        weights.grad = gradient
        self.optimizer.step()
        self.exchanger.count_step()
        work.stepped()

    def _sync_point(self, name: str) -> Life:
        """What the strategy does there."""
        yield from self.exchanger.flush()
        moved = yield from self._meet(name, self.exchanger.moved)
        if any(moved.values()):
            yield from self.exchanger.fetch(park=True)
            yield from self._meet(f"{name}: all have the weights")
        self._problem.synchronise(moved)

    def _meet(self, name: str, payload: Any = None) -> Any:
        """Wait for the other workers; returns what each of the living has brought, by rank."""
        sender, seq = self._client.connection.sender, self._next_meeting()
        message = Contribution(*sender, seq, "all_gather", name, payload, timeout_s=float("inf"))
        return (yield from self._contribute(message))

    def _next_meeting(self) -> int:
        self._meetings += 1
        return self._meetings

    def _contribute(self, message: Contribution) -> Any:
        """Take part in a collective, and wait for the others."""
        since = self._clock.now
        future = self._client.connection.transport.call(COORDINATOR, message, message.timeout_s)
        yield [future]
        self.meeting_s += self._clock.now - since
        value = future.value()
        if isinstance(value, Failure):
            raise error_from(value.error, value.message)
        return value

    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0].get("lr", 0.0))

    def _heal(self) -> None:
        """Drop optimizer state that is not finite, as the strategy does after a rejected update."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and not is_finite(value):
                    value.zero_()


@dataclass(frozen=True)
class LeasedData:
    """Samples that all workers share in every epoch: each is leased to one of them.

    Args:
        samples: of an epoch.
        batch_size: samples of a worker's optimizer step.

    Raises:
        ConfigurationError: a value is no whole number of at least 1.
    """

    samples: int
    batch_size: int = 32

    def __post_init__(self) -> None:
        whole("LeasedData(samples)", self.samples)
        whole("LeasedData(batch_size)", self.batch_size)

    def plan(self, session: str, number: int) -> Plan:
        """An epoch, whose samples come in the order of their numbers."""
        epoch = Epoch(f"{session}/{number}", self.samples, (self.samples,), step=self.batch_size)
        return Plan(epoch, range(self.samples), self.batch_size)


class VirtualLeases(DataLeases):
    """A worker's leases in virtual time: where the client would block it yields the future that it waits for."""

    def find_more(self, acknowledged: Callable[[], int]) -> Life:
        """As :meth:`more`."""
        self._note(acknowledged())
        if not self._loading and not self._waiting:
            self._ask_early()
            if self._asked is not None:
                since = self._clock()
                yield [self._asked.future]
                self.granted_wait_s += self._clock() - since
        return self.more(acknowledged())

    def await_others(self, acknowledged: Callable[[], int]) -> Life:
        """As :meth:`wait`."""
        self._note(acknowledged())
        asked, since = self._ask(wait=True), self._clock()
        yield [asked.future]
        self.others_wait_s += self._clock() - since
        return self._has_waited(more=self._take(asked))

    def revoke(self) -> None:
        """Raise an error: the simulator's workers do not rejoin."""
        worker = self._client().connection.worker
        raise ASGDError(
            f"Worker {worker} was excluded after {self._clock():g} s, because the servers received its heartbeats too "
            "late. Expected servers that keep up with their messages: simulate fewer workers, more servers, longer "
            "steps or a larger silence_s."
        )


class LeasedWorker(SimulatedWorker):
    """One worker of a job or an elastic run, in virtual time.

    Attributes:
        data: what is trained; set from outside, as is what follows.
        first: number of its first epoch.
        number: number of its present epoch.
    """

    data: LeasedData
    first = number = 0
    _heard = 0  # events

    def _training(self) -> Training:
        self.leases = VirtualLeases(lambda: self._client, timeout_s=0.0, rejoin=self._excluded, clock=self._clock)
        return Training(self._heal, self._lr, self.leases)

    def _excluded(self) -> None:
        self.leases.revoke()

    @property
    def lease_wait_s(self) -> float:  # type: ignore[override]
        """Seconds in which it waited for leases, and for the others to train theirs."""
        return self.leases.granted_wait_s + self.leases.others_wait_s

    @property
    def _elastic(self) -> bool:
        return self._client.connection.world_size == 0

    def _enter(self) -> bool:
        if not self._elastic:
            return super()._enter()
        return self._client.attach("a simulated worker").bootstraps

    def announce(self) -> None:
        """Let others join the elastic run, which has weights now."""
        if self._elastic and BOOTSTRAPPED not in self._client.metadata:
            self._client.note(BOOTSTRAPPED, True)

    # ------------------------------------------------------------------ training

    def _epoch(self, number: int, work: Work) -> Life:
        """Train what is granted, until all of the epoch is trained."""
        leases, self.number = self.leases, number
        leases.batch = self.data.batch_size
        leases.open(self.data.plan(self._client.connection.session, number))
        yield from self.exchanger.begin()
        while (yield from self._has_more()):
            samples = leases.take()
            leases.begin_batch()
            yield from self._train(work, samples)
            if not leases.end_batch(self.stats.steps) and self.exchanger.moved:
                yield from self.exchanger.fetch()  # its update does not count

    def _has_more(self) -> Life:
        leases, exchanger = self.leases, self.exchanger
        if (yield from leases.find_more(self._acknowledged)):
            return True
        with leases.flushing():
            yield from exchanger.flush()
        if (yield from leases.await_others(self._acknowledged)):
            yield from exchanger.begin()
            return True
        return False

    def _acknowledged(self) -> int:
        return self.stats.steps - self.exchanger.unacknowledged

    def _sync_point(self, name: str) -> Life:
        """What :func:`synchronize` does; in an elastic run workers take the weights without meeting."""
        exchanger = self.exchanger
        yield from exchanger.flush()
        mine = SyncReport(exchanger.moved, should_stop=False, grown=False, checkpoints=None, trained=True)
        if self._elastic or (mine.moved and exchanger.final_once_pushed):
            yield from exchanger.fetch(park=True)
            mine = replace(mine, versions=tuple(exchanger.versions))
        if self._elastic:
            return
        met: JointReport = yield from self._reduced("sync point", name, mine, "report")
        if met.versions is None and met.moved:
            yield from exchanger.fetch(park=True)
            yield from self._reduced("barrier", f"{name}: all have the weights", False, "any")
        elif met.versions is not None and met.versions != mine.versions:
            yield from exchanger.fetch(park=True)
        self._problem.synchronise(met.workers)

    def _reduced(self, kind: str, name: str, payload: Any, how: str) -> Any:
        sender, seq = self._client.connection.sender, self._next_meeting()
        message = Contribution(*sender, seq, kind, name, payload, timeout_s=float("inf"), reduction=how)
        return (yield from self._contribute(message)).value

    # ------------------------------------------------------------------ membership

    def beat(self) -> None:
        """Send every server a heartbeat."""
        connection = self._client.connection
        for server in connection.servers:
            future = connection.post(server, Heartbeat(*connection.sender, self._heard))
            if server == COORDINATOR:
                future.add_done_callback(self._hear)

    def _hear(self, future: Future[Any]) -> None:
        answer = future.value()
        if isinstance(answer, HeartbeatReply):  # what it says of the others is for lost servers
            self._heard += len(answer.news)

    def leave(self) -> None:
        """Leave an elastic run at the end of its training."""
        connection = self._client.connection
        if self._elastic:
            for server in connection.servers:
                connection.post(server, Leave(*connection.sender, ""))
