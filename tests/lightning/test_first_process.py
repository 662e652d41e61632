"""Stopping a container sends SIGTERM to its first process only. Here that process is `lightning-asgd serve`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_asgd.core.algorithms.config import SECRET_ENV
from tests.helpers.holding import await_file
from tests.lightning.test_runs import SECRET, address_of_run, attach

NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_the_first_process_of_a_container_ends_with_a_snapshot(
    tmp_path: Path, mains: Any, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a process namespace")
    monkeypatch.setenv(SECRET_ENV, SECRET)
    about = f"--transport={transport}", f"--snapshots={tmp_path}", "--snapshot-every-s=1000"
    program = "from lightning_asgd.cli.command_line import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "serve", "127.0.0.1:0/counts", *about]
    with (tmp_path / "serve.log").open("w") as log:
        outer = subprocess.Popen([*NAMESPACE, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    worker = None
    try:
        address = address_of_run(tmp_path)
        worker = mains(target=attach, args=(tmp_path, "a", address, transport, 0.005))
        worker.start()
        await_file(tmp_path / "a" / "last.ckpt", 60)
        (first,) = psutil.Process(outer.pid).children()
        os.kill(first.pid, signal.SIGTERM)
        assert outer.wait(30) == 0, (tmp_path / "serve.log").read_text()
        assert (tmp_path / "server0.pt").stat().st_size > 0
    finally:
        outer.kill()
        outer.wait()
        if worker is not None:
            worker.kill()
            worker.join()
