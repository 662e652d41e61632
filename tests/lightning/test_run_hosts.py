"""Several `lightning-asgd serve` host a run in turn: killed, started again with `--join`, and stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lightning_asgd.cli.command_line import main
from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.hosting.host_entry import LONGEST_S
from tests.helpers.holding import hold, release
from tests.helpers.ports import free_port
from tests.lightning.test_processes import wait_until
from tests.lightning.test_runs import EPOCHS, SAMPLES, SECRET, Diary, address_of_run, attach, epochs_of, serve

TAKES_OVER = "This host takes over"


@pytest.mark.timeout(600)  # eight processes that import torch, most of them one after the other
@pytest.mark.parametrize("transport", [pytest.param("rpc", marks=pytest.mark.slow), "zmq"])
def test_hosts_of_a_run_are_killed_and_stopped_and_nothing_is_lost(tmp_path: Path, mains: Any, transport: str) -> None:
    started: list[Any] = []

    def start(target: Any, *args: Any, **about: Any) -> Any:
        started.append(mains(target=target, args=args, kwargs=about))
        started[-1].start()
        return started[-1]

    def host(name: str, *join: str, port: str = "0") -> tuple[Any, str]:
        """Start a host; its process, and the last address of those that it gives workers."""
        (tmp_path / name).mkdir()
        # The longest lease: a busy machine may keep a host from being heard for a while.
        process = start(serve, tmp_path / name, transport, f"--lease-s={LONGEST_S}", *join, port=port)
        return process, address_of_run(tmp_path / name).partition("/")[0].rpartition(",")[2]

    def said(name: str) -> str:
        return (tmp_path / name / "serve.log").read_text()

    try:
        first, one = host("first", "--num-servers=2", port=str(free_port()))  # it is started there again
        second, two = host("second", f"--join={one}")
        assert "stands by" in said("second")
        hold(tmp_path, "a", "b", epoch=2)
        workers = [start(attach, tmp_path, name, f"{one},{two}/counts", transport, 0.03) for name in "ab"]
        wait_until(lambda: min(epochs_of(tmp_path, name) for name in "ab") >= 1, 40, "training")
        before = epochs_of(tmp_path, "a")
        first.kill()
        hold(tmp_path, "a", "b", epoch=6)
        wait_until(lambda: epochs_of(tmp_path, "a") >= before + 2, 60, "training with another host")
        assert TAKES_OVER in said("second")
        workers.append(start(attach, tmp_path, "c", f"{one},{two}/counts", transport, 0.03))
        host("again", f"--join={two}", port=one.rpartition(":")[2])
        wait_until(lambda: Diary.read(tmp_path / "c.json") != [], 40, "training of a worker that has joined meanwhile")
        os.kill(second.pid, signal.SIGTERM)
        release(tmp_path, "a", "b")
        second.join(100)
        assert second.exitcode == 0, said("second")
        assert f"Host {one} can take over: the servers of this one are killed." in said("second")
        for worker, name in zip(workers, "abc", strict=True):
            worker.join(100)
            assert worker.exitcode == 0, (tmp_path / f"{name}.log").read_text()
        assert TAKES_OVER in said("again")
    finally:
        for process in started:
            process.kill()
            process.join()
    for name in "abc":
        end = Diary.read(tmp_path / f"{name}.json")[-1]
        assert end["what"] == "end"
        assert end["seen"] == [float(EPOCHS)] * SAMPLES


def test_a_host_that_joins_another_run_is_refused(
    tmp_path: Path, mains: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = mains(target=serve, args=(tmp_path, "rpc"))
    served.start()
    try:
        address = address_of_run(tmp_path)
        monkeypatch.setenv(SECRET_ENV, SECRET)
        monkeypatch.setattr("lightning_asgd.elastic.serve_command._signals", list)  # they are pytest's
        place = address.partition("/")[0]
        assert main(["serve", "127.0.0.1:0/other", "--transport=rpc", f"--join={place}"]) == 1
        told = capsys.readouterr().err
        assert f"{place} hosts run 'counts' with --transport 'rpc', --num-servers 1 and --lease-s 2.5." in told
        assert "Expected the same here, where run 'other'," in told
    finally:
        served.kill()
        served.join()
