"""Iterable data sets of Hugging Face datasets: a shard is one of their sources, such as a file."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from lightning_asgd.streams.sharded_data import ShardedData

# What yields the same samples from each source, whichever others there are.
_PER_SOURCE = {
    "ArrowExamplesIterable",
    "BufferShuffledExamplesIterable",
    "ExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "InterleavedShardsExamplesIterable",
    "MappedExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable",
    "TypedExamplesIterable",
}


def hugging_face(dataset: Any) -> ShardedData | str:
    """The shards of a ``datasets.IterableDataset``, or why it has none. A split by node is undone: all share them."""
    if dataset._starting_state_dict is not None:
        return "a state was loaded into the data set"
    source, shuffled, generators = dataset._ex_iterable, False, []
    while source is not None:
        name = type(source).__name__
        if name not in _PER_SOURCE:
            return f"{name.removesuffix('ExamplesIterable')} needs the shards of the data set together"
        if (reason := _why_together(source)) is not None:
            return reason
        shuffled |= name == "BufferShuffledExamplesIterable"
        if getattr(source, "generator", None) is not None:
            generators.append(source.generator.bit_generator.state)
        source = getattr(source, "ex_iterable", None)
    whole = copy.copy(dataset)
    whole._distributed = None
    count = int(whole.num_shards)

    def read(epoch: int, shard: int, start: int) -> Iterator[Any]:
        part = whole.shard(num_shards=count, index=shard)
        part.set_epoch(epoch)
        return islice(iter(part), start, None)

    return ShardedData((None,) * count, read, shuffled=shuffled, name=repr(generators))


def _why_together(source: Any) -> str | None:
    """Why what ``map`` or ``filter`` makes of a shard depends on the others; None if it does not."""
    if getattr(source, "with_indices", False):
        return "with_indices counts the samples of all shards"
    if getattr(source, "drop_last_batch", False):
        return "drop_last_batch leaves out samples at the end of every shard"
    if getattr(source, "batched", False) and getattr(source, "remove_columns", None):
        return "map with batched=True and remove_columns may make other samples of a batch, which ends with a shard"
    return None
