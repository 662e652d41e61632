"""Iterable datasets as users write them: every n-th sample, by rank, world and loader process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from harness import DataRun
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Numbers(IterableDataset[int]):
    """Numbers, divided.

    Args:
        count: of them.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.rank, self.world = self.place()

    def place(self) -> tuple[int, int]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        process, processes = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(self.rank * processes + process, self.count, self.world * processes))


class AsTorchSays(Numbers):
    def place(self) -> tuple[int, int]:
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class AsVariablesSay(Numbers):
    def place(self) -> tuple[int, int]:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def main(kind: type[Numbers]) -> None:
    run = DataRun("torch")

    def loader() -> Any:
        return DataLoader(kind(run.samples), batch_size=run.BATCH, num_workers=run.processes)

    run.fit(loader)
