"""Accelerators beside CPU and CUDA. The tests' machines have none of them: the CPU does their work here."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_asgd import Advanced, ASGDStrategy
from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.plan.timing import TrainingStep
from tests.lightning.models import Regression, loader, trainer
from tests.lightning.test_runs import address_of_run, serve

PACKAGES = ("pytorch_lightning", "lightning.pytorch")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "devices": 1}


def mps_of(package: str) -> Any:
    return importlib.import_module(f"{package}.accelerators").MPSAccelerator


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with MPS, as far as Lightning can see."""
    for package in PACKAGES:
        monkeypatch.setattr(mps_of(package), "is_available", staticmethod(lambda: True))
        monkeypatch.setattr(mps_of(package), "parse_devices", staticmethod(lambda devices: [0]))
        connector = importlib.import_module(f"{package}.trainer.connectors.accelerator_connector")
        automatic = staticmethod(lambda: "mps")
        monkeypatch.setattr(connector._AcceleratorConnector, "_choose_auto_accelerator", automatic)


@pytest.fixture
def mac_that_computes_on_its_cpu(mac: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES:
        cpu = staticmethod(lambda devices: [torch.device("cpu")])
        monkeypatch.setattr(mps_of(package), "get_parallel_devices", cpu)
        monkeypatch.setattr(mps_of(package), "setup_device", lambda *_: None)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("accelerator", ["auto", "gpu", "mps", "an object"])
def test_a_job_on_mps_is_told_the_way_out(package: str, accelerator: str, mac: None) -> None:
    made = mps_of(package)() if accelerator == "an object" else accelerator
    make_trainer = importlib.import_module(package).Trainer
    strategy = ASGDStrategy()
    for given in (strategy, "asgd"):
        with pytest.raises(
            ConfigurationError,
            match=r"ASGDStrategy\(\.\.\.\)\) was given the accelerator MPS\. Expected .* single device.*"
            r"ASGDStrategy\(run='host:port/name'\) and devices=1.*lightning-asgd serve.*"
            r"accelerator='cpu'",
        ):
            make_trainer(accelerator=made, strategy=given, **QUIET)
    assert make_trainer(accelerator="cpu", strategy=strategy, **QUIET).strategy is strategy


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("accelerator", ["auto", "gpu", "mps", "an object", "of the strategy"])
def test_a_worker_of_an_elastic_run_may_be_on_mps(package: str, accelerator: str, mac: None) -> None:
    pl = importlib.import_module(package)
    given = mps_of(package)() if accelerator in ("an object", "of the strategy") else accelerator
    plugins = importlib.import_module(f"{package}.plugins")
    about: dict[str, Any] = {"precision_plugin": plugins.HalfPrecision("bf16-true")}
    if accelerator == "of the strategy":
        about["accelerator"], given = given, "auto"
    strategy = ASGDStrategy(run="127.0.0.1:9/r", **about)
    made = pl.Trainer(accelerator=given, strategy=strategy, **QUIET)
    assert isinstance(made.accelerator, mps_of(package))
    assert made.strategy is strategy
    assert isinstance(strategy, pl.strategies.DDPStrategy)
    assert strategy.root_device == torch.device("mps", 0)
    assert made.precision == "bf16-true"


def test_lightnings_own_parallel_strategies_stay_refused_on_mps(mac: None) -> None:
    for strategy in ("ddp", pl.strategies.DDPStrategy()):
        with pytest.raises(ValueError, match="not supported on the MPS accelerator"):
            pl.Trainer(accelerator="mps", strategy=strategy, **QUIET)


def test_workers_on_mps_train_in_an_elastic_run(
    tmp_path: Path, mains: Any, monkeypatch: pytest.MonkeyPatch, mac_that_computes_on_its_cpu: None
) -> None:
    monkeypatch.delenv(SECRET_ENV, raising=False)  # an encrypted job of this process has made one
    served = mains(target=serve, args=(tmp_path, "rpc"))
    served.start()
    try:
        strategy = ASGDStrategy(2, run=address_of_run(tmp_path))
        made = trainer(tmp_path, strategy, devices=1, accelerator="mps", max_epochs=1)
        made.fit(Regression(), loader())
        assert isinstance(made.accelerator, pl.accelerators.MPSAccelerator)
        assert strategy.stats.exchanges > 1
        assert made.global_step == len(loader())
    finally:
        os.kill(served.pid, signal.SIGTERM)
        served.join(60)
        served.kill()
        served.join()
    assert served.exitcode == 0


class Vendor(pl.accelerators.Accelerator):
    """What a program brings for a device that Lightning does not know, such as XPU or NPU."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("cpu")] * devices

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "vendor"


def test_a_programs_own_accelerator_trains(tmp_path: Path) -> None:
    strategy = ASGDStrategy(2)
    made = trainer(tmp_path, strategy, devices=1, accelerator=Vendor(), max_epochs=1)
    made.fit(Regression(), loader())
    assert isinstance(made.accelerator, Vendor)
    assert strategy.stats.exchanges > 1


CUDA: dict[str, Any] = {"marks": [pytest.mark.device, NEEDS_CUDA]}


@pytest.mark.parametrize(
    ("accelerator", "offload"),
    [("cpu", False), pytest.param("cuda", False, **CUDA), pytest.param("cuda", True, **CUDA)],
)
@pytest.mark.parametrize("nsync", [1, 5])
def test_one_worker_trains_as_a_device_does_alone(tmp_path: Path, accelerator: str, offload: bool, nsync: int) -> None:
    trained = []
    for strategy in ("auto", ASGDStrategy(nsync, advanced=Advanced(offload=offload))):
        pl.seed_everything(1, verbose=False)
        module = Regression()
        about: dict[str, Any] = {"devices": 1, "accelerator": accelerator, "use_distributed_sampler": False}
        trainer(tmp_path, strategy, **about).fit(module, loader())
        trained.append(module.state_dict())
    torch.testing.assert_close(trained[1], trained[0])


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_step_is_timed_on_the_machines_accelerator_until_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    device, waited = torch.device("meta"), []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    step = TrainingStep(Plain())
    step(step.to_device(torch.ones(2, 3)))
    assert waited == [step.device] == [device]


def test_what_lightning_says_of_accelerators_that_it_does_not_know() -> None:
    """docs/troubleshooting.md quotes it."""
    with pytest.raises(ValueError, match="You selected an invalid accelerator name: `accelerator='xpu'`"):
        pl.Trainer(accelerator="xpu", strategy=ASGDStrategy(), **QUIET)
