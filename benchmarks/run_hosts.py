"""The host of an elastic run, with its coordinator and its rendezvous, is lost with its process or its machine.

    python benchmarks/run_hosts.py                     # ten losses with each transport, as root under Linux
    python benchmarks/run_hosts.py --losses 3 --transport zmq
    python benchmarks/run_hosts.py --losses 2 --transport zmq --workers 256 --lease-s 1

Three machines (network namespaces) host a run with two servers: `lightning-asgd serve`, and `serve --join` on two more.
Five workers attach from five other machines. Again and again the present host is lost: its machine is cut off, and all
its processes are killed after two seconds, or after five, when it must have killed its servers itself; every third time
its process is killed at once. When all workers train again, the lost machine stands by with `serve --join`.

Training a sample adds 1 to that sample's parameter, and pushes are added in full. At the end every sample must have
been applied exactly once per epoch, and the versions must count every update that was acknowledged to a worker. A
worker that joins at the end must find the run, though the first host that it is given does not live.

Then the servers of a run are divided among the three machines (`serve --machines`). One lender's machine is cut off,
and the `serve` process of the other lender is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from network import Network, available, cut, machines, plug
from ranks import clean_environment, end_all, told_of_errors
from rich.console import Console
from rich.markup import escape
from storm import SAMPLES, quiet, verdict, work

from lightning_asgd.cli.command_line import main as command
from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.hosting.host_entry import HostEntry, ask_host

HOSTS, MACHINES, SERVERS, PORT = 3, 5, 2, 29400  # MACHINES of workers
CALM_S = 3.0  # between two losses, on average
LOSSES = ("cut off, and killed after 2 s", "cut off, and killed after 5 s", "killed")
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def serve(network: Network, machine: int, folder: Path, transport: str, join: str, options: list[str]) -> None:
    """Run `lightning-asgd serve` on a machine. With ``join`` it stands by."""
    network.enter(machine)
    quiet(folder / f"serve-{machine}.log")
    where = [f"{network.addresses[machine]}:{PORT}/storm", f"--transport={transport}"]
    sys.exit(command(["serve", *where, *([f"--join={join}"] if join else options)]))


class Run:
    """Hosts and workers, and what is done to them."""

    def __init__(self, network: Network, folder: Path, transport: str, workers: int, *options: str) -> None:
        self.network, self.folder, self.transport = network, folder, transport
        self.samples = SAMPLES * max(workers, MACHINES)
        self.options = list(options)  # of the first host
        self._fork = multiprocessing.get_context("fork").Process
        self.places = [f"{address}:{PORT}" for address in network.addresses[:HOSTS]]
        self.hosts: dict[int, Any] = {}
        self.workers: dict[str, Any] = {}
        for machine in range(HOSTS):
            self.host(machine, self.places[0] if machine else "")
        for number in range(workers):
            self.worker(HOSTS + number % MACHINES, f"{number}", f"{','.join(self.places)}/storm")
            if number % MACHINES == MACHINES - 1:  # more at once would take all of two cores
                self.wait(lambda: all(self.told(name).get("trains") for name in self.workers), 120, "training")

    def host(self, machine: int, join: str) -> None:
        """Have a machine host the run, or stand by."""
        about = self.network, machine, self.folder, self.transport, join, self.options
        self.hosts[machine] = self._fork(target=serve, args=about)
        self.hosts[machine].start()
        self.wait(lambda: self.entry(machine), 60, f"host on machine {machine} that serves or is ready")

    def worker(self, machine: int, name: str, server: str) -> None:
        """Start a worker."""
        about = self.network, machine, server, self.samples, self.folder, name, "counts", self.transport, None
        slower = self.samples / SAMPLES / MACHINES  # two cores take the steps of all workers
        self.workers[name] = self._fork(target=work, args=(*about, slower))
        self.workers[name].start()

    def told(self, name: str) -> dict[str, Any]:
        """What a worker has told."""
        file = self.folder / f"{name}.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def entry(self, machine: int) -> HostEntry | None:
        """What a host publishes, if it serves or is ready to. Asked from its machine, in a thread that enters that."""
        found: list[Any] = []

        def ask() -> None:
            self.network.enter(machine)
            found.append(ask_host(self.network.addresses[machine], PORT))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        match found:
            case [HostEntry() as entry] if entry.serves or entry.ready:
                return entry
        return None

    def present(self) -> int:
        """The machine whose host serves."""
        serving: list[int] = []

        def find() -> bool:
            serving[:] = [m for m in self.hosts if (entry := self.entry(m)) is not None and entry.serves]
            return len(serving) == 1

        self.wait(find, 30, "host that serves, alone")
        return serving[0]

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> None:
        """Wait for something while all live that should. Raises a ``RuntimeError`` if it does not happen in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            processes = [*self.hosts.values(), *self.workers.values()]
            ended = [each.exitcode for each in processes if each.exitcode not in (None, 0)]
            if ended or time.monotonic() > deadline:
                why = f"a process ended with {ended[0]}" if ended else f"not within {seconds:g} s"
                logs = "\n".join(f"{f.name}: {f.read_text()[-2000:]}" for f in sorted(self.folder.glob("*.log")))
                raise RuntimeError(f"No {what}: {why}.\n{logs}")
            time.sleep(0.05)

    def lose(self, how: str, machine: int | None = None) -> tuple[int, float, float]:
        """Lose the present host, or another one.

        Returns its machine, and seconds until another host serves, and until every worker has completed two more
        exchanges.
        """
        lends = machine is not None
        machine = self.present() if machine is None else machine
        process = self.hosts.pop(machine)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        begun, before = time.monotonic(), {name: self.told(name)["pushes"] for name in self.workers}
        serves_at = [] if lends else self.next_serves()
        if "cut" in how:
            cut(self.network, machine)
            time.sleep(5.0 if "5 s" in how else 2.0)
            if "5 s" in how and not lends and [each.pid for each in family[1:] if serves(each)]:
                raise RuntimeError(f"Machine {machine} is cut off, and its servers live.")
        for each in psutil.Process(process.pid).children(recursive=True) if "cut" in how else ():
            with contextlib.suppress(psutil.Error):
                each.kill()
        process.kill()
        process.join()
        trains = lambda: all(self.told(name)["pushes"] > pushes + 1 for name, pushes in before.items())  # noqa: E731
        self.wait(trains, 90, "update with another host")
        return machine, max(serves_at, default=math.nan) - begun, time.monotonic() - begun

    def next_serves(self) -> list[float]:
        """When another host than those that serve now does, once that is known."""
        at: list[float] = []

        def look() -> None:
            while not at and self.hosts:
                if any((entry := self.entry(machine)) is not None and entry.serves for machine in tuple(self.hosts)):
                    at.append(time.monotonic())
                time.sleep(0.05)

        threading.Thread(target=look, daemon=True).start()
        return at

    def stand_by(self, machine: int) -> None:
        """Have a lost host's machine stand by."""
        plug(self.network, machine)
        self.host(machine, self.places[self.present()])

    def end(self) -> dict[str, Any]:
        """Let all workers come to the end of an epoch; what they have told."""
        (self.folder / "stop").touch()
        self.wait(lambda: all(each.exitcode is not None for each in self.workers.values()), 120, "end")
        results = [self.told(name) for name in self.workers]
        return {**max(results, key=lambda told: told["epochs"]), "told": sum(told["pushes"] for told in results)}

    def close(self) -> None:
        """End all processes."""
        end_all([*self.workers.values(), *self.hosts.values()])


def serves(process: psutil.Process) -> bool:
    """Whether a process is alive and holds a server of the run, rather than being kept ready for one."""
    with contextlib.suppress(psutil.Error):
        arguments = process.cmdline()
        return "lightning_asgd.core.server.process" in arguments and f'"server": {SERVERS}' not in arguments[-1]
    return False


def run_lent(transport: str, workers: int, options: list[str]) -> bool:
    """Lose the hosts that lend servers, one after the other. Whether nothing is lost."""
    took: dict[str, list[float]] = {}
    with machines(HOSTS + MACHINES) as network, tempfile.TemporaryDirectory() as folder:
        divided = f"--num-servers={2 * HOSTS}", f"--machines={HOSTS}"
        job = Run(network, Path(folder), transport, workers, *divided, *options)
        try:
            for machine, how in enumerate(LOSSES[1:], 1):
                time.sleep(CALM_S)
                *_, seconds = job.lose(how, machine)
                took.setdefault(f"lender {how}", []).append(seconds)
                CONSOLE.print(f"  lender {machine} {how}: all train again after {seconds:.1f} s", style="dim")
            done = job.end()
        finally:
            job.close()
    return judge(job, len(LOSSES) - 1, took, done)


def run(transport: str, losses: int, chance: random.Random, workers: int, options: list[str]) -> bool:
    """Whether nothing is lost."""
    took: dict[str, list[float]] = {}
    with machines(HOSTS + MACHINES) as network, tempfile.TemporaryDirectory() as folder:
        job = Run(network, Path(folder), transport, workers, f"--num-servers={SERVERS}", *options)
        try:
            for number in range(losses):
                time.sleep(CALM_S * chance.uniform(0.5, 1.5))
                how = LOSSES[number % len(LOSSES)]
                machine, served_s, seconds = job.lose(how)
                if math.isfinite(served_s):
                    took.setdefault(f"{how}, another serves", []).append(served_s)
                took.setdefault(f"{how}, all train", []).append(seconds)
                CONSOLE.print(
                    f"  {number + 1}/{losses} host {machine} {how}: another serves after {served_s:.1f} s, all train "
                    f"again after {seconds:.1f} s",
                    style="dim",
                )
                if number + 1 < losses:
                    job.stand_by(machine)
            job.worker(HOSTS, "late", f"{job.places[machine]},{job.places[job.present()]}/storm")
            job.wait(lambda: job.told("late").get("trains"), 60, "training of a worker that joins late")
            done = job.end()
        finally:
            job.close()
    return judge(job, losses, took, done)


def judge(job: Run, losses: int, took: dict[str, list[float]], done: dict[str, Any]) -> bool:
    """Print what was found. Whether nothing is lost."""
    transport = job.transport
    epochs, versions = done["epochs"], done["versions"]
    wrong = sum(abs(epochs - times) * samples for times, samples in done["seen"])
    times = "; ".join(f"{how}: {statistics.median(s):.1f} s ({min(s):.1f}-{max(s):.1f})" for how, s in took.items())
    text = f"{losses} hosts lost; of {job.samples * epochs} samples {wrong:g} were not applied once"
    good = verdict(wrong == 0, f"{transport}: {text}. Until all trained again: {times}")
    text = f"workers were told of {done['told']} updates; versions {versions}"
    return verdict(min(versions) >= done["told"], f"{transport}: {text}") and good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--transport", choices=("rpc", "zmq"), help="the default is both")
    parser.add_argument("--workers", type=int, default=MACHINES, help="on five machines")
    parser.add_argument("--lease-s", type=float, help="of a host")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    clean_environment()
    os.environ[SECRET_ENV] = "in these machines only, which end with this program"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    torch.set_num_threads(1)
    if (reason := available()) is not None:
        CONSOLE.print(f"[red]Cannot make machines.[/] {escape(reason)}")
        return 2
    chance, good = random.Random(args.seed), True
    about = args.workers, [] if args.lease_s is None else [f"--lease-s={args.lease_s:g}"]
    with told_of_errors(CONSOLE):
        for transport in [args.transport] if args.transport else ["rpc", "zmq"]:
            good &= run(transport, args.losses, chance, *about) if args.losses else True
            good &= run_lent(transport, *about)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
