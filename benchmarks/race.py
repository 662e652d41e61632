"""Seconds to an accuracy: one worker alone, DDP, local SGD and A-SGD, with slow workers or networks.

    python benchmarks/race.py                                # all scenarios, 5 repeats: about 50 minutes
    python benchmarks/race.py --scenario straggler --repeats 1
    sudo python benchmarks/race.py --scenario cable-10       # two "machines" joined at 10 Mbit/s
    python benchmarks/race.py --codes                        # accuracy and bytes with every compression
    python benchmarks/race.py --epoch                        # an epoch's time, compared with the ideal
    python benchmarks/race.py --epoch --work cnn             # the same for throughput.py's network alone

The digits CNN of examples/digits.py, batch 16, SGD with learning rate 0.05 and momentum 0.9, a validation per epoch.
The clock runs from the beginning of training to the end of the first validation with an accuracy of 0.97. Local SGD is
DDP with PyTorch's post-local-SGD hook and averager, with the period of A-SGD's nsync, from the first step on. With two
workers the fastest m of n would be one worker alone: race_text.py has it, with four.

With --epoch the ideal is the speed of one worker alone plus the slow worker's share of that speed. The table also shows
the sum of both workers' speeds when they train at once without exchanges. That sum is lower, because cores share
caches, and a worker that has slept finds them cold. It does so for the digits CNN, whose steps take 2 ms, and for
throughput.py's network of 0.6 M parameters with batches of 32, whose steps take ten times as long.

Systems are interleaved; a ratio is taken between neighbouring runs. A run that does not reach the accuracy within
--limit seconds counts with that time, and is marked. Bytes are those of the network interface between the two machines.

Writes results/race.json and results/race.png; exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Mapping

from common import BARE, CONSOLE, prepared, verdict
from network import Network, two_machines
from ranks import Slowness, run_ranks
from rich.table import Table
from rivals import local_sgd

Runs = Mapping[str, list[dict[str, Any]]]  # by system, with the seconds of each as "reached_s"


def ratios(runs: Runs, system: str) -> list[float]:
    """A-SGD's time divided by a system's, per repeat."""
    return [a["reached_s"] / b["reached_s"] for a, b in zip(runs["A-SGD"], runs[system], strict=True)]


def table(title: str, runs: Runs) -> Table:
    """Seconds by system, and A-SGD's share of them."""
    found = Table(title=title, title_justify="left")
    for heading in ("", "median", "min", "max", "A-SGD / this", "min", "max"):
        found.add_column(heading, justify="right" if heading else "left")
    for system, results in runs.items():
        times = [r["reached_s"] for r in results]
        row = [f"{f(times):.2f}" for f in (statistics.median, min, max)]
        if system != "A-SGD":
            row += [f"{f(ratios(runs, system)):.3f}" for f in (statistics.median, min, max)]
        found.add_row(system, *row)
    return found


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
NSYNC = 10
START_S = 60.0
EPOCH_TARGET = 1.1  # times what workers need that add up their speeds
WORKS = {"digits": "digits, steps of 2 ms", "cnn": "0.6 M parameters, steps of 20 ms"}
CNN_PARAMS, CNN_BATCH, CNN_STEPS = 600_000, 32, 200  # the steps of an epoch


@dataclass(frozen=True)
class Scenario:
    """Who is slow.

    Attributes:
        title: for people.
        slow: how many times slower rank 1 is, by sleeping.
        sleep_s: seconds that rank 1 sleeps in every step besides.
        mbit: speed of the cable between the two machines; None: both ranks on one.
        asgd: arguments of the strategy.
        targets: ``{system: most}``: A-SGD's time divided by the system's.
        limit_s: when to give up.
    """

    title: str
    slow: float = 1.0
    sleep_s: float = 0.0
    mbit: float | None = None
    asgd: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)
    limit_s: float = 120.0


SCENARIOS = {
    "equal": Scenario("equal workers", targets={"DDP": 0.8}),
    "straggler": Scenario("one worker 4 times slower", slow=4.0, targets={"DDP": 1 / 2.2}),
    "sleeper": Scenario("one worker sleeps 0.1 s a step", sleep_s=0.1, targets={"alone": 1.1, "DDP": 1 / 15}),
    "cable-100": Scenario("100 Mbit/s between the workers", mbit=100, targets={"DDP": 1 / 5}),
    "cable-10": Scenario(
        "10 Mbit/s between the workers, int8",
        mbit=10,
        asgd={"compression": "int8"},
        targets={"DDP": 1 / 20},
        limit_s=600.0,
    ),
}
SYSTEMS = ("alone", "DDP", "local SGD", "A-SGD")


# ---------------------------------------------------------------------- in a rank's process


def trained_class(work: str) -> Any:
    """Class of the module that is trained: that of the digits, or of throughput.py's network."""
    if work == "digits":
        from digits import DigitsCNN

        return DigitsCNN
    from throughput import build_module

    class Net(type(build_module(CNN_PARAMS))):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            images, labels = batch
            self.log("val_acc", (self.layers(images).argmax(1) == labels).float().mean(), sync_dist=True)

    return Net


def slowed(scenario: Scenario, rank: int | None = None, work: str = "digits") -> Any:
    """The module, slow on rank 1; with a rank given it is that one's wherever it runs."""
    slowness = Slowness(scenario.slow, scenario.sleep_s)

    class Slow(trained_class(work)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            slowness.before_step(slow=(self.global_rank if rank is None else rank) == 1)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *args: Any) -> None:
            slowness.after_step()

    return Slow()


def repeated_loaders(times: int, work: str = "digits") -> tuple[Any, Any]:
    """For training and validation; an epoch of the digits goes over the training set several times."""
    import torch

    if work == "cnn":
        from throughput import build_loader

        return build_loader(CNN_STEPS * CNN_BATCH, CNN_BATCH), build_loader(2 * CNN_BATCH, CNN_BATCH)
    from digits import loaders

    training, validation = loaders()
    if times > 1:
        repeated = torch.utils.data.ConcatDataset([training.dataset] * times)
        training = torch.utils.data.DataLoader(repeated, training.batch_size, shuffle=True)
    return training, validation


def train(
    scenario: Scenario, system: str, goal: float, seed: int, epochs: int | None, times: int, work: str = "digits"
) -> dict[str, Any]:
    """Train until the goal is reached, or for so many epochs; see :func:`repeated_loaders` for the last two."""
    import pytorch_lightning as pl
    import torch

    from lightning_asgd import ASGDStrategy

    torch.set_num_threads(1)
    pl.seed_everything(seed, verbose=False)

    class Watch(pl.Callback):
        def __init__(self) -> None:
            self.accuracy: list[float] = []
            self.seconds: list[float] = []

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.began = time.perf_counter()

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.sanity_checking:
                return
            self.accuracy.append(float(trainer.callback_metrics["val_acc"]))
            self.seconds.append(time.perf_counter() - self.began)
            if epochs is None and (self.accuracy[-1] >= goal or self.seconds[-1] > scenario.limit_s):
                trainer.should_stop = True

    watch = Watch()
    machines = 2 if scenario.mbit and system != "alone" else 1
    workers = 1 if system == "alone" else 2
    strategy: Any = "auto"
    if system == "DDP":
        strategy = "ddp"
    elif system == "local SGD":
        strategy = local_sgd(NSYNC)
    elif system == "A-SGD":
        strategy = ASGDStrategy(NSYNC, **scenario.asgd)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=workers // machines,
        num_nodes=machines,
        strategy=strategy,
        max_epochs=200 if epochs is None else epochs,
        num_sanity_val_steps=0,
        callbacks=[watch],
        **BARE,
    )
    sent = _interface_bytes()
    training, validation = repeated_loaders(times, work)
    trainer.fit(slowed(scenario, work=work), training, validation)
    result: dict[str, Any] = {"accuracy": watch.accuracy, "seconds": watch.seconds, "steps": len(training)}
    result["bytes"] = _interface_bytes() - sent
    if system == "A-SGD":
        result["stats"] = {k: v for k, v in trainer.strategy.stats.summary().items() if k != "histogram"}
    return result


def speed(scenario: Scenario, rank: int, seed: int, seconds: float, work: str) -> dict[str, Any]:
    """Steps per second of a worker that trains for itself, measured for so long."""
    import pytorch_lightning as pl
    import torch

    torch.set_num_threads(1)
    pl.seed_everything(seed, verbose=False)

    class Count(pl.Callback):
        steps, since, now = 0, 0.0, 0.0

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.now = time.perf_counter()
            self.since = self.since or self.now
            self.steps += 1
            trainer.should_stop = self.now - self.since > seconds

    count = Count()
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=200, callbacks=[count], **BARE)
    training = repeated_loaders(100, work)[0]
    trainer.fit(slowed(scenario, rank, work), training)
    return {"speed": (count.steps - 1) / (count.now - count.since)}


def _interface_bytes() -> int:
    """Bytes that have left this machine, as the kernel counts them."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split()[9]) for line in lines if line.strip().startswith("veth-"))


# ---------------------------------------------------------------------- runs


def run(
    scenario: Scenario,
    system: str,
    goal: float,
    seed: int,
    network: Network | None,
    epochs: int | None = None,
    times: int = 1,
    work: str = "digits",
) -> dict[str, Any]:
    """One run, and what rank 0 saw."""
    job = partial(train, scenario, system, goal, seed, epochs, times, work)
    alone = system == "alone"
    # After its limit a run still ends its epoch.
    seconds = START_S + 2.0 * scenario.limit_s
    answers = run_ranks([job] if alone else [job, job], seconds, launched=not alone, network=network)
    zero = answers[0]
    reached = next((s for s, a in zip(zero["seconds"], zero["accuracy"], strict=True) if a >= goal), None)
    traffic = sum(answer["bytes"] for answer in answers)
    return {
        **zero,
        "reached_s": reached if reached is not None else scenario.limit_s,
        "in_time": reached is not None,
        "bytes": traffic,
    }


def measure(
    name: str, scenario: Scenario, systems: Sequence[str], repeats: int, goal: float
) -> dict[str, list[dict[str, Any]]]:
    """All runs of a scenario, by system."""
    CONSOLE.print(f"\n[bold]{name}[/]: {scenario.title}")
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    with two_machines(scenario.mbit) if scenario.mbit else contextlib.nullcontext() as network:
        for repeat in range(repeats):
            for system in systems:
                result = run(scenario, system, goal, repeat, network)
                runs[system].append(result)
                late = "" if result["in_time"] else " [red](not reached)[/]"
                epochs = len(result["accuracy"])
                CONSOLE.print(
                    f"  {repeat + 1}/{repeats}  {system:<10}{result['reached_s']:8.2f} s, {epochs} epochs{late}"
                )
    return runs


def show(name: str, scenario: Scenario, runs: dict[str, list[dict[str, Any]]], goal: float) -> bool:
    """Print a table, and whether the targets are met."""
    CONSOLE.print(table(f"{scenario.title}: seconds to an accuracy of {goal}", runs))
    good = True
    for system, most in scenario.targets.items():
        if system not in runs:
            continue
        median = statistics.median(ratios(runs, system))
        text = f"{name}: A-SGD takes {median:.3f} of the time of {system}, target {most:.3f}"
        good &= verdict(median <= most, text)
    return good


def codes(seeds: int, epochs: int) -> bool:
    """Accuracy and traffic with every compression, beside none; what sync points send in full is the same in all."""
    scenario = Scenario("compression", mbit=1000, limit_s=300.0)
    names = [None, "bf16", "fp16", "int8", "4bit", "2bit", "1bit", "topk"]
    results: dict[str, list[dict[str, Any]]] = {str(name): [] for name in names}
    with two_machines(scenario.mbit) as network:
        for seed in range(seeds):
            for name in names:
                chosen = Scenario("compression", mbit=1000, asgd={"compression": name, "data": "split"}, limit_s=300.0)
                result = run(chosen, "A-SGD", math.inf, seed, network, epochs)
                results[str(name)].append(result)
                CONSOLE.print(
                    f"  {seed + 1}/{seeds}  {name!s:<6} {result['accuracy'][-1]:.4f}  {result['bytes']:,} bytes"
                )
    base = statistics.median(r["accuracy"][-1] for r in results["None"])
    shown = Table("", "accuracy", "bytes on the cable", "of those without", title="compression", title_justify="left")
    good = True
    for name, runs in results.items():
        accuracy = statistics.median(r["accuracy"][-1] for r in runs)
        traffic = statistics.median(r["bytes"] for r in runs)
        share = traffic / statistics.median(r["bytes"] for r in results["None"])
        good &= accuracy >= base - 0.01
        shown.add_row(name, f"{accuracy:.4f}", f"{traffic:,.0f}", f"1 / {1 / share:.2f}")
    CONSOLE.print(shown)
    return good


def epoch_times(names: Sequence[str], works: Sequence[str], repeats: int) -> bool:
    """An epoch's seconds, validation included, beside those of workers that add up their speeds."""
    headings = ("seconds", "min", "max", "of the ideal", "min", "max", "of both unconnected", "min", "max")
    shown = Table("", *headings, title=f"an epoch of 10 times the digits, or of {CNN_STEPS} steps")
    good = True
    for work, name in itertools.product(works, names):
        scenario = SCENARIOS[name]
        seconds, shares, real = [], [], []
        for repeat in range(repeats):
            took = {}
            for system in ("alone", "A-SGD"):
                result = run(scenario, system, math.inf, repeat, None, epochs=4, times=10, work=work)
                ends = result["seconds"]
                # Not the first: nobody knows anybody's speed yet.
                took[system] = statistics.median(b - a for a, b in itertools.pairwise(ends))
            step_s = took["alone"] / result["steps"]
            slow_s = scenario.slow * step_s + scenario.sleep_s
            ideal_s = result["steps"] / (1 / step_s + 1 / slow_s)
            jobs = [partial(speed, scenario, rank, repeat, 2 * took["alone"], work) for rank in (0, 1)]
            speeds = [answer["speed"] for answer in run_ranks(jobs, START_S + 4 * took["alone"], launched=False)]
            both_s = result["steps"] / sum(speeds)
            seconds.append(took["A-SGD"])
            shares.append(took["A-SGD"] / ideal_s)
            real.append(took["A-SGD"] / both_s)
            CONSOLE.print(
                f"  {work}, {name} {repeat + 1}/{repeats}  {took['A-SGD']:.2f} s, ideal {ideal_s:.2f} s, "
                f"both unconnected {both_s:.2f} s"
            )
        figures = [f"{f(v):.2f}" for v in (seconds, shares, real) for f in (statistics.median, min, max)]
        shown.add_row(f"{WORKS[work]}: {scenario.title}", *figures)
        good &= statistics.median(shares) <= EPOCH_TARGET
    CONSOLE.print(shown)
    return verdict(good, f"target: at most {EPOCH_TARGET:.2f} of the ideal")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--scenario", choices=list(SCENARIOS), action="append")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="beside A-SGD")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--goal", type=float, default=0.97)
    parser.add_argument("--codes", action="store_true", help="accuracy and bytes with every compression instead")
    parser.add_argument("--epoch", action="store_true", help="an epoch's time compared with the ideal instead")
    parser.add_argument("--epochs", type=int, default=10, help="with --codes")
    parser.add_argument("--work", choices=list(WORKS), action="append", help="with --epoch")
    args = parser.parse_args()
    systems = [system for system in SYSTEMS if system in args.systems or system == "A-SGD"]
    chosen = args.scenario or [name for name, scenario in SCENARIOS.items() if not (args.epoch and scenario.mbit)]
    import pytorch_lightning  # noqa: F401  # once, for all forked ranks

    with prepared(machines=bool(args.codes or any(SCENARIOS[name].mbit for name in chosen))):
        if args.codes:
            return 0 if codes(args.repeats, args.epochs) else 1
        if args.epoch:
            return 0 if epoch_times(chosen, args.work or list(WORKS), args.repeats) else 1
        results: dict[str, dict[str, list[dict[str, Any]]]] = {}
        good = True
        for name in chosen:
            results[name] = measure(name, SCENARIOS[name], systems, args.repeats, args.goal)
            good &= show(name, SCENARIOS[name], results[name], args.goal)
            folder = ROOT / "results"
            folder.mkdir(exist_ok=True)
            content = {n: {"scenario": asdict(SCENARIOS[n]), "runs": runs} for n, runs in results.items()}
            (folder / "race.json").write_text(json.dumps(content, indent=1) + "\n")
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
