"""Programs that take entries out of their checkpoints, on all workers or on worker 0 alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_asgd import ASGDStrategy, Timeouts
from lightning_asgd.core.lightning.checkpointing import KEY
from tests.lightning.models import loader

BOTH = ("pytorch_lightning", "lightning.pytorch")


def without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def take(checkpoint: dict[str, Any]) -> None:
        for key in keys:
            del checkpoint[key]

    return take


def adapters(checkpoint: dict[str, Any]) -> None:
    kept = {"state_dict": {"1.bias": checkpoint["state_dict"]["net.1.bias"]}}
    checkpoint.clear()
    checkpoint.update(kept)


def emptied(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"] = []


TAKES: dict[str, Callable[[dict[str, Any]], None]] = {
    "optimizers": without("optimizer_states"),
    "emptied": emptied,
    "schedulers": without("lr_schedulers"),
    "loops": without("loops"),
    "adapters": adapters,
    "callbacks": without("callbacks", "hyper_parameters"),
    "nothing": without(),
}


def make_module(package: str) -> Any:
    pl = importlib.import_module(package)

    class Module(pl.LightningModule):
        """Takes something out of its next checkpoints; has momentum and a schedule."""

        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 1))
            self.take: Callable[[dict[str, Any]], None] = without()
            self.alone, self.trained = False, 0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.trained += 1
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if not self.alone or self.trainer.is_global_zero:
                self.take(checkpoint)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    return Module()


class Saves:
    """Writes a checkpoint of each kind: in mid-epoch, on worker 0, and at the end of an epoch, on all workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.save(trainer, module, "middle")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.save(trainer, module, "end")

    def save(self, trainer: Any, module: Any, when: str) -> None:
        for alone in (False, True):
            for name, take in TAKES.items():
                module.take, module.alone = take, alone
                trainer.save_checkpoint(self.folder / f"{name}-{when}-{'alone' if alone else 'all'}.ckpt")
        module.take = without()
        trainer.save_checkpoint(self.folder / f"weights-{when}.ckpt", weights_only=True)


def make_trainer(package: str, folder: Path, strategy: Any, **options: Any) -> Any:
    pl = importlib.import_module(package)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    defaults = {"accelerator": "cpu", "max_epochs": 1, "default_root_dir": str(folder), **dict.fromkeys(quiet, False)}
    return pl.Trainer(strategy=strategy, **{**defaults, **options})


def saved_by(package: str, folder: Path) -> None:
    pl = importlib.import_module(package)
    saves = type("SavesHere", (Saves, pl.Callback), {})(folder)
    strategy = ASGDStrategy(nsync=3, start_method="fork", timeouts=Timeouts(collective_s=20.0))
    torch.manual_seed(0)
    make_trainer(package, folder, strategy, devices=2, callbacks=[saves]).fit(make_module(package), loader(128))


@pytest.mark.parametrize("package", BOTH)
def test_a_program_takes_entries_out_of_its_checkpoints(tmp_path: Path, package: str) -> None:
    saved_by(package, tmp_path)
    saved = {file.stem: torch.load(file, weights_only=True) for file in tmp_path.glob("*.ckpt")}
    assert len(saved) == 4 * len(TAKES) + 2
    kept = saved["nothing-end-all"][KEY]["workers"][1]
    assert set(kept) == {"optimizer_states", "lr_schedulers"}
    for name, checkpoint in saved.items():
        what, when = name.split("-")[:2]
        if what == "weights":
            assert KEY not in checkpoint
            continue
        others = checkpoint[KEY]["workers"].values()
        left = {"optimizers", "emptied", "adapters"} & {what}
        assert all(("optimizer_states" in each) is not bool(left) for each in others), name
        assert all(("lr_schedulers" in each) is (what not in ("schedulers", "adapters")) for each in others), name
        assert bool(checkpoint[KEY].get("data")) is (when == "middle" and what not in ("loops", "adapters")), name
    assert saved["adapters-end-alone"].keys() == {"state_dict", KEY}


def outcome(package: str, folder: Path, strategy: Any, file: Path) -> Any:
    """What a fit does that resumes from a file."""
    module = make_module(package)
    fit = make_trainer(package, folder, strategy, devices=1, max_epochs=2)
    try:
        fit.fit(module, loader(128), ckpt_path=file)
    except (KeyError, RuntimeError, TypeError) as error:
        return type(error), str(error)
    return fit.global_step, fit.current_epoch, fit.optimizers[0].param_groups[0]["lr"], module.trained


@pytest.mark.parametrize("package", BOTH)
def test_resuming_from_such_a_file_is_lightnings(tmp_path: Path, package: str) -> None:
    pl = importlib.import_module(package)
    saves = type("SavesHere", (Saves, pl.Callback), {})(tmp_path)
    torch.manual_seed(0)
    first = make_trainer(package, tmp_path, ASGDStrategy(nsync=3), devices=1, callbacks=[saves])
    first.fit(make_module(package), loader(128))
    for name in (*TAKES, "weights"):
        for when in ("middle", "end"):
            file = tmp_path / f"{name}-{when}{'' if name == 'weights' else '-all'}.ckpt"
            expected = outcome(package, tmp_path, "auto", file)
            assert outcome(package, tmp_path, ASGDStrategy(nsync=3), file) == expected, file.name
