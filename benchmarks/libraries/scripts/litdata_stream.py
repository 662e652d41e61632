"""LitData: a ``StreamingDataset`` in a ``StreamingDataLoader``, which looks up its rank when it is created."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import DataRun


def number(index: int) -> dict[str, Any]:
    return {"index": index, "image": torch.zeros(16)}


def prepare(folder: Path, samples: int) -> None:
    from litdata import optimize

    chunk = samples // DataRun.SHARDS
    optimize(number, list(range(samples)), str(folder / "numbers"), chunk_size=chunk, num_workers=1)


def main() -> None:
    run = DataRun("litdata", prepare)
    from litdata import StreamingDataLoader, StreamingDataset

    def collate(items: list[dict[str, Any]]) -> torch.Tensor:
        return torch.tensor([item["index"] for item in items])

    def loader() -> Any:
        dataset = StreamingDataset(str(run.data / "numbers"), shuffle=True, drop_last=False)
        return StreamingDataLoader(dataset, batch_size=run.BATCH, num_workers=run.processes, collate_fn=collate)

    run.fit(loader)


if __name__ == "__main__":
    main()
