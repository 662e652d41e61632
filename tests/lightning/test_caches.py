"""Cached training data in a job: each machine keeps a part, and asks the others for theirs."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader, Subset

from lightning_asgd.caches import partitioned_caches
from lightning_asgd.caches.cache import CachedDataset
from tests.helpers.listeners import check, sockets
from tests.lightning.models import loader, trainer
from tests.lightning.test_data import BATCH, ONCE, SAMPLES, Numbered, Seen, Watching, strategy


class Disk:
    """Counts what is read of it, in all processes. It cannot be pickled, so every worker's cache is its own."""

    def __init__(self) -> None:
        self.data = Numbered()
        self.reads = multiprocessing.get_context("fork").Array("i", SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        with self.reads.get_lock():
            self.reads[index] += 1
        return self.data[index]


class Cached(Watching):
    def __init__(self, folder: Path, disk: Disk, processes: int = 0) -> None:
        super().__init__(folder)
        self.disk, self.processes = disk, processes

    def train_dataloader(self) -> DataLoader[Any]:
        data = CachedDataset(self.disk, 1_000_000, partitioned=True)
        return DataLoader(Subset(data, range(SAMPLES)), BATCH, shuffle=True, num_workers=self.processes)


class Compared(Cached):
    """Compares where a worker listens with the table in docs/howto/security.md."""

    def on_train_batch_start(self, *_: Any) -> None:
        roles = ["each worker", "one worker of each machine"]
        check(sockets(psutil.Process()), roles, "zmq", [])


@pytest.mark.parametrize("processes", [0, 1])
def test_machines_keep_a_part_each_and_read_every_sample_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    # Two workers of this machine, as if they were on two.
    monkeypatch.setattr(partitioned_caches, "host_identity", lambda: os.environ["LOCAL_RANK"])
    disk = Disk()
    run = trainer(tmp_path, strategy(transport="zmq"), max_epochs=3, val_check_interval=1.0)
    run.fit(Compared(tmp_path, disk, processes), val_dataloaders=loader(16))
    seen = Seen(tmp_path)
    assert [seen.of_epoch(epoch) for epoch in range(3)] == [ONCE] * 3
    # Every process compares one sample, and a loader process may end before its last batch is with the other machine.
    again = 2 * 3 * (1 + BATCH) if processes else 2
    assert SAMPLES <= sum(disk.reads) <= SAMPLES + again


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_workers_of_one_machine_have_nothing_to_divide(tmp_path: Path, transport: str) -> None:
    disk = Disk()
    trainer(tmp_path, strategy(transport=transport), max_epochs=1).fit(Cached(tmp_path, disk))
    assert Seen(tmp_path).of_epoch(0) == ONCE
    assert sum(disk.reads) == SAMPLES


def test_a_transport_that_lets_strangers_in_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioned_caches, "host_identity", lambda: os.environ["LOCAL_RANK"])
    with pytest.raises(ProcessRaisedException, match=r"ConfigurationError: CachedDataset.partitioned=True"):
        trainer(tmp_path, strategy(transport="rpc"), max_epochs=1).fit(Cached(tmp_path, Disk()))
