"""Flags and masks that a program lowers while several workers train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_asgd import ASGDStrategy
from tests.lightning.models import Regression, loader, trainer


class Pruned(Regression):
    """Masks half of its inputs after the first epoch, and ends a warm-up."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))
        self.register_buffer("warm", torch.ones((), dtype=torch.uint8))
        self.found: list[Any] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((batch[0] * self.mask, batch[1]))

    def on_train_epoch_end(self) -> None:
        self.mask &= torch.arange(8) < 4
        self.warm.zero_()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.current_epoch:
            self.found.append((int(self.mask.sum()), int(self.warm)))

    def on_train_end(self) -> None:
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(self.found))


def test_a_mask_and_a_flag_that_were_lowered_stay_so_on_all_workers(tmp_path: Path) -> None:
    module = Pruned(tmp_path)
    files = ModelCheckpoint(tmp_path / "files", every_n_train_steps=5, save_top_k=-1, filename="{step}")
    about = {"enable_checkpointing": True, "callbacks": [files]}
    trainer(tmp_path, ASGDStrategy(nsync=1, data="split", start_method="fork"), **about).fit(module, loader(128))
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == [[4, 0]] * len(found)
        assert len(found) == 8
    assert (int(module.mask.sum()), int(module.warm)) == (4, 0)
    written = [torch.load(path, weights_only=False) for path in (tmp_path / "files").iterdir()]
    latest = max(written, key=lambda each: each["global_step"])
    assert latest["epoch"] == 1
    assert (int(latest["state_dict"]["mask"].sum()), int(latest["state_dict"]["warm"])) == (4, 0)
