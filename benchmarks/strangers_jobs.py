"""Jobs for :mod:`strangers`: two nodes, or a run that `lightning-asgd serve` serves and two workers, in processes.

Each process is forked from one that has imported Lightning, in a network namespace of its own or on this machine.
Training a sample adds 1 to that sample's parameter, and pushes are added whole.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from counts import Counts, Report, fit, numbers
from jobs import Processes, megabytes, quiet
from network import Network

from lightning_asgd import ASGDStrategy, Timeouts
from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.foundation.environment import joined

__all__ = ["Job", "Place"]

SILENCE_S = 4.0
REPLACED_S = 20.0  # in which a lost server is replaced
SAMPLES, BATCH, STEP_S, NSYNC = 1000, 2, 0.01, 2
USUAL_FILES = 1024  # that a process may have open, unless it raises the limit
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """Where a job runs: over which transport, in which namespaces (None: on this machine), and whether as a run."""

    transport: str
    network: Network | None
    serves: bool

    @property
    def name(self) -> str:
        """For people."""
        where = "one machine" if self.network is None else "two machines"
        return f"{'serve' if self.serves else 'job'}, {self.transport}, {where}"

    def address(self, node: int = 0) -> str:
        """Of a node."""
        return LOOPBACK if self.network is None else self.network.addresses[node]

    def first(self, node: int) -> str:
        """The address at which a node reaches the first one."""
        return self.address()

    def enter(self, node: int) -> None:
        """Move this forked process to a node."""
        if self.network is not None:
            self.network.enter(node)


class Notes(Report):
    """Writes down when a worker is in, and where its servers are."""

    def __init__(self, file: Path, began: float) -> None:
        super().__init__(file, together=True)
        self.began = began
        self.told = {"batches": 0}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.told["batches"] += 1
        if self.told["batches"] == 1:
            self.told["in_s"] = time.monotonic() - self.began
        if self.told["batches"] % 10 == 1:
            connection = trainer.strategy.fit_session.synchronizer.client.connection
            self.tell(session=connection.session, servers=list(connection.transport.addresses))


class Fails(Counts):
    """Raises on node 1 at step 20 of that worker."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 20:
            raise KeyError("no such sample")


def _few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def serve(place: Place, log: Path, port: int, servers: int) -> None:
    """Be `lightning-asgd serve` on node 0."""
    from lightning_asgd.cli.command_line import main

    place.enter(0)
    _few_files()
    quiet(log)
    run = f"{joined(place.first(0), port)}/strangers"
    sys.exit(main(["serve", run, f"--transport={place.transport}", f"--num-servers={servers}"]))


def _work(place: Place, node: int, name: str, folder: Path, port: int, about: dict[str, Any]) -> None:
    began = time.monotonic()
    place.enter(node)
    _few_files()
    quiet(folder / f"{name}.log")
    torch.set_num_threads(1)
    where: dict[str, Any] = {"run": f"{joined(place.first(node), port)}/{about.get('run', 'strangers')}"}
    if not place.serves:
        os.environ.update(NODE_RANK=str(node), MASTER_ADDR=place.first(node), MASTER_PORT=str(port))
        where = {
            "on_worker_failure": about.get("on_worker_failure", "continue"),
            "num_servers": about.get("servers", 1),
        }
    timeouts = Timeouts(silence_s=SILENCE_S, start_s=20.0)
    strategy = ASGDStrategy(NSYNC, algorithm=ASGD("sum"), transport=place.transport, timeouts=timeouts, **where)
    module = (Fails if about.get("fails") else Counts)(SAMPLES, STEP_S)
    notes = Notes(folder / f"{name}.json", began)
    nodes = 1 if place.serves else 2
    try:
        fit(module, numbers(SAMPLES, BATCH), strategy=strategy, callbacks=[notes], num_nodes=nodes)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(1)
    print(f"lost: {strategy.stats.lost_workers}, replaced: {strategy.stats.servers_replaced}", flush=True)


@dataclass
class Load:
    """What servers use."""

    cpu: float  # seconds per second, of all together
    mb: float


class Job(Processes):
    """Two workers and their servers, and the processes that come besides; ``members`` names the worker of a node."""

    def __init__(self, place: Place, folder: Path, port: int, about: dict[str, Any] | None = None) -> None:
        super().__init__(folder)
        self.place, self.port, self.about = place, port, about or {}
        self.members: dict[int, str] = {}
        try:
            if place.serves:
                self.fork("serve", serve, place, folder / "serve.log", port, self.about.get("servers", 1))
                self.wait(lambda: 'run="' in self.said("serve"), 60, "the servers' start")
            for node in (0, 1):
                self.members[node] = self.start(node)
            self.wait(lambda: all(self.is_in(name) for name in self.members.values()), 60, "training")
        except BaseException:
            self.close()
            raise

    def start(self, node: int, **about: Any) -> str:
        """Start a worker on a node; returns its name."""
        name = f"node{node}-{len(self.processes)}"
        self.fork(name, _work, self.place, node, name, self.folder, self.port, {**self.about, **about})
        return name

    def is_in(self, name: str) -> bool:
        """Whether a worker has trained a batch."""
        return "in_s" in self.told(name)

    def failed(self) -> list[str]:
        """Members that have ended."""
        return [name for name in ("serve", *self.members.values()) if name in self.processes and not self.lives(name)]

    def lives(self, name: str) -> bool:
        """Whether a process has not ended."""
        return self.processes[name].exitcode is None

    def exit_code(self, name: str, seconds: float) -> int | None:
        """Of a process, once it has ended."""
        self.processes[name].join(seconds)
        code: int | None = self.processes[name].exitcode
        return code

    def signal(self, name: str, number: int) -> None:
        """Send a process a signal."""
        os.kill(self.processes[name].pid, number)

    def train(self) -> None:
        """Wait until both workers have trained another 20 batches."""
        before = {name: self.told(name)["batches"] for name in self.members.values()}
        trained = lambda: all(self.told(n)["batches"] >= b + 20 for n, b in before.items())  # noqa: E731
        self.wait(trained, 90, "training goes on")

    @property
    def server(self) -> psutil.Process:
        """The server, and not the one that is kept ready to replace it."""
        return self.servers("serve" if self.place.serves else self.members[0], 1)[0]

    def load(self) -> Load:
        """What the servers use, measured over a second; again if a server ends meanwhile, which another replaces."""
        deadline = time.monotonic() + REPLACED_S
        while time.monotonic() < deadline:
            with contextlib.suppress(psutil.Error):
                server = self.server
                before = sum(server.cpu_times()[:2])
                time.sleep(1.0)
                return Load(sum(server.cpu_times()[:2]) - before, megabytes(server))
        raise RuntimeError(f"No server lived for a second within {REPLACED_S:g} s.")

    def finish(self) -> tuple[dict[int, int | None], list[dict[str, Any]]]:
        """End training; exit codes by node, and what the workers told."""
        (self.folder / "stop").touch()
        codes = {node: self.exit_code(name, 60) for node, name in self.members.items()}
        return codes, [self.told(name) for name in self.members.values()]
