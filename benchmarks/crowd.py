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
import json
import logging
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: nothing that forbids to fork

import psutil
import pytorch_lightning as pl
import torch
from counts import Counts, Diary
from ranks import clean_environment, end_all, servers_of, told_of_errors
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import ASGDStrategy, Timeouts
from lightning_asgd.algorithms import ASGD
from lightning_asgd.cli.command_line import main as command
from lightning_asgd.core.algorithms.config import SECRET_ENV

WORKERS, KILLS, MINUTES = 64, 100, 30.0
SAMPLES, BATCH, NSYNC, STEP_S = 250, 2, 5, 0.5  # samples per worker
SILENCE_S = 10.0
JOIN_S, END_S = 120.0, 600.0  # until a worker trains; until all have ended their epoch
LOOK_S = 2.0  # between two looks at the memory
GROWTH = 0.03
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


# ---------------------------------------------------------------------- in processes of their own


class Report(Diary):
    """Tells when a worker trains and what came out; ends training at an epoch's end when asked to."""

    def on_train_batch_end(self, trainer: Any, *about: Any) -> None:
        if not self.told:
            self.tell(trains=True)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop |= (self.file.parent / "stop").exists()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        seen = sorted(Counter(pl_module.seen.tolist()).items())
        stats = trainer.strategy.stats
        self.tell(ended=True, epochs=trainer.current_epoch, seen=seen, pushes=stats.pushes, steps=stats.steps)


def _quiet(file: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends all
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with file.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def serve(folder: Path, transport: str) -> None:
    _quiet(folder / "serve.log")
    sys.exit(command(["serve", "127.0.0.1:0/crowd", f"--transport={transport}"]))


def work(folder: Path, name: str, address: str, samples: int, transport: str) -> None:
    _quiet(folder / f"{name}.log")
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    run: dict[str, Any] = {"run": address, "transport": transport}
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1_000_000,
        strategy=ASGDStrategy(NSYNC, algorithm=ASGD("sum"), timeouts=Timeouts(silence_s=SILENCE_S), **run),
        callbacks=[Report(folder / f"{name}.json")],
        num_sanity_val_steps=0,
        **dict.fromkeys(off, False),
    )
    trainer.fit(Counts(samples, STEP_S), DataLoader(TensorDataset(torch.arange(samples)), BATCH, shuffle=True))


# ---------------------------------------------------------------------- the run


class Run:
    """A served run and its workers.

    Attributes:
        workers: those that live, by name.
        memory: megabytes of the server's process since all workers trained.
    """

    def __init__(self, folder: Path, workers: int, transport: str, chance: random.Random) -> None:
        self.folder, self.size, self.transport, self.chance = folder, workers, transport, chance
        self.fork = multiprocessing.get_context("fork").Process
        self.workers: dict[str, Any] = {}
        self.started = self.kills = 0
        self.joined_s: list[float] = []  # from the fork to the first batch
        self.memory: list[float] = []
        self.looked = 0.0
        self.server: psutil.Process | None = None
        self.main = self.fork(target=serve, args=(folder, transport))
        self.main.start()

    def begin(self) -> None:
        """Wait for the server, start all workers, and wait until all train."""
        log = self.folder / "serve.log"
        self.wait(lambda: log.exists() and 'run="' in log.read_text(), 60, "the server's start")
        self.address = log.read_text().partition('run="')[2].partition('"')[0]
        names = [self.join() for _ in range(self.size)]
        self.wait(lambda: all(self.told(name) for name in names), 5 * JOIN_S, "the training of all workers")
        (self.server, *_) = servers_of(psutil.Process(self.main.pid))
        self.spent, self.since = sum(self.server.cpu_times()[:2]), time.monotonic()

    def join(self) -> str:
        """Start a worker; returns its name."""
        self.started += 1
        name = f"worker-{self.started}"
        about = self.folder, name, self.address, SAMPLES * self.size, self.transport
        self.workers[name] = self.fork(target=work, args=about)
        self.workers[name].start()
        return name

    def replace(self) -> None:
        """Kill a worker, and start another, which must train soon."""
        name = self.chance.choice(sorted(self.workers))
        process = self.workers.pop(name)
        process.kill()
        process.join()
        process.close()
        self.kills += 1
        begun, other = time.monotonic(), self.join()
        self.wait(lambda: self.told(other), JOIN_S, f"the training of {other}")
        self.joined_s.append(time.monotonic() - begun)

    def told(self, name: str) -> dict[str, Any]:
        """What a worker has told."""
        file = self.folder / f"{name}.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> None:
        """Wait for something while no process fails. Raises a ``RuntimeError`` if one does, or if it takes too long."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not happen within {seconds:g} s.\n{self.output()}")
            self.look()
            time.sleep(0.1)

    def look(self) -> None:
        """Whether all live that should; and, once in a while, how much memory the server takes."""
        for name, process in self.workers.items():
            if process.exitcode not in (None, 0):
                raise RuntimeError(f"{name} ended with {process.exitcode}:\n{self.output(name)}")
        if self.main.exitcode is not None:
            raise RuntimeError(f"serve ended with {self.main.exitcode}:\n{self.output('serve')}")
        if self.server is not None and time.monotonic() > self.looked + LOOK_S:
            self.looked = time.monotonic()
            with contextlib.suppress(psutil.Error):  # noticed below
                self.memory.append(_megabytes(self.server))
            if not self.server.is_running():
                raise RuntimeError(f"The server's process has ended.\n{self.output('serve')}")

    def output(self, name: str = "*") -> str:
        """The last output of processes."""
        files = sorted(self.folder.glob(f"{name}.log"), key=lambda file: file.stat().st_mtime)[-3:]
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-1500:]}" for file in files)

    def end(self) -> list[dict[str, Any]]:
        """Let all workers come to the end of an epoch; what they tell."""
        assert self.server is not None
        self.load = (sum(self.server.cpu_times()[:2]) - self.spent) / (time.monotonic() - self.since)
        (self.folder / "stop").touch()
        self.wait(lambda: all(p.exitcode is not None for p in self.workers.values()), END_S, "the end of all workers")
        told = [self.told(name) for name in self.workers]
        if not all(each.get("ended") for each in told):
            raise RuntimeError(f"A worker has not told how it ended.\n{self.output()}")
        return told

    def close(self) -> None:
        end_all([*self.workers.values(), self.main])


def _megabytes(process: psutil.Process) -> float:
    """Memory of a process without program files, whose share depends on what else runs."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    named = dict(line.split(":", 1) for line in lines)
    return sum(int(named[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024


@contextlib.contextmanager
def run_of(workers: int, transport: str, chance: random.Random) -> Iterator[Run]:
    """A run in a folder of its own, which is ended in any case."""
    with tempfile.TemporaryDirectory(prefix="asgd-crowd-") as folder:
        run = Run(Path(folder), workers, transport, chance)
        try:
            yield run
        finally:
            run.close()


def moments(chance: random.Random, kills: int, seconds: float) -> list[float]:
    """When workers are killed: a random moment in each of equal parts of the time."""
    return [seconds * (number + chance.random()) / kills for number in range(kills)]


def disturb(run: Run, kills: int, seconds: float) -> None:
    """Train for a time, in which workers are killed and replaced."""
    begun = time.monotonic()
    for number, moment in enumerate(moments(run.chance, kills, seconds), 1):
        while time.monotonic() < begun + moment:
            run.look()
            time.sleep(0.1)
        run.replace()
        if number % 10 == 0 or number == kills:
            minutes = (time.monotonic() - begun) / 60
            CONSOLE.print(f"  {minutes:4.1f} min: {number}/{kills} kills, server {run.memory[-1]:.1f} MB", style="dim")
    while time.monotonic() < begun + seconds:
        run.look()
        time.sleep(0.1)


def verdict(good: bool, text: str) -> bool:
    CONSOLE.print(f"{'[green]PASS[/]' if good else '[red]FAIL[/]'}  {text}")
    return good


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
    clean_environment()
    os.environ[SECRET_ENV] = "of this machine only, until this program ends"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    about = f"{args.workers} workers, {args.transport}, {args.minutes:g} minutes, {kills} kills"
    CONSOLE.print(f"[bold]crowd[/]: {about} (load {os.getloadavg()[0]:.1f})")
    with told_of_errors(CONSOLE), run_of(args.workers, args.transport, random.Random(args.seed)) as run:
        begun = time.monotonic()
        run.begin()
        CONSOLE.print(f"  all train after {time.monotonic() - begun:.0f} s", style="dim")
        disturb(run, kills, 60 * args.minutes)
        good = judge(run, run.end())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
