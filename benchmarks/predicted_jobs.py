"""Jobs as the simulator predicts them, beside real ones; and the lemma on the number of servers, beside real servers.

    python benchmarks/predicted_jobs.py              # about ten minutes
    python benchmarks/predicted_jobs.py --repeats 1  # a quick look

Jobs: 2, 4, 8 and 16 worker processes of a plain loop, whose steps sleep, so that two cores carry them; and four workers
of which one is twice and one four times as slow. Right before each job one worker alone is measured: the seconds of its
steps, and between two epochs. The simulator gets these, and what messages cost a server, and nothing else. Compared are
samples per second, from the end of the first epoch to the end of the last, and the mean staleness of all pushes.

Servers: for a model of 100 MB and 16 to 1,024 workers that exchange every 2.5 s, the lemma's number of servers. A real
server is then given the shard that it would have with as many servers, and with one less, and the CPU time of its
exchanges is measured: with the lemma's number it must suffice for all workers, with one less it must not.

The goal: throughput within 10 per cent and staleness within 15; the servers' time within 15 per cent of the period.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import CONSOLE, prepared
from ranks import run_ranks
from rich.table import Table
from torch.utils.data import TensorDataset

from lightning_asgd import AsyncSGD
from lightning_asgd.plan import sizing
from lightning_asgd.plan.sizing import Calibration, ServerCosts
from lightning_asgd.simulation import LeasedData, Network, Quadratic, Simulation, Trace
from lightning_asgd.simulation.measured_costs import measure, server_process

STEP_S, STEPS, EPOCHS, BATCH, NSYNC = 0.1, 30, 5, 8, 5  # STEPS of a worker in an epoch
ALONE = 3  # epochs of a worker that is measured alone
CASES = {
    "2 workers": (1.0,) * 2,
    "4 workers": (1.0,) * 4,
    "8 workers": (1.0,) * 8,
    "16 workers": (1.0,) * 16,
    "4 workers, two slow": (1.0, 1.0, 2.0, 4.0),
}
FASTER, STALER = 0.10, 0.15  # goals
SCALARS, PERIOD_S, WORKERS = 25_000_000, 2.5, (16, 64, 256, 1024)
DEADLINE_S = 300.0


@dataclass
class Figures:
    """What is compared."""

    samples_s: float
    staleness: float


# ---------------------------------------------------------------------- real jobs


def train(rank: int, size: int, sleep_s: float, epochs: int) -> dict[str, Any]:
    """Be one worker of a job."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(size * STEPS * BATCH, 100))
    steps: list[float] = []
    between: list[float] = []
    ends: list[float] = []
    begun: float | None = None
    with AsyncSGD(model, optimizer, nsync=NSYNC) as asgd:
        for _ in asgd.epochs(epochs):
            for number, (x,) in enumerate(asgd.batches(data, batch_size=BATCH, shuffle=True)):
                now = time.monotonic()
                if number == 0 and ends:
                    between.append(now - ends[-1])
                elif number and begun is not None:
                    steps.append(now - begun)
                begun = now
                time.sleep(sleep_s)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            ends.append(time.monotonic())
        stats = asgd.stats
    pushed = {"pushes": stats.pushes, "staleness": stats.staleness_sum}
    return {"ends": ends, "steps_s": steps, "between_s": between, **pushed}


def real(factors: tuple[float, ...], epochs: int) -> list[dict[str, Any]]:
    size = len(factors)
    ranks = [partial(train, rank, size, STEP_S * factor, epochs) for rank, factor in enumerate(factors)]
    return run_ranks(ranks, DEADLINE_S)


def figures(found: list[dict[str, Any]]) -> Figures:
    """Throughput and mean staleness of a job, from what its workers reported."""
    ends = found[0]["ends"]
    samples = len(found) * STEPS * BATCH * (len(ends) - 1)
    staleness = sum(worker["staleness"] for worker in found) / sum(worker["pushes"] for worker in found)
    return Figures(samples / (ends[-1] - ends[0]), staleness)


def predict(factors: tuple[float, ...], alone: dict[str, Any], costs: ServerCosts) -> Figures:
    size = len(factors)
    speeds = [
        Trace([seconds + (factor - 1) * STEP_S for seconds in alone["steps_s"]], shuffled=True) for factor in factors
    ]
    report = Simulation(
        problem=Quadratic(),  # what is trained does not matter for the time
        workers=size,
        data=LeasedData(size * STEPS * BATCH, BATCH),
        epochs=EPOCHS,
        exchange={"nsync": NSYNC},
        speed=speeds,
        epoch_s=statistics.median(alone["between_s"]),
        network=Network(service_s=costs),
    ).run()
    samples = size * STEPS * BATCH * (EPOCHS - 1)
    return Figures(samples / (report.epochs_s[-1] - report.epochs_s[0]), report.staleness_mean)


@dataclass
class Case:
    """Jobs of some workers, predicted and measured."""

    name: str
    factors: tuple[float, ...]
    pairs: list[tuple[Figures, Figures]] = field(default_factory=list)

    def run(self, costs: ServerCosts) -> None:
        """Measure one worker alone, and right after it a job."""
        (alone,) = real((1.0,), ALONE)
        measured, expected = figures(real(self.factors, EPOCHS)), predict(self.factors, alone, costs)
        self.pairs.append((expected, measured))
        CONSOLE.print(
            f"  {self.name}: {expected.samples_s:.0f} samples/s predicted, {measured.samples_s:.0f} measured; "
            f"staleness {expected.staleness:.2f} and {measured.staleness:.2f}; one worker alone: "
            f"{1000 * statistics.mean(alone['steps_s']):.1f} ms per step (load {os.getloadavg()[0]:.1f})"
        )

    def off(self, what: str) -> float:
        """By how much predictions are too high: the median of the jobs."""
        return statistics.median(getattr(one, what) / getattr(other, what) - 1 for one, other in self.pairs)

    @property
    def near(self) -> bool:
        """Whether predictions are as near as they should be."""
        return abs(self.off("samples_s")) <= FASTER and abs(self.off("staleness")) <= STALER

    @property
    def cells(self) -> list[str]:
        """A row of the table."""
        found = [self.name]
        for what, digits in (("samples_s", 1), ("staleness", 2)):
            found += [f"{statistics.median(getattr(pair[i], what) for pair in self.pairs):.{digits}f}" for i in (0, 1)]
            found.append(f"{self.off(what):+.1%}")
        return [*found, "PASS" if self.near else "FAIL"]


def jobs(repeats: int, costs: ServerCosts) -> bool:
    """Print predictions beside measurements; True if they are as near as they should be."""
    cases = [Case(name, factors) for name, factors in CASES.items()]
    for _ in range(repeats):
        for case in cases:
            case.run(costs)
    table = Table(title=f"Predicted and measured: medians of {repeats}", title_justify="left")
    for heading in ("", "samples/s predicted", "measured", "", "staleness predicted", "measured", "", ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for case in cases:
        table.add_row(*case.cells)
    CONSOLE.print(table)
    return all(case.near for case in cases)


# ---------------------------------------------------------------------- numbers of servers


def servers(calibration: Calibration) -> bool:
    """Print the lemma's numbers of servers beside the time of real ones; True if that agrees."""
    table = Table(
        title=f"Servers for {SCALARS / 1e6:.0f} M parameters, an exchange every {PERIOD_S} s", title_justify="left"
    )
    for heading in ("workers", "servers by the lemma", "their core is busy", "with one less", ""):
        table.add_column(heading, justify="right")
    good = True
    with server_process() as server:
        for workers in WORKERS:
            costs, grown_s = calibration.at(workers), 0.0
            assert costs is not None
            grown_s = costs.exchange_s - calibration.by_workers[min(calibration.by_workers)].exchange_s
            job = sizing.Job(
                step_s=PERIOD_S / 10,
                parameter_bytes=4 * SCALARS,
                workers=workers,
                server_gbyte_s=costs.gbyte_s,
                exchange_work_s=costs.exchange_s,
            )
            least = sizing.least_servers(job)
            assert least is not None, job
            busy = []
            for number in (least, least - 1):
                if number:
                    cost_s = server.cpu_s(server.worker(SCALARS // number)[1]) + grown_s
                    busy.append(workers * cost_s / PERIOD_S)
            near = busy[0] <= 1 + STALER and (len(busy) < 2 or busy[1] >= 1 - STALER)
            good &= near
            table.add_row(
                f"{workers:,}", f"{least:,}", *(f"{each:.0%}" for each in [*busy, 0.0][:2]), "PASS" if near else "FAIL"
            )
    CONSOLE.print(table)
    return good


def calibrate() -> dict[str, Any]:
    return {"calibration": measure(WORKERS)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="of every real job (default %(default)s)")
    parser.add_argument("--only", choices=("jobs", "servers"), help="one of the two parts")
    args = parser.parse_args()
    CONSOLE.print(f"[bold]predicted jobs[/]: load {os.getloadavg()[0]:.1f}")
    good = True
    with prepared(one_thread=True):
        # In a process of its own: the workers of the jobs are forked from this one, which must have no threads.
        (found,) = run_ranks([calibrate], DEADLINE_S, launched=False)
        calibration: Calibration = found["calibration"]
        CONSOLE.print(f"with {WORKERS[0]} workers: {calibration.by_workers[WORKERS[0]]}")
        if args.only != "servers":
            good &= jobs(args.repeats, calibration.by_workers[WORKERS[0]])
        if args.only != "jobs":
            good &= servers(calibration)
    CONSOLE.print("Within the goals." if good else "[bold]Not within the goals.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
