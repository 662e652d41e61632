"""A simulated worker: the real exchanger, replica and optimizer, and the order in which Lightning's hooks call them."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_asgd.config import ExchangeConfig
from lightning_asgd.errors import error_from
from lightning_asgd.layout import build_layout
from lightning_asgd.numerics import is_finite
from lightning_asgd.protocol import Contribution, Failure
from lightning_asgd.simulation.clock import VirtualClock
from lightning_asgd.simulation.problems import Problem
from lightning_asgd.simulation.speeds import Speed
from lightning_asgd.stats import ExchangeStats
from lightning_asgd.worker.connection import COORDINATOR
from lightning_asgd.worker.exchanger import Exchanger
from lightning_asgd.worker.replica_kinds import replica_for
from lightning_asgd.worker.session_client import SessionClient
from lightning_asgd.worker.shard_client import ShardClient
from lightning_asgd.worker.synchronizer import Training, run

__all__ = ["Life", "SimulatedWorker", "Work"]

Life = Generator["float | list[Future[Any]]", None, Any]
"""What a worker does: it stops for a number of seconds, or until these futures are done."""


@dataclass(frozen=True)
class Work:
    """What workers do in a simulation."""

    epochs: int
    steps: int  # of a worker and epoch, where data are not leased
    exchange_s: float  # seconds that training pauses when a reply is merged
    epoch_s: float  # seconds between the end of an epoch and the beginning of the next
    stepped: Callable[[], None]  # called after every step


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
        optimizer: its own.
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
        self.weights = Parameter(problem.start())
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
        layout = build_layout([("weights", problem.start())], [], client.connection.transport.num_servers)
        replica = replica_for(config.algorithm, layout, [([self.weights], 0)], [None] * layout.num_servers)
        shards = ShardClient(client)
        first, code = replica.weights() if brings else None, config.compression
        shards.initialise(layout, config.algorithm, [None] * layout.num_servers, first, compression=code)
        self.exchanger = Exchanger(layout, [(shards, replica)], config, self._training(), clock=clock)
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
            yield float(work.exchange_s)
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

    def _meet(self, name: str, payload: Any = None) -> Any:
        """Wait for the other workers.

        Returns:
            what each of the living has brought, by rank.
        """
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
