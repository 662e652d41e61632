"""Hugging Face datasets: an iterable dataset of shards, split by rank with ``split_dataset_by_node``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from harness import DataRun


def main() -> None:
    run = DataRun("datasets")
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node
    from torch.utils.data import DataLoader

    def collate(items: list[dict[str, Any]]) -> torch.Tensor:
        return torch.tensor([item["index"] for item in items])

    def loader() -> Any:
        dataset = Dataset.from_dict({"index": list(range(run.samples))}).to_iterable_dataset(num_shards=run.SHARDS)
        dataset = dataset.shuffle(seed=run.seed, buffer_size=20)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        dataset = split_dataset_by_node(dataset, rank=rank, world_size=world)
        return DataLoader(dataset, batch_size=run.BATCH, num_workers=run.processes, collate_fn=collate)

    run.fit(loader)


if __name__ == "__main__":
    main()
