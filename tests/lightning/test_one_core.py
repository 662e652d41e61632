"""One worker trains the same bits in a bare loop of torch, with AsyncSGD, with Fabric, and with a Trainer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import Advanced, ASGDStrategy, AsyncSGD, FabricASGDStrategy
from tests.lightning.models import dataset, digest

EPOCHS = 3
BATCH = 8
FABRICS = ("lightning_fabric", "lightning.fabric")
TRAINERS = ("pytorch_lightning", "lightning.pytorch")


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(4)
    return model, optimizer


def data() -> TensorDataset:
    return dataset(13 * BATCH)  # else leases may cut the last batches evenly


def step(
    model: nn.Module, optimizer: Any, batch: Any, backward: Callable[[Any], Any] = lambda loss: loss.backward()
) -> None:
    x, y = batch
    optimizer.zero_grad()
    backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()


def bare() -> str:
    model, optimizer = made()
    for _ in range(EPOCHS):
        for batch in DataLoader(data(), BATCH):
            step(model, optimizer, batch)
    return digest(model)


# Rules whose workers wait for each other, so each has data of its own.
RULES: dict[str, dict[str, Any]] = {
    "layerwise": {"algorithm": "layerwise"},
    "restarted": {"algorithm": "local_sgd", "nsync": "restarted"},
}
TOTAL = EPOCHS * 13


def plain_loop() -> str:
    model, optimizer = made()
    with AsyncSGD(model, optimizer, nsync=2, advanced=Advanced(units="samples")) as asgd:
        for _ in asgd.epochs(EPOCHS):
            for batch in asgd.batches(data(), batch_size=BATCH):
                step(model, optimizer, batch)
        assert asgd.stats.exchanges >= EPOCHS
    return digest(model)


def total_of(rule: str) -> dict[str, Any]:
    return {"total_steps": TOTAL} if rule == "restarted" else {}


def plain_loop_with_data_of_its_own(rule: str = "") -> str:
    model, optimizer = made()
    with AsyncSGD(model, optimizer, **{"nsync": 2, **RULES.get(rule, {}), **total_of(rule)}) as asgd:
        for _ in asgd.epochs(EPOCHS):
            for batch in DataLoader(data(), BATCH):
                step(model, optimizer, batch)
        assert asgd.stats.exchanges >= EPOCHS or rule == "layerwise"
        assert asgd.stats.steps == TOTAL
    return digest(model)


def fabric(package: str, *, leases: bool, rule: str = "") -> str:
    strategy: Any = FabricASGDStrategy(**{"nsync": 2, **RULES.get(rule, {}), **total_of(rule)})
    made_fabric = importlib.import_module(package).Fabric(accelerator="cpu", devices=1, strategy=strategy)
    made_fabric.launch()
    strategy = made_fabric.strategy
    model, optimizer = made()
    forward, steps = made_fabric.setup(model, optimizer)
    loader = made_fabric.setup_dataloaders(DataLoader(data(), BATCH))
    for _ in range(EPOCHS):
        for batch in strategy.batches(loader) if leases else loader:
            step(forward, steps, batch, made_fabric.backward)
    strategy.sync()
    assert strategy.stats.exchanges >= EPOCHS or rule == "layerwise"
    assert strategy.stats.steps == TOTAL
    strategy.teardown()
    return digest(model)


def trainer(package: str, folder: Path, rule: str = "") -> str:
    pl = importlib.import_module(package)
    model, optimizer = made()

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    off = (*off, "use_distributed_sampler")  # which shuffles
    options: dict[str, Any] = {**dict.fromkeys(off, False), "max_epochs": EPOCHS, "default_root_dir": folder}
    strategy = ASGDStrategy(**{"nsync": 2, **RULES.get(rule, {})})
    pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, **options).fit(Module(), DataLoader(data(), BATCH))
    assert strategy.stats.exchanges >= EPOCHS or rule == "layerwise"
    return digest(model)


@pytest.fixture(scope="module")
def expected() -> str:
    return bare()


@pytest.mark.parametrize("train", [plain_loop, plain_loop_with_data_of_its_own])
def test_a_plain_loop(train: Callable[[], str], expected: str) -> None:
    assert train() == expected


@pytest.mark.parametrize("leases", [True, False])
@pytest.mark.parametrize("package", FABRICS)
def test_fabric(package: str, leases: bool, expected: str) -> None:
    assert fabric(package, leases=leases) == expected


@pytest.mark.parametrize("package", TRAINERS)
def test_a_trainer(package: str, tmp_path: Path, expected: str) -> None:
    assert trainer(package, tmp_path) == expected


@pytest.mark.filterwarnings("ignore:nsync='restarted'. the theory is about SGD")
@pytest.mark.parametrize("rule", RULES)
def test_other_rules(rule: str, tmp_path: Path, expected: str) -> None:
    assert plain_loop_with_data_of_its_own(rule) == expected
    assert fabric(FABRICS[0], leases=False, rule=rule) == expected
    assert trainer(TRAINERS[0], tmp_path, rule) == expected
