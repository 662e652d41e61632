"""What is left when the main process ends, in whatever way; jobs beside each other; other launchers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytorch_lightning as pl
import torch

from lightning_asgd import Advanced, ASGDStrategy, Timeouts
from lightning_asgd.algorithms import Downpour
from lightning_asgd.core.job import registry
from tests.helpers.lean import forked_servers
from tests.helpers.listeners import check_listeners
from tests.helpers.programs import environment
from tests.helpers.servers import servers_of
from tests.lightning.models import Recorder, Regression, loader, trainer

ROOT = Path(__file__).parents[2]


class Signpost(pl.Callback):
    """Writes a file per rank, with its process number, once training is under way; ends it when told to."""

    def __init__(self, folder: Path, step: int = 5) -> None:
        self.folder = folder
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        file = self.folder / f"training{trainer.global_rank}"
        if trainer.global_step >= self.step and not file.exists():
            new = file.with_suffix(".new")
            new.write_text(str(os.getpid()))
            new.rename(file)  # somebody may be reading it

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop |= trainer.strategy.broadcast((self.folder / "stop").exists())  # all decide alike


class Faulty(Regression):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step >= 5 and self.global_rank == 1:
            raise KeyError("no such sample")


def main_process(folder: Path, module: Regression, **settings: Any) -> None:
    """A job's main process: trains for ever with two forked workers and two servers."""
    file = (folder / "output").open("w")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    tempfile.tempdir = str(folder)
    strategy = ASGDStrategy(nsync=2, num_servers=2, start_method="fork", **settings)
    callbacks = [Signpost(folder), Recorder(folder)]
    trainer(folder, strategy, max_epochs=1_000_000, callbacks=callbacks).fit(module, loader())


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


def training(tmp_path: Path) -> bool:
    return all((tmp_path / f"training{rank}").exists() for rank in (0, 1))


def alive(processes: list[psutil.Process]) -> list[str]:
    left = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        except psutil.NoSuchProcess:
            continue
    return left


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_when_a_signal_ends_the_main_process(
    tmp_path: Path, mains: Any, signum: signal.Signals
) -> None:
    main = mains(target=main_process, args=(tmp_path, Regression()))
    main.start()
    try:
        wait_until(lambda: training(tmp_path), 40, "training")
        family = psutil.Process(main.pid).children(recursive=True)
        assert len(family) >= 5  # two servers, two workers, the reaper
        workers = {worker_of(main, tmp_path, rank).pid: ["each worker"] for rank in (0, 1)}
        check_listeners({main.pid: ["a job's main process"], **workers}, "zmq")
        os.kill(main.pid, signum)
        main.join(100)
        assert main.exitcode == {signal.SIGINT: 1, signal.SIGTERM: 0, signal.SIGKILL: -9}[signum]
        if signum == signal.SIGTERM:
            assert "Traceback" not in (tmp_path / "output").read_text()
        wait_until(lambda: not alive(family), 40, f"the end of {alive(family)}")
        assert [*tmp_path.glob("lightning_asgd*")] == []
    finally:
        main.kill()
        main.join()


def test_an_exception_in_one_worker_is_reported_and_leaves_no_process(tmp_path: Path, mains: Any) -> None:
    main = mains(target=main_process, args=(tmp_path, Faulty()), kwargs={"on_worker_failure": "abort"})
    main.start()
    family: list[psutil.Process] = []

    def ended() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            family.extend(psutil.Process(main.pid).children(recursive=True))
        return main.exitcode is not None

    try:
        wait_until(ended, 40, "the end of the main process")
        assert family
        wait_until(lambda: not alive(family), 40, f"the end of {alive(family)}")
    finally:
        main.kill()
        main.join()
    assert main.exitcode == 1
    assert "KeyError: 'no such sample'" in (tmp_path / "output").read_text()


def worker_of(main: Any, folder: Path, rank: int) -> psutil.Process:
    """The process of a forked worker, which has told its number."""
    pid = int((folder / f"training{rank}").read_text())
    assert pid in [p.pid for p in psutil.Process(main.pid).children()]
    return psutil.Process(pid)


def epochs(folder: Path, rank: int = 0) -> int:
    """Epochs that a rank has ended."""
    return sum(r["what"] == "epoch end" for r in Recorder.read(folder, rank))


@pytest.mark.parametrize("fate", ["killed", "raises"])
def test_a_lost_worker_does_not_stop_the_others(tmp_path: Path, mains: Any, fate: str) -> None:
    main = mains(target=main_process, args=(tmp_path, Faulty() if fate == "raises" else Regression()))
    main.start()
    try:
        wait_until(lambda: training(tmp_path), 40, "training")
        if fate == "killed":
            worker_of(main, tmp_path, 1).kill()
        wait_until(lambda: "continue without it" in (tmp_path / "output").read_text(), 20, "the warning")
        before = epochs(tmp_path)
        wait_until(lambda: epochs(tmp_path) > before + 3, 20, "training without the lost worker")
        (tmp_path / "stop").touch()
        main.join(100)
    finally:
        main.kill()
        main.join()
    output = (tmp_path / "output").read_text()
    assert main.exitcode == 0, output
    expected = "Worker 1 ended with exit code -9" if fate == "killed" else "Worker 1 failed"
    assert f"{expected}; the others continue without it." in output
    assert ("KeyError: 'no such sample'" in output) == (fate == "raises")
    assert Recorder.read(tmp_path, 0)[-1]["what"] == "train end"


def test_a_server_that_nobody_can_connect_to_any_more_is_replaced(tmp_path: Path, mains: Any) -> None:
    """As after a port scan, or when a worker is killed as it comes: TensorPipe closes its listening socket."""
    main = mains(target=main_process, args=(tmp_path, Regression()), kwargs={"transport": "rpc"})
    main.start()
    try:
        wait_until(lambda: training(tmp_path), 40, "training")
        workers = {worker_of(main, tmp_path, rank).pid: ["each worker"] for rank in (0, 1)}
        check_listeners({main.pid: ["a job's main process"], **workers}, "rpc")
        known = servers_of(main.pid)
        look: Any = getattr(known[0], "net_connections", None) or known[0].connections
        (door,) = [c.laddr for c in look("tcp") if c.status == psutil.CONN_LISTEN]
        with socket.create_connection(door) as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        wait_until(lambda: len({*servers_of(main.pid)} - {*known}) == 1, 30, "another server")
        before = epochs(tmp_path)
        wait_until(lambda: epochs(tmp_path) > before + 3, 30, "training with it")
        news = "A server was lost and restored from the workers' copies."
        wait_until(lambda: news in (tmp_path / "output").read_text(), 20, "the news")
        (tmp_path / "stop").touch()
        main.join(100)
    finally:
        main.kill()
        main.join()
    output = (tmp_path / "output").read_text()
    assert main.exitcode == 0, output
    assert "No process can connect to this server any more" in output


@pytest.mark.parametrize(
    "settings",
    [
        {"transport": "rpc"},
        {"transport": "zmq", "algorithm": Downpour("adam"), "advanced": Advanced(snapshot_every_s=0.1)},
    ],
    ids=["rpc", "zmq, Adam on the servers"],
)
def test_a_lost_server_is_restored_from_the_workers(tmp_path: Path, mains: Any, settings: dict[str, Any]) -> None:
    main = mains(target=main_process, args=(tmp_path, Regression()), kwargs=settings)
    main.start()
    try:
        wait_until(lambda: training(tmp_path), 40, "training")
        if "advanced" in settings:
            wait_until(lambda: len([*tmp_path.glob("lightning_asgd.*/server*.pt")]) == 2, 20, "snapshots")
        for _ in range(2):  # the coordinator, then the other one
            known = servers_of(main.pid)
            known[0].kill()
            wait_until(lambda known=known: len({*servers_of(main.pid)} - {*known}) == 1, 20, "another server")  # type: ignore[misc]
            before = epochs(tmp_path)
            wait_until(lambda before=before: epochs(tmp_path) > before + 3, 30, "training with it")  # type: ignore[misc]
        news = "A server was lost and restored from the workers' copies."
        wait_until(lambda: news in (tmp_path / "output").read_text(), 20, "the news")
        (tmp_path / "stop").touch()
        main.join(100)
    finally:
        main.kill()
        main.join()
    output = (tmp_path / "output").read_text()
    assert main.exitcode == 0, output
    assert "had no snapshot" not in output
    wait_until(lambda: not list(tmp_path.glob("lightning_asgd.*")), 10, "the end of temporary folders")
    assert output.count("ended with exit code -9") == output.count("A replacement is being started.") == 2
    zero, one = Recorder.read(tmp_path, 0), Recorder.read(tmp_path, 1)
    assert len(zero) == len(one)
    for a, b in zip(zero, one, strict=True):
        assert a["digest"] == b["digest"], a["what"]


def test_a_worker_that_hangs_is_left_behind_and_joins_again(tmp_path: Path, mains: Any) -> None:
    settings = {"timeouts": Timeouts(silence_s=3.0)}
    main = mains(target=main_process, args=(tmp_path, Regression()), kwargs=settings)
    main.start()
    try:
        wait_until(lambda: training(tmp_path), 40, "training")
        wait_until(lambda: epochs(tmp_path) > 1, 40, "an epoch")
        worker = worker_of(main, tmp_path, 1)
        worker.suspend()
        before = epochs(tmp_path)
        wait_until(lambda: epochs(tmp_path) > before + 3, 40, "training without the worker that hangs")
        worker.resume()
        wait_until(lambda: "Worker 1 has rejoined." in (tmp_path / "output").read_text(), 40, "its coming back")
        before = epochs(tmp_path)
        wait_until(lambda: epochs(tmp_path, 1) > before, 40, "training with it")
        (tmp_path / "stop").touch()
        main.join(100)
    finally:
        main.kill()
        main.join()
    output = (tmp_path / "output").read_text()
    assert main.exitcode == 0, output
    assert "Worker 1 sent no heartbeat for" in output
    assert "the others continue without it. It may rejoin." in output
    assert "Worker 1 has rejoined." in output
    zero, one = Recorder.read(tmp_path, 0), Recorder.read(tmp_path, 1)
    assert zero[-1]["what"] == one[-1]["what"] == "train end"
    assert zero[-1]["digest"] == one[-1]["digest"]
    assert epochs(tmp_path, 0) == epochs(tmp_path, 1)


@pytest.mark.parametrize("fate", [pytest.param("killed", marks=pytest.mark.slow), "hangs"])
def test_aborting_names_the_worker(tmp_path: Path, mains: Any, fate: str) -> None:
    settings = {"on_worker_failure": "abort", "timeouts": Timeouts(silence_s=3.0)}
    main = mains(target=main_process, args=(tmp_path, Regression()), kwargs=settings)
    main.start()
    try:
        wait_until(lambda: training(tmp_path), 40, "training")
        family = psutil.Process(main.pid).children(recursive=True)
        worker = worker_of(main, tmp_path, 1)
        worker.kill() if fate == "killed" else worker.suspend()
        main.join(100)
        wait_until(lambda: not alive(family), 40, f"the end of {alive(family)}")
    finally:
        main.kill()
        main.join()
    output = (tmp_path / "output").read_text()
    assert main.exitcode == 1, output
    expected = "process 1 terminated with signal SIGKILL"
    assert (expected if fate == "killed" else "Worker 1 sent no heartbeat for") in output


SCRIPT = """
import sys
from pathlib import Path
import pytorch_lightning as pl
from lightning_asgd import ASGDStrategy
from tests.lightning.models import Recorder, Regression, loader, trainer
from tests.lightning.test_processes import Signpost
folder = Path(sys.argv[1])
options = eval(sys.argv[2])
settings = options.pop("settings", {})
run = trainer(folder, ASGDStrategy(nsync=2, **settings), callbacks=[Recorder(folder), Signpost(folder)], **options)
run.fit(Regression(), loader())
"""


def start(folder: Path, options: str = "{}", command: list[str] | None = None, **extra: str) -> Any:
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with (folder / f"output{extra.get('NODE_RANK', '')}").open("w") as output:
        return subprocess.Popen(
            [*(command or [sys.executable]), str(script), str(folder), options],
            env=environment(**extra),
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def check_finished(folder: Path, processes: list[Any], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    try:
        for process in processes:
            process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        output = "\n".join(p.read_text()[-3000:] for p in sorted(folder.glob("output*")))
        for process in processes:
            if process.poll() is None:
                process.kill()
    assert [p.returncode for p in processes] == [0] * len(processes), output
    zero, one = Recorder.read(folder, 0), Recorder.read(folder, 1)
    assert zero[-1]["what"] == one[-1]["what"] == "train end"
    assert zero[-1]["digest"] == one[-1]["digest"]
    assert zero[-1]["initialized"]


@pytest.mark.slow  # four scripts at once, each of which imports everything
def test_two_jobs_started_as_scripts_at_the_same_time(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    jobs = [start(folder) for folder in folders]
    for folder, job in zip(folders, jobs, strict=True):
        check_finished(folder, [job])


@pytest.mark.slow  # the same with forked workers is among the usual tests
def test_a_script_killed_outright_leaves_a_checkpoint_and_no_process(tmp_path: Path) -> None:
    job = start(tmp_path, "{'max_epochs': 1_000_000, 'devices': 3}")
    try:
        wait_until(lambda: training(tmp_path) and (tmp_path / "training2").exists(), 120, "training")
        family = psutil.Process(job.pid).children(recursive=True)
    finally:
        job.kill()
        job.wait()
    wait_until(lambda: not alive(family), 10, f"the end of {alive(family)}")
    (path,) = tmp_path.glob("*.ckpt")
    output = (tmp_path / "output").read_text()
    assert f"The main process has exited. Worker {'1' if 'Worker 1 has' in output else '2'} has written" in output
    assert str(path) in output
    assert "It holds the servers' weights, with this worker's steps since its last push." in output
    saved = torch.load(path, weights_only=False)
    assert saved["lightning_asgd"]["versions"][0] > 0
    assert "data" in saved["lightning_asgd"]
    resumed = trainer(tmp_path, "auto", devices=1, max_steps=saved["global_step"] + 3, max_epochs=-1)
    resumed.fit(Regression(), loader(), ckpt_path=str(path))
    assert resumed.global_step == saved["global_step"] + 3


@pytest.mark.slow  # the same with forked workers is among the usual tests
def test_a_killed_worker_of_a_script_does_not_stop_the_others(tmp_path: Path) -> None:
    job = start(tmp_path, "{'max_epochs': 40}")
    try:
        wait_until(lambda: training(tmp_path), 120, "training")
        servers = servers_of(job.pid)
        children = [p for p in psutil.Process(job.pid).children() if p not in servers]
        workers = [p for p in children if "script.py" in " ".join(p.cmdline())]
        assert len(workers) == 1
        workers[0].kill()
        assert job.wait(60) == 0
    finally:
        job.kill()
        job.wait()
    output = (tmp_path / "output").read_text()
    assert "Worker 1 ended with exit code -9; the others continue without it." in output
    assert Recorder.read(tmp_path, 0)[-1]["what"] == "train end"
    assert sum(r["what"] == "epoch end" for r in Recorder.read(tmp_path, 0)) == 40


@pytest.mark.slow  # torchrun on two nodes is among the usual tests
def test_torchrun_starts_the_workers_of_one_node(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    check_finished(tmp_path, [start(tmp_path, command=torchrun)])


def test_torch_without_rpc_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed.rpc, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"torch .* was built without torch.distributed.rpc. Expected a build"):
        trainer(tmp_path, ASGDStrategy(transport="rpc"), devices=1).fit(Regression(), loader())


def test_a_server_that_cannot_start_shows_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_asgd.core.job import supervisor

    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')")
    registry.release()
    supervisor.close_current()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", forked_servers.Interpreter)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)Server 0 .* exit code 1.*this torch is broken"):
        trainer(tmp_path, ASGDStrategy(), devices=1).fit(Regression(), loader())
    assert time.monotonic() - began < 40  # and not until a time-out, which is 120 s
    supervisor.close_current()


def test_modules_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    class Uneven(Regression):
        def configure_model(self) -> None:
            if self.global_rank == 1:
                self.net[3] = torch.nn.Linear(16, 2)

    run = trainer(tmp_path, ASGDStrategy(start_method="fork"))
    with pytest.raises(Exception, match=r"worker 1 has 'net.3.weight' of shape \(2, 16\).*worker 0 has .*\(1, 16\)"):
        run.fit(Uneven(), loader())


def test_a_module_without_trainable_parameters_is_refused(tmp_path: Path) -> None:
    module = Regression().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        trainer(tmp_path, ASGDStrategy(), devices=1).fit(module, loader())
