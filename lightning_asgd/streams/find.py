"""Whether a dataloader's data can be read shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_asgd.streams.hugging_face import hugging_face
from lightning_asgd.streams.random_access import lit_data, mosaic_ml
from lightning_asgd.streams.sharded_data import ShardedData
from lightning_asgd.streams.web_dataset import web_dataset

# By the names of their classes, so that none of these libraries is imported.
_LIBRARIES = {
    "datasets.iterable_dataset.IterableDataset": hugging_face,
    "litdata.streaming.dataset.StreamingDataset": lit_data,
    "streaming.base.dataset.StreamingDataset": mosaic_ml,
    "webdataset.compat.WebDataset": web_dataset,
}
_LOADERS = {
    "torch.utils.data.dataloader.DataLoader",
    # They add a state of their own, which is not needed here.
    "litdata.streaming.dataloader.StreamingDataLoader",
    "streaming.base.dataloader.StreamingDataLoader",
}


def loader_of(loader: Any) -> DataLoader[Any] | None:
    """The torch dataloader that a training dataloader is; None if it yields something else than that would."""
    if _known(loader, {"webdataset.compat.WebLoader"}):
        stages = list(loader.pipeline) if loader.repetitions == 1 and loader.nsamples <= 0 else []
        loader = stages[0] if len(stages) == 1 else None
    return loader if _known(loader, _LOADERS) else None


def is_streamed(loader: Any) -> bool:
    """Whether a training dataloader's data set is no list of samples, or has shards besides."""
    inner = loader_of(loader)
    dataset: Any = getattr(loader if inner is None else inner, "dataset", None)
    return isinstance(dataset, IterableDataset) or hasattr(dataset, "open_shard")


def batch_of(loader: Any, data: ShardedData) -> int:
    """Samples in a training dataloader's batches; 0 if its data set yields batches by itself."""
    inner = loader_of(loader)
    return data.batch or (inner.batch_size if inner is not None else 0) or 0


def collate_of(convert: Callable[[Any], Any], data: ShardedData) -> Callable[[Any], Any]:
    """What makes a batch of a list of samples, or of a sample that is one; ``convert`` is the dataloader's."""
    collate = data.collate
    if collate is None:
        return convert
    return lambda samples: convert(collate(samples))  # the data set made batches, which the loader has converted


def drops_last(loader: Any, data: ShardedData) -> bool:
    """Whether a training dataloader leaves out a last batch that is not full."""
    inner = loader_of(loader)
    return data.drop_last or (inner is not None and bool(inner.drop_last))


def shards_of(loader: Any) -> ShardedData | str:
    """The shards of a training dataloader's data, or why they cannot be read shard by shard.

    A data set of the user's own has shards if it has ``num_shards`` and ``open_shard(epoch, shard, start)``, and tells
    their lengths if it has ``shard_lengths``.
    """
    inner = loader_of(loader)
    if inner is None:
        return f"{type(loader).__name__} has its own way to iterate"
    found = shards_in(inner.dataset)
    if not isinstance(found, str) and found.batch and inner.batch_size is not None:
        return "both the data set and its loader make batches"
    return found if isinstance(found, str) or any(n != 0 for n in found.lengths) else "it has no samples"


def shards_in(dataset: Any) -> ShardedData | str:
    """The shards of a data set, or why it cannot be read shard by shard."""
    name = _known(dataset, _LIBRARIES)
    find = _own if hasattr(dataset, "open_shard") else _LIBRARIES[name] if name else None
    if find is None:
        return f"{type(dataset).__name__} has no open_shard(epoch, shard, start)"
    try:
        return find(dataset)
    except (AttributeError, TypeError) as error:  # of a release with other names
        return f"its shards were not found in this release of the library ({error})"


def _known(thing: Any, names: Collection[str]) -> str | None:
    """The first of an object's classes that has one of the names, unless a class derived from it iterates by itself."""
    for cls in type(thing).__mro__:
        name = f"{cls.__module__}.{cls.__name__}"
        if name in names:
            return name
        if {"__iter__", "__next__"} & set(vars(cls)):
            break
    return None


def _own(dataset: Any) -> ShardedData | str:
    count = getattr(dataset, "num_shards", None)
    count = count() if callable(count) else count
    if not isinstance(count, int) or count < 1:
        return f"{type(dataset).__name__}.num_shards is {count!r}, not a number of shards"
    lengths = getattr(dataset, "shard_lengths", None)
    lengths = lengths() if callable(lengths) else lengths
    if lengths is not None and len(lengths) != count:
        return f"{type(dataset).__name__}.shard_lengths has {len(lengths)} numbers for {count} shards"

    def read(epoch: int, shard: int, start: int) -> Iterator[Any]:
        return iter(dataset.open_shard(epoch, shard, start))

    return ShardedData([None] * count if lengths is None else [int(n) for n in lengths], read)
