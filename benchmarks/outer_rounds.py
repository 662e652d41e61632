"""Rounds of outer momentum, simulated: workers that are lost, and a number of workers that changes.

    python benchmarks/outer_rounds.py                   # ten minutes
    python benchmarks/outer_rounds.py --only goodput --seeds 1

goodput: 64 workers with steps of about one second, in an elastic run. Workers vanish at random moments, and each is
replaced 30 s later. DiLoCo in lock-step and Decoupled DiLoCo meet the same faults. Goodput is the time that 64 workers
need for the samples, divided by that until all are trained. What a lost worker has not pushed is trained again by
others.

members: a character transformer with one worker, then four, then two; and with two throughout. The loss at the servers'
weights, with and without radial-directional averages.

The servers, the workers and the leases are the real ones, under a virtual clock. Exits with 1 if Decoupled DiLoCo's
goodput is not the higher one wherever workers are lost.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from common import CONSOLE, spread

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
from islands_parts import text, transformer
from rich.table import Table
from torch import Tensor, nn

from lightning_asgd.algorithms import Algorithm, DecoupledDiLoCo, DiLoCo, RadialDirectional
from lightning_asgd.simulation import Crash, LateWorker, LeasedData, LogNormal, ModuleProblem, Quadratic, Simulation
from lightning_asgd.simulation.report import Report

PARTS = ("goodput", "members")
WORKERS, BATCH, NSYNC, SPEED = 64, 32, 20, LogNormal(1.0, 0.1)
RESTART_S, SILENCE_S = 30.0, 10.0
NEVER = float("inf")
shown = partial(spread, digits=3)
MEAN_TIMES = (NEVER, 3600.0, 900.0, 300.0)  # seconds between two losses of a worker
IN_STEP, DECOUPLED = "DiLoCo", "Decoupled DiLoCo"
RULES: dict[str, Algorithm] = {IN_STEP: DiLoCo(), DECOUPLED: DecoupledDiLoCo(parts=1)}


# ---------------------------------------------------------------------- workers that are lost


@dataclass(frozen=True)
class Faults:
    """When workers are lost and others join."""

    crashes: tuple[Crash, ...] = ()
    late: tuple[LateWorker, ...] = ()


def faults(mean_s: float, end_s: float, seed: int) -> Faults:
    """Losses at random moments, in each of the workers' places by itself."""
    chance = random.Random(seed)
    joins, losses = list[tuple[float, int]](), list[tuple[float, int, float]]()  # when, in which place, until when
    for place in range(WORKERS):
        joined = 0.0
        while True:
            joins.append((joined, place))
            lost = joined + (chance.expovariate(1 / mean_s) if mean_s < NEVER else NEVER)
            if lost >= end_s:
                break
            losses.append((joined, place, lost))
            joined = lost + RESTART_S
    joins.sort()  # workers are numbered as they join
    numbers = {join: number for number, join in enumerate(joins)}
    crashes = [Crash(numbers[joined, place], lost, None) for joined, place, lost in losses]
    return Faults(tuple(crashes), tuple(LateWorker(joined) for joined, _ in joins[WORKERS:]))


def lose(rule: Algorithm, mean_s: float, steps: int, seed: int) -> tuple[float, Report, int]:
    """A run with faults: its goodput, what is known of it, and how many workers were lost."""
    samples = WORKERS * steps * BATCH
    about = faults(mean_s, 10.0 * steps, seed)
    report = Simulation(
        problem=Quadratic(50, 100.0),
        workers=WORKERS,
        exchange={"nsync": NSYNC, "algorithm": rule},
        speed=SPEED,
        data=LeasedData(samples, BATCH),
        elastic=True,
        crashes=about.crashes,
        late_workers=about.late,
        silence_s=SILENCE_S,
        seed=seed,
    ).run()
    return steps * SPEED.median_s / report.time_s, report, sum(worker.crashed for worker in report.workers)


def goodput(steps: int, seeds: int) -> bool:
    """Every rate of faults, with both rules in turn."""
    table = Table(*("s between losses", "lost in lock-step", *RULES, "ratio", "loss of both"))
    passed = True
    for mean_s in MEAN_TIMES:
        runs = {name: [] for name in RULES}  # type: dict[str, list[tuple[float, Report, int]]]
        for seed, name in itertools.product(range(seeds), RULES):
            begun = time.monotonic()
            runs[name].append(lose(RULES[name], mean_s, steps, seed))
            CONSOLE.print(f"{name}, {mean_s:g} s, seed {seed}: {time.monotonic() - begun:.0f} s", style="dim")
        shares = {name: [share for share, _, _ in each] for name, each in runs.items()}
        ratios = [b / a for a, b in zip(shares[IN_STEP], shares[DECOUPLED], strict=True)]
        lost = [float(number) for _, _, number in runs[IN_STEP]]
        passed &= all(ratio > 1 for ratio, number in zip(ratios, lost, strict=True) if number)
        losses = (statistics.median(report.loss for _, report, _ in runs[name]) for name in RULES)
        cells = (spread(lost, 0), *(shown(shares[name]) for name in RULES), shown(ratios))
        table.add_row(f"{mean_s:g}", *cells, " / ".join(f"{loss:.3g}" for loss in losses))
    CONSOLE.print(table)
    return passed


# ---------------------------------------------------------------------- a number of workers that changes


class Text(ModuleProblem):
    """The character transformer, on batches that every worker draws by itself."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        data, held_out = text()
        inputs, targets = data[:]

        def draw(worker: int, generator: torch.Generator) -> tuple[Any, Any]:
            index = torch.randint(len(inputs), (TEXTS,), generator=generator)
            return inputs[index], targets[index]

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

        whole = held_out[:200]
        super().__init__(nn.Sequential(*transformer()), loss, draw, whole)


TEXTS, PERIOD, STAGE = 16, 20, 300  # pieces in a batch; steps between exchanges, and with each number of workers


def change(rule: Algorithm, numbers: Sequence[int], seed: int) -> Report:
    """A run with a number of workers after the other, each for some steps of one second."""
    first, late, crashes = numbers[0], list[LateWorker](), list[Crash]()
    present, made = list(range(first)), first
    for stage, number in enumerate(numbers[1:], 1):
        moment = float(stage * STAGE)
        for _ in range(max(number - len(present), 0)):
            late.append(LateWorker(moment))
            present.append(made)
            made += 1
        while len(present) > number:
            crashes.append(Crash(present.pop(), moment))
    return Simulation(
        problem=Text(),
        workers=first,
        exchange={"nsync": PERIOD, "algorithm": rule},
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        speed=LogNormal(1.0, 0.02),
        data=LeasedData(sum(numbers) * STAGE * TEXTS, TEXTS),
        elastic=True,
        late_workers=late,
        crashes=crashes,
        evaluate_every=PERIOD,
        seed=seed,
    ).run()


def members(seeds: int) -> None:
    """The loss over time of each run, which a table shows at some moments."""
    merges = {"mean": (), "radial-directional": (RadialDirectional(),)}
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    for (merge, transforms), numbers in itertools.product(merges.items(), ((2, 2, 2), (1, 4, 2))):
        name = f"{merge}, {'-'.join(map(str, numbers))}"
        for seed in range(seeds):
            begun = time.monotonic()
            report = change(DiLoCo(transforms=transforms), numbers, seed)
            curves.setdefault(name, []).append([(point.time_s, point.loss) for point in report.losses])
            CONSOLE.print(f"{name}, seed {seed}: {time.monotonic() - begun:.0f} s", style="dim")
    table = Table("merge", "workers", *(f"loss after {(stage + 1) * STAGE} s" for stage in range(3)), "at the end")
    for name, runs in curves.items():
        cells = [shown([at(curve, (stage + 1) * STAGE) for curve in runs]) for stage in range(3)]
        table.add_row(*name.split(", "), *cells, shown([curve[-1][1] for curve in runs]))
    CONSOLE.print(table)


def at(curve: list[tuple[float, float]], time_s: float) -> float:
    """The last loss before a moment."""
    return [loss for moment, loss in curve if moment <= time_s][-1]


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="the default is both")
    parser.add_argument("--steps", type=int, default=400, help="of a worker, for goodput (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    chosen = arguments.only or PARTS
    passed = True
    if "goodput" in chosen:
        passed = goodput(arguments.steps, arguments.seeds)
    if "members" in chosen:
        members(arguments.seeds)
    if "goodput" in chosen:
        CONSOLE.print("PASS" if passed else "FAIL: Decoupled DiLoCo's goodput is not the higher one under faults.")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
