"""A simulated worker: the real exchanger, replica and optimizer, and the order in which Lightning's hooks call them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
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
from lightning_asgd.worker.exchanger import Exchanger
from lightning_asgd.worker.replica_kinds import replica_for
from lightning_asgd.worker.session_client import SessionClient
from lightning_asgd.worker.shard_client import ShardClient
from lightning_asgd.worker.synchronizer import Training, run

__all__ = ["Life", "SimulatedWorker"]

Life = Iterator["float | list[Future[Any]]"]
"""What a worker does: it stops for a number of seconds, or until these futures are done."""


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
        rank: its global rank.
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
        self.rank = client.connection.worker
        self.crashed = False
        self.ended_s: float | None = None
        self.epochs_s: list[float] = []
        self.meeting_s = 0.0
        self.weights = Parameter(problem.start())
        self.optimizer = optimizer([self.weights])
        self._client = client
        self._clock = clock
        self._problem = problem
        self._speed = speed
        self._meetings = 0
        chance = random.Random(f"{seed} {self.rank}")
        self._generator = torch.Generator().manual_seed(chance.getrandbits(62))
        self._chance = random.Random(chance.getrandbits(62))
        layout = build_layout([("weights", problem.start())], [], client.connection.transport.num_servers)
        replica = replica_for(config.algorithm, layout, [([self.weights], 0)], [None] * layout.num_servers)
        client.join()
        shards = ShardClient(client)
        shards.initialise(
            layout, config.algorithm, [None] * layout.num_servers, replica.weights() if self.rank == 0 else None
        )
        self.exchanger = Exchanger(layout, [(shards, replica)], config, Training(self._heal, self._lr), clock=clock)
        run(self.exchanger.fetch())
        self.exchanger.stats = ExchangeStats()

    @property
    def stats(self) -> ExchangeStats:
        """What its exchanger counts."""
        return self.exchanger.stats

    def live(self, *, epochs: int, steps: int, exchange_s: float, epoch_s: float, stepped: Callable[[], None]) -> Life:
        """Train.

        Args:
            epochs: number of epochs.
            steps: optimizer steps per epoch.
            exchange_s: seconds that training pauses when a reply is merged.
            epoch_s: seconds between the end of an epoch and the beginning of the next.
            stepped: called after every step.
        """
        for epoch in range(epochs):
            yield from self.exchanger.begin()
            for _ in range(steps):
                begun = self.stats.exchanges
                yield from self.exchanger.advance()
                if exchange_s and self.stats.exchanges > begun:
                    yield float(exchange_s)
                yield float(self._speed.seconds(self.stats.steps, self._chance))
                self._step()
                stepped()
            yield from self._sync_point(f"epoch {epoch}")
            self.epochs_s.append(self._clock.now)
            yield float(epoch_s)

    def _step(self) -> None:
        weights = self.weights
        _, gradient = self._problem.gradient(weights.detach(), self.rank, self._generator)
        weights.grad = gradient
        self.optimizer.step()
        self.exchanger.count_step()

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
        self._meetings += 1
        message = Contribution(
            self._client.connection.session,
            self.rank,
            self._meetings,
            "all_gather",
            name,
            payload,
            timeout_s=float("inf"),
        )
        since = self._clock.now
        future = self._client.connection.transport.call(0, message, float("inf"))
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
