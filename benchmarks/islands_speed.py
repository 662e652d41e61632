"""How fast islands are, what they send, and what memory they need. Parts of :mod:`islands`."""

from __future__ import annotations

import mmap
import statistics
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import throughput
import torch
from common import CONSOLE, spread
from islands_program import Task
from islands_ranks import Place, Shape, run_islands
from memory import kilobytes
from network import Network, two_machines
from ranks import Slowness
from rich.table import Table
from throughput import Scenario, System, build_loader, trainer_options
from torch import nn

RUN_S = 300.0
MBIT = 100
APART, LIKE_DDP = 0.9, 0.97  # of islands that never talk; of DDP in one island
NSYNC = 10
DDP, UNJOINED = Shape(1, 4, joined=False), Shape(2, 2, joined=False)
ISLANDS = (Shape(1, 4), Shape(2, 2), Shape(4, 1))
BATCH = 8  # of bytes and memory
LIMIT, OVERHEAD = 1.0, 0.01  # of the parameters' bytes; the cable carries headers, acknowledgements and leases too
VECTORS, REPEATS = 3.0, 5


# ---------------------------------------------------------------------- speed


def train(scenario: Scenario, marks: list[mmap.mmap], place: Place) -> dict[str, Any]:
    """Train until the time is up; see :func:`throughput.train`. The ranks of an island stop at the same step."""
    shape, island = place.shape, place.island
    if island and shape.ranks > 1:
        scenario = replace(scenario, slow=1.0)  # the second rank of the first island is slow
    system = System("DDP" if shape.ranks > 1 else "A-SGD", NSYNC)
    rank = place.rank if shape.ranks > 1 else island
    options = {"devices": shape.ranks, "num_nodes": 1, "strategy": place.strategy(NSYNC)}
    return throughput.train(scenario, system, rank, marks[island], callbacks=[place.together()], **options)


def measure(scenario: Scenario, shape: Shape, network: Network | None) -> float:
    """Samples per second of all ranks together."""
    marks = [mmap.mmap(-1, 8) for _ in range(shape.islands)]
    try:
        answers = run_islands(shape, partial(train, scenario, marks), scenario.seconds + RUN_S, network)
    finally:
        for mark in marks:
            mark.close()
    return float(throughput._evaluate(scenario, answers)["samples_per_s"])


def compare(
    scenario: Scenario, shapes: tuple[Shape, ...], targets: dict[Shape, tuple[Shape, float]], network: Network | None
) -> bool:
    """Measure in turns; True if the targets are met: by shape, beside which one and how much of it."""
    runs: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    for repeat in range(scenario.repeats):
        for shape, speeds in runs.items():
            speeds.append(measure(scenario, shape, network))
            CONSOLE.print(f"  {repeat + 1}/{scenario.repeats}  {shape!s:<24} {speeds[-1]:7.0f} samples/s")
    title = f"{scenario.name}: {scenario.describe()}; medians (min-max)"
    table = Table("", "samples/s", f"of {shapes[0]}", "target", title=title, title_justify="left")
    passed = True
    for shape, speeds in runs.items():
        target, share = "", ratios(speeds, runs[shapes[0]])
        if shape in targets:
            base, limit = targets[shape]
            found = ratios(speeds, runs[base])
            passed &= statistics.median(found) >= limit
            target = f"{spread(found, 3)} of {base}: {limit:g}"
        table.add_row(str(shape), spread(speeds, 0), spread(share, 3), target)
    CONSOLE.print(table)
    return passed


def ratios(mine: list[float], theirs: list[float]) -> list[float]:
    """Of neighbouring runs."""
    return [a / b for a, b in zip(mine, theirs, strict=True)]


SCENARIOS = ("one island", "equal ranks", "slow cable", "slow rank")


def speed(repeats: int, seconds: float, names: list[str] | None) -> list[bool]:
    """Measure samples per second in every scenario, or in those of these names."""
    base = Scenario("", workers=4, repeats=repeats, seconds=seconds)
    pair, joined = Shape(1, 2, joined=False), Shape(1, 2)
    cable = (DDP, UNJOINED, Shape(2, 2), Shape(4, 1))
    scenarios: dict[str, tuple[dict[str, Any], tuple[Shape, ...], dict[Shape, tuple[Shape, float]]]] = {
        "one island": ({"workers": 2}, (pair, joined), {joined: (pair, LIKE_DDP)}),
        "equal ranks": ({}, (DDP, UNJOINED, *ISLANDS), {Shape(2, 2): (UNJOINED, APART)}),
        "slow cable": ({"bandwidth": MBIT}, cable, {Shape(2, 2): (UNJOINED, APART)}),
        "slow rank": ({"slow": 4.0}, (DDP, *ISLANDS), {Shape(2, 2): (DDP, 1.0)}),
    }
    verdicts = []
    for name in names or scenarios:
        conditions, shapes, targets = scenarios[name]
        scenario = replace(base, name=name, **conditions)
        with two_machines(mbit=MBIT) if scenario.bandwidth else nullcontext(None) as network:
            verdicts.append(compare(scenario, shapes, targets, network))
    return verdicts


# ---------------------------------------------------------------------- bytes and memory


class Watch(pl.Callback):
    """Reads figures of this process after steps, as many steps apart as there are between exchanges."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.cable: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % NSYNC == NSYNC - 1 and batch_idx >= NSYNC:  # the exchange that began nine steps ago is over
            self.cable.append(on_cable())
        if batch_idx == 2:  # optimizer states and buffers are there
            Path("/proc/self/clear_refs").write_text("5")  # the peak is taken from now on
        trainer.should_stop |= batch_idx == self.steps
        self.peak = 1024 * kilobytes(Path("/proc/self/status"))["VmHWM"]


def on_cable() -> tuple[int, int]:
    """Bytes that this machine has received from others and sent to them, as the kernel counts them."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.strip().partition(":")
        if name.startswith(("veth-", "eth")):  # of two machines, and of more
            return int(counts.split()[0]), int(counts.split()[8])
    return 0, 0


def wide(layers: int, width: int) -> list[nn.Module]:
    """Square layers with little work per parameter."""
    return [layer for _ in range(layers) for layer in (nn.Linear(width, width, bias=False), nn.ReLU())]


def take_steps(layers: int, width: int, steps: int, step_s: float, place: Place) -> dict[str, Any]:
    """Take steps on random samples, and report the figures."""
    pl.seed_everything(1, verbose=False)
    watch, slowness = Watch(steps), Slowness(seconds=step_s)

    class Slow(Task):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            slowness.before_step(slow=True)
            return super().training_step((batch[0].flatten(1)[:, :width], batch[1]), batch_idx)

    optimizer = partial(torch.optim.SGD, lr=0.001, momentum=0.9)
    module = Slow(wide(layers, width), optimizer, sharded=True)
    options = {**trainer_options(), "devices": place.shape.ranks, "callbacks": [watch, place.together()]}
    loader = build_loader(100 * BATCH * steps, BATCH, BATCH)  # more than are taken
    pl.Trainer(strategy=place.strategy(NSYNC), **options).fit(module, loader)
    return {"cable": watch.cable, "peak": watch.peak, "parameters": layers * width * width}


def traffic() -> bool:
    """Print what crosses the cable; True if it is what the parameters need."""
    with two_machines(mbit=MBIT) as network:
        shape = Shape(2, 2, "fsdp2")
        answers = run_islands(shape, partial(take_steps, 4, 512, 121, 0.1), RUN_S, network)
    away = answers[-1]  # of the island without the servers
    needed = 4 * away["parameters"] / NSYNC
    first, last = away["cable"][0], away["cable"][-1]
    steps = NSYNC * (len(away["cable"]) - 1)
    received, sent = ((b - a) / steps for a, b in zip(first, last, strict=True))
    CONSOLE.print(
        f"{shape}, {away['parameters'] / 1e6:.2f} M parameters, nsync {NSYNC}, {steps} steps: {received:,.0f} bytes "
        f"received and {sent:,.0f} sent per step, {received / needed:.3f} and {sent / needed:.3f} of 4 bytes times "
        f"parameters / nsync (limit {LIMIT:g}, and {OVERHEAD:.0%} for headers, heartbeats and leases)"
    )
    return max(received, sent) <= (LIMIT + OVERHEAD) * needed


def memory() -> bool:
    """Print the peaks; True if a rank needs no more than its vectors beyond FSDP2 alone.

    The same program's peak varies by two of these vectors from run to run, with FSDP2 alone, too.
    """
    plain, joined = (Shape(1, 2, "fsdp2", joined=joined) for joined in (False, True))
    job = partial(take_steps, 15, 2000, 13, 0.0)
    peaks: dict[Shape, list[float]] = {plain: [], joined: []}
    for shape in (plain, joined) * REPEATS:
        answers = run_islands(shape, job, RUN_S)
        peaks[shape].append(max(answer["peak"] for answer in answers) / 1e6)
    shard = 4 * answers[0]["parameters"] / joined.ranks
    beyond = 1e6 * (statistics.median(peaks[joined]) - statistics.median(peaks[plain])) / shard
    found = ", ".join(
        f"{shape}: {statistics.median(p):.0f} ({min(p):.0f} - {max(p):.0f}) MB" for shape, p in peaks.items()
    )
    CONSOLE.print(
        f"{answers[0]['parameters'] / 1e6:.0f} M parameters, peak RSS of a rank: {found}. That is {beyond:.2f} vectors "
        f"of the {shard / 1e6:.0f} MB that it holds (limit {VECTORS:g})"
    )
    return beyond <= VECTORS
