"""Files and rows that are due at steps which worker 0's count passes, since another worker takes them."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_asgd import ASGDStrategy, Timeouts
from tests.helpers.holding import await_file
from tests.lightning.models import loader

BOTH = ("pytorch_lightning", "lightning.pytorch")
STEPS = 22  # of an epoch, of each of two equal workers


def program(package: str, folder: Path, slow: int, steps_of_a_batch: int = 1, **options: Any) -> dict[str, Any]:
    """Fit with worker ``slow`` ten times slower. Returns the steps of files and rows."""
    pl = importlib.import_module(package)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)
            self.automatic_optimization = steps_of_a_batch == 1

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.03 if self.global_rank == slow else 0.003)
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            self.log("loss", loss)
            if not self.automatic_optimization:
                loss.backward()
                for _ in range(steps_of_a_batch):
                    self.optimizers().step()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            options.get("stop", lambda *_: None)(self, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Saver(pl.callbacks.ModelCheckpoint):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert len(batch) == 2
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)

    class Rows(pl.loggers.CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if pl.utilities.rank_zero_only.rank == 0:
                kind = next((name for name in metrics if name.startswith(("loss", "lr"))), None)
                with (folder / "rows.jsonl").open("a") as file:
                    print(json.dumps([kind, step]), file=file)

    every = options.get("every", (4, 3, 5))
    savers = [Saver(folder / f"every{n}", f"{n}-{{step}}", save_top_k=-1, every_n_train_steps=n) for n in every[:2]]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ASGDStrategy(
            nsync=3,
            start_method="fork",
            data=options.get("data", "leases"),
            timeouts=Timeouts(collective_s=20.0),
            monitor=False,
        ),
        callbacks=[*savers, pl.callbacks.LearningRateMonitor("step")],
        logger=Rows(folder),
        log_every_n_steps=every[2],
        accumulate_grad_batches=options.get("accumulate", 1),
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
        default_root_dir=str(folder),
    )
    trainer.fit(Module(), loader(2 * STEPS * 8))
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    files = {n: sorted(int(file.stem.split("=")[1]) for file in (folder / f"every{n}").glob("*")) for n in every[:2]}
    kinds = {kind: [step for each, step in rows if each == kind] for kind in ("loss", "lr-SGD")}
    return {"files": files, "rows": kinds}


def multiples(n: int, last: int, first: int = 0) -> list[int]:
    return [step for step in range(n, last + 1, n) if step > first]


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize("slow", [0, 1])
def test_each_file_and_row_is_written_once(tmp_path: Path, package: str, slow: int) -> None:
    found = program(package, tmp_path, slow)
    assert found["files"] == {n: multiples(n, 2 * STEPS) for n in (4, 3)}
    rows = [step - 1 for step in multiples(5, 2 * STEPS)]
    assert found["rows"] == {"loss": rows, "lr-SGD": rows}


def test_each_row_is_written_once_where_every_step_is_logged(tmp_path: Path) -> None:
    found = program("pytorch_lightning", tmp_path, 1, every=(4, 3, 1))
    rows = list(range(2 * STEPS))
    assert found["rows"] == {"loss": rows, "lr-SGD": rows}


@pytest.mark.parametrize("package", BOTH)
def test_within_steps_of_several_batches(tmp_path: Path, package: str) -> None:
    found = program(package, tmp_path, 0, accumulate=2)
    assert found["files"] == {n: multiples(n, STEPS) for n in (4, 3)}
    assert found["rows"]["loss"] == [step - 1 for step in multiples(5, STEPS)]


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize("slow", [0, 1])
def test_batches_of_several_steps_are_not_divided(tmp_path: Path, package: str, slow: int) -> None:
    """As on one device: two optimizer steps of a batch show hooks every second number only, and rows count batches."""
    found = program(package, tmp_path, slow, steps_of_a_batch=2)
    assert found["files"] == {4: multiples(4, 4 * STEPS), 3: multiples(6, 4 * STEPS)}
    rows = [step - 1 for step in multiples(5, 2 * STEPS)]
    assert found["rows"] == {"loss": rows, "lr-SGD": rows}


def test_rows_of_a_module_whose_steps_lightning_does_not_see(tmp_path: Path) -> None:
    found = program("pytorch_lightning", tmp_path, 0, steps_of_a_batch=0)
    rows = [step - 1 for step in multiples(5, 2 * STEPS)]
    assert found["rows"] == {"loss": rows, "lr-SGD": rows}


@pytest.mark.parametrize("package", BOTH)
def test_steps_that_others_have_taken_where_they_stop(tmp_path: Path, package: str) -> None:
    def stop(module: Any, batch_idx: int) -> None:
        if module.global_rank == 1:
            (tmp_path / f"trained{batch_idx}").touch()
            module.trainer.should_stop |= batch_idx == 18
        elif batch_idx == 0:  # this worker is the slower one, also where the other one starts late
            await_file(tmp_path / "trained14")

    found = program(package, tmp_path, 0, stop=stop, every=(1, 2, 1))
    last = found["files"][1][-1]
    assert 8 <= last < STEPS
    assert found["files"] == {n: multiples(n, last) for n in (1, 2)}
    assert found["rows"]["loss"] == list(range(last))


@pytest.mark.parametrize("package", BOTH)
def test_the_chief_decides_which_file_is_the_best_where_ranks_log_values_of_their_own(
    tmp_path: Path, package: str
) -> None:
    pl = importlib.import_module(package)
    boring = importlib.import_module(f"{package}.demos.boring_classes").BoringModel

    class Module(boring):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("m", 10.0 - self.current_epoch + 5 * self.global_rank)
            return super().training_step(batch, batch_idx)

        def on_fit_end(self) -> None:
            kept = {Path(path).name: float(m) for path, m in self.trainer.checkpoint_callback.best_k_models.items()}
            (tmp_path / f"rank{self.global_rank}.json").write_text(json.dumps(kept))

    saver = pl.callbacks.ModelCheckpoint(tmp_path / "files", "{epoch}", monitor="m", save_top_k=2)
    pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ASGDStrategy(start_method="fork", monitor=False),
        callbacks=[saver],
        logger=False,
        max_epochs=4,
        limit_train_batches=4,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module())
    kept = {"epoch=2.ckpt": 8.0, "epoch=3.ckpt": 7.0}
    assert {file.name for file in (tmp_path / "files").iterdir()} == kept.keys()
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == kept


def fit_boring(folder: Path, hooks: type, epochs: int, every: int, **options: Any) -> None:
    """Fit Lightning's own model for epochs of ten steps, with a file every few steps; ``hooks`` are the module's."""
    pl = importlib.import_module("pytorch_lightning")
    boring = importlib.import_module("pytorch_lightning.demos.boring_classes").BoringModel
    file = options.pop("ckpt_path", None)
    settings = {"limit_train_batches": 10, "limit_val_batches": 0, "num_sanity_val_steps": 0, "logger": False}
    data = options.pop("train_dataloaders", None)
    pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ASGDStrategy(start_method="fork", monitor=False, data=options.pop("data", "leases")),
        callbacks=[pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1)],
        max_epochs=epochs,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**settings, **options},
    ).fit(type("Module", (hooks, boring), {})(), data, ckpt_path=file)


def test_a_file_of_an_epochs_last_step_resumes_with_the_next_epoch(tmp_path: Path) -> None:
    class Hooks:
        def on_fit_start(self: Any) -> None:
            self.validated: list[int] = []

        def on_validation_end(self: Any) -> None:
            self.validated.append(self.trainer.global_step)

        def on_fit_end(self: Any) -> None:
            begun = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
            (tmp_path / f"rank{self.global_rank}.json").write_text(json.dumps([begun, self.validated]))

    about = {"limit_val_batches": 1, "val_check_interval": 7, "check_val_every_n_epoch": None}
    fit_boring(tmp_path, Hooks, 1, 1, **about)
    fit_boring(tmp_path, Hooks, 3, 1, **about, ckpt_path=str(tmp_path / "step=10.ckpt"))
    assert json.loads((tmp_path / "rank0.json").read_text()) == [30, [14, 21, 28]]


def test_a_file_that_is_written_at_an_epochs_end_resumes_with_the_next_epoch(tmp_path: Path) -> None:
    """Step 8 of 10 falls due when worker 1 has trained the rest of the epoch."""

    class Hooks:
        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 0:
                await_file(tmp_path / "trained", 10)
            elif batch_idx == 18:
                (tmp_path / "trained").touch()
            return {"loss": self.step(batch)}

        def on_train_epoch_end(self: Any) -> None:
            steps = self.trainer.global_step, self.trainer.lr_scheduler_configs[0].scheduler.last_epoch
            (tmp_path / f"rank{self.global_rank}.json").write_text(json.dumps(steps))

        def configure_optimizers(self: Any) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    fit_boring(tmp_path, Hooks, 1, 8)
    assert torch.load(tmp_path / "step=8.ckpt", weights_only=False)["global_step"] == 8
    fit_boring(tmp_path, Hooks, 2, 8, ckpt_path=str(tmp_path / "step=8.ckpt"))
    assert json.loads((tmp_path / "rank0.json").read_text()) == [20, 20]


class Ten(IterableDataset):
    """Ten batches for each rank, or none for rank 0."""

    def __init__(self, *, leaves_out: bool) -> None:
        self.leaves_out = leaves_out

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = torch.distributed.get_rank()
        yield from torch.full((0 if self.leaves_out and rank == 0 else 10, 32), float(rank))


def test_a_worker_without_batches_counts_the_steps_of_the_others_once(tmp_path: Path) -> None:
    class Hooks:
        def on_train_epoch_end(self: Any) -> None:
            counts = self.trainer.global_step, self.trainer.fit_loop.epoch_loop._batches_that_stepped
            (tmp_path / f"rank{self.global_rank}.json").write_text(json.dumps(counts))

    about = {"data": "split", "limit_train_batches": 1.0}
    fit_boring(tmp_path, Hooks, 1, 10, **about, train_dataloaders=DataLoader(Ten(leaves_out=False)))
    file = str(tmp_path / "step=10.ckpt")
    fit_boring(tmp_path, Hooks, 2, 10, **about, train_dataloaders=DataLoader(Ten(leaves_out=True)), ckpt_path=file)
    assert json.loads((tmp_path / "rank0.json").read_text()) == [20, 20]
