"""Claims of four papers that no other benchmark tries, in virtual time: about twenty minutes on one core.

    python benchmarks/claims.py            # all four
    python benchmarks/claims.py yu         # one: yu, sparknet, speedo, mcmc

The real objects of servers and workers in one thread, digits, plain SGD, steps of 10 ms, medians of three seeds:

yu        Yu, Yang and Zhu 2019: averaging every I = T^(1/4) / N^(3/4) steps reaches the loss of averaging every step.
sparknet  Moritz et al. 2016: averages every 50 steps give a speed-up where communication takes so long that synchronous
          SGD gives none.
speedo    Zheng et al. 2015: its parallel schemes, compared on one system; one of four workers is three times as slow.
mcmc      Li et al. 2019: workers that sample in parallel take less time to samples as good as those of one. Here good
          means a known posterior whose variance is right within 10 %.

The same seeds give the same figures.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from clients import CONSOLE, GBIT, LR, STEP_S, Digits
from rich.table import Table

from lightning_asgd import Advanced
from lightning_asgd.algorithms import Algorithm, LocalSGD, recipe
from lightning_asgd.algorithms.averaging import restarted_period
from lightning_asgd.simulation import Constant, Link, Network, Report, Simulation

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the posterior of the tests

SEEDS = (1, 2, 3)
EVALUATE = 50  # steps of a worker


def train(
    workers: int, nsync: int, algorithm: Algorithm, *, seed: int, steps: int, lr: float = LR, **more: Any
) -> Report:
    """Train with this number of steps per worker."""
    settings: dict[str, Any] = {"speed": Constant(STEP_S), "network": Network(workers=GBIT, servers=GBIT), **more}
    return Simulation(
        problem=Digits(seed),
        workers=workers,
        steps=steps,
        exchange={"nsync": nsync, "algorithm": algorithm, "advanced": Advanced(overlap=False)},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        evaluate_every=EVALUATE * workers,
        seed=seed,
        **settings,
    ).run()


def seconds_to(report: Report, loss: float) -> float:
    """Virtual seconds until the servers' weights have this loss on all training data."""
    return next((point.time_s for point in report.losses if point.loss <= loss), math.inf)


def columns(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table


def yu() -> None:
    steps = 4_096
    table = columns(f"{steps:,} steps of each worker: loss", "workers", "every step", "I", "every I steps", "ratio")
    for workers in (2, 4):
        period = restarted_period(steps, workers)
        losses = [[train(workers, n, LocalSGD(), seed=seed, steps=steps).loss for seed in SEEDS] for n in (1, period)]
        ratios = [rarely / often for often, rarely in zip(*losses, strict=True)]
        often, rarely, ratio = (f"{statistics.median(each):.4f}" for each in (*losses, ratios))
        table.add_row(str(workers), often, str(period), rarely, f"{ratio} ({min(ratios):.3f}-{max(ratios):.3f})")
    CONSOLE.print(table)


def sparknet() -> None:
    slow, loss = 20, 0.2  # how many steps fit into the time of one exchange; the target
    nbytes = 4 * Digits(1).start().numel()
    # A push and a fetch; the server's link is fast, so that workers do not queue.
    link = Link(2 * nbytes / (slow * STEP_S), 1e-4)
    table = columns(
        f"Five workers, an average takes about {slow} steps: virtual seconds to a loss of {loss}", "", "s", "speed-up"
    )
    alone = statistics.median(seconds_to(train(1, 10, LocalSGD(), seed=seed, steps=8_000), loss) for seed in SEEDS)
    table.add_row("one worker", f"{alone:.1f}", "1")
    for tau in (1, 10, 50):
        network = Network(workers=link, servers=GBIT)
        found = statistics.median(
            seconds_to(train(5, tau, LocalSGD(), seed=seed, steps=4_000, network=network, lr=5 * LR), loss)
            for seed in SEEDS
        )
        table.add_row(f"tau = {tau}, five times the learning rate", f"{found:.1f}", f"{alone / found:.2f}")
    CONSOLE.print(table)


def speedo() -> None:
    loss = 0.2
    speeds = [Constant(STEP_S)] * 3 + [Constant(3 * STEP_S)]
    table = columns(
        f"Four workers, one three times as slow: virtual seconds to a loss of {loss}", "scheme", "s", "/ synchronous"
    )
    names = ("speedo_sync", "speedo_partially_sync", "speedo_weed_out", "speedo", "speedo_easgd")
    found = {}
    for name in names:
        settings = recipe(name)
        found[name] = statistics.median(
            seconds_to(train(4, settings["nsync"], settings["algorithm"], seed=seed, steps=2_000, speed=speeds), loss)
            for seed in SEEDS
        )
        table.add_row(name, f"{found[name]:.1f}", f"{found['speedo_sync'] / found[name]:.2f}")
    CONSOLE.print(table)


def mcmc() -> None:
    from tests.unit.test_sgmcmc import PRECISION, RATES, plan, sample

    table = columns(
        "Eight samples of a known posterior",
        "workers, nsync",
        "steps of a worker",
        "speed-up",
        "bias, standard errors",
        "variance / posterior's",
        "predictive loss, nats",
    )
    alone = 0
    for (workers, nsync), rate in RATES.items():
        rule, steps = plan(workers, nsync, rate)
        found = sample(workers, nsync, rule, lr=rate / PRECISION, steps=steps)
        each = steps // workers
        alone = alone or each
        table.add_row(
            f"{workers}, {nsync}",
            f"{each:,}",
            f"{alone / each:.2f}",
            f"{found.bias:.2f}",
            f"{found.variance_ratio:.3f}",
            f"{found.predictive_loss:.4f}",
        )
    CONSOLE.print(table)


CLAIMS = {"yu": yu, "sparknet": sparknet, "speedo": speedo, "mcmc": mcmc}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=f"{', '.join(CLAIMS)}; all without one")
    args = parser.parse_args()
    if unknown := sorted(set(args.claims) - set(CLAIMS)):
        parser.error(f"unknown: {', '.join(unknown)}. Expected {', '.join(CLAIMS)}")
    torch.set_num_threads(1)
    for name in args.claims or CLAIMS:
        CLAIMS[name]()


if __name__ == "__main__":
    main()
