"""Codes for exchanges: their speed, what they cost in loss, and what they gain on a slow link.

    python benchmarks/codes.py                    # as root under Linux: about 25 minutes
    python benchmarks/codes.py --only speed       # this part needs no root

speed   milliseconds to encode and decode 100 MB, each beside a copy of 100 MB into another buffer, by one thread.
loss    a character transformer, trained with AdamW for some epochs by four workers that are all on another machine than
        the server (network namespaces): loss on held-out text, and bytes per step of a worker.
links   seconds to a loss on the same task, with four workers that share a link of 10 or 100 Mbit/s to the server. The
        time between two validations is interpolated. What does not reach the loss counts with the time of the limit.

Rows are default A-SGD with each compression, and SparseLoCo, all with nsync=10, interleaved; SparseLoCo also with
nsync=30. Workers all learn the same epochs, and a seed fixes the first weights, so ratios are taken by seed.

Writes results/codes.json. Exits with 1 if coding with few bits takes more than six copies, or if the loss with 4 bits
or SparseLoCo is more than 1 % above that with fp32.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

import pytorch_lightning as pl
import torch
from common import CONSOLE, prepared, spread
from exchange import timed
from islands_speed import on_cable
from network import Network, two_machines
from plain_loop import served
from ranks import run_ranks
from rich.table import Table
from rules_sets import SETS, Learner, measured
from throughput import trainer_options
from torch.utils.data import DataLoader, Subset

from lightning_asgd import ASGDStrategy
from lightning_asgd.algorithms import SparseLoCo
from lightning_asgd.compression import Compression, find_compression

FILE = Path(__file__).resolve().parent.parent / "results" / "codes.json"
WORKERS, NSYNC, RUN, START_S = 4, 10, "codes", 120.0
COPIES, LIMIT = 6.0, 0.01
FP32, SPARSE = "fp32", "SparseLoCo"
ROWS: dict[str, dict[str, Any]] = {
    FP32: {},
    **{name: {"compression": name} for name in ("bf16", "fp16", "int8", "topk", "4bit", "2bit", "1bit")},
    SPARSE: {"algorithm": SparseLoCo()},
    f"{SPARSE}, nsync 30": {"algorithm": SparseLoCo(), "nsync": 30},
}
FAST = ("4bit", "2bit", "1bit", SPARSE)  # these are meant to take at most COPIES copies
GOOD = ("4bit", SPARSE)  # these are meant to lose at most LIMIT beside fp32
VALIDATED = 256  # pieces of text, after every epoch of a race
Results = dict[str, list[dict[str, Any]]]


# ---------------------------------------------------------------------- speed


def code_of(row: str) -> Compression | None:
    """What a row's pushes are coded with."""
    options = ROWS[row]
    return options["algorithm"].code if "algorithm" in options else find_compression(options.get("compression"))


def time_codes(rows: Sequence[str], megabytes: int, repeats: int) -> Results:
    """Seconds of a copy, of encoding and of decoding, in turns."""
    torch.set_num_threads(1)
    values = torch.randn(megabytes * 250_000, generator=torch.Generator().manual_seed(0))
    other, decoded = torch.empty_like(values), torch.empty_like(values)
    times: Results = {row: [] for row in rows if row != FP32 and "nsync" not in ROWS[row]}
    for repeat in range(repeats + 1):
        for row, found in times.items():
            code = code_of(row)
            assert code is not None
            copy_s, _ = timed(partial(other.copy_, values))
            encode_s, coded = timed(partial(code.encode, values))
            decode_s, _ = timed(partial(code.decode, coded, decoded))
            if repeat:  # the first turn warms up
                found.append({"copy_s": copy_s, "encode_s": encode_s, "decode_s": decode_s})
    return times


def show_speed(times: Results, megabytes: int) -> bool:
    """Print the times; True if codes of few bits are as fast as they are meant to be."""
    title = f"{megabytes} MB, one thread: ms, and times as long as a copy; medians (min-max)"
    headings = ("copy, ms", "encode, ms", "decode, ms", "encode, copies", "decode, copies", f"limit {COPIES:g}")
    table = Table("", *headings, title=title, title_justify="left")
    good = True
    for row, found in times.items():
        took = [spread([1000 * each[kind] for each in found], 0) for kind in ("copy_s", "encode_s", "decode_s")]
        shares = [[each[kind] / each["copy_s"] for each in found] for kind in ("encode_s", "decode_s")]
        fast = max(statistics.median(share) for share in shares) <= COPIES
        good &= fast or row not in FAST
        table.add_row(row, *took, *(spread(share, 2) for share in shares), verdict(fast) if row in FAST else "")
    CONSOLE.print(table)
    return good


def verdict(good: bool) -> str:
    """For a table."""
    return "[green]PASS" if good else "[red]FAIL"


# ---------------------------------------------------------------------- a run


@dataclass(frozen=True)
class Job:
    """What all workers of a run do.

    Attributes:
        goal: the loss at which they stop; None to train all epochs, with a learning rate that falls to 0.
        limit_s: when they give up.
    """

    row: str
    seed: int
    epochs: int
    goal: float | None = None
    limit_s: float = 120.0


class Watch(pl.Callback):
    """Begins with all workers at once, notes the loss over time and the bytes on the cable, and stops at the goal."""

    def __init__(self, job: Job, all_workers: Any) -> None:
        self.job, self.all_workers = job, all_workers
        self.curve: list[tuple[float, float]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.all_workers.wait(START_S)
        self.began, self.before = time.perf_counter(), sum(on_cable())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        seconds, loss = time.perf_counter() - self.began, float(trainer.callback_metrics["val_loss"])
        self.curve.append((seconds, loss))
        if self.job.goal is not None and (loss <= self.job.goal or seconds > self.job.limit_s):
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.bytes = sum(on_cable()) - self.before


def train(job: Job, address: str, network: Network, all_workers: Any) -> dict[str, Any]:
    """Train as one of the workers, all of which are on the second machine."""
    network.enter(1)
    torch.set_num_threads(1)
    pl.seed_everything(job.seed, verbose=False)
    problem, watch = SETS["text"], Watch(job, all_workers)
    module = Learner(problem, falling=job.goal is None)
    data, held_out = problem.data()
    loaders = [DataLoader(data, problem.batch, shuffle=True)]
    if job.goal is not None:
        loaders.append(DataLoader(Subset(held_out, range(VALIDATED)), VALIDATED))
    strategy = ASGDStrategy(**{"nsync": NSYNC, **ROWS[job.row]}, run=address, monitor=False)
    options = {**trainer_options(), "max_epochs": job.epochs, "devices": 1, "num_sanity_val_steps": 0}
    pl.Trainer(**options, strategy=strategy, callbacks=[watch]).fit(module, *loaders)
    stats = strategy.stats
    about = {"steps": stats.steps, "pushed": stats.bytes_pushed, "fetched": stats.bytes_fetched, "cable": watch.bytes}
    return {**about, "curve": watch.curve, **(measured(module, held_out) if job.goal is None else {})}


def run(job: Job, network: Network) -> dict[str, Any]:
    """One run: the first worker's loss, and the bytes of all workers by step."""
    all_workers = multiprocessing.get_context("fork").Barrier(WORKERS)
    with served(RUN, network) as address:
        each = partial(train, job, address, network, all_workers)
        answers = run_ranks([each] * WORKERS, START_S + 2 * job.limit_s, launched=False)
    steps = sum(answer["steps"] for answer in answers)
    per_step = {name: sum(answer[name] for answer in answers) / steps for name in ("pushed", "fetched")}
    cable = max(answer["cable"] for answer in answers) / steps  # all workers are on the same machine
    kept = {name: answers[0][name] for name in ("curve", "loss", "accuracy") if name in answers[0]}
    return {**asdict(job), **kept, **per_step, "cable": cable, "steps": steps}


# ---------------------------------------------------------------------- loss and bytes


def losses(rows: Sequence[str], seeds: int, epochs: int) -> Results:
    """Train with every code, seed by seed."""
    found: Results = {row: [] for row in rows}
    with two_machines() as network:
        for seed in range(1, 1 + seeds):
            for row in rows:
                entry = run(Job(row, seed, epochs), network)
                found[row].append(entry)
                CONSOLE.print(f"  seed {seed}  {row:<22} loss {entry['loss']:.4f}  {entry['cable']:9,.0f} bytes/step")
    return found


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Of the same seeds."""
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def show_losses(found: Results) -> bool:
    """Print losses and bytes; True if the codes that are meant to lose nothing lose less than the limit."""
    title = f"character transformer, {WORKERS} workers: loss, and bytes of a worker per step; medians (min-max)"
    headings = ("loss", "of fp32's", "pushed", "fetched", "on the cable, with sync points", f"limit {1 + LIMIT:g}")
    table = Table("", *headings, title=title, title_justify="left")
    base = [each["loss"] for each in found[FP32]]
    good = True
    for row, runs in found.items():
        mine = [each["loss"] for each in runs]
        beside = ratios(mine, base)
        near = statistics.median(beside) <= 1 + LIMIT
        good &= near or row not in GOOD
        traffic = [f"{statistics.median(each[kind] for each in runs):,.0f}" for kind in ("pushed", "fetched", "cable")]
        table.add_row(row, spread(mine, 4), spread(beside, 3), *traffic, verdict(near) if row in GOOD else "")
    CONSOLE.print(table)
    return good


# ---------------------------------------------------------------------- seconds to a loss


def reached_s(curve: Sequence[Sequence[float]], goal: float) -> float | None:
    """When the loss has reached the goal, on a straight line between two validations; None if it has not."""
    before: Sequence[float] = ()
    for at, loss in curve:
        if loss <= goal:
            share = (before[1] - goal) / (before[1] - loss) if before else 1.0
            return before[0] + share * (at - before[0]) if before else at
        before = at, loss
    return None


def race(rows: Sequence[str], speeds: Sequence[float], seeds: int, goal: float, limit_s: float) -> dict[str, Results]:
    """Train to a loss with every code, at every speed of the link in Mbit/s."""
    found: dict[str, Results] = {}
    for mbit in speeds:
        results = found[f"{mbit:g}"] = {row: [] for row in rows}
        with two_machines(mbit) as network:
            for seed in range(1, 1 + seeds):
                for row in rows:
                    entry = run(Job(row, seed, 1000, goal, limit_s), network)
                    seconds = reached_s(entry["curve"], goal)
                    entry["reached_s"], entry["in_time"] = seconds or limit_s, seconds is not None
                    results[row].append(entry)
                    late = "" if entry["in_time"] else f"  [red]not reached: {entry['curve'][-1][1]:.3f}[/]"
                    CONSOLE.print(f"  {mbit:g} Mbit/s, seed {seed}  {row:<22}{entry['reached_s']:7.1f} s{late}")
    return found


def show_race(found: dict[str, Results], goal: float) -> bool:
    """Print the seconds. There is no target."""
    title = f"character transformer, {WORKERS} workers behind one link: seconds to a loss of {goal:g}; medians"
    headings = [text for mbit in found for text in (f"{mbit} Mbit/s", "of fp32's")]
    table = Table("", *headings, title=title, title_justify="left")
    for row in next(iter(found.values())):
        cells = []
        for results in found.values():
            mine, base = ([each["reached_s"] for each in results[name]] for name in (row, FP32))
            late = "" if all(each["in_time"] for each in results[row]) else " [red](not reached)[/]"
            cells += [spread(mine, 1) + late, spread(ratios(mine, base), 2)]
        table.add_row(row, *cells)
    CONSOLE.print(table)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("speed", "loss", "links")
    parser.add_argument("--only", choices=parts, nargs="+", default=parts, help="the default is all")
    parser.add_argument("--codes", choices=ROWS, nargs="+", help="beside fp32; the default is all")
    parser.add_argument("--megabytes", type=int, default=100, help="of the speed")
    parser.add_argument("--repeats", type=int, default=7, help="of the speed")
    parser.add_argument("--seeds", type=int, default=3, help="of the loss")
    parser.add_argument("--epochs", type=int, default=SETS["text"].epochs, help="of the loss")
    parser.add_argument("--goal", type=float, default=2.2, help="loss at which races on slow links end")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which they end anyway")
    parser.add_argument("--mbit", type=float, nargs="+", default=[10.0, 100.0], help="speeds of the link")
    parser.add_argument("--races", type=int, default=1, help="seeds of the races")
    args = parser.parse_args()
    SETS["text"].data()  # once, for all forked workers
    rows = [row for row in ROWS if not args.codes or row in args.codes or row == FP32]
    good, results = True, json.loads(FILE.read_text()) if FILE.exists() else {}
    with prepared(machines=bool({"loss", "links"} & {*args.only})):
        for part in args.only:
            began = time.monotonic()
            if part == "speed":
                results[part] = time_codes(rows, args.megabytes, args.repeats)
                good &= show_speed(results[part], args.megabytes)
            elif part == "loss":
                results[part] = losses(rows, args.seeds, args.epochs)
                good &= show_losses(results[part])
            else:
                results[part] = race(rows, args.mbit, args.races, args.goal, args.limit)
                good &= show_race(results[part], args.goal)
            CONSOLE.print(f"{part}: {time.monotonic() - began:.0f} s\n")
            FILE.parent.mkdir(exist_ok=True)
            FILE.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
