"""Accuracy compared with DDP on four data sets, 2 to 16 workers, and of every other algorithm on two of them.

    python benchmarks/accuracy_sets.py                          # hours; continues where it was interrupted
    python benchmarks/accuracy_sets.py --set tabular --seeds 1  # a part of it
    python benchmarks/accuracy_sets.py --table                  # the results so far

Sets: 20,000 images of Fashion-MNIST (the CNN of benchmarks/accuracy.py); text, the source of Python's standard library
(a model of characters); a graph, scikit-learn's digits joined to their five nearest neighbours (two graph
convolutions); a table, the RAND health insurance experiment of statsmodels, 20,190 rows (three linear layers). The
measure is the accuracy on held-out samples, and for text the loss.

Servers, exchanges and workers are the real ones, in virtual time, so a seed gives the same bits on any day. DDP is the
mean of all workers' gradients in every step. Both have the same hyper-parameters, first weights and order of the data,
so differences are taken by seed, and shown with their standard error. A-SGD has its defaults, other algorithms have
nsync=10. Steps vary by a tenth in length, and an answer comes some steps later. The goal: an accuracy of at most 0.01
below DDP's, or a loss of at most 1 % above it.

Every run is a line of results/accuracy_sets.jsonl, valid as long as the files that define it are unchanged. Writes the
tables between the marks in docs/algorithms.md.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import statistics
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: the bits do not depend on the machine's cores

import torch
from accuracy import CNN, CONSOLE, ROOT, TESTED, TRAINED, difference, digest, missing_images, read
from ledger import Ledger
from shares import Shares, train_together
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import vector_to_parameters

from lightning_asgd.algorithms import (
    ASGD,
    EAMSGD,
    EASGD,
    Algorithm,
    DANASlim,
    DecoupledDiLoCo,
    DelayCompensation,
    DelayedNesterov,
    DiLoCo,
    Downpour,
    DropStale,
    DynamicSteps,
    GapAware,
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
from lightning_asgd.simulation import Link, LogNormal, Network, Simulation

FILE = ROOT / "results" / "accuracy_sets.jsonl"
PAGE = ROOT / "docs" / "algorithms.md"
MARKS = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"
LATE = Network(workers=Link(latency_s=1.0))  # a step takes one second: the answer comes two to three steps later
WORKERS, SEEDS, NSYNC, BATCH = (2, 4, 8, 16), 3, 10, 32
GOAL = {"accuracy": 0.01, "loss": 0.01}  # of a loss, as a share of it
CONTEXT, SYMBOLS = 16, 96
ALL_ALGORITHMS = ("fashion", "text")  # the sets on which every algorithm runs
COMPARED = 4  # workers of those


@dataclass(frozen=True)
class Data:
    """A set, its network, and how long and with which learning rates it is trained."""

    title: str
    measure: str  # "accuracy" or "loss"
    epochs: int
    lr: dict[str, float]  # by optimizer
    make: Callable[[], nn.Module]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def optimizer(self, name: str, **more: Any) -> Callable[[Any], Any]:
        """What makes an optimizer of parameters."""
        if name == "Muon":
            shapes = [parameter.shape for parameter in self.make().parameters()]
            return lambda parameters: Muon(parameters, self.lr["AdamW"], shapes)
        kinds = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
        options = {"momentum": 0.9, **more} if name == "SGD" else more
        return lambda parameters: kinds[name](parameters, lr=self.lr[name], **options)


class Muon(torch.optim.Optimizer):
    """torch's Muon for tensors of two dimensions or more and its AdamW for others, which lie in one flat parameter."""

    def __init__(self, parameters: Any, lr: float, shapes: list[torch.Size]) -> None:
        super().__init__(parameters, {"lr": lr})
        self._shapes = [shape if len(shape) == 1 else (shape[0], shape[1:].numel()) for shape in shapes]
        parts = [nn.Parameter(piece) for piece in self._cut(self._flat.data)]
        self._parts = parts
        muon = torch.optim.Muon([p for p in parts if p.dim() > 1], lr, 0.0, adjust_lr_fn="match_rms_adamw")
        self._each = [muon, torch.optim.AdamW([p for p in parts if p.dim() == 1], lr)]
        self.param_groups += muon.param_groups  # which tell the gain what Muon trains, and how
        self.state = muon.state
        self.register_step_pre_hook(self._take)

    @property
    def _flat(self) -> Tensor:
        return self.param_groups[0]["params"][0]

    def _cut(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split([math.prod(shape) for shape in self._shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def _take(self, *_: Any) -> None:
        cut = zip(self._parts, self._cut(self._flat.data), self._cut(self._flat.grad), strict=True)
        for part, value, gradient in cut:
            part.data, part.grad = value, gradient

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As other optimizers."""
        for each in self._each:
            each.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            each.step()


# ---------------------------------------------------------------------- the sets


def fashion() -> Data:
    if (reason := missing_images()) is not None:
        raise FileNotFoundError(reason)
    train, test = (read(part, count).tensors for part, count in (("train", TRAINED), ("t10k", TESTED)))
    lr = {"SGD": 0.05, "Adam": 1e-3, "AdamW": 1e-3}
    return Data("Fashion-MNIST", "accuracy", 5, lr, lambda: CNN("SGD").net, train, test)


def text() -> Data:
    """Pieces of the standard library's modules in the order of their names; every tenth piece of text is held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = "".join(p.read_text(errors="ignore") for p in sorted(folder.glob("*.py")))[:2_000_000]
    codes = torch.tensor([ord(c) - 31 if 32 <= ord(c) < 126 else 0 for c in source])
    pieces = codes.unfold(0, CONTEXT + 1, 1)
    held_out = torch.arange(len(pieces)) // 1000 % 10 == 0
    train, test = pieces[~held_out][::30], pieces[held_out][::30]

    def make() -> nn.Module:
        return nn.Sequential(
            *(nn.Embedding(SYMBOLS, 16), nn.Flatten()),
            *(nn.Linear(16 * CONTEXT, 128), nn.ReLU(), nn.Linear(128, SYMBOLS)),
        )

    lr = {"SGD": 0.1, "Adam": 2e-3, "AdamW": 2e-3}
    both = ((part[:, :-1].contiguous(), part[:, -1].contiguous()) for part in (train, test))
    return Data("Standard library, characters", "loss", 5, lr, make, *both)


class GraphNet(nn.Module):
    """Two graph convolutions (Kipf and Welling 2017). The input is the numbers of nodes, the output their classes."""

    def __init__(self, features: Tensor, adjacency: Tensor) -> None:
        super().__init__()
        self.near = adjacency @ features
        self.adjacency = adjacency
        self.first, self.second = nn.Linear(features.shape[1], 32), nn.Linear(32, 10)

    def forward(self, nodes: Tensor) -> Tensor:
        found: Tensor = self.second(self.adjacency[nodes] @ self.first(self.near).relu())
        return found


def graph() -> Data:
    from sklearn.datasets import load_digits
    from sklearn.neighbors import kneighbors_graph

    pixels, labels = load_digits(return_X_y=True)
    joined = torch.from_numpy(kneighbors_graph(pixels, 5).toarray()).float()
    joined = ((joined + joined.T) > 0).float() + torch.eye(len(pixels))
    scale = joined.sum(1).rsqrt()
    adjacency = scale[:, None] * joined * scale[None, :]
    features, targets = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels).long()
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1280], order[1280:]
    lr = {"SGD": 0.1, "Adam": 5e-3, "AdamW": 5e-3}
    both = ((part, targets[part]) for part in (train, test))
    return Data("Digits, nearest neighbours", "accuracy", 30, lr, lambda: GraphNet(features, adjacency), *both)


def tabular() -> Data:
    try:
        from statsmodels.datasets import randhie
    except ImportError as error:
        raise FileNotFoundError("statsmodels is not installed. Install it: pip install statsmodels") from error
    frame = randhie.load_pandas().data
    values = torch.tensor(frame.drop(columns="mdvis").to_numpy(float)).float()
    values = (values - values.mean(0)) / values.std(0)
    targets = torch.tensor(frame["mdvis"].to_numpy(float) > 0).long()  # whether someone saw a doctor in that year
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    train, test = order[:16_384], order[16_384:]
    width = values.shape[1]

    def make() -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()),
            nn.Linear(64, 2),
        )

    lr = {"SGD": 0.05, "Adam": 1e-3, "AdamW": 1e-3}
    both = ((values[part], targets[part]) for part in (train, test))
    return Data("RAND health insurance, table", "accuracy", 10, lr, make, *both)


SETS: dict[str, Callable[[], Data]] = {"fashion": fashion, "text": text, "graph": graph, "tabular": tabular}
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Muon")
loaded = cache(lambda name: SETS[name]())


# ---------------------------------------------------------------------- a run


@dataclass(frozen=True)
class Cell:
    """One run."""

    data: str
    optimizer: str
    workers: int
    way: str  # "DDP", "A-SGD", or one of ALGORITHMS
    seed: int


ALGORITHMS: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "EASGD": (EASGD(), {}),
    "EAMSGD": (EAMSGD(), {"nesterov": True}),
    "LocalSGD": (LocalSGD(), {}),
    "DiLoCo": (DiLoCo(), {}),
    "StreamingDiLoCo": (StreamingDiLoCo(), {}),
    "DelayedNesterov": (DelayedNesterov(), {}),
    "DecoupledDiLoCo": (DecoupledDiLoCo(), {}),
    "SparseLoCo": (SparseLoCo(), {}),
    "SparseLoCo(lr=1.0)": (SparseLoCo(lr=1.0), {}),
    "Downpour": (Downpour(), {}),
    "DANASlim('mean'), nsync 1": (DANASlim("mean"), {"nesterov": True, "nsync": 1}),
    "ASGD('sum')": (ASGD("sum"), {}),
    **{
        f"ASGD('sum'), {name}": (ASGD("sum", transforms=[transform]), {})
        for name, transform in {
            "ScaleByStaleness": ScaleByStaleness(),
            "StalenessAware": StalenessAware(),
            "GapAware": GapAware(),
            "DropStale(4)": DropStale(4),
            "SoftSync(1)": SoftSync(1),
            "Rennala(4)": Rennala(4),
            "WarmStart(100)": WarmStart(100),
        }.items()
    },
    "ASGD, StaleSynchronous(4)": (ASGD(transforms=[StaleSynchronous(4)]), {}),
    "ASGD, DynamicSteps": (ASGD(transforms=[DynamicSteps()]), {}),
    "Downpour('mean'), DelayCompensation, nsync 1": (
        Downpour(transforms=[DelayCompensation()]),
        {"nsync": 1},
    ),
}


def train(cell: Cell) -> float:
    """Train a cell, and return its measure on the held-out samples."""
    data = loaded(cell.data)
    problem = Shares(data.make, functional.cross_entropy, data.train, cell.workers, BATCH, cell.seed)
    algorithm, options = ALGORITHMS.get(cell.way, (ASGD(), {}))
    nsync = options.get("nsync", NSYNC if cell.way in ALGORITHMS else "auto")
    make = data.optimizer(cell.optimizer, **{name: options[name] for name in options if name == "nesterov"})
    if cell.way == "DDP":
        weights = train_together(problem, data.epochs, make)
    else:
        simulation = Simulation(
            problem=problem,
            workers=cell.workers,
            steps=problem.steps,
            epochs=data.epochs,
            exchange={"nsync": nsync, "algorithm": algorithm},
            optimizer=make,
            speed=LogNormal(1.0, 0.1),
            network=LATE,
            evaluate_every=sys.maxsize,
            seed=cell.seed,
        )
        weights = simulation.run().weights
    return measured(problem, weights, data)


def measured(problem: Shares, weights: Tensor, data: Data) -> float:
    """Batch statistics are the mean of the workers'."""
    net = problem.nets[0]
    for buffers in zip(*(each.buffers() for each in problem.nets), strict=True):
        buffers[0].copy_(torch.stack([b.double() for b in buffers]).mean(0))
    vector_to_parameters(weights, net.parameters())
    net.eval()
    with torch.no_grad():
        outputs = torch.cat([net(inputs) for inputs in data.test[0].split(500)])
    if data.measure == "accuracy":
        return float((outputs.argmax(1) == data.test[1]).double().mean())
    return float(functional.cross_entropy(outputs, data.test[1]))


def cells(sets: list[str], seeds: int) -> Iterator[Cell]:
    """All runs, seed by seed, so that an interrupted table has equal rows."""
    for seed in range(1, 1 + seeds):
        for name in sets:
            for optimizer in OPTIMIZERS:
                for workers in WORKERS:
                    for way in ("DDP", "A-SGD"):
                        yield Cell(name, optimizer, workers, way, seed)
        for name in sets:
            if name in ALL_ALGORITHMS:
                for way in ALGORITHMS:
                    yield Cell(name, "SGD", COMPARED, way, seed)


@cache
def version(cell: Cell) -> str:
    """Changes with the files that define a run."""
    files = [ROOT / "benchmarks" / name for name in ("accuracy.py", "accuracy_sets.py", "shares.py")]
    versions = f"{torch.__version__} {sys.version} {'' if cell.way == 'DDP' else digest()}".encode()
    return hashlib.sha256(versions + b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


# ---------------------------------------------------------------------- the tables


def compared(found: dict[Cell, float], cell: Cell, measure: str) -> tuple[str, bool]:
    """A row's difference from DDP over the seeds, as text; and whether the goal is reached."""
    seeds = [
        c.seed
        for c in found
        if (c.data, c.optimizer, c.workers, c.way) == (cell.data, cell.optimizer, cell.workers, cell.way)
    ]
    pairs = []
    for seed in seeds:
        mine = found[Cell(cell.data, cell.optimizer, cell.workers, cell.way, seed)]
        base = found.get(Cell(cell.data, cell.optimizer, cell.workers, "DDP", seed))
        if base is not None:
            pairs.append((mine - base) if measure == "accuracy" else (mine - base) / base)
    if not pairs:
        return "-", True
    mean, error = difference(pairs)
    worse = -mean if measure == "accuracy" else mean
    text = f"{mean:+.4f}" if measure == "accuracy" else f"{mean:+.1%}"
    if len(pairs) > 1:  # else there is no standard error
        text += f" ± {error:.4f}" if measure == "accuracy" else f" ± {error:.1%}"
    good = worse <= GOAL[measure]
    return (text if good else f"**{text}**"), good


def tables(found: dict[Cell, float]) -> tuple[str, bool]:
    """As Markdown; and whether A-SGD reaches the goal everywhere."""
    good = True
    lines = [
        "A-SGD minus DDP by seed, mean and standard error; DDP's mean in brackets. Bold: beyond the goal.",
        "",
        "| | | " + " | ".join(f"{n} workers" for n in WORKERS) + " |",
        "|---|---|" + "---:|" * len(WORKERS),
    ]
    for name in dict.fromkeys(cell.data for cell in found):
        data = loaded(name)
        for optimizer in OPTIMIZERS:
            texts = []
            for workers in WORKERS:
                text, fine = compared(found, Cell(name, optimizer, workers, "A-SGD", 0), data.measure)
                base = [
                    v
                    for c, v in found.items()
                    if (c.data, c.optimizer, c.workers, c.way) == (name, optimizer, workers, "DDP")
                ]
                texts.append(f"{text} ({statistics.fmean(base):.3f})" if base else "-")
                good &= fine
            title = "" if optimizer != OPTIMIZERS[0] else f" {data.title}, {data.measure}"
            lines.append(f"|{title} | {optimizer} | " + " | ".join(texts) + " |")
    names = [name for name in ALL_ALGORITHMS if any(cell.data == name and cell.way in ALGORITHMS for cell in found)]
    if names:
        titles = " | ".join(f"{loaded(name).title}, {loaded(name).measure}" for name in names)
        lines += [
            "",
            f"Other algorithms minus DDP, {COMPARED} workers, SGD with momentum; EAMSGD and DANASlim have Nesterov's, "
            "and Downpour's steps are those of plain SGD on the servers:",
            "",
            f"| | {titles} |",
        ]
        lines.append("|---|" + "---:|" * len(names))
        for way in ALGORITHMS:
            texts = [compared(found, Cell(name, "SGD", COMPARED, way, 0), loaded(name).measure)[0] for name in names]
            lines.append(f"| {way} | " + " | ".join(texts) + " |")
    return "\n".join(lines), good


def write(text: str) -> None:
    """Put the tables between the marks of the page."""
    page = PAGE.read_text()
    begin, end = (page.index(mark) for mark in MARKS)
    PAGE.write_text(f"{page[: begin + len(MARKS[0])]}\n\n{text}\n\n{page[end:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=list(SETS), nargs="+", default=list(SETS), dest="sets")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--table", action="store_true", help="run nothing, print the results so far")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        for name in args.sets:
            loaded(name)
    except FileNotFoundError as error:
        CONSOLE.print(str(error))
        return 2
    ledger = Ledger(FILE, lambda key: version(Cell(*key)))
    if not args.table:
        ledger.complete(map(astuple, cells(args.sets, args.seeds)), lambda *cell: train(Cell(*cell)))
    found = {Cell(*key): value for key, value in ledger.found.items()}
    made, good = tables({cell: value for cell, value in found.items() if cell.data in args.sets})
    CONSOLE.print(made, soft_wrap=True)
    if len(args.sets) == len(SETS):
        write(made)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
