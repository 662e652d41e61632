"""Train a recommender, whose tables of users and items are larger than everything else, on generated clicks.

    python examples/recommender.py                        # tables on the servers, two workers: about a minute
    python examples/recommender.py --tables sparse        # tables on every worker, of which rows are exchanged
    python examples/recommender.py --tables sparse --strategy auto     # one process, without servers
    python examples/recommender.py --fast                 # half a minute

It shows `ServedEmbedding`, beside `nn.Embedding(sparse=True)`. A hidden model with a few numbers for every user and
item draws the clicks. Which of them meet follows Zipf's law, as in logs of advertisements: a few are in every batch,
most are rare. The model looks up a row for each, multiplies them, and passes all three to a small network, as DLRM does
(Naumov et al. 2019). Expect an accuracy of about 0.8 in all three ways. The hidden model
has 0.85; always the same answer has 0.5.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import ASGDStrategy, ServedEmbedding

FOLDER = Path(__file__).resolve().parent.parent / "results" / "recommender"  # the same for all workers
WIDTH = 16
HIDDEN = 4  # numbers of a user or an item that decide about clicks
SKEW = 1.05  # of Zipf's law


def zipf(ids: int, samples: int) -> Tensor:
    """Draw ids; the k-th most frequent one in proportion to 1 / k ** SKEW. Frequent ids are anywhere in a table."""
    below = torch.arange(1, ids + 1, dtype=torch.float64).pow(-SKEW).cumsum(0)
    ranks = torch.searchsorted(below, torch.rand(samples, dtype=torch.float64) * below[-1])
    return torch.randperm(ids)[ranks.clamp(max=ids - 1)]


def clicks(users: int, items: int, samples: int) -> tuple[TensorDataset, float]:
    """Samples of user, item and click, and the accuracy of the hidden model that draws them."""
    tastes, kinds = torch.randn(users, HIDDEN), torch.randn(items, HIDDEN)
    who, what = zipf(users, samples), zipf(items, samples)
    probable = torch.sigmoid(2 * (tastes[who] * kinds[what]).sum(1))
    best = torch.maximum(probable, 1 - probable).mean()
    return TensorDataset(who, what, torch.bernoulli(probable)), float(best)


class Recommender(LightningModule):
    """Predicts clicks.

    Args:
        users: number of users.
        items: number of items.
        folder: where servers keep the tables; None for tables on every worker.
    """

    def __init__(self, users: int, items: int, folder: Path | None) -> None:
        super().__init__()
        if folder is not None:
            options: dict[str, Any] = {"optimizer": "adagrad", "lr": 0.1, "init_std": 0.3}
            self.users: nn.Module = ServedEmbedding(users, WIDTH, folder=folder / "users", seed=1, **options)
            self.items: nn.Module = ServedEmbedding(items, WIDTH, folder=folder / "items", seed=2, **options)
        else:
            self.users, self.items = (nn.Embedding(n, WIDTH, sparse=True) for n in (users, items))
            for table in (self.users, self.items):
                nn.init.normal_(table.weight, std=0.3)
        self.top = nn.Sequential(nn.Linear(3 * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """The logits of clicks."""
        mine, theirs = self.users(users), self.items(items)
        logits: Tensor = self.top(torch.cat([mine, theirs, mine * theirs], 1))
        return logits.squeeze(1)

    def prefetch_rows(self, batch: Any) -> None:
        """Begin to fetch the rows of the next batch while this one trains."""
        if isinstance(self.users, ServedEmbedding) and isinstance(self.items, ServedEmbedding):
            self.users.prefetch(batch[0])
            self.items.prefetch(batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        users, items, clicked = batch
        return functional.binary_cross_entropy_with_logits(self(users, items), clicked)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        users, items, clicked = batch
        right = ((self(users, items) > 0) == (clicked > 0.5)).float().mean()
        self.log("accuracy", right, prog_bar=True, sync_dist=True, batch_size=len(clicked))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)  # those of tables that are served are not among them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", choices=("served", "sparse"), default="served")
    parser.add_argument("--strategy", default="asgd", help='"asgd", "asgd_fork", or "auto" for one process')
    parser.add_argument("--fast", action="store_true", help="few users, items and clicks")
    args = parser.parse_args()
    seed_everything(1, verbose=False)
    users, items, samples = (300, 200, 40_000) if args.fast else (2_000, 1_000, 400_000)
    data, best = clicks(users, items, samples)
    held_out = samples // 10
    train, val = (TensorDataset(*data[part]) for part in (slice(held_out, None), slice(held_out)))
    starts = {"asgd": "popen", "asgd_fork": "fork"}
    strategy: Any = args.strategy
    if strategy in starts:
        strategy = ASGDStrategy(nsync=10, num_servers=2, start_method=starts[strategy])
    if rank_zero_only.rank == 0:
        shutil.rmtree(FOLDER, ignore_errors=True)  # else it would continue with the tables of the run before
    model = Recommender(users, items, FOLDER if args.tables == "served" else None)
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if args.strategy == "auto" else 2,
        strategy=strategy,
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(train, 128, shuffle=True), DataLoader(val, 1000))
    accuracy = float(trainer.callback_metrics["accuracy"])
    if trainer.is_global_zero:
        print(f"accuracy {accuracy:.3f} on held-out clicks; the hidden model has {best:.3f}")


if __name__ == "__main__":
    main()
