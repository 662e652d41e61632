"""LitData's and MosaicML's streaming data sets, whose samples have numbers: a shard is a chunk of theirs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from lightning_asgd.streams.sharded_data import ShardedData


def lit_data(dataset: Any) -> ShardedData | str:
    """The chunks of a ``litdata.StreamingDataset``, or why it cannot be read by them."""
    if dataset._state_dict is not None:
        return "a state was loaded into the data set"
    if dataset.window_direct_io:
        return "window_direct_io reads no whole samples"
    if dataset.cache is None:
        dataset[0:0]  # opens it; chunks are to be stored
    lengths = [interval[2] - interval[1] for interval in dataset.cache.get_chunk_intervals()]
    found = _numbered(dataset, lengths, bool(dataset.shuffle), int(dataset.seed))

    def read(epoch: int, shard: int, start: int) -> Iterator[Any]:
        dataset.on_demand_bytes = False  # its own iteration ends with True: requests for single samples
        return found.read(epoch, shard, start)

    return replace(found, read=read)


def mosaic_ml(dataset: Any) -> ShardedData | str:
    """The shards of a ``streaming.StreamingDataset``, or why it cannot be read by them."""
    if any(each.choose != n for each, n in zip(dataset.streams, dataset.samples_per_stream, strict=True)):
        return "its streams are weighted"
    if dataset.batching_method != "random":
        return f"batching_method={dataset.batching_method!r} makes batches of one stream"
    if dataset.replication is not None:
        return "replication gives several workers the same samples"
    return _numbered(dataset, dataset.samples_per_shard.tolist(), bool(dataset.shuffle), int(dataset.shuffle_seed))


def _numbered(dataset: Any, lengths: Sequence[int], shuffled: bool, seed: int) -> ShardedData:
    starts = [0, *accumulate(lengths)]

    def read(epoch: int, shard: int, start: int) -> Iterator[Any]:
        numbers = list(range(starts[shard], starts[shard + 1]))
        if shuffled:
            random.Random(f"{seed} {epoch} {shard}").shuffle(numbers)
        return (dataset[number] for number in numbers[start:])

    return ShardedData(lengths, read, shuffled=shuffled)
