"""The speed of :mod:`served_tables`: a model with two towers, on served tables and on one in memory."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import throughput
import torch
from common import CONSOLE
from ranks import run_ranks
from rich.table import Table
from rules import spread
from throughput import Scenario, trainer_options
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_asgd import ASGDStrategy, ServedEmbedding

__all__ = ["CONSOLE", "NSYNC", "WIDTH", "Pairs", "TwoTowers", "skewed", "speed", "temporary"]

WIDTH, NSYNC = 64, 10
PAIRS, BATCHES = 2048, 200  # of a batch of the speed, which is twice as many rows; and batches before they repeat
LOCAL = "in memory"
WARM_UP_S = 3.0
SYSTEMS = {LOCAL: (1, 0)} | {
    f"{workers} worker{'s' * (workers > 1)}, {servers} server{'s' * (servers > 1)}": (workers, servers)
    for workers in (1, 2)
    for servers in (1, 2)
}
Results = dict[str, list[dict[str, Any]]]


def skewed(number: int, rows: int, seed: int) -> Tensor:
    """Rows drawn so that the k-th most frequent one has a probability of about 1/k; these are anywhere in the table."""
    draws = torch.rand(number, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    step = next(step for step in range(int(0.618 * rows), 2 * rows) if math.gcd(step, rows) == 1)
    return (torch.pow(float(rows), draws).long() - 1).clamp_(0, rows - 1) * step % rows


@contextlib.contextmanager
def temporary(place: Path | None) -> Iterator[Path]:
    """A folder for a table. Unlike ``TemporaryDirectory``, forked ranks do not remove it when they end."""
    folder = Path(tempfile.mkdtemp(dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------------- a model


class Pairs(Dataset[Any]):
    """Pairs of rows and labels, which repeat after some time. A batch is taken at once."""

    def __init__(self, rows: int, distinct: int, length: int) -> None:
        halves = skewed(distinct, rows // 2, seed=1), skewed(distinct, rows // 2, seed=2) + rows // 2
        self.pairs, self.length = torch.stack(halves, 1), length
        self.labels = torch.rand(distinct, generator=torch.Generator().manual_seed(3)).round()

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        at = torch.tensor(indices) % len(self.pairs)
        return self.pairs[at], self.labels[at]

    def loader(self, batch: int, *, shuffle: bool) -> Any:
        """Batches as they are."""
        return DataLoader(self, batch_size=batch, shuffle=shuffle, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


class TwoTowers(pl.LightningModule):
    """Scores pairs of rows. A table in memory learns by the optimizer of the towers."""

    def __init__(self, table: nn.Module, optimizer: str = "adagrad", lr: float = 0.01) -> None:
        super().__init__()
        self.table, self.optimizer, self.lr = table, optimizer, lr
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pairs, labels = batch
        vectors = self.table(pairs)
        users, items = (tower(vectors[:, side]) for side, tower in enumerate(self.towers))
        return nn.functional.binary_cross_entropy_with_logits((users * items).sum(1), labels)

    def configure_optimizers(self) -> Any:
        kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[self.optimizer]
        return kind([each for each in self.parameters() if each.requires_grad], lr=self.lr)


# ---------------------------------------------------------------------- speed


class Clock(pl.Callback):
    """Notes when batches ended, and ends the training after some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.ends: list[float] = []
        self.figures: list[dict[str, float]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.warm = time.monotonic() + WARM_UP_S

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.monotonic()
        self.ends.append(now)
        over = now >= self.warm + self.seconds and not trainer.should_stop
        if over or (not self.figures and now >= self.warm):
            client = getattr(module.table, "_client", None)
            rows = {} if client is None else {name: getattr(client.stats, name) for name in ("read", "fetched")}
            self.figures.append(throughput._figures(trainer.strategy) | rows)
        trainer.should_stop |= over


def train(scenario: Scenario, rows: int, folder: Path, rank: int) -> dict[str, Any]:
    """Train for some seconds; for none, train each batch once, so that its rows are there."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    table: nn.Module
    options: dict[str, Any] = {**trainer_options(), "devices": scenario.workers}
    if scenario.num_servers:
        table = ServedEmbedding(rows, WIDTH, folder=folder / str(scenario.num_servers), optimizer="adagrad")
        options["strategy"] = ASGDStrategy(nsync=NSYNC, num_servers=scenario.num_servers, monitor=False)
    else:
        table = nn.Embedding(rows, WIDTH, sparse=True, _weight=torch.empty(rows, WIDTH).uniform_(-1, 1))
    distinct = BATCHES * PAIRS
    at_most = 150_000 if scenario.num_servers else 900_000  # samples/s of a worker, so that no epoch ends
    length = int(scenario.workers * at_most * (WARM_UP_S + scenario.seconds)) if scenario.seconds else distinct
    clock = Clock(scenario.seconds or math.inf)
    trainer = pl.Trainer(**options, callbacks=[clock])
    trainer.fit(TwoTowers(table), Pairs(rows, distinct, length).loader(PAIRS, shuffle=bool(scenario.seconds)))
    before, after = clock.figures[0], clock.figures[-1]
    moved = {key: after[key] - before[key] for key in after}
    return {"rank": rank, "warm": clock.warm, "ends": clock.ends, **moved}


def measure(name: str, seconds: float, rows: int, folder: Path) -> dict[str, Any]:
    """One run."""
    workers, servers = SYSTEMS[name]
    scenario = Scenario("served", workers=workers, num_servers=servers, batch=PAIRS, seconds=seconds)
    jobs = [partial(train, scenario, rows, folder, rank) for rank in range(workers)]
    answers = run_ranks(jobs, 240 + seconds, launched=servers > 0)
    if not seconds:
        return {}
    result = throughput._evaluate(scenario, answers)
    if servers:
        result["fetched_share"] = sum(each["fetched"] for each in answers) / sum(each["read"] for each in answers)
    return result


def speed(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Measure in turns. There is no target."""
    distinct = BATCHES * PAIRS
    batches = Pairs(args.rows, distinct, distinct).loader(PAIRS, shuffle=False)
    per_batch = statistics.mean(len(pairs.unique()) for pairs, _ in batches)
    runs: Results = {name: [] for name in SYSTEMS}
    with temporary(args.folder) as folder:
        for name in list(SYSTEMS)[1:3]:  # one worker on each number of servers
            measure(name, 0.0, args.rows, folder)
        for repeat in range(args.repeats):
            for name, found in runs.items():
                found.append(measure(name, args.seconds, args.rows, folder))
                found[-1]["rows_per_s"] = found[-1]["samples_per_s"] / PAIRS * per_batch
                text = f"{repeat + 1}/{args.repeats}  {name:<22}{found[-1]['samples_per_s']:10,.0f} samples/s"
                CONSOLE.print(f"  {text}  (load {os.getloadavg()[0]:.1f})")
    show_speed(runs, args.rows, per_batch)
    return {"rows": args.rows, "rows_per_batch": per_batch, "runs": runs}, True


def show_speed(runs: Results, rows: int, per_batch: float) -> None:
    """Print the speeds."""
    title = (
        f"two towers, {rows:,} rows x {WIDTH}, batches of {PAIRS} pairs with {per_batch:,.0f} rows on average; "
        "medians (min - max)"
    )
    headings = ("samples/s", "rows/s", f"of {LOCAL}", "fetched %", "servers' CPU %", "others' CPU %")
    table = Table("", *headings, title=title, title_justify="left")
    for name, found in runs.items():
        ratios = [mine["samples_per_s"] / own["samples_per_s"] for mine, own in zip(found, runs[LOCAL], strict=True)]
        cells = [spread([each[key] for each in found], 0) for key in ("samples_per_s", "rows_per_s")]
        shares = [
            [100 * each[key] for each in found if key in each]
            for key in ("fetched_share", "server_cpu_share", "other_cpu_share")
        ]
        table.add_row(name, *cells, spread(ratios, 2), *(f"{statistics.median(s):.0f}" if s else "" for s in shares))
    CONSOLE.print(table)
