"""WebDataset: tar files divided by node and by loader process, in a ``WebLoader``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import DataRun


def prepare(folder: Path, samples: int) -> None:
    import webdataset

    with webdataset.ShardWriter(f"{folder}/numbers-%02d.tar", maxcount=samples // DataRun.SHARDS) as writer:
        for index in range(samples):
            writer.write({"__key__": f"{index:06d}", "cls": index})


def main() -> None:
    run = DataRun("webdataset", prepare)
    import webdataset

    shards = f"{run.data}/numbers-{{00..{run.SHARDS - 1:02d}}}.tar"

    def loader() -> Any:
        dataset = webdataset.WebDataset(shards, nodesplitter=webdataset.split_by_node, shardshuffle=False)
        dataset = dataset.shuffle(20).decode().to_tuple("cls").map(lambda sample: sample[0])
        dataset = dataset.batched(run.BATCH, collation_fn=torch.tensor)
        return webdataset.WebLoader(dataset, batch_size=None, num_workers=run.processes)

    run.fit(loader)


if __name__ == "__main__":
    main()
