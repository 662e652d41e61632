"""Host memory that A-SGD uses: a worker's beyond training on a single device, a server's beyond importing torch.

Every process is new. While the workers train, its memory is read many times a second, and the peak counts:

* RSS counts every page that a process has mapped: one that three processes share is counted in each of them.
* PSS divides a shared page by the number of its users, so that the PSS of all processes adds up to the memory that the
machine provides. Pages of program files are left out, because their share depends on which other processes have
imported torch. * "own" is the memory of this process alone: RSS minus program files and shared memory.

Worker and server of one machine share the memory through which they exchange, so RSS charges both for it. The limits
are about RSS, on one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from common import CONSOLE
from network import Network, available, two_machines
from ranks import clean_environment, servers_of
from rich.table import Table
from throughput import build_loader, build_module, trainer_options

KINDS = ("rss", "pss", "own")
WORKER_LIMIT, SERVER_LIMIT = 4.0, 3.0
EVERY_S = 0.02  # reading RSS costs nothing
PSS_EVERY_S = 0.3  # reading PSS costs a walk over all pages
RUN_S = 300.0
_SERVER = "lightning_asgd.core.server.process"


@dataclass(frozen=True)
class Case:
    """One run. Without servers and with one worker it is the base line."""

    name: str
    strategy: str  # "auto", "ddp" or "asgd"
    workers: int = 2
    servers: int = 0
    apart: bool = False  # workers in network namespaces of their own: nothing is shared, weights are sent by value
    accelerator: str = "cpu"  # as for a Trainer; one device for each worker


@dataclass
class Peaks:
    """Largest figures seen of one process, in bytes."""

    training: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    ever: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def add(self, pid: int, *, training: bool, pss: bool) -> None:
        """Read a process's present figures; one that is gone is left out."""
        try:
            status = kilobytes(Path(f"/proc/{pid}/status"))
            now = {"rss": status["VmRSS"], "own": status["RssAnon"]}
            if pss:
                shares = kilobytes(Path(f"/proc/{pid}/smaps_rollup"))
                now["pss"] = shares["Pss_Anon"] + shares["Pss_Shmem"]
        except (OSError, KeyError):
            return
        for peaks in (self.ever, *([self.training] if training else [])):
            for kind, value in now.items():
                peaks[kind] = max(peaks[kind], 1024 * value)


def kilobytes(file: Path) -> dict[str, int]:
    """The sizes in one of the kernel's tables of a process, such as ``/proc/self/status``."""
    fields = (line.split() for line in file.read_text().splitlines())
    return {f[0].rstrip(":"): int(f[1]) for f in fields if len(f) == 3 and f[2] == "kB"}


# ---------------------------------------------------------------------- in a worker's process


def train(args: argparse.Namespace) -> None:
    """Train a few steps, and say on standard output when training begins and ends."""
    import pytorch_lightning as pl
    import torch

    torch.set_num_threads(1)

    class Phases(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:  # optimizer state and buffers are there
                print("begin", flush=True)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            print("end", flush=True)

    strategy: Any = args.strategy
    if strategy == "asgd":
        from lightning_asgd import ASGDStrategy

        strategy = ASGDStrategy(nsync=1, num_servers=args.servers)
    trainer = pl.Trainer(
        **{**trainer_options(), "accelerator": args.accelerator},
        strategy=strategy,
        devices=1 if args.nodes > 1 else args.workers,
        num_nodes=args.nodes,
        limit_train_batches=args.steps,
        callbacks=[Phases()],
    )
    trainer.fit(build_module(args.params), build_loader(8 * args.steps * args.workers, 8))


# ---------------------------------------------------------------------- watching


def run(case: Case, params: int, steps: int) -> dict[str, Peaks]:
    """Start a case's workers, watch all its processes until they are done.

    Returns:
        peaks by process: ``worker 0``, ``worker 1``, ``server 0``, ...
    """
    with two_machines() if case.apart else contextlib.nullcontext() as network:
        workers = [_start(case, rank, params, steps, network) for rank in range(case.workers)]
        try:
            return _watch(workers, time.monotonic() + RUN_S)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def _start(case: Case, rank: int, params: int, steps: int, network: Network | None) -> subprocess.Popen[str]:
    options = {
        "strategy": case.strategy,
        "servers": case.servers,
        "workers": case.workers,
        "nodes": 2 if case.apart else 1,
        "accelerator": case.accelerator,
        "params": params,
        "steps": steps,
    }
    command = [sys.executable, __file__, "--train", *(f"--{key}={value}" for key, value in options.items())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if case.workers > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port(case)), "LOCAL_RANK": str(rank)}
    if network is not None:
        environment |= {"MASTER_ADDR": network.addresses[0], "NODE_RANK": str(rank), "LOCAL_RANK": "0"}
        command = [*network.prefix(rank), *command]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


_ports: dict[Case, int] = {}


def _port(case: Case) -> int:
    if case not in _ports:
        with socket.socket() as probe:
            probe.bind(("", 0))
            _ports[case] = int(probe.getsockname()[1])
    return _ports[case]


def _watch(workers: list[subprocess.Popen[str]], deadline: float) -> dict[str, Peaks]:
    lines = [_Lines(worker) for worker in workers]
    peaks: dict[str, Peaks] = {}
    pss_at = 0.0
    while any(worker.poll() is None for worker in workers):
        if time.monotonic() > deadline:
            raise RuntimeError(f"Not done within {RUN_S:g} s. Last output:\n{lines[0].tail()}")
        training = all("begin" in text.seen for text in lines) and not any("end" in text.seen for text in lines)
        pss = time.monotonic() >= pss_at
        for name, pid in _processes(workers):
            peaks.setdefault(name, Peaks()).add(pid, training=training, pss=pss)
        if pss:
            pss_at = time.monotonic() + PSS_EVERY_S
        time.sleep(EVERY_S)
    for worker, text in zip(workers, lines, strict=True):
        if worker.returncode != 0:
            raise RuntimeError(f"A worker ended with exit code {worker.returncode}. Its last output:\n{text.tail()}")
    return peaks


class _Lines(threading.Thread):
    """Reads a worker's output."""

    def __init__(self, worker: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self.worker = worker
        self.seen: list[str] = []
        self.start()

    def run(self) -> None:
        for line in self.worker.stdout or ():
            self.seen.append(line.strip())

    def tail(self) -> str:
        return "\n".join(self.seen[-30:])


def _processes(workers: list[subprocess.Popen[str]]) -> Iterator[tuple[str, int]]:
    for rank, worker in enumerate(workers):
        yield f"worker {rank}", worker.pid
        with contextlib.suppress(psutil.Error):
            yield from ((f"server {i}", p.pid) for i, p in enumerate(servers_of(psutil.Process(worker.pid))))


def imported() -> Peaks:
    """Memory of a process that has imported what a server imports, and does nothing."""
    script = f"import {_SERVER}; print('ready', flush=True); input()"
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as idle:
        assert idle.stdout is not None
        if idle.stdout.readline().strip() != "ready":
            raise RuntimeError("A server's modules cannot be imported; see the output above.")
        peaks = Peaks()
        peaks.add(idle.pid, training=True, pss=True)
        idle.kill()
    return peaks


# ---------------------------------------------------------------------- the report


def brief(args: argparse.Namespace) -> None:
    """Measure one case, without judging it."""
    import torch

    import lightning_asgd

    workers = min(2, torch.accelerator.device_count()) if args.accelerator != "cpu" else 2
    case = Case("A-SGD, 1 server", "asgd", workers, servers=1, accelerator=args.accelerator)
    peaks = run(case, args.params, args.steps)
    # The hot standby starts when the machine has time.
    named = (*(f"worker {rank}" for rank in range(workers)), "server 0")
    rss = {name: peaks[name].training["rss"] for name in named}
    CONSOLE.print(", ".join(f"{name}: {value / 1e6:.0f} MB" for name, value in rss.items()))
    if args.json:
        machine = {"library": str(Path(lightning_asgd.__file__).parent)}
        args.json.write_text(json.dumps({"machine": machine, "rss": rss}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--params", type=float, default=17e6, help="parameters of the model (default %(default)g)")
    parser.add_argument("--steps", type=int, default=30, help="training steps per run (default %(default)s)")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    for name, default in (("--strategy", "auto"), ("--servers", 1), ("--workers", 1), ("--nodes", 1)):
        parser.add_argument(name, type=type(default), default=default, help=argparse.SUPPRESS)
    parser.add_argument("--brief", action="store_true", help="only A-SGD with one server, without base lines")
    parser.add_argument("--accelerator", default="cpu", help="with --brief: of the Trainer, with at most two devices")
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --brief: the peaks in bytes")
    args = parser.parse_args()
    args.params = int(args.params)
    if args.train:
        train(args)
        return 0

    clean_environment()
    package = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package]))
    if args.brief:
        brief(args)
        return 0
    unit = 4 * args.params
    cases = [
        Case("DDP", "ddp"),
        Case("A-SGD, 1 server", "asgd", servers=1),
        Case("A-SGD, 2 servers", "asgd", servers=2),
    ]
    if (reason := available()) is None:
        cases.append(Case("A-SGD, 1 server, 2 machines", "asgd", servers=1, apart=True))
    else:
        CONSOLE.print(f"left out: two machines. {reason}")
    CONSOLE.print(f"{args.params / 1e6:g} M parameters of 4 bytes: 1 x is {unit / 1e6:.0f} MB; exchange at every step")
    CONSOLE.print("base lines ...")
    alone = run(Case("single device", "auto", workers=1), args.params, args.steps)["worker 0"]
    idle = imported()
    table = Table(title="Peaks beyond the base line, in units of the parameters (worker) or of the shard (server)")
    for heading in ("", "", "1 x in MB", "RSS", "PSS", "own", "RSS, start-up too", "limit (RSS)", ""):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("single device", "worker", "", *_megabytes(alone), "", "base line")
    table.add_row("torch imported", "server", "", *_megabytes(idle), "", "base line")
    passed = True
    for case in cases:
        CONSOLE.print(f"{case.name} ...")
        for name, peaks in sorted(
            run(case, args.params, args.steps).items(), key=lambda item: (item[0][0] == "s", item[0])
        ):
            serves = name.startswith("server")
            base, limit = (idle, SERVER_LIMIT) if serves else (alone, WORKER_LIMIT)
            one = unit / case.servers if serves else unit
            beyond = {kind: (peaks.training[kind] - base.training[kind]) / one for kind in KINDS}
            ever = (peaks.ever["rss"] - base.ever["rss"]) / one
            judged = case.strategy == "asgd" and not case.apart
            good = not judged or beyond["rss"] <= limit
            passed &= good
            verdict = ("[green]PASS[/]" if good else "[red]FAIL[/]") if judged else "for comparison"
            shown = [f"{beyond[kind]:.2f} x" for kind in KINDS]
            table.add_row(
                case.name, name, f"{one / 1e6:.0f}", *shown, f"{ever:.2f} x", f"{limit:g} x" if judged else "", verdict
            )
    CONSOLE.print(table)
    CONSOLE.print("RSS counts shared pages in every process that maps them; PSS divides them; own leaves them out.")
    return 0 if passed else 1


def _megabytes(peaks: Peaks) -> list[str]:
    return [*(f"{peaks.training[kind] / 1e6:.0f} MB" for kind in KINDS), f"{peaks.ever['rss'] / 1e6:.0f} MB"]


if __name__ == "__main__":
    sys.exit(main())
