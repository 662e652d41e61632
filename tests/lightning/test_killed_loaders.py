"""A DataLoader's process that is killed leaves no file behind: the sockets through which it passes tensors on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import ASGDStrategy
from lightning_asgd.core.job import rank_variables
from lightning_asgd.core.worker.session_client import HeartbeatThread
from tests.helpers.programs import environment
from tests.lightning.models import Regression
from tests.lightning.test_processes import wait_until

KILLED = "LOADERS"


def fail_twice() -> None:
    """Raise, and have a loader's end raise another error while the first one is reported, as torch's handler does."""

    def cry(*_: object) -> None:
        raise RuntimeError("a loader has ended, too")

    def stop(thread: HeartbeatThread) -> None:
        os.kill(os.getpid(), signal.SIGCHLD)
        stopping(thread)

    signal.signal(signal.SIGCHLD, cry)
    stopping, HeartbeatThread.stop = HeartbeatThread.stop, stop  # type: ignore[method-assign]
    raise ValueError("the first error")


class Killing(Regression):
    """Kills the loaders of worker 1, or the main process; or fails while loaders end."""

    def on_train_batch_end(self, *args: object) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 2:
            if sys.argv[1] == "twice":
                fail_twice()
            if sys.argv[1] == "main":
                os.kill(os.getppid(), signal.SIGKILL)
                return
            for each in psutil.Process().children():
                each.kill()
            sys.stdout.write(KILLED)


def job(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Train with two workers that have two loaders each; a parent's folder is known to multiprocessing."""
    command = [sys.executable, "-m", __name__, *arguments]
    env = environment(TMPDIR=str(folder))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert (folder / "parents").is_dir()
    return done


def left(folder: Path) -> list[str]:
    """Folders and sockets beside the parent's folder.

    torch leaves files: its pytorch-errorfile, and an empty one if its handler of SIGCHLD raises while it makes that.
    """
    found = [path for path in folder.rglob("*") if "parents" not in path.parts]
    return [path.name for path in found if path.is_dir() or path.is_socket()]


@pytest.mark.parametrize("start", ["popen", "fork"])
def test_a_killed_loader_leaves_no_socket_behind(tmp_path: Path, start: str) -> None:
    done = job(tmp_path, "loaders", start)
    assert done.returncode == 0, done.stderr  # worker 0 has trained on
    assert KILLED in done.stdout
    # torch raises what it finds first: that a loader was killed, or that its socket does not answer.
    assert re.search(r"Worker 1 is lost: it raised (RuntimeError: DataLoader worker|Connection|EOFError)", done.stderr)
    assert "FileNotFoundError" not in done.stderr
    assert left(tmp_path) == []


def test_a_failure_is_reported_whole_while_loaders_end(tmp_path: Path) -> None:
    done = job(tmp_path, "twice", "fork")
    assert done.returncode == 0, done.stderr
    assert "it raised ValueError: the first error" in done.stderr


def test_a_killed_main_process_leaves_no_socket_behind(tmp_path: Path) -> None:
    assert job(tmp_path, "main", "popen").returncode == -signal.SIGKILL
    wait_until(lambda: left(tmp_path) == [], 15, "the end of the folder")


def main() -> None:
    parents = Path(tempfile.gettempdir(), "parents")
    parents.mkdir(exist_ok=True)
    if rank_variables.main_process() is None:
        rank_variables.use_folder(str(parents))
    strategy = ASGDStrategy(nsync=2, start_method=sys.argv[2])
    data = TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    about: dict[str, Any] = {"default_root_dir": str(parents), "max_epochs": 4, **off}  # a last checkpoint goes there
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, **about)
    trainer.fit(Killing(), DataLoader(data, 8, num_workers=2))


if __name__ == "__main__":
    main()
