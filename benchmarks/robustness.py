"""A-SGD with its defaults beside DDP when something is amiss: speeds, delays, joins and losses, rates, precisions.

    python benchmarks/robustness.py                  # half an hour on two cores; continues where it was interrupted
    python benchmarks/robustness.py --seeds 1
    python benchmarks/robustness.py --table          # the results so far

The text and the graph of benchmarks/accuracy_sets.py, SGD with momentum and AdamW. DDP has four workers, and nothing is
amiss there; only where the learning rate is three times as large DDP's is so too. Two kinds of rows:

- in virtual time, where a seed gives the same bits on any day: one of four workers four times slower, replies that
  arrive up to ten steps late, workers that join one after the other, one worker that 15 others join, of which 12 are
  lost later, and learning rates three times as large;
- in real processes, the text with AdamW: a checkpoint of four workers resumed on 16, as DDP does it too; bfloat16; and
  a GradScaler whose first scale is far too large, so that it skips steps (DDP has 32 bits there).

Differences from DDP are taken by seed: the mean and its standard error. Exits with 1 if training ends in NaN where
DDP's does not, or if with the large learning rates A-SGD is beyond the goal of benchmarks/accuracy_sets.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: the bits do not depend on the machine's cores

import torch
from accuracy import CONSOLE, ROOT, difference
from accuracy_sets import BATCH, GOAL, Cell, Data, loaded, version
from ledger import Ledger
from rich.table import Table
from shares import train_together
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd.simulation import Crash, LateWorker, LeasedData, Link, LogNormal, Network, Problem, Simulation

FILE = ROOT / "results" / "robustness.jsonl"
SETS, OPTIMIZERS, WORKERS, SEEDS = ("text", "graph"), ("SGD", "AdamW"), 4, 3
SPEED = LogNormal(1.0, 0.1)  # seconds of a step
REPLY_S = 2.5  # seconds until a reply arrives, unless a row says another time
FIRST, RUN_S = 2, 600.0  # epochs of the run whose checkpoint is resumed; seconds of a real run at most


class Leased(Problem):
    """A network on samples that are leased; every epoch has an order of its own."""

    def __init__(self, data: Data, workers: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.net, self.workers, self._data, self._seed = data.make(), workers, data, seed
        self._first = parameters_to_vector(self.net.parameters()).detach().clone()
        self.samples = len(data.train[0])
        self.steps = self.samples // workers // BATCH  # of a worker in an epoch
        self._epochs = [0] * self.samples  # how often each number was trained
        self._orders: dict[int, Tensor] = {}
        self._taken = [0] * workers

    def start(self) -> Tensor:
        return self._first.clone()

    def gradient(self, weights: Tensor, worker: int, generator: torch.Generator) -> tuple[float, Tensor]:
        """Of the next batch of a worker's share, for DDP."""
        step = self._taken[worker] % self.steps
        self._taken[worker] += 1
        begin = (step * self.workers + worker) * BATCH
        return self.gradient_of(range(begin, begin + BATCH), weights, worker, generator)

    def gradient_of(
        self, samples: Sequence[int], weights: Tensor, worker: int, generator: torch.Generator
    ) -> tuple[float, Tensor]:
        epoch = self._epochs[samples[0]]
        for number in samples:
            self._epochs[number] += 1
        if epoch not in self._orders:
            order = torch.Generator().manual_seed(1000 * self._seed + epoch)
            self._orders[epoch] = torch.randperm(self.samples, generator=order)
        mine = self._orders[epoch][list(samples)]
        vector_to_parameters(weights, self.net.parameters())
        with torch.enable_grad():
            loss = functional.cross_entropy(self.net(self._data.train[0][mine]), self._data.train[1][mine])
            gradients = torch.autograd.grad(loss, list(self.net.parameters()))
        return float(loss.detach()), torch.cat([g.reshape(-1) for g in gradients])

    def loss(self, weights: Tensor) -> float:
        return 0.0  # only what training ends with is looked at


def measured(net: nn.Module, data: Data) -> float:
    """A network's accuracy or loss on the held-out samples."""
    with torch.no_grad():
        outputs = torch.cat([net(inputs) for inputs in data.test[0].split(500)])
    if data.measure == "accuracy":
        return float((outputs.argmax(1) == data.test[1]).double().mean())
    return float(functional.cross_entropy(outputs, data.test[1]))


# ---------------------------------------------------------------------- rows in virtual time


@dataclass(frozen=True)
class Row:
    """What is amiss. Times are parts of an epoch of four workers."""

    speeds: tuple[float, ...] = (1.0,) * WORKERS
    reply_s: float = REPLY_S
    joins: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()  # of the latest workers
    rate: float = 1.0


VIRTUAL = {
    "nothing": Row(),
    "one of four workers four times slower": Row(speeds=(1.0, 1.0, 1.0, 4.0)),
    **{f"replies after {steps} steps": Row(reply_s=float(steps)) for steps in (0, 1, 5, 10)},
    "workers join one after the other, in half an epoch": Row(speeds=(1.0,), joins=(0.17, 0.33, 0.5)),
    "1 worker, 16 after half an epoch, 4 after one": Row(speeds=(1.0,), joins=(0.5,) * 15, losses=(1.0,) * 12),
    "a learning rate three times as large": Row(rate=3.0),
    "the same with 16 workers": Row(speeds=(1.0,) * 16, rate=3.0),
}


def simulated(cell: Cell, row: Row) -> float:
    """Train in virtual time; the measure on the held-out samples."""
    data = loaded(cell.data)
    problem = Leased(data, len(row.speeds) if cell.way == "DDP" and row.rate != 1 else WORKERS, cell.seed)
    make = rated(data, cell.optimizer, row.rate)
    if cell.way == "DDP":
        weights = train_together(problem, data.epochs, make)  # type: ignore[arg-type]
    else:
        last = len(row.speeds) + len(row.joins)
        weights = (
            Simulation(
                problem=problem,
                workers=len(row.speeds),
                epochs=data.epochs,
                exchange={"nsync": "auto"},
                optimizer=make,
                speed=[LogNormal(SPEED.median_s * factor, SPEED.sigma) for factor in row.speeds],
                network=Network(workers=Link(latency_s=row.reply_s / 2)),
                data=LeasedData(problem.samples, BATCH),
                elastic=bool(row.joins),
                late_workers=[LateWorker(at * problem.steps) for at in row.joins],
                crashes=[Crash(last - 1 - n, at * problem.steps) for n, at in enumerate(row.losses)],
                silence_s=30.0,
                evaluate_every=sys.maxsize,
                seed=cell.seed,
            )
            .run()
            .weights
        )
    vector_to_parameters(weights, problem.net.parameters())
    return measured(problem.net, data)


def rated(data: Data, optimizer: str, factor: float) -> Callable[[Any], Any]:
    """What makes an optimizer of parameters, with a multiple of the set's learning rate."""

    def make(parameters: Any) -> Any:
        made = data.optimizer(optimizer)(parameters)
        for group in made.param_groups:
            group["lr"] *= factor
        return made

    return make


# ---------------------------------------------------------------------- rows in real processes

REAL = ("resumed from 4 on 16 workers", "bfloat16", "a GradScaler that skips steps")


def real(cell: Cell, row: str) -> float:
    """Train in real processes, which begin in a fresh one."""
    command = [sys.executable, __file__, "--real", row, json.dumps(asdict(cell))]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{row}, {cell}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return float(done.stdout.splitlines()[-1])


def train_really(cell: Cell, row: str) -> None:
    """Train with Trainers in the present folder, and print the measure."""
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.precision import MixedPrecision

    from lightning_asgd import ASGDStrategy

    data = loaded(cell.data)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = data.make()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return data.optimizer(cell.optimizer)(self.parameters())

        def on_fit_end(self) -> None:
            if self.trainer.is_global_zero:
                Path("measure").write_text(repr(measured(self.net.float(), data)))

    def fit(devices: int, epochs: int, resumed: str | None = None) -> None:
        pl.seed_everything(cell.seed, verbose=False)
        strategy = "ddp_fork" if cell.way == "DDP" else ASGDStrategy(start_method="fork")
        options: dict[str, Any] = {"precision": "bf16-mixed"} if row == REAL[1] else {}
        if row == REAL[2] and cell.way != "DDP":
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)  # with which gradients of 16 bits are infinite
            options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        saves = pl.callbacks.ModelCheckpoint("checkpoints", save_last=True)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy,
            max_epochs=epochs,
            callbacks=[saves],
            **quiet,
            **options,
        )
        loader = DataLoader(TensorDataset(*data.train), BATCH, shuffle=True, drop_last=True)
        trainer.fit(Model(), loader, ckpt_path=resumed)

    if row == REAL[0]:
        fit(WORKERS, FIRST)
        fit(16, data.epochs, "checkpoints/last.ckpt")
    else:
        fit(WORKERS, data.epochs)
    print(Path("measure").read_text())


# ---------------------------------------------------------------------- the table


def plan(seeds: int) -> Iterator[tuple[Cell, str]]:
    """All runs. DDP's of the rows in which nothing about it changes are one."""
    for seed in range(1, 1 + seeds):
        for name in SETS:
            for optimizer in OPTIMIZERS:
                for row in VIRTUAL:
                    for way in ("DDP", "A-SGD"):
                        if way == "A-SGD" or base(row) == row:
                            yield Cell(name, optimizer, len(VIRTUAL[row].speeds), way, seed), row
        for row in REAL:
            for way in ("DDP", "A-SGD"):
                yield Cell("text", "AdamW", 16 if row == REAL[0] else WORKERS, way, seed), row


def base(row: str) -> str:
    """The row whose DDP a row is compared with."""
    return row if row in REAL or VIRTUAL[row].rate != 1 else "nothing"


def table(found: dict[tuple[Cell, str], float]) -> bool:
    """Print what was found; whether all is as it should be."""
    good, kinds = True, [(name, optimizer) for name in SETS for optimizer in OPTIMIZERS]
    shown = Table(title="A-SGD minus DDP, by seed: mean and standard error", title_justify="left")
    shown.add_column("what is amiss")
    for name, optimizer in kinds:
        shown.add_column(f"{loaded(name).title}, {loaded(name).measure}, {optimizer}", justify="right")
    for row in (*VIRTUAL, *REAL):
        texts = []
        for name, optimizer in kinds:
            data, pairs, nan = loaded(name), [], False
            for (cell, each), value in found.items():
                if each == row and (cell.data, cell.optimizer, cell.way) == (name, optimizer, "A-SGD"):
                    of_ddp = [
                        v
                        for (c, e), v in found.items()
                        if e == base(row)
                        and (c.data, c.optimizer, c.way, c.seed) == (name, optimizer, "DDP", cell.seed)
                    ]
                    nan |= not math.isfinite(value) and any(map(math.isfinite, of_ddp))
                    pairs += [(value - v) / (1.0 if data.measure == "accuracy" else v) for v in of_ddp]
            if not pairs:
                texts.append("")
                continue
            mean, error = difference(pairs) if len(pairs) > 1 else (pairs[0], math.inf)
            worse = -mean if data.measure == "accuracy" else mean
            bad = nan or (row in VIRTUAL and VIRTUAL[row].rate != 1 and worse > GOAL[data.measure])
            good &= not bad
            text = f"{mean:+.4f} ± {error:.4f}" if data.measure == "accuracy" else f"{mean:+.1%} ± {error:.1%}"
            texts.append(f"{text} FAIL" if bad else text)
        shown.add_row(row, *texts)
    CONSOLE.print(shown)
    return good


def digest(cell: Cell) -> str:
    """Changes with what defines a run."""
    return hashlib.sha256(version(cell).encode() + Path(__file__).read_bytes()).hexdigest()[:12]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--table", action="store_true", help="run nothing, print the results so far")
    parser.add_argument("--real", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.real:
        train_really(Cell(**json.loads(args.real[1])), args.real[0])
        return 0
    ledger = Ledger(FILE, lambda key: digest(Cell(*key[1:])))

    def run(row: str, *about: Any) -> float:
        return simulated(Cell(*about), VIRTUAL[row]) if row in VIRTUAL else real(Cell(*about), row)

    if not args.table:
        ledger.complete(((row, *astuple(cell)) for cell, row in plan(args.seeds)), run)
    known = {(Cell(*cell), row): value for (row, *cell), value in ledger.found.items()}
    return 0 if table(known) else 1


if __name__ == "__main__":
    sys.exit(main())
