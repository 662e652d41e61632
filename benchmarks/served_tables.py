"""Embeddings that lie on the servers only: killed servers, speed beside a table in memory, and the same values.

    python benchmarks/served_tables.py                    # about 20 minutes, and 11 GB of disk
    python benchmarks/served_tables.py --only equal       # half a minute

faults  A table of 10,000,000 rows x 64 (2.56 GB), two servers, two workers. A server that has a part of the table is
        killed ten times, the oldest one first. Training a sample adds exactly 1 to its row, so at the end every row
        must hold how often its sample was trained. Rows are used with a skew like Zipf's, over the whole table.
        RLIMIT_DATA keeps each worker below the table's size: the limit is on the heap and on private mappings that can
        be written to, the stacks of threads and those of libraries among them, whether they are used or not. Shared
        memory and mapped files are not in it. The servers, which worker 0 starts, inherit the limit.
speed   Samples and rows per second of a two-tower model with Adagrad: with one worker and two, on one server and two,
        beside one process that has the table in memory, with `nn.Embedding(sparse=True)`. Rows are those of a batch,
        each once, which are read and pushed. All in turns. Rows have been used before, so that their files have pages.
equal   The largest difference of any scalar from a local table that begins with the same values, after some hundred
        steps of one worker on two servers, on the same batches. The towers do not learn, so that only the table can
        differ. The local table has dense gradients: torch adds up sparse ones in another order, and Adagrad makes large
        differences of small ones where a gradient is nearly 0.

Writes results/served.json. Exits with 1 if a row has another value than its count, if a server was killed that was not
replaced, or if `equal` finds a difference above 1e-6.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

import contextlib
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence

import psutil
import pytorch_lightning as pl
import throughput
import torch
from clock import Clock
from common import CONSOLE, prepared, spread, verdict
from ranks import run_ranks, servers_of
from rich.table import Table
from throughput import Scenario, trainer_options
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_asgd import ASGDStrategy, ServedEmbedding
from lightning_asgd.tables.served.row_store import first_values

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


def figures(trainer: Any) -> dict[str, float]:
    """What throughput.py takes down, and the rows that the table has read and fetched."""
    client = getattr(trainer.lightning_module.table, "_client", None)
    rows = {} if client is None else {name: getattr(client.stats, name) for name in ("read", "fetched")}
    return throughput._figures(trainer.strategy) | rows


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
    clock = Clock(WARM_UP_S, scenario.seconds or math.inf, figures)
    trainer = pl.Trainer(**options, callbacks=[clock])
    trainer.fit(TwoTowers(table), Pairs(rows, distinct, length).loader(PAIRS, shuffle=bool(scenario.seconds)))
    return clock.answer(rank)


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
        "medians (min-max)"
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


FILE = Path(__file__).resolve().parent.parent / "results" / "served.json"
SEEN, BATCH = 200_000, 256  # samples of an epoch with faults, and of one of its batches
EQUAL = 1e-6


# ---------------------------------------------------------------------- faults


@dataclass(frozen=True)
class Faults:
    """What is trained while servers are killed."""

    rows: int
    kills: int
    limit: int  # bytes of a worker's heap and private mappings
    folder: Path
    workers: int = 2
    servers: int = 2

    def table(self) -> ServedEmbedding:
        """Its learning rate undoes that gradients are divided by the number of workers."""
        options = {"optimizer": "sgd", "lr": float(self.workers), "init_std": 0.0}
        return ServedEmbedding(self.rows, WIDTH, folder=self.folder, **options)  # type: ignore[arg-type]

    def samples(self) -> Tensor:
        """Rows of an epoch."""
        return skewed(SEEN, self.rows, seed=0)


class Counting(pl.LightningModule):
    """A sample adds 1 to each scalar of its row."""

    def __init__(self, job: Faults) -> None:
        super().__init__()
        self.table = job.table()
        self.weights = nn.Parameter(torch.zeros(10))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return -self.table(batch[0]).sum() + self.weights.square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.weights], lr=0.1)


class Killer(pl.Callback):
    """Kills servers while worker 0 trains. All workers end with the epoch in which the last one was killed."""

    def __init__(self, job: Faults, rank: int) -> None:
        self.job, self.rank = job, rank
        self.killed: list[dict[str, Any]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begun, self.module = time.monotonic(), pl_module
        if self.rank == 0:
            self.thread = threading.Thread(target=self.kill, daemon=True)
            self.thread.start()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        over = self.rank == 0 and not self.thread.is_alive()  # or it has failed: then some are missing
        trainer.should_stop |= trainer.strategy.broadcast(over)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seconds = time.monotonic() - self.begun

    def kill(self) -> None:
        chance = random.Random(1)
        while len(self.killed) < self.job.kills:
            before = self.read()
            time.sleep(chance.uniform(0.5, 4.0))
            serving = self.serving()
            if len(serving) == self.job.servers and self.read() > before:  # the replacements answer
                (part, server), *_ = serving
                server.kill()
                self.killed.append({"at_s": time.monotonic() - self.begun, "part": part, "pid": server.pid})

    def read(self) -> int:
        """Rows that this worker has read."""
        client = self.module.table._client
        return client.stats.read if client is not None else 0

    def serving(self) -> list[tuple[str, psutil.Process]]:
        """The servers that have parts of the table open, oldest first: a hot standby has none."""
        found = []
        for server in servers_of(psutil.Process()):
            try:
                names = [Path(file.path) for file in server.open_files()]
            except psutil.Error:  # it has ended
                continue
            found += [(n.stem, server) for n in names if n.suffix == ".lock" and n.parent == self.job.folder]
        return found


def count(job: Faults, rank: int) -> dict[str, Any]:
    """Train as one of the workers, with little memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (job.limit, job.limit))
    torch.set_num_threads(1)
    refused = False
    try:
        torch.empty(job.rows, WIDTH)
    except RuntimeError:
        refused = True
    killer = Killer(job, rank)
    strategy = ASGDStrategy(nsync=NSYNC, num_servers=job.servers, monitor=False)
    options = {**trainer_options(), "max_epochs": 10_000, "devices": job.workers}
    trainer = pl.Trainer(**options, strategy=strategy, callbacks=[killer])
    module = Counting(job)
    trainer.fit(module, DataLoader(TensorDataset(job.samples()), batch_size=BATCH, shuffle=True))
    return {
        **{"seconds": killer.seconds, "epochs": trainer.current_epoch, "killed": killer.killed},
        **{"steps": strategy.stats.steps, "replaced": strategy.stats.servers_replaced},
        "peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "refused": refused,
    }


def wrong_rows(job: Faults, epochs: int, at_once: int = 16_384) -> int:
    """How many rows of the whole table do not hold how often they were trained."""
    expected = epochs * torch.bincount(job.samples(), minlength=job.rows)
    table, wrong = job.table(), 0
    with torch.no_grad():
        for begin in range(0, job.rows, at_once):
            rows = torch.arange(begin, min(begin + at_once, job.rows))
            wrong += int((table(rows) != expected[rows, None]).any(1).sum())
    return wrong


def faults(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Kill servers; whether every row is right."""
    with temporary(args.folder) as folder:
        job = Faults(args.rows, args.kills, args.limit_mb << 20, folder / "table")
        answers = run_ranks([partial(count, job, rank) for rank in range(job.workers)], 60 + 60 * job.kills)
        wrong = wrong_rows(job, answers[0]["epochs"])
    found = {"rows": job.rows, "limit": job.limit, "wrong": wrong, "workers": answers}
    first, steps = answers[0], sum(each["steps"] for each in answers)
    size = f"{job.rows:,} rows x {WIDTH} ({job.rows * WIDTH * 4 / 1e9:.2f} GB)"
    title = f"{size}, {job.servers} servers, {job.workers} workers"
    table = Table("", "", title=title, title_justify="left", show_header=False)
    table.add_row("seconds", f"{first['seconds']:.0f}")
    table.add_row("epochs, steps of all workers", f"{first['epochs']}, {steps:,}")
    table.add_row("samples trained", f"{first['epochs'] * SEEN:,}")
    parts = ", ".join(f"{killed['part']} at {killed['at_s']:.0f} s" for killed in first["killed"])
    table.add_row(f"{len(first['killed'])} servers killed", parts)
    table.add_row("servers replaced, as each worker counts", ", ".join(str(each["replaced"]) for each in answers))
    table.add_row("limit of a worker's heap and private mappings", f"{job.limit / 1e9:.2f} GB")
    table.add_row("peak RSS of each worker", ", ".join(f"{each['peak'] / 1e9:.2f} GB" for each in answers))
    table.add_row("rows with another value than their count", f"{wrong:,}")
    CONSOLE.print(table)
    good = wrong == 0 and len(first["killed"]) == job.kills
    good &= all(each["replaced"] == job.kills and each["refused"] for each in answers)
    verdict(good, "faults")
    return found, good


# ---------------------------------------------------------------------- equal values


class Recorded(pl.Callback):
    """The batches in the order in which they were trained: leases have one of their own."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)


def differences(optimizer: str, steps: int, rows: int, folder: Path) -> dict[str, Any]:
    """Train with servers, and then on the same batches without."""
    torch.set_num_threads(1)
    table = ServedEmbedding(rows, WIDTH, folder=folder, optimizer=optimizer, lr=0.1, seed=5)
    first = first_values(torch.arange(rows), table.table)
    recorded, models = Recorded(), []
    for each in (table, nn.Embedding.from_pretrained(first.clone(), freeze=False)):
        torch.manual_seed(0)
        models.append(TwoTowers(each, optimizer, lr=0.1))
        models[-1].towers.requires_grad_(False)
    served, local = models
    served.unused = nn.Parameter(torch.zeros(10))  # an optimizer needs something, and each server a part of it
    strategy = ASGDStrategy(nsync=NSYNC, num_servers=2, monitor=False)
    trainer = pl.Trainer(**{**trainer_options(), "devices": 1}, strategy=strategy, callbacks=[recorded])
    trainer.fit(served, Pairs(rows, 256 * steps, 256 * steps).loader(256, shuffle=True))
    own = local.configure_optimizers()
    for batch in recorded.batches:
        own.zero_grad()
        local.training_step(batch, 0).backward()
        own.step()
    with torch.no_grad():
        learned = table(torch.arange(rows))
    return {
        "difference": float((learned - local.table.weight).abs().max()),
        "moved": float((learned - first).abs().max()),
        "changed": int((learned != first).any(1).sum()),
        "steps": len(recorded.batches),
    }


def equal(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Whether served tables learn what local ones do."""
    found: dict[str, Any] = {}
    rows = min(args.rows, 20_000)
    title = f"{rows:,} rows x {WIDTH}, beside a table in memory"
    headings = ("largest difference", "largest change by training", "rows that have changed", "steps")
    table = Table("", *headings, title=title, title_justify="left")
    for optimizer in ("sgd", "adagrad"):
        with temporary(args.folder) as folder:
            job = partial(differences, optimizer, args.steps, rows, folder / "table")
            found[optimizer] = each = run_ranks([job], 240)[0]
        table.add_row(
            optimizer, f"{each['difference']:.2g}", f"{each['moved']:.2g}", f"{each['changed']:,}", f"{each['steps']}"
        )
    CONSOLE.print(table)
    good = all(each["difference"] <= EQUAL and each["steps"] == args.steps for each in found.values())
    verdict(good, f"equal: at most {EQUAL:g}")
    return found, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"faults": faults, "speed": speed, "equal": equal}
    parser.add_argument("--only", choices=parts, nargs="+", default=list(parts), help="the default is all")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--kills", type=int, default=10, help="of the faults")
    parser.add_argument("--limit-mb", type=int, default=1536, help="of a worker's memory, with faults")
    parser.add_argument("--repeats", type=int, default=3, help="of the speed")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a run of the speed")
    parser.add_argument("--steps", type=int, default=300, help="after which values are compared")
    parser.add_argument("--folder", type=Path, help="where the tables lie meanwhile; the default is the system's")
    args = parser.parse_args()
    good, results = True, json.loads(FILE.read_text()) if FILE.exists() else {}
    with prepared():
        for name in args.only:
            began = time.monotonic()
            results[name], passed = parts[name](args)
            good &= passed
            FILE.parent.mkdir(exist_ok=True)
            FILE.write_text(json.dumps(results, indent=1))
            CONSOLE.print(f"{name}: {time.monotonic() - began:.0f} s\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
