"""Samples per second of DDP, local SGD and A-SGD on the same module, and of one worker alone.

The systems are interleaved (alone, DDP, local SGD, A-SGD, alone, DDP, ...), so that a machine that gets slower or
busier affects all of them, and every ratio is taken between neighbouring runs. This process imports torch and Lightning
once, does not use them, and forks the ranks of each run as an external launcher would start them.

What counts is a window that starts when every rank has trained for a while and ends before the first rank stops. Under
DDP all ranks take the same number of steps: rank 0 chooses the last one, a few ahead, when its time is up. Under A-SGD
every worker stops by its own clock. Local SGD is DDP with PyTorch's post-local-SGD hook and averager; its period is
A-SGD's nsync. "unconnected" is a Trainer per worker, all at once, that exchange nothing: no strategy can be faster.
"bare torch", "bare local SGD" and "A-SGD loop" are plain loops without Lightning and data loader; the second averages
the weights, and the third uses AsyncSGD.
So are torchft and hivemind, which rivals_suite.py installs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import mmap
import os
import platform
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from common import BARE, CONSOLE, prepared, spread
from network import Network, two_machines
from ranks import Slowness, run_ranks, servers_of
from rich.table import Table
from rivals import async_sgd, averaging, local_sgd, peer, replica_group, unconnected

WARM_UP_S = 1.5  # training before the window starts
AHEAD = 5  # steps that DDP still takes after its time is up, and twice the period between two meetings of its ranks
NETWORKS = ("cnn", "alexnet", "googlenet")
# Plain loops of torch, and how their ranks join.
LOOPS = {
    "bare torch": unconnected,
    "bare local SGD": averaging,
    "A-SGD loop": async_sgd,
    "torchft": replica_group,
    "hivemind": peer,
}
AFTER_BACKWARD = "DDP, all gradients after backward"
KINDS = (
    "one alone",
    "unconnected",
    *LOOPS,
    "DDP",
    AFTER_BACKWARD,
    "local SGD",
    "A-SGD",
    "layer-wise",
)
CHOICES = tuple(kind for kind in KINDS if kind not in (AFTER_BACKWARD, "layer-wise"))  # these: see layerwise.py
# All their ranks take the same number of steps.
IN_STEP = ("DDP", AFTER_BACKWARD, "local SGD", "layer-wise", "bare local SGD", "torchft")
TOGETHER = (*IN_STEP, "A-SGD", "A-SGD loop", "hivemind")  # their ranks belong to one job
DISTURBED = 0.15  # share of a core that other programs may take
START_S = 180.0  # for a run to start and to end, beside its window


@dataclass(frozen=True)
class Scenario:
    """What is measured under the same conditions."""

    name: str
    params: int = 600_000
    network: str = "cnn"
    nsync: tuple[int | str, ...] = (10,)
    workers: int = 2
    straggler: float = 0.0  # seconds that rank 1 sleeps every step
    slow: float = 1.0  # times that rank 1 needs for a step, by sleeping besides
    bandwidth: float | None = None  # Mbit/s between two halves of the ranks
    batch: int = 32
    seconds: float = 6.0
    repeats: int = 5
    unconnected: bool = False  # also: all workers at once, each for itself
    bare: bool = False  # also: the same without Lightning and data loader, unconnected and with local SGD
    rivals: bool = False  # also: torchft and hivemind
    delays: tuple[int, ...] = ()  # of layer-wise descent; also: DDP that sends all gradients at once, after backward
    num_servers: int = 1
    compression: str | None = None  # of A-SGD
    kept: bool = False  # workers wait rather than take more than nsync steps between two exchanges
    kinds: tuple[str, ...] = ()  # of the systems to run; all if empty
    accelerator: str = "cpu"  # as for a Trainer; one device for each worker

    @property
    def pixels(self) -> int:
        return 32 if self.network == "cnn" else 64

    @property
    def slowness(self) -> Slowness:
        """Rank 1's."""
        return Slowness(self.slow, self.straggler)

    @property
    def systems(self) -> list[System]:
        alone = [System("one alone"), *([System("unconnected")] if self.unconnected else [])]
        periods = [n for n in self.nsync[:1] if n != "auto" and self.workers > 1]
        if self.bare:
            loops = ("bare local SGD", "A-SGD loop")
            alone += [System("bare torch"), *(System(kind, n) for n in periods for kind in loops)]
        local = [System("local SGD", n) for n in periods]
        if self.rivals:  # hivemind is made for long periods
            for n in periods:
                local += [System("torchft", n), System("hivemind", n), System("hivemind", 10 * int(n))]
        layers = [System(AFTER_BACKWARD), *(System("layer-wise", n) for n in self.delays)] if self.delays else []
        systems = [*alone, System("DDP"), *local, *(System("A-SGD", n) for n in self.nsync), *layers]
        return [system for system in systems if not self.kinds or system.kind in self.kinds]

    def describe(self) -> str:
        model = f"{self.params / 1e6:g} M parameters" if self.network == "cnn" else self.network
        parts = [model, f"{self.workers} workers", f"batch {self.batch}"]
        if self.straggler:
            parts.append(f"rank 1 sleeps {self.straggler:g} s a step")
        if self.slow != 1:
            parts.append(f"rank 1 is {self.slow:g} times slower")
        if self.bandwidth:
            parts.append(f"{self.bandwidth:g} Mbit/s between the workers")
        if self.compression:
            parts.append(f"A-SGD with {self.compression}")
        if self.accelerator != "cpu":
            parts.append(f"on {self.accelerator}")
        return ", ".join(parts)


@dataclass(frozen=True)
class System:
    """One of the things compared."""

    kind: str  # one of KINDS
    nsync: int | str = 0  # of layer-wise descent, its delay

    def __str__(self) -> str:
        if self.kind == "layer-wise":
            return f"layer-wise delay {self.nsync}"
        return f"{self.kind} nsync {self.nsync}" if self.nsync else self.kind


@dataclass(frozen=True)
class Target:
    """The median of ``system / base`` must reach ``at_least``."""

    nsync: int
    base: str  # "DDP", "local SGD", "unconnected", or "ideal": the sum of the workers' speeds, each alone
    at_least: float


# ---------------------------------------------------------------------- in a rank's process


def build_module(params: int, network: str = "cnn", slowness: Slowness | None = None, rank: int = 0) -> Any:
    """A small CNN for 3x32x32 images; its hidden layer is as wide as ``params`` asks for. Or one of torchvision's.

    Rank 1 is slow. Where ranks are not connected, each is rank 0 of a Trainer of its own: so it is given.

    With 0.6 M parameters one worker alone makes about 1,200 samples/s in bare torch on the machines that the targets
    were set on.
    """
    import pytorch_lightning as pl
    import torch
    from torch import nn

    c1, c2, classes = 24, 48, 10
    fixed = c1 * 28 + c2 * (9 * c1 + 1) + classes
    hidden = max(1, round((params - fixed) / (c2 * 64 + 1 + classes)))

    def layers() -> nn.Module:
        if network != "cnn":
            import torchvision

            options = {"aux_logits": False, "init_weights": False} if network == "googlenet" else {}
            made: nn.Module = getattr(torchvision.models, network)(num_classes=classes, **options)
            return made
        return nn.Sequential(
            *(nn.Conv2d(3, c1, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(c1, c2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(c2 * 64, hidden), nn.ReLU(), nn.Linear(hidden, classes)),
        )

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()
            self.slowness = slowness or Slowness()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.slowness.before_step(slow=rank == 1)
            images, labels = batch
            return nn.functional.cross_entropy(self.layers(images), labels)

        def on_train_batch_end(self, *args: Any) -> None:
            self.slowness.after_step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    return Net()


def build_loader(samples: int, batch: int, distinct: int = 2048, pixels: int = 32) -> Any:
    """Random images in memory; the same ``distinct`` ones over and over for as many samples as wanted."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Repeated(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index % len(self.tensors[0]))

        def __len__(self) -> int:
            return samples

    images, labels = torch.randn(distinct, 3, pixels, pixels), torch.randint(10, (distinct,))
    return DataLoader(Repeated(images, labels), batch_size=batch, shuffle=True, num_workers=0)


def trainer_options() -> dict[str, Any]:
    """What all runs have in common: no logging, no checkpoints, no bars."""
    return {"accelerator": "cpu", "max_epochs": 1, **BARE}


def train(
    scenario: Scenario, system: System, rank: int, last_step: mmap.mmap, *, callbacks: Sequence[Any] = (), **more: Any
) -> dict[str, Any]:
    """Train in this process until the time is up.

    Args:
        scenario: the conditions.
        system: who trains.
        rank: of this process.
        last_step: of DDP, shared with the other ranks.
        callbacks: beside the clock.
        **more: options of the Trainer.

    Returns:
        when the window may start, when each batch ended, and what the exchanges did inside the window.
    """
    import pytorch_lightning as pl
    import torch
    from clock import Clock

    torch.set_num_threads(1)
    torch.manual_seed(rank)

    def decide(over: bool, batch: int) -> bool:
        together = system.kind in IN_STEP and scenario.workers > 1
        return _all_over(over, system, rank, batch, last_step) if together else over

    clock = Clock(WARM_UP_S, scenario.seconds, lambda trainer: _figures(trainer.strategy), decide)
    nodes = 2 if scenario.bandwidth else 1
    options: dict[str, Any] = {"devices": 1}
    if system.kind in TOGETHER:
        options = {"devices": scenario.workers // nodes, "num_nodes": nodes, "strategy": "ddp"}
    options["accelerator"] = _accelerator(scenario, options["devices"])
    options |= strategy_of(scenario, system)
    # More than the fastest machine gets through, so that nobody reaches the end of the epoch.
    at_most = 10_000 if scenario.accelerator == "cpu" else 60_000  # samples/s of a worker
    samples = int(at_most * (scenario.seconds + WARM_UP_S + 2)) * scenario.workers
    trainer = pl.Trainer(**{**trainer_options(), **options, **more}, callbacks=[*callbacks, clock])
    module = build_module(scenario.params, scenario.network, scenario.slowness, rank)
    trainer.fit(module, build_loader(samples, scenario.batch, pixels=scenario.pixels))
    return clock.answer(rank)


def _accelerator(scenario: Scenario, devices: int) -> Any:
    """A Trainer's argument. More workers than the machine has CUDA devices share the first one."""
    import torch

    if scenario.accelerator != "cuda" or devices <= torch.cuda.device_count():
        return scenario.accelerator
    from shared_device import SharedCUDA

    return SharedCUDA()


def strategy_of(scenario: Scenario, system: System) -> dict[str, Any]:
    """The Trainer's argument, if it is more than a name."""
    from pytorch_lightning.strategies import DDPStrategy

    from lightning_asgd import ASGDStrategy
    from lightning_asgd.algorithms import LayerWise

    common: dict[str, Any] = {"monitor": False, "num_servers": scenario.num_servers}
    if system.kind == "local SGD":
        return {"strategy": local_sgd(int(system.nsync))}
    if system.kind == AFTER_BACKWARD:
        return {"strategy": DDPStrategy(bucket_cap_mb=4000)}
    if system.kind == "layer-wise":
        return {"strategy": ASGDStrategy(algorithm=LayerWise(int(system.nsync)), **common)}
    if system.kind == "A-SGD":
        if scenario.kept and system.nsync != "auto":
            from lightning_asgd import Advanced  # here, since make regress also measures commits without it

            common["advanced"] = Advanced(max_offline_steps=system.nsync)
        return {"strategy": ASGDStrategy(system.nsync, compression=scenario.compression, **common)}
    return {}


def train_bare(scenario: Scenario, system: System, rank: int, last_step: mmap.mmap) -> dict[str, Any]:
    """Take the same steps on the same batch until the time is up, without Lightning and data loader.

    Arguments and result are as for :func:`train`.
    """
    import torch
    from torch import nn

    torch.set_num_threads(1)
    layers = build_module(scenario.params, scenario.network).layers
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01, momentum=0.9)
    images, labels = build_loader(scenario.batch, scenario.batch, scenario.batch, scenario.pixels).dataset.tensors
    slowness = scenario.slowness
    ends: list[float] = []
    before: dict[str, float] = {}
    over = False
    with LOOPS[system.kind](layers, optimizer, rank, scenario.workers, int(system.nsync), scenario.batch) as member:
        begun, warm = time.monotonic(), math.inf
        while not over:
            if not before and time.monotonic() >= begun + WARM_UP_S and member.exchanges() >= member.first:
                before = _loop_figures(member.exchanges())
                warm = before["at_s"]
            slowness.before_step(slow=rank == 1)
            member.optimizer.zero_grad()
            nn.functional.cross_entropy(layers(images), labels).backward()
            member.optimizer.step()
            slowness.after_step()
            ends.append(time.monotonic())
            over = ends[-1] >= warm + scenario.seconds
            if system.kind in IN_STEP:
                over = _all_over(over, system, rank, len(ends), last_step)
        after = _loop_figures(member.exchanges())
    return {"rank": rank, "warm": warm, "ends": ends, **{key: after[key] - before[key] for key in after}}


def _loop_figures(exchanges: int) -> dict[str, float]:
    """Those of a plain loop, and the CPU time of the processes that its rank has started."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return _figures(None) | {"exchanges": exchanges, "helper_cpu_s": sum(t.user + t.system for t in times)}


def _all_over(over: bool, system: System, rank: int, step: int, last_step: mmap.mmap) -> bool:
    """Whether all ranks stop at this step. Rank 0 chooses the last one, a few ahead, once its own time is up."""
    if over and rank == 0 and not _read(last_step):
        last_step[:] = struct.pack("q", step + AHEAD + 2 * int(system.nsync))
    return 0 < _read(last_step) <= step


def _read(shared: mmap.mmap) -> int:
    return int(struct.unpack("q", shared[:])[0])


def _figures(strategy: Any) -> dict[str, float]:
    machine = psutil.cpu_times()
    figures = {
        "at_s": time.monotonic(),
        "cpu_s": time.process_time(),
        "busy_s": sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice,
    }
    stats = getattr(strategy, "stats", None)
    if stats is not None:
        times = [server.cpu_times() for server in servers_of(psutil.Process())]
        figures["server_cpu_s"] = sum(t.user + t.system for t in times)
        for key in ("steps", "exchanges", "pushes", "deferred", "wait_s", "round_trip_s", "staleness_sum"):
            figures[key] = getattr(stats, key)
    return figures


# ---------------------------------------------------------------------- a run


def run(
    scenario: Scenario, system: System, network: Network | None, job: Callable[..., dict[str, Any]] = train
) -> dict[str, Any]:
    """Start the ranks, wait for them, and work out what they did in their common window.

    Args:
        scenario: the conditions.
        system: who trains.
        network: between the ranks.
        job: what a rank does; as :func:`train`.

    Raises:
        RuntimeError: a rank failed; the text holds its last output.
    """
    last_step = mmap.mmap(-1, 8)  # shared with the ranks
    ranks = range(1 if system.kind == "one alone" else scenario.workers)
    if system.kind in LOOPS:
        job = train_bare
    jobs = [partial(job, scenario, system, rank, last_step) for rank in ranks]
    try:
        launched = system.kind in TOGETHER
        answers = run_ranks(jobs, scenario.seconds + START_S, launched=launched, network=network)
    finally:
        last_step.close()
    return _evaluate(scenario, answers)


def _evaluate(scenario: Scenario, answers: list[dict[str, Any]]) -> dict[str, Any]:
    start = max(a["warm"] for a in answers)
    stop = min(a["ends"][-1] for a in answers)
    if stop - start < scenario.seconds / 2:
        raise RuntimeError(f"The ranks trained together for only {stop - start:.1f} s. Raise --seconds.")
    rates = [scenario.batch * (_steps(a["ends"], stop) - _steps(a["ends"], start)) / (stop - start) for a in answers]
    result: dict[str, Any] = {"samples_per_s": sum(rates), "per_rank": rates, "window_s": stop - start}
    total_s = sum(a["at_s"] for a in answers)
    result["cpu_share"] = sum(a["cpu_s"] for a in answers) / total_s
    ours_s = sum(a["cpu_s"] + a.get("helper_cpu_s", 0.0) for a in answers) + answers[0].get("server_cpu_s", 0.0)
    result["other_cpu_share"] = max(0.0, answers[0]["busy_s"] - ours_s) / answers[0]["at_s"]
    if "hooks" in answers[0]:
        result["hooks"] = max(a["hooks"] for a in answers)
    if "exchanges" in answers[0]:
        exchanges = sum(a["exchanges"] for a in answers)
        result["exchanges_per_s"] = sum(a["exchanges"] / a["at_s"] for a in answers)
    if "pushes" in answers[0]:
        pushes = sum(a["pushes"] for a in answers)
        result |= {
            "wait_share": sum(a["wait_s"] for a in answers) / total_s,
            "deferred": sum(a["deferred"] for a in answers),
            "steps_per_push": sum(a["steps"] for a in answers) / pushes if pushes else 0.0,
            "steps_per_push_per_rank": [a["steps"] / a["pushes"] if a["pushes"] else 0.0 for a in answers],
            "round_trip_s": sum(a["round_trip_s"] for a in answers) / exchanges if exchanges else 0.0,
            "staleness": sum(a["staleness_sum"] for a in answers) / pushes if pushes else 0.0,
            "server_cpu_share": answers[0]["server_cpu_s"] / answers[0]["at_s"],
        }
    return result


def _steps(ends: list[float], at: float) -> float:
    """Steps done by a time, the one under way in proportion."""
    done = sum(end <= at for end in ends)
    if done in (0, len(ends)):
        return float(done)
    return done + (at - ends[done - 1]) / (ends[done] - ends[done - 1])


# ---------------------------------------------------------------------- scenarios and tables


class Patience:
    """Waits for an idle machine, and has disturbed runs repeated, until its seconds are used up."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds

    def wait(self) -> None:
        """Return once other programs are quiet."""
        begun = time.monotonic()
        while self.left_s > 0 and psutil.cpu_percent(1.0) * (psutil.cpu_count() or 1) > 100 * DISTURBED:
            self.left_s -= time.monotonic() - begun
            begun = time.monotonic()

    def repeat(self, result: dict[str, Any], took_s: float) -> bool:
        """Whether to measure again."""
        if self.left_s <= 0 or result["other_cpu_share"] <= DISTURBED:
            return False
        self.left_s -= took_s
        return True


def measure(scenario: Scenario, patience: Patience) -> dict[str, list[dict[str, Any]]]:
    """All runs of a scenario, by system."""
    CONSOLE.print(f"\n[bold]{scenario.name}[/]: {scenario.describe()}  (load {os.getloadavg()[0]:.1f})")
    runs: dict[str, list[dict[str, Any]]] = {str(system): [] for system in scenario.systems}
    cable = two_machines(scenario.bandwidth) if scenario.bandwidth else contextlib.nullcontext()
    with cable as network:
        for repeat in range(scenario.repeats):
            for system in scenario.systems:
                while True:
                    patience.wait()
                    begun = time.monotonic()
                    result = run(scenario, system, network)
                    if not patience.repeat(result, time.monotonic() - begun):
                        break
                runs[str(system)].append(result)
                text = f"  {repeat + 1}/{scenario.repeats}  {system!s:<18} {result['samples_per_s']:7.0f} samples/s"
                CONSOLE.print(text)
    return runs


def ideal(scenario: Scenario, alone: float) -> float:
    """Samples per second of workers that cost each other nothing.

    Args:
        scenario: says how many there are, and how slow one of them is.
        alone: samples per second of one that does not sleep.
    """
    slow = scenario.batch / (scenario.slow * scenario.batch / alone + scenario.straggler)
    return (scenario.workers - 1) * alone + slow


def ratios(scenario: Scenario, runs: dict[str, list[dict[str, Any]]], system: str, base: str) -> list[float]:
    """A system's speed divided by that of ``base`` in the same repeat."""
    mine = [r["samples_per_s"] for r in runs[system]]
    if base == "ideal":
        theirs = [ideal(scenario, r["samples_per_s"]) for r in runs["one alone"]]
    else:  # "local SGD" stands for the one with whatever period
        same = [base] if base in runs else [name for name in runs if name.startswith(base)]
        theirs = [r["samples_per_s"] for name in same for r in runs[name]]
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def show(scenario: Scenario, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Print the scenario's tables."""
    speeds = Table(title=f"{scenario.name}: {scenario.describe()}, medians (min-max)", title_justify="left")
    possible = ("DDP", "local SGD", "unconnected", "bare torch")
    bases = [base for base in possible if any(name.startswith(base) for name in runs)]
    titles = ["samples/s", *(f"/ {base}" for base in bases)]
    if "one alone" in runs:
        bases.append("ideal")
        titles.append("/ sum of speeds")
    for heading in ("", *titles):
        speeds.add_column(heading, justify="right" if heading else "left")
    for name, results in runs.items():
        row = [name, spread([r["samples_per_s"] for r in results], 0)]
        for base in bases:
            same = name.partition(" nsync ")[0] in (base, "one alone")
            row.append("" if same else spread(ratios(scenario, runs, name, base), 2))
        speeds.add_row(*row)
    CONSOLE.print(speeds)
    columns = {
        "exchanges/s": ("exchanges_per_s", "{:.1f}", 1),
        "steps/push": ("steps_per_push", "{:.1f}", 1),
        "merged after ms": ("round_trip_s", "{:.0f}", 1000),
        "waiting %": ("wait_share", "{:.1f}", 100),
        "deferred": ("deferred", "{:.0f}", 1),
        "staleness": ("staleness", "{:.2f}", 1),
        "worker CPU %": ("cpu_share", "{:.0f}", 100),
        "server CPU %": ("server_cpu_share", "{:.0f}", 100),
        "others' CPU %": ("other_cpu_share", "{:.0f}", 100),  # of programs that disturb the measurement
    }
    details = Table("", *columns, title="medians over the repeats", title_justify="left")
    for name, results in runs.items():
        cells = []
        for key, form, factor in columns.values():
            values = [factor * r[key] for r in results if key in r]
            cells.append(form.format(statistics.median(values)) if values else "")
        details.add_row(name, *cells)
    CONSOLE.print(details)
    foreign = disturbance(runs)
    if foreign > DISTURBED:
        CONSOLE.print(
            f"[yellow]Other programs took {foreign:.0%} of a core meanwhile: measure again on an idle machine.[/]"
        )


def disturbance(runs: dict[str, list[dict[str, Any]]]) -> float:
    """Share of a core that other programs took in the median run."""
    return statistics.median(r["other_cpu_share"] for results in runs.values() for r in results)


def targets(scenario: Scenario) -> list[Target]:
    """What the project promises of a scenario; nothing for conditions it has not named."""
    conditions = (round(scenario.params, -5), scenario.straggler, scenario.bandwidth)
    promised = {
        (600_000, 0.0, None): [
            *(Target(10, "DDP", 1.3), Target(10, "local SGD", 1.0), Target(10, "ideal", 0.95)),
            Target(10, "unconnected", 0.97),
        ],
        (600_000, 0.1, None): [Target(10, "DDP", 3.0), Target(10, "local SGD", 2.9)],
        (600_000, 0.0, 100.0): [Target(10, "DDP", 8.0), Target(10, "local SGD", 1.5)],
        (17_000_000, 0.0, None): [
            *(Target(10, "DDP", 1.2), Target(10, "local SGD", 1.0), Target(10, "ideal", 0.95)),
            *(Target(10, "unconnected", 0.97), Target(1, "DDP", 1.0)),
        ],
    }
    usual = (scenario.workers, scenario.batch, scenario.network, scenario.slow, scenario.compression)
    if (*usual, scenario.accelerator) != (2, 32, "cnn", 1.0, None, "cpu"):
        return []
    told = promised.get(conditions, [])
    return [t for t in told if t.nsync in scenario.nsync and (t.base != "unconnected" or scenario.unconnected)]


def check(scenario: Scenario, runs: dict[str, list[dict[str, Any]]]) -> bool:
    """Print PASS or FAIL per target."""
    passed = True
    doubt = " [yellow](other programs disturbed this)[/]" if disturbance(runs) > DISTURBED else ""
    for target in targets(scenario):
        system = str(System("A-SGD", target.nsync))
        median = statistics.median(ratios(scenario, runs, system, target.base))
        base = "the sum of the workers' speeds" if target.base == "ideal" else target.base
        verdict = "[green]PASS[/]" if median >= target.at_least else "[red]FAIL[/]"
        text = f"{system} is {median:.2f} x {base}, target {target.at_least:.2f}{doubt}"
        CONSOLE.print(f"{verdict}  {scenario.name}: {text}")
        passed &= median >= target.at_least
    # A sleep and a cable are the same on any machine: their targets hold for workers that are fast enough alone.
    if scenario.straggler or scenario.bandwidth:
        bound = [ideal(scenario, r["samples_per_s"]) for r in runs["one alone"]]
        speeds = [r["samples_per_s"] for r in runs["DDP"]]
        most = statistics.median(a / b for a, b in zip(bound, speeds, strict=True))
        CONSOLE.print(f"      {scenario.name}: the sum of the workers' speeds is {most:.2f} x DDP")
        if scenario.bare:
            most = statistics.median(ratios(scenario, runs, "bare torch", "DDP"))
            CONSOLE.print(f"      {scenario.name}: bare torch on all workers, without exchanges, is {most:.2f} x DDP")
    if not targets(scenario):
        CONSOLE.print(f"no target for {scenario.name}")
    return passed


def save(results: list[tuple[Scenario, dict[str, list[dict[str, Any]]]]], file: str) -> None:
    """Write settings and every run as JSON."""
    import pytorch_lightning
    import torch

    import lightning_asgd

    machine = {
        "library": str(Path(lightning_asgd.__file__).parent),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "lightning": pytorch_lightning.__version__,
    }
    content = {"machine": machine, "scenarios": [{**asdict(s), "runs": runs} for s, runs in results]}
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(json.dumps(content, indent=1) + "\n")
    CONSOLE.print(f"figures: {file}")


def standard_scenarios(base: Scenario) -> list[Scenario]:
    """Those that the project has targets for."""
    return [
        replace(base, name="small", unconnected=True, bare=True),
        replace(base, name="straggler", straggler=0.1),
        replace(base, name="slow network", bandwidth=100.0),
        replace(base, name="large", params=17_000_000, nsync=(10, 1), unconnected=True, bare=True),
    ]


def whole_suite(base: Scenario) -> list[Scenario]:
    """Those with targets, and more workers, slower networks, larger models and other people's."""
    return [
        *standard_scenarios(base),
        replace(base, name="4 times slower", slow=4.0),
        replace(base, name="slowest network", bandwidth=10.0, compression="int8"),
        replace(base, name="largest", params=60_000_000),
        replace(base, name="4 workers", workers=4),
        replace(base, name="4 workers, straggler", workers=4, slow=4.0),
        replace(base, name="alexnet", network="alexnet"),
        replace(base, name="googlenet", network="googlenet"),
    ]


def _nsync(text: str) -> int | str:
    return text if text == "auto" else int(text)


def parse() -> tuple[list[Scenario], argparse.Namespace]:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="measuring window of a run (default %(default)s)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--nsync", type=_nsync, nargs="+", default=[10], help='steps between exchanges, or "auto"')
    parser.add_argument("--params", type=float, default=0.6e6, help="parameters of the model (default %(default)g)")
    parser.add_argument("--network", choices=NETWORKS, default="cnn", help="64x64 images for those of torchvision")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--straggler", type=float, default=0.0, metavar="SECONDS", help="rank 1 sleeps in every step")
    parser.add_argument("--slow", type=float, default=1.0, metavar="TIMES", help="rank 1 is this many times slower")
    parser.add_argument("--compression", help="of A-SGD")
    parser.add_argument("--bandwidth", type=float, metavar="MBIT", help="two namespaces joined at that speed; as root")
    parser.add_argument("--accelerator", default="cpu", help="of the Trainer, with a device for each worker")
    parser.add_argument("--unconnected", action="store_true", help="also run all workers at once without exchanges")
    parser.add_argument("--bare", action="store_true", help="plain loops of torch, with local SGD and without")
    parser.add_argument("--rivals", action="store_true", help="torchft and hivemind, which rivals_suite.py installs")
    parser.add_argument("--systems", nargs="+", choices=CHOICES, help="only these; without DDP and one alone no ratios")
    parser.add_argument("--all", action="store_true", help="the four scenarios that have targets")
    parser.add_argument("--suite", action="store_true", help="these and seven more: other workers, networks, models")
    parser.add_argument("--check", action="store_true", help="print PASS or FAIL per target; exit code 1 if one fails")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="seconds in total to wait for other programs, and to repeat runs that they disturbed",
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.workers < 1 or args.repeats < 1 or any(n != "auto" and n < 1 for n in args.nsync):
        parser.error("--workers, --repeats and --nsync must be at least 1")
    if args.systems and args.check:
        parser.error("--check needs the ratios of all systems: leave --systems out")
    base = Scenario(
        name="custom",
        params=int(args.params),
        network=args.network,
        nsync=tuple(dict.fromkeys(args.nsync)),
        workers=args.workers,
        straggler=args.straggler,
        slow=args.slow,
        compression=args.compression,
        bandwidth=args.bandwidth,
        batch=args.batch,
        seconds=args.seconds,
        repeats=args.repeats,
        unconnected=args.unconnected,
        bare=args.bare,
        rivals=args.rivals,
        num_servers=args.servers,
        kinds=tuple(args.systems or ()),
        accelerator=args.accelerator,
    )
    if args.suite:
        return whole_suite(base), args
    scenarios = standard_scenarios(base) if args.all else [base]
    named = {_conditions(s): s.name for s in whole_suite(Scenario(""))}
    network = "" if args.network == "cnn" else f"{args.network} "
    scenarios = [
        replace(s, name=named.get(_conditions(s), f"{network}{s.name}".removesuffix(" custom"))) for s in scenarios
    ]
    if any(s.bandwidth and s.workers % 2 for s in scenarios):
        parser.error("--bandwidth splits the workers over two namespaces: --workers must be even")
    return scenarios, args


def _conditions(scenario: Scenario) -> tuple[Any, ...]:
    """What tells the scenarios apart that have a name."""
    kind = (scenario.network, scenario.params, scenario.workers)
    return (*kind, scenario.straggler, scenario.slow, scenario.bandwidth, scenario.compression)


def main() -> int:
    scenarios, args = parse()
    os.environ["OMP_NUM_THREADS"] = "1"  # one thread per worker
    with CONSOLE.status("importing torch and Lightning") if CONSOLE.is_terminal else contextlib.nullcontext():
        import pytorch_lightning  # noqa: F401  # once, for all forked ranks
    results = []
    passed = True
    patience = Patience(args.patience)
    with prepared(machines=any(s.bandwidth for s in scenarios)):
        for scenario in scenarios:
            runs = measure(scenario, patience)
            results.append((scenario, runs))
            show(scenario, runs)
            if args.json:
                save(results, args.json)
    if args.check:
        CONSOLE.print()
        verdicts = [check(scenario, runs) for scenario, runs in results]
        passed = all(verdicts)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
