from __future__ import annotations

import multiprocessing
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_asgd.data_stalls.cache import CachedDataset, SampleCache
from lightning_asgd.errors import ConfigurationError


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=55, check=False)
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
