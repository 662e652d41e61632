"""Plain loops with AsyncSGD, and Fabric: accuracy, speed beside loops that never talk, and what a killed worker costs.

    python benchmarks/plain_loop.py                     # about ten minutes
    python benchmarks/plain_loop.py --only speed --repeats 7

accuracy: digits, two workers, a plain loop under AsyncSGD, under Fabric and under a Trainer, over several seeds.
speed: throughput.py's CNN with 0.6 M parameters, two workers. Plain loops of torch without a data loader that never
talk, bare local SGD, and the same loop with AsyncSGD, all in turns; then the same with a data loader, whose batches
AsyncSGD leases. Every ratio is taken between neighbouring runs.
fault: three plain loops of an elastic run, one of which is killed; the weights count how often each sample was trained.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import throughput
from common import prepared, spread
from network import Network
from ranks import run_ranks
from rich.table import Table
from throughput import CONSOLE, Patience, Scenario, System

ROOT = Path(__file__).resolve().parents[1]
TARGET = 0.97  # of loops that never talk
LEASED, LOADER = "A-SGD loop, leases", "bare torch, loader"
SEEDS, EPOCHS = 5, 10
KINDS = ("plain loop", "Fabric", "Trainer")
SAMPLES, COUNTED = 600, 12  # of the fault, and its epochs


# ---------------------------------------------------------------------- accuracy


def digits() -> tuple[Any, Any]:
    """The images of scikit-learn's digits, for training and for validation."""
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import TensorDataset, random_split

    loaded = load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(loaded.target))
    train, val = random_split(data, [1437, 360], torch.Generator().manual_seed(0))
    return train, val


def network() -> Any:
    """A small CNN."""
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def train(kind: str, seed: int, rank: int) -> dict[str, Any]:
    """Train digits as one of two workers. Returns the accuracy."""
    import pytorch_lightning as pl
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader

    from lightning_asgd import ASGDStrategy, AsyncSGD, FabricASGDStrategy

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    train, val = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def epochs(loop: Any, step: Any) -> None:
        for _ in loop.epochs(EPOCHS):
            for batch in loop.batches(train, batch_size=32, shuffle=True):
                step(batch)

    def step(
        batch: Any, backward: Any = lambda loss: loss.backward(), forward: Any = model, steps: Any = optimizer
    ) -> None:
        steps.zero_grad()
        backward(cross_entropy(forward(batch[0]), batch[1]))
        steps.step()

    if kind == "plain loop":
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        with AsyncSGD(model, optimizer, nsync=10, seed=seed) as asgd:
            epochs(asgd, step)
    elif kind == "Fabric":
        from lightning_fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricASGDStrategy(nsync=10, seed=seed))
        fabric.launch()
        forward, steps = fabric.setup(model, optimizer)
        epochs(fabric.strategy, partial(step, backward=fabric.backward, forward=forward, steps=steps))
        fabric.strategy.teardown()
    else:

        class Digits(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = model

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return cross_entropy(self.net(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                return optimizer

        options = {**throughput.trainer_options(), "max_epochs": EPOCHS, "devices": 2}
        os.environ["PL_GLOBAL_SEED"] = str(seed)
        strategy = ASGDStrategy(nsync=10, monitor=False)
        pl.Trainer(strategy=strategy, **options).fit(Digits(), DataLoader(train, batch_size=32, shuffle=True))
    x, y = val[:]
    return {"accuracy": float((model(x).argmax(1) == y).float().mean())}


def accuracy(seeds: int) -> bool:
    """Print the accuracies; True if no kind's median is more than 0.01 below the Trainer's."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in range(seeds):
        for kind in KINDS:
            answers = run_ranks([partial(train, kind, seed, rank) for rank in (0, 1)], 120.0)
            assert len({each["accuracy"] for each in answers}) == 1, answers
            found[kind].append(answers[0]["accuracy"])
    table = Table(title=f"digits, two workers, {EPOCHS} epochs, {seeds} seeds: accuracy", title_justify="left")
    for heading in ("", "median", "min - max"):
        table.add_column(heading)
    for kind, values in found.items():
        table.add_row(kind, f"{statistics.median(values):.3f}", f"{min(values):.3f} - {max(values):.3f}")
    CONSOLE.print(table)
    medians = {kind: statistics.median(values) for kind, values in found.items()}
    return all(medians[kind] >= medians["Trainer"] - 0.01 for kind in KINDS)


# ---------------------------------------------------------------------- speed


def train_loader(scenario: Scenario, system: System, rank: int, last_step: mmap.mmap) -> dict[str, Any]:
    """Take steps on batches of a data loader until the time is up, with leases or without talking.

    Arguments and result are as for :func:`throughput.train`.
    """
    import torch
    from torch import nn

    from lightning_asgd import AsyncSGD

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    layers = throughput.build_module(scenario.params, scenario.network).layers
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01, momentum=0.9)
    samples = int(10_000 * (scenario.seconds + throughput.WARM_UP_S + 2)) * scenario.workers
    loader = throughput.build_loader(samples, scenario.batch, pixels=scenario.pixels)
    ends: list[float] = []
    begun = time.monotonic()

    def steps(batches: Any) -> None:
        nonlocal begun
        begun = time.monotonic()
        for images, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(layers(images), labels).backward()
            optimizer.step()
            ends.append(time.monotonic())
            if ends[-1] >= begun + throughput.WARM_UP_S + scenario.seconds:
                break

    exchanges = 0
    before = throughput._loop_figures(0)
    if system.kind == LEASED:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(scenario.workers))
        with AsyncSGD(layers, optimizer, nsync=int(system.nsync)) as asgd:
            before = throughput._loop_figures(0)
            steps(asgd.batches(loader))
            exchanges = asgd.stats.exchanges
    else:
        steps(loader)
    after = throughput._loop_figures(exchanges)
    moved = {key: after[key] - before[key] for key in after}
    return {"rank": rank, "warm": begun + throughput.WARM_UP_S, "ends": ends, **moved}


def speed(scenario: Scenario) -> bool:
    """Measure in turns; True if A-SGD in a plain loop keeps up with loops that never talk."""
    period = scenario.nsync[0]
    pairs = {"A-SGD loop": "bare torch", LEASED: LOADER}
    systems = [System("bare torch"), System("bare local SGD", period), System("A-SGD loop", period)]
    systems += [System(LOADER), System(LEASED, period)]
    throughput.TOGETHER = (*throughput.TOGETHER, LEASED)
    runs: dict[str, list[float]] = {system.kind: [] for system in systems}
    patience = Patience(0.0)
    CONSOLE.print(f"speed: {scenario.describe()} (load {os.getloadavg()[0]:.1f})")
    for repeat in range(scenario.repeats):
        for system in systems:
            patience.wait()
            result = throughput.run(scenario, system, None, train_loader)
            runs[system.kind].append(result["samples_per_s"])
            CONSOLE.print(f"  {repeat + 1}/{scenario.repeats}  {system!s:<28} {runs[system.kind][-1]:7.0f} samples/s")
    table = Table(title="medians (min-max)", title_justify="left")
    for heading in ("", "samples/s", "of loops that never talk"):
        table.add_column(heading)
    passed = True
    for kind, speeds in runs.items():
        base = runs[LOADER] if kind in (LOADER, LEASED) else runs["bare torch"]
        shares = [mine / theirs for mine, theirs in zip(speeds, base, strict=True)]
        share = "" if speeds is base else spread(shares, 3)
        table.add_row(kind, spread(speeds, 0), share)
        passed &= kind not in pairs or statistics.median(shares) >= TARGET
    CONSOLE.print(table)
    return passed


# ---------------------------------------------------------------------- fault


def count(folder: Path, name: str, address: str, step_s: float) -> None:
    """A plain loop whose weights count how often each sample was trained; its progress is in a file."""
    import torch
    from torch.utils.data import TensorDataset

    from lightning_asgd import AsyncSGD, Timeouts
    from lightning_asgd.algorithms import ASGD

    torch.set_num_threads(1)
    seen = torch.nn.ParameterList([torch.zeros(SAMPLES)])
    optimizer = torch.optim.SGD(seen.parameters(), lr=1.0)
    data, file = TensorDataset(torch.arange(SAMPLES)), folder / f"{name}.json"
    run: dict[str, Any] = {"run": address, "timeouts": Timeouts(silence_s=2.0)}
    with AsyncSGD(seen, optimizer, nsync=3, algorithm=ASGD("sum"), **run) as asgd:
        for epoch in asgd.epochs(COUNTED):
            for (numbers,) in asgd.batches(data, batch_size=4, shuffle=True):
                time.sleep(step_s)
                optimizer.zero_grad()
                (-seen[0][numbers].sum()).backward()
                optimizer.step()
            file.with_suffix(".new").write_text(json.dumps({"epoch": epoch + 1, "seen": seen[0].tolist()}))
            file.with_suffix(".new").rename(file)


@contextlib.contextmanager
def served(name: str, on: Network | None = None) -> Iterator[str]:
    """An elastic run's servers, on this machine or the first one of a network; yields their address."""
    host = "127.0.0.1" if on is None else on.addresses[0]
    command = [str(Path(sys.executable).with_name("lightning-asgd")), "serve", f"{host}:0/{name}"]
    if on is not None:
        command = [*on.prefix(0), *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ}) as server:
        try:
            assert server.stdout is not None
            yield next(found[1] for line in server.stdout if (found := re.search(r'run="([^"]+)"', line)))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def fault() -> bool:
    """Kill one of three workers; True if every sample was trained once per epoch all the same."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, served("counts") as address:

        def noted(name: str) -> dict[str, Any]:
            file = Path(folder, f"{name}.json")
            return dict(json.loads(file.read_text())) if file.exists() else {"epoch": 0}

        about = {"fast": 0.004, "slow": 0.012, "killed": 0.006}
        workers = {
            name: context.Process(target=count, args=(Path(folder), name, address, step_s))
            for name, step_s in about.items()
        }
        for worker in workers.values():
            worker.start()
        deadline = time.monotonic() + 120
        while noted("killed")["epoch"] < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.15)  # somewhere within an epoch
        workers["killed"].kill()
        at = noted("killed")["epoch"]
        for worker in workers.values():
            worker.join(max(1.0, deadline - time.monotonic()))
            worker.kill()
        counts = {name: sorted(set(noted(name)["seen"])) for name in ("fast", "slow")}
    CONSOLE.print(
        f"fault: a worker was killed in epoch {at}; {SAMPLES} samples, counts after {COUNTED} epochs: {counts}"
    )
    return all(found == [float(COUNTED)] for found in counts.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", choices=("accuracy", "speed", "fault"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import pytorch_lightning  # noqa: F401  # once, for all forked ranks

    parts = {
        "accuracy": partial(accuracy, args.seeds),
        "speed": partial(speed, Scenario("loop", repeats=args.repeats, seconds=args.seconds)),
        "fault": fault,
    }
    passed = True
    with prepared():
        for name, part in parts.items():
            if args.only in (None, name):
                done = part()
                CONSOLE.print(f"{'[green]PASS[/]' if done else '[red]FAIL[/]'}  {name}\n")
                passed &= done
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
