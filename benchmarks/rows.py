"""Tables of embeddings of which only rows are exchanged, beside whole tables and DDP.

    python benchmarks/rows.py                          # as root under Linux: about 18 minutes
    python benchmarks/rows.py --only equal accuracy    # these parts need no root

bytes     what a worker pushes and fetches per exchange when 1 %, 10 % and all rows of a table are touched between two
          exchanges, and what crosses the cable to the server (network namespaces), beside a table with dense gradients.
equal     one worker: the largest difference of any weight after training with sparse and with dense gradients. Torch
          adds up the two in different orders, so what counts is training in 64 bits. In 32 bits the difference is shown
          beside that without exchanges.
accuracy  four workers with sparse gradients, four with dense ones, and one process, on clicks of a hidden model:
          accuracy on held-out samples, paired by seed.
links     samples/s of two workers, each on a machine of its own, and the server on a third one, with cables of 1 Gbit/s
          and 100 Mbit/s: A-SGD and DDP, each with sparse and with dense gradients, interleaved. Also A-SGD whose
          workers wait for a slow cable, so that pushes do not grow (rows_links.py).

"sparse" and "dense" are the two values of nn.Embedding's argument ``sparse``; all else is the same. Every part uses
nsync=10.

Writes results/rows.json. Exits with 1 if bytes are not in proportion to rows or are more than those of whole tables, if
a weight of 64 bits differs by more than 1e-6, or if the mean accuracy differs by more than 0.01 from that with dense
gradients or is less than 0.1 above that of always giving the same answer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

import pytorch_lightning as pl
import torch
from codes import verdict
from common import prepared, spread
from islands_speed import on_cable
from network import Network, two_machines
from plain_loop import served
from ranks import run_ranks
from rich.table import Table
from rows_links import SYSTEMS, Conditions, compare, show_links
from rows_model import OPTIMIZERS, ClickModel, ClickNet, Clicks, Market, accuracy, loader
from throughput import CONSOLE, trainer_options
from torch import nn

from lightning_asgd import Advanced, ASGDStrategy, AsyncSGD

FILE = Path(__file__).resolve().parent.parent / "results" / "rows.json"
NSYNC, RUN_S, RUN = 10, 240.0, "rows"
SPARSE, DENSE, ALONE = "sparse", "dense", "one process"
Results = list[dict[str, Any]]

# ---------------------------------------------------------------------- bytes

ROWS, WIDTH = 100_000, 64
SHARES = (0.01, 0.1, 0.99, 1.0)  # of the rows that are touched between two exchanges. 0.99 with numbers would be 1.005
EXCHANGES = 6  # that are counted; the first one is not
NEAR = 0.02  # how far bytes may be from the share of rows. A row's number takes 4 bytes, its values 256


def touch(share: float, sparse: bool, address: str, network: Network) -> dict[str, Any]:
    """Touch a share of a table's rows between exchanges: bytes per exchange."""
    network.enter(1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH, sparse=sparse)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.01)
    cable: list[tuple[int, int]] = []
    with AsyncSGD(table, optimizer, nsync=NSYNC, advanced=Advanced(overlap=False), run=address) as asgd:
        for _ in range(EXCHANGES + 2):
            for rows in torch.randperm(ROWS)[: round(share * ROWS)].tensor_split(NSYNC):
                optimizer.zero_grad()
                table(rows).square().sum().backward()
                optimizer.step()
            cable.append(on_cable())
        counted = [*asgd.stats.records][-EXCHANGES:]
    names = ("bytes_pushed", "bytes_fetched")
    pushed, fetched = (statistics.mean(getattr(each, name) for each in counted) for name in names)
    received, sent = ((b - a) / EXCHANGES for a, b in zip(cable[-EXCHANGES - 1], cable[-1], strict=True))
    return {"share": share, "sparse": sparse, "pushed": pushed, "fetched": fetched, "sent": sent, "received": received}


def count_bytes() -> Results:
    """Count with every share of rows, with sparse and with dense gradients."""
    found = []
    with two_machines() as network:
        for share in SHARES:
            for sparse in (True, False):
                with served(RUN, network) as address:
                    job = partial(touch, share, sparse, address, network)
                    found += run_ranks([job], RUN_S, launched=False)
    return found


def show_bytes(found: Results) -> bool:
    """Print the bytes; True if they are in proportion to rows, and never more than those of whole tables."""
    title = (
        f"a table of {ROWS:,} x {WIDTH}, one worker: bytes per exchange, and as a share of those with dense gradients"
    )
    kinds = ("pushed", "fetched", "sent", "received")
    headings = ("pushed", "fetched", "sent on the cable", "received on the cable")
    table = Table("rows touched", "gradients", *headings, "in proportion", title=title, title_justify="left")
    good = True
    for share in SHARES:
        mine, whole = (next(e for e in found if (e["share"], e["sparse"]) == (share, s)) for s in (True, False))
        shares = {kind: mine[kind] / whole[kind] for kind in kinds}
        judged = [shares[kind] for kind in kinds[:2]]  # on the cable there are also packets that TCP sends again
        fits = all(abs(each / share - 1) <= NEAR and each <= 1 for each in judged)
        good &= fits
        cells = (f"{mine[kind]:,.0f} ({shares[kind]:.4f})" for kind in kinds)
        table.add_row(f"{share:.0%}", SPARSE, *cells, verdict(fits))
        table.add_row("", DENSE, *(f"{whole[kind]:,.0f}" for kind in kinds), "")
    CONSOLE.print(table)
    return good


# ---------------------------------------------------------------------- equal

SMALL = Market(users=2000, items=1000)
STEPS, BATCH = 200, 128
MOST = 1e-6
EXACT = "64 bits"
# Bits of weights, and whether there are no exchanges: torch sums up dense gradients in another order than sparse ones.
PRECISIONS = {EXACT: (64, False), "32 bits": (32, False), "32 bits, no exchanges": (32, True)}


@cache
def small_clicks(samples: int) -> tuple[Clicks, Clicks, float]:
    """Clicks for training, held-out clicks, and the best possible accuracy; once for all forked workers."""
    return SMALL.clicks(samples, 20_000)


def fit(model: ClickModel, clicks: Clicks, batch: int, **options: Any) -> None:
    """Train with one torch thread."""
    torch.set_num_threads(1)
    pl.Trainer(**{**trainer_options(), **options}).fit(model, loader(clicks, batch))


def weights(optimizer: str, bits: int, alone: bool, sparse: bool) -> dict[str, Any]:
    """What one worker has learnt at the end, or one process without exchanges."""
    pl.seed_everything(1, verbose=False)
    model = ClickModel(ClickNet(SMALL.users, SMALL.items, sparse=sparse), optimizer)
    clicks = small_clicks(STEPS * BATCH)[0]
    if bits == 64:
        model, clicks = model.double(), clicks.double()
    options = {} if alone else {"strategy": ASGDStrategy(NSYNC, monitor=False)}
    before = [p.detach().clone() for p in model.parameters()]
    fit(model, clicks, BATCH, devices=1, **options)
    moved = max(float((p - b).abs().max()) for p, b in zip(model.parameters(), before, strict=True))
    return {"weights": {n: p.detach().numpy() for n, p in model.named_parameters()}, "moved": moved}


def differences() -> Results:
    """The largest difference of any weight, by optimizer: of a worker in 64 and in 32 bits, and without exchanges."""
    small_clicks(STEPS * BATCH)
    found = []
    for optimizer in OPTIMIZERS:
        entry: dict[str, Any] = {"optimizer": optimizer}
        for kind, (bits, alone) in PRECISIONS.items():
            job = partial(weights, optimizer, bits, alone)
            mine, theirs = (run_ranks([partial(job, sparse)], RUN_S, launched=not alone)[0] for sparse in (True, False))
            pairs = zip(mine["weights"].values(), theirs["weights"].values(), strict=True)
            entry[kind] = max(float(abs(a - b).max()) for a, b in pairs)
            entry["moved"] = theirs["moved"]
        found.append(entry)
    return found


def show_differences(found: Results) -> bool:
    """Print them; True if none of a worker in 64 bits is larger than the limit."""
    title = f"{STEPS} steps of one worker: the largest difference of any weight between sparse and dense gradients"
    headings = (*PRECISIONS, "farthest that a weight moved", f"at most {MOST:g}")
    table = Table("optimizer", *headings, title=title, title_justify="left")
    for each in found:
        cells = (f"{each[kind]:.2g}" for kind in PRECISIONS)
        table.add_row(each["optimizer"], *cells, f"{each['moved']:.2f}", verdict(each[EXACT] <= MOST))
    CONSOLE.print(table)
    return all(each[EXACT] <= MOST for each in found)


# ---------------------------------------------------------------------- accuracy

WORKERS, EPOCHS, SAMPLES, TRAINED = 4, 3, 200_000, 64  # the last one is a worker's batch
APART, CLEAR = 0.01, 0.1


def learn(kind: str, seed: int, rank: int) -> dict[str, Any]:
    """Train as one of the workers, or as the only process; the accuracy at the end."""
    clicks, held_out, _ = small_clicks(SAMPLES)
    pl.seed_everything(seed, verbose=False)
    model = ClickModel(ClickNet(SMALL.users, SMALL.items, sparse=kind != DENSE))
    options: dict[str, Any] = {"max_epochs": EPOCHS, "devices": 1}
    if kind != ALONE:
        options |= {"devices": WORKERS, "strategy": ASGDStrategy(NSYNC, monitor=False)}
    fit(model, clicks, TRAINED, **options)
    return {"accuracy": accuracy(model.net, held_out) if rank == 0 else None}


def accuracies(seeds: int) -> Results:
    """Train every kind, seed by seed."""
    small_clicks(SAMPLES)
    found = []
    for seed in range(1, 1 + seeds):
        for kind in (SPARSE, DENSE, ALONE):
            ranks = 1 if kind == ALONE else WORKERS
            jobs = [partial(learn, kind, seed, rank) for rank in range(ranks)]
            value = run_ranks(jobs, RUN_S, launched=kind != ALONE)[0]["accuracy"]
            found.append({"kind": kind, "seed": seed, "accuracy": value})
            CONSOLE.print(f"  seed {seed}  {kind:<12} {value:.4f}")
    return found


def show_accuracies(found: Results) -> bool:
    """Print them; True if the mean is near that with dense gradients, and clearly above that of a constant answer."""
    _, held_out, best = small_clicks(SAMPLES)
    clicked = float(held_out.clicked.mean())
    constant = max(clicked, 1 - clicked)
    title = f"clicks of {SMALL.users} users on {SMALL.items} items, {EPOCHS} epochs of {SAMPLES:,}, {WORKERS} workers"
    table = Table("", "accuracy, median (min-max)", "mean", "of dense's", f"at most {APART:g}", title=title)
    table.title_justify = "left"
    values = {kind: [e["accuracy"] for e in found if e["kind"] == kind] for kind in (SPARSE, DENSE, ALONE)}
    means = {kind: statistics.mean(each) for kind, each in values.items()}
    good = abs(means[SPARSE] - means[DENSE]) <= APART and means[SPARSE] >= constant + CLEAR
    for kind, each in values.items():
        judged = verdict(good) if kind == SPARSE else ""
        table.add_row(kind, spread(each, 4), f"{means[kind]:.4f}", f"{means[kind] - means[DENSE]:+.4f}", judged)
    CONSOLE.print(table)
    CONSOLE.print(f"The more frequent outcome has {constant:.4f}, the hidden model itself {best:.4f}.")
    return good


# ---------------------------------------------------------------------- the program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("bytes", "equal", "accuracy", "links")
    parser.add_argument("--only", choices=parts, nargs="+", default=parts, help="the default is all")
    parser.add_argument("--seeds", type=int, default=3, help="of the accuracy")
    parser.add_argument("--workers", type=int, default=2, help="of the links")
    parser.add_argument("--mbit", type=float, nargs="+", default=[1000.0, 100.0], help="speeds of the links' cables")
    parser.add_argument("--repeats", type=int, default=3, help="of the links")
    parser.add_argument("--seconds", type=float, default=6.0, help="that are measured of a run of the links")
    parser.add_argument("--systems", choices=SYSTEMS, nargs="+", default=list(SYSTEMS), help="of the links")
    args = parser.parse_args()
    conditions = Conditions(args.workers, args.repeats, args.seconds, args.systems)
    measures: dict[str, Any] = {
        "bytes": (count_bytes, show_bytes),
        "equal": (differences, show_differences),
        "accuracy": (partial(accuracies, args.seeds), show_accuracies),
        "links": (partial(compare, conditions, args.mbit), partial(show_links, conditions)),
    }
    good, results = True, json.loads(FILE.read_text()) if FILE.exists() else {}
    with prepared(machines=bool({"bytes", "links"} & {*args.only})):
        for part in args.only:
            began = time.monotonic()
            measure, show = measures[part]
            results[part] = measure()
            FILE.parent.mkdir(exist_ok=True)
            FILE.write_text(json.dumps(results, indent=1) + "\n")
            good &= show(results[part])
            CONSOLE.print(f"{part}: {time.monotonic() - began:.0f} s\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
