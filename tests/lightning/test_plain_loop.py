"""Plain loops in processes of their own: with `lightning-asgd serve`, as a job, and without Lightning."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import Sampler

from lightning_asgd import ASGDStrategy, AsyncSGD, Timeouts
from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.foundation.errors import ConfigurationError
from tests.helpers.holding import Gate, hold, release
from tests.helpers.listeners import check_listeners
from tests.helpers.plain import Counts, Run, Shards, numbered
from tests.helpers.ports import free_port
from tests.helpers.programs import environment
from tests.helpers.servers import servers_of
from tests.lightning.models import Regression, loader, trainer
from tests.lightning.test_processes import ROOT, wait_until
from tests.lightning.test_runs import address_of_run, serve, to_file

SAMPLES = 200
EPOCHS = 10


def note(file: Path, **about: Any) -> None:
    new = file.with_suffix(".new")
    new.write_text(json.dumps(about))
    new.rename(file)  # others may be reading it


def noted(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


class Own(Sampler[int]):
    """Another order on each rank, of all samples or of half of them."""

    def __init__(self, *, divides: bool) -> None:
        self.samples = list(range(int(os.environ["RANK"]), SAMPLES, 2) if divides else range(SAMPLES))

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random().sample(self.samples, len(self.samples)))

    def __len__(self) -> int:
        return len(self.samples)


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "": lambda: {"shuffle": True},
    "shards": lambda: {"num_workers": 2, "multiprocessing_context": "fork"},  # whose processes end with this one
    "unseeded": lambda: {"sampler": Own(divides=False)},
    "divided": lambda: {"sampler": Own(divides=True)},
}


def train(
    asgd: AsyncSGD, model: Counts, optimizer: torch.optim.Optimizer, file: Path, step_s: float, *, order: str = ""
) -> None:
    """Train, and note in a file what others want to know."""
    shards, how = order == "shards", ORDERS[order]()
    data: Any = Shards((50, 0, 70, 80), known=False) if shards else numbered(SAMPLES)
    epochs, gate = 4 if shards else EPOCHS, Gate(file.parent, file.name)
    with asgd:
        for _ in asgd.epochs(epochs):
            for (numbers,) in asgd.batches(data, batch_size=2, **how):
                time.sleep(step_s)
                file.with_suffix(".begun").touch()
                gate.step(asgd.epoch)
                optimizer.zero_grad()
                model(numbers).backward()
                optimizer.step()
            note(file, epoch=asgd.epoch + 1, chief=asgd.is_chief, seen=model.seen.tolist())
    note(file, epoch=epochs, chief=noted(file)["chief"], seen=model.seen.tolist(), ended=True)


def attach(folder: Path, name: str, address: str, transport: str, step_s: float, *, order: str = "") -> None:
    to_file(folder / f"{name}.log")
    torch.set_num_threads(1)
    model = Counts(SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    silent = Timeouts(silence_s=3.0)
    run: dict[str, Any] = {"run": address, "transport": transport, "timeouts": silent}
    asgd = AsyncSGD(model, optimizer, nsync=2, algorithm=ASGD("sum"), **run)
    train(asgd, model, optimizer, folder / name, step_s, order=order)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["rpc", pytest.param("zmq", marks=pytest.mark.slow)])
def test_workers_join_leave_and_die_and_the_server_dies_and_nothing_is_lost(
    tmp_path: Path, mains: Any, transport: str
) -> None:
    served = mains(target=serve, args=(tmp_path, transport))
    started: dict[str, Any] = {}

    def start(name: str, step_s: float = 0.01) -> None:
        started[name] = mains(target=attach, args=(tmp_path, name, address, transport, step_s))
        started[name].start()

    def epoch(name: str) -> int:
        return int(noted(tmp_path / name).get("epoch", 0))

    served.start()
    try:
        address = address_of_run(tmp_path)
        hold(tmp_path, "a", epoch=1)
        start("a")
        wait_until(lambda: epoch("a") >= 1, 40, "training")
        roles = {served.pid: ["`lightning-asgd serve`"], started["a"].pid: ["each worker"]}
        check_listeners(roles, transport)
        start("b")
        wait_until((tmp_path / "b.begun").exists, 40, "a second worker's start")
        hold(tmp_path, "b", epoch=3)
        release(tmp_path, "a")
        wait_until(lambda: epoch("b") >= 2, 30, "training with a second worker")
        servers_of(served.pid)[0].kill()
        before = epoch("b")
        hold(tmp_path, "b", epoch=6)
        wait_until(lambda: epoch("b") > before, 30, "training with another server")
        started["a"].kill()
        hold(tmp_path, "c", epoch=9)
        start("c", 0.05)
        wait_until((tmp_path / "c.begun").exists, 40, "a third worker's start")
        release(tmp_path, "b")
        wait_until(lambda: epoch("c") > 0, 30, "training with a third worker")
        os.kill(started["c"].pid, signal.SIGTERM)
        release(tmp_path, "c")
        started["c"].join(100)
        assert started["c"].exitcode == 128 + signal.SIGTERM, (tmp_path / "c.log").read_text()
        started["b"].join(100)
        assert started["b"].exitcode == 0, (tmp_path / "b.log").read_text()
        os.kill(served.pid, signal.SIGTERM)
        served.join(100)
        assert served.exitcode == 0, (tmp_path / "serve.log").read_text()
    finally:
        for process in (*started.values(), served):
            process.kill()
            process.join()
    a, b, c = (noted(tmp_path / name) for name in "abc")
    assert (a["chief"], b["chief"], c["chief"]) == (True, True, False)
    assert "ended" not in c
    assert (b["epoch"], b["seen"], b["ended"]) == (EPOCHS, [float(EPOCHS)] * SAMPLES, True)


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_the_shards_of_a_killed_worker_are_trained_by_others(tmp_path: Path, mains: Any) -> None:
    served = mains(target=serve, args=(tmp_path, "rpc"))
    served.start()
    about = tmp_path, address_of_run(tmp_path), "rpc", 0.01
    workers = {n: mains(target=attach, args=(about[0], n, *about[1:]), kwargs={"order": "shards"}) for n in "ab"}
    children: list[psutil.Process] = []

    def loads() -> bool:
        children[:] = psutil.Process(workers["a"].pid).children(recursive=True)
        begun = sum(time.time() - child.create_time() > 0.2 for child in children)  # and they watch their parent
        return begun >= 2

    try:
        hold(tmp_path, *workers)
        for worker in workers.values():
            worker.start()
        wait_until(lambda: all((tmp_path / f"{name}.begun").exists() for name in workers), 40, "the start of both")
        hold(tmp_path, "a", epoch=2)
        release(tmp_path, "b")
        wait_until(lambda: min(noted(tmp_path / name).get("epoch", 0) for name in "ab") >= 1, 40, "training of both")
        wait_until(loads, 20, "its loader processes")  # it has none between two passes
        workers["a"].kill()
        workers["b"].join(100)
        assert workers["b"].exitcode == 0, (tmp_path / "b.log").read_text()
        wait_until(lambda: not any(is_alive(child) for child in children), 10, "the end of its loader processes")
    finally:
        for process in (*workers.values(), served):
            process.kill()
            process.join()
    assert noted(tmp_path / "b")["seen"] == [4.0] * SAMPLES


def agent(folder: Path, address: str) -> None:
    """As torchrun's: it starts a worker, and waits for it."""
    os.environ["TORCHELASTIC_RUN_ID"] = "none"

    def work() -> None:
        try:
            attach(folder, "a", address, "rpc", 0.05)
        except SystemExit as left:
            note(folder / "left", code=left.code)

    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    note(folder / "worker", pid=worker.pid)
    worker.join()


def test_a_worker_leaves_the_run_when_its_agent_is_killed(tmp_path: Path, mains: Any) -> None:
    served = mains(target=serve, args=(tmp_path, "rpc"))
    served.start()
    started, pid = mains(target=agent, args=(tmp_path, address_of_run(tmp_path))), 0
    started.start()
    try:
        wait_until(lambda: int(noted(tmp_path / "a").get("epoch", 0)) >= 1, 30, "training")
        pid = noted(tmp_path / "worker")["pid"]
        started.kill()
        wait_until(lambda: not psutil.pid_exists(pid), 10, "the worker's end")
        assert noted(tmp_path / "left") == {"code": 128 + signal.SIGTERM}
    finally:
        for each in (started, served):
            each.kill()
            each.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Joins(pl.Callback):
    """Has a plain loop join the Trainer's run."""

    def __init__(self, asgd: AsyncSGD) -> None:
        self.asgd, self.refused = asgd, ""

    def on_train_batch_start(self, *_: Any) -> None:
        with pytest.raises(ConfigurationError) as refused, self.asgd:
            pass
        self.refused = str(refused.value)


@pytest.mark.parametrize("first", ["trainer", "plain loop"])
def test_a_trainer_and_a_plain_loop_cannot_share_a_run(tmp_path: Path, first: str) -> None:
    run, layer = Run(), torch.nn.Linear(4, 1)
    asgd = run.worker(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    joins = Joins(asgd)
    strategy: Any = ASGDStrategy(run="127.0.0.1:1/s")
    strategy._job = run.job
    fit = trainer(tmp_path, strategy, devices=1, max_epochs=1, callbacks=[joins])
    if first == "trainer":
        fit.fit(Regression(), loader())
        assert joins.refused.startswith("Run 's' was begun with a Trainer, but this worker trains with a plain loop or")
    else:
        with asgd:
            with pytest.raises(ConfigurationError, match=r"was begun with a plain loop or Fabric, but this"):
                fit.fit(Regression(), loader())
            assert run.services[0].state.session.members.living == {1}  # type: ignore[union-attr]
    run.close()


def member(folder: Path, rank: int, port: int, order: str) -> None:
    """A worker of a job, as torchrun or a user starts it."""
    to_file(folder / f"{rank}.log")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.manual_seed(rank)
    model = Counts(SAMPLES)
    torch.nn.init.zeros_(model.seen) if rank == 0 else torch.nn.init.ones_(model.seen)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    asgd = AsyncSGD(model, optimizer, nsync=2, algorithm=ASGD("sum"))
    train(asgd, model, optimizer, folder / str(rank), (0.0, 0.005)[rank], order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_two_processes_are_a_job(tmp_path: Path, mains: Any, order: str) -> None:
    port = free_port()
    workers = [mains(target=member, args=(tmp_path, rank, port, order)) for rank in (0, 1)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(100)
            assert worker.exitcode == 0, "".join(log.read_text() for log in tmp_path.glob("*.log"))
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    for rank in (0, 1):
        assert noted(tmp_path / str(rank))["seen"] == [4.0 if order == "shards" else float(EPOCHS)] * SAMPLES
    said = (tmp_path / "0.log").read_text()
    assert said.count("The order of Own differs between workers.") == (order in ("unseeded", "divided"))


ALONE = """
import sys, torch
from lightning_asgd import AsyncSGD
from tests.helpers.plain import Counts, numbered
model = Counts(20)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
with AsyncSGD(model, optimizer, nsync=2) as asgd:
    for epoch in asgd.epochs(2):
        for (numbers,) in asgd.batches(numbered(20), batch_size=4, shuffle=True):
            optimizer.zero_grad()
            model(numbers).backward()
            optimizer.step()
assert model.seen.tolist() == [2.0] * 20 and asgd.stats.exchanges > 3

# A code that is part of the algorithm is used on the servers' machine too.
model = torch.nn.Linear(4096, 2, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with AsyncSGD(model, optimizer, nsync=1, algorithm="sparse_loco") as asgd:
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 4096)).square().mean().backward()
        optimizer.step()
pushed = [each.bytes_pushed for each in asgd.stats.records if each.bytes_pushed]
assert pushed and set(pushed) == {2 * (14 * 128 + 32) // 8}, pushed
print(sorted(name for name in sys.modules if name.partition(".")[0] in {LIGHTNING}))
"""


def test_a_plain_loop_loads_no_lightning(tmp_path: Path) -> None:
    names = {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"}
    program = ALONE.replace("{LIGHTNING}", repr(names))
    command = [sys.executable, "-c", program]
    about: dict[str, Any] = {"cwd": ROOT, "env": environment(), "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=100, check=False, **about)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
