"""Processes of a job or of a run, forked from one that has imported Lightning, and what they say and tell."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from network import Network
from ranks import end_all, servers_of

__all__ = ["Processes", "megabytes", "quiet", "serve", "wait_until"]


def quiet(file: Path) -> None:
    """Write what this process prints into a file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends all
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with file.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def serve(network: Network | None, machine: int, log: Path, run: str, *options: str) -> None:
    """Be `lightning-asgd serve` for ``run``, PORT/NAME at a machine's address; see :meth:`Processes.address`."""
    from lightning_asgd.cli.command_line import main

    host = "127.0.0.1"
    if network is not None:
        network.enter(machine)
        host = network.addresses[machine]
    quiet(log)
    sys.exit(main(["serve", f"{host}:{run}", *options]))


def wait_until(
    condition: Callable[[], Any],
    seconds: float,
    what: str,
    check: Callable[[], None] = lambda: None,
    last_words: Callable[[], str] = lambda: "",
    every_s: float = 0.05,
) -> float:
    """Wait for something; when it was. Raises a ``RuntimeError`` if it does not happen in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"No {what} within {seconds:g} s.\n{last_words()}")
        check()
        time.sleep(every_s)
    return time.monotonic()


class Processes:
    """The processes of a job by name. Each writes NAME.log and, if it has a diary, NAME.json into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, Any] = {}
        self._fork = multiprocessing.get_context("fork").Process

    def fork(self, name: str, target: Callable[..., None], *args: Any) -> Any:
        """Start a process."""
        process = self.processes[name] = self._fork(target=target, args=args)
        process.start()
        return process

    def serve(self, name: str, network: Network | None, machine: int, run: str, *options: str) -> None:
        """Start `lightning-asgd serve` on a machine, and wait until its run can be reached."""
        self.fork(name, serve, network, machine, self.folder / f"{name}.log", run, *options)
        self.wait(lambda: 'run="' in self.said(name), 60, "run that is served")

    def address(self, name: str = "serve") -> str:
        """What ``run=`` takes, as `lightning-asgd serve` has printed it."""
        return self.said(name).partition('run="')[2].partition('"')[0]

    def told(self, name: object) -> dict[str, Any]:
        """What a process has told."""
        file = self.folder / f"{name}.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def said(self, name: object) -> str:
        """What a process has printed."""
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def last_words(self, name: str = "*") -> str:
        """The end of what processes have printed, of those that printed last."""
        files = sorted(self.folder.glob(f"{name}.log"), key=lambda file: file.stat().st_mtime)[-10:]
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-2000:]}" for file in files)

    def failed(self) -> list[str]:
        """Processes that have ended, though they should live, or with an error."""
        return [name for name, each in self.processes.items() if each.exitcode not in (None, 0)]

    def check(self) -> None:
        """Raise a ``RuntimeError`` if a process has failed."""
        for name in self.failed():
            code = self.processes[name].exitcode
            raise RuntimeError(f"{name} ended with {code}:\n{self.last_words(name)}")

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> float:
        """Wait for something while no process fails; see :func:`wait_until`."""
        return wait_until(condition, seconds, what, self.check, self.last_words)

    def more_exchanges(self, names: list[str], seconds: float = 90) -> float:
        """Wait until each of these has completed two more exchanges: one may have been under way. The seconds."""
        begun, before = time.monotonic(), {name: self.told(name)["pushes"] for name in names}

        def done() -> bool:
            told = {name: self.told(name) for name in before}
            return all(now["pushes"] > before[name] + 1 or now.get("ended") for name, now in told.items())

        return self.wait(done, seconds, "exchanges of all workers") - begun

    def end(self, names: list[str], seconds: float) -> list[dict[str, Any]]:
        """Let workers come to the end of an epoch, and return what they have told."""
        (self.folder / "stop").touch()
        self.wait(lambda: all(self.processes[name].exitcode is not None for name in names), seconds, "end")
        self.check()
        told = [self.told(name) for name in names]
        if not all(each.get("ended") for each in told):
            raise RuntimeError(f"A worker has not told how it ended.\n{self.last_words()}")
        return told

    def servers(self, name: str, number: int) -> list[psutil.Process]:
        """The servers that a process has started, without those that are kept ready, which are younger."""
        found: list[psutil.Process] = []
        while not found:
            found = servers_of(psutil.Process(self.processes[name].pid))
        return found[:number]

    def close(self) -> None:
        """End all processes."""
        end_all(self.processes.values())


def megabytes(process: psutil.Process) -> float:
    """Memory of a process without program files, whose share depends on what else runs."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except FileNotFoundError as error:
        raise psutil.NoSuchProcess(process.pid) from error
    named = dict(line.split(":", 1) for line in lines)
    if "RssAnon" not in named:
        raise psutil.ZombieProcess(process.pid)
    return sum(int(named[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1000
