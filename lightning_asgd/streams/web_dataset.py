"""WebDataset's pipelines: a shard is a tar file."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from lightning_asgd.streams.sharded_data import ShardedData

_BEFORE = {"shuffle", "detshuffle", "single_node_only", "split_by_node", "split_by_worker"}
# What yields, from a shard, samples that depend on nothing else.
_AFTER = {
    "associate",
    "decode",
    "extract_keys",
    "map",
    "map_dict",
    "map_tuple",
    "rename",
    "rename_keys",
    "select",
    "shuffle",
    "to_tuple",
    "xdecode",
    "check_empty",
    "group_by_keys",
    "tar_file_expander",
}
_OPENERS = {"FileCache", "StreamingOpen"}


def web_dataset(dataset: Any) -> ShardedData | str:
    """The shards of a ``webdataset.WebDataset``, or why it cannot be read by them.

    A split by node is left out: workers share all shards. A last stage ``.batched`` becomes the loader's batches.
    """
    if dataset.repetitions != 1 or dataset.nsamples > 0:
        return "with_epoch or repeat makes its epochs"
    stages = list(dataset.pipeline)
    urls = stages.pop(0)
    if _name(urls) != "SimpleShardList":
        return f"{_name(urls)} is not a list of shards"
    names = [_name(stage) for stage in stages]
    opener = next((i for i, name in enumerate(names) if name in _OPENERS), None)
    if opener is None:
        return "no stage opens its shards"
    batch, collate, drop_last = None, None, False
    if names[-1] == "batched":
        batch, collate, drop_last = _batches(stages.pop())
        names.pop()
    foreign = [*set(names[:opener]) - _BEFORE, *set(names[opener + 1 :]) - _AFTER]
    if foreign:
        return f"the stage {foreign[0]} may need the shards together"
    shuffled = urls.seed is not None or any(_shuffles(stage) for stage in stages[:opener])
    reading = [stage for stage in stages[opener:] if _name(stage) != "check_empty"]  # one shard may be empty

    def read(epoch: int, shard: int, start: int) -> Iterator[Any]:
        samples: Any = iter([{"url": urls.urls[shard]}])
        for number, stage in enumerate(reading):
            samples = dataset.invoke(_repeatable(stage, f"{epoch} {shard} {number}"), samples)
        return islice(samples, start, None)

    return ShardedData((None,) * len(urls.urls), read, shuffled, batch, collate, drop_last)


def _name(stage: Any) -> str:
    function = getattr(stage, "f", stage)  # a function whose other arguments are given
    named = function if hasattr(function, "__name__") else type(function)
    own = not str(named.__module__).startswith("webdataset.")
    return f"{'own ' if own else ''}{named.__name__.removeprefix('_')}"


def _shuffles(stage: Any) -> bool:
    size = stage.args[0] if getattr(stage, "args", ()) else getattr(stage, "bufsize", 1)
    return _name(stage) in ("shuffle", "detshuffle") and bool(size)


def _repeatable(stage: Any, seed: str) -> Any:
    """A stage that shuffles in the same way on every worker."""
    if _name(stage) != "shuffle" or stage.kw.get("seed") is not None:
        return stage
    stage = copy.copy(stage)
    stage.kw = {**{name: value for name, value in stage.kw.items() if name != "rng"}, "seed": seed}
    return stage


def _batches(stage: Any) -> tuple[int, Any, bool]:
    """Batch size, collate function and ``drop_last`` of a ``batched`` stage."""
    names = ("batchsize", "collation_fn", "partial")
    size, collate, partial = stage.f.__defaults__
    given = {"batchsize": size, "collation_fn": collate, "partial": partial}
    given |= dict(zip(names, stage.args, strict=False)) | stage.kw
    return int(given["batchsize"]), given["collation_fn"] or (lambda samples: samples), not given["partial"]
