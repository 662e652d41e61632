"""Every rule beside DDP, local SGD and default A-SGD: the loss after equally many epochs.

    python benchmarks/rules.py                                    # about 65 minutes on two cores
    python benchmarks/rules.py --only DiLoCo --sets text --seeds 1
    python benchmarks/rules.py --longer 2 --sets fashion          # twice as many epochs
    python benchmarks/rules.py --table                            # the results so far

Four workers with one thread each train digits, 10,000 images of Fashion-MNIST (both SGD with momentum) and a character
transformer (AdamW). With every rule they have the same hyper-parameters, first weights and epochs; the learning rate
falls with every epoch. A seed fixes the first weights and the order of the data, so ratios are taken by seed. What
counts is the loss of the servers' weights on held-out samples. The loss on the training data, beside it, tells whether
a rule is slower or fits better. "DDP, other order" is DDP with the data in another
order: how far chance alone moves the loss.

Every run is kept in results/rules.json, or with --longer in a file of its own. It counts as long as these benchmarks
and torch are unchanged, and of all rules but DDP lightning_asgd. Exits with 1 if a rule's median is more than 1 % above
DDP's, unless the table RULES says why it may be.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

import pytorch_lightning as pl
import torch
from common import CONSOLE, prepared, spread
from ranks import run_ranks
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rules_sets import SETS, Learner, checksum, measured, missing, version
from throughput import trainer_options
from torch.utils.data import DataLoader

from lightning_asgd import ASGDStrategy, algorithms

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "results" / "rules.json"
WORKERS, NSYNC, LIMIT, RUN_S = 4, 10, 0.01, 300.0
DDP, LOCAL, ASGD = "DDP", "LocalSGD", "ASGD"
BASES = (DDP, LOCAL, ASGD)
SEEDS = {"digits": 9, "fashion": 7, "text": 3}  # the more, the more chance moves a loss

ADAMS = (
    "A mean of AdamW's steps on a quarter of the batch each is shorter than one step on all of it, also if all workers "
    "average at the same time."
)
CAPPED = f"{ADAMS} An outer rate of 0.7 with capped momentum lengthens the mean by a third at most."
OUTER = (
    "These outer settings are for an adaptive optimizer inside. After SGD with momentum they repeat what momentum has "
    "repeated already."
)
SLOWER = (
    "Workers whose weights are averaged fit the training data later than DDP does: after 8 epochs their loss on these "
    "is 1.4 to 1.5 times DDP's, that of LocalSGD, in lock-step, too. After 16 epochs (--longer 2) their loss on "
    "held-out samples is 8 to 12 % below DDP's, which rises."
)
SPARSE = "A push carries 3 % of the values. In runs this short each value is sent only a few times."


@dataclass(frozen=True)
class Rule:
    """A row.

    Attributes:
        algorithm: a class of lightning_asgd.algorithms, or "DDP".
        nsync: steps between two exchanges.
        options: of the class.
        excused: by set, why the loss is not meant to be within 1 % of DDP's.
        other_order: whether the data come in another order than that of the seed.
    """

    algorithm: str
    nsync: int = NSYNC
    options: Mapping[str, Any] = field(default_factory=dict)
    excused: Mapping[str, str] = field(default_factory=dict)
    other_order: bool = False

    def __str__(self) -> str:
        if self.algorithm == DDP:
            return f"{DDP}, other order" if self.other_order else DDP
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        name = f"{self.algorithm}({options})" if options else self.algorithm
        return f"{name}, nsync {self.nsync}" if self.nsync != NSYNC else name

    @property
    def exists(self) -> bool:
        """Whether this version of the package has it."""
        return self.algorithm == DDP or hasattr(algorithms, self.algorithm)

    def strategy(self) -> Any:
        """A Trainer's."""
        if self.algorithm == DDP:
            return "ddp"
        return ASGDStrategy(self.nsync, algorithm=getattr(algorithms, self.algorithm)(**self.options))


def images(why: str) -> dict[str, str]:
    """The same reason for both sets of images."""
    return {"digits": why, "fashion": why}


RULES = (
    Rule(DDP),
    Rule(DDP, other_order=True),
    Rule(LOCAL, excused={"fashion": SLOWER, "text": ADAMS}),
    Rule(ASGD, excused={"fashion": SLOWER}),
    Rule("DiLoCo", excused={"text": CAPPED}),
    # For text, the best of three settings on seed 1: losses 1.960, and 2.000 with 0.9 and 0.5, 1.993 with 1.0 and 0.7.
    Rule("DiLoCo", options={"lr": 0.9, "momentum": 0.7}, excused=images(OUTER)),
    Rule("StreamingDiLoCo", excused={"fashion": SLOWER, "text": CAPPED}),
    Rule("DelayedNesterov", excused={"text": CAPPED}),
    Rule("DecoupledDiLoCo", excused={"fashion": SLOWER, "text": CAPPED}),
    Rule("SparseLoCo", excused={**images(SPARSE), "text": SPARSE}),
    Rule("SparseLoCo", options={"lr": 1.0}, excused={**images(SPARSE), "text": SPARSE}),
    Rule("SparseLoCo", 30, excused={**images(SPARSE), "text": SPARSE}),
)

Key = tuple[str, str, int]  # rule, set, seed
Found = dict[Key, dict[str, Any]]


# ---------------------------------------------------------------------- a run


def train(rule: Rule, name: str, seed: int) -> dict[str, float]:
    """Train as one of the workers, and measure the result."""
    torch.set_num_threads(1)
    problem = SETS[name]
    pl.seed_everything(seed, verbose=False)
    module = Learner(problem)
    if rule.other_order:
        pl.seed_everything(1000 + seed, verbose=False)
    data, held_out = problem.data()
    options = {**trainer_options(), "max_epochs": problem.epochs, "devices": WORKERS, "strategy": rule.strategy()}
    trainer = pl.Trainer(**options)
    trainer.fit(module, DataLoader(data, problem.batch, shuffle=True))
    answer = {"checksum": checksum(module)}
    if not trainer.is_global_zero:
        return answer
    return {**measured(module, held_out), "training_loss": measured(module, data)["loss"], **answer}


def run(rule: Rule, name: str, seed: int) -> dict[str, Any]:
    """A run, and the loss of the weights that all workers have at its end.

    Raises:
        RuntimeError: a worker failed; the text holds its last output.
    """
    began = time.monotonic()
    answers = run_ranks([partial(train, rule, name, seed)] * WORKERS, RUN_S)
    weights = {answer.pop("checksum") for answer in answers}
    if len(weights) > 1:
        raise RuntimeError(f"The workers have different weights when {rule} ends.")
    about = {"rule": str(rule), "set": name, "seed": seed, "epochs": SETS[name].epochs}
    made_with = version(package=rule.algorithm != DDP)
    return {**about, "made_with": made_with, "seconds": round(time.monotonic() - began, 1), **answers[0]}


def known(file: Path) -> Found:
    """The runs of a file that still count."""
    versions = {package: version(package=package) for package in (False, True)}
    entries = json.loads(file.read_text()) if file.exists() else []
    return {
        (entry["rule"], entry["set"], entry["seed"]): entry
        for entry in entries
        if entry["epochs"] == SETS[entry["set"]].epochs
        and entry["made_with"] == versions[not entry["rule"].startswith(DDP)]
    }


def run_all(rules: Sequence[Rule], seeds: Mapping[str, int], found: Found, file: Path) -> bool:
    """Do the runs that are missing, seed by seed, so that an interrupted table has equal rows; True if none failed."""
    numbers = range(1, 1 + max(seeds.values()))
    todo = [(r, s, n) for n in numbers for s in seeds for r in rules if n <= seeds[s] and (str(r), s, n) not in found]
    good = True
    file.parent.mkdir(exist_ok=True)
    columns = (TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=CONSOLE) as progress:
        bar = progress.add_task("", total=len(todo))
        for rule, name, seed in todo:
            title = f"{name}, {rule}, seed {seed}"
            progress.update(bar, description=title)
            try:
                entry = found[str(rule), name, seed] = run(rule, name, seed)
            except RuntimeError as error:
                good = False
                CONSOLE.print(f"[red]{title} failed.[/] {escape(str(error))}")
            else:
                file.write_text(json.dumps(list(found.values()), indent=1) + "\n")
                CONSOLE.print(
                    f"{title}: loss {entry['loss']:.4f}, accuracy {entry['accuracy']:.4f}, {entry['seconds']:.0f} s"
                )
            progress.advance(bar)
    return good


# ---------------------------------------------------------------------- what they show


def ratios(found: Found, name: str, rule: str, base: str, value: str = "loss") -> list[float]:
    """A rule's losses divided by another one's, for the seeds that both have."""
    mine = {seed: entry[value] for (r, s, seed), entry in found.items() if (r, s) == (rule, name)}
    other = {seed: entry[value] for (r, s, seed), entry in found.items() if (r, s) == (base, name)}
    return [mine[seed] / other[seed] for seed in sorted(mine.keys() & other.keys())]


def within(rule: Rule, name: str, beside_ddp: Sequence[float]) -> bool | None:
    """Whether a rule's loss is within the limit; None if it is not meant to be, or nothing is known."""
    if not beside_ddp or rule.algorithm == DDP or name in rule.excused:
        return None
    return 0 < statistics.median(beside_ddp) <= 1 + LIMIT


def show(found: Found, rules: Sequence[Rule], name: str) -> bool:
    """Print a set's table, and why rules are excused; True if the others are within the limit."""
    problem, good = SETS[name], True
    title = f"{problem.name}, {WORKERS} workers, {problem.epochs} epochs: loss on held-out samples, and trained ones"
    bases = (f"of {base}'s" for base in BASES)
    table = Table("", "loss", *bases, "accuracy", "trained, of DDP's", "", title=title, title_justify="left")
    reasons: dict[str, list[str]] = {}
    for rule in rules:
        mine = [entry for (r, s, _), entry in found.items() if (r, s) == (str(rule), name)]
        if not mine:
            continue
        beside = [ratios(found, name, str(rule), base) for base in BASES]
        verdict = within(rule, name, beside[0])
        good &= verdict is not False
        if name in rule.excused:
            reasons.setdefault(rule.excused[name], []).append(str(rule))
        table.add_row(
            str(rule),
            spread([entry["loss"] for entry in mine], 4),
            *(spread(values, 3) for values in beside),
            f"{statistics.median(entry['accuracy'] for entry in mine):.4f}",
            spread(ratios(found, name, str(rule), DDP, "training_loss"), 3),
            {True: "[green]PASS", False: "[red]FAIL", None: "excused" if name in rule.excused else ""}[verdict],
        )
    CONSOLE.print(table)
    for reason, names in reasons.items():
        CONSOLE.print(f"Not meant to be within {LIMIT:.0%} of DDP's loss: {'; '.join(names)}. {reason}")
    CONSOLE.print()
    return good


def draw(found: Found, rules: Sequence[Rule], sets: Sequence[str], file: Path) -> None:
    """The loss beside DDP's: a dot for every seed, and a line at the median. What is excused is grey."""
    from lightning_asgd.report.picture_style import PAPER, logarithmic, pyplot

    plt = pyplot()
    size = (2 + 3.2 * len(sets), 1.2 + 0.36 * len(rules))
    figure, axes = plt.subplots(1, len(sets), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis, name in zip(axes[0], sets, strict=True):
        values = [v if math.isfinite(v) else 10.0 for r in rules for v in ratios(found, name, str(r), DDP)]
        low, high = min(values, default=1.0), max(values, default=1.0)
        axis.set_xlim(0.97 * low, 1.03 * high)
        if high > 1.5 * low:
            logarithmic(axis, "x")
        axis.axvspan(1 - LIMIT, 1 + LIMIT, color=PAPER["rest"])
        for place, rule in enumerate(rules):
            mine = ratios(found, name, str(rule), DDP)
            colour = PAPER["orange" if rule.algorithm == DDP else "grey" if name in rule.excused else "blue"]
            axis.plot(mine, [place] * len(mine), "o", color=colour, markersize=4)
            if mine:
                axis.plot([statistics.median(mine)], [place], "|", color=colour, markersize=14, markeredgewidth=2)
        axis.set(title=SETS[name].name, xlabel="loss / DDP's")
    axes[0][0].set_yticks(range(len(rules)), [str(rule) for rule in rules])
    axes[0][0].set_ylim(len(rules) - 0.5, -0.5)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rules = [rule for rule in RULES if rule.exists]
    names = list(dict.fromkeys(rule.algorithm for rule in rules))
    parser.add_argument("--only", nargs="+", choices=names, help="rules; the default is all, and DDP always runs")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", type=int, help="number of seeds; the default is 9, 7 and 3")
    parser.add_argument("--longer", type=int, default=1, help="times as many epochs as usual")
    parser.add_argument("--table", action="store_true", help="run nothing, show the results so far")
    parser.add_argument("--picture", type=Path, help="draw the losses beside DDP's into this file")
    parser.add_argument("--file", type=Path)
    args = parser.parse_args()
    file = args.file or (FILE if args.longer == 1 else FILE.with_stem(f"rules_longer_{args.longer}"))
    SETS.update({name: replace(problem, epochs=problem.epochs * args.longer) for name, problem in SETS.items()})
    rules = [rule for rule in rules if not args.only or rule.algorithm in args.only or str(rule) == DDP]
    if not args.table and (reasons := [reason for name in args.sets if (reason := missing(name))]):
        CONSOLE.print("\n".join(reasons))
        return 2
    found, good = known(file), True
    with prepared():
        if not args.table:
            for name in args.sets:
                SETS[name].data()  # once, for all forked workers
            good = run_all(rules, {name: args.seeds or SEEDS[name] for name in args.sets}, found, file)
    for name in args.sets:
        good &= show(found, rules, name)
    if args.picture:
        draw(found, rules, args.sets, args.picture)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
