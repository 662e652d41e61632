"""Two islands beside Lightning's DDP: accuracy; and their checkpoints. Parts of :mod:`islands`."""

from __future__ import annotations

import statistics
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from islands_program import Task, loss_of
from islands_ranks import Place, Shape, run_islands
from plain_loop import digits, network
from pytorch_lightning.callbacks import ModelCheckpoint
from rich.table import Table
from throughput import CONSOLE, trainer_options
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

RUN_S = 300.0
CONTEXT, SYMBOLS, WIDTH = 48, 96, 48  # of the transformer
SHAPES = (Shape(1, 4, joined=False), Shape(2, 2, "ddp"), Shape(2, 2, "fsdp2"))


# ---------------------------------------------------------------------- accuracy


@dataclass(frozen=True)
class Problem:
    """What is trained.

    Attributes:
        measure: of the layers' outputs for the held-out samples and these samples' classes.
        limit: how much worse than DDP islands may be: of an accuracy that much, of a loss that share.
    """

    name: str
    data: Callable[[], tuple[Dataset[Any], Any]]
    layers: Callable[[], list[nn.Module]]
    optimizer: Callable[[Any], Any]
    batch: int  # of a rank
    epochs: int
    limit: float
    rising: bool  # an accuracy, which is better if it is higher; else a loss


class Positions(nn.Embedding):
    """Adds what tells one place from another."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[1]]


class Causal(nn.TransformerEncoderLayer):
    """Sees what is before a character, and not what is behind it."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return super().forward(x, src_mask=mask, is_causal=True)


@cache
def text() -> tuple[Dataset[Any], Any]:
    """Pieces of the standard library's modules in the order of their names; every tenth piece is held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = "".join(p.read_text(errors="ignore") for p in sorted(folder.glob("*.py")))[:400_000]
    codes = torch.tensor([ord(c) - 31 if 32 <= ord(c) < 126 else 0 for c in source])
    pieces = codes.unfold(0, CONTEXT + 1, CONTEXT)
    held_out = torch.arange(len(pieces)) % 10 == 0
    train, test = (TensorDataset(part[:, :-1], part[:, 1:]) for part in (pieces[~held_out], pieces[held_out]))
    return train, test


def transformer() -> list[nn.Module]:
    """0.07 million parameters."""
    block = partial(Causal, WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    embeddings = [nn.Embedding(SYMBOLS, WIDTH), Positions(CONTEXT, WIDTH)]
    return [*embeddings, block(), block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)]


PROBLEMS = (
    Problem("digits", digits, lambda: [*network()], partial(torch.optim.SGD, lr=0.05, momentum=0.9), 32, 10, 0.01, True),
    Problem("text", text, transformer, partial(torch.optim.AdamW, lr=2e-3), 16, 6, 0.01, False),
)


def train(problem: Problem, seed: int, place: Place) -> dict[str, Any]:
    """Train, and measure the result."""
    pl.seed_everything(seed, verbose=False)
    shape = place.shape
    module = Task(problem.layers(), problem.optimizer, sharded=shape.inside == "fsdp2")
    data, held_out = problem.data()
    options = {**trainer_options(), "max_epochs": problem.epochs, "devices": shape.ranks}
    pl.Trainer(strategy=place.strategy(), **options).fit(module, DataLoader(data, problem.batch, shuffle=True))
    whole = nn.ModuleDict({"layers": nn.Sequential(*problem.layers())})
    whole.load_state_dict(module.whole())
    layers, (x, y) = whole["layers"].eval(), held_out[:]
    with torch.no_grad():
        accuracy = (layers(x).argmax(-1) == y).float().mean()
        return {"measure": float(accuracy if problem.rising else loss_of(layers, x, y))}


def accuracy(seeds: int) -> list[bool]:
    """Print accuracy and loss; True where islands are as good as DDP, on average."""
    verdicts = []
    for problem in PROBLEMS:
        count = seeds if problem.rising else 1
        found: dict[Shape, list[float]] = {shape: [] for shape in SHAPES}
        for seed in range(count):
            for shape, values in found.items():
                answers = run_islands(shape, partial(train, problem, seed), RUN_S)
                assert len({answer["measure"] for answer in answers}) == 1, answers
                values.append(answers[0]["measure"])
        measure = "accuracy" if problem.rising else "loss"
        title = f"{problem.name}, four ranks, {problem.epochs} epochs, {count} seeds: {measure}"
        table = Table("", "mean", "min - max", "beside DDP", title=title, title_justify="left")
        base = statistics.mean(found[SHAPES[0]])
        for shape, values in found.items():
            mean = statistics.mean(values)
            worse = base - mean if problem.rising else mean / base - 1
            verdicts.append(worse <= problem.limit)
            ratio = f"{-worse:+.4f}" if problem.rising else f"{worse:+.1%}"
            table.add_row(str(shape), f"{mean:.4f}", f"{min(values):.4f} - {max(values):.4f}", ratio)
        CONSOLE.print(table)
    return verdicts


def checkpoint(): ...
