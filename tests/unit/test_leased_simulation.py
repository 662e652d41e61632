"""Simulated workers that lease their samples: the real service and its leases, in virtual time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_asgd.algorithms import ASGD, Barrier, Quorum, Transform
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError, WorkerLostError
from lightning_asgd.simulation import (
    Constant,
    Crash,
    LateWorker,
    LeasedData,
    Link,
    LogNormal,
    Network,
    Problem,
    Report,
    ServerCosts,
    Simulation,
)
from tests.helpers.algorithms import SumOfRound
from tests.helpers.script import bits

SAMPLES, EPOCHS = 240, 2


class Counts(Problem):
    """Every weight counts how often its sample was trained."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def start(self) -> Tensor:
        return torch.zeros(self.samples)

    def gradient(self, weights: Tensor, worker: int, generator: torch.Generator) -> tuple[float, Tensor]:
        raise AssertionError("samples are leased")

    def gradient_of(
        self, samples: Sequence[int], weights: Tensor, worker: int, generator: torch.Generator
    ) -> tuple[float, Tensor]:
        gradient = torch.zeros(self.samples)
        gradient[list(samples)] = -1.0
        return 0.0, gradient

    def loss(self, weights: Tensor) -> float:
        return 0.0


def counting(**changes: Any) -> Simulation:
    settings: dict[str, Any] = {
        "problem": Counts(),
        "workers": 5,
        "epochs": EPOCHS,
        "data": LeasedData(SAMPLES, batch_size=4),
        "exchange": {"nsync": 3, "algorithm": ASGD("sum")},
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        "speed": [Constant(0.1), Constant(0.1), LogNormal(0.2, 0.5), Constant(0.5), LogNormal(0.1, 1.0)],
        "network": Network(workers=Link(1e5, 0.01), servers=Link(5e5, 0.002), service_s=0.0005),
    }
    return Simulation(**(settings | changes))


def check_counts(report: Report) -> None:
    assert report.weights.tolist() == [EPOCHS] * SAMPLES


class AnyFew(Quorum):
    """A quorum whose pushes all weigh the same, so that they can be added up."""

    def share(self, batch: float, steps: int) -> float:
        return 1.0


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("transform", [Barrier(), AnyFew(2), AnyFew(grace=0.0)], ids=repr)
def test_rounds_of_an_elastic_run_lose_nothing_whoever_joins_or_vanishes(transform: Transform, servers: int) -> None:
    changes: dict[str, Any] = {
        "servers": servers,
        "elastic": True,
        "exchange": {"nsync": 3, "algorithm": SumOfRound(transforms=[transform])},
        "late_workers": [LateWorker(1.0), LateWorker(1.5, Constant(0.05))],
        "crashes": [Crash(1, 0.7), Crash(3, 1.2, None), Crash(5, 2.5)],
        "silence_s": 2.0,
    }
    report = counting(**changes).run()
    torch.testing.assert_close(report.weights, torch.full((SAMPLES,), float(EPOCHS)))


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("elastic", [False, True])
def test_every_sample_is_trained_once_per_epoch(servers: int, elastic: bool) -> None:
    report = counting(servers=servers, elastic=elastic).run()
    check_counts(report)
    assert len(report.epochs_s) == EPOCHS
    steps = [w.steps for w in report.workers]
    assert min(steps) > 0
    assert steps[0] > 2 * steps[3], "the fast worker trains more"


@pytest.mark.parametrize("detection_s", [0.0, 0.1, 3.0, None])
@pytest.mark.parametrize("elastic", [False, True])
def test_the_samples_of_a_worker_that_is_lost_are_trained_by_others(detection_s: float | None, elastic: bool) -> None:
    for worker, time_s in [(1, 0.75), (3, 3.3), (4, 1.05)]:
        report = counting(elastic=elastic, crashes=[Crash(worker, time_s, detection_s)]).run()
        check_counts(report)
        assert report.workers[worker].crashed


def test_a_worker_may_be_lost_at_any_moment() -> None:
    data = LeasedData(48, batch_size=4)
    short: dict[str, Any] = {"problem": Counts(48), "data": data, "workers": 3, "speed": Constant(0.1), "epochs": 2}
    whole_s = counting(**short).run().time_s
    for moment in range(40):
        report = counting(**short, crashes=[Crash(2, whole_s * moment / 40)]).run()
        assert report.weights.tolist() == [2] * 48


def test_workers_join_an_elastic_run_and_are_lost_there() -> None:
    late = [LateWorker(0.5), LateWorker(0.5, Constant(0.05)), LateWorker(1.5)]
    crashes = [Crash(0, 1.0), Crash(6, 1.2, 0.2), Crash(3, 0.8, 0.5)]
    report = counting(elastic=True, late_workers=late, crashes=crashes).run()
    check_counts(report)
    assert len(report.workers) == 8
    assert all(w.steps > 0 for w in report.workers)
    assert report.time_s < counting(elastic=True, crashes=crashes[:1] + crashes[2:]).run().time_s


def test_a_worker_that_joins_after_the_end_changes_nothing() -> None:
    report = counting(elastic=True, late_workers=[LateWorker(1000.0)], crashes=[Crash(5, 2000.0)]).run()
    check_counts(report)
    assert len(report.workers) == 5


def test_the_same_seed_gives_the_same_bits() -> None:
    plan = counting(elastic=True, late_workers=[LateWorker(1.0)], crashes=[Crash(1, 2.0, None)])
    one, other = plan.run(), plan.run()
    assert bits(one.weights) == bits(other.weights)
    assert (one.time_s, one.epochs_s, one.workers) == (other.time_s, other.epochs_s, other.workers)


def test_equal_workers_share_an_epoch_equally() -> None:
    report = counting(workers=4, speed=Constant(0.1), network=Network(), epochs=1).run()
    ideal_s = SAMPLES / 4 / 4 * 0.1
    assert ideal_s <= report.time_s <= ideal_s + 0.2
    assert report.sync_wait_s + sum(w.lease_wait_s for w in report.workers) < 0.5


def test_without_worker_0_a_job_ends_as_a_real_one() -> None:
    with pytest.raises(WorkerLostError, match="Worker 0"):
        counting(crashes=[Crash(0, 1.0)]).run()


def test_what_messages_cost_the_servers_takes_time() -> None:
    costs = ServerCosts(claim_s=0.01, exchange_s=0.02, beat_s=0.001, contribution_s=0.002, gbyte_s=1e-3)
    free, busy = (counting(network=Network(service_s=each)).run() for each in (0.0, costs))
    assert free.server_work_s == (0.0,)
    assert busy.server_work_s[0] > 0.02 * busy.pushes
    assert busy.time_s > free.time_s


def test_servers_that_cannot_keep_up_are_named() -> None:
    slow = Network(service_s=ServerCosts(claim_s=2.0))
    with pytest.raises(ASGDError, match=r"Worker \d was excluded after .* heartbeats too late. Expected servers"):
        counting(workers=8, speed=Constant(0.01), network=slow, silence_s=5.0).run()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LeasedData(0), r"LeasedData\(samples\) 0|LeasedData\(samples\)=0"),
        (lambda: LateWorker(-1.0), r"LateWorker\(time_s\)=-1.0"),
        (lambda: LateWorker(1.0, 2.0), r"LateWorker\(speed\)=2.0"),
        (lambda: ServerCosts(claim_s=-1.0), r"ServerCosts\(claim_s\)=-1.0"),
        (lambda: ServerCosts(gbyte_s=0.0), r"ServerCosts\(gbyte_s\)=0.0"),
        (lambda: counting(late_workers=[LateWorker(1.0)]), "elastic=True"),
        (lambda: dataclasses.replace(counting(), data=None, elastic=True), "data=LeasedData"),
        (lambda: dataclasses.replace(counting(), data=None, crashes=[Crash(0, 1.0, None)]), "heartbeats"),
        (lambda: counting(exchange={"algorithm": ASGD(transforms=[Barrier()])}), "data=None"),
        (lambda: counting(silence_s=0.0), "silence_s=0.0"),
        (lambda: counting(crashes=[Crash(5, 0.0)]), "workers=5"),
        (lambda: counting(elastic=True, late_workers=[LateWorker(2.0)], crashes=[Crash(5, 1.0)]), "time_s > 2"),
    ],
)
def test_a_wrong_setting_is_named(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make()


def test_two_hundred_workers() -> None:
    data = LeasedData(200 * 16, batch_size=4)
    settings: dict[str, Any] = {"speed": LogNormal(1.0, 0.3), "epochs": 1, "problem": Counts(data.samples)}
    report = counting(workers=200, data=data, crashes=[Crash(n, 3.0 + n / 10) for n in range(1, 20)], **settings).run()
    assert report.weights.tolist() == [1] * data.samples


@pytest.mark.slow
def test_a_thousand_workers_in_under_a_minute() -> None:
    import time

    begun = time.process_time()
    data = LeasedData(1000 * 320)
    report = Simulation(problem=Counts(10), workers=1000, data=data, speed=LogNormal(2.0, 0.3)).run()
    assert time.process_time() - begun < 60
    assert report.steps >= 10_000
