"""Batches that differ in size: pushes weigh what was trained for them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

from lightning_asgd import Advanced, ASGDMonitor, ASGDStrategy
from tests.lightning.models import trainer

SAMPLES, BATCH, LONGEST, RATE = 16, 2, 9, 0.1


class Texts(Dataset[Any]):
    """Texts of very different lengths, padded."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = 1 + index * 5 % LONGEST
        ids = torch.arange(LONGEST) + index
        return {"input_ids": ids, "attention_mask": (torch.arange(LONGEST) < length).long()}


def loss_of(weight: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean over tokens."""
    mask = batch["attention_mask"]
    error = (weight[batch["input_ids"] % 3] - batch["input_ids"] / 10) ** 2
    return (error * mask).sum() / mask.sum()


class Language(pl.LightningModule):
    """Notes the texts of its batches, by their first token."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.texts: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.texts.append(batch["input_ids"][:, 0].tolist())
        return loss_of(self.weight, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)

    def on_train_end(self) -> None:
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(self.texts))


def reference(folder: Path) -> torch.Tensor:
    """One process that trains the batches of both workers together."""
    weight = torch.zeros(3, requires_grad=True)
    mine, theirs = (json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    for texts in map(list.__add__, mine, theirs):
        samples = [Texts()[number] for number in texts]
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        (gradient,) = torch.autograd.grad(loss_of(weight, batch), weight)
        weight = (weight - RATE * gradient).detach().requires_grad_()
    return weight.detach()


def by_mask(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["attention_mask"].sum()


@pytest.mark.parametrize(("units", "equal"), [("tokens", True), (by_mask, True), (None, False)])
def test_two_workers_in_lock_step_train_as_one_process_with_their_tokens_together(
    tmp_path: Path, units: Any, equal: bool
) -> None:
    module = Language(tmp_path)
    strategy = ASGDStrategy(nsync=1, algorithm="local_sgd", advanced=Advanced(units=units), start_method="fork")
    trainer(tmp_path, strategy, max_epochs=3).fit(module, DataLoader(Texts(), BATCH))
    assert torch.allclose(module.weight, reference(tmp_path), rtol=0, atol=1e-6) == equal


def test_progress_and_speed_are_in_tokens(tmp_path: Path) -> None:
    strategy = ASGDStrategy(nsync=2, advanced=Advanced(units="tokens"), start_method="fork")
    fit = trainer(tmp_path, strategy, max_epochs=2, logger=CSVLogger(tmp_path), callbacks=[ASGDMonitor(0.1)])
    fit.fit(Language(tmp_path), DataLoader(Texts(), BATCH))
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open() as lines:
        rates = [float(row["asgd/tokens_per_s"]) for row in csv.DictReader(lines) if row["asgd/tokens_per_s"]]
    assert rates[-1] > 0
    (journal,) = tmp_path.rglob("*.jsonl")
    assert journal.read_text().count('"tokens"') >= 2
