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
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

import psutil
from common import CONSOLE, prepared, spread, verdict
from counts import not_once
from jobs import Processes
from network import Network, cut, machines, plug
from storm import SAMPLES, work

from lightning_asgd.hosting.host_entry import HostEntry, ask_host

HOSTS, MACHINES, SERVERS, PORT = 3, 5, 2, 29400  # MACHINES of workers
CALM_S = 3.0  # between two losses, on average
LOSSES = ("cut off, and killed after 2 s", "cut off, and killed after 5 s", "killed")


class Run(Processes):
    """Hosts, each named `host-` and its machine, and workers, named by numbers; and what is done to them."""

    def __init__(self, network: Network, folder: Path, transport: str, workers: int, *options: str) -> None:
        super().__init__(folder)
        self.network, self.transport = network, transport
        self.samples = SAMPLES * max(workers, MACHINES)
        self.options = list(options)  # of the first host
        self.places = [f"{address}:{PORT}" for address in network.addresses[:HOSTS]]
        self.hosts: set[int] = set()
        self.workers: list[str] = []
        for machine in range(HOSTS):
            self.host(machine, self.places[0] if machine else "")
        for number in range(workers):
            self.worker(HOSTS + number % MACHINES, f"{number}", f"{','.join(self.places)}/storm")
            if number % MACHINES == MACHINES - 1:  # more at once would take all of two cores
                self.wait(lambda: all(self.told(name) for name in self.workers), 120, "training")

    def host(self, machine: int, join: str) -> None:
        """Have a machine host the run, or stand by if it is to ``join`` another host."""
        options = [f"--transport={self.transport}", *([f"--join={join}"] if join else self.options)]
        self.serve(f"host-{machine}", self.network, machine, f"{PORT}/storm", *options)
        self.hosts.add(machine)
        self.wait(lambda: self.entry(machine), 60, f"host on machine {machine} that serves or is ready")

    def worker(self, machine: int, name: str, server: str) -> None:
        """Start a worker."""
        slower = self.samples / SAMPLES / MACHINES  # two cores take the steps of all workers
        about = {"run": server, "transport": self.transport, "slower": slower}
        log = self.folder / f"{name}.log"
        self.fork(name, work, self.network, machine, log, self.samples, "counts", None, about)
        self.workers.append(name)

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

    def serving(self) -> list[int]:
        """Machines whose hosts serve."""
        return [machine for machine in [*self.hosts] if (entry := self.entry(machine)) is not None and entry.serves]

    def present(self) -> int:
        """The machine whose host serves."""
        serving: list[int] = []

        def find() -> bool:
            serving[:] = self.serving()
            return len(serving) == 1

        self.wait(find, 30, "host that serves, alone")
        return serving[0]

    def lose(self, how: str, machine: int | None = None) -> tuple[int, float, float]:
        """Lose the present host, or another one.

        Returns its machine, and seconds until another host serves, and until every worker has completed two more
        exchanges.
        """
        lends = machine is not None
        machine = self.present() if machine is None else machine
        self.hosts.discard(machine)
        process = self.processes.pop(f"host-{machine}")
        family = psutil.Process(process.pid).children(recursive=True)
        begun, before = time.monotonic(), {name: self.told(name)["pushes"] for name in self.workers}
        serves_at = [] if lends else self.next_serves()
        if "cut" in how:
            cut(self.network, machine)
            time.sleep(5.0 if "5 s" in how else 2.0)
            if "5 s" in how and not lends and [each.pid for each in family if serves(each)]:
                raise RuntimeError(f"Machine {machine} is cut off, and its servers live.")
        for each in psutil.Process(process.pid).children(recursive=True) if "cut" in how else ():
            with contextlib.suppress(psutil.Error):
                each.kill()
        process.kill()
        process.join()
        trains = lambda: all(self.told(name)["pushes"] > pushes + 1 for name, pushes in before.items())  # noqa: E731
        took = self.wait(trains, 90, "update with another host") - begun
        return machine, max(serves_at, default=math.nan) - begun, took

    def next_serves(self) -> list[float]:
        """When another host than those that serve now does, once that is known."""
        at: list[float] = []

        def look() -> None:
            while not at and self.hosts:
                if self.serving():
                    at.append(time.monotonic())
                time.sleep(0.05)

        threading.Thread(target=look, daemon=True).start()
        return at

    def stand_by(self, machine: int) -> None:
        """Have a lost host's machine stand by."""
        plug(self.network, machine)
        self.host(machine, self.places[self.present()])

    def finish(self) -> dict[str, Any]:
        """Let all workers come to the end of an epoch; what they have told."""
        results = self.end(self.workers, 120)
        return {**max(results, key=lambda told: told["epochs"]), "told": sum(told["pushes"] for told in results)}


def serves(process: psutil.Process) -> bool:
    """Whether a process is alive and holds a server of the run, rather than being kept ready for one."""
    with contextlib.suppress(psutil.Error):
        arguments = process.cmdline()
        return "lightning_asgd.core.server.process" in arguments and f'"server": {SERVERS}' not in arguments[-1]
    return False


def run(
    transport: str, losses: Sequence[tuple[str, int | None]], workers: int, pauses: Any, options: list[str]
) -> bool:
    """Lose hosts, each in one way, and the present one unless a machine is named. Whether nothing is lost."""
    took: dict[str, list[float]] = {}
    with (
        machines(HOSTS + MACHINES) as network,
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as stack,
    ):
        job = Run(network, Path(folder), transport, workers, *options)
        stack.callback(job.close)
        for number, (how, lender) in enumerate(losses, 1):
            time.sleep(pauses())
            machine, served_s, seconds = job.lose(how, lender)
            text = f"all train again after {seconds:.1f} s"
            if lender is not None:
                took.setdefault(f"lender {how}", []).append(seconds)
                CONSOLE.print(f"  lender {machine} {how}: {text}", style="dim")
                continue
            if math.isfinite(served_s):
                took.setdefault(f"{how}, another serves", []).append(served_s)
            took.setdefault(f"{how}, all train", []).append(seconds)
            text = f"another serves after {served_s:.1f} s, {text}"
            CONSOLE.print(f"  {number}/{len(losses)} host {machine} {how}: {text}", style="dim")
            if number < len(losses):
                job.stand_by(machine)
            else:
                job.worker(HOSTS, "late", f"{job.places[machine]},{job.places[job.present()]}/storm")
                job.wait(lambda: job.told("late"), 60, "training of a worker that joins late")
        done = job.finish()
    wrong, versions = not_once(done), done["versions"]
    times = "; ".join(f"{how}: {spread(seconds, 1)} s" for how, seconds in took.items())
    text = f"{len(losses)} hosts lost; of {job.samples * done['epochs']} samples {wrong} were not applied once"
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
    chance, good = random.Random(args.seed), True
    lease = [] if args.lease_s is None else [f"--lease-s={args.lease_s:g}"]
    own = [(LOSSES[number % len(LOSSES)], None) for number in range(args.losses)]
    lent = [(how, machine) for machine, how in enumerate(LOSSES[1:], 1)]
    divided = [f"--num-servers={2 * HOSTS}", f"--machines={HOSTS}", *lease]
    with prepared(one_thread=True, secret=True, machines=True):
        for transport in [args.transport] if args.transport else ["rpc", "zmq"]:
            if own:
                pauses, options = lambda: CALM_S * chance.uniform(0.5, 1.5), [f"--num-servers={SERVERS}", *lease]
                good &= run(transport, own, args.workers, pauses, options)
            good &= run(transport, lent, args.workers, lambda: CALM_S, divided)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
