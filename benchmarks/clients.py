"""Paine et al. 2013 with 1, 2, 4, 8 and 16 clients, in virtual time: cold start, warm start, and ``nsync``.

    python benchmarks/clients.py            # about ten minutes on one core
    python benchmarks/clients.py --quick    # 1, 4 and 16 clients for a short time

The real objects of servers and workers in one thread: examples/paine2013.py trains real processes, as far as two cores
carry them (four workers). As there: digits, plain SGD, every push added in full, ASGD("sum"), and a worker waits for
its exchange. A step takes 10 ms. Links have 1 Gbit/s and 0.1 ms, and all clients share the server's, as they shared the
paper's; so a small nsync costs mini-batches.

Every run lasts as many virtual seconds. A warm run begins with the weights of a single client after 30 % of that time.
Figures are medians of the seeds. On one machine the same seeds give the same figures.

The paper's claims, each of which the program answers with yes, no or in part, and the figures:

1. more clients learn more slowly at first and faster later, from a cold start;
2. after a warm start each nsync is faster with more clients;
3. the smallest nsync processes the fewest mini-batches and yet has the lowest error;
4. a large nsync makes the curve jagged.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import CONSOLE
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from lightning_asgd import Advanced
from lightning_asgd.algorithms import ASGD
from lightning_asgd.report.picture_style import PAPER, SERIES, pyplot
from lightning_asgd.simulation import Constant, Link, ModuleProblem, Network, Simulation

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

CLIENTS, NSYNCS, SEEDS = (1, 2, 4, 8, 16), (1, 10, 100), (1, 2, 3)
STEP_S, LR, BATCH, WARM = 0.01, 0.01, 16, 0.3
GBIT = Link(125e6, 1e-4)
LOST = 2.0  # a loss above this is no better than a guess, which has 2.3


@dataclass(frozen=True)
class Curve:
    """One run: the loss of the servers' weights on all training data, by virtual seconds."""

    times: list[float]
    losses: list[float]
    batches: int  # of one client
    weights: Tensor

    def at(self, second: float) -> float:
        """The latest loss at a time."""
        return next(
            loss for time, loss in zip(reversed(self.times), reversed(self.losses), strict=True) if time <= second
        )

    def mean(self, begin: float, end: float) -> float:
        found = [loss for time, loss in zip(self.times, self.losses, strict=True) if begin <= time <= end]
        return statistics.fmean(found) if found else self.at(end)

    @property
    def roughness(self) -> float:
        """Mean rise of the loss from one evaluation to the next, beside its mean: 0 for a curve that only falls."""
        late = self.losses[len(self.losses) // 4 :]
        return statistics.fmean(max(0.0, b - a) for a, b in itertools.pairwise(late)) / statistics.fmean(late)


class Digits(ModuleProblem):
    """The digits of the examples; clients draw batches from all of them."""

    def __init__(self, seed: int, start: Tensor | None = None) -> None:
        from digits import datasets
        from paine2013 import digits_network

        x, y = datasets()[0].tensors
        torch.manual_seed(seed)

        def batch(worker: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
            chosen = torch.randint(len(x), (BATCH,), generator=generator)
            return x[chosen], y[chosen]

        super().__init__(digits_network(), functional.cross_entropy, batch, (x, y))
        self._first = start

    def start(self) -> Tensor:
        return super().start() if self._first is None else self._first.clone()

    def loss(self, weights: Tensor) -> float:
        found = super().loss(weights)
        return min(found, 1e3) if not math.isnan(found) else 1e3


def train(clients: int, nsync: int, seed: int, seconds: float, start: Tensor | None = None) -> Curve:
    """A run of some virtual seconds."""
    simulation = Simulation(
        problem=Digits(seed, start),
        workers=clients,
        steps=round(seconds / STEP_S),  # of a client that needs no exchange: cut off below
        exchange={"nsync": nsync, "algorithm": ASGD("sum"), "advanced": Advanced(overlap=False)},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR),
        speed=Constant(STEP_S),
        network=Network(workers=GBIT, servers=GBIT),
        evaluate_every=10 * clients,
        seed=seed,
    )
    report = simulation.run()
    points = [point for point in report.losses if point.time_s <= seconds]
    batches = round(max(point.steps for point in points) / clients)
    return Curve([p.time_s for p in points], [p.loss for p in points], batches, report.weights)


def median(curves: Sequence[Curve], what: Any) -> float:
    return statistics.median(what(curve) for curve in curves)


def verdict(seen: Sequence[bool]) -> str:
    return "yes" if all(seen) else "in part" if any(seen) else "no"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three numbers of clients, one seed, a short time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    clients, seeds, seconds = ((1, 4, 16), (1,), 2.0) if args.quick else (CLIENTS, SEEDS, 6.0)
    warm_s = WARM * seconds
    cold: dict[int, list[Curve]] = {n: [] for n in clients}
    warm: dict[tuple[int, int], list[Curve]] = {(n, nsync): [] for n in clients for nsync in NSYNCS}
    for seed in seeds:
        start = train(1, 10, seed, warm_s).weights
        for n in clients:
            cold[n].append(train(n, 10, seed, seconds))
            for nsync in NSYNCS:
                warm[n, nsync].append(train(n, nsync, seed, seconds - warm_s, start))
            CONSOLE.print(f"  seed {seed}, {n} clients")
    table = Table(
        title=f"loss on all training data; medians of {len(seeds)} seeds; {seconds:g} s, warm from {warm_s:g} s on"
    )
    table.add_column("", no_wrap=True)
    for column in (f"cold\n- {warm_s:g} s", f"cold\n{seconds:g} s"):
        table.add_column(column, justify="right")
    for nsync in NSYNCS:
        table.add_column(f"warm\nnsync {nsync}", justify="right")
        table.add_column("batches", justify="right")
        table.add_column("rough", justify="right")
    for n in clients:
        cells = [
            f"{median(cold[n], lambda c: c.mean(0.0, warm_s)):.3f}",
            f"{median(cold[n], lambda c: c.losses[-1]):.4f}",
        ]
        for nsync in NSYNCS:
            each = warm[n, nsync]
            cells += [
                f"{median(each, lambda c: c.losses[-1]):.4f}",
                f"{median(each, lambda c: c.batches):.0f}",
                f"{median(each, lambda c: c.roughness):.3f}",
            ]
        table.add_row(f"{n} client{'s' * (n > 1)}", *cells)
    CONSOLE.print(table)
    claims(cold, warm, clients, warm_s)
    picture(cold, warm, clients, warm_s)


def claims(
    cold: dict[int, list[Curve]], warm: dict[tuple[int, int], list[Curve]], clients: Sequence[int], warm_s: float
) -> None:
    """Print an answer to each claim."""
    last = {key: median(curves, lambda c: c.losses[-1]) for key, curves in (cold | warm).items()}  # type: ignore[operator]
    early = {n: median(curves, lambda c: c.mean(0.0, warm_s)) for n, curves in cold.items()}
    more = [n for n in clients if n > 1]
    slower = [early[n] > early[1] for n in more]
    faster = [last[n] < last[1] for n in more]
    CONSOLE.print(f"1. cold: slower at first: {verdict(slower)} {dict(zip(more, slower, strict=True))}; ", end="")
    CONSOLE.print(f"faster later: {verdict(faster)} {dict(zip(more, faster, strict=True))}")
    for nsync in NSYNCS:
        better = [last[n, nsync] < last[1, nsync] for n in more]
        CONSOLE.print(
            f"2. warm, nsync {nsync}: faster with more: {verdict(better)} {dict(zip(more, better, strict=True))}"
        )
    least = [
        median(warm[n, NSYNCS[0]], lambda c: c.batches) < 0.98 * median(warm[n, NSYNCS[-1]], lambda c: c.batches)
        for n in more
    ]
    lower = [last[n, NSYNCS[0]] < min(last[n, nsync] for nsync in NSYNCS[1:]) for n in more]
    CONSOLE.print(
        f"3. nsync {NSYNCS[0]}: fewest mini-batches: {verdict(least)} {dict(zip(more, least, strict=True))}; ", end=""
    )
    CONSOLE.print(f"lowest loss: {verdict(lower)} {dict(zip(more, lower, strict=True))}")
    rough = [
        median(warm[n, NSYNCS[-1]], lambda c: c.roughness) > median(warm[n, NSYNCS[0]], lambda c: c.roughness)
        for n in more
    ]
    CONSOLE.print(f"4. nsync {NSYNCS[-1]} is more jagged: {verdict(rough)} {dict(zip(more, rough, strict=True))}")


def picture(
    cold: dict[int, list[Curve]], warm: dict[tuple[int, int], list[Curve]], clients: Sequence[int], warm_s: float
) -> None:
    """Save the curves of the first seed."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 1 + len(NSYNCS), figsize=(15, 4.4), sharey=True, layout="constrained")
    panels: list[tuple[str, dict[int, Curve], float]] = [
        ("cold start, nsync 10", {n: curves[0] for n, curves in cold.items()}, 0.0)
    ]
    panels += [(f"warm start, nsync {k}", {n: warm[n, k][0] for n in clients}, warm_s) for k in NSYNCS]
    for panel, (title, curves, shift) in zip(axes, panels, strict=True):
        for colour, (n, curve) in zip(SERIES, curves.items(), strict=False):
            label = f"{n} client{'s' * (n > 1)} ({curve.batches:,})"
            panel.plot([shift + t for t in curve.times], curve.losses, color=colour, lw=1.5, label=label)
        panel.axhline(LOST, color=PAPER["soft"], lw=0.8, ls=":")
        panel.set(title=title, xlabel="virtual seconds", yscale="log", ylim=(5e-3, 20))
        panel.legend(title="mini-batches per client", fontsize=8, title_fontsize=8, alignment="left")
    axes[0].set_ylabel("loss on all training data")
    path = ROOT / "results" / "clients.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    CONSOLE.print(f"Saved {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
