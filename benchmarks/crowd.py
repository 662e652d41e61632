"""64 workers on two cores, with a hundred kills and replacements: is an update lost, does the server's memory grow?

    python benchmarks/crowd.py                  # half an hour
    python benchmarks/crowd.py --minutes 3      # a tenth of the kills

`lightning-asgd serve` hosts an elastic run with one server. Worker processes, forked after the imports, attach to it
and train a tiny model. At random moments, which the seed determines, a worker is killed, which may be the chief, and
another process joins. Training a sample adds 1 to that sample's parameter, and pushes are added in full: at the end
every weight must be exactly the number of epochs. With one server a push is applied whole, or not at all.

The memory of the server's process, without program files, is noted every two seconds once all workers train. The
median of the last third must be at most 3 % above that of the first third.

Exits with 1 if a weight is wrong, if memory grows, if a worker fails, or if a replacement does not train within two
minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: nothing that forbids to fork

import psutil
import pytorch_lightning as pl
import torch
from common import CONSOLE, prepared, verdict
from counts import Counts, Report, fit, numbers
from jobs import Processes, megabytes, quiet
from rich.table import Table

from lightning_asgd import ASGDStrategy, Timeouts
from lightning_asgd.algorithms import ASGD

WORKERS, KILLS, MINUTES = 64, 100, 30.0
SAMPLES, BATCH, NSYNC, STEP_S = 250, 2, 5, 0.5  # samples per worker
SILENCE_S = 10.0
JOIN_S, END_S = 120.0, 600.0  # until a worker trains; until all have ended their epoch
LOOK_S = 2.0  # between two looks at the memory
GROWTH = 0.03


def work(folder: Path, name: str, samples: int, about: dict[str, Any]) -> None:
    """Be a worker."""
    quiet(folder / f"{name}.log")
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    strategy = ASGDStrategy(NSYNC, algorithm=ASGD("sum"), timeouts=Timeouts(silence_s=SILENCE_S), **about)
    report = Report(folder / f"{name}.json")
    fit(Counts(samples, STEP_S), numbers(samples, BATCH), strategy=strategy, callbacks=[report])


class Run(Processes):
    """A served run and its workers.

    Attributes:
        workers: names of those that live.
        memory: megabytes of the server's process since all workers trained.
    """

    def __init__(self, folder: Path, workers: int, transport: str, chance: random.Random) -> None:
        super().__init__(folder)
        self.size, self.chance = workers, chance
        self.workers: list[str] = []
        self.started = self.kills = 0
        self.joined_s: list[float] = []  # from the fork to the first batch
        self.memory: list[float] = []
        self.looked = 0.0
        self.server: psutil.Process | None = None
        self.options = {"transport": transport}

    def begin(self) -> None:
        """Wait for the server, start all workers, and wait until all train."""
        self.serve("serve", None, 0, "0/crowd", f"--transport={self.options['transport']}")
        self.options["run"] = self.address()
        names = [self.join() for _ in range(self.size)]
        self.wait(lambda: all(self.told(name) for name in names), 5 * JOIN_S, "training of all workers")
        (self.server,) = self.servers("serve", 1)
        self.spent, self.since = sum(self.server.cpu_times()[:2]), time.monotonic()

    def join(self) -> str:
        """Start a worker; returns its name."""
        self.started += 1
        name = f"worker-{self.started}"
        self.fork(name, work, self.folder, name, SAMPLES * self.size, self.options)
        self.workers.append(name)
        return name

    def replace(self) -> None:
        """Kill a worker, and start another, which must train soon."""
        name = self.chance.choice(sorted(self.workers))
        self.workers.remove(name)
        process = self.processes.pop(name)
        process.kill()
        process.join()
        process.close()
        self.kills += 1
        begun, other = time.monotonic(), self.join()
        self.joined_s.append(self.wait(lambda: self.told(other), JOIN_S, f"training of {other}") - begun)

    def failed(self) -> list[str]:
        """See :class:`Processes`. `serve` may not end at all."""
        return [*super().failed(), *(["serve"] if self.processes["serve"].exitcode == 0 else [])]

    def check(self) -> None:
        """See :class:`Processes`; and, once in a while, look how much memory the server takes."""
        super().check()
        if self.server is not None and time.monotonic() > self.looked + LOOK_S:
            self.looked = time.monotonic()
            with contextlib.suppress(psutil.Error):  # noticed below
                self.memory.append(megabytes(self.server))
            if not self.server.is_running():
                raise RuntimeError(f"The server's process has ended.\n{self.last_words('serve')}")

    def finish(self) -> list[dict[str, Any]]:
        """Let all workers come to the end of an epoch; what they tell."""
        assert self.server is not None
        self.load = (sum(self.server.cpu_times()[:2]) - self.spent) / (time.monotonic() - self.since)
        return self.end(self.workers, END_S)


def moments(chance: random.Random, kills: int, seconds: float) -> list[float]:
    """When workers are killed: a random moment in each of equal parts of the time."""
    return [seconds * (number + chance.random()) / kills for number in range(kills)]


def disturb(run: Run, kills: int, seconds: float) -> None:
    """Train for a time, in which workers are killed and replaced."""
    begun = time.monotonic()
    for number, moment in enumerate(moments(run.chance, kills, seconds), 1):
        while time.monotonic() < begun + moment:
            run.check()
            time.sleep(0.1)
        run.replace()
        if number % 10 == 0 or number == kills:
            minutes = (time.monotonic() - begun) / 60
            CONSOLE.print(f"  {minutes:4.1f} min: {number}/{kills} kills, server {run.memory[-1]:.1f} MB", style="dim")
    while time.monotonic() < begun + seconds:
        run.check()
        time.sleep(0.1)


def judge(run: Run, told: list[dict[str, Any]]) -> bool:
    """Print what came out; returns whether it is good."""
    samples = SAMPLES * run.size
    last = max(told, key=lambda each: each["epochs"])
    epochs, third = last["epochs"], max(1, len(run.memory) // 3)
    wrong = sum(count for times, count in last["seen"] if times != epochs)
    first, final = statistics.median(run.memory[:third]), statistics.median(run.memory[-third:])
    table = Table("", "", show_header=False, title=f"{run.size} workers, {run.kills} kills", title_justify="left")
    table.add_row("processes that joined", f"{run.started}")
    table.add_row("samples trained, of which every one counts", f"{samples * epochs:,} in {epochs} epochs")
    slowest = f"{statistics.median(run.joined_s):.1f} s, at most {max(run.joined_s):.1f} s" if run.joined_s else "-"
    table.add_row("from the fork of a worker to its first batch", slowest)
    table.add_row("the server's process, of a core", f"{100 * run.load:.1f} %")
    table.add_row("its memory: least, most", f"{min(run.memory):.1f} MB, {max(run.memory):.1f} MB")
    CONSOLE.print(table)
    good = verdict(not wrong, f"of {samples:,} weights {wrong} are not {epochs}, the number of epochs")
    grown = final / first - 1
    memory = f"memory {first:.1f} MB in the first third, {final:.1f} MB in the last: {100 * grown:+.1f} %"
    return verdict(grown <= GROWTH, f"{memory}, at most {100 * GROWTH:+.0f} %") and good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--kills", type=int, help=f"default: {KILLS} in {MINUTES:g} minutes")
    parser.add_argument("--transport", choices=("rpc", "zmq"), default="zmq")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    kills = round(KILLS * args.minutes / MINUTES) if args.kills is None else args.kills
    about = f"{args.workers} workers, {args.transport}, {args.minutes:g} minutes, {kills} kills"
    CONSOLE.print(f"[bold]crowd[/]: {about} (load {os.getloadavg()[0]:.1f})")
    with (
        prepared(one_thread=True, secret=True),
        tempfile.TemporaryDirectory(prefix="asgd-crowd-") as folder,
        contextlib.ExitStack() as stack,
    ):
        run = Run(Path(folder), args.workers, args.transport, random.Random(args.seed))
        stack.callback(run.close)
        begun = time.monotonic()
        run.begin()
        CONSOLE.print(f"  all train after {time.monotonic() - begun:.0f} s", style="dim")
        disturb(run, kills, 60 * args.minutes)
        good = judge(run, run.finish())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
