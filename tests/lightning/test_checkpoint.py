from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import Advanced, ASGDStrategy
from lightning_asgd.algorithms import ASGD, Downpour, Hogwild, SoftSync
from lightning_asgd.core.lightning.checkpointing import KEY, Resumption, entry_of
from tests.lightning.models import Recorder, Regression, digest, loader, trainer


class States(pl.Callback):
    """Writes each rank's momentum, learning rate and the shards' versions when training begins and ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.note(trainer, "start")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.note(trainer, "end")

    def note(self, trainer: pl.Trainer, when: str) -> None:
        optimizer = trainer.optimizers[0]
        momentum = [float(s["momentum_buffer"].double().sum()) for s in optimizer.state.values() if s]
        state = {
            "momentum": momentum,
            "lr": optimizer.param_groups[0]["lr"],
            "versions": trainer.strategy.fit_session.synchronizer.versions,
        }
        (self.folder / f"{when}{trainer.global_rank}.json").write_text(json.dumps(state))

    def read(self, when: str, rank: int) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / f"{when}{rank}.json").read_text())
        return state


def strategy() -> ASGDStrategy:
    return ASGDStrategy(nsync=3, num_servers=2, start_method="fork")


def test_a_checkpoint_holds_the_servers_weights_and_a_plain_module_loads_it(tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path / "ckpt", save_last=True)
    run = trainer(tmp_path, strategy(), callbacks=[saver, Recorder(tmp_path)], enable_checkpointing=True)
    run.fit(Regression(), loader())
    plain = Regression()
    checkpoint = torch.load(tmp_path / "ckpt" / "last.ckpt", weights_only=True)
    plain.load_state_dict(checkpoint["state_dict"])
    assert digest(plain) == Recorder.read(tmp_path, 1)[-1]["digest"]
    trainer(tmp_path, "auto", devices=1).validate(plain, loader(64), verbose=False)


def test_a_flipped_bit_in_a_checkpoint_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    fit = trainer(tmp_path, strategy(), devices=1, max_epochs=1)
    fit.fit(Regression(), loader())
    path, damaged, chance = tmp_path / "x.ckpt", tmp_path / "damaged.ckpt", random.Random(0)
    refused = list[str]()
    fit.save_checkpoint(path)
    whole, expected = path.read_bytes(), fit.strategy.load_checkpoint(path)
    for _ in range(200):
        content, place = bytearray(whole), chance.randrange(len(whole))
        content[place] ^= 1 << chance.randrange(8)
        damaged.write_bytes(content)
        try:
            found = fit.strategy.load_checkpoint(damaged)
        except Exception as error:
            refused.append(str(error) if content[:4] == whole[:4] else "damaged")  # else it is in another format
        else:
            assert str(found) == str(expected), place
    assert len(refused) > 100
    assert [text for text in refused if not re.search("damaged|corrupted|archive", text)] == []  # ours, or torch's
    damaged.write_bytes(whole)
    assert str(fit.strategy.load_checkpoint(damaged)) == str(expected)


def test_resuming_restores_versions_and_every_workers_optimizer_and_schedule(tmp_path: Path) -> None:
    states = States(tmp_path)
    saver = ModelCheckpoint(dirpath=tmp_path / "ckpt", save_last=True)
    first = trainer(tmp_path, strategy(), callbacks=[saver, states], enable_checkpointing=True)
    first.fit(Regression(), loader())
    ends = [states.read("end", rank) for rank in (0, 1)]
    assert ends[0]["momentum"] != ends[1]["momentum"]
    assert min(ends[0]["versions"]) >= 8
    second = trainer(tmp_path, strategy(), callbacks=[states], max_epochs=3)
    second.fit(Regression(), loader(), ckpt_path=tmp_path / "ckpt" / "last.ckpt")
    for rank in (0, 1):
        assert states.read("start", rank) == ends[rank]
    assert min(states.read("end", 0)["versions"]) > min(ends[0]["versions"])


def test_resuming_with_another_number_of_workers_and_servers(tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path / "ckpt", save_last=True)
    trainer(tmp_path, strategy(), callbacks=[saver], enable_checkpointing=True).fit(Regression(), loader())
    module = Regression()
    run = trainer(tmp_path, ASGDStrategy(nsync=3, advanced=Advanced(overlap=False)), devices=1, max_epochs=3)
    run.fit(module, loader(), ckpt_path=tmp_path / "ckpt" / "last.ckpt")
    assert run.strategy.stats.pushes >= 10
    plain = trainer(tmp_path, "auto", devices=1, max_epochs=3)
    plain.fit(module, loader(), ckpt_path=tmp_path / "ckpt" / "last.ckpt")


SAMPLES, BATCH = 160, 4  # 40 batches, 20 for each of two workers


class Counting(pl.LightningModule):
    """Its weights tell how often each sample was trained: each time adds 1 to the sample's own."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = torch.nn.Parameter(torch.zeros(SAMPLES))
        self.mine: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (numbers,) = batch
        self.mine += numbers.tolist()
        if self.global_rank == 1:
            time.sleep(0.005)
        return -self.trained[numbers].sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Saving(pl.Callback):
    """Worker 0 writes a checkpoint after every batch, and what it knew then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Counting, *args: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{self.number}.ckpt")
        if trainer.is_global_zero:
            known = {"mine": pl_module.mine, "step": trainer.global_step, "epoch": trainer.current_epoch}
            (self.folder / f"{self.number}.json").write_text(json.dumps(known))
        self.number += 1


class Began(pl.Callback):
    """Worker 0 notes what a fit begins with, and its last step."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_start(self, trainer: pl.Trainer, pl_module: Counting) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress
        began = {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "ready": progress.current.ready,
            "total": progress.total.ready,
            "trained": pl_module.trained.tolist(),
        }
        if trainer.is_global_zero:
            self.file.write_text(json.dumps(began))

    def on_train_end(self, trainer: pl.Trainer, pl_module: Counting) -> None:
        if trainer.is_global_zero:
            began = json.loads(self.file.read_text())
            self.file.write_text(json.dumps({**began, "last": trainer.global_step}))


class Casting(Counting):
    """Has its own idea of what is saved."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {key: tensor.double() for key, tensor in super().state_dict().items()}


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [(ASGD("sum"), Counting), (ASGD("sum", transforms=[SoftSync(2)]), Counting), (ASGD("sum"), Casting)],
    ids=["ASGD", "SoftSync", "casts"],
)
def test_a_checkpoint_in_mid_epoch_holds_every_sample_that_counts_as_trained(
    algorithm: ASGD, kind: type[Counting], tmp_path: Path
) -> None:
    def strategy() -> ASGDStrategy:
        return ASGDStrategy(nsync=6, algorithm=algorithm, start_method="fork")

    def batches() -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH, shuffle=True)

    module = kind()
    trainer(tmp_path, strategy(), callbacks=[Saving(tmp_path)]).fit(module, batches())
    assert module.trained.tolist() == [2.0] * SAMPLES  # two epochs: checkpoints do not change what is trained
    numbers = sorted(int(file.stem) for file in tmp_path.glob("*.json"))
    middle = []
    for number in numbers:
        saved = torch.load(tmp_path / f"{number}.ckpt", weights_only=True)
        known = json.loads((tmp_path / f"{number}.json").read_text())
        assert (saved["global_step"], saved["epoch"]) == (known["step"], known["epoch"])
        trained = saved["state_dict"]["trained"]
        mine = torch.bincount(torch.tensor(known["mine"]), minlength=SAMPLES)
        assert bool((trained >= mine).all()), number  # all of worker 0's steps up to here
        data = saved["lightning_asgd"]["data"]
        if data and data["epoch"] == 1:
            done = sum(last - first for first, last in data["done"])
            assert float(trained.sum()) == SAMPLES + done  # no more, and no less, than what will not be trained again
            middle.append(number)
    for number in (middle[1], middle[len(middle) // 2]):
        saved = torch.load(tmp_path / f"{number}.ckpt", weights_only=True)
        known = json.loads((tmp_path / f"{number}.json").read_text())
        module = kind()
        began = Began(tmp_path / "began.json")
        trainer(tmp_path, strategy(), callbacks=[began]).fit(module, batches(), ckpt_path=tmp_path / f"{number}.ckpt")
        assert module.trained.tolist() == [2.0] * SAMPLES  # every sample of the epoch once
        progress = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        assert json.loads((tmp_path / "began.json").read_text()) == {
            "step": known["step"],
            "epoch": known["epoch"],
            "ready": progress["current"]["ready"],
            "total": progress["total"]["ready"],
            "trained": saved["state_dict"]["trained"].tolist(),
            "last": 2 * SAMPLES // BATCH // 2,
        }


class Scheduled(Counting):
    """Notes how often its schedule has stepped, and the values of ``global_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append(self.trainer.global_step)

    def on_fit_end(self) -> None:
        if self.trainer.is_global_zero:
            stepped = self.trainer.lr_scheduler_configs[0].scheduler.last_epoch
            file = Path(self.trainer.default_root_dir, "scheduled.json")
            file.write_text(json.dumps({"steps": self.steps, "stepped": stepped, "last": self.trainer.global_step}))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("workers", [2, 4])
def test_resuming_in_mid_epoch_with_more_steps_and_another_number_of_workers(workers: int, tmp_path: Path) -> None:
    data = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH, shuffle=True)
    strategies = {"algorithm": ASGD("sum"), "start_method": "fork"}
    first = trainer(tmp_path, ASGDStrategy(nsync=3, **strategies), callbacks=[Saving(tmp_path)], max_steps=14)
    first.fit(Scheduled(), data)
    written = [(torch.load(file, weights_only=True), file) for file in sorted(tmp_path.glob("*.ckpt"))]
    saved, file = next((each, file) for each, file in written if 6 <= each["global_step"] <= 10)
    position = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"]
    module = Scheduled()
    again = trainer(tmp_path, ASGDStrategy(nsync=3, **strategies), devices=workers, max_epochs=1)
    again.fit(module, data, ckpt_path=file)
    assert module.trained.tolist() == [1.0] * SAMPLES
    found = json.loads((tmp_path / "scheduled.json").read_text())
    assert found["steps"] == sorted(found["steps"])
    assert found["steps"][0] >= saved["global_step"]
    assert found["last"] == pytest.approx(position + (20 - position) * 2 / workers, abs=0.5)
    assert found["stepped"] == pytest.approx(found["last"], abs=1)


def test_resuming_brings_back_what_the_servers_kept(tmp_path: Path) -> None:
    def downpour() -> ASGDStrategy:
        algorithm = Downpour("adagrad", lr=0.01)
        return ASGDStrategy(
            nsync=2, num_servers=2, algorithm=algorithm, advanced=Advanced(overlap=False), start_method="fork"
        )

    class Sums(pl.Callback):
        def note(self, trainer: pl.Trainer, when: str) -> None:
            if trainer.is_global_zero:
                torch.save(trainer.strategy.fit_session.synchronizer.state(), tmp_path / when)
            trainer.strategy.barrier(when)  # or another worker may have pushed before

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.note(trainer, "start")

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.note(trainer, "end")

    saver = ModelCheckpoint(dirpath=tmp_path / "ckpt", save_last=True)
    first = trainer(tmp_path, downpour(), callbacks=[saver, Sums()], enable_checkpointing=True)
    first.fit(Regression(), loader())
    kept = torch.load(tmp_path / "end")
    trainer(tmp_path, downpour(), callbacks=[Sums()], max_epochs=3).fit(
        Regression(), loader(), ckpt_path=tmp_path / "ckpt" / "last.ckpt"
    )
    again = torch.load(tmp_path / "start")
    for before, after in zip(kept[0], again[0], strict=True):
        (mine,) = before[0]["slots"]["optimizer"]["state"].values()
        (theirs,) = after[0]["slots"]["optimizer"]["state"].values()
        assert float(mine["sum"].sum()) > 0
        assert torch.equal(mine["sum"], theirs["sum"])


class Finding(LearningRateFinder):
    """Searches again at the start of the second epoch, as in Lightning's example, and notes what the servers keep."""

    def __init__(self) -> None:
        super().__init__(num_training_steps=8, attr_name="lr")
        self.kept: list[torch.Tensor] = []

    def on_fit_start(self, *args: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.note(trainer)
            self.lr_find(trainer, pl_module)
            self.note(trainer)

    def note(self, trainer: Any) -> None:
        ((shard,),) = trainer.strategy.fit_session.synchronizer.state()
        (state,) = shard[0]["slots"]["optimizer"]["state"].values()
        self.kept.append(state["sum"].clone())


class Versions(pl.Callback):
    """Notes the servers' versions when fits begin."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.seen.append(list(trainer.strategy.fit_session.synchronizer.versions))


def test_a_search_within_a_fit_gives_back_what_the_servers_kept(tmp_path: Path) -> None:
    finder, versions = Finding(), Versions()
    strategy = ASGDStrategy(nsync=2, algorithm=Downpour("adagrad", lr=0.01), advanced=Advanced(overlap=False))
    run = trainer(tmp_path, strategy, devices=1, callbacks=[finder, versions])
    module = Regression()
    run.fit(module, loader())
    before, after = finder.kept
    assert float(before.sum()) > 0
    assert torch.equal(before, after)
    run.fit_loop.max_epochs = 3
    run.fit(module, loader())  # without a checkpoint
    assert versions.seen == [[0], [0]]


def test_what_a_checkpoint_leaves_out_is_not_taken_from_one_that_was_read_before() -> None:
    resume, entry = Resumption(), entry_of([5], "ASGD", [[["momentum"]]], {1: {"lr": 2}}, ["lr"])
    assert resume.read({KEY: {**entry, "data": {"epoch": 1}}}, 1, "ASGD", 1) == {"lr": 2}
    assert (resume.versions, resume.servers, resume.data) == ([5], [[["momentum"]]], {"epoch": 1})
    assert resume.read({}, 1, "ASGD", 1) == {}
    assert resume == Resumption()


class SavesCopies(Regression):
    """Has its own idea of what is saved. Another worker takes a step each time that it is asked."""

    others = 0

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        saved = {key: tensor.double() for key, tensor in super().state_dict().items()}
        self.others += 1
        with torch.no_grad():
            self.net[0].bias += 1.0
        return saved


def test_a_checkpoint_writes_nothing_into_weights_that_other_workers_train(tmp_path: Path) -> None:
    class Checks(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: SavesCopies, *_: Any) -> None:
            bias, others = pl_module.net[0].bias.detach(), pl_module.others
            expected = bias.clone()
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
            assert pl_module.others > others
            expected += pl_module.others - others
            torch.testing.assert_close(bias, expected)
            saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]["net.0.bias"]
            assert saved.dtype is torch.float64

    run = trainer(tmp_path, ASGDStrategy(algorithm=Hogwild()), devices=1, max_steps=2, callbacks=[Checks()])
    run.fit(SavesCopies(), loader())
    assert run.global_step == 2


class Fails(Regression):
    """Worker 0 does so in its sixth batch."""

    def __init__(self, killed: bool) -> None:
        super().__init__()
        self.killed = killed

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 0 and batch_idx == 5:
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("in the sixth batch")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("killed", [False, True])
def test_a_checkpoint_on_an_exception_is_worker_0_s(
    tmp_path: Path, start_method: str, killed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The main process, in which Lightning reports the exception, has trained nothing."""
    saver = OnExceptionCheckpoint(tmp_path, "failed")
    # A split, so that worker 0 has six batches. Without "abort" the other worker becomes chief: see test_chief.py.
    strategy = ASGDStrategy(nsync=2, start_method=start_method, data="split", on_worker_failure="abort")
    run = trainer(tmp_path, strategy, callbacks=[saver], enable_checkpointing=True)
    module = Fails(killed)
    untrained = digest(module)
    with pytest.raises(ProcessExitedException if killed else ProcessRaisedException, match=None if killed else "sixth"):
        run.fit(module, loader())
    assert f"The main process has not trained, so it does not write {tmp_path}/failed.ckpt" in caplog.text
    assert (tmp_path / "failed.ckpt").exists() is not killed
    if not killed:
        saved = torch.load(tmp_path / "failed.ckpt", weights_only=False)
        assert saved["global_step"] >= 5
        module.load_state_dict(saved["state_dict"])
        assert digest(module) != untrained
    run.save_checkpoint(tmp_path / "later.ckpt")  # where a program asks for it itself, it has what there is
    assert torch.load(tmp_path / "later.ckpt", weights_only=False)["global_step"] == 0
