"""Metrics and loggers: the values are those of one process over the whole set, and there is one writer."""

from __future__ import annotations

import csv
import os
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from tests.conformance.case import case
from tests.conformance.lab import BATCH, SAMPLES, STEPS, Lab, dataset, loss_of

GROUP = "Metrics"
LOGGERS = "Loggers"


@case(GROUP, "`self.log` in validation with every reduction, `sync_dist=True`")
def reductions(lab: Lab) -> Any:
    class Reducing:
        def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
            for op in ("mean", "sum", "max", "min"):
                self.log(f"y_{op}", batch[1].mean(), sync_dist=True, reduce_fx=op)

    trainer = lab.fit(lab.regression(Reducing))
    # batch i of rank r holds samples of every second number, as the distributed sampler deals them
    y = dataset(64, seed=1).tensors[1].flatten()
    means = torch.stack([y[r::2].view(-1, 8).mean(1) for r in range(2)]).flatten()
    whole = {"y_mean": means.mean(), "y_sum": means.sum(), "y_max": means.max(), "y_min": means.min()}
    for key, value in whole.items():
        assert float(trainer.callback_metrics[key]) == pytest.approx(float(value), rel=1e-4), key
    return {key: round(float(trainer.callback_metrics[key]), 4) for key in whole}


@case(GROUP, "`self.log` in training with `on_epoch=True, sync_dist=True`")
def train_epoch(lab: Lab) -> Any:
    class Logging:
        def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
            self.log("count", torch.ones(()), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
            self.log("x_mean", batch[0].mean(), on_step=True, on_epoch=True, sync_dist=False)
            self.log("x", batch[0].mean(), on_step=False, on_epoch=True, sync_dist=True)
            return self.loss(batch)

    trainer = lab.fit(lab.regression(Logging), use_distributed_sampler=True)
    x = dataset().tensors[0]
    assert float(trainer.callback_metrics["count"]) == SAMPLES // BATCH
    assert float(trainer.callback_metrics["x"]) == pytest.approx(float(x.mean()), abs=1e-5)
    return {key: round(float(trainer.callback_metrics[key]), 5) for key in ("count", "x")}


@case(
    GROUP,
    "`sync_dist=True` at step level",
    note="It has no effect, and a warning says so: worker 0's value is logged.",
    differs=("ranks",),
)
def step_level(lab: Lab) -> Any:
    class Logging:
        def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
            self.log("rank", float(self.global_rank), on_step=True, sync_dist=True)
            return self.loss(batch)

    trainer = lab.fit(lab.regression(Logging))
    return {"ranks": float(trainer.callback_metrics["rank"])}


class Measured:
    """Logs metric objects."""

    def build(self: Any) -> None:
        self.net = nn.Linear(8, 1)
        self.error = torchmetrics.MeanAbsoluteError()
        self.several = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.R2Score()])
        self.train_error = torchmetrics.MeanMetric()
        self.unregistered = [torchmetrics.MaxMetric()]

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        self.train_error(batch[1].mean())
        self.log("train_y", self.train_error, on_step=False, on_epoch=True)
        return self.loss(batch)

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self(x)
        self.error(out, y)
        self.several(out, y)
        self.unregistered[0].update(y)
        self.log("error", self.error)
        self.log_dict(self.several)

    def on_validation_epoch_end(self: Any) -> None:
        self.log("largest", self.unregistered[0].compute())
        self.unregistered[0].reset()


@case(GROUP, "torchmetrics objects and collections, also in plain lists")
def metric_objects(lab: Lab) -> Any:
    module = lab.regression(Measured)
    trainer = lab.trainer()
    trainer.fit(module, lab.loader(), lab.loader(64, seed=1))
    got = {key: float(value) for key, value in trainer.callback_metrics.items()}
    x, y = dataset(64, seed=1).tensors
    with torch.no_grad():
        out = module.eval()(x)
    whole = {
        "error": (out - y).abs().mean(),
        "MeanSquaredError": ((out - y) ** 2).mean(),
        "R2Score": 1 - ((out - y) ** 2).sum() / ((y - y.mean()) ** 2).sum(),
        "largest": y.max(),
        "train_y": dataset().tensors[1].mean(),
    }
    for key, value in whole.items():
        assert got[key] == pytest.approx(float(value), rel=1e-3, abs=1e-4), key
    return {"loss": loss_of(module), "keys": sorted(got)}


@case(GROUP, "`self.all_gather` of tensors and dictionaries in validation")
def gathered(lab: Lab) -> Any:
    class Gathering:
        def on_validation_epoch_end(self: Any) -> None:
            self.gathered = self.all_gather({"rank": torch.tensor([float(self.global_rank)])})

    module = lab.regression(Gathering)
    lab.fit(module)
    assert module.gathered["rank"].flatten().tolist() == [0.0, 1.0]
    return {"shape": list(module.gathered["rank"].shape)}


@case(
    GROUP,
    "`self.all_gather` in `training_step`",
    note="It returns this worker's value only, with a first dimension of 1.",
    differs=("shape",),
)
def gathered_in_training(lab: Lab) -> Any:
    class Gathering:
        def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
            self.gathered = self.all_gather(torch.tensor([float(self.global_rank)]))
            return self.loss(batch)

    module = lab.regression(Gathering)
    lab.fit(module)
    return {"shape": list(module.gathered.shape)}


# ---------------------------------------------------------------------- loggers


def logged(lab: Lab, logger: Any) -> dict[str, Any]:
    trainer = lab.fit(logger=logger, log_every_n_steps=4)
    trainer.strategy.barrier()
    return {"logged": sorted(trainer.logged_metrics)}


@case(
    LOGGERS,
    "CSV",
    note="Steps that others take while worker 0 waits at the end of an epoch are not in the log.",
)
def csv_logger(lab: Lab) -> Any:
    facts = logged(lab, lab.pl.loggers.CSVLogger(lab.folder, name="csv"))
    (path,) = lab.folder.glob("csv/**/metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    rising = steps == sorted(steps)
    columns = sorted(name for name in rows[0] if not name.startswith("asgd/"))  # those are of the ASGDMonitor
    steps = [int(row["step"]) for row in rows if any(row[name] for name in columns if name != "step")]
    regular = {step % 4 for step in steps} == {3} and STEPS // 4 < len(set(steps)) <= 2 * STEPS // 4
    return {**facts, "rising": rising, "regular": regular, "last": steps[-1], "columns": columns}


@case(LOGGERS, "TensorBoard")
def tensorboard(lab: Lab) -> Any:
    facts = logged(lab, lab.pl.loggers.TensorBoardLogger(lab.folder, name="board"))
    return {**facts, "files": len(lab.files("board/**/events*"))}


@case(LOGGERS, "wandb, offline")
def wandb(lab: Lab) -> Any:
    facts = logged(lab, lab.pl.loggers.WandbLogger(save_dir=lab.folder, offline=True, project="battery"))
    if lab.rank == 0:
        import wandb

        wandb.finish()
    return {**facts, "runs": len(lab.files("wandb/offline-run-*/*.wandb"))}


@case(LOGGERS, "MLflow, in files")
def mlflow(lab: Lab) -> Any:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    facts = logged(lab, lab.pl.loggers.MLFlowLogger("battery", tracking_uri=f"file:{lab.folder}/mlruns"))
    return {**facts, "runs": len(lab.files("mlruns/*/*/meta.yaml"))}
