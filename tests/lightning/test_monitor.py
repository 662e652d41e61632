from __future__ import annotations

import copy
import csv
import importlib
import pickle
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonargparse
import lightning.pytorch
import pytest
import pytorch_lightning as pl
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import lightning_asgd
from lightning_asgd import ASGDMonitor, ASGDStrategy
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.monitor.callback import _loss
from lightning_asgd.monitor.metric_definitions import METRICS
from lightning_asgd.monitor.metric_log import find_log, read
from lightning_asgd.programs.batch_units import samples_in
from lightning_asgd.report.curves import places
from tests.helpers.wandb_file import contents
from tests.lightning.models import Regression, loader, trainer

# Only with Advanced(units="tokens"), with DiLoCo, with Adam, and with served tables.
COUNTED = {"tokens_per_s", "outer_gain", "gain", "tables/hits", "tables/age"}
NAMES = {f"asgd/{name}" for name in set(METRICS) - COUNTED} | {"asgd/workers/alive"}


def of_workers(number: int, names: Iterable[str] = ("samples_per_s", "wait/share")) -> set[str]:
    return NAMES | {f"asgd/worker{worker}/{name}" for worker in range(number) for name in names}


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_weights_and_biases_has_every_metric_of_every_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")

    class Finished(Regression):
        def on_fit_end(self) -> None:
            if self.global_rank == 0:
                wandb.finish()  # a forked process ends without

    logger = pl.loggers.WandbLogger(save_dir=str(tmp_path), project="p")
    fit = trainer(
        tmp_path,
        ASGDStrategy(nsync=3, start_method="fork"),
        logger=logger,
        callbacks=[ASGDMonitor(0.2, "all")],
        max_epochs=6,
    )
    fit.fit(Finished(), loader(1024), loader(64))
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = contents(file)
    history = found["history"]
    assert of_workers(2, set(METRICS) - COUNTED) <= set(history)
    assert history["asgd/workers/alive"] == 2
    assert history["asgd/samples_per_s"] > history["asgd/worker1/samples_per_s"] > 0
    assert history["asgd/staleness/histogram"]["_type"] == "histogram"
    assert sum(history["asgd/staleness/histogram"]["values"]) > 0
    assert history["asgd/workers"]["_type"] == "table-file"
    assert history["asgd/workers"]["nrows"] == 2
    assert "train_loss" in history, "the user's own"
    assert {f"asgd/fit/{name}" for name in set(METRICS) - COUNTED} <= set(found["summary"])
    config = found["config"]["asgd"]
    assert (config["nsync"], config["workers"], config["data"]) == (3, 2, "leases")


@pytest.mark.parametrize("tree", [pl, lightning.pytorch])
def test_a_logger_gets_a_summary_by_itself_in_both_trees(tmp_path: Path, tree: Any) -> None:
    class Small(tree.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("of_training", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.trainer.callback_metrics["a callback's"] = "text"
            self.log_dict({"val_loss": nn.functional.mse_loss(self.net(batch[0]), batch[1]), "val_same": 1.0})

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.05)

    logger = tree.loggers.CSVLogger(tmp_path, name="csv", version="v")
    off = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    fit = tree.Trainer(
        strategy=ASGDStrategy(nsync=4, start_method="fork"),
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=logger,
        **off,
    )
    fit.fit(Small(), loader(512), loader(64))
    written = [row for row in rows(tmp_path / "csv" / "v") if row["asgd/epoch"]]
    names = {name for row in written for name, value in row.items() if value}
    assert of_workers(2) == {name for name in names if name.startswith("asgd/")}
    (record,) = read(find_log(tmp_path))
    assert record.end == "done"
    assert sum(each.samples for each in record.last.values()) == 2 * 512
    assert [round(each.epoch, 6) for each in record.last.values()] == [2.0, 2.0]
    assert float(written[-1]["step"]) == record.entries[-1].step == 2 * 512 / 8 / 2 - 1
    for each in record.last.values():
        waited = each.exchange_wait_s + each.sync_wait_s + each.data_wait_s
        assert 0 < each.train_s < each.train_s + waited <= each.at_s
        assert each.losses == each.batches == each.steps
        assert each.nsync == 4
    about = record.about
    assert (about["model"], about["parameters"], about["trainable"]) == ("Small", 9, 9)
    assert about["versions"]["lightning-asgd"] == lightning_asgd.__version__
    assert places(record) == dict.fromkeys((0, 1), (socket.gethostname(), "cpu"))
    assert record.settings["num_servers"] == 1
    assert [sorted(metrics) for _, metrics in record.validations] == [["val_loss", "val_same"]] * 2
    (early, _), (late, _) = record.validations
    assert 0 < early < late


def test_one_worker_logs_its_own_and_the_user_s_monitor_is_the_only_one(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path, name="csv", version="v")
    board = pl.loggers.TensorBoardLogger(tmp_path, name="board", version="v")
    seen: list[Any] = []

    class Watching(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.append({k: float(v) for k, v in trainer.progress_bar_metrics.items()})

    monitor = ASGDMonitor(every_n_seconds=0.02)
    strategy = ASGDStrategy(nsync=2)
    fit = trainer(tmp_path, strategy, devices=1, logger=[logger, board], callbacks=[monitor, Watching()], max_epochs=2)
    fit.fit(Regression(), loader(512))
    assert [type(c).__name__ for c in fit.callbacks].count("ASGDMonitor") == 1
    written = rows(tmp_path / "csv" / "v")
    names = {name for row in written for name, value in row.items() if value and name.startswith("asgd/")}
    assert names == of_workers(1)
    assert seen[-1]["asgd/workers"] == 1
    assert seen[-1]["asgd/staleness"] >= 0
    figures = strategy.board.figures[0]
    assert figures.samples == 1024
    assert copy.deepcopy(strategy).board.figures == {0: figures}
    events = EventAccumulator(str(tmp_path / "board" / "v"))
    events.Reload()
    assert of_workers(1) <= set(events.Tags()["scalars"])
    (*_, histogram) = events.Histograms("asgd/staleness/histogram")
    assert histogram.histogram_value.num == figures.pushes
    assert sum(histogram.histogram_value.bucket) == figures.pushes


@pytest.mark.parametrize("options", [{"logger": False}, {"fast_dev_run": 2}])
def test_without_a_logger_there_is_no_monitor(tmp_path: Path, options: dict[str, Any]) -> None:
    fit = trainer(tmp_path, ASGDStrategy(nsync=2), devices=1, **{"max_epochs": 1, **options})
    fit.fit(Regression(), loader(64))
    assert not any(isinstance(callback, ASGDMonitor) for callback in fit.callbacks)
    assert list(tmp_path.rglob("asgd.jsonl")) == []


def test_it_can_be_left_out_and_a_fit_that_fails_says_so(tmp_path: Path) -> None:
    class Failing(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 40:
                raise ZeroDivisionError("forty")
            return super().training_step(batch, batch_idx)

    for monitor in (False, True):
        logger = pl.loggers.CSVLogger(tmp_path, name="csv", version=str(monitor))
        callbacks = [ASGDMonitor(1e-6)] if monitor else []
        fit = trainer(tmp_path, ASGDStrategy(monitor=False), devices=1, logger=logger, callbacks=callbacks)
        with pytest.raises(ZeroDivisionError):
            fit.fit(Failing(), loader(512))
    (record,) = read(find_log(tmp_path))
    assert record.end == "ZeroDivisionError: forty"
    assert len(record.entries) > 30


def test_a_monitor_is_a_callback_of_both_trees() -> None:
    monitor = ASGDMonitor(2.5)
    for each in (monitor, pickle.loads(pickle.dumps(monitor)), copy.deepcopy(monitor)):
        assert isinstance(each, ASGDMonitor)
        assert isinstance(each, pl.Callback)
        assert isinstance(each, lightning.pytorch.Callback)
        assert each.every_n_seconds == 2.5


@pytest.mark.parametrize("monitor", ["ASGDMonitor", "DataStallMonitor"])
@pytest.mark.parametrize("tree", [pl, lightning.pytorch])
def test_a_configuration_may_name_a_monitor_by_its_class(monitor: str, tree: Any) -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--callbacks", type=list[tree.Callback])
    settings = parser.parse_object({"callbacks": [{"class_path": f"lightning_asgd.{monitor}"}]})
    (made,) = parser.instantiate_classes(settings).callbacks
    assert type(made) is getattr(lightning_asgd, monitor)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 2), 5),
        ((torch.zeros(4, 2), torch.zeros(9)), 4),
        ({"name": "x", "images": [torch.zeros(3, 1)], "labels": torch.zeros(7)}, 3),
        (torch.tensor(1.0), 1),
        ("nothing", 1),
        ([], 1),
    ],
)
def test_samples_are_the_rows_of_the_first_tensor(batch: Any, samples: int) -> None:
    assert samples_in(batch) == samples


@pytest.mark.parametrize(
    ("outputs", "accumulated", "loss"),
    [
        ({"loss": torch.tensor(2.0, requires_grad=True)}, 1, 2.0),
        ({"loss": torch.tensor(2.0)}, 4, 8.0),
        (torch.tensor([3.0]), 1, 3.0),
        (torch.zeros(2), 1, None),
        ({"other": 1}, 1, None),
        (None, 1, None),
    ],
)
def test_the_loss_is_that_of_training_step(outputs: Any, accumulated: int, loss: float | None) -> None:
    found = _loss(outputs, accumulated)
    assert (None if found is None else float(found)) == loss
    assert found is None or not found.requires_grad


@pytest.mark.parametrize("value", [0, -1.0, True, "often", None])
def test_wrong_arguments_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^ASGDMonitor\(detail='most'\). Expected 'summary' or 'all'.$"):
        ASGDMonitor(detail="most")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"every_n_seconds=.*Expected a number of seconds above 0"):
        ASGDMonitor(value)
    with pytest.raises(ConfigurationError, match=r"monitor='yes'\. Expected True or False"):
        ASGDStrategy(monitor="yes")  # type: ignore[arg-type]


def test_under_another_strategy_it_only_warns(tmp_path: Path) -> None:
    fit = trainer(tmp_path, "auto", devices=1, callbacks=[ASGDMonitor()], max_epochs=1)
    with pytest.warns(UserWarning, match="ASGDMonitor has nothing to log under SingleDeviceStrategy"):
        fit.fit(Regression(), loader(64))


@pytest.mark.parametrize("tree", [pl, lightning.pytorch])
@pytest.mark.parametrize("logs", [True, False])
def test_logs_at_a_url_make_no_local_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: Any, logs: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"memory://{tree.__name__}.{logs}"
    fit = tree.Trainer(
        strategy=ASGDStrategy(nsync=4),
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=4,
        limit_val_batches=1,
        default_root_dir=url,
        logger=tree.loggers.CSVLogger(url) if logs else False,
        callbacks=[] if logs else [ASGDMonitor()],
        enable_checkpointing=logs,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    fit.fit(importlib.import_module(f"{tree.__name__}.demos.boring_classes").BoringModel())
    (record,) = read(find_log(url))
    assert record.end == "done"
    assert record.last[0].batches == 4
    assert list(tmp_path.iterdir()) == []
