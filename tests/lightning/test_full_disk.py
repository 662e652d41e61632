"""`lightning-asgd serve --snapshots` on a disk that becomes full while a worker trains."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_asgd.cli.command_line import main
from lightning_asgd.core.algorithms.config import SECRET_ENV
from tests.helpers.holding import await_file
from tests.helpers.ports import free_port
from tests.lightning.test_processes import wait_until
from tests.lightning.test_runs import EPOCHS, SAMPLES, SECRET, Diary, address_of_run, attach, epochs_of, serve

NEWER = "No snapshot was written to "


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Use all the room that is left."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


@pytest.mark.parametrize(("on_failure", "every_s"), [("continue", 0.2), ("stop", 0.2), ("continue", 1000.0)])
def test_a_full_disk_is_told_of_and_what_is_known_is_not_lost(
    tmp_path: Path,
    disk: Path,
    mains: Any,
    on_failure: str,
    every_s: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.setenv(SECRET_ENV, SECRET)
    log, port, started = tmp_path / "serve.log", str(free_port()), list[Any]()

    def start(target: Any, *args: Any, **about: Any) -> Any:
        started.append(mains(target=target, args=args, kwargs=about))
        started[-1].start()
        return started[-1]

    def begin(*more: str) -> tuple[Any, str]:
        log.unlink(missing_ok=True)
        about = f"--snapshots={disk}", f"--snapshot-every-s={every_s}", *more
        served = start(serve, tmp_path, "zmq", *about, port=port)
        return served, address_of_run(tmp_path)

    try:
        served, address = begin(f"--on-snapshot-failure={on_failure}")
        worker = start(attach, tmp_path, "a", address, "zmq", 0.005, silence_s=10.0)
        if every_s > 1:  # only the last one fails
            wait_until(lambda: epochs_of(tmp_path, "a") > 0, 60, "training")
        else:
            await_file(disk / "server0.pt", 60)
        ballast = fill(disk)
        if every_s < 1:
            wait_until(lambda: NEWER in log.read_text(), 30, "a warning")
        if on_failure == "continue":
            assert main(["status", address]) == 0
            assert ("The latest snapshot is" if every_s < 1 else "No snapshot for") in capsys.readouterr().out
            os.kill(served.pid, signal.SIGTERM)
        served.join(30)
        said = log.read_text()
        assert served.exitcode == 1, said
        assert "Worker 1 (" in said  # has joined
        latest = "The latest snapshot is" if every_s < 1 else "No snapshot for"
        assert f"No space left on device (0 MB are free). {latest}" in said
        assert "SnapshotError: Server 0 was stopped and could not write its last snapshot to " in said
        assert f"The server's last output: {NEWER}" in said
        if on_failure == "stop" or every_s > 1:
            return
        ballast.unlink()
        served, address = begin()
        worker.join(100)
        assert worker.exitcode == 0, (tmp_path / "a.log").read_text()
        os.kill(served.pid, signal.SIGTERM)
        served.join(30)
        assert served.exitcode == 0, log.read_text()
    finally:
        for process in started:
            process.kill()
            process.join()
    end = Diary.read(tmp_path / "a.json")[-1]
    assert (end["what"], end["seen"]) == ("end", [float(EPOCHS)] * SAMPLES)
    assert {path.name for path in disk.iterdir()} == {"server0.pt", "serve.lock"}
