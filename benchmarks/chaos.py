"""Suspend, resume and kill workers, and kill servers, during training: what is lost?

    python benchmarks/chaos.py                 # 100 faults, about ten minutes on two cores
    python benchmarks/chaos.py --faults 10     # a quick look

Faults happen at random moments, by seed. Random workers get SIGSTOP, and SIGCONT after up to four times `silence_s`.
Workers get SIGKILL, worker 0 first, as long as half of them are left, and so do random servers. A checkpoint is written
at the end of each epoch; those that are kept must load. Two programs are trained:

* a program that counts: training a sample adds 1 to that sample's parameter, and pushes are added in full. Every sample
must
  have been applied exactly once per epoch: with faults of workers and one or two servers, with faults of two servers,
  with faults of workers and of one server. With two servers a worker that is killed while it sends a push may have
  reached only one of them. Then half of that push is lost, which is allowed.
* scikit-learn's digits, as in convergence.py: with all these faults the accuracy must be within 0.01 of the accuracy
without faults.

Last, the speed of the counting program with a fault of any kind about every 25 s: a living worker must train at 0.9 of
its speed without faults. A worker is not living while it is suspended or after it was killed. Time in which the others
wait for it counts as living for them.

Exits with 1 if one of these fails, or if training does not end by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import math
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
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

import psutil
import pytorch_lightning as pl
import torch
from counts import Counts
from pytorch_lightning.callbacks import ModelCheckpoint
from ranks import clean_environment, told_of_errors
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from digits import DigitsCNN, loaders

from lightning_asgd import ASGDStrategy, Timeouts
from lightning_asgd.algorithms import ASGD

SILENCE_S = 2.0
IN_FLIGHT_S = 0.1  # in which answers of a server that was killed may still be noticed
NSYNC, BATCH = 5, 2
SAMPLES = {"counts": 1000, "speed": 8000}  # of one epoch
CALM_S = 22.0  # between the faults while the speed is measured
LEAST = 0.9  # of the speed without faults
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


class Report(pl.Callback):
    """Tells which process is which worker, and what came out; ends training when asked to, at an epoch's end."""

    def __init__(self, folder: Path, epochs: int | None) -> None:
        self.folder = folder
        self.epochs = epochs
        self.pushes: list[float] = []  # when worker 0 learnt of one more that was applied
        self.begun = 0.0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.strategy.stats.pushes != len(self.pushes):
            self.pushes += [time.monotonic()] * (trainer.strategy.stats.pushes - len(self.pushes))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begun = time.monotonic()
        new = self.folder / f"new{trainer.global_rank}"
        new.write_text(str(os.getpid()))
        new.rename(self.folder / f"worker{trainer.global_rank}")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.epochs is None:  # all must decide alike
            trainer.should_stop |= trainer.strategy.broadcast((self.folder / "stop").exists())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
            result = {"epochs": trainer.current_epoch, "metrics": metrics, "pushes": self.pushes}
            result |= {"begun": self.begun, "ended": time.monotonic()}
            if isinstance(pl_module, Counts):
                result["seen"] = sorted(Counter(pl_module.seen.tolist()).items())
            (self.folder / "result.json").write_text(json.dumps(result))


def fit(program: str, workers: int, servers: int, folder: Path, epochs: int | None) -> None:
    """The main process of a job. Its output goes to a file."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    output = (folder / "output").open("w")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    pl.seed_everything(1, verbose=False)
    strategy = ASGDStrategy(
        nsync=NSYNC,
        algorithm=None if program == "digits" else ASGD("sum"),
        num_servers=servers,
        start_method="fork",
        timeouts=Timeouts(silence_s=SILENCE_S),
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy=strategy,
        max_epochs=epochs or 1_000_000,
        callbacks=[Report(folder, epochs), ModelCheckpoint(folder / "checkpoints", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    if program in SAMPLES:
        samples = SAMPLES[program]
        module = Counts(samples, 0.005 if program == "counts" else 0.02)
        trainer.fit(module, DataLoader(TensorDataset(torch.arange(samples)), BATCH, shuffle=True))
    else:
        trainer.fit(DigitsCNN(), *loaders(batch_size=16))


class Job:
    """A job that trains, and what is done to its workers.

    Args:
        program: ``"counts"``, ``"speed"`` or ``"digits"``.
        workers: number of them.
        servers: number of them.
        folder: for what its processes tell.
        epochs: to train; None: until :meth:`end`.
    """

    def __init__(self, program: str, workers: int, servers: int, folder: Path, epochs: int | None = None) -> None:
        self.workers, self.folder = workers, folder
        arguments = (program, workers, servers, folder, epochs)
        self.process = multiprocessing.get_context("fork").Process(target=fit, args=arguments)
        self.process.start()
        self.killed: set[int] = set()
        self.servers_killed: list[float] = []  # when
        self.stopped: list[tuple[float, float]] = []  # from when to when a worker was
        deadline = time.monotonic() + 120
        while not all((folder / f"worker{rank}").exists() for rank in range(workers)):
            if time.monotonic() > deadline or self.process.exitcode is not None:
                raise RuntimeError(f"The workers did not start:\n{self.output()}")
            time.sleep(0.1)

    def output(self, most: int | None = 4000) -> str:
        return (self.folder / "output").read_text()[-(most or 0) :]

    def servers(self) -> list[psutil.Process]:
        """The servers that run."""
        found = []
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "lightning_asgd.core.server.process" in process.cmdline():
                    found.append(process)
        return found

    def disturb(self, chance: random.Random, who: tuple[str, ...]) -> str:
        """One fault.

        Args:
            chance: which, and when.
            who: ``"workers"``, ``"servers"``.

        Returns:
            what it was.
        """
        time.sleep(chance.uniform(0.5, 2.0))
        if who == ("nobody",):
            return "nothing"
        if chance.choice(who) == "servers":
            time.sleep(chance.uniform(0.0, 6.0))  # starting another one takes seconds
            servers = self.servers()
            if servers:
                chance.choice(servers).kill()
                self.servers_killed.append(time.monotonic())
            return "SIGKILL of a server"
        kill = chance.random() < 0.2 and len(self.killed) < self.workers // 2
        alive = [rank for rank in range(self.workers) if rank not in self.killed]
        rank = chance.choice(alive) if self.killed or not kill else 0  # which logs and writes the checkpoints
        worker = psutil.Process(int((self.folder / f"worker{rank}").read_text()))
        if kill:
            self.killed.add(rank)
            worker.kill()
            self.stopped.append((time.monotonic(), math.inf))
            return "SIGKILL of a worker"
        worker.suspend()
        since = time.monotonic()
        time.sleep(chance.uniform(0.1, 4 * SILENCE_S))
        worker.resume()
        self.stopped.append((since, time.monotonic()))
        return "SIGSTOP of a worker"

    def end(self, seconds: float) -> dict[str, Any]:
        """Let it come to its end.

        Raises:
            RuntimeError: it does not.
        """
        (self.folder / "stop").touch()
        self.process.join(seconds)
        if self.process.exitcode != 0:
            code = self.process.exitcode
            self.close()
            raise RuntimeError(
                f"Training ended with {code} instead of by itself (None: not in {seconds:g} s):\n{self.output()}"
            )
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        output = self.output(None)
        return {
            **result,
            "servers_killed": self.servers_killed,
            "stopped": self.stopped,
            "back": output.count("has rejoined"),
            "restored": output.count("A replacement is being started"),
        }

    def close(self) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGTERM)
            self.process.join(20)
            self.process.kill()


def disturbed(
    program: str,
    workers: int,
    servers: int,
    faults: int,
    chance: random.Random,
    epochs: int | None,
    who: tuple[str, ...] = ("workers",),
    calm_s: float = 0.0,
) -> dict[str, Any]:
    """Train with faults, and between them without for so many seconds."""
    with tempfile.TemporaryDirectory() as name:
        job = Job(program, workers, servers, Path(name), epochs)
        done: Counter[str] = Counter()
        try:
            for _ in range(faults):
                time.sleep(calm_s)
                try:
                    done[job.disturb(chance, who)] += 1
                except (psutil.NoSuchProcess, FileNotFoundError):  # training is over
                    break
            time.sleep(calm_s)
            result = job.end(600)
            saved = load_all(Path(name) / "checkpoints")
        finally:
            job.close()
    counted = ", ".join(f"{count} x {what}" for what, count in sorted(done.items())) or "no faults"
    where = f"{program}, {servers} server{'s' * (servers > 1)}"
    came = f"{result['back']} times a worker rejoined, {result['restored']} times a server was replaced"
    chiefs = f"worker 0 {'was killed' if 0 in job.killed else 'lived'}, {saved} checkpoints load"
    CONSOLE.print(f"{where}: {counted}; {result['epochs']} epochs, {came}; {chiefs}")
    pauses = _pauses(result["servers_killed"], result["pushes"])
    if servers == 1 and pauses:  # else the other server goes on taking pushes
        spread = f"{statistics.median(pauses):.1f} s ({min(pauses):.1f} to {max(pauses):.1f}, {len(pauses)} of them)"
        CONSOLE.print(f"  from a server's death to the next update that is applied: {spread}")
    return {**result, "killed": done["SIGKILL of a worker"]}


def load_all(folder: Path) -> int:
    """The number of checkpoints in a folder, all of which load. Raises if one does not, or if there is none."""
    files = list(folder.glob("*.ckpt"))
    if not files:
        raise RuntimeError("No checkpoint was written.")
    for file in files:
        assert torch.load(file, weights_only=False)["state_dict"], file
    return len(files)


def _pauses(killed: list[float], pushes: list[float]) -> list[float]:
    """Seconds from a server's death until worker 0 knows of the next push, where no other server died meanwhile."""
    found = []
    for death, following in itertools.pairwise([*killed, math.inf]):
        after = next((push for push in pushes if push > death + IN_FLIGHT_S), math.inf)
        if after < following:
            found.append(after - death)
    return found


def count(workers: int, servers: int, faults: int, chance: random.Random, who: tuple[str, ...]) -> bool:
    """Whether every sample was applied once per epoch, but for what kills may have cut in two."""
    result = disturbed("counts", workers, servers, faults, chance, None, who)
    epochs = result["epochs"]
    lost = sum(abs(epochs - times) * samples for times, samples in result["seen"])
    allowed = 0 if servers == 1 else result["killed"] * NSYNC * BATCH
    fine = bool(lost <= allowed)
    verdict = "[green]PASS[/]" if fine else "[red]FAIL[/]"
    text = f"of {1000 * epochs} samples {lost:g} were not applied exactly once (allowed: {allowed})"
    CONSOLE.print(f"{verdict}  {text}" if lost else f"{verdict}  all {1000 * epochs} samples were applied exactly once")
    return fine


def pace(result: dict[str, Any], workers: int) -> float:
    """Samples per second of a living worker."""
    begun, ended = result["begun"], result["ended"]
    idle = sum(min(until, ended) - max(since, begun) for since, until in result["stopped"] if since < ended)
    return float(result["epochs"] * SAMPLES["speed"] / (workers * (ended - begun) - idle))


def speed(workers: int, faults: int, chance: random.Random) -> bool:
    """Whether the living train nearly as fast with faults as without."""
    quiet = pace(disturbed("speed", workers, 2, 2, chance, None, ("nobody",), CALM_S), workers)
    loud = pace(disturbed("speed", workers, 2, faults, chance, None, ("workers", "servers"), CALM_S), workers)
    fine = loud >= LEAST * quiet
    verdict = "[green]PASS[/]" if fine else "[red]FAIL[/]"
    CONSOLE.print(
        f"{verdict}  {loud:.1f} samples/s per living worker with faults, {quiet:.1f} without: {loud / quiet:.2f} of it"
    )
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("counts", "digits", "speed"))
    args = parser.parse_args()
    clean_environment()
    torch.set_num_threads(1)
    chance = random.Random(args.seed)
    share = max(1, args.faults // 5)
    both = ("workers", "servers")
    good = True
    with told_of_errors(CONSOLE):
        if args.only in (None, "counts"):
            good &= count(args.workers, 1, share, chance, ("workers",))
            good &= count(args.workers, 2, share, chance, ("workers",))
            good &= count(args.workers, 2, share, chance, ("servers",))
            good &= count(args.workers, 1, share, chance, both)
        if args.only in (None, "digits"):
            epochs = max(20, 12 * share)
            quiet = disturbed("digits", args.workers, 2, 0, chance, epochs)["metrics"]["val_acc"]
            loud = disturbed("digits", args.workers, 2, share, chance, epochs, both)["metrics"]["val_acc"]
            near = loud >= quiet - 0.01
            good &= near
            verdict = "[green]PASS[/]" if near else "[red]FAIL[/]"
            CONSOLE.print(f"{verdict}  digits: accuracy {loud:.3f} with faults, {quiet:.3f} without")
        if args.only in (None, "speed"):
            good &= speed(args.workers, max(1, share // 2), chance)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
