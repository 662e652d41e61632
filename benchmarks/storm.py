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
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

import psutil
import pytorch_lightning as pl
import torch
from counts import Counts, Diary
from network import Network, available, machines, pull
from ranks import clean_environment, told_of_errors
from rich.console import Console
from rich.markup import escape
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from digits import DigitsCNN, loaders

from lightning_asgd import ASGDStrategy, Timeouts
from lightning_asgd.algorithms import ASGD
from lightning_asgd.cli.command_line import main as command
from lightning_asgd.core.algorithms.config import SECRET_ENV

SERVERS = 2
SILENCE_S = 2.0
NSYNC, BATCH, STEP_S = 5, 2, 0.03
SAMPLES = 500  # per worker
EPOCHS, DIGITS_STEP_S = 40, 0.2  # of digits: long enough for some faults
LEAST = 0.9  # of the speed without faults
NEAR = 0.01  # to the accuracy without faults
KINDS = ("kill worker", "kill server", "stop worker", "stop server", "cut worker", "cut servers")
SHORT = {"faults": 5, "workers": 3, "calm": 4.0, "only": "counts"}
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


# ---------------------------------------------------------------------- in processes of their own


class Report(Diary):
    """Tells what a worker was told of its pushes, and what came out; ends training when asked to, at an epoch's end."""

    def __init__(self, file: Path, epochs: int | None) -> None:
        super().__init__(file, trains=False, pushes=0, samples=0)
        self.epochs = epochs
        self.samples = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.samples += len(batch[0])
        if trainer.strategy.stats.pushes != self.told["pushes"] or not self.told["trains"]:
            self.tell(trains=True, pushes=trainer.strategy.stats.pushes, samples=self.samples)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.epochs is None:
            trainer.should_stop |= (self.file.parent / "stop").exists()
        self.tell(epochs=trainer.current_epoch + 1, at=time.monotonic())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
        seen = sorted(Counter(pl_module.seen.tolist()).items()) if isinstance(pl_module, Counts) else []
        pushes = trainer.strategy.stats.pushes
        versions = trainer.strategy.fit_session.synchronizer.versions
        self.tell(
            ended=True, epochs=trainer.current_epoch, metrics=metrics, seen=seen, pushes=pushes, versions=versions
        )


class SlowDigits(DigitsCNN):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(DIGITS_STEP_S)
        return super().training_step(batch, batch_idx)


def quiet(file: Path) -> None:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with file.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def serve(network: Network | None, folder: Path, transport: str) -> None:
    host = "127.0.0.1"
    if network is not None:
        network.enter(0)
        host = network.addresses[0]
    quiet(folder / "serve.log")
    sys.exit(command(["serve", f"{host}:0/storm", f"--num-servers={SERVERS}", f"--transport={transport}"]))


def work(
    network: Network | None,
    machine: int,
    address: str,
    samples: int,
    folder: Path,
    name: str,
    program: str,
    transport: str,
    epochs: int | None,
    slower: float = 1.0,
) -> None:
    if network is not None:
        network.enter(machine)
    quiet(folder / f"{name}.log")
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    strategy = ASGDStrategy(
        NSYNC,
        algorithm=None if program == "digits" else ASGD("sum"),
        run=address,
        transport=transport,
        timeouts=Timeouts(silence_s=SILENCE_S * slower),
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=epochs or 1_000_000,
        callbacks=[Report(folder / f"{name}.json", epochs)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    if program == "digits":
        trainer.fit(SlowDigits(), *loaders(batch_size=16))
    else:
        data = DataLoader(TensorDataset(torch.arange(samples)), BATCH, shuffle=True)
        trainer.fit(Counts(samples, STEP_S * slower), data)


# ---------------------------------------------------------------------- the run


class Run:
    """A run, its workers, and what is done to them.

    Args:
        network: machines, the servers' first; None: all is on this one.
        workers: number of them.
        folder: for what its processes tell.
        program: ``"counts"`` or ``"digits"``.
        transport: how messages are sent.
        epochs: to train; None: until :meth:`end`.
    """

    def __init__(
        self, network: Network | None, workers: int, folder: Path, program: str, transport: str, epochs: int | None
    ) -> None:
        self.network, self.folder = network, folder
        self._about = (program, transport, epochs)
        self._fork = multiprocessing.get_context("fork").Process
        self._kinds: list[str] = []  # of the next faults
        self.machines = range(1, workers + 1)
        self.workers: dict[int, Any] = {}  # by machine, the present one
        self.names: dict[int, str] = {}  # theirs
        self.killed = 0
        self.gone: list[tuple[int, float, float]] = []  # machine, from when to when no worker lived there
        self.server = self._fork(target=serve, args=(network, folder, transport))
        self.server.start()
        log = folder / "serve.log"
        self.wait(lambda: log.exists() and 'run="' in log.read_text(), 60, "the servers' start")
        self.address = log.read_text().partition('run="')[2].partition('"')[0]
        for machine in self.machines:
            self.start(machine)
        self.wait(lambda: all(self.told(name).get("trains") for name in self.names.values()), 120, "training")
        self.begun = time.monotonic()
        self.before = self.trained()

    def start(self, machine: int) -> None:
        """Start a worker on a machine."""
        name = f"{machine}-{self.killed}"
        samples = SAMPLES * len(self.machines)
        where = self.network, machine, self.address, samples, self.folder, name
        process = self._fork(target=work, args=(*where, *self._about))
        process.start()
        self.workers[machine], self.names[machine] = process, name

    def told(self, name: str) -> dict[str, Any]:
        """What a worker has told."""
        file = self.folder / f"{name}.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def trained(self, what: str = "samples") -> int:
        """Samples that workers have trained, or ``"pushes"`` that they were told of."""
        return sum(json.loads(file.read_text())[what] for file in self.folder.glob("*.json"))

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> None:
        """Wait for something while nobody fails.

        Raises:
            RuntimeError: it did not happen in time, or a process failed.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not happen within {seconds:g} s.\n{self.last_words()}")
            self.check()
            time.sleep(0.05)

    def check(self) -> None:
        """Whether all live that should."""
        for machine, process in self.workers.items():
            if process.exitcode not in (None, 0):
                name = self.names[machine]
                raise RuntimeError(f"Worker {name} ended with {process.exitcode}:\n{self.last_words(name)}")
        if self.server.exitcode is not None:
            raise RuntimeError(f"serve ended with {self.server.exitcode}:\n{self.last_words('serve')}")

    def last_words(self, name: str = "*") -> str:
        texts = [f"{file.name}: {file.read_text()[-1500:]}" for file in sorted(self.folder.glob(f"{name}.log"))]
        return "\n".join(texts)

    # ------------------------------------------------------------------ faults

    def disturb(self, chance: random.Random) -> str:
        """One fault, and what it was. All kinds take turns, in random order."""
        if not self._kinds:
            self._kinds = [kind for kind in KINDS if self.network is not None or not kind.startswith("cut")]
            chance.shuffle(self._kinds)
        kind = self._kinds.pop()
        machine = chance.choice(self.machines)
        seconds = chance.uniform(0.1, 4 * SILENCE_S)
        worker = psutil.Process(self.workers[machine].pid)
        if kind == "kill worker":
            worker.kill()
            self.workers[machine].join()
            since = time.monotonic()
            self.killed += 1
            self.start(machine)
            name = self.names[machine]
            self.wait(lambda: self.told(name).get("trains"), 60, f"the training of worker {name}")
            self.gone.append((machine, since, time.monotonic()))
        elif kind == "kill server":
            chance.choice(self.servers()).kill()
            self._wait_for_updates()
        elif kind == "stop worker":
            with self.without([machine]), _stopped(worker):
                time.sleep(seconds)
        elif kind == "stop server":
            with self.without(self.machines), _stopped(chance.choice(self.servers())):
                time.sleep(seconds)
        elif kind == "cut worker":
            with self.without([machine]):
                self._pull(machine, seconds)
        else:
            with self.without(self.machines):
                self._pull(0, seconds)
        self.check()
        return kind

    def _wait_for_updates(self) -> None:
        """Until every worker was told of two more: one may have been under way.

        Where a worker was killed just before, and is not missed yet, the new server waits a minute for its word.
        """
        before = {name: self.told(name)["pushes"] for name in self.names.values()}
        seconds, what = 90, "an update with the replacement"
        self.wait(lambda: all(self.told(name)["pushes"] > pushes + 1 for name, pushes in before.items()), seconds, what)

    def _pull(self, machine: int, seconds: float) -> None:
        assert self.network is not None
        pull(self.network, machine, seconds)

    def servers(self) -> list[psutil.Process]:
        """Those that serve. One that is kept ready, for the next that dies, is the youngest."""
        found: list[psutil.Process] = []
        while not found:
            for process in psutil.Process(self.server.pid).children():
                with contextlib.suppress(psutil.Error):
                    if "lightning_asgd.core.server.process" in process.cmdline():
                        found.append(process)
        return sorted(found, key=psutil.Process.create_time)[:SERVERS]

    @contextlib.contextmanager
    def without(self, machines: Any) -> Iterator[None]:
        """While this lasts workers there do not count as living."""
        since = time.monotonic()
        yield
        self.gone += [(machine, since, time.monotonic()) for machine in machines]

    # ------------------------------------------------------------------ the end

    def end(self, seconds: float) -> dict[str, Any]:
        """Let all workers come to the end of an epoch, and tell what came out.

        Raises:
            RuntimeError: they do not.
        """
        ended, after = time.monotonic(), self.trained()
        (self.folder / "stop").touch()
        done = self.workers.values()
        self.wait(lambda: all(p.exitcode is not None for p in done), seconds, "the end")
        self.check()
        results = [self.told(name) for name in self.names.values()]
        if not all(told.get("ended") for told in results):
            raise RuntimeError(f"A worker has not reported how it ended.\n{self.last_words()}")
        last = max(results, key=lambda told: told["epochs"])
        lived = sum(self._lived(machine, ended) for machine in self.machines)
        return {**last, "pace": (after - self.before) / lived, "told": self.trained("pushes"), "killed": self.killed}

    def _lived(self, machine: int, ended: float) -> float:
        """Seconds in which there was a worker on a machine; faults of one kind follow each other."""
        return ended - self.begun - sum(until - since for where, since, until in self.gone if where == machine)

    def close(self) -> None:
        for process in (*self.workers.values(), self.server):
            process.terminate()
        for process in (*self.workers.values(), self.server):
            process.join(10)
            process.kill()


@contextlib.contextmanager
def _stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


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
    with places as network, tempfile.TemporaryDirectory() as folder:
        job = Run(network, args.workers, Path(folder), program, args.transport, epochs)
        try:
            time.sleep(calm_s)
            for number in range(faults):
                if any(process.exitcode is not None for process in job.workers.values()):
                    break
                what = job.disturb(chance)
                done[what] += 1
                CONSOLE.print(f"  {number + 1}/{faults} {what}", style="dim")
                time.sleep(calm_s * chance.uniform(0.5, 1.5))
                job.check()
            return job.end(600 + 60 * (epochs or 0))
        finally:
            job.close()
            counted = ", ".join(f"{count} x {what}" for what, count in sorted(done.items())) or "no faults"
            CONSOLE.print(f"{program}, {args.workers} workers, {SERVERS} servers, {args.transport}: {counted}")


def verdict(fine: bool, text: str) -> bool:
    CONSOLE.print(f"{'[green]PASS[/]' if fine else '[red]FAIL[/]'}  {text}")
    return fine


def count(args: argparse.Namespace, chance: random.Random) -> bool:
    """Whether nothing is lost, and how fast it goes."""
    loud = run("counts", args, args.faults, chance, calm_s=args.calm)
    epochs, allowed = loud["epochs"], loud["killed"] * NSYNC * BATCH
    wrong = sum(abs(epochs - times) * samples for times, samples in loud["seen"])
    trained = SAMPLES * args.workers * epochs
    good = verdict(wrong <= allowed, f"of {trained} samples {wrong:g} were not applied once (allowed: {allowed})")
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
    reason = available()
    if args.short:
        vars(args).update(SHORT)
    args.one_machine = args.short and reason is not None
    clean_environment()
    os.environ[SECRET_ENV] = "in these machines only, which end with this program"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    torch.set_num_threads(1)
    if reason is not None and not args.short:
        CONSOLE.print(f"[red]Cannot make machines.[/] {escape(reason)}")
        return 2
    chance, good = random.Random(args.seed), True
    with told_of_errors(CONSOLE):
        if args.only in (None, "counts"):
            good &= count(args, chance)
        if args.only in (None, "digits"):
            good &= learn(args, chance)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
