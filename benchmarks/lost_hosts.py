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
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

import psutil
import torch
from common import CONSOLE, prepared, verdict
from counts import Report, not_once
from jobs import Processes, quiet
from network import Network, cut, machines, pull
from pytorch_lightning.callbacks import ModelCheckpoint
from storm import BATCH, NEAR, NSYNC, SILENCE_S, train

from lightning_asgd import Timeouts

WORKERS, LEFT, SERVERS = 8, 3, 2
SAMPLES, EPOCHS = 2000, 15
FAULTS = ("kill host", "lose host's machine", "kill worker", "suspend worker", "cut off worker")
OUTAGE_S = 30.0  # longer than it takes until a worker looks for another host


def work(network: Network, rank: int, folder: Path, transport: str, program: str, epochs: int | None) -> None:
    """One worker, started on its machine as somebody would by hand."""
    network.enter(rank)
    quiet(folder / f"{rank}.log")
    os.environ.update(NODE_RANK=str(rank), MASTER_ADDR=network.addresses[0], MASTER_PORT="29500")
    report = Report(folder / f"{rank}.json", endless=epochs is None, together=True)
    about = {"num_servers": SERVERS, "transport": transport, "num_nodes": WORKERS, "enable_checkpointing": True}
    timeouts = Timeouts(silence_s=SILENCE_S, start_s=30.0)
    saves = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=50, save_last=True)
    strategy = train(SAMPLES, program, report, epochs, timeouts=timeouts, callbacks=[saves], **about)
    report.tell(lost=sorted(strategy.stats.lost_workers))


class Job(Processes):
    """The workers, each of which is named by its rank, and what is done to them."""

    def __init__(self, network: Network, folder: Path, transport: str, program: str, epochs: int | None) -> None:
        super().__init__(folder)
        self.network, self.living, self.killed = network, set(range(WORKERS)), 0
        for rank in range(WORKERS):
            self.fork(str(rank), work, network, rank, folder, transport, program, epochs)
        self.wait(lambda: all(self.told(rank) for rank in self.living), 120, "training")

    def failed(self) -> list[str]:
        """See :class:`Processes`; who was killed or cut off may fail."""
        return [name for name in super().failed() if int(name) in self.living]

    def train(self) -> float:
        """Wait until every living worker has completed two more exchanges; returns the seconds."""
        return self.more_exchanges([*map(str, self.living)], 150)

    def disturb(self, kind: str, chance: random.Random) -> str:
        """One fault, and what came of it."""
        host = min(self.living)
        rank = chance.choice(sorted(self.living - {host})) if kind.endswith("worker") else host
        process = psutil.Process(self.processes[str(rank)].pid)
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


def run(
    transport: str, program: str, chance: random.Random, *, faults: Sequence[str], epochs: int | None
) -> dict[str, Any]:
    """Train, with faults until few workers are left, and return what came out."""
    with machines(WORKERS) as network, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        job = Job(network, Path(folder), transport, program, epochs)
        stack.callback(job.close)
        while faults and len(job.living) > LEFT:
            for kind in chance.sample(faults, len(faults)):
                if len(job.living) > LEFT:
                    time.sleep(chance.uniform(0.5, 3.0))
                    CONSOLE.print(f"  {job.disturb(kind, chance)}", style="dim")
        told = job.end([*map(str, sorted(job.living))], 60 + 30 * (epochs or 0))[0]
        checkpoint = torch.load(job.folder / "checkpoints" / "last.ckpt", weights_only=False)
        return {**told, "killed": job.killed, "left": len(job.living), "step": checkpoint["global_step"]}


def counts(transport: str, chance: random.Random, faults: Sequence[str]) -> bool:
    """Whether nothing is lost."""
    done = run(transport, "counts", chance, faults=faults, epochs=None)
    allowed, wrong = done["killed"] * NSYNC * BATCH, not_once(done)
    text = f"{done['killed']} workers lost, the hosts of the servers among them; {done['left']} were left"
    text += f"; of {SAMPLES * done['epochs']} samples {wrong} were not applied once (allowed: {allowed})"
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
    with machines(WORKERS) as network, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        job = Job(network, Path(folder), transport, "counts", None)
        stack.callback(job.close)
        away = range(WORKERS // 2, WORKERS)
        for rank in away:  # one by one from the rest, and from each other: no side has more than half
            cut(network, rank)
        job.living -= set(away)
        took = job.train()
        begun = time.monotonic()
        for rank in away:
            job.processes[str(rank)].join(120)
        ended = time.monotonic() - begun
        told = job.end([*map(str, sorted(job.living))], 120)[0]
        codes = {rank: job.processes[str(rank)].exitcode for rank in range(WORKERS)}
        wrote = [rank for rank in away if "has written the checkpoint" in job.said(rank)]
    exact = told["seen"] == [[float(told["epochs"]), SAMPLES]]
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
    chance, good = random.Random(args.seed), True
    chosen, faults = args.only or ["counts", "digits", "split"], args.fault or list(FAULTS)
    with prepared(one_thread=True, secret=True, machines=True):
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
