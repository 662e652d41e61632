"""Training that is stopped in the middle of an epoch ends at one common place, with the same counters everywhere."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_asgd import ASGDStrategy, Timeouts
from tests.helpers.holding import await_file
from tests.lightning.models import dataset

USUALLY_ONE = ("pytorch_lightning", pytest.param("lightning.pytorch", marks=pytest.mark.slow))
BATCH, BATCHES = 4, 64  # 32 for each of two workers


def counters(trainer: Any) -> dict[str, Any]:
    """What Lightning has counted, and what a program sees of it."""
    loop = trainer.fit_loop.epoch_loop
    current, total = loop.batch_progress.current, loop.batch_progress.total
    return {
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "current": [current.ready, current.completed],
        "total": [total.ready, total.completed],
        "accumulate": trainer.accumulate_grad_batches,
        "stops": trainer.should_stop,
    }


def program(package: str, folder: Path, stop: Any, data: str, *, saver: Any = (), **options: Any) -> list[Any]:
    """Fit, and return what each rank saw of sync points and counters."""
    pl = importlib.import_module(package)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)
            self.trained = 0
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.trained += 1
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return stop(self, batch_idx, "start")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            stop(self, batch_idx, "end")

        def on_validation_end(self) -> None:
            self.seen.append(["validation", self.trainer.global_step])
            stop(self, 0, "validation")

        def on_train_epoch_end(self) -> None:
            self.seen.append(["epoch", counters(self.trainer)])

        def on_fit_end(self) -> None:
            weights = [float(p.sum()) for p in self.parameters()]
            seen = {"seen": self.seen, "end": counters(self.trainer), "weights": weights, "trained": self.trained}
            (folder / f"rank{self.global_rank}.json").write_text(json.dumps(seen))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    callbacks = options.pop("callbacks", [])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ASGDStrategy(nsync=3, start_method="fork", data=data, timeouts=Timeouts(collective_s=20.0)),
        callbacks=[make(pl, folder) for make in callbacks],
        **{
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": bool(callbacks),
            "num_sanity_val_steps": 0,
            "max_epochs": -1,
            "default_root_dir": str(folder),
            **options,
        },
    )
    data_set = dataset(BATCH * BATCHES)
    trainer.fit(Module(), DataLoader(data_set, BATCH), DataLoader(dataset(16), 4))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def saver(pl: Any, folder: Path) -> Any:
    return pl.callbacks.ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}-{step}")


def stop_at(places: dict[int, tuple[int, int]], where: str = "end") -> Any:
    """Ranks stop in given epochs, at given numbers of their batches; or later, if they train fewer."""

    def stop(module: Any, batch_idx: int, here: str) -> None:
        epoch, batch = places.get(module.global_rank, (99, 0))
        if here == where and module.current_epoch >= epoch and batch_idx >= batch:
            module.trainer.should_stop = True

    return stop


@pytest.mark.parametrize("package", USUALLY_ONE)
@pytest.mark.parametrize("data", ["leases", "split"])
@pytest.mark.parametrize(
    ("stop", "options"),
    [
        pytest.param(stop_at({1: (1, 4)}), {}, id="one"),
        pytest.param(stop_at({0: (1, 4), 1: (1, 9)}), {"val_check_interval": 10}, id="both"),
        pytest.param(stop_at({0: (0, 5), 1: (0, 7)}), {"check_val_every_n_epoch": 2}, id="no validation"),
        pytest.param(stop_at({0: (1, 2)}), {"min_steps": 45, "val_check_interval": 0.25}, id="not yet"),
        pytest.param(stop_at({1: (1, 0)}, "validation"), {"val_check_interval": 10}, id="in validation"),
    ],
)
def test_all_stop_at_one_place(tmp_path: Path, package: str, data: str, stop: Any, options: dict[str, Any]) -> None:
    zero, one = program(package, tmp_path, stop, data, callbacks=[saver], **options)
    assert zero["end"] == one["end"]
    assert zero["seen"] == one["seen"]
    assert zero["weights"] == one["weights"]
    assert zero["end"]["stops"]
    assert zero["end"]["step"] == zero["end"]["total"][0]


@pytest.mark.parametrize("package", USUALLY_ONE)
@pytest.mark.parametrize("data", ["leases", "split"])
@pytest.mark.parametrize(
    ("hook", "epoch"), [("on_train_start", 0), ("on_train_epoch_start", 0), ("on_train_epoch_start", 1)]
)
def test_all_stop_before_an_epoch_where_one_does(
    tmp_path: Path, package: str, data: str, hook: str, epoch: int
) -> None:
    def stopping(pl: Any, folder: Path) -> Any:
        def stop(_: Any, trainer: Any, module: Any) -> None:
            if trainer.global_rank == 1 and trainer.current_epoch == epoch:
                trainer.should_stop = True

        return type("Stopping", (pl.Callback,), {hook: stop})()

    zero, one = program(package, tmp_path, lambda *_: None, data, callbacks=[stopping], max_epochs=4)
    assert zero["end"] == one["end"]
    assert zero["seen"] == one["seen"]
    assert 2 * zero["end"]["step"] == zero["trained"] + one["trained"] == BATCHES * epoch
    assert [what for what, _ in zero["seen"]].count("validation") == epoch


@pytest.mark.parametrize("data", ["leases", "split"])
def test_the_others_come_where_one_stops(tmp_path: Path, data: str) -> None:
    """With their next exchange, not at the epoch's end."""

    def stop(module: Any, batch_idx: int, here: str) -> None:
        if here == "end" and module.global_rank == 0:
            if batch_idx == 0:
                await_file(tmp_path / "stopping")  # else it might train all, apart from one batch, before the other
            time.sleep(0.1)  # an epoch of 32 batches takes it seconds
        elif here == "end" and batch_idx == 4:
            (tmp_path / "stopping").touch()
            module.trainer.should_stop = True

    zero, one = program("pytorch_lightning", tmp_path, stop, data)
    assert zero["end"] == one["end"]
    assert zero["weights"] == one["weights"]
    assert one["trained"] == 5
    assert zero["trained"] < BATCHES // 2


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
@pytest.mark.parametrize(("trained", "accumulate"), [(5, 1), (7, 2)])
def test_an_epoch_that_a_hook_ends_counts_the_steps_that_were_trained(
    tmp_path: Path, package: str, trained: int, accumulate: int
) -> None:
    """As under DDP: each worker's hook returns -1 at its own batch, whatever it expects the other to have trained."""

    def stop(module: Any, batch_idx: int, here: str) -> int | None:
        if here == "end":
            time.sleep(0.002 + 0.02 * (module.global_rank == batch_idx % 2))  # no estimate of speeds is right
        return -1 if here == "start" and batch_idx >= trained else None

    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    zero, one = program(package, tmp_path, stop, "leases", **options)
    assert zero["end"] == one["end"]
    assert [zero["trained"], one["trained"]] == 2 * [3 * trained]
    epochs = [seen for what, seen in zero["seen"] if what == "epoch"]
    assert [seen["step"] for seen in epochs] == [epoch * (trained // accumulate) for epoch in (1, 2, 3)]
    whole = trained // accumulate * accumulate
    assert [seen["current"][0] for seen in epochs] == 3 * [whole + 1]  # Lightning counts the batch that is skipped
