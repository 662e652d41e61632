"""Trainer options and callbacks."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_asgd.core.foundation.errors import WorkerLostError
from tests.conformance.case import case
from tests.conformance.lab import SAMPLES, STEPS, WORKERS, Lab, Stream, loss_of

CHECKPOINTS = "Checkpoints"
CALLBACKS = "Callbacks"
OPTIONS = "Trainer options"
CALLS = "Calls"


class Normed:
    """With batch norm."""

    def build(self: Any) -> None:
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def fit(lab: Lab, **options: Any) -> dict[str, Any]:
    module = lab.regression()
    trainer = lab.fit(module, **options)
    return {"loss": loss_of(module), "stopped": trainer.should_stop}


# ---------------------------------------------------------------------- checkpoints


@case(CHECKPOINTS, "`ModelCheckpoint` of the best k, and the last")
def top_k(lab: Lab) -> Any:
    saver = lab.pl.callbacks.ModelCheckpoint(
        lab.folder, "{epoch}", monitor="progress", save_top_k=2, save_last=True, mode="max"
    )
    module = lab.regression()
    trainer = lab.fit(module, callbacks=[saver], max_epochs=3)
    return {"files": lab.files(), "same": trainer.strategy.broadcast(saver.best_model_path) == saver.best_model_path}


@case(CHECKPOINTS, "`ModelCheckpoint` every n epochs, all kept")
def every_n_epochs(lab: Lab) -> Any:
    saver = lab.pl.callbacks.ModelCheckpoint(lab.folder, save_top_k=-1, every_n_epochs=2)
    lab.fit(callbacks=[saver], max_epochs=4)
    return {"files": lab.files()}


@case(
    CHECKPOINTS,
    "`ModelCheckpoint` every n steps, then `test` of the best one",
    note=(
        "Between sync points a checkpoint holds worker 0's optimizer state; at ends of epochs and "
        "validations, every worker's."
    ),
)
def every_n_steps(lab: Lab) -> Any:
    saver = lab.pl.callbacks.ModelCheckpoint(
        lab.folder, "{step}", monitor="train_loss", every_n_train_steps=5, save_top_k=2, save_last=True
    )
    module = lab.regression()
    trainer = lab.fit(module, callbacks=[saver])
    found = trainer.test(module, lab.loader(64), ckpt_path="best", verbose=False)
    return {"number": len(lab.files()), "tested": list(found[0])}


@case(CHECKPOINTS, "`ModelCheckpoint` by time")
def by_time(lab: Lab) -> Any:
    from datetime import timedelta

    saver = lab.pl.callbacks.ModelCheckpoint(
        lab.folder, "now", train_time_interval=timedelta(seconds=0), enable_version_counter=False
    )
    lab.fit(callbacks=[saver])
    return {"files": lab.files()}


class Broken(RuntimeError):
    pass


class Breaking:
    """Raises in the second epoch, on every rank."""

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 1 and batch_idx == 3:
            raise Broken("in the second epoch")


@case(
    CHECKPOINTS,
    "checkpoint on an exception (`OnExceptionCheckpoint`)",
    note="Written only if worker 0 fails.",
)
def on_exception(lab: Lab) -> Any:
    saver = lab.pl.callbacks.OnExceptionCheckpoint(lab.folder, "failed")
    try:
        lab.fit(lab.regression(Breaking), callbacks=[saver])
    except Broken:
        return {"files": lab.files()}
    except WorkerLostError as error:  # the other rank may hear of worker 0's before it raises its own
        if lab.rank == 1 and "it raised Broken" in str(error):
            return {"files": lab.files()}
        raise
    raise AssertionError("nothing was raised")


@case(
    CHECKPOINTS,
    "resume from a checkpoint (`ckpt_path`)",
)
def resume(lab: Lab) -> Any:
    saver = lab.pl.callbacks.ModelCheckpoint(lab.folder, "{epoch}", save_top_k=-1)
    lab.fit(callbacks=[saver], max_epochs=2)
    module = lab.regression()
    trainer = lab.trainer(callbacks=[], max_epochs=3)
    trainer.fit(module, lab.loader(), lab.loader(64, seed=1), ckpt_path=lab.folder / "epoch=1.ckpt")
    return {"loss": loss_of(module), "step": trainer.global_step}


# ---------------------------------------------------------------------- callbacks


@case(CALLBACKS, "`EarlyStopping`", note="Log what it monitors with `sync_dist=True`.")
def early_stopping(lab: Lab) -> Any:
    stopping = lab.pl.callbacks.EarlyStopping("progress", mode="max", patience=0)
    return fit(lab, callbacks=[stopping], max_epochs=5)


@case(CALLBACKS, "`EarlyStopping` at a validation in mid-epoch")
def early_stopping_within(lab: Lab) -> Any:
    stopping = lab.pl.callbacks.EarlyStopping("progress", mode="max", patience=2, check_on_train_epoch_end=False)
    return fit(lab, callbacks=[stopping], max_epochs=5, val_check_interval=0.25)


class Stops:
    """Stops training in the second epoch, at a batch of some ranks; later if they come to none."""

    at: dict[int, int]

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.current_epoch > 0 and batch_idx >= self.at.get(self.global_rank, 2 * STEPS):
            self.trainer.should_stop = True


def stop(lab: Lab, at: dict[int, int], **options: Any) -> Any:
    module = lab.regression(Stops, at=at)
    trainer = lab.fit(module, callbacks=[lab.pl.callbacks.ModelCheckpoint(lab.folder, "last")], **options)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    counts = [trainer.global_step, trainer.current_epoch, progress.current.ready, progress.total.ready]
    assert trainer.strategy.broadcast(counts) == counts
    assert counts[0] == counts[3]
    assert counts[0] > STEPS * WORKERS // lab.workers
    assert counts[2] < STEPS * WORKERS // lab.workers, counts
    return {"stopped": trainer.should_stop, "epoch": counts[1], "files": lab.files()}


@case(
    OPTIONS,
    "`trainer.should_stop` set at the same batch of every worker",
    note="The first worker that sets it stops the others, a few steps earlier or later than under DDP.",
    ddp=False,
)
def stopped_by_all(lab: Lab) -> Any:
    return stop(lab, {0: 9, 1: 9}, max_epochs=-1)


@case(
    OPTIONS,
    "`trainer.should_stop` set by one worker, in mid-epoch",
    note="Under DDP the others wait forever.",
    ddp=False,
)
def stopped_by_one(lab: Lab) -> Any:
    return stop(lab, {lab.workers - 1: 4}, max_epochs=-1, val_check_interval=0.5)


@case(
    OPTIONS,
    "`trainer.should_stop` set by workers at different batches",
    note="Under DDP the others wait forever.",
    ddp=False,
)
def stopped_by_each(lab: Lab) -> Any:
    return stop(lab, {0: 6, 1: 8}, max_epochs=-1, val_check_interval=10)


@case(CALLBACKS, "`StochasticWeightAveraging`")
def swa(lab: Lab) -> Any:
    averaging = lab.pl.callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=1)
    return fit(lab, callbacks=[averaging], max_epochs=4)


@case(
    CALLBACKS,
    "`StochasticWeightAveraging` with batch norm",
    note="The last batch of Lightning's last pass, for batch norm, takes no step; under DDP it takes one.",
)
def swa_with_batch_norm(lab: Lab) -> Any:
    averaging = lab.pl.callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=1)
    module = lab.regression(Normed)
    trainer = lab.fit(module, callbacks=[averaging], max_epochs=4)
    counted = [trainer.accumulate_grad_batches, trainer.num_training_batches]
    return {"loss": loss_of(module), "epoch": trainer.current_epoch, "counted": counted}


@case(CALLBACKS, "`WeightAveraging` after every second step, with batch norm", since="2.6.0")
def weight_averaging(lab: Lab) -> Any:
    class EverySecond(lab.pl.callbacks.WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return step_idx is not None and step_idx % 2 == 0

    module = lab.regression(Normed)
    lab.fit(module, callbacks=[EverySecond(avg_fn=lambda mean, new, n: 0.5 * mean + 0.5 * new)], max_epochs=3)
    return {"loss": loss_of(module)}


@case(CALLBACKS, "`BackboneFinetuning`", ddp=False, note="Under DDP weights unfrozen later are not averaged.")
def backbone(lab: Lab) -> Any:
    class Frozen:
        def build(self: Any) -> None:
            self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
            self.net = nn.Linear(16, 1)

        def forward(self: Any, x: Tensor) -> Tensor:
            return self.net(self.backbone(x))

        def configure_optimizers(self: Any) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.03)

    module = lab.regression(Frozen)
    before = module.backbone[0].weight.detach().clone()
    unfreezing = lab.pl.callbacks.BackboneFinetuning(1, backbone_initial_lr=0.01, verbose=False)
    lab.fit(module, callbacks=[unfreezing], max_epochs=3)
    return {"loss": loss_of(module), "trained": not torch.equal(before, module.backbone[0].weight)}


@case(
    CALLBACKS,
    "`EMAWeightAveraging`",
    note="Every worker averages its own steps; sync points average the averages.",
    since="2.6.0",
)
def ema(lab: Lab) -> Any:
    return fit(lab, callbacks=[lab.pl.callbacks.EMAWeightAveraging(decay=0.5)], max_epochs=3)


@case(CALLBACKS, "`LearningRateMonitor`")
def lr_monitor(lab: Lab) -> Any:
    logger = lab.pl.loggers.CSVLogger(lab.folder, name="csv", version=0)
    trainer = lab.fit(callbacks=[lab.pl.callbacks.LearningRateMonitor("step")], logger=logger, log_every_n_steps=4)
    return {"logged": sorted(trainer.logged_metrics)}


@case(CALLBACKS, "`Timer`")
def timer(lab: Lab) -> Any:
    clock = lab.pl.callbacks.Timer(duration={"minutes": 5})
    facts = fit(lab, callbacks=[clock])
    return {**facts, "clocked": clock.time_elapsed("train") > 0}


@case(CALLBACKS, "`GradientAccumulationScheduler`")
def accumulation_scheduler(lab: Lab) -> Any:
    return fit(lab, callbacks=[lab.pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})])


@case(CALLBACKS, "`ThroughputMonitor`", note="It counts a worker's own samples.")
def throughput(lab: Lab) -> Any:
    monitor = lab.pl.callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=4)
    logger = lab.pl.loggers.CSVLogger(lab.folder, name="csv", version=0)
    trainer = lab.fit(callbacks=[monitor], logger=logger, log_every_n_steps=4, limit_val_batches=0)
    return {"step": trainer.global_step}


@case(CALLBACKS, "`DeviceStatsMonitor`")
def device_stats(lab: Lab) -> Any:
    logger = lab.pl.loggers.CSVLogger(lab.folder, name="csv", version=0)
    lab.fit(callbacks=[lab.pl.callbacks.DeviceStatsMonitor(cpu_stats=True)], logger=logger)


@case(CALLBACKS, "`ModelPruning`")
def pruning(lab: Lab) -> Any:
    module = lab.regression()
    pruner = lab.pl.callbacks.ModelPruning("l1_unstructured", [(module.net[0], "weight")], amount=0.2)
    lab.fit(module, callbacks=[pruner])
    return {"zeros": int((module.net[0].weight == 0).sum()) > 0}


@case(CALLBACKS, "`SpikeDetection`")
def spikes(lab: Lab) -> Any:
    import warnings

    class Lossy:
        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        detection = lab.pl.callbacks.SpikeDetection(warmup=1000, exclude_batches_path=str(lab.folder / "skipped.json"))
        lab.fit(lab.regression(Lossy), callbacks=[detection])


@case(CALLBACKS, "`RichProgressBar`, `ModelSummary`")
def bars(lab: Lab) -> Any:
    from rich.console import Console  # noqa: F401 - the bar needs it

    return fit(lab, callbacks=[lab.pl.callbacks.RichProgressBar()], enable_progress_bar=True, enable_model_summary=True)


@case(CALLBACKS, "`BasePredictionWriter`")
def prediction_writer(lab: Lab) -> Any:
    class Writer(lab.pl.callbacks.BasePredictionWriter):
        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            torch.save(predictions, lab.folder / f"predictions{trainer.global_rank}.pt")

    module = lab.regression()
    trainer = lab.trainer(callbacks=[Writer("epoch")])
    trainer.predict(module, lab.loader(64), return_predictions=False)
    trainer.strategy.barrier()
    return {"files": lab.files("*.pt")}


@case(CALLBACKS, "`LearningRateFinder`", note="Every worker searches; worker 0's rate is used.")
def rate_finder(lab: Lab) -> Any:
    module = lab.regression()
    first = {name: value.clone() for name, value in module.state_dict().items()}
    restored = []

    def compare(self: Any, trainer: Any, module: Any) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        if lab.asynchronous:
            state = {**state, **trainer.strategy.fit_session.synchronizer.peek()}  # what the servers hold
        restored.append(all(torch.equal(state[name], value) for name, value in first.items()))

    finder = lab.pl.callbacks.LearningRateFinder(num_training_steps=8, attr_name="lr")
    looker = type("Looker", (lab.pl.Callback,), {"on_train_start": compare})()
    trainer = lab.fit(module, callbacks=[finder, looker])
    return {"same": trainer.strategy.broadcast(module.lr) == module.lr, "restored": restored}


@case(
    CALLBACKS,
    "`BatchSizeFinder`",
    refused="Batch size finder is not supported with distributed strategies",
    note="Lightning allows it on one device only.",
    ddp_fails=True,
)
def batch_size_finder(lab: Lab) -> Any:
    class Sized:
        batch_size = 2

        def train_dataloader(self: Any) -> Any:
            return lab.loader(batch_size=self.batch_size)

    module = lab.regression(Sized)
    lab.trainer(callbacks=[lab.pl.callbacks.BatchSizeFinder(max_trials=2, steps_per_trial=2)]).fit(module)
    return {"size": module.batch_size}


# ---------------------------------------------------------------------- options


@case(OPTIONS, "`limit_train_batches`, `limit_val_batches`")
def limits(lab: Lab) -> Any:
    return fit(lab, limit_train_batches=5, limit_val_batches=0.5)


@case(OPTIONS, "`val_check_interval` as a fraction")
def validation_by_fraction(lab: Lab) -> Any:
    return fit(lab, val_check_interval=0.25)


@case(OPTIONS, "`limit_train_batches` as a fraction")
def limits_by_fraction(lab: Lab) -> Any:
    return fit(lab, limit_train_batches=0.4, val_check_interval=0.5)


@case(
    OPTIONS,
    "`val_check_interval` in time",
    note="All workers validate when one worker's clock says so. Under DDP they can wait forever.",
    since="2.6.0",
    ddp=False,
)
def validation_by_time(lab: Lab) -> Any:
    class Slow:
        def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
            time.sleep(0.03 + 0.01 * self.global_rank)

    module = lab.regression(Slow)
    lab.fit(module, val_check_interval="00:00:00:01")
    assert [record.event for record in lab.records].count("validation end") >= 1
    return {"loss": loss_of(module)}


@case(OPTIONS, "`accumulate_grad_batches` of more than an epoch")
def accumulation_beyond(lab: Lab) -> Any:
    return {"step": lab.fit(accumulate_grad_batches=1000, max_epochs=3).global_step}


@case(OPTIONS, "`val_check_interval` as a number of batches, across epochs")
def validation_by_batches(lab: Lab) -> Any:
    return fit(lab, val_check_interval=6, check_val_every_n_epoch=None)


@case(OPTIONS, "`check_val_every_n_epoch`")
def validation_by_epoch(lab: Lab) -> Any:
    return fit(lab, check_val_every_n_epoch=2, max_epochs=4)


@case(OPTIONS, "`max_steps`")
def max_steps(lab: Lab) -> Any:
    return fit(lab, max_steps=STEPS + 5, max_epochs=-1)


@case(
    OPTIONS,
    "`max_time`",
    note="Each worker's own clock decides, and all stop at the next sync point. Under DDP worker 0's clock decides.",
    differs=("events", "step"),
)
def max_time(lab: Lab) -> Any:
    trainer = lab.fit(max_time={"seconds": 1}, max_epochs=-1)
    return {"stopped": trainer.should_stop, "step": trainer.global_step}


@case(OPTIONS, "`min_epochs`")
def min_epochs(lab: Lab) -> Any:
    stopping = lab.pl.callbacks.EarlyStopping("progress", mode="max", patience=0)
    return fit(lab, callbacks=[stopping], min_epochs=4, max_epochs=6)


@case(OPTIONS, "`fast_dev_run`")
def fast_dev_run(lab: Lab) -> Any:
    lab.fit(fast_dev_run=2, max_epochs=..., num_sanity_val_steps=..., logger=..., enable_checkpointing=...)


@case(
    OPTIONS,
    "`overfit_batches`",
    note='Each worker has its own batches, as with `data="split"`. Not in an elastic run.',
)
def overfit(lab: Lab) -> Any:
    trained: set[str] = set()
    validated: set[str] = set()

    class Seeing:
        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            trained.add(str(batch[0].tolist()))
            return self.loss(batch)

        def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
            validated.add(str(batch[0].tolist()))

    trainer = lab.trainer(overfit_batches=4)
    trainer.fit(lab.regression(Seeing), lab.loader(), lab.loader())
    return {"same": trained == validated, "trained": len(trained)}


@case(OPTIONS, "`num_sanity_val_steps`")
def sanity(lab: Lab) -> Any:
    return fit(lab, num_sanity_val_steps=2)


@case(OPTIONS, "`inference_mode=False`")
def no_inference_mode(lab: Lab) -> Any:
    return fit(lab, inference_mode=False)


@case(OPTIONS, "`barebones=True`")
def barebones(lab: Lab) -> Any:
    lab.fit(
        barebones=True,
        logger=...,
        enable_checkpointing=...,
        enable_progress_bar=...,
        enable_model_summary=...,
        num_sanity_val_steps=...,
    )


@case(OPTIONS, "`detect_anomaly=True`")
def detect_anomaly(lab: Lab) -> Any:
    return fit(lab, detect_anomaly=True)


@case(OPTIONS, "`deterministic=True`", note="The order in which pushes arrive is not deterministic.")
def deterministic(lab: Lab) -> Any:
    try:
        return fit(lab, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


@case(OPTIONS, "profilers")
def profilers(lab: Lab) -> Any:
    for name in ("SimpleProfiler", "AdvancedProfiler", "PyTorchProfiler"):
        profiler = getattr(lab.pl.profilers, name)(dirpath=lab.folder, filename=name)
        lab.fit(profiler=profiler, max_epochs=1, limit_train_batches=4)
    return {"written": sorted({name.split("-")[1] for name in lab.files("fit-*")})}


@case(OPTIONS, "`reload_dataloaders_every_n_epochs`")
def reload(lab: Lab) -> Any:
    return fit(lab, reload_dataloaders_every_n_epochs=1)


@case(OPTIONS, "`use_distributed_sampler=False`: every worker sees all data")
def own_sampler(lab: Lab) -> Any:
    return fit(lab, use_distributed_sampler=False)


@case(
    OPTIONS,
    "data of unequal length per worker",
    note="Under DDP the others wait forever.",
    ddp=False,
)
def uneven(lab: Lab) -> Any:
    module = lab.regression()
    trainer = lab.trainer(use_distributed_sampler=False)
    trainer.fit(module, lab.loader(128 + 64 * lab.rank), lab.loader(64, seed=1))
    return {"loss": loss_of(module)}


@case(OPTIONS, "loader without a length (`IterableDataset`)")
def iterable(lab: Lab) -> Any:
    module = lab.regression()
    trainer = lab.trainer()
    trainer.fit(module, DataLoader(Stream(lab.rank), batch_size=8), DataLoader(Stream(lab.rank, 64), batch_size=8))
    return {"loss": loss_of(module), "step": trainer.global_step}


@case(OPTIONS, "`LightningDataModule`, `prepare_data`")
def data_module(lab: Lab) -> Any:
    class Data(lab.pl.LightningDataModule):
        def prepare_data(self) -> None:
            (lab.folder / f"prepared{lab.rank}.txt").write_text("")

        def train_dataloader(self) -> Any:
            return lab.loader()

        def val_dataloader(self) -> Any:
            return [lab.loader(64, seed=1), lab.loader(32, seed=2)]

    class TwoSets:
        def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)

    module = lab.regression(TwoSets)
    lab.trainer().fit(module, datamodule=Data())
    return {"loss": loss_of(module), "files": lab.files("*.txt")}


# ---------------------------------------------------------------------- calls


@case(CALLS, "`fit`, `validate`, `test` and `predict` with the same Trainer")
def all_calls(lab: Lab) -> Any:
    module = lab.regression()
    trainer = lab.fit(module)
    validated = trainer.validate(module, lab.loader(64), verbose=False)
    tested = trainer.test(module, lab.loader(64), verbose=False)
    predicted = trainer.predict(module, lab.loader(64))
    assert abs(validated[0]["val_loss"] - loss_of(module, 64)) < 1e-5
    assert abs(tested[0]["test_loss"] - loss_of(module, 64)) < 1e-5
    return {"loss": loss_of(module), "predictions": sum(len(p) for p in predicted), "keys": list(tested[0])}


@case(CALLS, "a second `fit` that continues")
def second_fit(lab: Lab) -> Any:
    module = lab.regression()
    trainer = lab.fit(module)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, lab.loader())
    return {"loss": loss_of(module), "epoch": trainer.current_epoch, "step": trainer.global_step}


@case(CALLS, "two Trainers in one script")
def two_trainers(lab: Lab) -> Any:
    first, second = lab.regression(), lab.regression()
    lab.fit(first)
    lab.fit(second)
    return {"loss": max(loss_of(first), loss_of(second))}


@case(CALLS, "`predict` without `fit`")
def predict_alone(lab: Lab) -> Any:
    module = lab.regression()
    predicted = lab.trainer().predict(module, lab.loader(64))
    return {"batches": len(predicted), "samples": sum(len(p) for p in predicted)}


@case(CALLS, "collectives in hooks: `all_gather`, `broadcast`, `barrier`, `trainer.strategy.reduce`")
def collectives(lab: Lab) -> Any:
    class Talking:
        def on_train_epoch_end(self: Any) -> None:
            ranks = self.all_gather(torch.tensor(float(self.global_rank)))
            total = self.trainer.strategy.reduce(torch.tensor(self.global_rank + 1.0), reduce_op="sum")
            said = self.trainer.strategy.broadcast({"from": self.global_rank}, src=1)
            self.trainer.strategy.barrier("mine")
            self.heard = [ranks.tolist(), float(total), said]

    module = lab.regression(Talking)
    lab.fit(module)
    assert module.heard == [[0.0, 1.0], 3.0, {"from": 1}]
    return {"heard": module.heard}


assert SAMPLES % (STEPS * WORKERS) == 0
