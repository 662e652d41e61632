"""Where the monitor writes for loggers whose attributes are no texts."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_asgd import ASGDStrategy
from lightning_asgd.monitor.callback import log_folder


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"log_dir": "logs"}, "logs"),
        ({"log_dir": Path("logs")}, "logs"),
        ({"log_dir": "s3://bucket/logs"}, "s3://bucket/logs"),
        ({"save_dir": "saved", "name": "net", "version": 3}, os.path.join("saved", "net", "version_3")),
        ({"save_dir": Path("saved"), "name": "net", "version": "a"}, os.path.join("saved", "net", "a")),
        ({"log_dir": Mock(), "save_dir": Mock(), "name": Mock(), "version": Mock()}, "root"),
        (
            {"log_dir": MagicMock(), "save_dir": MagicMock(), "name": "net", "version": 0},
            os.path.join("root", "net", "version_0"),
        ),
        ({"log_dir": object(), "save_dir": ""}, "root"),
    ],
)
def test_the_folder_is_that_of_texts_and_paths(about: dict[str, Any], expected: str) -> None:
    logger = SimpleNamespace(**{"log_dir": None, "save_dir": None, "name": None, "version": None, **about})
    trainer = SimpleNamespace(fast_dev_run=False, loggers=[logger], default_root_dir=Path("root"))
    assert log_folder(trainer) == expected


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_a_fit_makes_no_folder_of_a_representation(
    tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pl = importlib.import_module(package)
    importlib.import_module(f"{package}.demos.boring_classes")

    class Logger(pl.loggers.logger.DummyLogger):
        log_dir = property(lambda self: MagicMock())
        save_dir = property(lambda self: MagicMock())

    class Module(pl.demos.boring_classes.BoringModel):
        def train_dataloader(self) -> Any:
            return DataLoader(torch.zeros(16, 32))

        val_dataloader = None

    monkeypatch.chdir(tmp_path)
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    fit = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ASGDStrategy(),
        max_epochs=1,
        logger=Logger(),
        default_root_dir="root",
        **quiet,
    )
    fit.fit(Module())
    assert [file.name for file in tmp_path.iterdir()] == ["root"]
