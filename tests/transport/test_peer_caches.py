"""Caches of several machines, over real connections."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_asgd.caches.cache import CachedDataset
from lightning_asgd.caches.peer_caches import TRANSPORT, CacheServer, PeerCaches, SampleCache
from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.calls.transport import answer_within
from lightning_asgd.core.job.registry import kind_of
from tests.helpers.servers import SECRET

SAMPLES = 40


class Disk:
    """Counts what is read of it, in all processes. It cannot be pickled, so every machine's cache is its own."""

    def __init__(self) -> None:
        self.reads = multiprocessing.get_context("fork").Array("i", SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> bytes:
        with self.reads.get_lock():
            self.reads[index] += 1
        return bytes([index]) * 100


class Machines:
    """Machines with a disk and a cache each."""

    def __init__(self, count: int, limit_bytes: int, stack: ExitStack) -> None:
        self.disks = [Disk() for _ in range(count)]
        self.data = [CachedDataset(disk, limit_bytes, partitioned=True) for disk in self.disks]
        self.servers = [CacheServer(data.cache, "lo") for data in self.data if data.cache is not None]
        self.addresses = [server.address for server in self.servers]
        for number, data in enumerate(self.data):
            peers = PeerCaches(self.addresses, number)
            data.ask(peers)
            stack.callback(peers.close)
        for server in self.servers:
            stack.callback(server.close)

    def reads(self) -> int:
        return sum(sum(disk.reads) for disk in self.disks)

    def held(self) -> int:
        return sum(len(data.cache or ()) for data in self.data)


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setenv(SECRET_ENV, SECRET)
    with ExitStack() as stack:
        yield stack


def test_all_machines_together_read_every_sample_once(stack: ExitStack) -> None:
    machines = Machines(3, 10_000, stack)
    for _ in range(2):
        for data in machines.data:
            found = data.__getitems__(range(SAMPLES))
            assert [sample[0] for sample in found] == list(range(SAMPLES))
            wait_until(lambda: machines.held() == SAMPLES)  # what is sent to the others arrives soon
    compared = 3  # each machine compares the first sample that it did not read itself
    assert machines.reads() == SAMPLES + compared
    assert [len(data.cache or ()) for data in machines.data] == [14, 13, 13]


def test_a_cache_that_is_full_leaves_the_rest_to_the_disks(stack: ExitStack) -> None:
    machines = Machines(2, 1_500, stack)
    for _ in range(3):
        assert [sample[0] for sample in machines.data[0].__getitems__(range(SAMPLES))] == list(range(SAMPLES))
        wait_until(lambda: machines.held() == 26)  # both keep what fits
    held = machines.held()
    assert machines.reads() == SAMPLES + 2 * (SAMPLES - held) + 1


def test_loader_processes_ask_too(stack: ExitStack) -> None:
    machines = Machines(2, 10_000, stack)
    for data in machines.data:  # all are at home on both machines by then, but for a loader process's last batch
        loader: DataLoader[Any] = DataLoader(data, batch_size=5, shuffle=True, num_workers=2, collate_fn=list)
        assert sorted(sample[0] for batch in loader for sample in batch) == list(range(SAMPLES))
    # Each process compares a sample, and one may end before its last batch is with the other machine.
    assert sum(machines.disks[1].reads) <= 2 * (1 + 5) < SAMPLES // 2


def test_a_machine_that_is_gone_is_read_from_storage_and_left_alone(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    machines = Machines(2, 10_000, stack)
    machines.data[0].__getitems__(range(SAMPLES))
    wait_until(lambda: machines.held() == SAMPLES)
    machines.servers[1].close()
    for _ in range(2):
        assert [sample[0] for sample in machines.data[0].__getitems__(range(SAMPLES))] == list(range(SAMPLES))
    assert caplog.text.count("does not answer") == 1
    assert machines.addresses[1] in caplog.text


def test_what_is_no_sample_is_refused(stack: ExitStack) -> None:
    cache = SampleCache(SAMPLES, 1_000)
    server = CacheServer(cache, "lo")
    stack.callback(server.close)
    transport = kind_of(TRANSPORT).connect([server.address], "")
    stack.callback(transport.close)
    for message in (["get", [SAMPLES]], ["get", [-1]], ["put", {"1": b""}], ["put", {1: 3}], ["drop"], "get"):
        assert "ProtocolError" in repr(answer_within(transport.call(0, message, 5.0), 6.0))
    assert len(cache) == 0
