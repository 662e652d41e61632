"""Checkpoints that an earlier version wrote: a fit of two workers under either Lightning resumes from them.

tests/data/middle.ckpt was written by worker 0 alone in the middle of an epoch, tests/data/end.ckpt by two workers at an
epoch's end; both with two servers. They stay as they were written. To write others:
python -m tests.lightning.test_recorded_checkpoints FOLDER
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import ASGDStrategy
from lightning_asgd.algorithms import ASGD

DATA = Path(__file__).parent.parent / "data"
PACKAGES = ("pytorch_lightning", "lightning.pytorch")
SAMPLES, BATCH = 96, 4  # 12 steps of each worker per epoch


def module_of(pl: Any) -> Any:
    class Counting(pl.LightningModule):  # type: ignore[misc, name-defined]
        """``trained`` says how often each sample was trained. The other parameter has momentum."""

        def __init__(self) -> None:
            super().__init__()
            self.trained = torch.nn.Parameter(torch.zeros(SAMPLES))
            self.other = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return -self.trained[batch[0]].sum() + (self.other * (1 + self.global_rank)).sum()

        def configure_optimizers(self) -> Any:
            other = {"params": [self.other], "lr": 0.01, "momentum": 0.5}
            optimizer = torch.optim.SGD([{"params": [self.trained], "lr": 1.0}, other])
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda step: 0.9**step])
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Counting()


def fit(pl: Any, folder: Path, module: Any, callback: Any, epochs: int, checkpoint: Path | None = None) -> None:
    strategy = ASGDStrategy(nsync=3, algorithm=ASGD("sum"), num_servers=2, start_method="fork")
    off = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    quiet: dict[str, Any] = dict.fromkeys(off, False)
    about = {"accelerator": "cpu", "devices": 2, "max_epochs": epochs, "default_root_dir": folder, **quiet}
    batches = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH, shuffle=True)
    pl.Trainer(strategy=strategy, callbacks=[callback], **about).fit(module, batches, ckpt_path=checkpoint)


def noting(pl: Any, folder: Path) -> Any:
    class Noting(pl.Callback):  # type: ignore[misc, name-defined]
        """Writes what each worker resumes with."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            optimizer = trainer.optimizers[0]
            noted = {
                "epoch": trainer.current_epoch,
                "step": trainer.global_step,
                "lr": [group["lr"] for group in optimizer.param_groups],
                "momentum": [float(s["momentum_buffer"]) for s in optimizer.state.values() if "momentum_buffer" in s],
                "trained": pl_module.trained.tolist(),
            }
            (folder / f"{trainer.global_rank}.json").write_text(json.dumps(noted))

    return Noting()


def cases() -> list[Any]:
    quick = {("middle", PACKAGES[0]), ("end", PACKAGES[1])}
    pairs = [(name, package) for name in ("middle", "end") for package in PACKAGES]
    return [pytest.param(*pair, marks=[] if pair in quick else [pytest.mark.slow]) for pair in pairs]


@pytest.mark.parametrize(("name", "package"), cases())
def test_a_recorded_checkpoint_resumes(name: str, package: str, tmp_path: Path) -> None:
    pl = importlib.import_module(package)
    recorded = torch.load(DATA / f"{name}.ckpt", weights_only=True)
    module = module_of(pl)
    fit(pl, tmp_path, module, noting(pl, tmp_path), 4, DATA / f"{name}.ckpt")
    entry = recorded["lightning_asgd"]
    for rank in (0, 1):
        noted = json.loads((tmp_path / f"{rank}.json").read_text())
        # What worker 0 writes alone holds no other worker's optimizer.
        mine = recorded | entry["workers"].get(rank, {})
        groups, state = mine["optimizer_states"][0]["param_groups"], mine["optimizer_states"][0]["state"]
        assert noted["step"] == recorded["global_step"]
        assert noted["epoch"] == recorded["epoch"] + (name == "end")
        assert noted["lr"] == [group["lr"] for group in groups]
        assert noted["momentum"] == [
            float(s["momentum_buffer"]) for s in state.values() if s.get("momentum_buffer") is not None
        ]
        assert noted["trained"] == recorded["state_dict"]["trained"].tolist()
    assert module.trained.tolist() == [4.0] * SAMPLES  # each sample once per epoch, before or after


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    pl = importlib.import_module(PACKAGES[0])

    class Saving(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if trainer.current_epoch == 1 and args[-1] == 6:
                trainer.save_checkpoint(folder / "middle.ckpt")

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(folder / "end.ckpt")

    fit(pl, folder, module_of(pl), Saving(), 2)
