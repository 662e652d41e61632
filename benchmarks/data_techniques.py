"""What a cache, a divided cache and shared preparation gain: the experiments of Mohan et al. (2021), at small scale.

    python benchmarks/data_techniques.py                      # about 12 minutes; two machines need root
    python benchmarks/data_techniques.py --only trials

one machine     two workers read samples of 100 kB from a disk of 20 MB/s, which all its readers share. There is memory
                for 35 % of the data: none of it is used; each worker has a cache of its own, of half the size; both
                share one, which evicts the least recently used sample, as an operating system's page cache; both share
                a ``CachedDataset``, which evicts nothing.
two machines    a worker on each of two network namespaces, joined by a cable of 1 Gbit/s, with a disk each and memory
                for 35 % of the data each: none is used; each has its own ``CachedDataset``; they are partitioned.
trials          four programs, which train different models on the same data at once, with one loader process each.
                Preparing a sample takes 5 ms of CPU time. Each prepares all batches for itself; they have a
                ``SharedLoader``.

The systems of an experiment take turns. First epochs fill the caches and are not counted. ``data stall`` is the share
of the training time in which worker 0 waited for a batch (``DataStallMonitor``).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import network
import numpy as np
import pytorch_lightning as pl
import torch
from common import BARE, spread
from ranks import clean_environment
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

from lightning_asgd import ASGDStrategy, CachedDataset, DataStallMonitor, SharedLoader

SAMPLES, SIZE, BANDWIDTH = 400, 100_000, 20e6  # bytes, bytes per second
SHARE, BATCH, EPOCHS = 0.35, 8, 4
LIMIT = int(SHARE * SAMPLES * (SIZE + 100))
PREPARE_S, TRIALS = 0.005, 4
PORT = "29571"
SYSTEMS = {
    "one machine": ("no cache", "a cache per worker", "evicting cache", "shared cache"),
    "two machines": ("no cache", "a cache per machine", "partitioned cache"),
    "trials": ("four loaders", "shared loader"),
}
CLAIMS = {
    "one machine": "up to 2x one server (preprint's abstract), against the page cache",
    "two machines": "up to 15x several servers (preprint's abstract)",
    "trials": "up to 5.7x a search for hyper-parameters (preprint's abstract)",
}


class Disk:
    """Samples that come from one disk, however many processes read."""

    def __init__(self, folder: Path, owner: int = 0) -> None:
        self.folder, self.owner = folder, owner

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> bytes:
        with (self.folder / "disk").open("ab") as disk:
            fcntl.flock(disk, fcntl.LOCK_EX)
            time.sleep(SIZE / BANDWIDTH)
            disk.write(b".")
        return bytes([index % 256]) * SIZE


class Evicting:
    """A source behind a cache of a manager's process, which evicts the least recently used sample."""

    def __init__(self, source: Disk, address: str) -> None:
        self.source, self.address, self.held = source, address, None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> torch.Tensor:
        held: Any = self.held
        if held is None or held[0] != os.getpid():
            manager = Manager(self.address, authkey=b"benchmark")
            manager.connect()
            held = self.held = os.getpid(), manager.recent()  # type: ignore[assignment]
        sample = held[1].get(index)
        if sample is None:
            sample = self.source[index]
            held[1].put(index, sample)
        return prepare(sample)


class Recent:
    def __init__(self) -> None:
        self.samples: OrderedDict[int, bytes] = OrderedDict()

    def get(self, index: int) -> bytes | None:
        if index in self.samples:
            self.samples.move_to_end(index)
        return self.samples.get(index)

    def put(self, index: int, sample: bytes) -> None:
        self.samples[index] = sample
        while len(self.samples) * SIZE > LIMIT:
            self.samples.popitem(last=False)


class Manager(BaseManager):
    pass


RECENT = Recent()
Manager.register("recent", callable=lambda: RECENT)


def prepare(sample: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(sample, np.uint8)[:: SIZE // 100] / np.float32(255))


class Prepared:
    """Samples that are random, and take CPU time."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.thread_time() + PREPARE_S
        while time.thread_time() < until:
            pass
        return torch.rand(100)


class Net(pl.LightningModule):
    def __init__(self, folder: Path, width: int = 64) -> None:
        super().__init__()
        self.folder = folder
        self.net = nn.Sequential(nn.Linear(100, width), nn.ReLU(), nn.Linear(width, 1))
        self.epochs: list[float] = []
        self.reads: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return ((self.net(batch) - 1) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None:
        self.epochs.append(time.time())

    def on_train_epoch_end(self) -> None:
        self.epochs[-1] = time.time() - self.epochs[-1]
        disk = self.folder / "disk"
        self.reads.append(disk.stat().st_size if disk.exists() else 0)


class Cached(Net):
    def __init__(self, folder: Path, system: str, address: str = "") -> None:
        super().__init__(folder)
        self.system, self.address = system, address

    def train_dataloader(self) -> DataLoader[Any]:
        data: Any
        if self.system == "evicting cache":
            data = Evicting(Disk(self.folder), self.address)
        else:
            own = self.system == "a cache per worker"
            disk = Disk(self.folder, self.global_rank if own else 0)
            limit = {"no cache": 1, "a cache per worker": LIMIT // 2}.get(self.system, LIMIT)
            data = CachedDataset(disk, limit, prepare, partitioned=self.system == "partitioned cache")
        return DataLoader(data, BATCH, shuffle=True, num_workers=2, persistent_workers=True)


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    about = {"accelerator": "cpu", "max_epochs": EPOCHS, "default_root_dir": folder, **BARE, **options}
    return pl.Trainer(callbacks=[DataStallMonitor()], **about)


def program(experiment: str, system: str, folder: Path, number: int) -> None:
    """One process that the benchmark starts."""
    torch.set_num_threads(1)
    if experiment == "trials":
        module: Net = Net(folder, 16 * (number + 1))
        loader: Any
        if system == "shared loader":
            loader = SharedLoader(Prepared(), TRIALS, batch_size=BATCH, shuffle=True, num_workers=1)
        else:
            loader = DataLoader(Prepared(), BATCH, shuffle=True, num_workers=1, persistent_workers=True)
        run = trainer(folder, devices=1)
        run.fit(module, loader)
    else:
        module = Cached(folder, system)
        manager = None
        if system == "evicting cache":
            manager = Manager(str(folder / "cache"), authkey=b"benchmark")
            manager.start()
            module.address = str(folder / "cache")
        places = {"devices": 2} if experiment == "one machine" else {"devices": 1, "num_nodes": 2}
        if experiment == "two machines":
            module.folder = folder / str(number)
            module.folder.mkdir()
        run = trainer(folder, strategy=ASGDStrategy(nsync=10), **places)
        run.fit(module)
        if manager is not None:
            manager.shutdown()
    monitor = run.callbacks[0]
    if run.is_global_zero:
        result = {
            "epochs": module.epochs[1:],
            "reads": [b - a for a, b in zip(module.reads, module.reads[1:], strict=False)],
            "stall": monitor.data_s / monitor.total_s,
        }
        (folder / f"result{number}.json").write_text(json.dumps(result))


def run_once(experiment: str, system: str) -> dict[str, Any]:
    """All processes of a system, and what the first of them measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, "--program", experiment, system, name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if experiment == "one machine":
            processes = [subprocess.Popen([*command, "0"], env=environment, stderr=(folder / "log").open("w"))]
            finish(processes, folder)
        elif experiment == "trials":
            processes = [
                subprocess.Popen([*command, str(n)], env=environment, stderr=(folder / "log").open("a"))
                for n in range(TRIALS)
            ]
            finish(processes, folder)
        else:
            with network.two_machines(mbit=1000) as pair:
                job = {
                    "MASTER_ADDR": pair.addresses[0],
                    "MASTER_PORT": PORT,
                    "LIGHTNING_ASGD_SECRET": "of the benchmark",
                }
                processes = [
                    subprocess.Popen(
                        [*pair.prefix(node), *command, str(node)],
                        env={**environment, **job, "NODE_RANK": str(node)},
                        stderr=(folder / "log").open("a"),
                    )
                    for node in (0, 1)
                ]
                finish(processes, folder)
        results = [json.loads(path.read_text()) for path in sorted(folder.glob("result*.json"))]
        return dict(max(results, key=lambda each: sum(each["epochs"])))


def finish(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    for process in processes:
        try:
            process.wait(180)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise SystemExit((folder / "log").read_text()[-4000:])


def measure(experiment: str, repeats: int, console: Console) -> None:
    found: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS[experiment]}
    for _ in range(repeats):
        for system, runs in found.items():
            runs.append(run_once(experiment, system))
            console.print(f"[dim]{experiment}, {system}: {', '.join(f'{s:.2f}' for s in runs[-1]['epochs'])} s[/]")
    seconds = {system: [s for run in runs for s in run["epochs"]] for system, runs in found.items()}
    first = found[SYSTEMS[experiment][0]]
    table = Table("", "s per epoch", "min", "max", "times as fast", "disk reads", "data stall", title=experiment)
    for system, values in seconds.items():
        median = statistics.median(values)
        ratios = [middle(a) / middle(b) for a, b in zip(first, found[system], strict=True)]
        reads = [r / SAMPLES for run in found[system] for r in run["reads"]]
        table.add_row(
            system,
            *(f"{s:.2f}" for s in (median, min(values), max(values))),
            spread(ratios),
            "" if experiment == "trials" else f"{statistics.median(reads):.0%}",
            f"{statistics.median(run['stall'] for run in found[system]):.0%}",
        )
    console.print(table)
    console.print(f"The paper: {CLAIMS[experiment]}.\n")


def middle(run: dict[str, Any]) -> float:
    return float(statistics.median(run["epochs"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SYSTEMS, nargs="+", default=list(SYSTEMS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--program", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        experiment, system, folder, number = args.program
        program(experiment, system, Path(folder), int(number))
        return
    clean_environment()
    console = Console(width=None if sys.stdout.isatty() else 120)
    for experiment in args.only:
        if experiment == "two machines" and (reason := network.available()) is not None:
            console.print(f"{experiment}: {reason}")
            continue
        measure(experiment, args.repeats, console)


if __name__ == "__main__":
    main()
