"""Kill, suspend and disconnect workers and servers of a run, each on its own machine.

    python benchmarks/storm.py                 # 60 faults in half an hour
    python benchmarks/storm.py --short         # 5 faults in a minute, also without root; speed is not measured

`lightning-asgd serve` hosts a run on one machine (a network namespace), with two servers; eight workers attach from
eight other machines, over one switch. Faults happen at random moments, by seed: SIGKILL of a worker, which a new worker
replaces, or of a server; SIGSTOP of a worker or a server, and SIGCONT after up to four times `silence_s`; and the cable
of a worker or of the servers is unplugged for as long. Needs Linux and root; without them ``--short`` runs all
processes on one machine, without cables.

Training a sample adds 1 to that sample's parameter, and pushes are added in full. At the end

* every sample must have been applied exactly once per epoch, except for a killed worker's last push, which may have
reached only one of the servers; * the version must count every update that was acknowledged to a worker; * the samples
trained per second of a living worker must be 0.9 of those without faults. A worker is living if it is neither suspended
nor killed nor disconnected, even if it waits for others. A worker whose servers are suspended or disconnected does not
count.

Then digits are trained with and without faults: the accuracies must be within 0.01 of each other.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

import psutil
import pytorch_lightning as pl
import torch
from common import CONSOLE, prepared, verdict
from counts import ENDLESS, Counts, Report, fit, not_once, numbers
from jobs import Processes, quiet
from network import Network, available, machines, pull

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from digits import DigitsCNN, loaders

from lightning_asgd import ASGDStrategy, Timeouts
from lightning_asgd.algorithms import ASGD

SERVERS = 2
SILENCE_S = 2.0
NSYNC, BATCH, STEP_S = 5, 2, 0.03
SAMPLES = 500  # per worker
EPOCHS, DIGITS_STEP_S = 40, 0.2  # of digits: long enough for some faults
LEAST = 0.9  # of the speed without faults
NEAR = 0.01  # to the accuracy without faults
KINDS = ("kill worker", "kill server", "stop worker", "stop server", "cut worker", "cut servers")
SHORT = {"faults": 5, "workers": 3, "calm": 4.0, "only": "counts"}


class SlowDigits(DigitsCNN):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(DIGITS_STEP_S)
        return super().training_step(batch, batch_idx)


def train(samples: int, program: str, report: Report, epochs: int | None, slower: float = 1.0, **options: Any) -> Any:
    """Train a program on this machine; returns the strategy. ``options`` are the strategy's and the Trainer's."""
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    about = {name: options.pop(name) for name in ("run", "transport", "num_servers", "timeouts") if name in options}
    about.setdefault("timeouts", Timeouts(silence_s=SILENCE_S * slower))
    strategy = ASGDStrategy(NSYNC, algorithm=None if program == "digits" else ASGD("sum"), **about)
    data: Any = loaders(batch_size=16) if program == "digits" else numbers(samples, BATCH)
    module = SlowDigits() if program == "digits" else Counts(samples, STEP_S * slower)
    callbacks = [report, *options.pop("callbacks", [])]
    fit(module, data, strategy=strategy, callbacks=callbacks, max_epochs=epochs or ENDLESS, **options)
    return strategy


def work(
    network: Network | None,
    machine: int,
    log: Path,
    samples: int,
    program: str,
    epochs: int | None,
    about: dict[str, Any],
) -> None:
    """Be a worker on a machine."""
    if network is not None:
        network.enter(machine)
    quiet(log)
    train(samples, program, Report(log.with_suffix(".json"), endless=epochs is None), epochs, **about)


class Run(Processes):
    """A run, its workers, and what is done to them.

    Args:
        network: machines, the servers' first; None: all is on this one.
        workers: number of them.
        folder: for what its processes tell.
        program: ``"counts"`` or ``"digits"``.
        transport: how messages are sent.
        epochs: to train; None: until :meth:`finish`.
    """

    def __init__(
        self, network: Network | None, workers: int, folder: Path, program: str, transport: str, epochs: int | None
    ) -> None:
        super().__init__(folder)
        self.network = network
        self._program = (program, epochs)
        self._kinds: list[str] = []  # of the next faults
        self.machines = range(1, workers + 1)
        self.names: dict[int, str] = {}  # of the present worker, by machine
        self.killed = 0
        self.gone: list[tuple[int, float, float]] = []  # machine, from when to when no worker lived there
        self.serve("serve", network, 0, "0/storm", f"--num-servers={SERVERS}", f"--transport={transport}")
        self.options = {"run": self.address(), "transport": transport}
        for machine in self.machines:
            self.start(machine)
        self.wait(lambda: all(self.told(name) for name in self.names.values()), 120, "training")
        self.begun, self.before = time.monotonic(), self.trained()

    def start(self, machine: int) -> None:
        """Start a worker on a machine."""
        name = self.names[machine] = f"{machine}-{self.killed}"
        about = self.folder / f"{name}.log", SAMPLES * len(self.machines), *self._program, self.options
        self.fork(name, work, self.network, machine, *about)

    def trained(self, what: str = "samples") -> int:
        """Samples that workers have trained, or ``"pushes"`` that they were told of."""
        return sum(self.told(file.stem)[what] for file in self.folder.glob("*.json"))

    def failed(self) -> list[str]:
        """See :class:`Processes`. `serve` may not end at all."""
        return [*super().failed(), *(["serve"] if self.processes["serve"].exitcode == 0 else [])]

    def ended(self) -> bool:
        """Whether a worker has ended."""
        return any(self.processes[name].exitcode is not None for name in self.names.values())

    def disturb(self, chance: random.Random) -> str:
        """One fault, and what it was. All kinds take turns, in random order."""
        if not self._kinds:
            self._kinds = [kind for kind in KINDS if self.network is not None or not kind.startswith("cut")]
            chance.shuffle(self._kinds)
        kind, machine, seconds = self._kinds.pop(), chance.choice(self.machines), chance.uniform(0.1, 4 * SILENCE_S)
        name = self.names[machine]
        if kind == "kill worker":
            process = self.processes.pop(name)
            process.kill()
            process.join()
            since = time.monotonic()
            self.killed += 1
            self.start(machine)
            until = self.wait(lambda: self.told(self.names[machine]), 60, f"training of worker {self.names[machine]}")
            self.gone.append((machine, since, until))
        elif kind == "kill server":
            # Where a worker was killed just before, and is not missed yet, the new server waits a minute for its word.
            chance.choice(self.servers("serve", SERVERS)).kill()
            self.more_exchanges([*self.names.values()])
        else:
            with self.without([machine] if "worker" in kind else self.machines):
                if "cut" in kind:
                    assert self.network is not None
                    pull(self.network, machine if "worker" in kind else 0, seconds)
                else:
                    worker = psutil.Process(self.processes[name].pid)
                    process = worker if "worker" in kind else chance.choice(self.servers("serve", SERVERS))
                    process.suspend()
                    try:
                        time.sleep(seconds)
                    finally:
                        process.resume()
        self.check()
        return kind

    @contextlib.contextmanager
    def without(self, machines: Any) -> Iterator[None]:
        """While this lasts workers there do not count as living."""
        since = time.monotonic()
        yield
        self.gone += [(machine, since, time.monotonic()) for machine in machines]

    def finish(self, seconds: float) -> dict[str, Any]:
        """Let all workers come to the end of an epoch, and tell what came out."""
        ended, after = time.monotonic(), self.trained()
        last = max(self.end([*self.names.values()], seconds), key=lambda told: told["epochs"])
        # Faults of one kind follow each other, so that no second in which a worker was gone counts twice.
        gone = sum(until - since for _, since, until in self.gone)
        lived = len(self.machines) * (ended - self.begun) - gone
        return {**last, "pace": (after - self.before) / lived, "told": self.trained("pushes"), "killed": self.killed}


def run(
    program: str,
    args: argparse.Namespace,
    faults: int,
    chance: random.Random,
    *,
    calm_s: float,
    epochs: int | None = None,
) -> dict[str, Any]:
    """Train with so many faults, and without between them for so many seconds."""
    done: Counter[str] = Counter()
    places = contextlib.nullcontext() if args.one_machine else machines(args.workers + 1)
    with places as network, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        job = Run(network, args.workers, Path(folder), program, args.transport, epochs)
        stack.callback(job.close)
        time.sleep(calm_s)
        for number in range(faults):
            if job.ended():
                break
            what = job.disturb(chance)
            done[what] += 1
            CONSOLE.print(f"  {number + 1}/{faults} {what}", style="dim")
            time.sleep(calm_s * chance.uniform(0.5, 1.5))
            job.check()
        found = job.finish(600 + 60 * (epochs or 0))
    counted = ", ".join(f"{count} x {what}" for what, count in sorted(done.items())) or "no faults"
    CONSOLE.print(f"{program}, {args.workers} workers, {SERVERS} servers, {args.transport}: {counted}")
    return found


def count(args: argparse.Namespace, chance: random.Random) -> bool:
    """Whether nothing is lost, and how fast it goes."""
    loud = run("counts", args, args.faults, chance, calm_s=args.calm)
    allowed, wrong = loud["killed"] * NSYNC * BATCH, not_once(loud)
    trained = SAMPLES * args.workers * loud["epochs"]
    good = verdict(wrong <= allowed, f"of {trained} samples {wrong} were not applied once (allowed: {allowed})")
    versions = loud["versions"]
    good &= verdict(min(versions) >= loud["told"], f"workers were told of {loud['told']} updates; versions {versions}")
    if args.short:
        return good
    quiet = run("counts", args, 0, chance, calm_s=max(20.0, args.calm))
    share = loud["pace"] / quiet["pace"]
    text = f"{loud['pace']:.1f} samples/s per living worker with faults, {quiet['pace']:.1f} without: {share:.2f} of it"
    return verdict(share >= LEAST, text) and good


def learn(args: argparse.Namespace, chance: random.Random) -> bool:
    """Whether as many epochs teach digits as well."""
    quiet = run("digits", args, 0, chance, calm_s=0.0, epochs=EPOCHS)["metrics"]["val_acc"]
    loud = run("digits", args, args.faults, chance, calm_s=3.0, epochs=EPOCHS)["metrics"]["val_acc"]
    return verdict(loud >= quiet - NEAR, f"digits: accuracy {loud:.3f} with faults, {quiet:.3f} without")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--calm", type=float, default=25.0, metavar="SECONDS", help="between two faults")
    parser.add_argument("--transport", choices=("rpc", "zmq"), default="rpc")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("counts", "digits"))
    parser.add_argument("--short", action="store_true", help="as the tests run it")
    args = parser.parse_args()
    if args.short:
        vars(args).update(SHORT)
    args.one_machine = args.short and available() is not None
    chance, good = random.Random(args.seed), True
    with prepared(one_thread=True, secret=True, machines=not args.short):
        if args.only in (None, "counts"):
            good &= count(args, chance)
        if args.only in (None, "digits"):
            good &= learn(args, chance)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
