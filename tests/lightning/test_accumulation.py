"""Callbacks that change how many batches make a step, or whether one is taken at all, while training is under way."""

from __future__ import annotations

import importlib
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_asgd import ASGDStrategy, Timeouts
from tests.lightning.models import dataset

USUALLY_ONE = ("pytorch_lightning", pytest.param("lightning.pytorch", marks=pytest.mark.slow))
SAMPLES, BATCH, EPOCHS = 128, 4, 3  # 16 batches for each of two workers


class Numbered(Dataset[Any]):
    """Samples that know their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return (*dataset(SAMPLES)[index], index)


def program(package: str, folder: Path, data: str, make: Any, **options: Any) -> list[Any]:
    """Fit with a callback, and return what each rank saw."""
    pl = importlib.import_module(package)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
            self.samples: list[Any] = []
            self.steps: list[int] = []
            self.epochs: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y, numbers = batch
            self.samples.append([self.current_epoch, numbers.tolist()])
            return nn.functional.mse_loss(self.net(x), y)

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self.steps.append(self.current_epoch)
            super().optimizer_step(*args, **kwargs)

        def on_train_epoch_end(self) -> None:
            ready = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self.epochs.append([self.trainer.global_step, ready])

        def on_fit_end(self) -> None:
            sums = {name: float(tensor.sum()) for name, tensor in self.state_dict().items()}
            seen = {
                "samples": self.samples,
                "steps": self.steps,
                "epochs": self.epochs,
                "state": sums,
                "accumulate": self.trainer.accumulate_grad_batches,
                "batches": self.trainer.num_training_batches,
            }
            (folder / f"rank{self.global_rank}.json").write_text(json.dumps(seen))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    strategy = ASGDStrategy(nsync=3, start_method="fork", data=data, timeouts=Timeouts(collective_s=20.0))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=[make(pl)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        default_root_dir=str(folder),
        **{"max_epochs": EPOCHS, **options},
    )
    trainer.fit(Module(), DataLoader(Numbered(), BATCH, shuffle=True))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def check_trained_once(ranks: list[Any], epochs: int) -> None:
    for epoch in range(epochs):
        samples = (i for rank in ranks for e, numbers in rank["samples"] if e == epoch for i in numbers)
        assert Counter(samples) == Counter(range(SAMPLES)), epoch
    zero, one = ranks
    assert zero["epochs"] == one["epochs"]
    assert zero["state"] == one["state"]
    assert zero["batches"] == one["batches"]


@pytest.mark.parametrize("package", USUALLY_ONE)
@pytest.mark.parametrize("data", ["leases", "split"])
def test_statistics_of_averaged_weights_are_those_of_all_samples(tmp_path: Path, package: str, data: str) -> None:
    """Lightning takes a last pass over the data without gradients."""

    def averaging(pl: Any) -> Any:
        return pl.callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=1)

    ranks = program(package, tmp_path, data, averaging)
    check_trained_once(ranks, EPOCHS + 1)
    for rank in ranks:
        assert rank["accumulate"] == 1
        assert rank["epochs"][-1] == [16 * EPOCHS + 1, 16]  # as under DDP: Lightning counts a step for the last pass
        assert rank["batches"] == 16


@pytest.mark.parametrize("package", USUALLY_ONE)
@pytest.mark.parametrize(
    ("accumulate", "steps"),
    [
        pytest.param(lambda trainer: 64, 1, id="more than an epoch"),
        pytest.param(lambda trainer: trainer.num_training_batches, 1, id="all of an epoch"),
        pytest.param(lambda trainer: 2 + 2 * trainer.global_rank, 8, id="by rank"),
    ],
)
def test_steps_of_a_number_of_batches_that_changes_between_epochs(
    tmp_path: Path, package: str, accumulate: Any, steps: int
) -> None:
    def changing(pl: Any) -> Any:
        class Changing(pl.Callback):
            def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
                trainer.accumulate_grad_batches = accumulate(trainer) if trainer.current_epoch == 1 else 1

        return Changing()

    ranks = program(package, tmp_path, "leases", changing)
    check_trained_once(ranks, EPOCHS)
    assert ranks[0]["epochs"] == [[16, 16], [16 + steps, 16], [32 + steps, 16]]
    assert all(1 in rank["steps"] for rank in ranks)


@pytest.mark.parametrize("package", USUALLY_ONE)
def test_steps_of_a_number_of_batches_that_changes_within_an_epoch(tmp_path: Path, package: str) -> None:
    def changing(pl: Any) -> Any:
        class Changing(pl.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                if trainer.current_epoch == 1 and len(module.samples) % 5 == trainer.global_rank:
                    trainer.accumulate_grad_batches = 4 - trainer.accumulate_grad_batches  # 1, 3, 1, ...

        return Changing()

    ranks = program(package, tmp_path, "leases", changing)
    check_trained_once(ranks, EPOCHS)
    counted = [0, *(step for step, _ in ranks[0]["epochs"])]
    assert counted[1] == 16
    assert all(5 <= after - before <= 17 for before, after in itertools.pairwise(counted))  # 16 batches by 3, and by 1
