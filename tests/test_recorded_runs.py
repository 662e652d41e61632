"""Runs whose every bit is recorded: a change that should not alter numbers shows the same ones.

Simulations of every algorithm and transform that can be simulated, of crashes and of settings of the exchange, in
virtual time; and two workers in this process, in an order drawn from a seed, for what is not simulated: modules in
fragments, gradients layer by layer, and compression. (Hogwild! workers race: there are no bits to record.)
tests/data/runs.json holds digests of weights and times. After a change that is meant to alter them, and says so:

    python -m tests.test_recorded_runs        records all of them anew
    python -m tests.test_recorded_runs NAME   records those whose names begin so

Everything runs on the CPU, in one thread: two would add numbers up in another order. Square roots are NumPy's, which
are rounded correctly: torch leaves them to a library whose last bit depends on who made the processor. Bits were the
same in every process, with AVX2 as with AVX-512, on Intel as on AMD. Without either torch draws other random numbers,
and times and counts alone are compared.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import nn

from lightning_asgd import Advanced, algorithms
from lightning_asgd.algorithms import ASGD, Algorithm, Barrier, Downpour, LocalSGD, StaleSynchronous, Transform
from lightning_asgd.core.algorithms.base import Payload
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.calls import shared_memory
from lightning_asgd.core.worker import connection as connection_module
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.setup import set_up
from lightning_asgd.core.worker.synchronizer import run
from lightning_asgd.sampling.optim import SGHMC, SGLD
from lightning_asgd.simulation import Constant, Crash, Link, LogNormal, ModuleProblem, Network, Quadratic, Simulation
from tests.helpers.cluster import Cluster
from tests.helpers.turns import Turns

RECORDED = Path(__file__).parent / "data" / "runs.json"
NOT_SIMULATED = (algorithms.Hogwild, algorithms.LayerWise)  # they do not exchange weights every nsync steps

SAME_BITS = ("AVX2", "AVX512")
# Transforms that would do nothing here by default.
STRICTER = {
    algorithms.DropStale: lambda: algorithms.DropStale(limit=3),
    algorithms.StaleSynchronous: lambda: algorithms.StaleSynchronous(bound=1),
}

Record = dict[str, Any]


# ---------------------------------------------------------------------- simulations


def simulation(**changes: Any) -> Simulation:
    """Four workers of different speeds on slow links, two servers, two epochs."""
    settings: dict[str, Any] = {
        "problem": Quadratic(dimension=11),
        "workers": 4,
        "servers": 2,
        "steps": 30,
        "epochs": 2,
        "exchange": {"nsync": 3},
        "speed": LogNormal(0.1, 0.4),
        "network": Network(workers=Link(3000.0, 0.01), servers=Link(9000.0, 0.002), service_s=0.001),
        "seed": 5,
    }
    return Simulation(**(settings | changes))


def of(algorithm: Algorithm, **changes: Any) -> Simulation:
    ranks = itertools.count()

    def optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
        if algorithm.keep_at_most:  # it samples, and takes no optimizer without noise
            settings: dict[str, Any] = {"num_data": 1, "seed": 1, "stream": next(ranks)}
            if isinstance(algorithm, algorithms.ElasticSGMCMC):
                return SGLD(parameters, lr=0.005, temperature=algorithm.temperature, **settings)
            return SGHMC(parameters, lr=0.005, friction=0.1, temperature=1e-6, **settings)
        return torch.optim.SGD(parameters, lr=0.005, momentum=0.9, nesterov=True)

    nsync = 1 if isinstance(algorithm, algorithms.DANASlim) else 3
    return simulation(exchange={"nsync": nsync, "algorithm": algorithm}, optimizer=optimizer, **changes)


class Diverging(Quadratic):
    """Some updates are NaN, and refused."""

    def gradient(self, weights: torch.Tensor, worker: int, generator: torch.Generator) -> tuple[float, torch.Tensor]:
        loss, gradient = super().gradient(weights, worker, generator)
        return loss, gradient * math.nan if torch.rand(1, generator=generator).item() < 0.1 else gradient


def learning() -> ModuleProblem:
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(64, 300)

    def batch(worker: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randint(len(x), (8,), generator=generator)
        return x[rows], y[rows]

    return ModuleProblem(Small(1), nn.functional.mse_loss, batch, (x, y))


def simulations() -> dict[str, Callable[[], Simulation]]:
    made: dict[str, Callable[[], Simulation]] = {}
    for name in algorithms.__all__:
        cls = getattr(algorithms, name)
        if inspect.isclass(cls) and issubclass(cls, Transform) and cls is not Transform:
            base: Callable[..., Algorithm] = ASGD if Payload.DELTA in cls.payloads else Downpour
            base = LocalSGD if cls.per_tensor else base
            transform = STRICTER.get(cls, cls)()
            made[f"transform {name}"] = lambda base=base, transform=transform: of(base(transforms=[transform]))
        elif inspect.isclass(cls) and cls not in (Algorithm, Transform, *NOT_SIMULATED):
            made[f"algorithm {name}"] = lambda cls=cls: of(cls())
    rounds = [LocalSGD(), ASGD(transforms=[StaleSynchronous(1)]), ASGD(transforms=[Barrier()]), ASGD()]
    for algorithm, name in zip(rounds, ("rounds", "bounded", "barrier", "asynchronous"), strict=True):
        crashes = [Crash(1, 1.3, detection_s=0.7), Crash(2, 4.0)]
        made[f"crash {name}"] = lambda algorithm=algorithm, crashes=crashes: of(algorithm, crashes=crashes)
    made |= {
        "exchange auto": lambda: simulation(exchange={"nsync": "auto"}, steps=60, exchange_s=0.004),
        "exchange pushes and fetches": lambda: simulation(
            exchange={"advanced": Advanced(nfetch=5, npush=2), "algorithm": ASGD("sum")}
        ),
        "exchange without overlap": lambda: simulation(exchange={"nsync": 2, "advanced": Advanced(overlap=False)}),
        "exchange far away": lambda: simulation(
            exchange={"nsync": 1, "advanced": Advanced(max_offline_steps=4)}, epoch_s=0.5
        ),
        "exchange of one fragment": lambda: of(algorithms.StreamingDiLoCo(parts=1)),
        "exchange of a module": lambda: simulation(problem=learning(), servers=3),
        "exchange refused": lambda: simulation(problem=Diverging(dimension=11)),
        "exchange of one worker": lambda: simulation(workers=1, network=Network()),
        "exchange in step": lambda: simulation(speed=Constant(0.1), network=Network()),  # ties everywhere
    }
    return made


def simulated(plan: Simulation) -> Record:
    report = plan.run()
    assert not any(worker.lease_wait_s for worker in report.workers)  # data are not leased here
    workers = [{k: v for k, v in vars(worker).items() if k != "lease_wait_s"} for worker in report.workers]
    counted = [*workers, *([point.time_s, point.steps] for point in report.losses)]
    return {
        "weights": digest([report.weights]),
        "time_s": report.time_s,
        "epochs_s": list(report.epochs_s),
        "versions": list(report.versions),
        "counts": hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:16],
    }


# ---------------------------------------------------------------------- two workers in this process


def scripted(**settings: Any) -> Record:
    """Two workers with modules and optimizers, batch by batch in an order drawn from a seed, until a sync point."""
    cluster, turns = Cluster(servers=2, workers=2), Turns(seed=2)
    modules = [Small(3), Small(3)]
    synchronizers = []
    with mock.patch.object(shared_memory, "create", return_value=None):  # by value, as between two machines
        for rank, module in enumerate(modules):
            client = cluster.client(rank)
            client.join()
            config = ExchangeConfig.create(**{"nsync": 3, **settings})
            synchronizers.append(set_up(client, Collectives(), module, config))

    def train(rank: int) -> None:
        module, synchronizer, generator = modules[rank], synchronizers[rank], torch.Generator().manual_seed(rank)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        run(synchronizer.begin())
        for _ in range(20):
            turns.wait_until(lambda: True)
            run(synchronizer.advance())
            optimizer.zero_grad()
            module(torch.randn(6, 5, generator=generator)).square().mean().backward()
            optimizer.step()
            synchronizer.count_step()
        run(synchronizer.flush())

    for rank in range(2):
        turns.add(f"worker {rank}", functools.partial(train, rank))
    with mock.patch.object(connection_module, "done_within", turns.done_within):
        turns.run(
            lambda: all(
                synchronizer.unacknowledged == 0 and synchronizer.stats.steps == 20 for synchronizer in synchronizers
            )
        )
    for synchronizer in synchronizers:
        run(synchronizer.fetch())
    record = {
        "weights": [digest(list(module.parameters())) for module in modules],
        "versions": [synchronizer.versions for synchronizer in synchronizers],
        "pushes": [synchronizer.stats.pushes for synchronizer in synchronizers],
    }
    for synchronizer in synchronizers:
        synchronizer.close()
    cluster.close()
    return record


class Small(nn.Module):
    """Products and sums, and no product of matrices: its bits are those of torch itself, not of a BLAS."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.norm = nn.BatchNorm1d(5)
        self.weight = nn.Parameter(torch.randn(300, 5, generator=generator) / 4)
        self.bias = nn.Parameter(torch.randn(300, generator=generator) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(x).unsqueeze(1) * self.weight).sum(-1) + self.bias


SCRIPTS: dict[str, dict[str, Any]] = {
    "script whole": {},
    "script fragments": {"algorithm": algorithms.StreamingDiLoCo(parts=3)},
    "script one fragment": {"algorithm": algorithms.StreamingDiLoCo(parts=1)},
    "script layers": {"algorithm": algorithms.LayerWise()},
    "script bf16": {"compression": "bf16"},
    "script int8": {"compression": "int8"},
    "script topk": {"compression": "topk"},
    "script int8 gradients": {"compression": "int8", "algorithm": Downpour()},
}


# ---------------------------------------------------------------------- recorded and now


def digest(tensors: list[torch.Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


RUNS: dict[str, Callable[[], Record]] = {
    **{name: (lambda make=make: simulated(make())) for name, make in simulations().items()},
    **{name: (lambda settings=settings: scripted(**settings)) for name, settings in SCRIPTS.items()},
}


def test_every_run_is_recorded_and_no_other() -> None:
    recorded = json.loads(RECORDED.read_text())
    assert sorted(recorded) == sorted(RUNS), "record what is new; a run that is gone was lost, or is to be taken out"


@contextlib.contextmanager
def same_on_all_machines() -> Iterator[None]:
    """One thread, and square roots that are rounded correctly."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with mock.patch.object(torch.Tensor, "sqrt", lambda self: torch.from_numpy(numpy.sqrt(self.detach().numpy()))):
        yield
    torch.set_num_threads(before)


@pytest.fixture
def _same_on_all_machines() -> Iterator[None]:
    with same_on_all_machines():
        yield


@pytest.mark.usefixtures("_same_on_all_machines")
@pytest.mark.parametrize("name", RUNS)
def test_the_run_gives_the_recorded_bits(name: str) -> None:
    found, recorded = RUNS[name](), json.loads(RECORDED.read_text())[name]
    if torch.backends.cpu.get_cpu_capability() not in SAME_BITS:
        recorded["weights"] = found["weights"]
    assert found == recorded


def record(prefix: str) -> None:
    before = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    kept = {name: before[name] for name in RUNS if name in before}
    with same_on_all_machines():
        kept |= {name: run() for name, run in RUNS.items() if name.startswith(prefix)}
    lines = (f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept))
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    record(" ".join(sys.argv[1:]))
