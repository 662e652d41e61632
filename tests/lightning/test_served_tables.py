"""A Trainer with a table that is stored on the servers, which are killed meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import ASGDStrategy, AsyncSGD, ServedEmbedding
from lightning_asgd.core.foundation.errors import ConfigurationError
from tests.helpers.servers import servers_of
from tests.lightning.models import trainer

ROWS, SAMPLES = 200, 512


class Counter(pl.LightningModule):
    """Every sample that is trained adds exactly 1 to its row: gradients are divided by the two workers."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.table = ServedEmbedding(ROWS, 4, folder=folder, optimizer="sgd", lr=2.0, init_std=0.0, cache_rows=50)
        self.other = torch.nn.Parameter(torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.other.square().sum() - self.table(batch[0]).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("total", self.table(torch.arange(ROWS))[:, 0].sum(), sync_dist=True)

    test_step = validation_step

    def prefetch_rows(self, batch: Any) -> None:
        self.table.prefetch(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class KillServers(pl.Callback):
    """Worker 0 kills each server once, while both workers train."""

    def __init__(self) -> None:
        self.killed = 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step >= 8 * (self.killed + 1) and self.killed < 2:
            servers_of(os.getppid())[0].kill()
            self.killed += 1


def indices() -> torch.Tensor:
    return torch.randint(0, ROWS, (SAMPLES,), generator=torch.Generator().manual_seed(0))


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(indices()), batch_size=8, shuffle=True)


def counts(module: Counter) -> list[float]:
    with torch.no_grad():
        values = module.table(torch.arange(ROWS))
    assert bool((values == values[:, :1]).all())
    return values[:, 0].tolist()


def test_killed_servers_lose_no_gradient_and_take_none_twice(tmp_path: Path) -> None:
    module, strategy = Counter(tmp_path / "table"), ASGDStrategy(nsync=4, num_servers=2, start_method="fork")
    fit = trainer(tmp_path, strategy, max_epochs=1, callbacks=[KillServers()])
    fit.fit(module, loader())
    assert strategy.stats.servers_replaced == 2
    assert counts(module) == indices().bincount(minlength=ROWS).tolist()
    assert not [each for each in psutil.Process().open_files() if str(tmp_path / "table") in each.path]


def test_checkpoints_have_the_table_beside_them(tmp_path: Path) -> None:
    def run(folder: str, epochs: int, **options: Any) -> tuple[pl.Trainer, Counter]:
        strategy = ASGDStrategy(nsync=4, start_method="fork")
        made = trainer(tmp_path, strategy, max_epochs=epochs, enable_checkpointing=True, **options)
        return made, Counter(tmp_path / folder)

    empty = DataLoader(TensorDataset(torch.zeros(2)))
    best = ModelCheckpoint(tmp_path / "best", monitor="total", mode="max", filename="{epoch}")
    fit, module = run("one", 2, callbacks=[best])
    fit.fit(module, loader(), empty)
    once = indices().bincount(minlength=ROWS).tolist()
    assert counts(module) == [2 * count for count in once]
    assert sorted(os.listdir(tmp_path / "best")) == ["epoch=1.ckpt", "epoch=1.ckpt.tables"]
    assert len(os.listdir(tmp_path / "best" / "epoch=1.ckpt.tables")) == 1
    again, other = run("two", 3)
    again.fit(other, loader(), empty, ckpt_path=best.best_model_path)
    assert counts(other) == [3 * count for count in once]
    (tested,) = again.test(other, empty, ckpt_path=best.best_model_path)
    assert tested["total"] == 2 * SAMPLES
    other.table.read_from(tmp_path / "two")
    assert counts(other) == [3 * count for count in once]
    fit.strategy.remove_checkpoint(best.best_model_path)
    assert os.listdir(tmp_path / "best") == []


def test_a_second_fit_continues_with_the_table_and_not_with_the_checkpoint(tmp_path: Path) -> None:
    module = Counter(tmp_path / "table")
    module.table.lr = 1.0  # there is one worker
    logger = pl.loggers.CSVLogger(tmp_path, name="csv", version="v")
    fit = trainer(tmp_path, ASGDStrategy(nsync=4), devices=1, max_epochs=1, logger=logger)
    fit.fit(module, loader())
    (head, *_) = (tmp_path / "csv" / "v" / "metrics.csv").read_text().splitlines()
    assert {"asgd/tables/hits", "asgd/tables/age"} < {*head.split(",")}
    fit.save_checkpoint(tmp_path / "one.ckpt")
    fit.save_checkpoint(tmp_path / "one.ckpt")
    assert len(os.listdir(tmp_path / "one.ckpt.tables")) == 1
    fit.fit_loop.max_epochs = 2
    fit.fit(module, loader(), ckpt_path=tmp_path / "one.ckpt")
    (tested,) = fit.test(module, DataLoader(TensorDataset(torch.zeros(2))), ckpt_path=tmp_path / "one.ckpt")
    fit.save_checkpoint(tmp_path / "one.ckpt")  # of the table that the test has read
    assert tested["total"] == sum(counts(module)) == SAMPLES
    fit.fit_loop.max_epochs = 3
    fit.fit(module, loader())
    assert counts(module) == [3 * count for count in indices().bincount(minlength=ROWS).tolist()]


def test_a_scaler_is_refused(tmp_path: Path) -> None:
    module, scaler = Counter(tmp_path / "table"), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with AsyncSGD(module, optimizer):
        scaler.scale(module.training_step([torch.tensor([1])], 0)).backward()
        with pytest.raises(ConfigurationError, match="A GradScaler scales the loss"):
            scaler.step(optimizer)


def test_a_plain_loop_trains_served_tables(tmp_path: Path) -> None:
    module = Counter(tmp_path / "table")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.table.lr = 1.0  # there is one worker
    with AsyncSGD(module, optimizer) as asgd:
        for batch in asgd.batches(TensorDataset(indices()), batch_size=8):
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
    assert counts(module) == indices().bincount(minlength=ROWS).tolist()
