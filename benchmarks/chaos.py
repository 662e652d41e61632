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
import itertools
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

import psutil
import pytorch_lightning as pl
import torch
from common import CONSOLE, prepared, spread, verdict
from counts import ENDLESS, Counts, Report, fit, not_once, numbers
from jobs import Processes, quiet
from pytorch_lightning.callbacks import ModelCheckpoint
from ranks import servers_of

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


class Notes(Report):
    """Tells besides which process a worker is, and when worker 0 learnt of each push."""

    def __init__(self, folder: Path, epochs: int | None) -> None:
        super().__init__(folder / "worker", endless=epochs is None, together=True)
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.times += [time.monotonic()] * (trainer.strategy.stats.pushes - len(self.times))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.file = self.file.with_name(f"worker{trainer.global_rank}.json")
        self.tell(pid=os.getpid(), begun=time.monotonic())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.file = self.file.with_name("result.json")
            self.told.update(times=self.times, ended=time.monotonic())
            super().on_train_end(trainer, pl_module)


def train(program: str, workers: int, servers: int, folder: Path, epochs: int | None) -> None:
    """Be the main process of a job."""
    quiet(folder / "job.log")
    pl.seed_everything(1, verbose=False)
    strategy = ASGDStrategy(
        nsync=NSYNC,
        algorithm=None if program == "digits" else ASGD("sum"),
        num_servers=servers,
        start_method="fork",
        timeouts=Timeouts(silence_s=SILENCE_S),
    )
    callbacks = [Notes(folder, epochs), ModelCheckpoint(folder / "checkpoints", save_last=True)]
    module, data = DigitsCNN(), loaders(batch_size=16) if program == "digits" else numbers(SAMPLES[program], BATCH)
    if program in SAMPLES:
        module = Counts(SAMPLES[program], 0.005 if program == "counts" else 0.02)
    about = {"devices": workers, "max_epochs": epochs or ENDLESS, "enable_checkpointing": True}
    fit(module, data, strategy=strategy, callbacks=callbacks, **about)


class Job(Processes):
    """A job that trains, and what is done to its workers.

    Args:
        program: ``"counts"``, ``"speed"`` or ``"digits"``.
        workers: number of them.
        servers: number of them.
        folder: for what its processes tell.
        epochs: to train; None: until :meth:`finish`.
    """

    def __init__(self, program: str, workers: int, servers: int, folder: Path, epochs: int | None = None) -> None:
        super().__init__(folder)
        self.workers = workers
        self.killed: set[int] = set()
        self.servers_killed: list[float] = []  # when
        self.stopped: list[tuple[float, float]] = []  # from when to when a worker was
        self.fork("job", train, program, workers, servers, folder, epochs)
        self.wait(lambda: all(self.told(f"worker{rank}") for rank in range(workers)), 120, "training")

    def disturb(self, chance: random.Random, who: tuple[str, ...]) -> str:
        """One fault, and what it was.

        Args:
            chance: which, and when.
            who: ``"workers"``, ``"servers"``.
        """
        time.sleep(chance.uniform(0.5, 2.0))
        if who == ("nobody",):
            return "nothing"
        if chance.choice(who) == "servers":
            time.sleep(chance.uniform(0.0, 6.0))  # starting another one takes seconds
            servers = servers_of(psutil.Process(self.processes["job"].pid))
            if servers:
                chance.choice(servers).kill()
                self.servers_killed.append(time.monotonic())
            return "SIGKILL of a server"
        kill = chance.random() < 0.2 and len(self.killed) < self.workers // 2
        alive = [rank for rank in range(self.workers) if rank not in self.killed]
        rank = chance.choice(alive) if self.killed or not kill else 0  # which logs and writes the checkpoints
        worker = psutil.Process(self.told(f"worker{rank}")["pid"])
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

    def finish(self) -> dict[str, Any]:
        """Let it come to its end."""
        (self.folder / "stop").touch()
        self.wait(lambda: self.processes["job"].exitcode is not None, 600, "end")
        said = self.said("job")
        return {
            **self.told("result"),
            "servers_killed": self.servers_killed,
            "stopped": self.stopped,
            "back": said.count("has rejoined"),
            "restored": said.count("A replacement is being started"),
        }


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
                except psutil.NoSuchProcess:  # training is over
                    break
            time.sleep(calm_s)
            result = job.finish()
            saved = load_all(Path(name) / "checkpoints")
        finally:
            job.close()
    counted = ", ".join(f"{count} x {what}" for what, count in sorted(done.items())) or "no faults"
    where = f"{program}, {servers} server{'s' * (servers > 1)}"
    came = f"{result['back']} times a worker rejoined, {result['restored']} times a server was replaced"
    chiefs = f"worker 0 {'was killed' if 0 in job.killed else 'lived'}, {saved} checkpoints load"
    CONSOLE.print(f"{where}: {counted}; {result['epochs']} epochs, {came}; {chiefs}")
    pauses = _pauses(result["servers_killed"], result["times"])
    if servers == 1 and pauses:  # else the other server goes on taking pushes
        seconds = f"{spread(pauses, 1)} s, {len(pauses)} of them"
        CONSOLE.print(f"  from a server's death to the next update that is applied: {seconds}")
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
    samples, lost = SAMPLES["counts"] * result["epochs"], not_once(result)
    allowed = 0 if servers == 1 else result["killed"] * NSYNC * BATCH
    text = f"of {samples} samples {lost} were not applied exactly once (allowed: {allowed})"
    return verdict(lost <= allowed, text if lost else f"all {samples} samples were applied exactly once")


def pace(result: dict[str, Any], workers: int) -> float:
    """Samples per second of a living worker."""
    begun, ended = result["begun"], result["ended"]
    idle = sum(min(until, ended) - max(since, begun) for since, until in result["stopped"] if since < ended)
    return float(result["epochs"] * SAMPLES["speed"] / (workers * (ended - begun) - idle))


def speed(workers: int, faults: int, chance: random.Random) -> bool:
    """Whether the living train nearly as fast with faults as without."""
    quiet = pace(disturbed("speed", workers, 2, 2, chance, None, ("nobody",), CALM_S), workers)
    loud = pace(disturbed("speed", workers, 2, faults, chance, None, ("workers", "servers"), CALM_S), workers)
    text = f"{loud:.1f} samples/s per living worker with faults, {quiet:.1f} without: {loud / quiet:.2f} of it"
    return verdict(loud >= LEAST * quiet, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("counts", "digits", "speed"))
    args = parser.parse_args()
    chance = random.Random(args.seed)
    share = max(1, args.faults // 5)
    both = ("workers", "servers")
    good = True
    with prepared(one_thread=True):
        if args.only in (None, "counts"):
            good &= count(args.workers, 1, share, chance, ("workers",))
            good &= count(args.workers, 2, share, chance, ("workers",))
            good &= count(args.workers, 2, share, chance, ("servers",))
            good &= count(args.workers, 1, share, chance, both)
        if args.only in (None, "digits"):
            epochs = max(20, 12 * share)
            quiet = disturbed("digits", args.workers, 2, 0, chance, epochs)["metrics"]["val_acc"]
            loud = disturbed("digits", args.workers, 2, share, chance, epochs, both)["metrics"]["val_acc"]
            text = f"digits: accuracy {loud:.3f} with faults, {quiet:.3f} without"
            good &= verdict(loud >= quiet - 0.01, text)
        if args.only in (None, "speed"):
            good &= speed(args.workers, max(1, share // 2), chance)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
