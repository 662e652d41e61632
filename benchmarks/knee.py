"""The smallest nsync with no waiting: by the formula, in real runs, and as nsync="auto" finds it.

Two workers on two machines (network namespaces) joined by a slow cable; the server runs on the first one's machine, so
that the cable carries only the second machine's exchanges. Workers wait rather than take more than nsync steps between
two exchanges, or no period would be too small. The second one's seconds between two exchanges are then those of an
exchange for small periods, and those of the steps for large ones; the knee is where the two lines meet. Needs Linux and
root.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import prepared, verdict
from network import Network, two_machines
from rich.table import Table
from throughput import CONSOLE, DISTURBED, Patience, Scenario, System, build_module, run

from lightning_asgd.plan import sizing

TOLERANCE = 0.2  # of the formula, and of what "auto" chooses
FACTORS = (0.15, 0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0)  # periods of the sweep, of the formula's
LONG = 5  # times the formula's period, where nothing but steps takes time
QUEUE_S = 1.0  # of the cable: an exchange is to take as long as the cable needs, and no packet to be sent twice
FAR = 1  # the worker whose exchanges go over the cable


@dataclass(frozen=True)
class Knee:
    """Two lines through seconds between exchanges, by steps between them: ``max(exchange_s, n * step_s + cost_s)``."""

    exchange_s: float
    step_s: float
    cost_s: float

    @property
    def nsync(self) -> float:
        """Where they meet."""
        return (self.exchange_s - self.cost_s) / self.step_s

    def cycle_s(self, nsync: float) -> float:
        return max(self.exchange_s, nsync * self.step_s + self.cost_s)


def fit(periods: Sequence[int], cycles_s: Sequence[float]) -> Knee:
    """The lines with the smallest relative errors: every way to share the points out between them is tried.

    Args:
        periods: steps between two exchanges, ascending, at least four.
        cycles_s: seconds between two exchanges, measured.
    """
    fits = []
    for exposed in range(1, len(periods) - 1):
        line = statistics.linear_regression(periods[exposed:], cycles_s[exposed:])
        if line.slope > 0:
            fits.append(Knee(statistics.median(cycles_s[:exposed]), line.slope, max(0.0, line.intercept)))
    return min(fits, key=lambda k: sum((k.cycle_s(n) / c - 1) ** 2 for n, c in zip(periods, cycles_s, strict=True)))


def measure(scenario: Scenario, nsync: int | str, network: Network, patience: Patience) -> dict[str, Any]:
    """A run, again while other programs disturb it."""
    while True:
        patience.wait()
        result = run(scenario, System("A-SGD", nsync), network)
        if not patience.repeat(result, scenario.seconds):
            return result


def step_s(scenario: Scenario, result: dict[str, Any]) -> float:
    """Seconds per step of the worker behind the cable."""
    return scenario.batch / float(result["per_rank"][FAR])


def sweep(scenario: Scenario, repeats: int, network: Network, patience: Patience) -> dict[str, Any]:
    """Measure everything.

    Returns:
        the formula's job and period, seconds between exchanges by period, and what "auto" chose.
    """
    nbytes = sum(p.nbytes for p in build_module(scenario.params).parameters())
    rough = sizing.Job(step_s=1.0, parameter_bytes=nbytes, workers=1, worker_gbit_s=(scenario.bandwidth or 0) / 1000)
    guess = max(2, math.ceil(sizing.round_trip_s(rough) / step_s(scenario, measure(scenario, 1000, network, patience))))
    long = LONG * guess
    alone_s = statistics.median(step_s(scenario, measure(scenario, long, network, patience)) for _ in range(repeats))
    job = replace(rough, step_s=alone_s)
    formula = sizing.round_trip_s(job) / alone_s
    periods = sorted({max(1, round(f * formula)) for f in FACTORS})
    cycles: dict[int, list[float]] = {n: [] for n in periods}
    chosen, others = [], []
    for repeat in range(repeats):
        for nsync in periods:
            result = measure(scenario, nsync, network, patience)
            seconds = step_s(scenario, result)
            cycles[nsync].append(nsync * seconds)
            others.append(result["other_cpu_share"])
            CONSOLE.print(f"  {repeat + 1}/{repeats}  nsync {nsync:<5} {scenario.batch / seconds:7.0f} samples/s")
        result = measure(scenario, "auto", network, patience)
        seconds, steps = step_s(scenario, result), result["steps_per_push_per_rank"][FAR]
        chosen.append(steps)
        CONSOLE.print(
            f"  {repeat + 1}/{repeats}  nsync auto  {scenario.batch / seconds:7.0f} samples/s, {steps:.1f} steps"
        )
    return {"job": asdict(job), "formula": formula, "cycles_s": cycles, "auto": chosen, "others": max(others)}


def show(scenario: Scenario, found: dict[str, Any]) -> bool:
    """Print what was found.

    Returns:
        whether all are within the tolerance.
    """
    medians = {n: statistics.median(values) for n, values in found["cycles_s"].items()}
    knee = fit([*medians], [*medians.values()])
    job = sizing.Job(**found["job"])
    table = Table(
        "nsync", "samples/s", "by the formula", "seconds between exchanges", title="the worker behind the cable"
    )
    for nsync, seconds in medians.items():
        expected = scenario.batch * sizing.efficiency(replace(job, nsync=nsync)) / job.step_s
        table.add_row(f"{nsync}", f"{scenario.batch * nsync / seconds:.0f}", f"{expected:.0f}", f"{seconds:.3f}")
    CONSOLE.print(table)
    auto = statistics.median(found["auto"])
    CONSOLE.print(
        f"step {job.step_s * 1000:.1f} ms; an exchange takes {knee.exchange_s:.3f} s, by the formula "
        f"{sizing.round_trip_s(job):.3f} s; it costs {knee.cost_s * 1000:.1f} ms of training"
    )
    good = True
    for name, value in (("formula", found["formula"]), ('nsync="auto"', auto)):
        ratio = value / knee.nsync
        text = f"{name} {value:.1f}, knee {knee.nsync:.1f}: ratio {ratio:.2f}, target 1 ± {TOLERANCE}"
        good &= verdict(abs(ratio - 1) <= TOLERANCE, text)
    if found["others"] > DISTURBED:
        CONSOLE.print(f"[yellow]Other programs took up to {found['others']:.0%} of a core: measure again when idle.[/]")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--bandwidth", type=float, default=100.0, metavar="MBIT", help="of the cable (default 100)")
    parser.add_argument("--params", type=float, default=0.6e6, help="parameters of the model (default %(default)g)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="measuring window of a run (default %(default)s)")
    parser.add_argument("--patience", type=float, default=0.0, metavar="SECONDS", help="to wait for other programs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # one thread per worker
    import pytorch_lightning  # noqa: F401  # once, for all forked ranks

    scenario = Scenario(
        "knee",
        params=int(args.params),
        bandwidth=args.bandwidth,
        batch=args.batch,
        seconds=args.seconds,
        kept=True,
    )
    with prepared(machines=True), two_machines(args.bandwidth, QUEUE_S) as network:
        CONSOLE.print(f"{scenario.describe()}")
        found = sweep(scenario, args.repeats, network, Patience(args.patience))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if show(scenario, found) else 1


if __name__ == "__main__":
    sys.exit(main())
