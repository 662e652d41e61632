"""Worker 0, and each worker that hosts the servers after it, is lost with its process or its machine.

    python benchmarks/lost_hosts.py                       # both transports: ten minutes, as root under Linux
    python benchmarks/lost_hosts.py --only counts --transport zmq

A job of eight workers on eight machines (network namespaces), of which the first hosts two servers. Faults happen at
random moments, by seed: the host's process is killed; the host's machine vanishes (its cable is unplugged, then all its
processes are killed); a worker is killed; a worker is suspended for up to twice `silence_s`; a worker's cable is
unplugged for 30 s. They end when three workers are left.

Training a sample adds 1 to that sample's parameter, and pushes are added in full. At the end every sample must have
been applied exactly once per epoch, except for a killed worker's last push, which may have reached only one of the
servers. The checkpoint that was written last must load. Then digits are trained with and without these faults: the
accuracies must be within 0.01 of each other. At last the network splits, four workers on each side: the side with the
servers must go on, and the other must end with an error and a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

import psutil
import pytorch_lightning as pl
import torch
from counts import Counts, Diary
from network import Network, available, cut, machines, pull
from pytorch_lightning.callbacks import ModelCheckpoint
from ranks import clean_environment, end_all, told_of_errors
from rich.console import Console
from rich.markup import escape
from storm import NEAR, SlowDigits, loaders, verdict
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import ASGDStrategy, Timeouts
from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.algorithms.config import SECRET_ENV

WORKERS, LEFT, SERVERS = 8, 3, 2
SILENCE_S, NSYNC, BATCH, STEP_S = 2.0, 5, 2, 0.03
SAMPLES, EPOCHS = 2000, 15
FAULTS = ("kill host", "lose host's machine", "kill worker", "suspend worker", "cut off worker")
OUTAGE_S = 30.0  # longer than it takes until a worker looks for another host
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


class Report(Diary):
    """Tells how far a worker is, and what came out; ends training at the end of an epoch when asked to."""

    def __init__(self, folder: Path, rank: int, epochs: int | None) -> None:
        super().__init__(folder / f"{rank}.json", pushes=-1)
        self.epochs = epochs

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.stats.pushes != self.told["pushes"]:
            self.tell(pushes=trainer.strategy.stats.pushes)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.epochs is None:
            trainer.should_stop |= trainer.strategy.broadcast((self.file.parent / "stop").exists())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        seen = sorted(Counter(pl_module.seen.tolist()).items()) if isinstance(pl_module, Counts) else []
        self.tell(ended=True, epochs=trainer.current_epoch, metrics=metrics, seen=seen)


def work(network: Network, rank: int, folder: Path, transport: str, program: str, epochs: int | None) -> None:
    """One worker, started on its machine as somebody would by hand."""
    network.enter(rank)
    with (folder / f"{rank}.log").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    os.environ.update(NODE_RANK=str(rank), MASTER_ADDR=network.addresses[0], MASTER_PORT="29500")
    pl.seed_everything(1, verbose=False)
    strategy = ASGDStrategy(
        NSYNC,
        algorithm=ASGD("sum") if program == "counts" else None,
        num_servers=SERVERS,
        transport=transport,
        timeouts=Timeouts(silence_s=SILENCE_S, start_s=30.0),
    )
    report = Report(folder, rank, epochs)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=WORKERS,
        strategy=strategy,
        max_epochs=epochs or 1_000_000,
        callbacks=[report, ModelCheckpoint(folder / "checkpoints", every_n_train_steps=50, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    if program == "digits":
        trainer.fit(SlowDigits(), *loaders(batch_size=16))
    else:
        trainer.fit(Counts(SAMPLES, STEP_S), DataLoader(TensorDataset(torch.arange(SAMPLES)), BATCH, shuffle=True))
    report.tell(lost=sorted(strategy.stats.lost_workers))


class Job:
    """The workers, and what is done to them."""

    def __init__(self, network: Network, folder: Path, transport: str, program: str, epochs: int | None) -> None:
        self.network, self.folder = network, folder
        fork = multiprocessing.get_context("fork").Process
        self.workers = {
            rank: fork(target=work, args=(network, rank, folder, transport, program, epochs)) for rank in range(WORKERS)
        }
        self.living = set(self.workers)
        self.killed = 0
        for process in self.workers.values():
            process.start()
        self.wait(lambda: all(self.told(rank) for rank in self.living), 120, "training")

    def told(self, rank: int) -> dict[str, Any]:
        """What a worker has told."""
        file = self.folder / f"{rank}.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def said(self, rank: int) -> str:
        """What a worker has printed."""
        return (self.folder / f"{rank}.log").read_text(errors="replace")

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> None:
        """Wait for something while all live that should. Raises a ``RuntimeError`` if it does not happen in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            dead = [rank for rank in self.living if self.workers[rank].exitcode not in (None, 0)]
            if dead or time.monotonic() > deadline:
                why = f"worker {dead[0]} ended" if dead else f"not within {seconds:g} s"
                last = "\n".join(f"{rank}: {self.said(rank)[-1500:]}" for rank in dead or sorted(self.living))
                raise RuntimeError(f"No {what}: {why}.\n{last}")
            time.sleep(0.05)

    def train(self) -> float:
        """Wait until every living worker has completed two more exchanges; returns the seconds."""
        begun, before = time.monotonic(), {rank: self.told(rank)["pushes"] for rank in self.living}
        done = lambda: all(self.told(r)["pushes"] > p + 1 or self.told(r).get("ended") for r, p in before.items())  # noqa: E731
        self.wait(done, 150, "training")
        return time.monotonic() - begun

    def disturb(self, kind: str, chance: random.Random) -> str:
        """One fault, and what came of it."""
        host = min(self.living)
        rank = chance.choice(sorted(self.living - {host})) if kind.endswith("worker") else host
        process = psutil.Process(self.workers[rank].pid)
        if kind == "suspend worker":
            process.suspend()
            time.sleep(chance.uniform(0.1, 2 * SILENCE_S))
            process.resume()
        elif kind == "cut off worker":
            pull(self.network, rank, OUTAGE_S)
        else:
            self.killed += 1
            self.living.discard(rank)
            if "machine" in kind:
                cut(self.network, rank)
                time.sleep(1.0)  # nothing that it would send at its end gets out
            for each in (process, *process.children(recursive=True)) if "machine" in kind else (process,):
                with contextlib.suppress(psutil.Error):
                    each.kill()
        return f"{kind} ({rank}): all train again after {self.train():.1f} s"

    def close(self) -> None:
        """End all processes."""
        end_all(self.workers.values())


def run(
    transport: str, program: str, chance: random.Random, *, faults: Sequence[str], epochs: int | None
) -> dict[str, Any]:
    """Train, with faults until few workers are left, and return what came out."""
    with machines(WORKERS) as network, tempfile.TemporaryDirectory() as folder:
        job = Job(network, Path(folder), transport, program, epochs)
        try:
            while faults and len(job.living) > LEFT:
                for kind in chance.sample(faults, len(faults)):
                    if len(job.living) > LEFT:
                        time.sleep(chance.uniform(0.5, 3.0))
                        CONSOLE.print(f"  {job.disturb(kind, chance)}", style="dim")
            (job.folder / "stop").touch()
            job.wait(
                lambda: all(job.workers[r].exitcode is not None for r in job.living), 60 + 30 * (epochs or 0), "end"
            )
            checkpoint = torch.load(job.folder / "checkpoints" / "last.ckpt", weights_only=False)
            told = job.told(min(job.living))
            return {**told, "killed": job.killed, "left": len(job.living), "step": checkpoint["global_step"]}
        finally:
            job.close()


def counts(transport: str, chance: random.Random, faults: Sequence[str]) -> bool:
    """Whether nothing is lost."""
    done = run(transport, "counts", chance, faults=faults, epochs=None)
    epochs, allowed = done["epochs"], done["killed"] * NSYNC * BATCH
    wrong = sum(abs(epochs - times) * samples for times, samples in done["seen"])
    text = f"{done['killed']} workers lost, the hosts of the servers among them; {done['left']} were left"
    text += f"; of {SAMPLES * epochs} samples {wrong:g} were not applied once (allowed: {allowed})"
    fine = wrong <= allowed and len(done["lost"]) == done["killed"] and done["step"] > 0
    return verdict(fine, f"{transport}: {text}; named as lost: {done['lost']}")


def digits(transport: str, chance: random.Random, faults: Sequence[str]) -> bool:
    """Whether as many epochs teach digits as well."""
    quiet, loud = (
        run(transport, "digits", chance, faults=each, epochs=EPOCHS)["metrics"]["val_acc"] for each in ((), faults)
    )
    return verdict(loud >= quiet - NEAR, f"{transport}: digits: accuracy {loud:.3f} with faults, {quiet:.3f} without")


def split(transport: str) -> bool:
    """Whether one side of a network that splits goes on, and the other ends."""
    with machines(WORKERS) as network, tempfile.TemporaryDirectory() as folder:
        job = Job(network, Path(folder), transport, "counts", None)
        away = range(WORKERS // 2, WORKERS)
        try:
            for rank in away:  # one by one from the rest, and from each other: no side has more than half
                cut(network, rank)
            job.living -= set(away)
            took = job.train()
            begun = time.monotonic()
            for rank in away:
                job.workers[rank].join(120)
            ended = time.monotonic() - begun
            (job.folder / "stop").touch()
            job.wait(lambda: all(job.workers[rank].exitcode is not None for rank in job.living), 120, "end")
            codes = {rank: job.workers[rank].exitcode for rank in range(WORKERS)}
            wrote = [rank for rank in away if "has written the checkpoint" in job.said(rank)]
            seen, epochs = job.told(0)["seen"], job.told(0)["epochs"]
        finally:
            job.close()
    exact = seen == [[float(epochs), SAMPLES]]
    fine = exact and set(codes.values()) == {0, 1} and all(codes[rank] == 1 for rank in away) and len(wrote) > 0
    text = f"a split: worker 0's side trains after {took:.1f} s, the others end after {ended:.0f} s with exit code 1"
    return verdict(fine, f"{transport}: {text}; codes {codes}, checkpoints by {wrote}, samples exact: {exact}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("counts", "digits", "split"), action="append")
    parser.add_argument("--transport", choices=("rpc", "zmq"), help="the default is both")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="the default is all of them, in random order")
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
    chosen, faults = args.only or ["counts", "digits", "split"], args.fault or list(FAULTS)
    with told_of_errors(CONSOLE):
        for transport in [args.transport] if args.transport else ["rpc", "zmq"]:
            if "counts" in chosen:
                good &= counts(transport, chance, faults)
            if "digits" in chosen:
                good &= digits(transport, chance, faults)
            if "split" in chosen:
                good &= split(transport)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
