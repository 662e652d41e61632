"""Programs copy a Trainer's callbacks, which hold the Trainer, during a fit and after it."""

from __future__ import annotations

import copy
import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest

from lightning_asgd import ASGDStrategy
from lightning_asgd.monitor.callback import ASGDMonitor

HOOKS = ("on_train_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end", "on_train_end")


@pytest.mark.parametrize("data", ["leases", "split"])
@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_callbacks_can_be_copied(tmp_path: Path, package: str, data: str) -> None:
    pl = importlib.import_module(package)
    boring = importlib.import_module(f"{package}.demos.boring_classes")

    def copies(self: Any, trainer: Any, *_: Any) -> None:
        copied = copy.deepcopy(trainer.callbacks)
        assert [type(each) for each in copied] == [type(each) for each in trainer.callbacks]
        self.done = getattr(self, "done", 0) + 1

    copying = type("Copying", (pl.Callback,), dict.fromkeys(HOOKS, copies))()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ASGDStrategy(nsync=2, start_method="fork", data=data),
        callbacks=[copying, ASGDMonitor(3.0), pl.callbacks.LearningRateMonitor(), pl.callbacks.TQDMProgressBar()],
        logger=pl.loggers.CSVLogger(tmp_path),
        max_epochs=1,
        default_root_dir=str(tmp_path),
    )
    trainer.fit(boring.BoringModel())
    copied = copy.deepcopy(trainer.callbacks)
    assert next(each for each in copied if isinstance(each, ASGDMonitor)).every_n_seconds == 3.0


@pytest.mark.parametrize("options", [{"island": 2}, {"island": "ddp", "run": "127.0.0.1:1/r"}, {}])
def test_strategies_can_be_copied(tmp_path: Path, options: dict[str, Any]) -> None:
    pl = importlib.import_module("pytorch_lightning")
    strategy = ASGDStrategy(nsync=2, **options)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, default_root_dir=str(tmp_path))
    for copied in (copy.deepcopy(trainer.strategy), pickle.loads(pickle.dumps(trainer.strategy))):
        assert type(copied) is type(trainer.strategy)
