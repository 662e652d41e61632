"""Every algorithm on the same two tasks, with four workers of which one is four times slower.

    python benchmarks/algorithms.py                          # both tasks, 3 seeds: about 35 minutes
    python benchmarks/algorithms.py --task digits --seeds 1 --only asgd easgd   # a quick look
    python benchmarks/algorithms.py --redraw                 # table and picture from results/algorithms.json

Tasks: the digits CNN (SGD, learning rate 0.05, momentum 0.9, batch 16), and a model of characters on the text of
Python's standard library (the same with learning rate 0.1; 16 characters of context). Every worker draws its own
batches for a fixed time. A step takes as long as the task says, whatever the machine: a worker sleeps for the rest of
it. Three workers' steps take one unit, the fourth worker's take four. So they behave like four machines, although they
share two cores.

All algorithms run with the same worker optimizer, and with their own defaults, except where the table says so. Worker 0
reads the servers' weights a few times a second; the loss on held-out data is computed afterwards.

Writes results/algorithms.json, results/algorithms.md with the tables, and results/algorithms.png.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

import counts
import torch
from jobs import quiet
from pytorch_lightning import Callback, LightningModule, seed_everything
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from digits import DigitsCNN, datasets

import lightning_asgd.sampling.optim
from lightning_asgd import ASGDStrategy
from lightning_asgd.algorithms import (
    ASGD,
    EAMSGD,
    EASGD,
    SGMCMC,
    Algorithm,
    DANASlim,
    DecoupledDiLoCo,
    DelayCompensation,
    DelayedNesterov,
    DiLoCo,
    Downpour,
    DropStale,
    DynamicSteps,
    ElasticSGMCMC,
    GapAware,
    Hogwild,
    LayerWise,
    LocalSGD,
    Rennala,
    ScaleByStaleness,
    SoftSync,
    SparseLoCo,
    StalenessAware,
    StaleSynchronous,
    StreamingDiLoCo,
    WarmStart,
)
from lightning_asgd.report.picture_style import PAPER, logarithmic, pyplot

ROOT = Path(__file__).resolve().parent.parent
WORKERS, SLOWER, BATCH, CONTEXT = 4, 4, 16, 16
PEEK_S = 0.4
SHOWN = {  # in the picture, with colours of the common palette
    "ASGD": "blue",
    "ASGD('sum')": "red",
    "ASGD('sum'), GapAware": "orange",
    "EASGD": "green",
    "LocalSGD": "purple",
    "SparseLoCo": "teal",
    "LayerWise": "grey",
    "Hogwild": "gold",
    "Downpour, adam": "rose",
}


# ---------------------------------------------------------------- tasks


class CharModel(LightningModule):
    """Predicts a character from the 16 before it: Bengio's neural language model, for 96 characters."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Embedding(96, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.ReLU(), nn.Linear(128, 96)
        )


class Sampled(IterableDataset[Any]):
    """Batches drawn for ever, others on every worker."""

    def __init__(self, data: tuple[Tensor, Tensor], seed: int) -> None:
        self.data, self.seed, self.rank = data, seed, 0

    def __iter__(self) -> Iterator[Any]:
        x, y = self.data
        generator = torch.Generator().manual_seed(1000 * self.seed + self.rank)
        while True:
            index = torch.randint(len(x), (BATCH,), generator=generator)
            yield x[index], y[index]


@dataclass(frozen=True)
class Task:
    """What is trained, for how long, and how long a fast worker's step takes."""

    name: str
    title: str
    unit: str
    step_s: float
    seconds: float
    lr: float
    data: dict[str, tuple[Tensor, Tensor]] = field(repr=False, hash=False)

    def module(self) -> Any:
        return DigitsCNN(width=8, lr=self.lr) if self.name == "digits" else CharModel(lr=self.lr)


def digits() -> Task:
    train, val = (d.tensors for d in datasets())
    data: Any = {"train": train, "val": val}
    return Task("digits", "Digits CNN", "held-out cross entropy", 0.012, 5.0, 0.05, data)


def characters() -> Task:
    """The standard library's modules in the order of their names; every tenth piece of text is held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(p.read_text(errors="ignore") for p in sorted(folder.glob("*.py")))[:2_000_000]
    codes = torch.tensor([ord(c) - 31 if 32 <= ord(c) < 126 else 0 for c in text])
    pieces = codes.unfold(0, CONTEXT + 1, 1)
    held_out = torch.arange(len(pieces)) // 1000 % 10 == 0
    train, val = pieces[~held_out], pieces[held_out][::50]
    data = {k: (v[:, :-1].contiguous(), v[:, -1].contiguous()) for k, v in (("train", train), ("val", val))}
    return Task("characters", "Character model", "held-out nats per character", 0.012, 5.0, 0.1, data)


# ---------------------------------------------------------------- algorithms


@dataclass(frozen=True)
class Entry:
    """A row of the table."""

    algorithm: Algorithm
    nsync: int = 10
    nesterov: bool = False
    sampler: str = ""  # of lightning_asgd.sampling.optim, in place of SGD
    group: str = "whole"  # what it is compared with: the same group's first entry


def entries() -> dict[str, Entry]:
    """Groups: updates that are averaged, updates added whole, one step per exchange, gradients to the servers."""
    one = {"nsync": 1, "group": "one"}
    return {
        "ASGD": Entry(ASGD("mean"), group="mean"),
        "ASGD, StaleSynchronous(4)": Entry(ASGD("mean", transforms=[StaleSynchronous(4)]), group="mean"),
        "ASGD, DynamicSteps": Entry(ASGD("mean", transforms=[DynamicSteps()]), group="mean"),
        "EASGD": Entry(EASGD(), group="mean"),
        "EAMSGD": Entry(EAMSGD(), nesterov=True, group="mean"),
        "LocalSGD": Entry(LocalSGD(), group="mean"),
        "LocalSGD(post=100)": Entry(LocalSGD(post=100), group="mean"),
        "DiLoCo": Entry(DiLoCo(), group="mean"),
        "StreamingDiLoCo": Entry(StreamingDiLoCo(), group="mean"),
        "DelayedNesterov, DynamicSteps": Entry(DelayedNesterov(transforms=[DynamicSteps()]), group="mean"),
        "DelayedNesterov(momentum=0.9), DynamicSteps": Entry(
            DelayedNesterov(momentum=0.9, transforms=[DynamicSteps()]), group="mean"
        ),
        "DecoupledDiLoCo": Entry(DecoupledDiLoCo(), group="mean"),
        "SparseLoCo": Entry(SparseLoCo(), group="mean"),
        "LayerWise": Entry(LayerWise(), group="mean"),
        "LayerWise(delay=1)": Entry(LayerWise(1), group="mean"),
        "LayerWise(delay=1, compensate=False)": Entry(LayerWise(1, compensate=False), group="mean"),
        "Hogwild": Entry(Hogwild(), group="mean"),
        "ASGD('sum')": Entry(ASGD("sum")),
        "ASGD('sum'), WarmStart(100)": Entry(ASGD("sum", transforms=[WarmStart(100)])),
        "ASGD('sum'), ScaleByStaleness": Entry(ASGD("sum", transforms=[ScaleByStaleness()])),
        "ASGD('sum'), StalenessAware": Entry(ASGD("sum", transforms=[StalenessAware()])),
        "ASGD('sum'), GapAware": Entry(ASGD("sum", transforms=[GapAware()])),
        "ASGD('sum'), DropStale(4)": Entry(ASGD("sum", transforms=[DropStale(4)])),
        "ASGD('sum'), SoftSync(1)": Entry(ASGD("sum", transforms=[SoftSync(1)])),
        "ASGD('sum'), Rennala(4)": Entry(ASGD("sum", transforms=[Rennala(4)])),
        "ASGD('sum'), nsync 1": Entry(ASGD("sum"), **one),  # type: ignore[arg-type]
        "DANASlim('sum'), nsync 1": Entry(DANASlim("sum"), nesterov=True, **one),  # type: ignore[arg-type]
        "Downpour, sgd": Entry(Downpour(scale="sum"), nsync=1, group="gradient"),
        "Downpour, DelayCompensation": Entry(
            Downpour(scale="sum", transforms=[DelayCompensation()]), nsync=1, group="gradient"
        ),
        "Downpour, DelayCompensation(adaptive)": Entry(
            Downpour(scale="sum", transforms=[DelayCompensation(2.0, adaptive=True)]), nsync=1, group="gradient"
        ),
        "Downpour, adagrad": Entry(Downpour("adagrad", lr=0.02), group="gradient"),
        "Downpour, adadelta": Entry(Downpour("adadelta", accrued="mean"), group="gradient"),
        "Downpour, adam": Entry(Downpour("adam", lr=0.002), group="gradient"),
        "SGMCMC, SGLD": Entry(SGMCMC(), sampler="SGLD", group="samples"),
        "ElasticSGMCMC, SGLD": Entry(ElasticSGMCMC(), sampler="SGLD", group="samples"),
    }


# ---------------------------------------------------------------- one run


class Pace(Callback):
    """Stretches steps, stops after a time, and keeps what is needed afterwards."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task, self.folder = task, folder
        self.steps: list[float] = []
        self.peeks: list[tuple[float, dict[str, Tensor]]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.slow = SLOWER if trainer.global_rank == WORKERS - 1 else 1
        trainer.strategy.barrier("start together")
        self.begun = self.next = time.perf_counter()
        self.peek(trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.next = max(self.next + self.slow * self.task.step_s, time.perf_counter() - self.task.step_s)
        time.sleep(max(0.0, self.next - time.perf_counter()))
        now = time.perf_counter() - self.begun
        self.steps.append(now)
        if now >= self.task.seconds:
            trainer.should_stop = True
        elif trainer.is_global_zero and now - self.peeks[-1][0] >= PEEK_S:
            self.peek(trainer)

    def peek(self, trainer: Any) -> None:
        if trainer.is_global_zero:
            state = trainer.strategy.lightning_module_state_dict()
            self.peeks.append((time.perf_counter() - self.begun, {k: v.clone() for k, v in state.items()}))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.peek(trainer)
        stats = trainer.strategy.stats
        stale = [sum(n * s for s, n in stats.staleness_histogram.items()), sum(stats.staleness_histogram.values())]
        traffic = stats.bytes_pushed + stats.bytes_fetched
        about = {"steps": self.steps, "stale": stale, "traffic": traffic, "wait": stats.wait_s, "peeks": self.peeks}
        torch.save(about, self.folder / f"{trainer.global_rank}.pt")


def loss_on(module: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(module.net(batch[0]), batch[1])


def fit(task: Task, entry: Entry, seed: int, folder: Path) -> None:
    """One training run, the first and only one of this process."""
    quiet(folder / "log")
    seed_everything(seed)
    module = task.module()
    data = Sampled(task.data["train"], seed)

    class Task_(type(module)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_on(self, batch)

        def train_dataloader(self) -> Any:
            data.rank = self.global_rank
            return DataLoader(data, batch_size=None)

        def configure_optimizers(self) -> Any:
            if entry.sampler:  # a step of task.lr / 10 on the mean loss, and the noise that belongs to it
                num_data = len(task.data["train"][0])
                sampler = getattr(lightning_asgd.sampling.optim, entry.sampler)
                return sampler(self.parameters(), lr=task.lr / 10 / num_data, num_data=num_data)
            return torch.optim.SGD(self.parameters(), lr=task.lr, momentum=0.9, nesterov=entry.nesterov)

    module.__class__ = Task_
    strategy = ASGDStrategy(nsync=entry.nsync, algorithm=entry.algorithm, start_method="fork")
    counts.fit(module, (), devices=WORKERS, strategy=strategy, max_epochs=1, callbacks=[Pace(task, folder)])


def run(task: Task, name: str, seed: int) -> dict[str, Any]:
    """Fork a fresh process for one run; this one has imported everything but started nothing."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        process = multiprocessing.get_context("fork").Process(target=fit, args=(task, entries()[name], seed, folder))
        process.start()
        process.join(60 + 3 * task.seconds)
        if process.exitcode != 0:
            process.kill()
            sys.exit(f"{name} with seed {seed} failed:\n{(folder / 'log').read_text()[-3000:]}")
        workers = [torch.load(folder / f"{rank}.pt") for rank in range(WORKERS)]
    module, curve = task.module(), []
    for at, state in workers[0]["peeks"]:
        module.load_state_dict(state)
        with torch.no_grad():
            loss = float(loss_on(module.eval(), task.data["val"]))
        samples = BATCH * sum(sum(t <= at for t in w["steps"]) for w in workers)
        curve.append((at, samples, loss if loss == loss else float("inf")))
    stale, pushes = (sum(w["stale"][k] for w in workers) for k in (0, 1))
    return {
        "task": task.name,
        "name": name,
        "seed": seed,
        "curve": curve,
        "samples": BATCH * sum(len(w["steps"]) for w in workers),
        "staleness": stale / pushes if pushes else 0.0,
        "traffic": sum(w["traffic"] for w in workers) / sum(len(w["steps"]) for w in workers),
        "steps": [len(w["steps"]) for w in workers],
    }


# ---------------------------------------------------------------- what came of it


def to_reach(curve: list[Any], goal: float, column: int) -> float:
    """The first time, or number of samples, at which the loss is at most ``goal``."""
    return next((point[column] for point in curve if point[2] <= goal), float("inf"))


def rows_of(runs: list[dict[str, Any]], task: str) -> list[dict[str, Any]]:
    """Medians over seeds, in the order of the entries. The goal is what plain ASGD reaches in 60 % of the time."""
    mine = [r for r in runs if r["task"] == task]
    plain = [r["curve"] for r in mine if r["name"] == "ASGD"]
    if not plain:
        return []
    goal = statistics.median(min(p[2] for p in c if p[0] <= 0.6 * c[-1][0]) for c in plain)
    rows = []
    for name, entry in entries().items():
        own = [r for r in mine if r["name"] == name]
        if own:
            finals = [r["curve"][-1][2] for r in own]
            rows.append(
                {
                    "name": name,
                    "group": entry.group,
                    "nsync": entry.nsync,
                    "loss": statistics.median(finals),
                    "range": (min(finals), max(finals)),
                    "seconds": statistics.median(to_reach(r["curve"], goal, 0) for r in own),
                    "to_goal": statistics.median(to_reach(r["curve"], goal, 1) for r in own),
                    "samples": statistics.median(r["samples"] for r in own),
                    "staleness": statistics.median(r["staleness"] for r in own),
                    "traffic": statistics.median(r["traffic"] for r in own),
                    "goal": goal,
                }
            )
    return rows


def table(rows: list[dict[str, Any]], task: Task) -> str:
    """As Markdown."""
    lines = [
        f"**{task.title}**: {task.unit} after {task.seconds:g} s; goal {rows[0]['goal']:.3f}.",
        "",
        "| algorithm | nsync | loss (min-max) | s to goal | samples to goal | samples in all | staleness | kB/step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        low, high = r["range"]
        seconds = f"{r['seconds']:.1f}" if r["seconds"] < float("inf") else "-"
        samples = f"{r['to_goal']:,.0f}" if r["to_goal"] < float("inf") else "-"
        lines.append(
            f"| {r['name']} | {r['nsync']} | {r['loss']:.3f} ({low:.3f}-{high:.3f}) | {seconds} | {samples} "
            f"| {r['samples']:,.0f} | {r['staleness']:.1f} | {r['traffic'] / 1e3:,.0f} |"
        )
    return "\n".join(lines)


def verdicts(rows: list[dict[str, Any]], task: Task) -> str:
    """For everything that claims to reduce the harm of staleness: whether it did, beside its group's first."""
    lines = [f"**{task.title}**, compared with the same run without it:", ""]
    claims = ("ScaleBy", "StalenessAware", "GapAware", "DropStale", "SoftSync", "Rennala", "DelayComp", "DANA", "Warm")
    for r in rows:
        if any(claim in r["name"] for claim in claims):
            first = next(other for other in rows if other["group"] == r["group"])
            overlap = r["range"][0] <= first["range"][1] and first["range"][0] <= r["range"][1]
            word = "better" if r["loss"] < first["loss"] else "worse"
            if overlap:
                word = "**no difference** that three seeds can tell"
            lines.append(f"- {r['name']}: {r['loss']:.3f} against {first['loss']:.3f}: {word}.")
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]], tasks: list[Task], path: Path) -> None:
    """Curves of the median runs; every task has a row, and their legend lies above."""
    plt = pyplot()
    fig, axes = plt.subplots(len(tasks), 2, figsize=(11, 3.8 * len(tasks) + 0.7), layout="constrained", squeeze=False)
    for (left, right), task in zip(axes, tasks, strict=True):
        losses = []
        for name, colour in SHOWN.items():
            own = [r["curve"] for r in runs if r["task"] == task.name and r["name"] == name]
            if not own:
                continue
            curve = sorted(own, key=lambda c: c[-1][2])[len(own) // 2]
            losses += [p[2] for p in curve]
            left.plot([p[0] for p in curve], [p[2] for p in curve], color=PAPER[colour], label=name, lw=1.4)
            right.plot([p[1] for p in curve], [p[2] for p in curve], color=PAPER[colour], lw=1.4)
        for side, label in ((left, "seconds"), (right, "samples, all workers")):
            side.set(xlabel=label, ylim=(0.9 * min(losses), 1.2 * losses[0]))
            logarithmic(side)
        right.tick_params(labelleft=False)
        left.set(ylabel=task.unit, title=task.title)
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
    fig.savefig(path)
    plt.close(fig)


def report(results: Path, tasks: list[Task]) -> None:
    """Tables and verdicts on the terminal, the tables and the picture as files beside the results."""
    runs = json.loads(results.read_text())["runs"]
    tasks = [t for t in tasks if rows_of(runs, t.name)]
    parts = []
    if not tasks:
        return
    for task in tasks:
        rows = rows_of(runs, task.name)
        parts.append(table(rows, task))
        Console().print(f"{parts[-1]}\n{verdicts(rows, task)}", markup=False, highlight=False)
    results.with_suffix(".md").write_text("\n\n".join(parts) + "\n")
    draw(runs, tasks, results.with_suffix(".png"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare all algorithms.")
    parser.add_argument("--task", choices=("digits", "characters"), action="append")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", help="rows whose name contains one of these")
    parser.add_argument("--redraw", action="store_true", help="no runs: use the earlier measurements")
    args = parser.parse_args()
    tasks = [t for t in (digits(), characters()) if args.task is None or t.name in args.task]
    results = ROOT / "results" / "algorithms.json"
    results.parent.mkdir(exist_ok=True)
    if not args.redraw:
        names = [n for n in entries() if args.only is None or any(word.lower() in n.lower() for word in args.only)]
        before = json.loads(results.read_text())["runs"] if results.exists() else []
        todo = [(seed, task, name) for seed in args.seeds for task in tasks for name in names]
        columns = (TextColumn("{task.description:60}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns) as progress:
            bar = progress.add_task("", total=len(todo))
            for seed, task, name in todo:  # a seed's rows one after the other, so that a disturbance hits few seeds
                progress.update(bar, description=f"{task.title}: {name}, seed {seed}")
                one = run(task, name, seed)
                key = ("task", "name", "seed")
                before = [r for r in before if [r[k] for k in key] != [one[k] for k in key]] + [one]
                settings = {"torch": torch.__version__, "cores": os.cpu_count(), "workers": WORKERS, "slower": SLOWER}
                results.write_text(json.dumps({"settings": settings, "runs": before}))
                progress.advance(bar)
    report(results, tasks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
