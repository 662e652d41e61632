"""Simulated workers exchange a module's tensors in fragments, as real ones do."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_asgd.algorithms import (
    ASGD,
    EASGD,
    Algorithm,
    DecoupledDiLoCo,
    Downpour,
    LocalSGD,
    RadialDirectional,
    StreamingDiLoCo,
)
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.calls import shared_memory
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.protocol import Exchange, InitShard
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.setup import set_up
from lightning_asgd.core.worker.synchronizer import Training, run
from lightning_asgd.simulation import (
    Constant,
    Crash,
    LateWorker,
    LeasedData,
    LogNormal,
    ModuleProblem,
    Problem,
    Quadratic,
    Simulation,
)
from lightning_asgd.simulation.network import Wires
from tests.helpers.cluster import Cluster
from tests.helpers.script import bits

BYTES = 4 * 40  # of the forty weights


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int, int, Any]]:
    """When a worker has sent a server which message."""
    found = []
    send = Wires.send

    def noting(wires: Wires, worker: int, server: int, message: Any) -> Any:
        found.append((wires.clock.now, worker, server, message))
        return send(wires, worker, server, message)

    monkeypatch.setattr(Wires, "send", noting)
    return found


def in_rounds(parts: int, **changes: Any) -> Simulation:
    exchange = {"nsync": 8, "algorithm": StreamingDiLoCo(parts=parts)}
    return dataclasses.replace(Simulation(problem=Quadratic(40), steps=24, exchange=exchange), **changes)


def test_fragments_take_turns_and_every_weight_is_pushed_within_nsync_steps(
    sent: list[tuple[float, int, int, Any]],
) -> None:
    in_rounds(4).run()
    pushes, sizes = defaultdict(list), defaultdict(set)
    for time_s, worker, _, message in sent:
        if isinstance(message, Exchange) and message.push and worker == 0:
            pushes[message.fragment].append(time_s)
            sizes[message.fragment].add(sum(part.numel() for part in message.update or ()))
    # A step takes one second. The last one is the flush of what remains.
    assert pushes == {0: [2, 10, 18, 24], 1: [4, 12, 20, 24], 2: [6, 14, 22, 24], 3: [8, 16, 24]}
    assert sizes == {0: {10}, 1: {10}, 2: {10}, 3: {10}}


@pytest.mark.parametrize("parts", [1, 4])
def test_an_exchange_sends_one_part_of_the_weights(parts: int) -> None:
    report = in_rounds(parts).run()
    assert all(worker.pushes > 0 for worker in report.workers)
    assert [worker.bytes_sent for worker in report.workers] == [
        worker.pushes * BYTES // parts for worker in report.workers
    ]
    assert report.loss < report.losses[0].loss


def test_one_tensor_is_cut_into_pieces_of_nearly_equal_sizes(sent: list[tuple[float, int, int, Any]]) -> None:
    report = in_rounds(3, servers=2).run()
    sizes = {(m.fragment, server): m.groups[0][2] for _, _, server, m in sent if isinstance(m, InitShard)}
    assert [sizes[k, 0] + sizes[k, 1] for k in range(3)] == [14, 13, 13]
    assert report.weights.shape == (40,)
    assert report.versions[0] == report.versions[1] == report.workers[0].pushes  # two workers' pushes are one update


def test_a_fragment_without_a_weight_on_each_server_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"parts=4, but the problem has 7 of them for 2 servers"):
        in_rounds(4, problem=Quadratic(7), servers=2).run()


# ---------------------------------------------------------------------- as in a real run


class InParts(nn.Module):
    """The forty weights, as the simulator cuts them."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList([part.clone() for part in start.chunk(4)])


class Spy(Quadratic):
    """Notes the gradients that each worker was given."""

    def __init__(self, dimension: int, workers: int) -> None:
        super().__init__(dimension)
        self.seen: list[list[Tensor]] = [[] for _ in range(workers)]

    def gradient(self, weights: Tensor, worker: int, generator: torch.Generator) -> tuple[float, Tensor]:
        loss, gradient = super().gradient(weights, worker, generator)
        self.seen[worker].append(gradient.clone())
        return loss, gradient


class FourOfASGD(ASGD):
    fragments = 4


class FourOfDownpour(Downpour):
    fragments = 4


class FourOfEASGD(EASGD):
    fragments = 4


@pytest.mark.parametrize("algorithm", [FourOfASGD(), FourOfDownpour(), FourOfEASGD()], ids=lambda a: type(a).__name__)
def test_real_workers_do_the_same_in_the_same_order(algorithm: Algorithm) -> None:
    speeds, steps, nsync = [1.0, math.sqrt(2), math.pi / 2], 23, 6
    problem, exchange = Spy(40, len(speeds)), {"nsync": nsync, "algorithm": algorithm}
    first = problem.start()
    report = Simulation(
        problem=problem,
        workers=3,
        servers=2,
        steps=steps,
        exchange=exchange,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.5),
        speed=[Constant(s) for s in speeds],
    ).run()

    cluster = Cluster(2, 3)
    modules = [InParts(first) for _ in speeds]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5) for module in modules]
    exchangers = []
    with mock.patch.object(shared_memory, "create", return_value=None):  # by value, as in the simulator
        for rank, module in enumerate(modules):
            client = cluster.client(rank)
            client.join()
            config = ExchangeConfig.create(**exchange)
            exchangers.append(set_up(client, Collectives(), module, config, Training(lr=lambda: 0.1)))
    for exchanger in exchangers:
        run(exchanger.begin())
    ends = [(s, rank, 1) for rank, s in enumerate(speeds)]
    while ends:
        now, rank, step = heapq.heappop(ends)
        for parameter, gradient in zip(modules[rank].weights, problem.seen[rank].pop(0).chunk(4), strict=True):
            parameter.grad = gradient.clone()
        optimizers[rank].step()
        exchangers[rank].count_step()
        if step < steps:
            run(exchangers[rank].advance())
            heapq.heappush(ends, (now + speeds[rank], rank, step + 1))
        else:
            run(exchangers[rank].flush())
    weights = exchangers[0].peek()
    torch.testing.assert_close(report.weights, torch.cat([weights[f"weights.{k}"] for k in range(4)]))
    sessions = [service.session for service in cluster.services]
    assert list(report.versions) == [sum(s.version for s in each.shards.values()) for each in sessions if each]
    assert [w.pushes for w in report.workers] == [e.stats.pushes for e in exchangers]
    assert [w.staleness_histogram for w in report.workers] == [e.stats.staleness_histogram for e in exchangers]
    cluster.close()


# ---------------------------------------------------------------------- a problem of several tensors


def learning() -> ModuleProblem:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])

    def batch(worker: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(x), (8,), generator=generator)
        return x[rows], y[rows]

    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    return ModuleProblem(module, nn.functional.mse_loss, batch, (x, y))


def test_a_rule_per_tensor_sees_those_of_the_module(sent: list[tuple[float, int, int, Any]]) -> None:
    exchange = {"nsync": 5, "algorithm": LocalSGD(transforms=[RadialDirectional()])}
    report = Simulation(problem=learning(), steps=30, exchange=exchange).run()
    tensors = next(message.tensors for _, _, _, message in sent if isinstance(message, InitShard))
    assert tensors == ((("0.weight", 24), ("0.bias", 8), ("2.weight", 8), ("2.bias", 1)),)
    assert report.loss < report.losses[0].loss


def test_fragments_are_those_of_the_modules_tensors(sent: list[tuple[float, int, int, Any]]) -> None:
    problem = learning()
    start = problem.start()
    report = in_rounds(2, problem=problem, exchange={"nsync": 8, "algorithm": DecoupledDiLoCo(parts=2)}).run()
    found = {m.fragment: [n for n, _ in m.tensors[0]] for _, _, _, m in sent if isinstance(m, InitShard)}
    assert found == {0: ["0.weight"], 1: ["0.bias", "2.weight", "2.bias"]}
    assert (report.weights != start).all(), "every weight is exchanged"
    assert report.losses[0].loss == problem.loss(start)
    assert report.loss == problem.loss(report.weights) < report.losses[0].loss


def test_shapes_that_are_not_those_of_the_weights_are_named() -> None:
    class Wrong(Quadratic):
        def shapes(self) -> Mapping[str, tuple[int, ...]]:
            return {"a": (2, 3), "b": (5,)}

    with pytest.raises(ConfigurationError, match=r"Wrong.shapes\(\) has 11 scalars, but start\(\) has 12"):
        Simulation(problem=Wrong(12)).run()


def test_a_fragments_gradients_are_those_of_its_weights() -> None:
    class Two(Problem):
        """Two tensors: the gradient of the first is 1 everywhere, that of the second 2."""

        def start(self) -> Tensor:
            return torch.zeros(10)

        def shapes(self) -> Mapping[str, tuple[int, ...]]:
            return {"a": (2, 3), "b": (4,)}

        def gradient(self, weights: Tensor, worker: int, generator: torch.Generator) -> tuple[float, Tensor]:
            return 0.0, torch.tensor([1.0] * 6 + [2.0] * 4)

        def loss(self, weights: Tensor) -> float:
            return 0.0

    report = Simulation(
        problem=Two(), workers=1, steps=12, exchange={"nsync": 2, "algorithm": FourOfDownpour("sgd", lr=1.0)}
    ).run()
    assert report.weights.tolist() == [-12.0] * 6 + [-24.0] * 4


# ---------------------------------------------------------------------- Decoupled DiLoCo as it is by default


def test_decoupled_diloco_trains_as_it_is_by_default(sent: list[tuple[float, int, int, Any]]) -> None:
    plan = Simulation(
        problem=Quadratic(40),
        workers=4,
        servers=2,
        steps=60,
        exchange={"nsync": 8, "algorithm": DecoupledDiLoCo()},
        speed=LogNormal(0.1, 0.4),
    )
    one, other = plan.run(), plan.run()
    assert bits(one.weights) == bits(other.weights)
    assert one.loss < 0.5 * one.losses[0].loss
    assert {message.fragment for _, _, _, message in sent if isinstance(message, Exchange)} == {0, 1, 2, 3}


def test_decoupled_diloco_trains_while_workers_vanish_and_join() -> None:
    report = Simulation(
        problem=Quadratic(40),
        workers=5,
        exchange={"nsync": 8, "algorithm": DecoupledDiLoCo()},
        speed=LogNormal(0.1, 0.3),
        data=LeasedData(4800, batch_size=8),
        elastic=True,
        crashes=[Crash(0, 2.5), Crash(3, 4.0, None)],
        late_workers=[LateWorker(3.0)],
        silence_s=2.0,
    ).run()
    assert report.steps >= 600
    assert [worker.crashed for worker in report.workers] == [True, False, False, True, False, False]
    assert report.workers[5].pushes > 0
    assert report.loss < 0.5 * report.losses[0].loss
