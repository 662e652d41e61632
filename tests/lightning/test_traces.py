"""What a Trainer, its module and its callbacks hold of a fit that is over."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning as pl
import torch

from lightning_asgd import ASGDMonitor, ASGDStrategy
from tests.lightning.models import Regression, loader, trainer


def names(fit: Any) -> list[str]:
    return [type(callback).__name__ for callback in fit.callbacks]


class During(pl.Callback):
    """Keeps the names of the Trainer's callbacks while it trains, and may fail then."""

    def __init__(self, fail: str = "") -> None:
        self.fail = fail
        self.names: list[str] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.names = names(trainer)
        if self.fail == "fit":
            raise ZeroDivisionError("in the fit")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        assert "SyncPoints" in names(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.names = names(trainer)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.fail == "setup":
            raise ZeroDivisionError("in setup")


@pytest.mark.parametrize("fail", ["", "fit", "setup"])
def test_the_strategy_takes_its_callbacks_out_again(tmp_path: Path, fail: str) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    during = During(fail)
    fit = trainer(tmp_path, ASGDStrategy(), devices=1, logger=logger, callbacks=[during], max_epochs=1)
    before = list(fit.callbacks)
    if fail:
        with pytest.raises(ZeroDivisionError):
            fit.fit(Regression(), loader(64))
        assert fit.callbacks == before
        during.fail = ""
    fit.fit(Regression(), loader(64))
    assert during.names[:2] == ["SyncPoints", "ASGDMonitor"]
    assert fit.callbacks == before
    fit.validate(Regression(), loader(64))
    assert fit.callbacks == before
    assert during.names.count("SyncPoints") == 1
    fit.fit_loop.max_epochs = 2
    fit.fit(Regression(), loader(64))
    assert during.names.count("SyncPoints") == during.names.count("ASGDMonitor") == 1
    assert fit.callbacks == before


def test_a_users_own_monitor_stays(tmp_path: Path) -> None:
    monitor = ASGDMonitor()
    fit = trainer(tmp_path, ASGDStrategy(), devices=1, callbacks=[monitor], max_epochs=1)
    before = list(fit.callbacks)
    fit.fit(Regression(), loader(64))
    assert monitor in fit.callbacks
    assert fit.callbacks == before


@pytest.mark.parametrize("tree", [pl, pytest.param(lightning.pytorch, marks=pytest.mark.slow)])
def test_callbacks_module_and_strategy_can_be_pickled_after_a_fit(tmp_path: Path, tree: Any) -> None:
    off = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    fit = tree.Trainer(
        strategy=ASGDStrategy(), accelerator="cpu", devices=1, max_epochs=1, default_root_dir=str(tmp_path), **off
    )
    module = importlib.import_module(f"{tree.__name__}.demos.boring_classes").BoringModel()
    fit.fit(module)
    assert "SyncPoints" not in names(fit)
    again = pickle.loads(pickle.dumps(module))
    assert torch.equal(again.layer.weight, module.layer.weight)
    pickle.dumps(fit.callbacks)
    strategy = pickle.loads(pickle.dumps(fit.strategy))  # libraries save it with a model, and train on with it
    next_fit = tree.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, default_root_dir=str(tmp_path), **off
    )
    next_fit.fit(module)
    assert next_fit.global_step == fit.global_step > 0
    assert strategy.stats.steps == fit.global_step
