"""The steps of Adam in real fits: longer, with the user's rate in logs and checkpoints."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_asgd import Advanced, ASGDStrategy
from tests.lightning.models import loader

RATE = 1e-3


def program(package: str, folder: Path, *, manual: bool, gain: bool = True) -> list[dict[str, Any]]:
    """Fit with two workers. Returns what each has seen: the rates of its batches, and the last metrics."""
    pl = importlib.import_module(package)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)
            self.automatic_optimization = not manual
            self.rates: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            optimizer = self.optimizers()
            self.rates.append(optimizer.param_groups[0]["lr"])
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y + torch.randn_like(y))
            if manual:
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def on_fit_end(self) -> None:
            seen = {"rates": self.rates, "gain": self.trainer.strategy.board.mine.gain}
            (folder / f"{self.global_rank}.json").write_text(json.dumps(seen))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ASGDStrategy(nsync=2, start_method="fork", advanced=Advanced(gain=gain)),
        callbacks=[pl.callbacks.LearningRateMonitor("step")],
        logger=pl.loggers.CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
        default_root_dir=str(folder),
    )
    trainer.fit(Module(), loader(320))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_programs_see_their_own_rate(tmp_path: Path, package: str, manual: bool) -> None:
    found = program(package, tmp_path, manual=manual)
    assert all(1 < each["gain"] <= 2**0.5 + 1e-6 for each in found)
    assert {rate for each in found for rate in each["rates"]} == {RATE}
    with (tmp_path / "metrics.csv").open() as file:
        logged = {row["lr-AdamW"] for row in csv.DictReader(file)} - {""}
    assert {float(rate) for rate in logged} == {RATE}
    (saved,) = tmp_path.rglob("*.ckpt")
    states = torch.load(saved, weights_only=False)["optimizer_states"]
    assert [state["param_groups"][0]["lr"] for state in states] == [RATE]


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    found = program("pytorch_lightning", tmp_path, manual=False, gain=False)
    assert [each["gain"] for each in found] == [0.0, 0.0]
