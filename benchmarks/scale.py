"""What a message costs the servers, with 16 to 1,024 workers: a claim, an exchange, a heartbeat, ...

    python benchmarks/scale.py                       # a few minutes on one core
    python benchmarks/scale.py --workers 16 64       # fewer workers

Two servers in one process, without a network: the real service of the coordinator, which has a shard too, and that of
another shard. Simulated workers send them what real ones do, in virtual time: they claim samples of epochs, train at
speeds of their own (a step takes 2 s on average; the slowest worker needs four times as long as the fastest), push and
fetch every ten steps, send heartbeats, wait for each other at the ends of sync intervals, and meet there in a
collective. Meanwhile workers are killed and replaced (in a job), or leave and others join (in an elastic run).

A figure is the CPU time of all messages of a kind, divided by their number: what a message costs with all that it
causes, such as the answers to others that wait. Runs are interleaved; medians, minima and maxima are of repeats. What
limits a shard, the memory bandwidth of this machine, is measured too.

The goals: from 16 to 1,024 workers no kind of message costs more than three times as much, and with 1,024 the
coordinator takes less than a fifth of a core. A kind that was not measured fails. :mod:`scale_sockets` measures the
same in real processes.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator

import torch
from common import CONSOLE
from rich.table import Table
from scale_job import KINDS, STEP_S, Job
from scale_limits import GOAL, LOAD, SIZES, exchange_us, measure_limits, show_limits

WORKERS = (16, 64, 256, 1024)
NOT_MESSAGES = ("tick", "garbage", "other")
OF_RUN = {(server, kind) for server in ("coordinator", "shard") for kind in ("exchange", "beat", "join", "leave")}
OF_RUN |= {("coordinator", "claim")}
EXPECTED = {"run": OF_RUN, "job": OF_RUN | {("coordinator", "contribution")}}

Figures = dict[tuple[str, str, str], dict[int, list[float]]]
"""Microseconds per message, of every repeat: by kind of job, server and kind of message; by number of workers."""


def measure(sizes: list[int], repeats: int, epochs: int, most_s: float) -> tuple[Figures, dict[str, dict[int, float]]]:
    """The figures, and the share of a core that the coordinator takes, by kind of job and number of workers."""
    figures: Figures = defaultdict(lambda: defaultdict(list))
    load: dict[str, dict[int, float]] = {"job": {}, "run": {}}
    for repeat in range(repeats):
        for elastic in (False, True):
            for size in sizes:
                job, name = Job(size, elastic=elastic, epochs=epochs, most_s=most_s), "run" if elastic else "job"
                gc.collect()
                gc.freeze()  # what this program holds is not the servers'
                costs = job.run()
                gc.unfreeze()
                for (server, kind), us in costs.us().items():
                    figures[name, server, kind][size].append(us)
                if job.now:
                    spent = sum(ns for (server, _), ns in costs.ns.items() if server == "coordinator") / 1e9
                    load[name][size] = spent / job.now
                whole = "" if job.number > epochs else f"; stopped after {most_s:.0f} s in epoch {job.number}"
                CONSOLE.print(
                    f"  {repeat + 1}/{repeats}  {name}, {size:5} workers: {job.now:4.0f} s of training, "
                    f"{sum(costs.count.values()) // 2:7,} messages{whole}"
                )
    return figures, load


def rows(figures: Figures) -> Iterator[tuple[tuple[str, str, str], dict[int, list[float]]]]:
    """The figures in a fixed order."""
    kinds = [*dict.fromkeys(KINDS.values()), *NOT_MESSAGES]
    yield from sorted(figures.items(), key=lambda item: (item[0][1], kinds.index(item[0][2]), item[0][0]))


def show(figures: Figures, load: dict[str, dict[int, float]], sizes: list[int]) -> bool:
    """Print the figures, and whether each grows as little as it should; returns whether all do."""
    table = Table(title="µs of CPU time per message: median (min-max)", title_justify="left")
    for column in ("server", "message", "of a", *(f"{size:,} workers" for size in sizes), "growth"):
        table.add_column(column, justify="left" if column in ("server", "message", "of a") else "right", no_wrap=True)
    good, lines = True, []
    for (name, server, kind), by_size in rows(figures):
        if kind == "other":  # what workers send once, as they join
            continue
        cells = [
            f"{statistics.median(us):,.0f} ({min(us):,.0f}-{max(us):,.0f})" if (us := by_size.get(size)) else "-"
            for size in sizes
        ]
        growth = ""
        if by_size.get(sizes[0]) and by_size.get(sizes[-1]):
            ratio = statistics.median(by_size[sizes[-1]]) / max(1e-3, statistics.median(by_size[sizes[0]]))
            growth = f"x {ratio:.1f}"
            if kind not in NOT_MESSAGES:
                good &= ratio <= GOAL
                verdict = "PASS" if ratio <= GOAL else "FAIL"
                lines.append(f"{verdict}  {server}, {kind} of a {name}: x {ratio:.2f}, at most x {GOAL:g}")
        table.add_row(server, kind, name, *cells, growth)
    for name in load:
        for server, kind in sorted(EXPECTED[name]):
            measured = figures[name, server, kind]
            if len(sizes) < 2 or not all(measured.get(size) for size in sizes):
                good = False
                lines.append(f"FAIL  {server}, {kind} of a {name}: measured with {len(measured)} number(s) of workers")
    CONSOLE.print(table)
    CONSOLE.print(
        "tick: four times per second, however many workers there are. garbage: what Python's collector takes, per "
        "message of any kind."
    )
    CONSOLE.print(f"from {sizes[0]:,} to {sizes[-1]:,} workers:")
    for line in lines:
        CONSOLE.print(f"  {line}")
    for name, by_workers in load.items():
        most = max(by_workers.values(), default=0.0)
        good &= most < LOAD
        shares = ", ".join(f"{100 * share:.1f} % with {size:,}" for size, share in sorted(by_workers.items()))
        verdict = "PASS" if most < LOAD else "FAIL"
        CONSOLE.print(f"  {verdict}  coordinator of a {name}: {shares} of one core with steps of {STEP_S:g} s, below")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), help="numbers of workers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2, help="epochs of a run (default %(default)s)")
    parser.add_argument("--most", type=float, default=600.0, metavar="S", help="seconds of CPU time of a run, at most")
    parser.add_argument("--link", type=float, default=0.0, metavar="MBIT", help="Mbit/s of the network, as a limit")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = sorted(args.workers)
    CONSOLE.print(f"[bold]scale[/]: {args.repeats} repeats (load {os.getloadavg()[0]:.1f})")
    figures, load = measure(sizes, args.repeats, args.epochs, args.most)
    good = show(figures, load, sizes)
    limits = measure_limits(args.link, {"exchange": {scalars: exchange_us(scalars) for scalars in SIZES}})
    show_limits(CONSOLE, limits)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
