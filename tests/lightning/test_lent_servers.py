"""Servers of one run on several hosts: `lightning-asgd serve --machines`, whose other hosts and itself are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lightning_asgd.cli.command_line import main
from lightning_asgd.hosting.host_entry import LONGEST_S
from tests.helpers.holding import hold, release
from tests.helpers.servers import servers_of
from tests.lightning.test_processes import wait_until
from tests.lightning.test_runs import EPOCHS, SAMPLES, Diary, address_of_run, attach, epochs_of, serve


@pytest.mark.timeout(600)  # processes that import torch, one after the other
@pytest.mark.parametrize("transport", [pytest.param("rpc", marks=pytest.mark.slow), "zmq"])
@pytest.mark.parametrize("lost", ["lender", pytest.param("present host", marks=pytest.mark.slow)])
def test_hosts_share_the_servers_and_one_is_killed(tmp_path: Path, mains: Any, transport: str, lost: str) -> None:
    started: list[Any] = []

    def start(target: Any, *args: Any, **about: Any) -> Any:
        started.append(mains(target=target, args=args, kwargs=about))
        started[-1].start()
        return started[-1]

    def host(name: str, *options: str) -> tuple[Any, str]:
        (tmp_path / name).mkdir()
        # The longest lease: a busy machine may keep a host from being heard for a while.
        process = start(serve, tmp_path / name, transport, f"--lease-s={LONGEST_S}", *options)
        return process, address_of_run(tmp_path / name).partition("/")[0].rpartition(",")[2]

    def said(name: str) -> str:
        return (tmp_path / name / "serve.log").read_text()

    def has_servers(process: Any, number: int) -> bool:
        return len(servers_of(process.pid)) in (number, number + 1)  # one more is kept ready after a while

    try:
        first, one = host("first", "--num-servers=3", "--machines=2")
        second, two = host("second", f"--join={one}")
        hold(tmp_path, "a", "b", epoch=2)  # most of the training is left when the host is killed
        workers = [start(attach, tmp_path, name, f"{one},{two}/counts", transport, 0.03) for name in "ab"]
        wait_until(lambda: min(epochs_of(tmp_path, name) for name in "ab") >= 1, 60, "training")
        assert f"This host starts servers 1, 2 for {one}." in said("second")
        assert has_servers(first, 1)
        assert has_servers(second, 5)  # and three with which it stands by
        before = epochs_of(tmp_path, "a")
        (second if lost == "lender" else first).kill()
        release(tmp_path, "a", "b")
        wait_until(lambda: epochs_of(tmp_path, "a") >= before + 2, 60, "training without that host")
        if lost == "lender":
            assert f"Host {two}, which lends servers 1, 2, is lost. Others are started here." in said("first")
            assert has_servers(first, 3)
        else:
            assert "This host takes over" in said("second")
            assert has_servers(second, 3)
        for worker, name in zip(workers, "ab", strict=True):
            worker.join(100)
            assert worker.exitcode == 0, (tmp_path / f"{name}.log").read_text()
        left = first if lost == "lender" else second
        os.kill(left.pid, signal.SIGTERM)
        left.join(100)
        assert left.exitcode == 0
    finally:
        for process in started:
            process.kill()
            process.join()
    for name in "ab":
        end = Diary.read(tmp_path / f"{name}.json")[-1]
        assert end["what"] == "end"
        assert end["seen"] == [float(EPOCHS)] * SAMPLES


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--machines=2"], "--machines 2 was given with --num-servers 1. Expected at least one server per machine."),
        (
            ["--machines=2", "--join=h:1"],
            "--machines 2 was given with --join 'h:1'. Expected --machines at the first host",
        ),
        (
            ["--machines=2", "--num-servers=2", "--snapshots=x"],
            "--machines 2 was given with --snapshots 'x'. Expected no",
        ),
        (["--machines=0"], "--machines 0. Expected a whole number of at least 1"),
    ],
)
def test_what_machines_cannot_share_is_refused_by_name(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "127.0.0.1:0/r", *options]) != 0
    assert text in capsys.readouterr().err
