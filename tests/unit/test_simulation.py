from __future__ import annotations

import dataclasses
import heapq
import inspect
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_asgd import Advanced, algorithms
from lightning_asgd.algorithms import (
    ASGD,
    Algorithm,
    Barrier,
    LocalSGD,
    StaleSynchronous,
    StreamingDiLoCo,
    Transform,
    WarmStart,
)
from lightning_asgd.core.algorithms.base import Payload, Push
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError, WorkerLostError
from lightning_asgd.core.worker.synchronizer import run
from lightning_asgd.sampling.optim import SGHMC, SGLD
from lightning_asgd.simulation import (
    Constant,
    Crash,
    Link,
    LogNormal,
    ModuleProblem,
    Network,
    Problem,
    Quadratic,
    Report,
    ServerCosts,
    Simulation,
    Speed,
    Trace,
)
from lightning_asgd.simulation.network import VirtualClock
from tests.helpers.cluster import Cluster
from tests.helpers.script import bits

CLEAN = Quadratic(noise=0.0)


@dataclasses.dataclass(frozen=True)
class Recorded(ASGD):
    """Notes every push as it is applied."""

    log: ClassVar[list[Push]] = []

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        self.log.append(push)
        super().apply(weights, update, slots, push)


@pytest.fixture
def log() -> list[Push]:
    Recorded.log.clear()
    return Recorded.log


def same(a: Report, b: Report) -> bool:
    def rest(report: Report) -> Any:
        return dataclasses.replace(report, weights=torch.zeros(0)).__dict__ | {"weights": None}

    return bits(a.weights) == bits(b.weights) and rest(a) == rest(b)


# ---------------------------------------------------------------------- same seed, same bits


def busy(seed: int, **changes: Any) -> Simulation:
    settings: dict[str, Any] = {
        "problem": Quadratic(dimension=12),
        "workers": 5,
        "servers": 2,
        "steps": 30,
        "epochs": 2,
        "exchange": {"nsync": 3},
        "speed": LogNormal(0.1, 0.7),
        "network": Network(workers=Link(2000.0, 0.01), servers=Link(3000.0, 0.02), service_s=0.001),
        "crashes": [Crash(3, 1.0)],
        "seed": seed,
    }
    return Simulation(**(settings | changes))


def test_the_same_seed_gives_the_same_bits() -> None:
    assert same(busy(1).run(), busy(1).run())


def test_another_seed_gives_another_run() -> None:
    one, other = busy(1).run(), busy(2).run()
    assert one.time_s != other.time_s
    assert bits(one.weights) != bits(other.weights)


def test_workers_draw_different_numbers() -> None:
    report = Simulation(problem=Quadratic(), workers=3, steps=5, speed=LogNormal(1.0, 0.5)).run()
    assert len({w.time_s - w.meeting_s for w in report.workers}) == 3


def test_the_seed_of_the_whole_program_does_not_matter() -> None:
    one = busy(1).run()
    torch.manual_seed(123)
    assert same(one, busy(1).run())


class Sloppy(nn.Module):
    """Draws from the global generators of torch, Python and NumPy in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 1), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.dropout(x))
        return y + random.random() + numpy.random.random()


def test_what_draws_from_the_programs_generators_gives_the_same_bits_and_leaves_them_as_they_were() -> None:
    x, y = torch.randn(16, 3), torch.randn(16, 1)
    problem = ModuleProblem(Sloppy(), nn.functional.mse_loss, lambda worker, generator: (x, y), (x, y))
    plan = Simulation(problem=problem, steps=8, optimizer=lambda p: SGLD(p, lr=0.01, num_data=16))
    one = plan.run()
    torch.manual_seed(123)
    random.seed(4)
    numpy.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert same(one, plan.run())
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert not same(one, dataclasses.replace(plan, seed=1).run())


# ---------------------------------------------------------------------- the order of events


def test_two_workers_push_in_the_order_that_their_steps_end(log: list[Push]) -> None:
    # Steps end at 1, 2, 3 and at 1.5, 3, 4.5. At 3 worker 1, whose step began first, comes first. A push is based on
    # the version of the answer that its worker merged at the end of the step before.
    report = Simulation(
        problem=CLEAN, steps=3, exchange={"nsync": 1, "algorithm": Recorded()}, speed=[Constant(1.0), Constant(1.5)]
    ).run()
    order = [(push.worker, push.version, push.staleness) for push in log]
    assert order == [(0, 0, 0), (1, 1, 1), (0, 2, 1), (1, 3, 1), (0, 4, 1), (1, 5, 1)]
    assert report.time_s == 4.5
    assert report.versions == (6,)
    assert [w.meeting_s for w in report.workers] == [1.5, 0.0]
    assert report.wait_s == 0.0
    assert report.staleness_histogram == Counter({1: 5, 0: 1})
    assert report.staleness_mean == pytest.approx(5 / 6)


@pytest.mark.parametrize(
    ("algorithm", "servers", "nsync"),
    [("asgd", 1, 1), ("asgd", 3, 4), ("downpour", 1, 3), ("easgd", 2, 2), ("delayed_nesterov", 1, 5)],
)
def test_the_in_process_cluster_does_the_same_in_the_same_order(algorithm: str, servers: int, nsync: int) -> None:
    problem, steps = Quadratic(dimension=7), 23
    speeds = [1.0, math.sqrt(2), math.pi / 2]
    momentum = {"lr": 0.1, "momentum": 0.5}
    plan = Simulation(
        problem=problem,
        workers=3,
        servers=servers,
        steps=steps,
        exchange={"nsync": nsync, "algorithm": algorithm},
        optimizer=lambda parameters: torch.optim.SGD(parameters, **momentum),
        speed=[Constant(s) for s in speeds],
    )
    seen: list[list[Tensor]] = [[], [], []]
    report = dataclasses.replace(plan, problem=Spy(problem, seen)).run()

    cluster = Cluster(servers, 3)
    parameters = [nn.Parameter(problem.start()) for _ in speeds]
    optimizers = [torch.optim.SGD([p], **momentum) for p in parameters]
    exchangers = [
        cluster.enter(rank, {"w": p}, nsync=nsync, algorithm=algorithm, lr=lambda: 0.1)
        for rank, p in enumerate(parameters)
    ]
    for exchanger in exchangers:
        run(exchanger.begin())
    ends = [(s, rank, 1) for rank, s in enumerate(speeds)]
    while ends:
        now, rank, step = heapq.heappop(ends)
        parameters[rank].grad = seen[rank].pop(0)
        optimizers[rank].step()
        exchangers[rank].count_step()
        if step < steps:
            run(exchangers[rank].advance())
            heapq.heappush(ends, (now + speeds[rank], rank, step + 1))
        else:
            run(exchangers[rank].flush())
    weights = exchangers[0].peek()["w"]
    assert bits(weights) == bits(report.weights)
    assert list(report.versions) == cluster.versions()
    assert [w.staleness_histogram for w in report.workers] == [e.stats.staleness_histogram for e in exchangers]
    cluster.close()


class Spy(Problem):
    """Notes the gradients that each worker was given."""

    def __init__(self, problem: Problem, seen: list[list[Tensor]]) -> None:
        self._problem, self._seen = problem, seen
        self.start, self.loss = problem.start, problem.loss  # type: ignore[method-assign]

    def start(self) -> Tensor:
        raise NotImplementedError

    def loss(self, weights: Tensor) -> float:
        raise NotImplementedError

    def gradient(self, weights: Tensor, worker: int, generator: torch.Generator) -> tuple[float, Tensor]:
        loss, gradient = self._problem.gradient(weights, worker, generator)
        self._seen[worker].append(gradient.clone())
        return loss, gradient


def test_one_worker_alone_trains_like_its_optimizer() -> None:
    report = Simulation(problem=CLEAN, workers=1, steps=25, exchange={"nsync": 4}).run()
    w = CLEAN.start()
    for _ in range(25):
        w = w - 0.1 * CLEAN.curvature * w
    torch.testing.assert_close(report.weights, w)
    assert report.staleness_max == 0


# ---------------------------------------------------------------------- the network

BYTES = 40  # of the ten weights


def one_exchange(network: Network, **settings: Any) -> Report:
    """Workers that step for 1 s, exchange, and step again."""
    return Simulation(
        problem=CLEAN, steps=2, exchange={"nsync": 1, "advanced": Advanced(overlap=False)}, network=network, **settings
    ).run()


def test_an_exchange_takes_its_bytes_over_the_bandwidth() -> None:
    report = one_exchange(Network(workers=Link(BYTES / 2.0)), workers=1)
    (worker,) = report.workers
    assert worker.wait_s == pytest.approx(4.0)  # 2 s there, 2 s back
    assert report.time_s == pytest.approx(2.0 + 4.0 + 2.0 + 2.0)  # two steps, an exchange, the last push, a fetch
    assert (worker.bytes_sent, worker.bytes_received) == (2 * BYTES, 2 * BYTES)
    assert report.server_bytes == ((2 * BYTES, 2 * BYTES),)
    assert report.traffic_bytes == 4 * BYTES


def test_the_slower_of_two_links_sets_the_pace() -> None:
    network = Network(workers=Link(BYTES / 2.0), servers=Link(BYTES / 2.0))
    assert one_exchange(network, workers=1).workers[0].wait_s == pytest.approx(4.0)
    network = Network(workers=Link(BYTES / 2.0), servers=Link(BYTES / 3.0))
    assert one_exchange(network, workers=1).workers[0].wait_s == pytest.approx(6.0)


def test_latencies_add_up() -> None:
    network = Network(workers=Link(latency_s=0.5), servers=Link(latency_s=0.25))
    assert one_exchange(network, workers=1).workers[0].wait_s == pytest.approx(1.5)


def test_workers_share_a_servers_link() -> None:
    report = one_exchange(Network(servers=Link(BYTES / 2.0)), workers=2)
    # Both push after 1 s. The second's update comes in while the first's answer goes out.
    assert [w.wait_s for w in report.workers] == [pytest.approx(4.0), pytest.approx(6.0)]


def test_several_servers_share_the_bytes() -> None:
    report = one_exchange(Network(servers=Link(BYTES / 2.0)), workers=1, servers=2)
    assert report.workers[0].wait_s == pytest.approx(2.0)


def test_a_server_works_on_one_message_at_a_time() -> None:
    report = one_exchange(Network(service_s=0.5), workers=2)
    assert [w.wait_s for w in report.workers] == [pytest.approx(0.5), pytest.approx(1.0)]


@pytest.mark.parametrize("compression", [None, "int8", "topk"])
def test_a_server_works_on_all_parameters_of_a_push_however_short_its_code_is(compression: str | None) -> None:
    report = Simulation(
        problem=Quadratic(1000),
        servers=2,
        steps=10,
        exchange={"nsync": 2, "compression": compression},
        network=Network(service_s=ServerCosts(gbyte_s=4e-6)),
    ).run()
    # Half a second for the 500 parameters, and nothing for the fetches at the sync point.
    assert report.server_work_s == (pytest.approx(0.5 * report.pushes), pytest.approx(0.5 * report.pushes))
    assert report.pushes > 0


def test_with_overlap_a_slow_network_stops_nobody() -> None:
    report = Simulation(
        problem=CLEAN, workers=1, steps=20, exchange={"nsync": 1}, network=Network(workers=Link(BYTES / 2.0))
    ).run()
    (worker,) = report.workers
    assert worker.wait_s == 0.0
    assert worker.deferred > 0
    assert worker.steps == 20


def test_a_worker_that_is_alone_for_too_long_waits() -> None:
    report = Simulation(
        problem=CLEAN,
        workers=1,
        steps=20,
        exchange={"nsync": 1, "advanced": Advanced(max_offline_steps=2)},
        network=Network(workers=Link(BYTES / 5.0)),
    ).run()
    assert report.workers[0].wait_s > 0


def test_exchanges_cost_the_training_thread_time() -> None:
    report = Simulation(problem=CLEAN, workers=1, steps=4, exchange={"nsync": 1}, exchange_s=0.5).run()
    assert report.time_s == 4.0 + 2 * 0.5  # the third answer is merged at the sync point


# ---------------------------------------------------------------------- speeds and problems


def test_a_trace_is_replayed() -> None:
    report = Simulation(problem=CLEAN, workers=1, steps=5, speed=Trace([1.0, 2.0, 4.0])).run()
    assert report.time_s == 10.0


def test_a_shuffled_trace_draws_what_was_measured() -> None:
    speed = Trace([1.0, 2.0], shuffled=True)
    report = Simulation(problem=CLEAN, workers=1, steps=200, speed=speed).run()
    assert 250 < report.time_s < 350


def test_half_of_lognormal_steps_take_less_than_the_median() -> None:
    speed, chance = LogNormal(0.1, 0.5), random.Random(0)
    times = [speed.seconds(i, chance) for i in range(2000)]
    assert 0.47 < sum(t < 0.1 for t in times) / len(times) < 0.53
    assert LogNormal(0.1, 0.0).seconds(0, chance) == 0.1


def test_what_happens_at_the_same_time_happens_in_the_order_asked_for() -> None:
    clock, seen = VirtualClock(), []
    clock.at(2.0, lambda: seen.append(("b", clock())))
    clock.at(1.0, lambda: clock.at(0.5, lambda: seen.append(("past", clock()))))
    clock.at(2.0, lambda: clock.after(0.0, lambda: seen.append(("d", clock()))))
    clock.at(2.0, lambda: seen.append(("c", clock())))
    clock.run()
    assert seen == [("past", 1.0), ("b", 2.0), ("c", 2.0), ("d", 2.0)]


def test_the_reported_loss_is_that_of_the_servers_weights() -> None:
    report = Simulation(problem=CLEAN, workers=2, steps=50, evaluate_every=10).run()
    assert [p.steps for p in report.losses][:4] == [0, 10, 20, 30]
    assert report.losses[0].loss == CLEAN.loss(CLEAN.start())
    assert report.loss == CLEAN.loss(report.weights) < 0.1 * report.losses[0].loss
    assert [p.time_s for p in report.losses] == sorted(p.time_s for p in report.losses)


def test_a_module_is_trained() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    before = [p.clone() for p in module.parameters()]

    def batch(worker: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(x), (8,), generator=generator)
        return x[rows], y[rows]

    problem = ModuleProblem(module, nn.functional.mse_loss, batch, (x, y))
    report = Simulation(problem=problem, workers=3, servers=2, steps=60).run()
    assert report.weights.numel() == sum(p.numel() for p in module.parameters())
    assert report.loss < 0.3 * report.losses[0].loss
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def test_a_module_keeps_its_running_statistics() -> None:
    x, y = torch.randn(16, 3) + 5, torch.randn(16, 1)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    problem = ModuleProblem(module, nn.functional.mse_loss, lambda worker, generator: (x, y), (x, y))
    report = Simulation(problem=problem, steps=20).run()
    assert report.loss < report.losses[0].loss
    after = module.state_dict()
    assert [name for name in before if not torch.equal(after[name], before[name])] == []


def test_updates_that_are_refused_do_not_end_the_run() -> None:
    class Wild(Quadratic):
        def gradient(self, weights: Tensor, worker: int, generator: torch.Generator) -> tuple[float, Tensor]:
            loss, gradient = super().gradient(weights, worker, generator)
            return loss, gradient * math.nan if torch.rand(1, generator=generator).item() < 0.1 else gradient

    report = Simulation(
        problem=Wild(), steps=60, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), exchange={"nsync": 2}
    ).run()
    assert report.weights.isfinite().all()
    assert report.steps == 120


# ---------------------------------------------------------------------- algorithms


@pytest.mark.parametrize("algorithm", [LocalSGD(), algorithms.DiLoCo(), ASGD(transforms=[Barrier()])])
def test_with_a_barrier_all_wait_for_the_slowest(algorithm: Algorithm) -> None:
    report = Simulation(
        problem=CLEAN,
        workers=3,
        steps=20,
        exchange={"nsync": 10, "algorithm": algorithm, "advanced": Advanced(overlap=False)},
        speed=[Constant(1.0), Constant(3.0), Constant(2.0)],
    ).run()
    assert report.time_s == 60.0
    assert [w.wait_s for w in report.workers] == [20.0, 0.0, 10.0]
    assert report.versions == (2,)
    assert report.staleness_max == 0


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_nobody_gets_more_than_the_bound_and_one_ahead(bound: int, log: list[Push]) -> None:
    report = Simulation(
        problem=CLEAN,
        workers=3,
        steps=60,
        exchange={"nsync": 1, "algorithm": Recorded(transforms=[StaleSynchronous(bound)])},
        speed=[Constant(0.1), Constant(1.0), LogNormal(0.5, 0.5)],
    ).run()
    clocks, lead = Counter({0: 0, 1: 0, 2: 0}), 0
    for push in log:
        clocks[push.worker] += 1
        if max(clocks.values()) < 60:  # whoever stands at the sync point is not waited for
            lead = max(lead, max(clocks.values()) - min(clocks.values()))
    assert lead == bound + 1
    assert report.workers[0].wait_s > 10
    assert report.workers[1].wait_s < 1


def test_a_warm_start_lets_worker_0_go_first(log: list[Push]) -> None:
    report = Simulation(
        problem=CLEAN,
        workers=3,
        steps=30,
        exchange={"nsync": 5, "algorithm": Recorded(transforms=[WarmStart(steps=15, ramp=2)])},
    ).run()
    assert [push.worker for push in log[:3]] == [0, 0, 0]
    assert [w.wait_s for w in report.workers] == [0.0, 15.0, 15.0]
    assert report.time_s == 45.0


def every_algorithm() -> list[Any]:
    found = []
    for name in algorithms.__all__:
        cls = getattr(algorithms, name)
        if not inspect.isclass(cls) or cls in (Algorithm, Transform):
            continue
        if issubclass(cls, Transform):
            base: Callable[..., Algorithm] = ASGD if Payload.DELTA in cls.payloads else algorithms.Downpour
            base = algorithms.LocalSGD if cls.per_tensor else base
            found.append(pytest.param(base(transforms=[cls()]), id=name))
        elif cls not in (algorithms.Hogwild, algorithms.LayerWise):
            found.append(pytest.param(cls(), id=name))
    return found


def test_streaming_diloco_mixes_the_servers_weights_into_a_workers() -> None:
    reports = [
        Simulation(problem=CLEAN, workers=2, steps=30, exchange={"nsync": 5, "algorithm": StreamingDiLoCo(alpha=alpha)})
        for alpha in (0.1, 0.9)
    ]
    assert reports[0].run().losses != reports[1].run().losses


@pytest.mark.parametrize("cls", [algorithms.Hogwild, algorithms.LayerWise])
def test_what_does_not_exchange_weights_is_not_simulated(cls: type[Algorithm]) -> None:
    with pytest.raises(ConfigurationError, match=cls.__name__):
        Simulation(problem=CLEAN, exchange={"algorithm": cls()})


@pytest.mark.parametrize("algorithm", every_algorithm())
def test_every_algorithm_runs(algorithm: Algorithm) -> None:
    def optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
        if algorithm.keep_at_most:  # it samples, and takes no optimizer without noise
            settings: dict[str, Any] = {"num_data": 1, "seed": 1, "stream": next(ranks)}
            if isinstance(algorithm, algorithms.ElasticSGMCMC):
                return SGLD(parameters, lr=0.005, temperature=algorithm.temperature, **settings)
            return SGHMC(parameters, lr=0.005, friction=0.1, temperature=1e-6, **settings)
        return torch.optim.SGD(parameters, lr=0.005, momentum=0.9, nesterov=True)

    ranks = itertools.count()
    report = Simulation(
        problem=Quadratic(),
        workers=4,
        servers=2,
        steps=40,
        epochs=2,
        exchange={"nsync": 1, "algorithm": algorithm},
        optimizer=optimizer,
        speed=LogNormal(0.1, 0.4),
        network=Network(workers=Link(1e5, 0.001)),
    ).run()
    assert report.steps == 4 * 40 * 2
    assert len(report.epochs_s) == 2
    assert report.weights.isfinite().all()
    assert report.loss < report.losses[0].loss


# ---------------------------------------------------------------------- crashes


@pytest.mark.parametrize("algorithm", [LocalSGD(), ASGD(transforms=[StaleSynchronous(1)]), ASGD()])
def test_a_dead_worker_does_not_stop_the_others(algorithm: Algorithm) -> None:
    plan = Simulation(
        problem=CLEAN,
        workers=3,
        steps=20,
        exchange={"nsync": 2, "algorithm": algorithm},
        crashes=[Crash(1, 5.5, detection_s=7.0)],
    )
    report = plan.run()
    assert [w.steps for w in report.workers] == [20, 5, 20]
    assert [w.crashed for w in report.workers] == [False, True, False]
    assert report.workers[1].time_s == 5.5
    assert report.loss < 0.5 * report.losses[0].loss
    if algorithm.waits:
        assert [w.wait_s > 2 for w in report.workers] == [True, False, True]  # until it was noticed


def test_a_worker_that_dies_at_a_sync_point_is_not_waited_for() -> None:
    report = Simulation(
        problem=CLEAN,
        workers=3,
        steps=10,
        epochs=2,
        speed=[Constant(1), Constant(2), Constant(1)],
        crashes=[Crash(2, 15)],
    ).run()
    assert report.epochs_s == (20.0, 40.0)
    assert [w.steps for w in report.workers] == [20, 20, 10]


def test_after_worker_0_the_others_get_an_error_as_in_a_real_run() -> None:
    with pytest.raises(WorkerLostError, match="Worker 0"):
        Simulation(problem=CLEAN, crashes=[Crash(0, 5)]).run()


def test_a_crash_after_the_end_changes_nothing() -> None:
    plan = Simulation(problem=CLEAN, steps=10)
    late = dataclasses.replace(plan, crashes=[Crash(1, 1000)]).run()
    assert not late.workers[1].crashed
    assert late.time_s == late.losses[-1].time_s == 10.0


def test_all_may_die() -> None:
    report = Simulation(problem=CLEAN, steps=10, crashes=[Crash(0, 3.5), Crash(1, 4.5)]).run()
    assert (report.time_s, report.steps, report.epochs_s) == (4.5, 3 + 4, ())


def test_workers_that_wait_for_ever_are_named() -> None:
    @dataclasses.dataclass(frozen=True)
    class Never(Transform):
        waits: ClassVar[bool] = True

        def holds(self, worker: int, table: Any) -> bool:
            return worker == 1

    with pytest.raises(ASGDError, match=r"workers \[1\] wait forever|workers \[0, 1\] wait forever"):
        Simulation(problem=CLEAN, exchange={"nsync": 2, "algorithm": ASGD(transforms=[Never()])}).run()


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Constant(-1.0), r"Constant\(step_s\)=-1.0"),
        (lambda: LogNormal(0.1, math.nan), r"LogNormal\(sigma\)=nan"),
        (lambda: Trace([]), "empty"),
        (lambda: Trace([1.0, -2.0]), "-2.0"),
        (lambda: Link(0.0), r"Link\(bandwidth\)=0.0"),
        (lambda: Link(latency_s=math.inf), r"Link\(latency_s\)=inf"),
        (lambda: Network(service_s="1"), "service_s"),
        (lambda: Network(workers=[1.0]), "workers"),
        (lambda: Quadratic(dimension=0), "dimension"),
        (lambda: Quadratic(condition=0.5), "condition"),
        (lambda: ModuleProblem(nn.Flatten(), nn.functional.mse_loss, lambda w, g: (0, 0), (0, 0)), "none"),
        (lambda: Crash(-1, 0.0), r"Crash\(worker\)=-1"),
        (lambda: Simulation(problem=3), "problem=3"),
        (lambda: Simulation(problem=CLEAN, workers=0), "workers=0"),
        (lambda: Simulation(problem=CLEAN, steps=1.5), "steps=1.5"),
        (lambda: Simulation(problem=CLEAN, evaluate_every=0), "evaluate_every=0"),
        (lambda: Simulation(problem=CLEAN, speed=[Constant(1.0)]), "workers=2"),
        (lambda: Simulation(problem=CLEAN, speed=[1.0, 2.0]), "Constant"),
        (lambda: Simulation(problem=CLEAN, crashes=[Crash(2, 0.0)]), "workers=2"),
        (lambda: Simulation(problem=CLEAN, network=Network(servers=[Link()] * 2)), "2 links for 1 servers"),
        (lambda: Simulation(problem=CLEAN, exchange={"nsink": 3}), "nsink"),
        (lambda: Simulation(problem=CLEAN, exchange={"nsync": 0}), "nsync=0"),
        (lambda: Simulation(problem=CLEAN, exchange={"algorithm": "nonsense"}), "nonsense"),
        (
            lambda: Simulation(problem=CLEAN, exchange={"compression": "auto"}),
            "auto.*Expected compression=None, or",
        ),
    ],
)
def test_a_wrong_setting_is_named(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make()


def test_an_algorithm_checks_the_run() -> None:
    with pytest.raises(ConfigurationError, match="nesterov"):
        Simulation(problem=CLEAN, exchange={"algorithm": "eamsgd"}).run()


def test_a_speed_of_ones_own() -> None:
    class Slowing(Speed):
        def seconds(self, step: int, chance: Any) -> float:
            return 1.0 + step

    assert Simulation(problem=CLEAN, workers=1, steps=4, speed=Slowing()).run().time_s == 10.0


# ---------------------------------------------------------------------- size


def test_a_hundred_workers() -> None:
    report = Simulation(
        problem=Quadratic(), workers=100, steps=20, exchange={"nsync": 10}, speed=LogNormal(0.1, 0.3)
    ).run()
    assert report.steps == 2000
    assert report.pushes == 200
    assert report.staleness_mean > 50


@pytest.mark.slow
def test_a_thousand_workers_in_under_a_minute() -> None:
    begun = time.process_time()
    report = Simulation(
        problem=Quadratic(), workers=1000, steps=100, exchange={"nsync": 10}, speed=LogNormal(0.1, 0.3)
    ).run()
    assert time.process_time() - begun < 60
    assert report.pushes == 10_000
    assert report.loss < 0.1 * report.losses[0].loss
