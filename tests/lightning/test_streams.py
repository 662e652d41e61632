"""Data that are read shard by shard follow speed: every sample once per epoch, whatever Lightning makes of them."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import webdataset
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_asgd import ASGDStrategy
from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.algorithms.config import Timeouts
from tests.lightning.models import dataset, loader, trainer
from tests.lightning.test_data import BATCH, ONCE, SAMPLES, Seen, Watching

LENGTHS = (40, 1, 30, 0, 25, 32)  # 128 samples


class Shards(IterableDataset[Any]):
    """Samples that know their numbers, in shards."""

    expected: tuple[int | None, ...] = (None,)

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, *, known: bool = False) -> None:
        self.lengths, self.num_shards = lengths, len(lengths)
        self.started: int | None = None  # in which process of a loader
        if known:
            self.shard_lengths = lengths

    def open_shard(self, epoch: int, shard: int, start: int) -> Iterator[Any]:
        assert self.started in self.expected, "worker_init_fn sets it, if there is one"
        before = sum(self.lengths[:shard])
        x, y = dataset(SAMPLES).tensors
        for i in range(before + start, before + self.lengths[shard]):
            yield x[i], y[i], i

    def __iter__(self) -> Iterator[Any]:
        for shard in range(self.num_shards):
            yield from self.open_shard(0, shard, 0)


class Paced(Watching):
    """Steps take a while on every worker: the end of a stream comes unannounced, and each is to have a part of it."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


def without_batch_norm(module: Paced) -> Paced:
    """What is left at the end of a stream of unknown length may be one sample."""
    module.net[1] = torch.nn.Identity()
    return module


def sharded(known: bool = False, **options: Any) -> DataLoader[Any]:
    return DataLoader(Shards(known=known), **{"batch_size": BATCH, **options})


def strategy(**options: Any) -> ASGDStrategy:
    return ASGDStrategy(nsync=3, start_method="fork", **options)


@pytest.mark.parametrize("known", [False, True])
def test_every_sample_once_per_epoch_and_more_for_the_faster_worker(tmp_path: Path, known: bool) -> None:
    module = Paced(tmp_path, slow_s=0.3, ahead=3)
    run = trainer(tmp_path, strategy(), val_check_interval=4, max_epochs=2)
    run.fit(module, sharded(known), loader(16))
    seen = Seen(tmp_path)
    assert seen.of_epoch(0) == seen.of_epoch(1) == ONCE
    assert seen.batches(0) > 2 * seen.batches(1)
    for rank in (0, 1):
        validated = seen.by_rank[rank]["validated"]
        assert [step for step, _, _ in validated] == [4, 8, 12, 16, 20, 24, 28, 32]
        assert [rate for _, _, rate in validated] == pytest.approx([0.05 * 0.999**n for n in range(4, 33, 4)])
        assert seen.by_rank[rank]["step"] == 32
    for place in range(4):  # validated at the same place of the epoch
        trained = sum(BATCH * seen.by_rank[rank]["validated"][place][1] for rank in (0, 1))
        assert abs(trained - (place + 1) * SAMPLES // 4) <= 3 * BATCH  # the last batches of an interval may be smaller


class Stopping(Callback):
    """Asks for the length of the data where programs do."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        with pytest.raises(TypeError):
            len(trainer.train_dataloader)
        assert trainer.train_dataloader.batch_size == BATCH
        assert not hasattr(trainer.train_dataloader, "state_dict")

    on_train_epoch_start = on_train_epoch_end = on_train_start

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.on_train_start(trainer, pl_module)


def test_without_an_interval_a_validation_follows_every_epoch_and_a_program_may_look(tmp_path: Path) -> None:
    run = trainer(tmp_path, strategy(), max_epochs=2, callbacks=[Stopping()])
    run.fit(Paced(tmp_path), sharded(), loader(16))
    seen = Seen(tmp_path)
    assert seen.of_epoch(0) == seen.of_epoch(1) == ONCE
    assert [[step for step, _, _ in rank["validated"]] for rank in seen.by_rank] == [[16, 32]] * 2


class Long(Shards):
    """Says that it has more samples than it has."""

    def __len__(self) -> int:
        return SAMPLES + 10


@pytest.mark.parametrize(("interval", "marks"), [(8, [8, 16, 24, 32]), (1.0, [16, 32])])
def test_data_that_end_before_their_length_end_the_epoch(tmp_path: Path, interval: Any, marks: list[int]) -> None:
    run = trainer(tmp_path, strategy(), max_epochs=2, val_check_interval=interval)
    run.fit(Paced(tmp_path), DataLoader(Long(), batch_size=BATCH), loader(16))
    seen = Seen(tmp_path)
    assert seen.of_epoch(0) == seen.of_epoch(1) == ONCE
    assert [[step for step, _, _ in rank["validated"]] for rank in seen.by_rank] == [marks] * 2


def test_limits_and_accumulation_count_the_progress_of_all(tmp_path: Path) -> None:
    module = Watching(tmp_path, slow_s=0.01)
    run = trainer(tmp_path, strategy(), max_epochs=9, max_steps=7, limit_train_batches=12, accumulate_grad_batches=4)
    run.fit(module, sharded(), loader(16))
    seen = Seen(tmp_path)
    assert [seen.of_epoch(epoch).total() for epoch in range(3)] == [96, 96, 2 * 4 * BATCH]  # 3, 3 and 1 steps
    assert all(set(seen.of_epoch(epoch).values()) == {1} for epoch in range(3))
    assert all(rank["step"] == 7 for rank in seen.by_rank)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), pytest.param(4, 6, marks=pytest.mark.slow)])
def test_resuming_in_mid_epoch_trains_the_rest_with_any_number_of_workers(
    tmp_path: Path, known: bool, before: int, after: int
) -> None:
    saver = ModelCheckpoint(tmp_path / "ckpt", save_top_k=-1, every_n_train_steps=0, every_n_epochs=1)
    interval = SAMPLES // BATCH // before // 2
    options: dict[str, Any] = {"val_check_interval": interval, "max_epochs": 1}
    run = trainer(tmp_path, strategy(), devices=before, callbacks=[saver], enable_checkpointing=True, **options)
    (tmp_path / "first").mkdir()
    run.fit(without_batch_norm(Paced(tmp_path / "first")), sharded(known), loader(16))
    again = trainer(tmp_path, strategy(), devices=after, max_epochs=2)
    path = tmp_path / "ckpt" / f"epoch=0-step={interval}.ckpt"
    again.fit(without_batch_norm(Paced(tmp_path)), sharded(known), loader(16), ckpt_path=path)
    rest, whole = Seen(tmp_path, after), Seen(tmp_path / "first", before)
    assert whole.of_epoch(0) == rest.of_epoch(1) == ONCE
    order = [n for rank in whole.by_rank for _, n in rank["seen"]]
    first = ONCE - rest.of_epoch(0)
    assert first.total() == SAMPLES // 2
    assert rest.of_epoch(0).total() == SAMPLES // 2
    assert all(set(n) <= set(first) or set(n) <= set(rest.of_epoch(0)) for n in order)


class Counting(pl.LightningModule):
    """Learns how often the servers have been told of each sample."""

    def __init__(self, *, kills: bool = True) -> None:
        super().__init__()
        self.kills = kills
        self.seen = torch.nn.Parameter(torch.zeros(SAMPLES))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.kills and self.global_rank == 2 and self.current_epoch == 0 and batch_idx == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        assert isinstance(batch[2], torch.Tensor)
        return -self.seen[batch[2]].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_a_killed_workers_shard_is_finished_by_others(tmp_path: Path) -> None:
    module = Counting()
    options = {"algorithm": ASGD("sum"), "timeouts": Timeouts(silence_s=2)}
    trainer(tmp_path, strategy(**options), devices=3, max_epochs=2).fit(module, sharded())
    assert module.seen.tolist() == [2.0] * SAMPLES


def started(process: int) -> None:
    assert process in (0, 1)
    data: Any = torch.utils.data.get_worker_info().dataset  # type: ignore[union-attr]
    assert type(data) is Shards
    data.started, data.expected = process, (0, 1)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True, "worker_init_fn": started}])
def test_loader_processes_read_shards_side_by_side(tmp_path: Path, known: bool, options: dict[str, Any]) -> None:
    run = trainer(tmp_path, strategy(), val_check_interval=4, max_epochs=2)
    run.fit(Paced(tmp_path, slow_s=0.3, ahead=1), sharded(known, num_workers=2, **options), loader(16))
    seen = Seen(tmp_path)
    assert seen.of_epoch(0) == seen.of_epoch(1) == ONCE
    assert seen.batches(0) > 2 * seen.batches(1)
    full = [len(numbers) for rank in seen.by_rank for _, numbers in rank["seen"]]
    assert full.count(BATCH) >= 0.7 * len(full)


class SkipsTheRest(Watching):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx >= 3 else None


def test_processes_that_stay_forget_what_an_epoch_left(tmp_path: Path) -> None:
    run = trainer(tmp_path, strategy(), max_epochs=2)
    run.fit(SkipsTheRest(tmp_path, 0.0), sharded(num_workers=2, persistent_workers=True))
    seen = Seen(tmp_path)
    assert not seen.of_epoch(0) - ONCE
    assert seen.of_epoch(1) == ONCE


@pytest.mark.timeout(600)  # every process that is not forked imports torch
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_killed_workers_loader_processes_read_nothing_that_others_do_not(tmp_path: Path, start: str) -> None:
    module = Counting()
    options = {"algorithm": ASGD("sum"), "timeouts": Timeouts(silence_s=2)}
    data = sharded(num_workers=1 + (start == "fork"), persistent_workers=True, multiprocessing_context=start)
    trainer(tmp_path, strategy(**options), devices=3, max_epochs=2).fit(module, data)
    assert module.seen.tolist() == [2.0] * SAMPLES


class Broken(Shards):
    def open_shard(self, epoch: int, shard: int, start: int) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise OSError("this shard cannot be read")
        return super().open_shard(epoch, shard, start)


def test_what_a_loader_process_cannot_read_is_the_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="this shard cannot be read"):
        trainer(tmp_path, strategy(), max_epochs=1).fit(
            Watching(tmp_path, 0.0), DataLoader(Broken(), batch_size=BATCH, num_workers=1)
        )


class Batched(pl.LightningDataModule):
    """Batches that a WebDataset makes: arrays, which the loader converts."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.files = f"{folder}/n-{{0..3}}.tar"
        with webdataset.ShardWriter(f"{folder}/n-%d.tar", maxcount=SAMPLES // 4, verbose=0) as writer:
            for number in range(SAMPLES):
                writer.write({"__key__": f"{number:04d}", "cls": number})

    def train_dataloader(self) -> Any:
        data = webdataset.WebDataset(self.files, shardshuffle=4, nodesplitter=webdataset.split_by_node)
        batches = data.shuffle(10).decode().to_tuple("cls", "cls", "cls").batched(BATCH)
        return webdataset.WebLoader(batches, batch_size=None)


def test_batches_of_a_web_dataset_are_the_loaders(tmp_path: Path) -> None:
    module = Counting(kills=False)
    trainer(tmp_path, strategy(algorithm=ASGD("sum")), max_epochs=2).fit(module, datamodule=Batched(tmp_path))
    assert module.seen.tolist() == [2.0] * SAMPLES


def test_batches_that_must_be_full_are(tmp_path: Path) -> None:
    run = trainer(tmp_path, strategy(), max_epochs=1)
    run.fit(Paced(tmp_path), sharded(batch_size=10, drop_last=True))
    seen = Seen(tmp_path)
    assert {len(numbers) for rank in seen.by_rank for _, numbers in rank["seen"]} == {10}
    assert not seen.of_epoch(0) - ONCE
    assert seen.of_epoch(0).total() >= 110


class Differing(Shards):
    """A program that divides the data by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    def open_shard(self, epoch: int, shard: int, start: int) -> Iterator[Any]:
        part = [each for each in super().open_shard(epoch, shard, 0) if each[2] % self.world == self.rank]
        yield from part[start:]


class DifferingLater(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(Differing(), batch_size=BATCH)


def test_data_that_differ_between_workers_are_trained_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    monkeypatch.setattr(log, "handlers", [logging.FileHandler(tmp_path / "log")])
    trainer(tmp_path, strategy(), max_epochs=1).fit(Watching(tmp_path, 0.0), datamodule=DifferingLater())
    assert Seen(tmp_path).of_epoch(0) == ONCE
    assert "the workers' data differ" in (tmp_path / "log").read_text()


class Plain(IterableDataset[Any]):
    """A stream without shards."""

    def __iter__(self) -> Iterator[Any]:
        return Shards().open_shard(0, 0, 0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda: DataLoader(Plain(), batch_size=BATCH), "Plain has no open_shard"),
        (lambda: DataLoader(Shards((0, 0), known=True)), "no samples"),
    ],
)
def test_what_cannot_be_read_by_shards_is_said(
    data: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    monkeypatch.setattr(log, "handlers", [logging.FileHandler(tmp_path / "log")])
    trainer(tmp_path, strategy(), max_epochs=1).fit(Watching(tmp_path, 0.0), data())
    assert reason in (tmp_path / "log").read_text()
