"""A signal ends a worker that waits for its servers: no batch of it would end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lightning import test_plain_loop, test_runs
from tests.lightning.test_processes import wait_until
from tests.lightning.test_runs import address_of_run, serve

WITHIN_S = 10


@pytest.mark.parametrize(
    ("attach", "number", "code", "transport"),
    [
        (test_runs.attach, signal.SIGTERM, 0, "rpc"),
        (test_runs.attach, signal.SIGTERM, 0, "zmq"),
        (test_plain_loop.attach, signal.SIGINT, 1, "zmq"),
        pytest.param(test_plain_loop.attach, signal.SIGTERM, 128 + signal.SIGTERM, "rpc", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_worker_whose_servers_are_gone(
    tmp_path: Path, mains: Any, attach: Any, number: signal.Signals, code: int, transport: str
) -> None:
    served = mains(target=serve, args=(tmp_path, transport))
    served.start()
    worker = None
    try:
        address = address_of_run(tmp_path)
        worker = mains(target=attach, args=(tmp_path, "a", address, transport, 0.01))
        worker.start()
        file = tmp_path / ("a.json" if attach is test_runs.attach else "a.begun")
        wait_until(file.exists, 60, "training")
        os.kill(served.pid, signal.SIGTERM)
        served.join(30)
        assert served.exitcode == 0, (tmp_path / "serve.log").read_text()
        wait_until(lambda: psutil.Process(worker.pid).cpu_percent(0.5) < 20, 30, "the wait for servers")
        os.kill(worker.pid, number)
        worker.join(WITHIN_S)
        assert worker.exitcode == code, (tmp_path / "a.log").read_text()
    finally:
        for process in filter(None, (served, worker)):
            process.kill()
            process.join()
