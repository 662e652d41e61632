"""From one worker to six and back to one within one epoch: how long does it take to join, and to take over?

    python benchmarks/elastic.py              # about a minute per repeat

`lightning-asgd serve` hosts a run. Workers attach one after another. When all train, the server is killed. Then workers
leave, by SIGTERM and SIGKILL in turn, until only the first worker is left, which ends the epoch. Training a sample adds
1 to that sample's parameter, and pushes are added in full: at the end every sample must have been applied exactly once.

Exits with 1 if a sample was not, or if a target is missed: 2 s from a worker's imports to its first batch; 3 s from a
server's death to the next update that is applied; a worker's death noticed within `silence_s`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: nothing that forbids to fork

import psutil
import pytorch_lightning as pl
import torch
from common import CONSOLE, prepared
from counts import Counts, fit, numbers
from jobs import Processes, quiet, wait_until
from rich.table import Table

from lightning_asgd import ASGDStrategy, Timeouts
from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.job import registry
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.elastic.messages import Status, StatusRequest

WORKERS = 6
SAMPLES, BATCH, NSYNC, STEP_S = 20_000, 2, 5, 0.02
SILENCE_S = 2.0
JOIN_S, RECOVER_S = 2.0, 3.0
until = partial(wait_until, every_s=0.01)


# ---------------------------------------------------------------------- in processes of their own


class Notes(pl.Callback):
    """Writes when something happened first, on the clock that all processes share."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seen: set[str] = set()

    def note(self, what: str, **about: Any) -> None:
        if what not in self.seen:
            self.seen.add(what)
            with self.file.open("a") as file:
                file.write(json.dumps({"what": what, "at": time.monotonic(), **about}) + "\n")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.note("first batch")
        if trainer.strategy.stats.pushes:
            self.note("first exchange")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.note("end", seen=pl_module.seen.tolist(), epochs=trainer.current_epoch)


def work(folder: Path, name: int, address: str) -> None:
    notes = Notes(folder / f"{name}.notes")
    notes.note("imported")
    quiet(folder / f"{name}.log")
    torch.set_num_threads(1)
    timeouts = Timeouts(silence_s=SILENCE_S)
    strategy = ASGDStrategy(NSYNC, algorithm=ASGD("sum"), run=address, timeouts=timeouts)
    fit(Counts(SAMPLES, STEP_S), numbers(SAMPLES, BATCH), strategy=strategy, callbacks=[notes], max_epochs=1)


# ---------------------------------------------------------------------- the run


class Run(Processes):
    """A served run, its workers, which are named by numbers, and somebody who looks at it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.serve("serve", None, 0, "0/counts")
        host, _, port = self.address().partition("/")[0].rpartition(":")
        self.rendezvous = Rendezvous.connect(host, int(port), 10.0)
        self.keys = self.rendezvous.session("counts", "rpc", 10.0)

    def when(self, name: int, what: str) -> float | None:
        """When a worker noted something."""
        file = self.folder / f"{name}.notes"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return next((entry["at"] for entry in lines if entry["what"] == what), None)

    def look(self, address: str) -> Callable[[], Status]:
        """What looks at a server."""
        transport = registry.kind_of("rpc").connect([address], "lo")

        def look() -> Status:
            view: Status = transport.call(0, StatusRequest(), 10.0).wait()
            return view

        return look

    def close(self) -> None:
        """See :class:`Processes`."""
        super().close()
        registry.release()


def measure(folder: Path) -> tuple[dict[str, list[float]], int]:
    """One run.

    Returns:
        seconds by what they are of; and how many samples were not applied exactly once.
    """
    times: dict[str, list[float]] = {
        "first batch": [],
        "first exchange": [],
        "SIGTERM": [],
        "SIGKILL": [],
        "server": [],
    }
    run = Run(folder)
    try:
        for name in range(1, WORKERS + 1):
            run.fork(str(name), work, folder, name, run.address())
            until(lambda name=name: run.when(name, "first exchange"), 30, f"worker {name}'s first exchange")
            for what in ("first batch", "first exchange"):
                times[what].append((run.when(name, what) or 0.0) - (run.when(name, "imported") or 0.0))
        time.sleep(16.0)  # a server is kept ready from a quarter of a minute on
        address = run.rendezvous.server(0, run.keys[0], 10.0)
        before = run.look(address)().version
        (process, *_) = [
            p for p in psutil.Process(run.processes["serve"].pid).children() if "server0" in " ".join(p.cmdline())
        ]
        killed = time.monotonic()
        process.kill()
        look = run.look(run.rendezvous.server(0, run.keys[0], 60.0, other_than=address))
        times["server"].append(until(lambda: look().version > before, 60, "an update on the other server") - killed)
        for name in range(WORKERS, 1, -1):
            number = signal.SIGTERM if name % 2 else signal.SIGKILL
            living = sum(not worker.away for worker in look().workers)
            gone = time.monotonic()
            os.kill(run.processes[str(name)].pid, number)
            fewer = until(
                lambda living=living: sum(not worker.away for worker in look().workers) < living, 30, "its going"
            )
            times[number.name].append(fewer - gone)
        run.processes["1"].join(200)
        (end,) = [line for line in (folder / "1.notes").read_text().splitlines() if '"end"' in line]
        return times, sum(abs(1 - round(seen)) for seen in json.loads(end)["seen"])
    finally:
        run.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    times: dict[str, list[float]] = {}
    wrong = 0
    with prepared():
        for repeat in range(args.repeats):
            with tempfile.TemporaryDirectory() as name:
                found, lost = measure(Path(name))
            wrong += lost
            for what, seconds in found.items():
                times.setdefault(what, []).extend(seconds)
            CONSOLE.print(f"{repeat + 1}/{args.repeats}: of {SAMPLES} samples {lost} were not applied exactly once")
    meaning = {
        "first batch": "from a worker's imports to its first batch",
        "first exchange": f"and to its first exchange, after {NSYNC} steps of {STEP_S} s",
        "SIGTERM": "from SIGTERM until its data are available to others",
        "SIGKILL": f"from SIGKILL until then, with silence_s={SILENCE_S:g}",
        "server": "from a server's death to the next update applied",
    }
    limits = {"first batch": JOIN_S, "SIGKILL": SILENCE_S + 0.5, "server": RECOVER_S}
    table = Table("", "seconds", "min", "max", "target", title=f"1 to {WORKERS} workers and back", title_justify="left")
    good = not wrong
    for what, text in meaning.items():
        median = statistics.median(times[what])
        limit = limits.get(what)
        good &= limit is None or median <= limit
        table.add_row(
            text, f"{median:.2f}", f"{min(times[what]):.2f}", f"{max(times[what]):.2f}", f"{limit:.1f}" if limit else ""
        )
    CONSOLE.print(table)
    CONSOLE.print("[green]PASS[/]" if good else "[red]FAIL[/]")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
