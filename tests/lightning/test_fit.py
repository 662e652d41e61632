from __future__ import annotations

import copy
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from torch import nn

from lightning_asgd import Advanced, ASGDStrategy, Timeouts
from tests.lightning.models import Recorder, Regression, dataset, digest, loader, trainer


def test_all_ranks_hold_the_same_bits_at_every_sync_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    strategy = ASGDStrategy(nsync=3, num_servers=2, start_method="fork")
    module = Regression()
    before = digest(module)
    fit = trainer(tmp_path, strategy, callbacks=[Recorder(tmp_path)], val_check_interval=0.5)
    fit.fit(module, loader(), loader(64))
    zero, one = Recorder.read(tmp_path, 0), Recorder.read(tmp_path, 1)
    assert [r["what"] for r in zero] == [
        "fit start",
        *["validation end", "validation end", "epoch end"] * 2,
        "train end",
    ]
    for a, b in zip(zero, one, strict=True):
        assert a["digest"] == b["digest"], a["what"]
        assert a["metrics"].get("val_loss") == b["metrics"].get("val_loss")
    assert all(r["initialized"] for r in (*zero, *one))  # for libraries that ask torch.distributed
    assert digest(module) == zero[-1]["digest"] != before
    assert min(zero[-1]["stats"]["pushes"], one[-1]["stats"]["pushes"]) >= 4
    assert strategy.stats.pushes == zero[-1]["stats"]["pushes"]
    assert list(scratch.iterdir()) == []  # no temporary file or folder is left


def test_on_one_machine_every_worker_chooses_no_code(tmp_path: Path) -> None:
    log, lines = logging.getLogger("lightning_asgd"), logging.FileHandler(tmp_path / "log")
    level, strategy = log.level, ASGDStrategy(nsync=2, start_method="fork", compression="auto")
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        trainer(tmp_path, strategy, callbacks=[Recorder(tmp_path)]).fit(Regression(), loader())
    finally:
        log.setLevel(level)
        log.removeHandler(lines)
        lines.close()
    assert (tmp_path / "log").read_text().count(": no codec (all servers are on its machine).") == 2
    assert all(record.shared for record in strategy.stats.records)
    zero, one = Recorder.read(tmp_path, 0), Recorder.read(tmp_path, 1)
    assert [r["digest"] for r in zero] == [r["digest"] for r in one]
    assert strategy.settings["compression"] == "auto"


def test_ranks_with_different_initial_weights_start_from_those_of_rank_zero(tmp_path: Path) -> None:
    class Seeded(Regression):
        def configure_model(self) -> None:
            with torch.no_grad():
                for t in (*self.parameters(), *self.buffers()):
                    t.add_(self.trainer.global_rank)

    module = Seeded()
    before = digest(module)
    fit = trainer(tmp_path, ASGDStrategy(start_method="fork"), callbacks=[Recorder(tmp_path)], max_epochs=1)
    fit.fit(module, loader(64))
    assert Recorder.read(tmp_path, 0)[0]["digest"] == Recorder.read(tmp_path, 1)[0]["digest"] == before


@pytest.mark.parametrize("servers", [1, 3])
def test_one_worker_follows_the_single_device_strategy_bit_for_bit(tmp_path: Path, servers: int) -> None:
    curves, digests = [], []
    for strategy in (
        "auto",
        ASGDStrategy(nsync=1, advanced=Advanced(overlap=False), num_servers=servers),
        ASGDStrategy(),
    ):
        torch.manual_seed(3)
        module = Regression()
        # Lightning's distributed sampler shuffles whatever the loader says; one worker has nothing to distribute
        trainer(tmp_path, strategy, devices=1, use_distributed_sampler=False).fit(module, loader())
        curves.append(module.losses)
        digests.append(digest(module))
    assert len(curves[0]) == 64
    assert curves[0][-1] < 0.2 * curves[0][0]
    assert curves[0] == curves[1] == curves[2]
    assert len(set(digests)) == 1


def test_several_dtypes_strided_tied_and_frozen_parameters(tmp_path: Path) -> None:
    class Odd(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(1, 1).to(torch.float64)
            self.frozen = nn.Linear(1, 1).requires_grad_(False)
            self.head = nn.Linear(1, 1, bias=False)
            self.tied = nn.Linear(1, 1, bias=False)
            self.tied.weight = self.head.weight
            self.strided = nn.Parameter(torch.randn(6, 4).t())
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

        def loss(self, batch: object) -> torch.Tensor:
            out = super().loss(batch)
            extra = self.tied(self.head(self.frozen(out.view(1, 1)))) + self.wide(out.view(1, 1).double()).float()
            return out + 1e-3 * (extra**2).mean() + 1e-3 * (self.strided**2).mean()

    module = Odd()
    fit = trainer(tmp_path, ASGDStrategy(nsync=2, num_servers=2, start_method="fork"), callbacks=[Recorder(tmp_path)])
    strided = module.strided.detach().clone()
    fit.fit(module, loader())
    zero, one = Recorder.read(tmp_path, 0), Recorder.read(tmp_path, 1)
    assert zero[-1]["digest"] == one[-1]["digest"] == digest(module)
    assert zero[-1]["stats"]["refused"] == 0
    assert not torch.equal(module.strided, strided)
    assert module.tied.weight is module.head.weight


def test_fit_validate_test_predict_and_fit_again_with_one_trainer(tmp_path: Path) -> None:
    strategy = ASGDStrategy(nsync=2, advanced=Advanced(overlap=False))
    run = trainer(tmp_path, strategy, devices=1, max_epochs=1)
    module = Regression()
    run.fit(module, loader(64), loader(32))
    first = strategy.stats.pushes
    assert first >= 4
    loss = run.validate(module, loader(32), verbose=False)[0]["val_loss"]
    assert run.test(module, loader(32), verbose=False)[0]["val_loss"] == pytest.approx(loss)
    assert len(run.predict(module, loader(32))) == 4
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(64))
    assert strategy.stats.pushes >= 4
    other = trainer(tmp_path, ASGDStrategy(nsync=1, advanced=Advanced(overlap=False)), devices=1, max_epochs=1)
    other.fit(module, loader(64))
    assert other.strategy.stats.pushes == 8


def test_metrics_equal_those_over_the_whole_set(tmp_path: Path) -> None:
    import torchmetrics

    class Measured(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.mae = torchmetrics.MeanAbsoluteError()

        def validation_step(self, batch: object, batch_idx: int) -> None:
            x, y = batch
            out = self.net(x)
            self.mae.update(out, y)
            self.log("val_mae", self.mae)
            self.log("val_mse", nn.functional.mse_loss(out, y), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            gathered = self.all_gather(torch.tensor(float(self.global_rank)))
            self.log("ranks", gathered.sum(), sync_dist=True)

    module = Measured()
    run = trainer(tmp_path, ASGDStrategy(nsync=3, start_method="fork"), callbacks=[Recorder(tmp_path)])
    run.fit(module, loader(), loader(64))
    module.eval()
    x, y = dataset(64).tensors
    with torch.no_grad():
        error = module.net(x) - y
    last = Recorder.read(tmp_path, 1)[-1]["metrics"]
    assert last["val_mae"] == pytest.approx(float(error.abs().mean()), rel=1e-5)
    assert last["val_mse"] == pytest.approx(float((error**2).mean()), rel=1e-5)
    assert last["ranks"] == 1.0


def test_a_checkpoint_may_hold_a_metric_which_is_then_one_of_nobodys_run(tmp_path: Path) -> None:
    """As hyperparameters of pytorch-forecasting do: its losses are metrics."""
    import torchmetrics
    from torchmetrics.metric import jit_distributed_available

    class Measured(Regression):
        def __init__(self, mae: torchmetrics.Metric) -> None:
            super().__init__()
            self.mae = mae
            self.save_hyperparameters()

        def on_train_end(self) -> None:
            self.copied = copy.deepcopy(self.mae)
            self.trainer.save_checkpoint(tmp_path / "end.ckpt")

    module = Measured(torchmetrics.MeanAbsoluteError())
    trainer(tmp_path, ASGDStrategy(nsync=3), devices=1, max_epochs=1).fit(module, loader(64))
    saved = torch.load(tmp_path / "end.ckpt", weights_only=False)["hyper_parameters"]["mae"]
    own = {"dist_sync_fn": None, "distributed_available_fn": jit_distributed_available}
    assert {name: getattr(saved, name) for name in own} == own
    for name in own:  # a copy made in mid-fit is measured over all workers, as the metric is
        assert getattr(module.copied, name) is getattr(module.mae, name) is not own[name]


def test_a_non_finite_update_is_refused_and_training_goes_on(tmp_path: Path) -> None:
    class Poisoned(Regression):
        def on_before_optimizer_step(self, optimizer: object) -> None:
            if len(self.losses) == 3 and self.global_rank == 1:
                self.net[0].weight.grad.fill_(float("nan"))

    module = Poisoned()
    run = trainer(tmp_path, ASGDStrategy(nsync=2, start_method="fork"), callbacks=[Recorder(tmp_path)])
    run.fit(module, loader())
    zero, one = Recorder.read(tmp_path, 0)[-1], Recorder.read(tmp_path, 1)[-1]
    assert one["stats"]["refused"] == 1
    assert zero["stats"]["refused"] == 0
    assert zero["digest"] == one["digest"]
    assert all(torch.isfinite(t).all() for t in module.state_dict().values())


def test_stop_decided_by_one_worker_after_the_epochs_sync_point_stops_all(tmp_path: Path) -> None:
    class Stopper(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            if trainer.global_rank == 1 and trainer.current_epoch == 1:
                trainer.should_stop = True

    strategy = ASGDStrategy(nsync=2, start_method="fork", timeouts=Timeouts(collective_s=10.0))
    run = trainer(tmp_path, strategy, max_epochs=50, callbacks=[Stopper(), Recorder(tmp_path)])
    run.fit(Regression(), loader())
    zero, one = Recorder.read(tmp_path, 0)[-1], Recorder.read(tmp_path, 1)[-1]
    assert zero["what"] == one["what"] == "train end"
    assert zero["step"] == one["step"] == 32
    assert zero["digest"] == one["digest"]


def test_stop_decided_by_one_worker_stops_all(tmp_path: Path) -> None:
    class Stopper(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
            if trainer.global_rank == 1 and trainer.strategy.stats.steps == 5:
                trainer.should_stop = True

    run = trainer(
        tmp_path,
        ASGDStrategy(nsync=2, start_method="fork"),
        max_epochs=50,
        callbacks=[Stopper(), Recorder(tmp_path)],
    )
    run.fit(Regression(), loader())
    zero, one = Recorder.read(tmp_path, 0)[-1], Recorder.read(tmp_path, 1)[-1]
    assert one["stats"]["steps"] == 5
    assert zero["what"] == one["what"] == "train end"
    assert zero["step"] <= 32
    assert zero["digest"] == one["digest"]


def test_whether_a_worker_validates_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `val_check_interval` in time a second answer may differ, and this worker would validate by itself."""
    asked: list[int] = []

    def by_the_clock(loop: Any, data_fetcher: Any) -> bool:
        asked.append(loop.batch_idx)
        return asked.count(loop.batch_idx) > 1

    monkeypatch.setattr(_TrainingEpochLoop, "_should_check_val_fx", by_the_clock)
    fit = trainer(tmp_path, ASGDStrategy(nsync=2), devices=1, max_epochs=1)
    fit.fit(Regression(), loader(64), loader(16))
    assert asked == list(range(fit.num_training_batches))


def test_the_period_follows_from_steps_and_workers(tmp_path: Path) -> None:
    """A fit of 256 steps by one worker: the period is their fourth root. 32 steps of an epoch are 8 periods."""
    strategy = ASGDStrategy(nsync="restarted", algorithm="local_sgd")
    trainer(tmp_path, strategy, devices=1, max_epochs=8).fit(Regression(), loader())
    assert strategy.stats.steps == 256
    assert strategy.stats.pushes == 64
    nameless = trainer(tmp_path, ASGDStrategy(nsync="restarted", algorithm="local_sgd"), devices=1, max_epochs=-1)
    with pytest.raises(ValueError, match="number of steps"):
        nameless.fit(Regression(), loader())
