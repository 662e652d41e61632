"""Programs whose processes of one island differ: what one of them decides alone, and what it has for itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import OnExceptionCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch import nn

from lightning_asgd import ASGDStrategy
from lightning_asgd.algorithms import Downpour
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning.checkpointing import KEY
from tests.helpers.holding import release
from tests.lightning import test_islands
from tests.lightning.models import trainer
from tests.lightning.test_islands import BATCH, EPOCHS, SAMPLES, Net, run  # noqa: F401


class StopsLater(Net):
    """The second process alone stops, after the first epoch's validation."""

    def on_validation_epoch_end(self) -> None:
        if self.global_rank and not self.trainer.sanity_checking:
            self.trainer.should_stop = True


class StopsAtOnce(Net):
    """The second process alone stops, after its third batch."""

    batch, who = 2, (1,)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank in self.who and batch_idx == self.batch:
            self.trainer.should_stop = True


class AllStop(StopsAtOnce):
    """All processes stop after their third batch."""

    who = (0, 1)


class StopsAfterLastBatch(StopsAtOnce):
    """The second process alone stops, after the epoch's last batch."""

    batch = SAMPLES // BATCH // 2 - 1


class Experts(Net):
    """Each process has a parameter of its own."""

    def __init__(self, *, sharded: bool) -> None:
        super().__init__(sharded=sharded)
        self.expert = nn.Parameter(torch.full((3,), float(os.environ["RANK"])))
        self._ddp_params_and_buffers_to_ignore = ["expert"]


class SkipsSteps(Net):
    """The second process alone leaves an optimizer step out."""

    automatic_optimization, batch = False, 4

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        if (self.global_rank, batch_idx) != (1, self.batch):
            optimizer.step()


class SkipsLastStep(SkipsSteps):
    """The second process alone leaves the epoch's last step out."""

    batch = SAMPLES // BATCH // 2 - 1


class FailsAlone(Net):
    """The second process alone raises an exception, and has a callback that saves then."""

    who = (1,)

    def configure_callbacks(self) -> Any:
        return [OnExceptionCheckpoint(self.trainer.default_root_dir, "saved")]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank in self.who and batch_idx == 3:
            raise ValueError("no more memory")
        return super().training_step(batch, batch_idx)


class AllFail(FailsAlone):
    """All processes raise the same exception."""

    who = (0, 1)


class Still(Net):
    """Its weights stay as they are."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class GetsSigterm(Net):
    """The second process alone gets SIGTERM, in a hook after the last batch of the last epoch."""

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        if self.global_rank and self.current_epoch == self.trainer.max_epochs - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Peeks(Net):
    """Runs a forward between backward and the step, as a program does that logs something."""

    def configure_model(self) -> None:
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            self.sharded = False
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # all stay whole after such a forward

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.net(torch.zeros(1, 8))


class TakesOut(Net):
    """Takes entries out of its checkpoints on one process alone."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 0 and batch_idx == 2:
            for self.process in (0, 1):
                self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / f"without{self.process}.ckpt")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if torch.distributed.get_rank() == getattr(self, "process", None):
            for key in ("optimizer_states", "lr_schedulers", "loops"):
                del checkpoint[key]


STOPPING = (StopsLater, StopsAtOnce, AllStop, StopsAfterLastBatch, GetsSigterm)
FAILING = (FailsAlone, AllFail)
KINDS = {
    kind.__name__: kind for kind in (*STOPPING, *FAILING, Experts, SkipsSteps, SkipsLastStep, Still, Peeks, TakesOut)
}


def train(*about: Any, **more: Any) -> None:
    test_islands.Net = KINDS[more.pop("kind")]  # type: ignore[misc]
    test_islands.train(*about, **more)


@pytest.fixture
def start(run: Any, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    """Starts an island with a kind of module."""
    address, started = run
    monkeypatch.setattr(test_islands, "train", train)

    def begin(name: str, kind: str, inside: str, **more: Any) -> Any:
        started.start(name, inside, address, kind=kind, **more)
        return started

    return begin


def ends_with(started: Any, name: str, rank: int) -> str:
    """The output of a process that has failed."""
    process = started.processes[name][rank]
    process.join(100)
    assert process.exitcode not in (None, 0)
    return (Path(started.folder) / f"{name}{rank}.log").read_text()


def test_all_processes_stop_if_one_of_them_wants_to(start: Any) -> None:
    for each in start("a", "StopsLater", "DDP", epochs=5).results("a"):
        assert each["step"] == SAMPLES // BATCH // 2


@pytest.mark.parametrize(
    ("program", "steps"), [("AllStop", 3), ("StopsAtOnce", 4), ("StopsAfterLastBatch", SAMPLES // BATCH // 2)]
)
def test_all_processes_stop_after_the_batch_of_their_wish_or_the_next_one(start: Any, program: str, steps: int) -> None:
    for each in start("a", program, "DDP", epochs=5).results("a"):
        assert each["step"] == steps


def test_parameters_that_only_one_process_has_are_refused_by_name(start: Any) -> None:
    started = start("a", "Experts", "DDP")
    for rank in (0, 1):
        assert "Parameter 'expert' is not sharded, but processes 0 and 1" in ends_with(started, "a", rank)


def test_a_process_that_skips_a_step_ends_the_island_with_an_error_that_says_so(start: Any) -> None:
    started = start("a", "SkipsSteps", "DDP")
    for rank, steps in enumerate((5, 4)):
        text = (
            f"Process {rank} of this island has taken {steps} optimizer steps in this fit, but others between 4 and 5."
        )
        assert text in ends_with(started, "a", rank)


def test_parts_of_an_update_with_different_steps_are_not_applied(start: Any) -> None:
    started = start("a", "SkipsLastStep", "DDP", options={"nsync": 1000})
    for rank, steps in enumerate((16, 15)):
        assert f"Process {rank} of this island has taken {steps} optimizer steps" in ends_with(started, "a", rank)
    before = Net(sharded=False).state_dict()
    for each in start("b", "Still", "DDP", epochs=1).results("b"):
        for name, tensor in before.items():
            assert torch.equal(each["state"][name], tensor)


@pytest.mark.parametrize("inside", ["DDP", "FSDP2"])
def test_a_process_that_fails_alone_saves_nothing_and_holds_nobody_up(start: Any, inside: str, tmp_path: Path) -> None:
    started = start("a", "FailsAlone", inside)
    said = ends_with(started, "a", 1)
    assert "ValueError: no more memory" in said
    assert "saved.ckpt was not written: only this process of its island has raised an exception." in said
    ends_with(started, "a", 0)
    assert not (tmp_path / "saved.ckpt").exists()


def test_processes_that_fail_together_save(start: Any, tmp_path: Path) -> None:
    started = start("a", "AllFail", "DDP")
    for rank in (0, 1):
        assert "ValueError: no more memory" in ends_with(started, "a", rank)
    assert (tmp_path / "saved.ckpt").exists()


def test_a_process_takes_entries_out_of_checkpoints(start: Any, tmp_path: Path) -> None:
    start("a", "TakesOut", "DDP", epochs=1).results("a")
    first, second = (torch.load(tmp_path / f"without{process}.ckpt", weights_only=True) for process in (0, 1))
    assert "loops" not in first
    assert "data" not in first[KEY]
    assert second[KEY]["data"]["done"]


def test_gradients_are_found_where_a_forward_has_gathered_sharded_parameters(start: Any) -> None:
    before = Net(sharded=False).state_dict()
    for each in start("a", "Peeks", "FSDP2", options={"algorithm": Downpour()}).results("a"):
        for name, tensor in before.items():
            assert not torch.equal(each["state"][name], tensor)


def test_sigterm_of_one_process_ends_its_island_after_the_same_batch(run: Any) -> None:  # noqa: F811
    _, started = run
    started.start_counting({"a": "DDP", "b": "DDP"}, a=3)
    started.await_epoch("a", 1)
    os.kill(started.processes["a"][1].pid, signal.SIGTERM)
    release(started.folder, "a")
    for process in started.processes["a"]:
        process.join(100)
        assert process.exitcode == 0
    for each in started.results("b"):
        assert each["state"]["net.0.weight"].flatten().tolist() == [float(EPOCHS)] * SAMPLES


def test_sigterm_of_one_process_after_the_last_batch_ends_the_program(start: Any) -> None:
    started = start("a", "GetsSigterm", "DDP")
    for rank, process in enumerate(started.processes["a"]):
        process.join(100)
        assert process.exitcode == 0
        assert not (Path(started.folder) / f"a{rank}.pt").exists()  # nothing after the fit is run


def test_a_strategy_that_averages_weights_inside_is_refused_by_name(tmp_path: Path) -> None:
    inside = DDPStrategy(model_averaging_period=4)
    with pytest.raises(ConfigurationError, match=r"model_averaging_period=4\) was given"):
        trainer(tmp_path, ASGDStrategy(island=inside, run="127.0.0.1:1/r"))
