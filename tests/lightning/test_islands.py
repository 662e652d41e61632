"""Islands: groups of processes that train in lock-step inside and exchange as one worker, with DDP or FSDP2 inside."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_asgd import Advanced, ASGDStrategy, Timeouts
from lightning_asgd.algorithms import ASGD
from lightning_asgd.cli.command_line import main
from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning import data_mode
from lightning_asgd.core.lightning.data_mode import why_not_shared
from tests.helpers.holding import Gate, hold, release
from tests.helpers.ports import free_port
from tests.helpers.programs import environment
from tests.helpers.servers import servers_of
from tests.lightning.models import trainer
from tests.lightning.test_processes import wait_until
from tests.lightning.test_runs import address_of_run, to_file

SAMPLES, BATCH, EPOCHS = 128, 4, 10


def numbered() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 8, generator=generator)
    return TensorDataset(x, x[:, :1] * 2 - x[:, 1:2] + 0.5, torch.arange(SAMPLES))


class Net(pl.LightningModule):
    """Its layers do not divide evenly among two processes. Notes what it trains."""

    def __init__(self, *, sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = self.layers()
        self.sharded = sharded
        self.seen: list[list[int]] = []

    def layers(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 1))

    def configure_model(self) -> None:
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            self.sharded = False  # called again by validate
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net:
                if list(layer.parameters()):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, numbers = batch
        self.seen.append(numbers.tolist())
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        self.log("loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Poisoned(Net):
    """One process has a gradient of NaN once."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        poison = float("nan") if (self.current_epoch, batch_idx, self.global_rank) == (0, 2, 1) else 1.0
        return poison * super().training_step(batch, batch_idx)


class Counting(Net):
    """Learns how often each sample was trained."""

    def __init__(self, mark: Path, *, sharded: bool) -> None:
        super().__init__(sharded=sharded)
        self.mark = mark
        self.gate = Gate(mark.parent, mark.stem[:-1])

    def layers(self) -> nn.Sequential:
        counts = nn.Embedding(SAMPLES, 1)
        nn.init.zeros_(counts.weight)
        return nn.Sequential(counts)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.mark.write_text(str(self.current_epoch))
        time.sleep(0.04)
        self.gate.step(self.current_epoch)
        return -self.net(batch[2]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=float(self.trainer.world_size))  # gradients are processes' means


def serve(folder: Path) -> None:
    to_file(folder / "serve.log")
    raise SystemExit(main(["serve", "127.0.0.1:0/islands", "--num-servers=2"]))


def train(folder: Path, name: str, rank: int, port: int, inside: str, address: str, **about: Any) -> None:
    """One process of an island, as torchrun starts it. Without an address Lightning's own strategy trains alone."""
    epochs, counts, resumes, size = (about[key] for key in ("epochs", "counts", "resumes", "size"))
    to_file(folder / f"{name}{rank}.log")
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    os.environ.update({key: str(value) for key, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID=name)
    torch.set_num_threads(1)
    sharded, backend = inside == "FSDP2", {"process_group_backend": about["backend"]}
    strategy: Any = DDPStrategy(**backend)
    if sharded:
        strategy = ModelParallelStrategy(size, 1, save_distributed_checkpoint=False, **backend)
    if address:
        options: dict[str, Any] = {"algorithm": ASGD("sum")} if counts else {}
        options |= about["options"]
        run = {"run": address, "timeouts": Timeouts(silence_s=3.0)}
        strategy = ASGDStrategy(**{"nsync": 3, **options}, island=strategy, **run)
    made = trainer(folder, strategy, devices=size, max_epochs=epochs, accelerator=about["accelerator"])
    net = Counting(folder / f"{name}{rank}.mark", sharded=sharded) if counts else Net(sharded=sharded)
    if name == "poisoned":
        net = Poisoned(sharded=sharded)
    data, validation = DataLoader(numbered(), batch_size=BATCH), DataLoader(numbered(), batch_size=16)
    made.fit(net, data, None if counts else validation, ckpt_path=str(folder / resumes) if resumes else None)
    made.save_checkpoint(folder / f"{name}.ckpt")
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in net.named_parameters()}
    state = {name: tensor.detach().cpu().clone() for name, tensor in whole.items()}
    metrics = {key: float(value) for key, value in made.callback_metrics.items()}
    found = {"state": state, "seen": net.seen, "step": made.global_step, "metrics": metrics}
    torch.save(found, folder / f"{name}{rank}.pt")


class Started:
    """Islands that a test has started."""

    def __init__(self, folder: Path, mains: Any, served: Any) -> None:
        self.folder, self.mains, self.served = folder, mains, served
        self.address = ""
        self.processes: dict[str, list[Any]] = {}

    def start(self, name: str, inside: str, address: str, **more: Any) -> None:
        port = free_port()
        about = {"epochs": 2, "counts": False, "resumes": "", "size": 2, "accelerator": "cpu", "backend": None}
        about |= {"options": {}, **more}
        args = [(self.folder, name, rank, port, inside, address) for rank in range(about["size"])]
        for mark in self.folder.glob(f"{name}?.mark"):
            mark.unlink()
        self.processes[name] = [self.mains(target=train, args=each, kwargs=about) for each in args]
        for process in self.processes[name]:
            process.start()

    def start_counting(self, insides: dict[str, str], **later: int) -> None:
        """Start islands that count, and let them train when each has begun; keep some waiting in later epochs."""
        hold(self.folder, *insides)
        for name, inside in insides.items():
            self.start(name, inside, self.address, epochs=EPOCHS, counts=True)
        for name in insides:
            self.await_epoch(name, 0)
        for name, epoch in later.items():
            hold(self.folder, name, epoch=epoch)
        release(self.folder, *insides.keys() - later.keys())

    def await_epoch(self, name: str, epoch: int) -> None:
        """Wait until an island that was just started trains an epoch, or a later one."""
        marks = [self.folder / f"{name}{rank}.mark" for rank in range(len(self.processes[name]))]
        wait_until(
            lambda: all(mark.exists() and int(mark.read_text() or 0) >= epoch for mark in marks), 120, "training"
        )

    def results(self, *names: str) -> list[dict[str, Any]]:
        found = []
        for name in names:
            for rank, process in enumerate(self.processes[name]):
                process.join(120)
                assert process.exitcode == 0, (self.folder / f"{name}{rank}.log").read_text()[-3000:]
                found.append(torch.load(self.folder / f"{name}{rank}.pt"))
        return found

    def end(self) -> None:
        for process in (each for island in self.processes.values() for each in island):
            process.kill()
            process.join()


@pytest.fixture
def run(tmp_path: Path, mains: Any) -> Any:
    """A run's address, and what was started for it."""
    served = mains(target=serve, args=(tmp_path,))
    served.start()
    started = Started(tmp_path, mains, served)
    try:
        started.address = address_of_run(tmp_path)
        yield started.address, started
    finally:
        started.end()
        os.kill(served.pid, signal.SIGTERM)
        served.join(60)
        served.kill()
        served.join()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("inside", ["DDP", "FSDP2"])
def test_one_island_trains_as_lightnings_own_strategy_does(run: Any, inside: str) -> None:
    address, started = run
    started.start("plain", inside, "")
    started.start("island", inside, address)
    for theirs, ours in zip(started.results("plain"), started.results("island"), strict=True):
        assert ours["seen"] == theirs["seen"]
        assert ours["step"] == theirs["step"] == 2 * SAMPLES // BATCH // 2
        for name, tensor in theirs["state"].items():
            assert torch.equal(ours["state"][name], tensor)
        assert ours["metrics"] == theirs["metrics"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("inside", [pytest.param("DDP", marks=pytest.mark.slow), "FSDP2"])
def test_an_island_resumes_from_a_checkpoint_as_lightnings_own_strategy_does(run: Any, inside: str) -> None:
    address, started = run
    started.start("before", inside, "")
    started.results("before")
    started.start("plain", inside, "", epochs=3, resumes="before.ckpt")
    started.start("island", inside, address, epochs=3, resumes="before.ckpt")
    for theirs, ours in zip(started.results("plain"), started.results("island"), strict=True):
        assert ours["step"] == theirs["step"] == 3 * SAMPLES // BATCH // 2
        for name, tensor in theirs["state"].items():
            assert torch.equal(ours["state"][name], tensor)


@pytest.mark.parametrize("inside", [pytest.param("DDP", marks=pytest.mark.slow), "FSDP2"])
def test_a_gradient_of_nan_spoils_no_process(run: Any, inside: str) -> None:
    address, started = run
    started.start("poisoned", inside, address)
    first, second = started.results("poisoned")
    for name, tensor in first["state"].items():
        assert tensor.isfinite().all()
        assert torch.equal(second["state"][name], tensor)
    assert "rejected an update with NaN" in (started.folder / "poisoned0.log").read_text()


@pytest.mark.timeout(600)  # three starts of an island
@pytest.mark.parametrize("killed", ["b", pytest.param("a", marks=pytest.mark.slow)])
def test_islands_that_are_sharded_differently_train_together_and_a_killed_one_rejoins(run: Any, killed: str) -> None:
    _, started = run
    insides = {"a": "DDP", "b": "FSDP2"}
    (other,) = set(insides) - {killed}
    started.start_counting(insides, **{other: 2})
    started.await_epoch(killed, 1)
    partner, victim = started.processes[killed]
    os.kill(victim.pid, signal.SIGKILL)
    partner.join(100)
    assert partner.exitcode not in (None, 0)
    started.start(killed, insides[killed], started.address, epochs=EPOCHS, counts=True)
    started.await_epoch(killed, 0)
    release(started.folder, other)
    started.await_epoch(killed, 2)
    for each in started.results("a", "b"):
        assert each["state"]["net.0.weight"].flatten().tolist() == [float(EPOCHS)] * SAMPLES


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_island_that_was_suspended_rejoins_and_nothing_is_lost(run: Any) -> None:
    _, started = run
    started.start_counting({"a": "DDP", "b": "DDP"})
    started.await_epoch("b", 1)
    first = started.processes["b"][0]
    os.kill(first.pid, signal.SIGSTOP)
    time.sleep(5)  # longer than silence_s
    os.kill(first.pid, signal.SIGCONT)
    for each in started.results("a", "b"):
        assert each["state"]["net.0.weight"].flatten().tolist() == [float(EPOCHS)] * SAMPLES


@pytest.mark.timeout(600)
def test_islands_restore_the_servers_that_are_lost(run: Any) -> None:
    _, started = run
    started.start_counting({"a": "DDP", "b": "FSDP2"}, a=3)  # when a server is killed, most of the training is left
    first = servers_of(started.served.pid)
    for epoch, server in enumerate(first, 1):
        for name in "ab":
            started.await_epoch(name, 2 * epoch)
        server.kill()
        hold(started.folder, "a", epoch=2 * epoch + 3)
    release(started.folder, "a")
    for each in started.results("a", "b"):
        assert each["state"]["net.0.weight"].flatten().tolist() == [float(EPOCHS)] * SAMPLES
    log = (started.folder / "a0.log").read_text()
    assert not {server.pid for server in first} & {server.pid for server in servers_of(started.served.pid)}
    assert "Traceback" not in log


def test_an_island_that_cannot_restore_its_server_ends_with_an_error_that_names_it(run: Any) -> None:
    address, started = run
    options = {"advanced": Advanced(nfetch=3, npush=1)}  # the latest pushes are in no reply
    started.start("a", "DDP", address, epochs=EPOCHS, counts=True, options=options)
    started.await_epoch("a", 1)
    servers_of(started.served.pid)[1].kill()
    for rank, process in enumerate(started.processes["a"]):
        process.join(100)
        assert process.exitcode not in (None, 0)
        assert "Server 1 is lost" in (started.folder / f"a{rank}.log").read_text()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compression": "bf16"}, "compression='bf16' was given with island="),
        ({"compression": "auto"}, "compression='auto' was given with island="),
        (
            {"compression": "bf16", "run": "h:1/r"},
            "compression='bf16' was given with island=",
        ),
    ],
)
def test_what_an_island_cannot_do_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        ASGDStrategy(island="ddp", **options)


class Sharded(IterableDataset[torch.Tensor]):
    """It has a length, and so batches that Lightning can count."""

    num_shards = 2

    def open_shard(self, epoch: int, shard: int, start: int) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(8 - start, 1))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(len(self), 1))

    def __len__(self) -> int:
        return 16


def test_data_with_shards_are_refused_although_they_have_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Sharded(), batch_size=4)
    monkeypatch.setattr(data_mode, "training_loaders", lambda _: [loader])
    monkeypatch.setattr(data_mode, "expected_batches", lambda _: len(loader))
    island = SimpleNamespace(strategy=SimpleNamespace(place_in_batch=(0, 2)))
    assert "have shards" in (why_not_shared(island) or "")


def test_another_strategy_inside_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="Expected 'ddp', a number of devices, or a DDPStrategy or ModelParallelStrategy"
    ):
        trainer(tmp_path, ASGDStrategy(island="fsdp", run="127.0.0.1:1/r"))


ATTACHED = """
import json, sys
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_asgd import ASGDStrategy
from tests.helpers.meeting import how_it_met
from tests.lightning.test_islands import Counting, numbered

folder, address = Path(sys.argv[1]), sys.argv[2]


class Met(Counting):
    def on_train_end(self):
        number = self.trainer.max_epochs - 1
        (folder / f"met{number}{self.global_rank}.json").write_text(json.dumps(how_it_met()))


if __name__ == "__main__":
    for number in (0, 1):
        inside = DDPStrategy(start_method=sys.argv[3])
        island = ASGDStrategy(nsync=3, island=inside, run=address)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=island, max_epochs=1 + number, **quiet)
        trainer.fit(Met(folder / f"{number}.mark", sharded=False), DataLoader(numbered(), batch_size=4))
"""


def run_script(folder: Path, address: str, start: str) -> None:
    """Run a program as a script, with the secret of the run's servers."""
    to_file(folder / "script.log")
    secret = {name: value for name, value in os.environ.items() if name == SECRET_ENV}
    os.chdir(folder)
    os.execve(sys.executable, [sys.executable, "script.py", str(folder), address, start], environment(**secret))


@pytest.mark.slow
@pytest.mark.parametrize("start", ["popen", "fork", "spawn"])
def test_an_island_of_its_own_meets_in_a_file_where_lightning_starts_it(
    run: Any, tmp_path: Path, mains: Any, start: str
) -> None:
    address, _ = run
    (tmp_path / "script.py").write_text(ATTACHED)
    script = mains(target=run_script, args=(tmp_path, address, start))
    script.start()
    script.join(120)
    assert script.exitcode == 0, (tmp_path / "script.log").read_text()[-4000:]
    for number, rank in itertools.product((0, 1), (0, 1)):
        met = json.loads((tmp_path / f"met{number}{rank}.json").read_text())
        assert met == {"store": "FileStore", "listens": ["127.0.0.1"]}
