from __future__ import annotations

import math
import multiprocessing
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_asgd.caches import cache
from lightning_asgd.caches.cache import CachedDataset
from lightning_asgd.caches.named_memory import name_of
from lightning_asgd.caches.peer_caches import SampleCache
from lightning_asgd.core.foundation.errors import ConfigurationError


class Counted:
    """Counts how often each sample is read, in all processes."""

    def __init__(self, samples: int, method: str = "fork") -> None:
        self.reads = multiprocessing.get_context(method).Array("i", samples)

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> bytes:
        with self.reads.get_lock():
            self.reads[index] += 1
        return bytes([index]) * 100


def double(sample: bytes) -> bytes:
    return sample * 2


@given(st.lists(st.tuples(st.integers(0, 9), st.binary(max_size=40)), max_size=40), st.integers(1, 200))
def test_what_is_held_stays_and_never_exceeds_the_limit(puts: list[tuple[int, bytes]], limit: int) -> None:
    cache, held = SampleCache(10, limit), {}
    for index, sample in puts:
        kept = cache.put(index, sample)
        if index not in held and sum(map(len, held.values())) + len(sample) <= limit:
            held[index] = sample
        assert kept == (index in held)
        assert [cache.get(i) for i in range(10)] == [held.get(i) for i in range(10)]
        assert len(cache) == len(held)
        assert cache.held_bytes == sum(map(len, held.values())) <= limit


def test_a_sample_is_read_once_and_prepared_every_time() -> None:
    source = Counted(3)
    dataset = CachedDataset(source, 10_000, prepare=double)
    assert [dataset[1], dataset[1], dataset[2]] == [bytes([1]) * 200, bytes([1]) * 200, bytes([2]) * 200]
    assert list(source.reads) == [0, 1, 1]
    assert len(dataset) == 3


def test_what_does_not_fit_is_read_every_time() -> None:
    source = Counted(10)
    dataset = CachedDataset(source, 500)
    for _ in range(3):
        assert [dataset[i] for i in range(10)] == [bytes([i]) * 100 for i in range(10)]
    held = len(dataset.cache or ())
    assert 0 < held < 10
    assert sorted(source.reads) == [1] * held + [3] * (10 - held), "as large a share of reads is saved as is held"


def test_all_processes_of_a_loader_share_it() -> None:
    read_by_loaders("fork")


@pytest.mark.slow
def test_processes_of_a_loader_that_are_spawned_share_it_too() -> None:
    # In a process of its own, since Python starts one that outlives the test.
    code = "from tests.unit import test_cache\nif __name__ == '__main__': test_cache.read_by_loaders('spawn')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr


def read_by_loaders(method: str) -> None:
    source = Counted(24, method)
    dataset = CachedDataset(source, 100_000)
    for _ in range(2):  # processes are made anew for each epoch
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=4, shuffle=True, num_workers=2, multiprocessing_context=method, collate_fn=list
        )
        assert sorted(sample[0] for batch in loader for sample in batch) == list(range(24))
    assert list(source.reads) == [1] * 24
    assert len(dataset.cache or ()) == 24


def test_processes_that_fill_it_at_once_do_not_mix_samples_up() -> None:
    cache = SampleCache(200, 200 * 50)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fill, args=(cache, first)) for first in (0, 50, 100, 150)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    assert [cache.get(i) for i in range(200)] == [bytes([i]) * 50 for i in range(200)]


def fill(cache: SampleCache, first: int) -> None:
    for index in range(first, first + 100):
        cache.put(index % 200, bytes([index % 200]) * 50)


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"limit_bytes=0\). Expected numbers of at least 1"):
        CachedDataset([1], 0)
    with pytest.raises(ConfigurationError, match=r"was given generator. Expected a map-style dataset"):
        CachedDataset((i for i in range(3)), 100)


class Numbers:
    """A source that any process can make; its samples are read in the process that is named."""

    def __init__(self, samples: int, shift: int = 0) -> None:
        self.samples = samples
        self.shift = shift

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> bytes:
        return bytes([index + SHIFT]) * 10


SHIFT = 0  # a change of the program that no pickled source shows


def in_another_process(code: str) -> subprocess.Popen[str]:
    """A process that has run the code when its first line of output comes, and ends with its input."""
    code = f"import sys\nfrom tests.unit import test_cache\n{code}\nprint(flush=True)\nsys.stdin.read()"
    arguments = [sys.executable, "-c", code]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    return process


FILL = "data = test_cache.CachedDataset(test_cache.Numbers(23), 9_999)\n[data[i] for i in range(5)]"


def test_processes_that_have_the_same_data_share_a_cache_until_the_last_one_ends() -> None:
    with in_another_process(FILL) as filled:
        dataset = CachedDataset(Numbers(23), 9_999)
        assert len(dataset.cache or ()) == 5
        assert len(CachedDataset(Numbers(23, shift=1), 9_999).cache or ()) == 0, "of other data"
        assert len(CachedDataset(Numbers(23), 8_888).cache or ()) == 0, "of another size"
        filled.kill()
    assert [dataset[i][0] for i in range(6)] == list(range(6))
    assert len(dataset.cache or ()) == 6
    del dataset
    assert len(CachedDataset(Numbers(23), 9_999).cache or ()) == 0, "its memory is freed"


def test_a_process_that_reads_other_samples_of_the_same_data_says_so_and_reads_them_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with in_another_process(f"test_cache.SHIFT = 1\n{FILL}") as filled:
        dataset = CachedDataset(Numbers(23), 9_999)
        assert [dataset[i][0] for i in (3, 22, 4)] == [3, 22, 4]
        assert dataset.cache is None
        filled.kill()
    assert "Sample 3 of Numbers differs from the copy that another process has cached" in caplog.text


def test_a_process_that_finds_a_cache_compares_before_it_adds_a_sample(caplog: pytest.LogCaptureFixture) -> None:
    """The maker compares nothing: it would train on what is added."""
    with in_another_process(f"test_cache.SHIFT = 1\n{FILL}") as filled:
        dataset = CachedDataset(Numbers(23), 9_999)
        theirs = dataset.cache
        assert theirs is not None
        assert [dataset[i][0] for i in (22, 3)] == [22, 3]
        assert dataset.cache is None
        assert (len(theirs), theirs.get(22)) == (5, None)
        filled.kill()
    assert "Sample 0 of Numbers differs from the copy that another process has cached" in caplog.text


def test_a_process_that_reads_the_same_adds_its_samples() -> None:
    with in_another_process(FILL) as filled:
        dataset = CachedDataset(Numbers(23), 9_999)
        assert dataset[22][0] == 22
        assert len(dataset.cache or ()) == 6
        filled.kill()


class Files:
    """What is in a folder that is given in some way."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bytes:
        return (Path(self.folder) / "sample").read_bytes()


class Location:
    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path


@pytest.mark.parametrize("kind", [str, Path, Location])
@pytest.mark.parametrize(
    ("folder", "name", "shares"),
    [("data", "", False), ("{}/fold1/data", "", True), ("data", "data", True)],
    ids=["relative", "absolute", "named"],
)
def test_jobs_in_two_folders_share_what_is_at_one_path_or_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, folder: str, name: str, shares: bool
) -> None:
    for fold in ("fold1", "fold2"):
        (tmp_path / fold / "data").mkdir(parents=True)
        (tmp_path / fold / "data" / "sample").write_text(fold)
    monkeypatch.chdir(tmp_path / "fold1")
    first = CachedDataset(Files(kind(folder.format(tmp_path))), 777, name=name)
    assert first[0] == b"fold1"
    monkeypatch.chdir(tmp_path / "fold2")
    second = CachedDataset(Files(kind(folder.format(tmp_path))), 777, name=name)
    assert len(second.cache or ()) == shares
    assert second[0] == (b"fold1" if shares else b"fold2")


def test_a_text_that_is_no_path_depends_on_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for fold in ("fold1", "fold2"):
        (tmp_path / fold).mkdir()
        monkeypatch.chdir(tmp_path / fold)
        names.add(name_of(["train", "", "a" * 10_000, "\0"]))
    assert len(names) == 1


def test_samples_that_a_source_has_gained_are_read_every_time() -> None:
    class Peers:
        def get(self, indices: Iterable[int]) -> dict[int, bytes]:
            asked.extend(indices)
            return {}

        def keeps(self, index: int) -> bool:
            return True

        def put(self, samples: dict[int, bytes]) -> None:
            asked.extend(samples)

    asked: list[int] = []
    source = [b"zero", b"one"]
    dataset = CachedDataset(source, 1_000)
    dataset.ask(Peers())  # type: ignore[arg-type]
    source.append(b"two")
    assert dataset.__getitems__([2, 0, 2]) == [b"two", b"zero", b"two"]
    assert asked == [0, 0], "other machines are asked for none that has no place there"
    assert dataset.cache is not None
    assert (dataset.cache.get(2), dataset.cache.put(2, b"two"), len(dataset.cache)) == (None, False, 1)


def test_indices_count_from_the_end_and_end_where_the_data_do() -> None:
    dataset = CachedDataset(Numbers(4), 1_000)
    assert dataset[-1] == dataset[3] == bytes([3]) * 10
    with pytest.raises(IndexError):
        dataset[4]


def test_a_source_that_reads_several_samples_at_once_is_asked_for_those_that_are_not_held() -> None:
    class Batches(Numbers):
        def __getitems__(self, indices: list[int]) -> list[bytes]:
            asked.append(indices)
            return [self[i] for i in indices]

    asked: list[list[int]] = []
    dataset = CachedDataset(Batches(9), 1_000)
    assert [sample[0] for sample in dataset.__getitems__([4, 1])] == [4, 1]
    assert [sample[0] for sample in dataset.__getitems__([1, 2, 4, 0])] == [1, 2, 4, 0]
    assert asked == [[4, 1], [2, 0]]


@dataclass
class Holding:
    value: torch.Tensor


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ((torch.tensor([1.0, math.nan]), "a"), (torch.tensor([1.0, math.nan]), "a"), True),
        (torch.tensor([1.0]), torch.tensor([2.0]), False),
        (torch.ones(2), torch.ones(1), False),
        (np.array(["a", "b"]), np.array(["a", "b"]), True),
        (np.array([True, False]), np.array([True, True]), False),
        ({"x": 1, "y": math.nan}, {"x": 1, "y": math.nan}, True),
        ({"x": 1}, {"y": 1}, False),
        (object(), object(), True),
        (1, 1.0, False),
        (b"a", b"b", False),
        (Holding(torch.ones(2)), Holding(torch.ones(2)), True),  # it cannot be seen whether they are
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
    ],
)
def test_samples_are_compared_by_what_they_hold(one: Any, other: Any, equal: bool) -> None:
    assert cache._equal(one, other) == equal


def test_a_view_of_a_large_tensor_takes_as_much_memory_as_it_shows() -> None:
    dataset = CachedDataset(torch.zeros(1000, 10), 100_000)
    assert torch.equal(dataset[3], torch.zeros(10))
    assert dataset.cache is not None
    assert dataset.cache.held_bytes < 3_000


def test_a_data_set_of_tensors_has_the_same_name_in_every_process() -> None:
    code = "import torch\nfrom lightning_asgd.caches.named_memory import name_of\n"
    code += "print(name_of(torch.utils.data.TensorDataset(torch.arange(9.0)), {'a': torch.ones(2)}))"
    names = {subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout for _ in range(2)}
    assert len(names) == 1


def test_a_process_that_is_forked_while_a_thread_writes_can_write_too() -> None:
    cache = SampleCache(10, 1_000)
    context = multiprocessing.get_context("fork")
    with cache._memory.locked():
        process = context.Process(target=renewed, args=(cache,))
        process.start()
    process.join(20)
    assert process.exitcode == 0
    assert cache.get(3) == b"three"


def renewed(cache: SampleCache) -> None:
    assert cache.put(3, b"three")


def test_a_process_that_ends_while_it_writes_leaves_no_wrong_sample() -> None:
    cache = SampleCache(10, 1_000)

    class Ends(bytes):
        """Stops a write at its second use: after the room is taken."""

        def __len__(self) -> int:
            uses.append(None)
            if len(uses) > 2:
                raise KeyboardInterrupt
            return super().__len__()

    uses: list[None] = []
    with pytest.raises(KeyboardInterrupt):
        cache.put(0, Ends(b"zero"))
    cache.put(1, b"one")
    assert cache.get(0) in (None, b"zero")
    assert cache.get(1) == b"one"
