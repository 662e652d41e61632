"""Generated clicks, and a model with tables of users and of items that learns them. What :mod:`rows` trains.

A hidden model has a few numbers for every user and every item. Their product, and how popular an item is, say how
probable a click is. Which user sees which item is drawn by Zipf's law: the most frequent id is in every tenth sample or
so, and most ids are in very few.

The model looks up a row for the user and one for the item, multiplies them, and passes all three to a small network, as
DLRM does (Naumov et al. 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

__all__ = ["OPTIMIZERS", "ClickModel", "ClickNet", "Clicks", "Market", "accuracy", "loader", "zipf"]

FACTORS = 4  # hidden numbers of a user or an item
CLARITY = 4.0  # the larger, the less is left to chance
SKEW = 1.05  # exponent of Zipf's law, as in logs of advertisements
AT_ONCE = 4096  # samples of an evaluation

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
}


def zipf(ids: int, samples: int, generator: torch.Generator, skew: float = SKEW) -> Tensor:
    """Draw ids. The k-th most frequent one has a probability in proportion to 1 / k ** skew."""
    below = torch.arange(1, ids + 1, dtype=torch.float64).pow(-skew).cumsum(0)
    drawn = torch.rand(samples, generator=generator, dtype=torch.float64) * below[-1]
    ranks = torch.searchsorted(below, drawn).clamp(max=ids - 1)
    return torch.randperm(ids, generator=generator)[ranks]  # frequent ids are anywhere in a table


class Clicks(Dataset[Any]):
    """Samples of user, item and click; the same ones again if ``length`` is larger than their number."""

    def __init__(self, users: Tensor, items: Tensor, clicked: Tensor, length: int = 0) -> None:
        self.users, self.items, self.clicked = users, items, clicked
        self._length = length or len(users)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.of(index % len(self.users))

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:  # a batch at once
        return self.of(torch.tensor(indices) % len(self.users))

    def double(self) -> Clicks:
        """The same samples for a model with 64-bit weights."""
        return Clicks(self.users, self.items, self.clicked.double(), self._length)

    def of(self, samples: Any) -> tuple[Tensor, ...]:
        """Some samples, whose numbers are given."""
        return self.users[samples], self.items[samples], self.clicked[samples]


@dataclass(frozen=True)
class Market:
    """Users and items of a hidden model."""

    users: int
    items: int
    seed: int = 0
    skew: float = SKEW

    def clicks(self, samples: int, held_out: int) -> tuple[Clicks, Clicks, float]:
        """Draw samples for training, held-out ones, and the accuracy that the hidden model itself has on the latter."""
        generator = torch.Generator().manual_seed(self.seed)
        mine, theirs = (torch.randn(n, FACTORS, generator=generator) for n in (self.users, self.items))
        popular = torch.randn(self.items, generator=generator)
        count = samples + held_out
        users, items = (zipf(n, count, generator, self.skew) for n in (self.users, self.items))
        tastes = (mine[users] * theirs[items]).sum(1) / math.sqrt(FACTORS)
        probable = torch.sigmoid(CLARITY * (tastes + popular[items] / 2))
        clicked = torch.bernoulli(probable, generator=generator)
        best = float(torch.maximum(probable, 1 - probable)[samples:].mean())
        train, test = (
            Clicks(users[part], items[part], clicked[part]) for part in (slice(samples), slice(samples, None))
        )
        return train, test, best


class ClickNet(nn.Module):
    """Tables of users and items, and what makes a click's logit of two rows.

    Args:
        users: number of rows.
        items: number of rows.
        width: of both tables.
        sparse: whether gradients of tables hold only the rows of a batch.
    """

    def __init__(self, users: int, items: int, width: int = 32, *, sparse: bool = True) -> None:
        super().__init__()
        self.users, self.items = (nn.Embedding(n, width, sparse=sparse) for n in (users, items))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.3)
        self.top = nn.Sequential(nn.Linear(3 * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """The logits."""
        mine, theirs = self.users(users), self.items(items)
        logits: Tensor = self.top(torch.cat([mine, theirs, mine * theirs], 1))
        return logits.squeeze(1)


class ClickModel(pl.LightningModule):
    """Learns clicks."""

    def __init__(self, net: ClickNet, optimizer: str = "Adagrad") -> None:
        super().__init__()
        self.net, self.optimizer = net, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        users, items, clicked = batch
        return functional.binary_cross_entropy_with_logits(self.net(users, items), clicked)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def loader(clicks: Clicks, batch: int) -> DataLoader[Any]:
    """Shuffled batches."""
    return DataLoader(clicks, batch, shuffle=True, collate_fn=list)


@torch.no_grad()
def accuracy(net: ClickNet, clicks: Clicks) -> float:
    """The share of samples whose outcome the model predicts."""
    right = 0
    for samples in torch.arange(len(clicks.users)).split(AT_ONCE):
        users, items, clicked = clicks.of(samples)
        right += int(((net(users, items) > 0) == (clicked > 0.5)).sum())
    return right / len(clicks.users)
