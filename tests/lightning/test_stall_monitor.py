from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import pytest
import pytorch_lightning as pl
from torch.utils.data import DataLoader

from lightning_asgd import Advanced, ASGDStrategy
from lightning_asgd.data_stalls.stall_monitor import DataStallMonitor, when_batches_are_fetched
from tests.lightning.models import Regression, dataset, trainer

BATCHES, SLEEP_S = 10, 0.02


def sleepy(batch: Any) -> Any:
    time.sleep(SLEEP_S)
    return DataLoader(dataset(1)).collate_fn(batch)


def slow_loader() -> DataLoader[Any]:
    return DataLoader(dataset(8 * BATCHES), batch_size=8, collate_fn=sleepy)


class Seen(pl.Callback):
    """What was logged, batch by batch."""

    def __init__(self) -> None:
        self.shares: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.shares.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("stall/")})


def test_waiting_for_data_is_counted_and_logged(tmp_path: Path) -> None:
    monitor, seen = DataStallMonitor(), Seen()
    trainer(tmp_path, "auto", devices=1, callbacks=[monitor, seen]).fit(Regression(), slow_loader())
    batches = 2 * BATCHES  # two epochs
    assert monitor.steps == batches
    assert batches * SLEEP_S <= monitor.data_s <= monitor.total_s
    assert monitor.sync_s == 0.0
    assert seen.shares[-1] == {"stall/data": pytest.approx(monitor.data_s / monitor.total_s), "stall/sync": 0.0}
    assert len(seen.shares) == batches


def test_what_the_step_takes_is_no_data_stall(tmp_path: Path) -> None:
    class Slow(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(SLEEP_S)
            return super().training_step(batch, batch_idx)

    monitor = DataStallMonitor()
    quick = DataLoader(dataset(8 * BATCHES), batch_size=8)
    trainer(tmp_path, "auto", devices=1, max_epochs=1, callbacks=[monitor]).fit(Slow(), quick)
    assert monitor.total_s - monitor.data_s >= BATCHES * SLEEP_S


def test_waiting_for_exchanges_is_counted(tmp_path: Path) -> None:
    monitor = DataStallMonitor()
    fit = trainer(tmp_path, ASGDStrategy(nsync=1, advanced=Advanced(overlap=False)), devices=1, callbacks=[monitor])
    fit.fit(Regression(), slow_loader())
    assert 0 < monitor.sync_s == fit.strategy.stats.wait_s <= monitor.total_s
    assert monitor.data_s >= 2 * BATCHES * SLEEP_S


def test_the_trainer_is_left_as_it_was(tmp_path: Path) -> None:
    class Fails(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("as it must")

    fit = trainer(tmp_path, "auto", devices=1, max_epochs=1, callbacks=[DataStallMonitor()])
    before = set(vars(fit.fit_loop.epoch_loop))
    fit.fit(Regression(), slow_loader())
    assert set(vars(fit.fit_loop.epoch_loop)) == before
    with pytest.raises(ValueError, match="as it must"):
        trainer(tmp_path, "auto", devices=1, callbacks=[DataStallMonitor()]).fit(Fails(), slow_loader())


def test_a_trainer_of_either_tree_takes_it() -> None:
    monitor = DataStallMonitor()
    assert isinstance(monitor, pl.Callback)
    assert isinstance(monitor, lp.Callback)
    assert isinstance(pickle.loads(pickle.dumps(monitor)), pl.Callback)


def test_the_hooks_are_called_in_pairs(tmp_path: Path) -> None:
    calls: list[str] = []

    class Hooked(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.undo = when_batches_are_fetched(trainer, lambda: calls.append("before"), lambda: calls.append("after"))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.undo()

    fit = trainer(tmp_path, "auto", devices=1, max_epochs=1, callbacks=[Hooked()])
    fit.fit(Regression(), slow_loader())
    assert calls == ["before", "after"] * BATCHES
