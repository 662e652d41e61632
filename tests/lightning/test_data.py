"""Data follow speed: every sample once per epoch, more for the faster workers, and what Lightning makes of it."""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_asgd import ASGDStrategy
from tests.helpers.holding import await_file
from tests.lightning.models import Regression, dataset, loader, trainer

SAMPLES, BATCH = 128, 4  # 32 batches, 16 for each of two workers
LARGER = 6  # worker 1's first grant is three whole batches of this size, even if worker 0 asks before it


class Numbered(Dataset[Any]):
    """Samples that know their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y = dataset(SAMPLES)[index]
        return x, y, index


def trains_dummy(trainer: pl.Trainer) -> bool:
    """Whether the update of the present batch will be discarded; see ``LeaseGrant.void``."""
    session = getattr(trainer.strategy, "fit_session", None)
    return session is not None and any(batch.void for batch in itertools.islice(session._leases._loading, 1))


class Watching(Regression):
    """Notes the samples that it trains, dummy batches apart; worker 1 is slow.

    With ``ahead`` worker 1 waits in its first batch of a sync interval until worker 0 trains that many of its own.
    """

    def __init__(self, folder: Path, slow_s: float = 0.03, ahead: int = 0) -> None:
        super().__init__()
        self.folder, self.slow_s, self.ahead, self.begun = folder, slow_s, ahead, 0
        self.seen: list[tuple[int, list[int]]] = []
        self.validated: list[tuple[int, int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, numbers = batch
        if not trains_dummy(self.trainer):
            self.seen.append((self.current_epoch, numbers.tolist()))
        self.begun += 1
        is_ahead = self.folder / f"ahead{len(self.validated)}"
        if self.global_rank == 0 and self.begun == self.ahead:
            is_ahead.touch()
        if self.global_rank == 1:
            if self.ahead and self.begun == 1:
                await_file(is_ahead)
            time.sleep(self.slow_s)
        return super().training_step((x, y), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            trained = len([1 for epoch, _ in self.seen if epoch == self.current_epoch])
            self.validated.append((self.trainer.global_step, trained, rate))
            self.begun = 0

    def on_fit_end(self) -> None:
        result = {"seen": self.seen, "validated": self.validated, "step": self.trainer.global_step}
        (self.folder / f"seen{self.global_rank}.json").write_text(json.dumps(result))


class Seen:
    """What all workers have trained."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self.by_rank = [json.loads((folder / f"seen{rank}.json").read_text()) for rank in range(workers)]

    def of_epoch(self, epoch: int) -> Counter[int]:
        return Counter(i for rank in self.by_rank for e, numbers in rank["seen"] if e == epoch for i in numbers)

    def batches(self, rank: int) -> int:
        return len(self.by_rank[rank]["seen"])


def numbered(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbered(), **{"batch_size": BATCH, "shuffle": True, **options})


def strategy(**options: Any) -> ASGDStrategy:
    return ASGDStrategy(nsync=3, start_method="fork", **options)


ONCE = Counter(range(SAMPLES))


@pytest.mark.parametrize("processes", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_every_sample_once_per_epoch_and_more_for_the_faster_worker(tmp_path: Path, processes: dict[str, Any]) -> None:
    module = Watching(tmp_path, slow_s=0.3, ahead=3)
    run = trainer(tmp_path, strategy(), val_check_interval=0.5, max_epochs=2)
    run.fit(module, numbered(**processes), loader(16))
    seen = Seen(tmp_path)
    assert seen.of_epoch(0) == seen.of_epoch(1) == ONCE
    assert seen.batches(0) > 2 * seen.batches(1)
    orders = [[n for e, n in seen.by_rank[0]["seen"] if e == epoch] for epoch in (0, 1)]
    assert orders[0][:3] != orders[1][:3]  # shuffled by the epoch too
    for rank in (0, 1):
        validated = seen.by_rank[rank]["validated"]
        assert [step for step, _, _ in validated] == [8, 16, 24, 32]
        assert [rate for _, _, rate in validated] == pytest.approx([0.05 * 0.999**n for n in (8, 16, 24, 32)])
        assert seen.by_rank[rank]["step"] == 32
    for place, end in enumerate((SAMPLES // 2, SAMPLES)):  # validated at the same place of the epoch
        assert sum(BATCH * seen.by_rank[rank]["validated"][place][1] for rank in (0, 1)) == end


class Plans(Watching):
    """Notes how many steps Lightning expects, whenever it trains."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with (self.folder / f"plans{self.global_rank}").open("a") as file:
            file.write(f"{self.trainer.estimated_stepping_batches}\n")
        return super().training_step(batch, batch_idx)


def test_the_expected_number_of_steps_does_not_follow_a_workers_speed(tmp_path: Path) -> None:
    trainer(tmp_path, strategy(), max_epochs=3).fit(Plans(tmp_path, slow_s=0.1), numbered())
    for rank in (0, 1):
        assert {*(tmp_path / f"plans{rank}").read_text().split()} == {str(3 * SAMPLES // BATCH // 2)}


class SlowFirst(Numbered):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.3 if index == 0 else 0)
        return super().__getitem__(index)


class Compare(Callback):
    """Notes what was leased and what is trained of it."""

    def __init__(self) -> None:
        self.leased: list[list[int]] = []
        self.trained: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.leased.append(trainer.strategy.fit_session._leases._loading[0].samples)
        self.trained.append(batch[2].tolist())

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        (pl_module.folder / f"leased{trainer.global_rank}.json").write_text(json.dumps([self.leased, self.trained]))


def test_batches_are_trained_in_the_order_in_which_they_are_leased(tmp_path: Path) -> None:
    """A loader that yields what is ready first would have other samples counted than those that were trained."""
    given = DataLoader(SlowFirst(), BATCH, num_workers=2)
    given.in_order = False  # an argument from torch 2.6 on
    trainer(tmp_path, strategy(), max_epochs=1, callbacks=[Compare()]).fit(Watching(tmp_path, slow_s=0.0), given)
    assert Seen(tmp_path).of_epoch(0) == ONCE
    for rank in (0, 1):
        leased, trained = json.loads((tmp_path / f"leased{rank}.json").read_text())
        assert trained == leased
    assert given.in_order is False


class SlowBefore(Callback):
    """Takes its time before a batch, and notes how long the coordinator is told that the first step takes."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        time.sleep(0.1)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            step_s = BATCH * trainer.strategy.fit_session.data.leases.unit_s
            (pl_module.folder / f"step{trainer.global_rank}").write_text(str(step_s))


def test_the_first_step_is_measured_with_what_callbacks_do_before_it(tmp_path: Path) -> None:
    run = trainer(tmp_path, strategy(), callbacks=[SlowBefore()], max_epochs=1)
    run.fit(Watching(tmp_path, slow_s=0.0), numbered())
    assert [float((tmp_path / f"step{rank}").read_text()) >= 0.1 for rank in (0, 1)] == [True, True]


class Looking(Callback):
    """Looks at the training data where no worker trains."""

    def __init__(self, folder: Path, ranks: tuple[int, ...]) -> None:
        self.folder, self.ranks = folder, ranks
        self.found: list[list[int]] = []

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank in self.ranks:
            self.found.append([n for batch in trainer.train_dataloader for n in batch[2].tolist()])

    on_train_epoch_end = on_validation_epoch_end

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        (self.folder / f"found{trainer.global_rank}.json").write_text(json.dumps(self.found))


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
@pytest.mark.parametrize("processes", [{}, {"num_workers": 1}])
def test_a_program_that_iterates_over_the_training_data_gets_the_part_that_ddp_would_give_it(
    tmp_path: Path, ranks: tuple[int, ...], processes: dict[str, Any]
) -> None:
    looking = Looking(tmp_path, ranks)
    run = trainer(tmp_path, strategy(), val_check_interval=0.5, max_epochs=2, callbacks=[looking])
    run.fit(Watching(tmp_path, 0.01), numbered(**processes), loader(16))
    seen = Seen(tmp_path)
    assert seen.of_epoch(0) == seen.of_epoch(1) == ONCE
    found = [json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in (0, 1)]
    assert [len(each) for each in found] == [6 if rank in ranks else 0 for rank in (0, 1)]
    for one, other in itertools.zip_longest(*found, fillvalue=()):
        assert len(one) == SAMPLES // 2
        assert not other or Counter([*one, *other]) == ONCE


def test_limits_and_accumulation_count_the_progress_of_all(tmp_path: Path) -> None:
    module = Watching(tmp_path, slow_s=0.01)
    run = trainer(tmp_path, strategy(), max_epochs=9, max_steps=7, limit_train_batches=12, accumulate_grad_batches=4)
    run.fit(module, numbered(), loader(16))
    seen = Seen(tmp_path)
    assert [seen.of_epoch(epoch).total() for epoch in range(3)] == [96, 96, 2 * 4 * BATCH]  # 3, 3 and 1 steps
    assert all(rank["step"] == 7 for rank in seen.by_rank)


def test_resuming_in_mid_epoch_trains_the_rest_of_it(tmp_path: Path) -> None:
    """As from a checkpoint of DDP: the same position, and nothing is trained twice."""
    saver = ModelCheckpoint(
        tmp_path / "ckpt", save_top_k=-1, every_n_train_steps=0, every_n_epochs=1, filename="{step}"
    )
    options: dict[str, Any] = {"val_check_interval": 0.25, "max_epochs": 1}
    run = trainer(tmp_path, strategy(), callbacks=[saver], enable_checkpointing=True, **options)
    (tmp_path / "first").mkdir()
    run.fit(Watching(tmp_path / "first"), numbered(), loader(16))
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == [f"step={n}.ckpt" for n in (12, 16, 4, 8)]
    again = trainer(tmp_path, strategy(), **{**options, "max_epochs": 2})
    again.fit(Watching(tmp_path), numbered(), loader(16), ckpt_path=tmp_path / "ckpt" / "step=8.ckpt")
    rest, whole = Seen(tmp_path), Seen(tmp_path / "first")
    order = [n for rank in whole.by_rank for n in rank["seen"]]
    assert rest.of_epoch(0).total() == SAMPLES // 2
    assert rest.of_epoch(1) == ONCE
    first_half = ONCE - rest.of_epoch(0)
    assert all(set(n) <= set(first_half) or set(n) <= set(rest.of_epoch(0)) for _, n in order)
    assert [step for step, _, _ in rest.by_rank[0]["validated"]] == [12, 16, 20, 24, 28, 32]
    split = trainer(tmp_path, strategy(data="split"), **options)
    split.fit(Watching(tmp_path), numbered(), loader(16), ckpt_path=tmp_path / "ckpt" / "step=8.ckpt")
    assert [step for step, _, _ in Seen(tmp_path).by_rank[1]["validated"]] == [12, 16]


class Pairs(BatchSampler):
    """Batches of neighbours, in random order of torch's global generator."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        yield from (batches[i] for i in torch.randperm(len(batches)).tolist())


def test_samplers_with_random_numbers_of_their_own(tmp_path: Path) -> None:
    class Loaders(Watching):
        def train_dataloader(self) -> DataLoader[Any]:
            torch.manual_seed(self.global_rank)  # workers that are seeded differently agree nevertheless
            sampler = torch.utils.data.SequentialSampler(Numbered())
            return DataLoader(Numbered(), batch_sampler=Pairs(sampler, BATCH, False))

    trainer(tmp_path, strategy(), max_epochs=2).fit(Loaders(tmp_path, slow_s=0.01))
    seen = Seen(tmp_path)
    assert seen.of_epoch(0) == seen.of_epoch(1) == ONCE

    class Weighted(Watching):
        def train_dataloader(self) -> DataLoader[Any]:
            weights = [1.0] * (SAMPLES // 2) + [0.0] * (SAMPLES // 2)
            sampler = WeightedRandomSampler(weights, SAMPLES // 2, replacement=False)
            return numbered(sampler=sampler, shuffle=False)

    trainer(tmp_path, strategy(), max_epochs=1).fit(Weighted(tmp_path, slow_s=0.01))
    assert Seen(tmp_path).of_epoch(0) == Counter(range(SAMPLES // 2))


def test_a_worker_that_stops_leaves_the_rest_to_the_others(tmp_path: Path) -> None:
    class Skips(Watching):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.global_rank == 0 and batch_idx == 3 else None

    trainer(tmp_path, strategy(), max_epochs=2).fit(Skips(tmp_path, slow_s=0.001), numbered())
    seen = Seen(tmp_path)
    assert seen.batches(0) == 2 * 3
    assert seen.of_epoch(0) == seen.of_epoch(1) == ONCE


class Unequal(Watching):
    """Worker 1 has larger batches. It gets whole ones at first: worker 0 waits for it in its own first batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            (self.folder / "begun").touch()
        else:
            await_file(self.folder / "begun")
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        return numbered(batch_size=BATCH if self.global_rank == 0 else LARGER)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_workers_may_have_batches_of_different_sizes(tmp_path: Path, accumulate: int) -> None:
    run = trainer(tmp_path, strategy(), val_check_interval=0.5, accumulate_grad_batches=accumulate)
    run.fit(Unequal(tmp_path), val_dataloaders=loader(16))
    seen = Seen(tmp_path)
    assert seen.of_epoch(0) == seen.of_epoch(1) == ONCE
    assert {max(len(numbers) for _, numbers in rank["seen"]) for rank in seen.by_rank} == {BATCH, LARGER}
    batches = SAMPLES // BATCH // 2  # of a worker in an epoch, in worker 0's batches
    for rank in seen.by_rank:
        halves = [batches // 2 // accumulate, math.ceil(batches / accumulate)]
        assert [step for step, _, _ in rank["validated"]] == [*halves, *(halves[1] + half for half in halves)]


def test_data_that_a_hook_has_set_up_before_the_strategy_are_trained_in_full(tmp_path: Path) -> None:
    class Asks(Unequal):
        def setup(self, stage: str) -> None:
            assert self.trainer.estimated_stepping_batches > 0  # sets the data up

    trainer(tmp_path, strategy()).fit(Asks(tmp_path, slow_s=0.001), val_dataloaders=loader(16))
    seen = Seen(tmp_path)
    assert seen.of_epoch(0) == seen.of_epoch(1) == ONCE


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4)])
def test_data_that_are_loaded_anew_may_have_another_batch_size(tmp_path: Path, sizes: tuple[int, int]) -> None:
    class Grows(Watching):
        def train_dataloader(self) -> DataLoader[Any]:
            return numbered(batch_size=sizes[self.trainer.current_epoch])

    run = trainer(tmp_path, strategy(), reload_dataloaders_every_n_epochs=1)
    run.fit(Grows(tmp_path, slow_s=0.001), val_dataloaders=loader(16))
    seen = Seen(tmp_path)
    assert seen.of_epoch(0) == seen.of_epoch(1) == ONCE
    assert [rank["step"] for rank in seen.by_rank] == [sum(SAMPLES // size // 2 for size in sizes)] * 2


@pytest.mark.parametrize("why", ["data", "sampler"])
def test_with_a_fixed_split_batches_of_different_sizes_do_no_harm(tmp_path: Path, why: str) -> None:
    class Mine(DistributedSampler[Any]):
        pass

    class Sampled(Unequal):
        def train_dataloader(self) -> DataLoader[Any]:
            sampler = Mine(Numbered(), num_replicas=2, rank=self.global_rank)
            return DataLoader(Numbered(), batch_size=BATCH if self.global_rank == 0 else LARGER, sampler=sampler)

    if why == "data":
        trainer(tmp_path, strategy(data="split")).fit(Unequal(tmp_path, slow_s=0.001), val_dataloaders=loader(16))
    else:
        split = trainer(tmp_path, strategy(), use_distributed_sampler=False)
        split.fit(Sampled(tmp_path, slow_s=0.001), val_dataloaders=loader(16))
    seen = Seen(tmp_path)
    assert seen.of_epoch(0) == seen.of_epoch(1) == ONCE
    assert [seen.batches(rank) for rank in (0, 1)] == [2 * 16, 2 * 11]
    assert [rank["step"] for rank in seen.by_rank] == [
        2 * 16,
        2 * 16,
    ]  # or checkpoint callbacks would decide differently


class Stream(IterableDataset[Any]):
    """Yields the same to every worker, or divides itself as streaming libraries do."""

    def __init__(self, divided: bool = False) -> None:
        self.divided = divided

    def __iter__(self) -> Iterator[Any]:
        first, step = (dist.get_rank(), dist.get_world_size()) if self.divided else (0, 1)
        yield from (dataset(32)[i] for i in range(first, 32, step))


class Loader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


PART = "Workers do not share the data because "
OWN = "Every worker trains what its own dataloader yields, because "
SAME = "Workers 0, 1 have trained the same first batch: Stream seems to yield the same samples to each of them"


@pytest.mark.parametrize(
    ("data", "line", "reason", "warned"),
    [
        (lambda: DataLoader(Stream(), batch_size=BATCH), OWN, "Stream has no open_shard(epoch, shard, start)", 1),
        (lambda: DataLoader(Stream(divided=True), batch_size=BATCH), OWN, "Expected Stream to give each worker", 0),
        (
            lambda: [loader(32), Loader(dataset(32), BATCH)],
            PART,
            "Loader, one of 2 training dataloaders, has its own way to iterate",
            0,
        ),
        (lambda: Loader(dataset(32), BATCH), PART, "Loader has its own way to iterate", 0),
        (lambda: loader(4, batch_size=4), PART, "1 batches per epoch are too few for 2 workers", 0),
    ],
)
def test_what_cannot_be_leased_is_split_and_says_so_once(
    data: Any,
    line: str,
    reason: str,
    warned: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Any_(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch[0] if isinstance(batch[0], list) else batch, batch_idx)

    log = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    monkeypatch.setattr(log, "handlers", [logging.FileHandler(tmp_path / "log")])
    ours = logging.getLogger("lightning_asgd.programs.fixed_split")
    monkeypatch.setattr(ours, "handlers", [logging.FileHandler(tmp_path / "warnings")])
    caplog.set_level(logging.INFO, log.name)
    trainer(tmp_path, strategy(), max_epochs=2).fit(Any_(), data())
    said = (tmp_path / "log").read_text()
    assert said.count(line) == 1
    assert reason in said
    assert (tmp_path / "warnings").read_text().count(SAME) == warned
    trainer(tmp_path, strategy(data="split"), max_epochs=1).fit(Any_(), data())
    again = (tmp_path / "log").read_text().removeprefix(said)
    assert line not in again
    assert "data split equally" in again
    assert (tmp_path / "warnings").read_text().count(SAME) == 2 * warned


def test_a_loader_of_ones_own_with_a_distributed_sampler_is_given_back_as_it_was(tmp_path: Path) -> None:
    class Own(Watching):
        def train_dataloader(self) -> DataLoader[Any]:
            if not hasattr(self, "own"):
                sampler = DistributedSampler(Numbered(), num_replicas=2, rank=self.global_rank)
                self.own = DataLoader(Numbered(), BATCH, sampler=sampler)
            return self.own

        def on_fit_end(self) -> None:
            super().on_fit_end()
            assert type(self.own.batch_sampler) is BatchSampler
            assert len(self.own) == SAMPLES // BATCH // 2
            assert len(list(self.own)) == SAMPLES // BATCH // 2

    run = trainer(tmp_path, strategy(), max_epochs=1)
    run.fit(Own(tmp_path, slow_s=0.01))
    assert Seen(tmp_path).of_epoch(0) == ONCE

    class Whole(Watching):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Numbered(), BATCH, sampler=DistributedSampler(Numbered(), num_replicas=1, rank=0))

    trainer(tmp_path, strategy(), max_epochs=1).fit(Whole(tmp_path, slow_s=0.0))  # everybody trains everything
    assert Seen(tmp_path).of_epoch(0) == ONCE + ONCE


def test_split_gives_everybody_the_same_number_of_batches(tmp_path: Path) -> None:
    trainer(tmp_path, strategy(data="split"), max_epochs=1).fit(Watching(tmp_path, slow_s=0.005), numbered())
    seen = Seen(tmp_path)
    assert seen.batches(0) == seen.batches(1) == SAMPLES // BATCH // 2
    with pytest.raises(ValueError, match=r"data='both'. Expected 'leases' or 'split'"):
        ASGDStrategy(data="both")


@pytest.mark.parametrize("limits", [{}, {"max_steps": 9}, {"accumulate_grad_batches": 3}])
def test_progress_bars_end_at_what_was_trained(tmp_path: Path, limits: dict[str, int]) -> None:
    class Bars(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if not trainer.is_global_zero:
                return
            bar: Any = trainer.progress_bar_callback
            rich = hasattr(bar, "train_progress_bar_id")
            total = bar.train_progress_bar.total
            now = bar.train_progress_bar.completed if rich else bar.train_progress_bar.n
            (tmp_path / "bar0.json").write_text(json.dumps([now, total]))

    for bar in (pl.callbacks.TQDMProgressBar(), pl.callbacks.RichProgressBar()):
        run = trainer(tmp_path, strategy(), max_epochs=1, callbacks=[bar, Bars()], enable_progress_bar=True, **limits)
        run.fit(Watching(tmp_path, slow_s=0.01), numbered())
        now, total = json.loads((tmp_path / "bar0.json").read_text())
        assert now == total == Seen(tmp_path).batches(0)
