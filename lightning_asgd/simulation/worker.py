"""A simulated worker: the real exchanger, replica and optimizer, and the order in which Lightning's hooks call them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.errors import ConfigurationError, error_from
from lightning_asgd.core.foundation.layout import build_layout
from lightning_asgd.core.foundation.numerics import is_finite
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.protocol import Contribution, Failure
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
