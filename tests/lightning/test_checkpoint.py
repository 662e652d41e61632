from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_asgd import ASGDStrategy
from lightning_asgd.algorithms import Downpour
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
            "versions": trainer.strategy._sharing.versions,
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
    run = trainer(tmp_path, ASGDStrategy(nsync=3, overlap=False), devices=1, max_epochs=3)
    run.fit(module, loader(), ckpt_path=tmp_path / "ckpt" / "last.ckpt")
    assert run.strategy.stats.pushes >= 10
    plain = trainer(tmp_path, "auto", devices=1, max_epochs=3)
    plain.fit(module, loader(), ckpt_path=tmp_path / "ckpt" / "last.ckpt")


def test_a_checkpoint_between_two_sync_points_holds_the_servers_weights(tmp_path: Path) -> None:
    class Compare(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            if trainer.global_step == 8 and trainer.global_rank == 0:
                path = tmp_path / "middle.ckpt"
                trainer.save_checkpoint(path)
                saved = torch.load(path, weights_only=True)["state_dict"]
                servers = trainer.strategy._sharing.peek()
                fresh = {n: bool(torch.equal(saved[n], servers[n])) for n in servers}
                local = torch.equal(saved["net.0.weight"], pl_module.net[0].weight.detach())
                (tmp_path / "compared.json").write_text(json.dumps([fresh, local]))

    # one worker: nobody else moves the servers between the checkpoint and the comparison
    run = trainer(tmp_path, ASGDStrategy(nsync=5, overlap=False), devices=1, callbacks=[Compare()])
    run.fit(Regression(), loader())
    fresh, local = json.loads((tmp_path / "compared.json").read_text())
    assert len(fresh) == 9
    assert all(fresh.values())
    assert not local


def test_resuming_brings_back_what_the_servers_kept(tmp_path: Path) -> None:
    def downpour() -> ASGDStrategy:
        algorithm = Downpour("adagrad", lr=0.01)
        return ASGDStrategy(nsync=2, num_servers=2, algorithm=algorithm, overlap=False, start_method="fork")

    class Sums(pl.Callback):
        def note(self, trainer: pl.Trainer, when: str) -> None:
            if trainer.is_global_zero:
                torch.save(trainer.strategy._sharing.state(), tmp_path / when)
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
