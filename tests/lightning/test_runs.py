"""`lightning-asgd serve`, and Trainers that attach themselves to the run, leave it, and die."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_asgd import Advanced, ASGDStrategy, Timeouts
from lightning_asgd.algorithms import ASGD
from lightning_asgd.cli.command_line import main
from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.foundation.errors import ConfigurationError, LaunchError, LayoutMismatchError
from lightning_asgd.core.lightning.checkpointing import follow_progress
from tests.helpers.holding import Gate, hold, release
from tests.helpers.listeners import check_listeners
from tests.helpers.ports import free_port
from tests.helpers.servers import servers_of
from tests.lightning.models import Regression, loader, trainer
from tests.lightning.test_processes import wait_until

SAMPLES = 200
EPOCHS = 12
LR_DECAY = 0.5
LATE = 10  # batches
SECRET = "correct horse battery staple"


class Counts(pl.LightningModule):
    """Learns how often each sample was trained. Its other parameter's learning rate falls with the epochs."""

    def __init__(self, step_s: float = 0.0, gate: Gate | None = None) -> None:
        super().__init__()
        self.gate = gate
        self.seen = torch.nn.Parameter(torch.zeros(SAMPLES))
        self.fixed = torch.nn.Parameter(torch.rand(3), requires_grad=False)
        self.step_s = step_s

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        time.sleep(self.step_s)
        if self.gate:
            self.gate.step(self.current_epoch)
        self.log("age", float(self.current_epoch), on_step=False, on_epoch=True)
        return -self.seen[batch[0]].sum()

    def configure_optimizers(self) -> Any:
        self.planned = self.trainer.estimated_stepping_batches
        counts = torch.optim.SGD([{"params": [self.seen], "lr": 1.0}, {"params": [self.fixed], "lr": 1.0}])
        decay = torch.optim.lr_scheduler.LambdaLR(counts, [lambda _: 1.0, lambda epoch: LR_DECAY**epoch])
        return [counts], [decay]


class Diary(pl.Callback):
    """Writes what a worker sees to a file, a line per event."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.batches = 0
        self.sizes: list[int] = []
        self.steps: list[int] = []  # that Lightning counts after each batch

    def write(self, trainer: pl.Trainer, what: str) -> None:
        (optimizer,) = trainer.optimizers
        entry = {
            "what": what,
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "batches": self.batches,
            "sizes": self.sizes,
            "steps": self.steps,
            "planned": trainer.lightning_module.planned,
            "rank": trainer.global_rank,
            "chief": trainer.is_global_zero,
            "world": [dist.get_rank(), dist.get_world_size(), os.environ["RANK"], os.environ["WORLD_SIZE"]],
            "lr": optimizer.param_groups[1]["lr"],
            "seen": trainer.lightning_module.seen.tolist(),
            "fixed": trainer.lightning_module.fixed.tolist(),
        }
        with self.file.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: list[torch.Tensor], *args: Any) -> None:
        self.batches += 1
        self.sizes.append(len(batch[0]))
        if self.batches == 1:  # its end may be that of the epoch, after which the learning rate is another one
            self.write(trainer, "first batch")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.steps.append(trainer.global_step)
        if len(self.steps) == LATE:
            self.write(trainer, "late")

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.write(trainer, "epoch")

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.write(trainer, "end")

    @staticmethod
    def read(file: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Unseeded(Sampler[int]):
    """Yields another order in each process."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random().sample(range(SAMPLES), SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


def to_file(file: Path) -> None:
    with file.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ[SECRET_ENV] = SECRET


def serve(folder: Path, transport: str, *more: str, host: str = "127.0.0.1", port: str = "0") -> None:
    to_file(folder / "serve.log")
    raise SystemExit(main(["serve", f"{host}:{port}/counts", f"--transport={transport}", *more]))


def attach(
    folder: Path,
    name: str,
    address: str,
    transport: str,
    step_s: float,
    batch_size: int = 2,
    silence_s: float = 3.0,
    ahead: str = "",
    unseeded: bool = False,
) -> None:
    to_file(folder / f"{name}.log")
    torch.set_num_threads(1)
    pl.seed_everything(ord(name))  # unlike the others'
    strategy = ASGDStrategy(
        nsync=2,
        algorithm=ASGD("sum"),
        run=address,
        transport=transport,
        timeouts=Timeouts(silence_s=silence_s),
    )
    os.environ["PL_GLOBAL_SEED"] = "0"  # the order of the samples is
    order: dict[str, Any] = {"sampler": Unseeded()} if unseeded else {"shuffle": True}
    data = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=batch_size, **order)
    checkpoint = pl.callbacks.ModelCheckpoint(folder / name, save_last=True)
    youngest = pl.callbacks.ModelCheckpoint(folder / name, monitor="age", filename="youngest")
    made = trainer(
        folder,
        strategy,
        devices=1,
        max_epochs=EPOCHS,
        callbacks=[Diary(folder / f"{name}.json"), checkpoint, youngest],
        enable_checkpointing=True,
    )
    made.fit(Counts(step_s, Gate(folder, name, ahead)), data)
    (folder / f"{name}.best").write_text(youngest.best_model_path)


def under_torchrun(local_rank: int, program: Any, *arguments: Any) -> None:
    """Run a program in the environment of one of two processes that torchrun has started."""
    ranks = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    elastic = {"RUN_ID": "none", "RESTART_COUNT": 0, "MAX_RESTARTS": 3, "USE_AGENT_STORE": True}
    variables = {**ranks, **{f"TORCHELASTIC_{name}": value for name, value in elastic.items()}}
    os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    program(*arguments)


def epochs_of(folder: Path, name: str) -> int:
    """How many epochs a worker has seen the end of."""
    return max([0, *(entry["epoch"] for entry in Diary.read(folder / f"{name}.json"))])


def address_of_run(folder: Path) -> str:
    """Where `serve` says that it serves."""
    log = folder / "serve.log"
    wait_until(lambda: log.exists() and 'run="' in log.read_text(), 40, "the servers' start")
    return log.read_text().partition('run="')[2].partition('"')[0]


@pytest.mark.timeout(600)  # half a minute of training, and six processes that import torch one after the other
@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_workers_come_and_go_and_die_and_the_server_dies_and_nothing_is_lost(
    tmp_path: Path, mains: Any, transport: str
) -> None:
    served = mains(target=serve, args=(tmp_path, transport))
    started: dict[str, Any] = {}

    def start(name: str, step_s: float = 0.01) -> None:
        started[name] = mains(target=attach, args=(tmp_path, name, address, transport, step_s))
        started[name].start()

    def epochs(name: str) -> int:
        return epochs_of(tmp_path, name)

    served.start()
    try:
        address = address_of_run(tmp_path)
        hold(tmp_path, "a", epoch=2)
        start("a")
        wait_until(lambda: epochs("a") >= 1, 40, "training")
        roles = {served.pid: ["`lightning-asgd serve`"], started["a"].pid: ["each worker"]}
        check_listeners(roles, transport)
        start("b")
        wait_until(lambda: Diary.read(tmp_path / "b.json") != [], 40, "a second worker's start")
        hold(tmp_path, "b", epoch=3)
        release(tmp_path, "a")
        wait_until(lambda: epochs("b") >= 2, 30, "training with a second worker")
        servers_of(served.pid)[0].kill()
        log = tmp_path / "serve.log"
        wait_until(lambda: "A replacement is being started." in log.read_text(), 40, "another server")
        before = epochs("b")
        hold(tmp_path, "b", epoch=7)
        wait_until(lambda: epochs("b") > before + 1, 30, "training with another server")
        started["a"].kill()
        start("c", 0.05)  # a slow one
        wait_until(lambda: Diary.read(tmp_path / "c.json") != [], 40, "training with a third worker")
        os.kill(started["c"].pid, signal.SIGTERM)
        release(tmp_path, "b")
        started["c"].join(100)
        assert started["c"].exitcode == 0, (tmp_path / "c.log").read_text()
        assert epochs("c") < EPOCHS
        started["b"].join(100)
        assert started["b"].exitcode == 0, (tmp_path / "b.log").read_text()
        for _ in range(3):  # a signal may interrupt the handling of another one
            os.kill(served.pid, signal.SIGTERM)
        served.join(100)
        assert served.exitcode == 0, (tmp_path / "serve.log").read_text()
    finally:
        for process in (*started.values(), served):
            process.kill()
            process.join()
    diaries = {name: Diary.read(tmp_path / f"{name}.json") for name in "abc"}
    end = diaries["b"][-1]
    assert end["what"] == "end"
    assert end["seen"] == [float(EPOCHS)] * SAMPLES
    assert end["step"] == EPOCHS * SAMPLES // 2
    assert [entry["chief"] for entry in (diaries["a"][0], diaries["b"][0], diaries["c"][0], end)] == [1, 0, 0, 1]
    assert diaries["b"][0]["rank"] == 2
    assert diaries["a"][0]["world"] == [0, 1, "0", "1"]
    assert diaries["b"][0]["world"] == [1, 2, "1", "2"]  # of those that take part, whatever its number
    for name in "bc":
        first = diaries[name][0]
        assert first["epoch"] > 0
        assert first["lr"] == LR_DECAY ** first["epoch"]
        assert first["fixed"] == diaries["a"][0]["fixed"]
    checkpoint = torch.load(tmp_path / "b" / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"]["seen"].tolist() == [float(EPOCHS)] * SAMPLES
    best = Path((tmp_path / "b.best").read_text())
    assert best.parent == tmp_path / "a"  # by the chief before it
    assert best.exists()


def test_who_comes_just_when_a_server_is_lost_waits_for_the_one_in_its_place(tmp_path: Path, mains: Any) -> None:
    served = mains(target=serve, args=(tmp_path, "rpc", "--num-servers=2"))
    workers: list[Any] = []

    def start(name: str) -> None:
        workers.append(mains(target=attach, args=(tmp_path, name, address, "rpc", 0.01)))
        workers[-1].start()

    def restored() -> int:
        return (tmp_path / "serve.log").read_text().count("A replacement is being started.")

    served.start()
    try:
        address = address_of_run(tmp_path)
        servers_of(served.pid)[1].kill()
        start("a")  # nobody knows anything that would have to be restored
        wait_until(lambda: epochs_of(tmp_path, "a") >= 1, 40, "training")
        assert restored() == 1
        servers_of(served.pid)[0].kill()
        start("b")
        wait_until(lambda: restored() == 2, 40, "another server")
        before = epochs_of(tmp_path, "a")
        wait_until(lambda: epochs_of(tmp_path, "a") > before, 40, "training with another server")
        hold(tmp_path, "a")
        wait_until(lambda: Diary.read(tmp_path / "b.json") != [], 40, "training with a second worker")
        release(tmp_path, "a")
        for worker in workers:
            worker.join(100)
            assert worker.exitcode == 0, "".join(log.read_text() for log in tmp_path.glob("*.log"))
    finally:
        for process in (*workers, served):
            process.kill()
            process.join()
    assert restored() == 2
    assert Diary.read(tmp_path / "b.json")[-1]["seen"] == [float(EPOCHS)] * SAMPLES


def test_workers_with_batches_of_different_sizes_and_orders_share_every_epoch(tmp_path: Path, mains: Any) -> None:
    served = mains(target=serve, args=(tmp_path, "rpc"))
    started: dict[str, Any] = {}

    def start(name: str, step_s: float, batch_size: int) -> None:
        # With silence_s=60 no heartbeat is answered during the test.
        about = (tmp_path, name, address, "rpc", step_s, batch_size, 60.0, "a" if name == "b" else "", True)
        started[name] = mains(target=under_torchrun, args=(len(started), attach, *about))
        started[name].start()

    served.start()
    try:
        address = address_of_run(tmp_path)
        hold(tmp_path, "a", "b")
        start("a", 0.05, 16)
        wait_until(lambda: Diary.read(tmp_path / "a.json") != [], 40, "training")
        start("b", 0.08, 40)
        wait_until(lambda: Diary.read(tmp_path / "b.json") != [], 40, "training with a second worker")
        release(tmp_path, "a", "b")
        for name, process in started.items():
            process.join(100)
            assert process.exitcode == 0, (tmp_path / f"{name}.log").read_text()
    finally:
        os.kill(served.pid, signal.SIGTERM)
        served.join(100)
        for process in (*started.values(), served):
            process.kill()
            process.join()
    worlds = [entry["world"] for entry in Diary.read(tmp_path / "a.json")]
    assert worlds[0] == [0, 1, "0", "1"]
    assert [0, 2, "0", "2"] in worlds  # in the next epoch after the other one came
    steps = EPOCHS * math.ceil(SAMPLES / 16)  # in the first worker's batches, whoever trains them
    ends = [Diary.read(tmp_path / f"{name}.json")[-1] for name in "ab"]
    for end in ends:
        assert end["what"] == "end"
        assert end["seen"] == [float(EPOCHS)] * SAMPLES
        assert (end["step"], end["planned"]) == (steps, steps)
    small, large = (end["sizes"] for end in ends)
    assert max(small) == 16
    assert max(large) == 40
    assert sum(small) + sum(large) >= EPOCHS * SAMPLES
    assert min(sum(small), sum(large)) >= 2 * SAMPLES


def test_who_comes_within_an_epoch_counts_the_steps_that_were_made_of_it(tmp_path: Path, mains: Any) -> None:
    served = mains(target=serve, args=(tmp_path, "rpc"))
    started: list[Any] = []
    served.start()
    try:
        address = address_of_run(tmp_path)
        for name in "ab":
            started.append(mains(target=attach, args=(tmp_path, name, address, "rpc", 0.1, 2)))
            started[-1].start()
            wait_until(lambda name=name: len(Diary.read(tmp_path / f"{name}.json")) > (name == "a"), 40, "training")  # type: ignore[misc]
        wait_until(lambda: len(Diary.read(tmp_path / "b.json")) > 1, 40, "training")
    finally:
        os.kill(served.pid, signal.SIGTERM)
        for process in (*started, served):
            process.kill()
            process.join()
    steps = Diary.read(tmp_path / "b.json")[1]["steps"]
    assert steps[1] > LATE
    assert steps == sorted(steps)


@pytest.mark.parametrize("transport", ["rpc", pytest.param("zmq", marks=pytest.mark.slow)])
def test_serve_is_lost_and_started_again_first_with_and_then_without_its_workers(
    tmp_path: Path, mains: Any, transport: str
) -> None:
    snapshots = tmp_path / "snapshots"
    started: list[Any] = []

    def start(target: Any, *args: Any, **about: Any) -> Any:
        started.append(mains(target=target, args=args, kwargs=about))
        started[-1].start()
        return started[-1]

    def begin(port: str) -> tuple[Any, str]:
        (tmp_path / "serve.log").unlink(missing_ok=True)
        about = f"--snapshots={snapshots}", "--snapshot_every_s=0.1"
        served = start(serve, tmp_path, transport, *about, port=port)
        return served, address_of_run(tmp_path)

    def lose(served: Any, *, machine: bool) -> None:
        """Nobody says a last word: the command alone, or its machine, as it were."""
        for process in psutil.Process(served.pid).children(recursive=True) if machine else ():
            process.kill()
        served.kill()
        served.join(5)

    def epochs(name: str) -> int:
        return len(Diary.read(tmp_path / f"{name}.json"))

    try:
        served, address = begin(str(free_port()))  # it is started there again
        first = start(attach, tmp_path, "a", address, transport, 0.01)
        wait_until(lambda: epochs("a") >= 3, 30, "training")
        lose(served, machine=False)
        served, address = begin(address.partition("/")[0].rpartition(":")[2])
        before = epochs("a")
        wait_until(lambda: epochs("a") >= before + 2, 30, "training with other servers")
        lose(served, machine=True)
        first.kill()
        served, address = begin("0")
        assert "continues from its snapshots" in (tmp_path / "serve.log").read_text()
        second = start(attach, tmp_path, "b", address, transport, 0.0)
        second.join(100)
        assert second.exitcode == 0, (tmp_path / "b.log").read_text()
        os.kill(served.pid, signal.SIGTERM)
        served.join(100)
        assert served.exitcode == 0, (tmp_path / "serve.log").read_text()
    finally:
        for process in started:
            process.kill()
            process.join()
    diary = Diary.read(tmp_path / "b.json")
    assert diary[0]["epoch"] > 0
    assert diary[-1]["what"] == "end"
    assert diary[-1]["seen"] == [float(EPOCHS)] * SAMPLES
    assert diary[-1]["step"] == EPOCHS * SAMPLES // 2
    assert {path.name for path in snapshots.iterdir()} == {"server0.pt", "serve.lock"}


def check_health(address: str, server: psutil.Process, capsys: pytest.CaptureFixture[str]) -> None:
    """What a probe learns of a run without workers, of a server that hangs, and of one that works again."""

    def answers() -> bool:
        return main(["health", address]) == 0

    wait_until(answers, 30, "an answer of the server")
    assert main(["health", address.replace("/counts", "/other")]) == 1
    assert "Expected run 'other', as given." in capsys.readouterr().err
    assert answers()
    said = f"Run 'counts' at {address.partition('/')[0]}: 1 server answers, 0 workers, "
    assert capsys.readouterr().out.startswith(said)
    server.suspend()
    time.sleep(1.1)  # a report is given again for a second
    try:
        assert main(["health", address]) == 1
    finally:
        server.resume()
    assert (
        f"Run 'counts' at {address.partition('/')[0]}: server 0 does not answer within 2 s." in capsys.readouterr().err
    )
    wait_until(answers, 30, "an answer of the server that works again")


def test_a_trainer_that_does_not_fit_the_run_is_told_why(
    tmp_path: Path, mains: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_ENV, raising=False)  # an encrypted job of this process has made one
    served = mains(target=serve, args=(tmp_path, "rpc"))
    served.start()
    try:
        address = address_of_run(tmp_path)

        def fit(module: pl.LightningModule, batch_size: int = 8, **about: Any) -> None:
            strategy = ASGDStrategy(2, timeouts=Timeouts(start_s=40.0), **{"run": address, **about})
            trainer(tmp_path, strategy, devices=1).fit(module, loader(batch_size=batch_size))

        fit(Regression())
        with pytest.raises(LaunchError, match=r"serves run 'counts'.*Expected run 'other'"):
            fit(Regression(), run=address.replace("/counts", "/other"))
        with pytest.raises(LaunchError, match=r"transport='rpc'\. Expected.*transport='zmq'"):
            fit(Regression(), transport="zmq")
        with pytest.raises(LayoutMismatchError, match=r"worker 2 .* the run"):
            fit(Regression(width=17))
        with pytest.raises(ConfigurationError, match="devices=2"):
            trainer(tmp_path, ASGDStrategy(2, run=address), devices=2)
        fit(Regression())  # nothing has harmed the run
        capsys.readouterr()
        assert main(["status", address]) == 0
        shown = capsys.readouterr().out
        assert "run counts" in shown
        assert "no worker takes part now" in shown
        assert "snapshot" not in shown, "there is no folder of the user's for them"
        assert "Worker 1 has left." in shown
        monkeypatch.setenv(SECRET_ENV, SECRET)  # serve has it, and answers no other health checks
        check_health(address, servers_of(served.pid)[0], capsys)
    finally:
        os.kill(served.pid, signal.SIGTERM)
        served.join(100)
        served.kill()
        served.join()
    assert served.exitcode == 0


class Batches(pl.Callback):
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.epochs.append(trainer.current_epoch)


def test_who_comes_after_the_first_goes_on_where_that_ones_checkpoint_was(tmp_path: Path, mains: Any) -> None:
    """Also with max_steps, with which Lightning takes every state that it loads for one within an epoch."""
    before = trainer(tmp_path, "auto", devices=1, max_epochs=2)
    before.fit(Regression(), loader())
    before.save_checkpoint(tmp_path / "two.ckpt")
    served = mains(target=serve, args=(tmp_path, "rpc"))
    served.start()
    try:
        address = address_of_run(tmp_path)

        def fit(max_epochs: int, ckpt_path: Path | None = None) -> tuple[pl.Trainer, list[int]]:
            batches = Batches()
            strategy = ASGDStrategy(2, run=address)
            about: dict[str, Any] = {"max_epochs": max_epochs, "max_steps": 1000, "callbacks": [batches]}
            made = trainer(tmp_path, strategy, devices=1, **about)
            made.fit(Regression(), loader(), loader(16), ckpt_path=ckpt_path)
            return made, batches.epochs

        assert fit(2, tmp_path / "two.ckpt")[1] == []
        second, epochs = fit(3)
        assert epochs == [2] * 32
        assert (second.current_epoch, second.global_step) == (3, 96)
        with pytest.warns(UserWarning, match="The checkpoint is not loaded"):  # it is not what the run has come to
            third, epochs = fit(4, tmp_path / "two.ckpt")
        assert epochs == [3] * 32
        assert (third.current_epoch, third.global_step) == (4, 128)
    finally:
        os.kill(served.pid, signal.SIGTERM)
        served.join(100)
        served.kill()
        served.join()


def test_a_newcomer_takes_over_what_its_optimizer_does_and_not_how_the_other_device_does_it(tmp_path: Path) -> None:
    mine = trainer(tmp_path, "auto", devices=1)
    weight = torch.nn.Parameter(torch.zeros(1))
    adam = torch.optim.Adam([weight], lr=torch.tensor(0.5), foreach=False, capturable=False)
    mine.strategy.optimizers = [adam]
    theirs = {"lr": torch.tensor(0.25), "betas": (0.8, 0.9), "foreach": None, "fused": True, "capturable": True}
    own = adam.param_groups[0]["lr"]
    follow_progress(mine, {"groups": [[theirs]], "callbacks": {}, "pytorch-lightning_version": pl.__version__})
    (group,) = adam.param_groups
    assert group["lr"] is own
    assert (float(own), group["betas"]) == (0.25, (0.8, 0.9))
    assert (group["foreach"], group["fused"], group["capturable"]) == (False, None, False)
    mine.strategy.optimizers = [torch.optim.SGD([weight], lr=0.5)]
    follow_progress(mine, {"groups": [[{"lr": torch.tensor(0.25)}]]})
    assert mine.optimizers[0].param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("about", "error"),
    [
        ({"run": "host:1"}, 'Expected "host:port/name"'),
        ({"run": 1}, 'Expected "host:port/name"'),
        ({"run": "host:1/r", "algorithm": "layerwise"}, "none waits for a worker that has taken fewer"),
        (
            {"run": "host:1/r", "algorithm": "streaming_diloco", "advanced": Advanced(overlap=False)},
            "wait for each other",
        ),
        ({"run": "host:1/r", "data": "split"}, "the number of workers of an elastic run"),
        ({"run": "host:1/r", "on_worker_failure": "abort"}, "join and leave at any time"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(about: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        ASGDStrategy(2, **about)


def test_the_environment_names_a_run_for_a_strategy_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ASGD_RUN", "host:1/theirs")
    assert ASGDStrategy(2).options.place == ((("host", 1),), "theirs")
    monkeypatch.setenv("LIGHTNING_ASGD_TRANSPORT", "rpc")
    transports = [ASGDStrategy(2, **about).options.transport for about in ({}, {"transport": "zmq"})]
    assert transports == ["rpc", "zmq"]
    given = ASGDStrategy(2, run="other:2/mine").options
    assert (given.place, given.transport) == (((("other", 2),), "mine"), "auto")


def test_where_nobody_serves_the_error_says_what_to_start(tmp_path: Path) -> None:
    strategy = ASGDStrategy(2, run="127.0.0.1:9/r", timeouts=Timeouts(start_s=0.5))
    with pytest.raises(LaunchError, match="lightning-asgd serve"):
        trainer(tmp_path, strategy, devices=1).fit(Regression(), loader())
