"""Which data are read shard by shard, and how a shard is read from a position on."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import webdataset
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_asgd.core.protocol import UNKNOWN
from lightning_asgd.streams.find import batch_of, drops_last, is_streamed, loader_of, shards_of
from lightning_asgd.streams.sharded_data import ShardedData

SAMPLES, FILES = 30, 5


class Own(IterableDataset[int]):
    """Six numbers in each of ``num_shards``."""

    num_shards: Any = 3

    def open_shard(self, epoch: int, shard: int, start: int) -> Iterator[int]:
        yield from range(6 * shard + start, 6 * shard + 6)

    def __iter__(self) -> Iterator[int]:
        yield from range(18)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    with webdataset.ShardWriter(f"{folder}/n-%d.tar", maxcount=SAMPLES // FILES, verbose=0) as writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"{number:04d}", "cls": number})
    return f"{folder}/n-{{0..{FILES - 1}}}.tar"


def web(files: str, **options: Any) -> Any:
    return webdataset.WebDataset(files, **{"shardshuffle": False, "nodesplitter": webdataset.split_by_node, **options})


def found(loader: Any) -> ShardedData:
    data = shards_of(loader)
    assert isinstance(data, ShardedData), data
    return data


def everything(data: ShardedData, epoch: int = 0) -> list[Any]:
    return [sample for shard in range(len(data.lengths)) for sample in data.read(epoch, shard, 0)]


def test_a_data_set_of_the_users_own_is_read_from_any_position() -> None:
    data = found(DataLoader(Own(), batch_size=4))
    assert list(data.lengths) == [None] * 3
    assert everything(data) == list(range(18))
    assert list(data.read(0, 1, 4)) == [10, 11]
    assert data.ends(data.order(0, 0)) == (UNKNOWN, 2 * UNKNOWN, 3 * UNKNOWN)


def test_shards_without_samples_have_no_numbers_and_the_order_may_depend_on_the_epoch() -> None:
    data = ShardedData((3, 0, 2, 4), lambda *place: iter(()), shuffled=True)
    orders = [data.order(epoch, seed=1) for epoch in range(20)]
    assert all(sorted(order) == [0, 2, 3] for order in orders)
    assert len({tuple(order) for order in orders}) == 6
    assert data.order(7, seed=1) == orders[7]
    assert data.ends([3, 0, 2]) == (4, 7, 9)


@pytest.mark.parametrize("count", [None, 0, "3"])
def test_a_number_of_shards_that_is_none_is_said(count: Any) -> None:
    dataset = Own()
    dataset.num_shards = count
    assert shards_of(DataLoader(dataset)) == f"Own.num_shards is {count!r}, not a number of shards"


def test_lengths_must_be_those_of_all_shards() -> None:
    dataset: Any = Own()
    dataset.shard_lengths = [6, 6]
    assert shards_of(DataLoader(dataset)) == "Own.shard_lengths has 2 numbers for 3 shards"
    dataset.shard_lengths = [0, 0, 0]
    assert shards_of(DataLoader(dataset)) == "it has no samples"


class Twice(DataLoader[int]):
    """Yields every batch twice."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield batch


class Named(DataLoader[int]):
    """Iterates as torch's."""


class Plain(IterableDataset[int]):
    """Has no shards."""

    def __iter__(self) -> Iterator[int]:
        yield from range(3)


class Numbers(Dataset[int]):
    """Is no stream."""

    def __len__(self) -> int:
        return 3


def test_what_cannot_be_read_by_shards_is_said() -> None:
    assert shards_of(Twice(Own())) == "Twice has its own way to iterate"
    assert isinstance(shards_of(Named(Own())), ShardedData)
    assert isinstance(shards_of(DataLoader(Own(), num_workers=2)), ShardedData)
    assert shards_of(DataLoader(Plain())) == "Plain has no open_shard(epoch, shard, start)"
    assert [is_streamed(DataLoader(each)) for each in (Own(), Plain(), Numbers())] == [True, True, False]
    assert not is_streamed([torch.zeros(2)])


def test_tar_files_are_shards(files: str) -> None:
    dataset = web(files).decode().to_tuple("cls").map(lambda sample: sample[0])
    data = found(DataLoader(dataset, batch_size=4))
    assert everything(data) == list(range(SAMPLES))
    assert list(data.read(0, 2, 4)) == [16, 17]
    assert not data.shuffled


def test_samples_are_shuffled_within_a_shard_in_the_same_way_on_every_worker(files: str) -> None:
    workers = [found(DataLoader(web(files, shardshuffle=10).shuffle(4).decode())) for _ in range(2)]
    assert workers[0].shuffled
    keys = [[sample["__key__"] for sample in everything(data, epoch)] for data in workers for epoch in (0, 1)]
    assert keys[0] == keys[2] != keys[1] == keys[3]
    assert sorted(keys[0]) == sorted(keys[1]) == [f"{n:04d}" for n in range(SAMPLES)]
    size = SAMPLES // FILES
    assert all(sorted(keys[0][i : i + size]) == sorted(keys[1][i : i + size]) for i in range(0, SAMPLES, size))


def test_batches_that_a_pipeline_makes_become_the_loaders(files: str) -> None:
    dataset = web(files).decode().to_tuple("cls")
    loader = webdataset.WebLoader(dataset.batched(7, collation_fn=len), batch_size=None)
    data = found(loader)
    assert data.collate is len
    assert batch_of(loader, data) == 7
    assert not drops_last(loader, data)
    assert drops_last(loader, found(DataLoader(dataset.batched(7, partial=False), batch_size=None)))
    assert shards_of(DataLoader(dataset.batched(7), batch_size=2)) == "both the data set and its loader make batches"
    assert len(everything(data)) == SAMPLES
    assert loader_of(loader.shuffle(10)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data.repeat(2), "with_epoch or repeat makes its epochs"),
        (lambda data: data.with_epoch(7), "with_epoch or repeat makes its epochs"),
        (lambda data: data.slice(7), "the stage own islice may need the shards together"),
        (lambda data: data.compose(lambda samples: samples), "the stage own <lambda> may need the shards together"),
        (lambda data: data.batched(3).map(len), "the stage batched may need the shards together"),
    ],
)
def test_stages_that_need_the_shards_together_are_said(files: str, change: Any, reason: str) -> None:
    assert shards_of(DataLoader(change(web(files).decode()))) == reason


def test_resampled_shards_are_no_list() -> None:
    data = webdataset.WebDataset("a-{0..1}.tar", resampled=True)
    assert "is not a list of shards" in str(shards_of(DataLoader(data)))


def test_a_length_changes_nothing(files: str) -> None:
    assert len(everything(found(DataLoader(web(files).with_length(1000, silent=True))))) == SAMPLES


PROGRAM = """
import torch
from lightning_asgd.streams.sharded_data import ShardedData
class Thing:
    def __init__(self): self.values = [torch.arange(9.0)[3:6], {"a": (1, "b")}]
def read(epoch, shard, start):
    yield torch.arange(6).reshape(2, 3) + shard, torch.zeros(0), torch.tensor(1.0, dtype=torch.bfloat16), Thing()
print(ShardedData((None, 2), read, name="x").examined(1)[1].hex())
"""


def test_a_digest_is_the_same_in_every_process_and_another_for_other_data() -> None:
    first, second = (
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert first == second
    values: Any = torch.arange(4)

    def data(*lengths: int, name: str = "", add: float = 0) -> bytes:
        return ShardedData(lengths, lambda *_: iter([values + add]), name=name).examined(1)[1]

    assert len({data(2, 3), data(3, 2), data(2, 3, name="x"), data(2, 3, add=1)}) == 4


def test_random_samples_are_compared_with_the_same_random_numbers() -> None:
    def noisy(epoch: int, shard: int, start: int) -> Iterator[Any]:
        while True:
            yield torch.rand(2), random.random()

    before = torch.get_rng_state()
    assert ShardedData((None,), noisy).examined(1)[1] == ShardedData((None,), noisy).examined(1)[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_that_depend_on_random_numbers_are_the_same_on_every_worker() -> None:
    def shuffled(epoch: int, shard: int, start: int) -> Iterator[Any]:
        numbers = list(range(20))
        random.shuffle(numbers)
        for number in numbers[start:]:
            yield number, torch.rand(1).item()

    plain = ShardedData((20, 20), shuffled)
    one, other = (plain.examined(1)[0] for _ in range(2))
    before = random.getstate(), torch.get_rng_state()
    first = list(one.read(0, 1, 0))
    random.random()
    torch.rand(3)
    assert [number for number, _ in other.read(0, 1, 7)] == [number for number, _ in first[7:]]
    assert list(other.read(0, 1, 0)) == first
    assert list(other.read(1, 1, 0)) != first
    assert list(other.read(0, 0, 0)) != first
    random.setstate(before[0])
    torch.set_rng_state(before[1])
    still: Any = ShardedData((3,), lambda *_: iter([1, 2, 3]))
    assert still.examined(1)[0] is still


def test_samples_with_cycles_are_not_compared() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    assert ShardedData((None,), lambda *_: iter([cycle])).examined(1)[1] == b""


def test_samples_that_cannot_be_pickled_cannot_be_compared() -> None:
    assert ShardedData((None,), lambda *_: iter([lambda: 1])).examined(1)[1] == b""
