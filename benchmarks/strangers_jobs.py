"""Jobs for :mod:`strangers`: two nodes, or a run that `lightning-asgd serve` serves and two workers, in processes.

Each process is forked from one that has imported Lightning, in a network namespace of its own or on this machine.
Training a sample adds 1 to that sample's parameter, and pushes are added whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytorch_lightning as pl
import torch
from counts import Counts, Diary
from network import Network
from ranks import end_all, servers_of
from strangers_server import memory_mb
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import ASGDStrategy, Timeouts
from lightning_asgd.algorithms import ASGD
from lightning_asgd.cli.command_line import main as command
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


class Report(Diary):
    """Writes down when a worker is in, what it has trained, and what came out; ends training when told to."""

    def __init__(self, file: Path, began: float) -> None:
        super().__init__(file, batches=0)
        self.began = began

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.told["batches"] += 1
        if self.told["batches"] == 1:
            self.told["in_s"] = time.monotonic() - self.began
        if self.told["batches"] % 10 == 1:
            connection = trainer.strategy.fit_session.synchronizer.client.connection
            self.tell(session=connection.session, servers=list(connection.transport.addresses))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop |= trainer.strategy.broadcast((self.file.parent / "stop").exists())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        seen = sorted(Counter(pl_module.seen.tolist()).items())
        self.tell(ended=True, epochs=trainer.current_epoch, seen=seen)


class Fails(Counts):
    """Raises on node 1 at step 20 of that worker."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 20:
            raise KeyError("no such sample")


def _quiet(file: Path) -> None:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with file.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def _serve(place: Place, folder: Path, port: int, servers: int) -> None:
    place.enter(0)
    _quiet(folder / "serve.log")
    about = [f"{joined(place.first(0), port)}/strangers", f"--transport={place.transport}"]
    sys.exit(command(["serve", *about, f"--num-servers={servers}"]))


def _work(place: Place, node: int, name: str, folder: Path, port: int, about: dict[str, Any]) -> None:
    began = time.monotonic()
    place.enter(node)
    _quiet(folder / f"{name}.log")
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
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=1 if place.serves else 2,
        strategy=strategy,
        max_epochs=1_000_000,
        callbacks=[Report(folder / f"{name}.json", began)],
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        **quiet,
    )
    module = (Fails if about.get("fails") else Counts)(SAMPLES, STEP_S)
    try:
        trainer.fit(module, DataLoader(TensorDataset(torch.arange(SAMPLES)), BATCH, shuffle=True))
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


@dataclass
class Job:
    """Two workers and their servers, and the processes that come besides."""

    place: Place
    folder: Path
    port: int
    about: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, Any] = field(default_factory=dict)
    members: dict[int, str] = field(default_factory=dict)  # by node, the name of its worker

    def __post_init__(self) -> None:
        self._fork = multiprocessing.get_context("fork").Process
        try:
            if self.place.serves:
                self.fork("serve", _serve, self.place, self.folder, self.port, self.about.get("servers", 1))
                self.wait(lambda: 'run="' in self.said("serve"), 60, "the servers' start")
            for node in (0, 1):
                self.members[node] = self.start(node)
            self.wait(lambda: all(self.is_in(name) for name in self.members.values()), 60, "training")
        except BaseException:
            self.close()
            raise

    def fork(self, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start a process."""
        self.processes[name] = self._fork(target=target, args=args)
        self.processes[name].start()

    def start(self, node: int, *, port: int | None = None, **about: Any) -> str:
        """Start a worker on a node; returns its name."""
        name = f"node{node}-{len(self.processes)}"
        self.fork(name, _work, self.place, node, name, self.folder, port or self.port, {**self.about, **about})
        return name

    def told(self, name: str) -> dict[str, Any]:
        """What a worker has told."""
        file = self.folder / f"{name}.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def is_in(self, name: str) -> bool:
        """Whether a worker has trained a batch."""
        return "in_s" in self.told(name)

    def said(self, name: str) -> str:
        """What a process has printed."""
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> None:
        """Wait for something while the members live. Raises a ``RuntimeError`` if it does not happen in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            dead = [n for n in ("serve", *self.members.values()) if n in self.processes and not self.lives(n)]
            if dead or time.monotonic() > deadline:
                why = f"{dead} ended" if dead else f"not within {seconds:g} s"
                last = "\n".join(f"{file.name}: {file.read_text()[-2500:]}" for file in self.folder.glob("*.log"))
                raise RuntimeError(f"No {what}: {why}.\n{last}")
            time.sleep(0.05)

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
    def servers(self) -> list[psutil.Process]:
        """The server, without the one that is kept ready to replace it."""
        host = self.processes["serve" if self.place.serves else self.members[0]]
        return servers_of(psutil.Process(host.pid))[:1]

    def load(self) -> Load:
        """What the servers use, measured over a second; again if a server ends meanwhile, which another replaces."""
        deadline = time.monotonic() + REPLACED_S
        while time.monotonic() < deadline:
            with contextlib.suppress(psutil.Error):
                begun = [(server, sum(server.cpu_times()[:2])) for server in self.servers]
                time.sleep(1.0)
                used = sum(sum(server.cpu_times()[:2]) - before for server, before in begun)
                if begun:
                    return Load(used, sum(memory_mb(server) for server, _ in begun))
        raise RuntimeError(f"No server lived for a second within {REPLACED_S:g} s.")

    def end(self) -> tuple[dict[int, int | None], list[dict[str, Any]]]:
        """End training; exit codes by node, and what the workers told."""
        (self.folder / "stop").touch()
        codes = {node: self.exit_code(name, 60) for node, name in self.members.items()}
        return codes, [self.told(name) for name in self.members.values()]

    def close(self) -> None:
        """End all processes."""
        end_all(self.processes.values())
