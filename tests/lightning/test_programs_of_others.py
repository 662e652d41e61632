"""What programs do by ways that the strategy is not told of: raw optimizers, the last batch, metrics of their own."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_asgd import ASGDStrategy
from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.lightning.loop_counters import BatchSchedules
from tests.lightning.models import Regression, dataset, digest, loader, trainer


class Manual(Regression):
    """Takes its steps by hand, as GANs do. Each worker notes what it sees."""

    def __init__(self, folder: Path, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization, self.folder, self.every = False, folder, every
        self.last: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        last = self.trainer.is_last_batch
        self.last.append(last)
        self.manual_backward(self.loss(batch))
        if (batch_idx + 1) % self.every == 0 or last:
            optimizer.step()
            optimizer.zero_grad()

    def on_fit_end(self) -> None:
        stats = self.trainer.strategy.stats
        told = {"last": self.last, "steps": stats.steps, "pushes": stats.pushes, "digest": digest(self)}
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(told))


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("?.json"))]


@pytest.mark.parametrize("workers", [1, 2])
def test_steps_of_raw_optimizers_count_and_each_worker_knows_its_last_batch(workers: int, tmp_path: Path) -> None:
    strategy = ASGDStrategy(nsync=2, start_method="fork")
    trainer(tmp_path, strategy, devices=workers, max_epochs=3).fit(Manual(tmp_path), loader(128))
    found = told(tmp_path)
    assert len(found) == workers
    assert len({each["digest"] for each in found}) == 1
    assert sum(each["steps"] for each in found) == sum(len(each["last"]) for each in found) == 3 * 16
    assert all(sum(each["last"]) == 3 for each in found)  # once per epoch
    # Not only at the end of an epoch. How many steps each worker takes depends on how fast it is.
    assert sum(each["pushes"] for each in found) > 2 * 3 * workers


def test_gradients_that_a_module_has_added_up_are_used_with_the_last_batch(tmp_path: Path) -> None:
    trainer(tmp_path, ASGDStrategy(nsync=2), devices=1, max_epochs=2).fit(Manual(tmp_path, every=5), loader(128))
    (found,) = told(tmp_path)
    assert found["last"] == 2 * ([False] * 15 + [True])
    assert found["steps"] == 2 * 4  # of 5, 5, 5 and 1 batches


class Ending(Regression):
    """Looks for its last batch in the number of batches, and ends the accumulation and the schedule there."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.automatic_optimization, self.folder = False, folder
        self.seen: list[Any] = []
        self.left = False  # gradients, after the batch that was told to be the last

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        last = batch_idx + 1 == self.trainer.num_training_batches
        assert last == self.trainer.is_last_batch
        self.manual_backward(self.loss(batch))
        if (batch_idx + 1) % 4 == 0 or last:
            optimizer.step()
            optimizer.zero_grad()
        if last:
            self.left = any(p.grad is not None for p in self.parameters())
            self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]

    def on_train_epoch_end(self) -> None:
        schedule: Any = self.lr_schedulers()
        self.seen.append([schedule.last_epoch, self.left])

    def on_fit_end(self) -> None:
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(self.seen))


def test_the_number_of_batches_tells_each_worker_its_last_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which batch that is depends on the workers' speeds; here it is each one's first."""
    monkeypatch.setattr(DataLeases, "ends", lambda leases, *, waits: leases.closes)
    strategy = ASGDStrategy(nsync=2, start_method="fork")
    trainer(tmp_path, strategy, max_epochs=3).fit(Ending(tmp_path), loader(136))
    assert told(tmp_path) == [[[1, False], [2, False], [3, False]]] * 2


class ByEpochs(Regression):
    """Its schedule steps with epochs. It notes how many batches it had trained then."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.stepped: list[int] = []

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.stepped.append(len(self.losses))
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def on_train_epoch_end(self) -> None:
        assert self.stepped[-1] == len(self.losses)

    def on_fit_end(self) -> None:
        found = [self.stepped, len(self.losses)]
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_may_follow_the_one_that_was_told_to_be_the_last(
    accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a worker trains what another one turns out to be too slow for."""
    monkeypatch.setattr(DataLeases, "ends", lambda leases, *, waits: leases.closes)
    strategy = ASGDStrategy(nsync=2, start_method="fork")
    trainer(tmp_path, strategy, accumulate_grad_batches=accumulate).fit(ByEpochs(tmp_path), loader(128))
    found = told(tmp_path)
    assert [len(stepped) for stepped, _ in found] == [2, 2]
    assert sum(batches for _, batches in found) == 2 * 16


def test_an_optimizer_that_a_hook_puts_in_the_place_of_the_first_one_counts(tmp_path: Path) -> None:
    class Replacing(Manual):
        def on_train_epoch_start(self) -> None:
            self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.01)]

    trainer(tmp_path, ASGDStrategy(nsync=2), devices=1, max_epochs=2).fit(Replacing(tmp_path), loader(128))
    assert told(tmp_path)[0]["steps"] == 2 * 16


def test_a_metric_that_has_its_own_way_to_sync_keeps_it(tmp_path: Path) -> None:
    import torchmetrics

    class Measured(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.own = torchmetrics.MeanMetric(distributed_available_fn=lambda: False)
            self.folder = tmp_path

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.own(float(self.global_rank))

        def on_validation_epoch_end(self) -> None:
            (self.folder / f"{self.global_rank}.json").write_text(json.dumps(float(self.own.compute())))

    trainer(tmp_path, ASGDStrategy(nsync=2, start_method="fork"), max_epochs=1).fit(Measured(), loader(), loader(64))
    assert told(tmp_path) == [0.0, 1.0]


def test_parameters_that_one_worker_alone_unfreezes_are_named(tmp_path: Path) -> None:
    class Unfreezing(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (self.global_rank, batch_idx) == (0, 1):
                self.net[0].requires_grad_(True)

    run = trainer(tmp_path, ASGDStrategy(nsync=2, start_method="fork"), max_epochs=1)
    with pytest.raises(Exception, match=r"ConfigurationError: Parameters were unfrozen on workers \[0\], not on \[1\]"):
        run.fit(Unfreezing(), loader())


class Teacher(Regression):
    """Its teacher is an average of the student, which each worker computes by itself."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.teacher, self.folder = copy.deepcopy(self.net).requires_grad_(False), folder
        self.found: list[str] = []

    def on_train_batch_end(self, *_: Any) -> None:
        for mine, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.1)

    def on_validation_epoch_start(self) -> None:
        self.found.append(digest(self))
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(self.found))


def test_workers_validate_and_keep_the_same_teacher(tmp_path: Path) -> None:
    module, strategy = Teacher(tmp_path), ASGDStrategy(nsync=2, start_method="fork")
    before = digest(module.teacher)
    trainer(tmp_path, strategy, val_check_interval=0.5).fit(module, loader(), loader(64))
    mine, other = told(tmp_path)
    assert mine == other
    assert len(set(mine)) == 4
    assert digest(module.teacher) not in (before, digest(module.net))


class Pictures(pl.Callback):
    """Keeps a network on worker 0 alone, and another one, an average, on all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.average = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(self.average.weight, float(trainer.global_rank))
        if trainer.is_global_zero:
            self.network = copy.deepcopy(pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = self.average.weight.item(), digest(pl_module)
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))


def test_a_callback_may_have_a_network_on_one_worker_alone(tmp_path: Path) -> None:
    strategy = ASGDStrategy(nsync=2, start_method="fork")
    trainer(tmp_path, strategy, callbacks=[Pictures(tmp_path)]).fit(Regression(), loader(64))
    (one, weights), (other, same) = told(tmp_path)
    assert one == other == 0.5
    assert weights == same


class Uneven(Regression):
    """Worker 1 takes few batches between two validations."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.2 if self.global_rank == 1 else 0.01)
        return super().training_step(batch, batch_idx)


def test_a_save_that_waits_for_a_validation_is_the_same_on_all_workers(tmp_path: Path) -> None:
    """The metric is missing at step 5, which worker 1 does not see: others have trained the rest of its interval."""
    saver = ModelCheckpoint(tmp_path, "{step}", monitor="val_loss", every_n_train_steps=5, save_top_k=-1)
    options: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True, "val_check_interval": 0.5}
    strategy = ASGDStrategy(nsync=2, start_method="fork")
    trainer(tmp_path, strategy, max_epochs=2, **options).fit(Uneven(), loader(256), loader(16))
    assert len([*tmp_path.glob("step=*.ckpt")]) >= 2


class Prepared(pl.LightningDataModule):
    """Worker 0 writes the data that all read, as from a download."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def prepare_data(self) -> None:
        time.sleep(0.5)
        torch.save(dataset(32).tensors, self.folder / "data.pt")

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.found = torch.load(self.folder / "data.pt")

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*self.found), 8)


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_a_data_module_that_prepares_data(transport: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    strategy = ASGDStrategy(nsync=2, start_method="fork", transport=transport)
    module = Regression()
    before = digest(module)
    trainer(tmp_path, strategy).fit(module, datamodule=Prepared(tmp_path))
    assert digest(module) != before
    assert not [each for each in recwarn if "gloo" in str(each.message)]


def test_a_plateau_schedule_that_steps_with_batches_is_warned_of(tmp_path: Path) -> None:
    class Plateau(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            about = {"scheduler": schedule, "interval": "step", "monitor": "train_loss"}
            return {"optimizer": optimizer, "lr_scheduler": about}

    run = trainer(tmp_path, "auto", devices=1, max_epochs=1)
    run.fit(Plateau(), loader(64))
    schedules = BatchSchedules(run)
    with pytest.warns(UserWarning, match=r"ReduceLROnPlateau has interval='step'.*Use interval='epoch'"):
        schedules.suspend()
    schedules.suspend()  # warns once


class Counted(Uneven):
    """Its schedule follows the number of steps, as those of timm do."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.steps: list[int] = []

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.steps.append(self.global_step)
        super().lr_scheduler_step(scheduler, metric)

    def on_fit_end(self) -> None:
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps([self.steps, self.global_step]))


def test_a_schedule_that_asks_for_the_number_of_steps_sees_each_of_them(tmp_path: Path) -> None:
    """Worker 1 is slow: the others' steps are counted several at once."""
    strategy = ASGDStrategy(nsync=2, start_method="fork")
    trainer(tmp_path, strategy, accumulate_grad_batches=2).fit(Counted(tmp_path), loader(256))
    assert told(tmp_path) == [[[*range(1, 17)], 16]] * 2
