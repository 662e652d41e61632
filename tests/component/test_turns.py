"""Fragments that are exchanged in lock-step, by workers whose periods differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_asgd import Advanced
from lightning_asgd.algorithms import DynamicSteps, StreamingDiLoCo
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.layout import build_layout
from lightning_asgd.core.worker.exchange_period import Schedule, Turns
from lightning_asgd.core.worker.exchanger import Exchanger
from lightning_asgd.core.worker.replica_kinds import replica_for
from lightning_asgd.core.worker.shard_client import ShardClient
from lightning_asgd.core.worker.synchronizer import Training, run
from tests.helpers.cluster import Cluster

STEPS = 60


class Worker:
    """A program of two parameters, each a fragment, whose steps take so many seconds of its own clock."""

    def __init__(self, cluster: Cluster, rank: int, step_s: float, config: ExchangeConfig) -> None:
        self.now, self.step_s, self.steps = 0.0, step_s, 0
        self.weights = {name: torch.zeros(3) for name in "ab"}
        client, parts = cluster.client(rank), list[Any]()
        client.join()
        for number, (name, weight) in enumerate(self.weights.items()):
            layout = build_layout([(name, weight)], 1)
            replica = replica_for(config.algorithm, layout, [({name: weight}, name)], [None])
            shards = ShardClient(client, number)
            shards.initialise(layout, config.algorithm, [None], replica.weights() if rank == 0 else None)
            parts.append((shards, replica))
        layout = build_layout(self.weights.items(), 1)
        self.exchanger = Exchanger(layout, parts, config, Training(), clock=lambda: self.now)
        run(self.exchanger.fetch())

    def program(self, away: int, bad: int) -> Iterator[Any]:
        """Train one interval; at step ``away`` rejoin, as after a long silence; at step ``bad`` spoil one fragment."""
        yield from self.exchanger.begin()
        for self.steps in range(1, STEPS + 1):
            self.now += self.step_s
            for weight in self.weights.values():
                weight += 1.0
            if self.steps == bad:
                self.weights["a"] += 1e20  # the servers refuse it
            self.exchanger.count_step()
            if self.steps == away:
                yield from self.exchanger.come_back()
            yield from self.exchanger.advance()
        yield from self.exchanger.flush()


def train(workers: list[Worker], away: int = 0, bad: int = 0) -> None:
    """Run both by turns. Fails once each waits for a reply that only the other one's next push can bring."""
    programs = {each: each.program(*((away, bad) if each is workers[1] else (0, 0))) for each in workers}
    waits: dict[Worker, Any] = {each: [] for each in workers}
    while programs:
        free = [each for each in programs if all(future.done() for future in waits[each])]
        assert free, f"after {[each.steps for each in workers]} steps each waits for the other"
        for each in free:
            try:
                waits[each] = next(programs[each])
            except StopIteration:
                del programs[each]


@pytest.mark.parametrize("away", [0, 13, 22], ids=["", "away-13", "away-22"])
@pytest.mark.parametrize("overlap", [False, True], ids=["waits", "overlaps"])
def test_workers_with_periods_of_their_own_do_not_wait_for_each_other(overlap: bool, away: int) -> None:
    rule = StreamingDiLoCo(parts=2, momentum=0.0, lr=1.0, alpha=0.0, transforms=[DynamicSteps()])
    config = ExchangeConfig.create(nsync=8, advanced=Advanced(overlap=overlap), algorithm=rule)
    cluster = Cluster(1, 2)
    workers = [Worker(cluster, rank, step_s, config) for rank, step_s in enumerate([1.0, 4.0])]
    for _ in range(2):  # intervals
        train(workers, away)
        for each in workers:
            run(each.exchanger.fetch())
        assert all(torch.equal(workers[0].weights[name], workers[1].weights[name]) for name in "ab")
    assert [each.exchanger.stats.steps for each in workers] == [2 * STEPS] * 2


@pytest.mark.parametrize("bad", [3, 12])
@pytest.mark.parametrize("overlap", [False, True], ids=["waits", "overlaps"])
def test_a_fragment_that_is_refused_is_pushed_next(overlap: bool, bad: int) -> None:
    rule = StreamingDiLoCo(parts=2, momentum=0.0, lr=1.0, alpha=0.0)
    config = ExchangeConfig.create(nsync=8, advanced=Advanced(overlap=overlap), algorithm=rule)
    cluster = Cluster(1, 2)
    workers = [Worker(cluster, rank, 1.0, config) for rank in range(2)]
    train(workers, bad=bad)
    assert cluster.counts("refused") == [1]
    for each in workers:
        run(each.exchanger.fetch())
    assert torch.equal(workers[0].weights["a"], workers[1].weights["a"])


def test_a_fragment_is_not_due_before_its_turn() -> None:
    config = ExchangeConfig.create(nsync=8, algorithm=StreamingDiLoCo(parts=2))
    turns = Turns(2, config)
    first, second = schedules = [Schedule(config, turns.lead(k), turns=turns, fragment=k) for k in range(2)]

    def due(steps: int) -> list[bool]:
        for schedule in schedules:
            schedule.since_push += steps
        return [schedule.due(0)[0] for schedule in schedules]

    assert due(4) == [True, False]
    first.pushed(4, 1.0, rest=False)
    first.replied(2)
    assert due(2) == [False, False]  # the first one's period is over, and it is the second one's turn
    assert due(2) == [False, True]
    second.pushed(8, 2.0, rest=False)
    assert due(0) == [True, False]
    first.pause()  # a sync point
    assert due(4) == [True, False]
