"""A Trainer whose devices are divided into islands: two islands of two processes, started by Lightning or torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

from lightning_asgd import Advanced, ASGDStrategy
from lightning_asgd.algorithms import LayerWise
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.islands.division import size_of_islands
from lightning_asgd.world import ranks as world
from tests.helpers.listeners import check_listeners
from tests.helpers.programs import environment
from tests.helpers.servers import servers_of
from tests.lightning.models import trainer
from tests.lightning.test_processes import wait_until

PROGRAM = """
import json, os, sys
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

from lightning_asgd import ASGDStrategy
from lightning_asgd.algorithms import ASGD
from tests.helpers.meeting import how_it_met
from tests.lightning.test_islands import Counting, numbered

folder, epochs, kinds, rank = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:], os.environ.get("LOCAL_RANK", "0")


class Prepared(Counting):
    def prepare_data(self):
        with open(folder / "prepared", "a") as file:
            print(rank, file=file)

    def on_train_start(self):
        self.met = how_it_met()

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[2].tolist())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("count", self.net(batch[2]).mean(), sync_dist=True)


for kind in kinds:
    island = 2 if kind == "DDP" else ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)
    if kind != "again":  # else the strategy of the Trainer before
        strategy = ASGDStrategy(nsync=3, algorithm=ASGD("sum"), island=island)
    options = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder / kind)
    trainer = pl.Trainer(accelerator="cpu", devices=4, strategy=strategy, max_epochs=epochs, **options)
    net = Prepared(folder / f"{rank}.mark", sharded=kind == "FSDP2")
    trainer.fit(net, DataLoader(numbered(), batch_size=4))
    print("trained", kind, flush=True)
    ((metrics,)) = trainer.validate(net, DataLoader(numbered(), batch_size=16), verbose=True)
    weight = net.net[0].weight
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    about = dict(counts=weight.flatten().tolist(), place=[trainer.global_rank, trainer.world_size, trainer.num_devices])
    about.update(zero=trainer.is_global_zero, best=trainer.checkpoint_callback.best_model_path, metrics=metrics)
    about.update(met=net.met, seen=sorted(n for batch in net.seen for n in batch), step=trainer.global_step)
    (folder / f"{kind}{rank}.json").write_text(json.dumps(about))
"""
SAMPLES, DEVICES = 128, 4


class Job:
    """The program as a process, and what it leaves."""

    def __init__(self, folder: Path, epochs: int, *kinds: str, launcher: Sequence[str] = ()) -> None:
        self.folder = folder
        (folder / "train.py").write_text(PROGRAM)
        self.output = folder / "output"
        self.main = subprocess.Popen(
            [sys.executable, *launcher, "train.py", str(folder), str(epochs), *kinds],
            cwd=folder,
            env={**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=self.output.open("w"),
            stderr=subprocess.STDOUT,
        )

    def results(self, kind: str, ranks: Sequence[int] = range(DEVICES)) -> list[dict[str, Any]]:
        assert self.main.wait(200) == 0, self.output.read_text()[-4000:]
        return [json.loads((self.folder / f"{kind}{rank}.json").read_text()) for rank in ranks]

    def process(self, rank: int) -> psutil.Process:
        children = psutil.Process(self.main.pid).children()
        scripts = [each for each in children if any(word.endswith("train.py") for word in each.cmdline())]
        return next(each for each in scripts if each.environ().get("LOCAL_RANK") == str(rank))

    @property
    def left(self) -> list[psutil.Process]:
        processes = psutil.process_iter(["cwd"])
        return [each for each in processes if each.info["cwd"] == str(self.folder) and each.pid != os.getpid()]


@pytest.fixture
def job(tmp_path: Path) -> Any:
    started: list[Job] = []

    def start(*about: Any, **options: Any) -> Job:
        started.append(Job(tmp_path, *about, **options))
        return started[-1]

    yield start
    for each in started:
        each.main.kill()
        each.main.wait()
        wait_until(lambda each=each: not each.left, 10, "the end of all processes")  # type: ignore[misc]


def check(found: list[dict[str, Any]], epochs: int) -> None:
    """Each sample was trained once per epoch, and all processes end with the same weights, metrics and files."""
    assert [each["place"] for each in found] == [[0, 2, 2], [1, 2, 2]] * 2
    assert [each["zero"] for each in found] == [True, False, False, False]
    assert all(each["seen"] for each in found)  # `counts` says how often: an update may be discarded
    for each in found:
        assert each["counts"] == [float(epochs)] * SAMPLES
        assert each["metrics"] == {"count": float(epochs)}
        assert each["best"] == found[0]["best"]
        assert each["met"] == {"store": "FileStore", "listens": ["127.0.0.1"]}  # no other user gets in
    assert Path(found[0]["best"]).exists()


def test_two_islands_share_an_epoch_and_a_script_fits_twice(job: Any) -> None:
    started = job(2, "DDP", "FSDP2")
    marks = [started.folder / f"{rank}.mark" for rank in range(DEVICES)]
    wait_until(lambda: all(mark.exists() for mark in marks), 90, "training")
    roles = {rank: ["each worker", "each process of an island"] for rank in range(1, DEVICES)}
    pids = {started.process(rank).pid: roles[rank] for rank in roles}
    check_listeners({started.main.pid: ["a job's main process", *roles[1]], **pids}, "zmq")
    for kind in ("DDP", "FSDP2"):
        check(started.results(kind), 2)
    output = started.output.read_text()
    assert output.count("Validate metric") == 2  # of the main process alone
    assert "no other worker has joined" not in output
    prepared = (started.folder / "prepared").read_text().split()
    assert prepared == ["0", "2"] * 4  # one island after the other, in two fits and two validations
    assert not started.left


@pytest.mark.slow
def test_torchrun_starts_the_processes(job: Any) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    started = job(2, "DDP", "again", launcher=launcher)
    for kind in ("DDP", "again"):
        check(started.results(kind), 2)
    assert not started.left


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "how"), [(2, signal.SIGKILL), (3, signal.SIGKILL), (3, signal.SIGINT)])
def test_the_other_island_continues_when_a_process_is_stopped(job: Any, victim: int, how: signal.Signals) -> None:
    started = job(6, "DDP")
    mark = started.folder / f"{victim}.mark"
    wait_until(lambda: mark.exists() and mark.read_text() >= "1", 90, "training")
    started.process(victim).send_signal(how)
    first, second = started.results("DDP", range(2))
    assert first["counts"] == second["counts"] == [6.0] * SAMPLES
    output = started.output.read_text()
    assert output.count("Island 1 is lost: its process") == 1
    assert "Traceback" not in output  # of the island's other process


@pytest.mark.slow
def test_the_islands_restore_the_server_that_is_lost(job: Any) -> None:
    started = job(6, "DDP")
    marks = [started.folder / f"{rank}.mark" for rank in range(DEVICES)]
    wait_until(lambda: all(mark.exists() and mark.read_text() >= "1" for mark in marks), 90, "training")
    (serve,) = [each for each in psutil.Process(started.main.pid).children() if "serve" in each.cmdline()]
    servers = servers_of(serve.pid)
    servers[0].kill()
    check(started.results("DDP"), 6)
    assert not [each for each in (serve, *servers) if each.is_running()]
    assert not started.left


@pytest.mark.slow
def test_the_job_ends_when_a_process_of_the_main_process_s_island_is_killed(job: Any) -> None:
    started = job(50, "DDP")
    mark = started.folder / "1.mark"
    wait_until(lambda: mark.exists() and mark.read_text() >= "1", 90, "training")
    started.process(1).send_signal(signal.SIGKILL)
    assert started.main.wait(30) == 1
    assert "Island 0 is lost: its process" in started.output.read_text()
    wait_until(lambda: not started.left, 15, "the end of all processes")


def test_the_size_of_islands() -> None:
    assert size_of_islands(2, None, 4) == 2
    assert size_of_islands("ddp", DDPStrategy(), 4) == 4
    inside = ModelParallelStrategy(2, 1)
    assert size_of_islands(inside, inside, 4) == 2
    assert size_of_islands(ModelParallelStrategy(), ModelParallelStrategy(), 8) == 8


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"island": 0}, "island=0. Expected a whole number of at least 1"),
        ({"island": True}, "island=True"),
        ({"island": 2, "data": "split"}, "data='split' was given with island=2"),
        ({"island": 2, "algorithm": LayerWise()}, "LayerWise was given with island=2. Expected an algorithm without"),
        ({"island": 2, "start_method": "spawn"}, "start_method='spawn' was given with island=2"),
        ({"island": 2, "advanced": Advanced(min_workers=2)}, "min_workers was given with island=2"),
    ],
)
def test_what_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        ASGDStrategy(**options)


def test_a_trainer_s_devices_are_a_multiple_of_an_island_s(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Islands of 2 device\(s\) were asked for .* devices=3"):
        trainer(tmp_path, ASGDStrategy(island=2), devices=3)
    with pytest.raises(ConfigurationError, match=r"island=2 was given with run=.* devices=4"):
        trainer(tmp_path, ASGDStrategy(island=2, run="127.0.0.1:1/r"), devices=4)


def test_a_later_strategy_does_not_take_an_island_s_process_group_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        world.release_process_group(4)  # a program's own group, of which nothing is known
        monkeypatch.setattr(world, "_has_island_group", True)
        world.release_process_group(1)
        with pytest.raises(ConfigurationError, match="a process group of 1, of a Trainer that divided its devices"):
            world.release_process_group(4)
    finally:
        dist.destroy_process_group()
