"""Fabric with ``FabricASGDStrategy``: two processes, elastic runs, checkpoints, collectives, and what is refused."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_asgd import FabricASGDStrategy
from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError
from tests.helpers.plain import Counts, Run, Shards, numbered
from tests.helpers.programs import environment

SAMPLES = 60
FABRICS = ("lightning_fabric", "lightning.fabric")

TWO = """
import json, sys, time, torch
from {package} import Fabric
from lightning_asgd import FabricASGDStrategy
from lightning_asgd.algorithms import ASGD
from tests.helpers.plain import Counts, numbered

torch.set_num_threads(1)
fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricASGDStrategy(2, algorithm=ASGD("sum")))
fabric.launch()
rank, strategy, model = fabric.global_rank, fabric.strategy, Counts({samples})
gathered = fabric.all_gather(torch.tensor(rank)).tolist()
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(numbered({samples}), batch_size=3, shuffle=True))

def train(batches):
    for (numbers,) in batches:
        time.sleep(0.005 * rank)
        optimizer.zero_grad()
        with fabric.no_backward_sync(model):
            fabric.backward(model(numbers))
        optimizer.step()

for epoch in strategy.epochs(2):
    train(strategy.batches(loader))  # leased
loader.sampler.set_epoch(0)
train(loader)  # a half for each
strategy.sync()
total = fabric.all_reduce(torch.tensor(1.0), reduce_op="sum").item()
fabric.save(sys.argv[1] + "/all.ckpt", {{"model": model}})
about = dict(gathered=gathered, total=total, world=fabric.world_size, zero=fabric.is_global_zero)
names = ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric")
about.update(seen=model.seen.tolist(), modules=[name for name in names if name in sys.modules])
with open(f"{{sys.argv[1]}}/{{rank}}.json", "w") as file:
    json.dump(about, file)
"""


@pytest.mark.parametrize("package", [FABRICS[0], pytest.param(FABRICS[1], marks=pytest.mark.slow)])
def test_two_processes_share_an_epoch_and_leave_nothing_behind(package: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TWO.format(package=package, samples=SAMPLES))
    command = [sys.executable, "train.py", str(tmp_path)]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True) as main:
        try:
            _, errors = main.communicate(timeout=200)
        finally:
            main.kill()
    assert main.returncode == 0, errors
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["seen"] == [3.0] * SAMPLES
        assert (found["gathered"], found["total"], found["world"]) == ([0, 1], 2.0, 2)
        assert found["zero"] == (rank == 0)
        if package == "lightning_fabric":
            assert found["modules"] == ["lightning_fabric"]
    assert torch.load(tmp_path / "all.ckpt")["model"]["seen"].tolist() == [3.0] * SAMPLES
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in (each.info["cmdline"] or [])]


@pytest.fixture(params=FABRICS)
def fabrics(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes objects of Fabric, of either package, and tears their strategies down."""
    made = []

    def make(strategy: Any, **options: Any) -> Any:
        fabric = importlib.import_module(request.param).Fabric(accelerator="cpu", strategy=strategy, **options)
        made.append(fabric)
        return fabric

    yield make
    for fabric in made:
        fabric.strategy.teardown()


def counting(fabric: Any) -> tuple[Any, Any]:
    model = Counts(SAMPLES)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return model, optimizer


def train(fabric: Any, model: Any, optimizer: Any, batches: Any) -> None:
    for (numbers,) in batches:
        optimizer.zero_grad()
        fabric.backward(model(numbers))
        optimizer.step()


def test_a_worker_of_an_elastic_run(fabrics: Callable[..., Any]) -> None:
    run = Run()
    strategy = FabricASGDStrategy(2, algorithm=ASGD("sum"), run="127.0.0.1:1/s")
    strategy._job = run.job
    fabric = fabrics(strategy, devices=1)
    fabric.launch()
    model, optimizer = counting(fabric)
    late = Counts(SAMPLES)
    with run.worker(late, torch.optim.SGD(late.parameters(), lr=1.0)):
        for _ in strategy.epochs(2):
            train(fabric, model, optimizer, strategy.batches(numbered(SAMPLES), batch_size=7, shuffle=True))
    assert fabric.is_global_zero
    assert model.seen.tolist() == [2.0] * SAMPLES
    strategy.teardown()
    run.close()


def test_a_signal_is_kept_while_a_worker_joins(fabrics: Callable[..., Any]) -> None:
    run, kept = Run(), list[Any]()
    strategy = FabricASGDStrategy(2, run="127.0.0.1:1/s")
    strategy._job = job = run.job
    job.find_run = lambda: kept.append(signal.getsignal(signal.SIGTERM))
    fabric = fabrics(strategy, devices=1)
    fabric.launch()
    counting(fabric)
    assert kept != [signal.SIG_DFL]
    strategy.teardown()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    run.close()


def test_a_signal_is_kept_while_a_worker_joins_a_job(fabrics: Callable[..., Any]) -> None:
    kept = list[Any]()
    strategy = FabricASGDStrategy(2)
    connect = strategy._job.connect

    def connecting() -> Any:
        kept.append(signal.getsignal(signal.SIGTERM))
        return connect()

    strategy._job.connect = connecting  # type: ignore[method-assign]
    fabric = fabrics(strategy, devices=1)
    fabric.launch()
    handler = signal.getsignal(signal.SIGTERM)
    counting(fabric)
    assert kept == [handler]
    assert handler is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is handler
    strategy.teardown()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


class Stream(Shards, IterableDataset[Any]):
    """Shards that Fabric takes for a stream."""

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError


def test_a_loader_of_data_with_shards(fabrics: Callable[..., Any]) -> None:
    fabric = fabrics("asgd", devices=1)
    fabric.launch()
    model, optimizer = counting(fabric)
    loader = fabric.setup_dataloaders(DataLoader(Stream((20, 15, 25), known=False), batch_size=6, num_workers=2))
    for _ in fabric.strategy.epochs(2):
        train(fabric, model, optimizer, fabric.strategy.batches(loader))
    assert model.seen.tolist() == [2.0] * SAMPLES


@pytest.mark.parametrize("given", [torch.device("cuda", 0), torch.device("cuda", 1)])
def test_a_worker_that_torchrun_started_has_the_device_of_its_local_rank(given: torch.device) -> None:
    job, accelerator = SimpleNamespace(attaches=True), SimpleNamespace(auto_device_count=lambda: 4)
    strategy: Any = SimpleNamespace(_job=job, accelerator=accelerator, parallel_devices=[given], local_rank=2)
    getter: Any = FabricASGDStrategy.root_device
    assert getter.fget(strategy).index == (2 if given.index == 0 else 1)


def test_its_name_is_enough(fabrics: Callable[..., Any]) -> None:
    fabric = fabrics("asgd", devices=1)
    fabric.launch()
    model, optimizer = counting(fabric)
    train(fabric, model, optimizer, fabric.strategy.batches(numbered(SAMPLES), batch_size=6, accumulate=1))
    assert model.seen.tolist() == [1.0] * SAMPLES
    assert len(fabric.strategy.batches(numbered(SAMPLES), batch_size=6)) == 10


def test_weights_that_are_loaded_go_to_the_servers(fabrics: Callable[..., Any], tmp_path: Path) -> None:
    fabric = fabrics(FabricASGDStrategy(2), devices=1)
    fabric.launch()
    model, optimizer = counting(fabric)
    data = numbered(SAMPLES)
    for number, (numbers,) in enumerate(fabric.strategy.batches(data, batch_size=6)):
        optimizer.zero_grad()
        fabric.backward(model(numbers))
        optimizer.step()
        if number == 4:
            fabric.save(tmp_path / "middle.ckpt", {"model": model, "optimizer": optimizer})
            with pytest.raises(ConfigurationError, match=r"^fabric\.load\(\) was called while the workers train\."):
                fabric.load(tmp_path / "middle.ckpt", {"model": model})
    model.seen.data.zero_()
    fabric.load(tmp_path / "middle.ckpt", {"model": model, "optimizer": optimizer})
    assert model.seen.sum() == 30
    fabric.strategy.sync()
    assert model.seen.sum() == 30
    train(fabric, model, optimizer, fabric.strategy.batches(data, batch_size=6))
    assert model.seen.sum() == 30 + SAMPLES


def test_no_layer_gradient_leaves_where_backwards_are_accumulated(fabrics: Callable[..., Any]) -> None:
    fabric = fabrics(FabricASGDStrategy(algorithm="layerwise"), devices=1)
    fabric.launch()
    model, optimizer = counting(fabric)
    sent = []
    for accumulates in (True, True, False):
        with fabric.no_backward_sync(model, enabled=accumulates):
            fabric.backward(model(torch.tensor([3])))
        sent.append(fabric.strategy.stats.bytes_pushed > 0)
    optimizer.step()
    assert sent == [False, False, True]
    assert model.seen[3] == 3.0


def test_mixed_precision(fabrics: Callable[..., Any]) -> None:
    fabric = fabrics(FabricASGDStrategy(2), devices=1, precision="bf16-mixed")
    fabric.launch()
    model = nn.Linear(3, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(torch.utils.data.TensorDataset(torch.randn(20, 3)), batch_size=4))
    for (x,) in fabric.strategy.batches(loader):
        optimizer.zero_grad()
        fabric.backward(model(x).float().square().mean())
        optimizer.step()
    assert fabric.strategy.stats.steps == 5


def test_what_cannot_be_done_is_refused_by_name(fabrics: Callable[..., Any]) -> None:
    fabric = fabrics(FabricASGDStrategy(), devices=1)
    fabric.launch()
    with pytest.raises(ASGDError, match=r"^No module was set up\. Expected fabric\.setup"):
        fabric.strategy.sync()
    model = fabric.setup_module(nn.Linear(2, 1))
    with pytest.raises(ConfigurationError, match=r"^fabric\.setup_optimizers\(\) was called .* Expected fabric\.setup"):
        fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    counting(fabric)
    with pytest.raises(ConfigurationError, match=r"a second module and its optimizers\. Expected one"):
        counting(fabric)
    with pytest.raises(ConfigurationError, match=r"without total_steps\. Expected total_steps="):
        FabricASGDStrategy("restarted", algorithm="local_sgd")
    with pytest.raises(ConfigurationError, match=r"devices=2 .* run=\.\.\."):
        fabrics(FabricASGDStrategy(run="127.0.0.1:1/s"), devices=2)
