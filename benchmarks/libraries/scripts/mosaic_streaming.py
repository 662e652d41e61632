"""MosaicML streaming: a ``StreamingDataset`` of MDS shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import DataRun


def prepare(folder: Path, samples: int) -> None:
    from streaming import MDSWriter

    limit = 8 * samples // DataRun.SHARDS * 2
    with MDSWriter(out=str(folder / "numbers"), columns={"index": "int"}, size_limit=limit) as writer:
        for index in range(samples):
            writer.write({"index": index})


def main() -> None:
    run = DataRun("mosaicml-streaming", prepare)
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    def collate(items: list[dict[str, Any]]) -> torch.Tensor:
        return torch.tensor([item["index"] for item in items])

    def loader() -> Any:
        dataset = StreamingDataset(local=str(run.data / "numbers"), shuffle=True, batch_size=run.BATCH)
        return DataLoader(dataset, batch_size=run.BATCH, num_workers=run.processes, collate_fn=collate)

    run.fit(loader)


if __name__ == "__main__":
    main()
