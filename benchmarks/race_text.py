"""Seconds to DDP's final loss on text: one worker alone, DDP, local SGD, the fastest 3 of 4 workers, and A-SGD.

    python benchmarks/race_text.py                        # all scenarios, 3 seeds: about half an hour
    python benchmarks/race_text.py --scenario straggler --seeds 1 --systems DDP fastest
    python benchmarks/race_text.py --fastest 2            # steps of the fastest 2 of 4 workers

The character transformer of rules.py with AdamW, and four workers of one thread each. On two cores four equal workers
would slow each other down, and the others would be faster beside a worker that sleeps. So every worker sleeps before
each step, until that has taken 80 ms with the CPU time of the one before, and a slow worker's 320 ms. The cable of
100 Mbit/s joins two machines with two workers each. The worker alone is a fast one; its run counts in every scenario.

The goal is the held-out loss with which DDP ends two epochs, with the same seed and equal workers. The clock runs
from the beginning of training to the end of the first validation at or below it; there are four in an epoch. The
learning rate is constant: if it fell to zero where DDP ends, a system that is behind by then would never arrive. The
others may train for six epochs. A run that has not reached the goal then counts with its whole time, and is marked.

What a validation measures is what a checkpoint would hold then: A-SGD's workers have the servers' weights, those of
DDP and of the fastest m have the same ones by themselves, and local SGD's take their mean once more.

Systems are interleaved; a ratio is taken between runs with the same seed. Writes results/race_text.json and
results/race_text.png.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

import pytorch_lightning as pl
import torch
from common import CONSOLE, prepared
from fastest import Fastest
from network import two_machines
from race import Scenario, table
from ranks import run_ranks
from rich.markup import escape
from rivals import local_sgd
from rules_sets import AT_ONCE, SETS, Learner
from throughput import trainer_options
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from lightning_asgd import ASGDStrategy

ROOT = Path(__file__).resolve().parent.parent
WORKERS, PERIOD, STEP_S = 4, 10, 0.08  # the period is local SGD's
EPOCHS, MOST_EPOCHS, RUN_S = 2, 6, 400.0
VALIDATED = 0.25  # of an epoch, between two validations
SCENARIOS = {
    "equal": Scenario("equal workers"),
    "straggler": Scenario("one worker 4 times slower", slow=4.0),
    "cable-100": Scenario("100 Mbit/s between two machines", mbit=100),
}
ALONE, DDP, LOCAL, FASTEST, ASGD = SYSTEMS = ("alone", "DDP", "local SGD", "fastest", "A-SGD")
Runs = dict[str, list[dict[str, Any]]]  # by system


# ---------------------------------------------------------------------- in a rank's process


class Racer(Learner):
    """A worker whose steps take a given time; those of rank 1 may take longer."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(SETS["text"], falling=False)
        self.slow = scenario.slow
        self.own_s = 0.0  # CPU time of the latest step
        self.began: float | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        step_s = STEP_S * (self.slow if self.global_rank == 1 else 1.0)
        time.sleep(max(0.0, step_s - self.own_s))
        self.began = time.thread_time()
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        if self.began is not None:  # else the strategy has skipped this step
            self.own_s, self.began = time.thread_time() - self.began, None


class Watch(pl.Callback):
    """Notes the loss and the time of every validation, and ends the training at the goal."""

    def __init__(self, goal: float) -> None:
        self.goal = goal
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.began = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))
        self.seconds.append(time.perf_counter() - self.began)
        trainer.should_stop = self.losses[-1] <= self.goal


class Mean(pl.Callback):
    """The ranks of local SGD take the mean of their weights before they validate."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        weights = parameters_to_vector(pl_module.parameters()).detach()
        vector_to_parameters(trainer.strategy.reduce(weights, reduce_op="mean"), pl_module.parameters())


def strategy_of(system: str, fastest: int) -> Any:
    """A Trainer's."""
    if system == FASTEST:
        return Fastest(fastest)
    return {ALONE: "auto", DDP: "ddp", LOCAL: local_sgd(PERIOD), ASGD: ASGDStrategy()}[system]


def train(scenario: Scenario, system: str, goal: float, seed: int, fastest: int) -> dict[str, Any]:
    """Train as one of the workers, until the goal is reached or the epochs are over."""
    torch.set_num_threads(1)
    pl.seed_everything(seed, verbose=False)
    problem = SETS["text"]
    watch, module = Watch(goal), Racer(scenario)
    data, held_out = problem.data()
    machines = 2 if scenario.mbit and system != ALONE else 1
    options = {
        **trainer_options(),
        "max_epochs": EPOCHS if system == DDP else MOST_EPOCHS,
        "val_check_interval": VALIDATED,
        "num_sanity_val_steps": 0,
        "devices": (1 if system == ALONE else WORKERS) // machines,
        "num_nodes": machines,
        "strategy": strategy_of(system, fastest),
        "callbacks": [watch, Mean()] if system == LOCAL else [watch],
    }
    trainer = pl.Trainer(**options)
    trainer.fit(module, DataLoader(data, problem.batch, shuffle=True), DataLoader(held_out, AT_ONCE))
    answer = {"losses": watch.losses, "seconds": watch.seconds, "own_s": module.own_s}
    if system == FASTEST:
        answer.update(late=trainer.strategy.late, missed=trainer.strategy.missed)
    return answer


# ---------------------------------------------------------------------- runs


def run(scenario: Scenario, system: str, goal: float, seed: int, fastest: int) -> dict[str, Any]:
    """A run, as rank 0 saw it.

    Raises:
        RuntimeError: a worker failed, or the workers have seen different losses.
    """
    job = partial(train, scenario, system, goal, seed, fastest)
    with two_machines(scenario.mbit) if scenario.mbit else contextlib.nullcontext() as network:
        alone = system == ALONE
        answers = run_ranks([job] * (1 if alone else WORKERS), RUN_S, launched=not alone, network=network)
    if any(answer["losses"] != answers[0]["losses"] for answer in answers):
        losses = [answer["losses"] for answer in answers]
        raise RuntimeError(f"With {system} the workers' validations differ, and a loss is to be that of all: {losses}.")
    counts = {name: [answer[name] for answer in answers] for name in ("late", "missed") if name in answers[0]}
    return {**answers[0], **counts}


def judged(result: dict[str, Any], goal: float) -> dict[str, Any]:
    """A run, and when it has reached the goal."""
    within = [place for place, loss in enumerate(result["losses"]) if loss <= goal]
    last = within[0] if within else len(result["losses"]) - 1
    reached = {"reached_s": result["seconds"][last], "epochs": (last + 1) * VALIDATED, "in_time": bool(within)}
    return {**result, "goal": goal, **reached}


def turn(names: Sequence[str], systems: Sequence[str], seed: int, fastest: int, results: dict[str, Runs]) -> None:
    """Run all systems in all scenarios with a seed, and add that to the results."""
    base = run(SCENARIOS["equal"], DDP, -math.inf, seed, fastest)
    goal, known = base["losses"][-1], {("equal", DDP): base}
    CONSOLE.print(f"\n[bold]seed {seed}[/]: DDP ends with a loss of {goal:.4f}")
    for name, system in itertools.product(names, systems):
        key = ("equal" if system == ALONE else name, system)
        if key not in known:
            known[key] = run(SCENARIOS[key[0]], system, goal, seed, fastest)
        result = judged(known[key], goal)
        row = f"{fastest} of {WORKERS}" if system == FASTEST else system
        results.setdefault(name, {}).setdefault(row, []).append(result)
        about = f"  {SCENARIOS[name].title:<32}{row:<10}{result['reached_s']:8.2f} s, {result['epochs']:.2f} epochs"
        if system == FASTEST:
            about += f", {sum(result['late'])} gradients late, {sum(result['missed'])} steps missed"
        CONSOLE.print(escape(about), "" if result["in_time"] else "[red](not reached)[/]")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--scenario", choices=list(SCENARIOS), action="append")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="beside A-SGD")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--fastest", type=int, choices=range(1, WORKERS + 1), default=3, help="workers that make a step"
    )
    args = parser.parse_args()
    systems = [system for system in SYSTEMS if system in (*args.systems, ASGD)]
    chosen = args.scenario or list(SCENARIOS)
    SETS["text"].data()  # once, for all forked workers
    results: dict[str, Runs] = {}
    folder = ROOT / "results"
    folder.mkdir(exist_ok=True)
    with prepared(machines=any(SCENARIOS[name].mbit for name in chosen)):
        for seed in range(1, 1 + args.seeds):
            turn(chosen, systems, seed, args.fastest, results)
            content = {name: {"scenario": asdict(SCENARIOS[name]), "runs": runs} for name, runs in results.items()}
            (folder / "race_text.json").write_text(json.dumps(content, indent=1) + "\n")
    for name, runs in results.items():
        CONSOLE.print(table(f"{SCENARIOS[name].title}: seconds to DDP's loss after {EPOCHS} epochs", runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
