"""Whatever a program's samplers do on each rank, no worker is lost for it, and no sample is left out silently."""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler as TorchsSampler

from lightning_asgd import ASGDStrategy
from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.job import supervisor
from tests.lightning.models import Regression, loader, trainer

SAMPLES, BATCH = 96, 4
ONCE = Counter(range(SAMPLES))
TREES = ("pytorch_lightning", "lightning.pytorch")
SHARED, DIVIDED = "differs between workers. They share that of worker 0", "Workers do not share the data because "


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.ones(4), index


class Own(Sampler[int]):
    def __init__(self) -> None:
        self.numpys, self.pythons = np.random.default_rng(), random.Random()

    def __len__(self) -> int:
        return SAMPLES


class Unseeded(Own):
    def __iter__(self) -> Iterator[int]:
        return iter(self.numpys.permutation(SAMPLES).tolist())


class ByRank(Own):
    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(dist.get_rank()).sample(range(SAMPLES), SAMPLES))


class Buckets(BatchSampler):
    """Batches of other sizes on each rank, and in each epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        own = np.random.default_rng()
        numbers, ends = own.permutation(SAMPLES), np.sort(own.choice(range(1, SAMPLES), len(self) - 1, replace=False))
        return iter([each.tolist() for each in np.split(numbers, ends)])

    def __len__(self) -> int:
        if not hasattr(self, "batches"):
            self.batches = random.Random().randint(16, 24)
        return self.batches


class Blocks(Sampler[int]):
    """Gives each rank a block."""

    def __init__(self) -> None:
        self.rank, self.num_replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def __len__(self) -> int:
        return SAMPLES // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank * len(self), (self.rank + 1) * len(self)))


class DistributedSampler(Blocks):
    pass


class Shuffled(TorchsSampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__()))


def made(**options: Any) -> Any:
    return DataLoader(Numbers(), **({} if "batch_sampler" in options else {"batch_size": BATCH}), **options)


def seeded_by_rank(tree: Any) -> Any:
    tree.seed_everything(dist.get_rank())
    return made(shuffle=True)


def combined(tree: Any) -> Any:
    parts = [made(sampler=Unseeded()), made(shuffle=True)]
    return importlib.import_module(f"{tree.__name__}.utilities").CombinedLoader(parts, "min_size")


LOADERS = {
    "numpy": lambda tree: made(sampler=Unseeded()),
    "rank": lambda tree: made(sampler=ByRank()),
    "seed_everything": seeded_by_rank,
    "generator": lambda tree: made(
        sampler=WeightedRandomSampler(
            [1.0] * SAMPLES, SAMPLES, replacement=False, generator=torch.Generator().manual_seed(dist.get_rank())
        )
    ),
    "batches": lambda tree: made(batch_sampler=Buckets(range(SAMPLES), BATCH, drop_last=False)),
    "combined": combined,
    "blocks": lambda tree: made(sampler=Blocks()),
    "named": lambda tree: made(sampler=DistributedSampler()),
    "subclass": lambda tree: made(sampler=Shuffled(Numbers())),
}


def fit(tree: Any, kind: str, folder: Path, **options: Any) -> tuple[list[Counter[int]], str]:
    """What was trained in each epoch, and what was said."""

    class Watching(tree.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = torch.nn.Linear(4, 1), {}  # type: ignore[var-annotated]

        def train_dataloader(self) -> Any:
            return LOADERS[kind](tree)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, numbers = batch[0] if isinstance(batch[0], list) else batch
            self.seen.setdefault(self.current_epoch, []).extend(numbers.tolist())
            return self.net(x).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

        def on_fit_end(self) -> None:
            (folder / f"{self.global_rank}.json").write_text(json.dumps(list(self.seen.values())))

    about = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "logger": False, "enable_progress_bar": False}
    quiet = {"enable_checkpointing": False, "enable_model_summary": False, "default_root_dir": folder}
    strategy = ASGDStrategy(nsync=5, start_method="fork")
    tree.Trainer(strategy=strategy, **about, **quiet, **options).fit(Watching())
    assert not strategy.stats.lost_workers
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    return [Counter(n for numbers in epoch for n in numbers) for epoch in zip(*ranks, strict=True)], log_of(folder)


def log_of(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.glob("log*"))


@pytest.fixture(autouse=True)
def _logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning_asgd", *(f"{tree}.utilities.rank_zero" for tree in TREES)):
        log = logging.getLogger(name)
        monkeypatch.setattr(log, "handlers", [logging.FileHandler(tmp_path / f"log.{name}")])
        monkeypatch.setattr(log, "level", logging.INFO)


@pytest.mark.parametrize("package", TREES)
@pytest.mark.parametrize("kind", ["numpy", "rank", "seed_everything", "generator", "batches", "combined"])
def test_workers_whose_orders_differ_share_one(package: str, kind: str, tmp_path: Path) -> None:
    trained, said = fit(importlib.import_module(package), kind, tmp_path)
    assert trained == [ONCE, ONCE]
    assert said.count(SHARED) == 1
    assert DIVIDED not in said


@pytest.mark.parametrize("package", TREES)
@pytest.mark.parametrize("kind", ["named", "blocks", "subclass"])
def test_samplers_that_divide_the_samples_do_so(package: str, kind: str, tmp_path: Path) -> None:
    options = {} if kind == "subclass" else {"use_distributed_sampler": False}
    trained, said = fit(importlib.import_module(package), kind, tmp_path, **options)
    assert trained == [ONCE, ONCE]
    assert said.count("do not share the data because ") + said.count("Every worker trains what") == 1


def test_samples_that_lightning_divides_once_more_are_named(tmp_path: Path) -> None:
    """As under DDP each worker trains a part of its sampler's part."""
    trained, said = fit(importlib.import_module(TREES[0]), "blocks", tmp_path)
    assert [each.total() for each in trained] == [SAMPLES // 2] * 2
    assert said.count(DIVIDED) == 1
    assert "Blocks gives each worker samples that others do not get, and Lightning divides those once more" in said


class Refused(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            raise ProtocolError("Worker 1 does not fit the others.")
        return super().training_step(batch, batch_idx)


def test_a_forked_worker_that_is_refused_makes_the_script_fail(tmp_path: Path) -> None:
    trainer(tmp_path, ASGDStrategy(nsync=5, start_method="fork"), max_epochs=1).fit(Refused(), loader())
    overseer = supervisor.current()
    assert overseer is not None
    assert overseer.refused == {1: 1}  # with this code the script would end
    overseer.refused.clear()
