"""Measures the data stalls of a module and its loader: the differential technique of Mohan et al. (2021).

The same steps are taken three times: on one batch that stays on the device; on samples that are in memory; and on
samples that come from storage. The time that each takes beyond the one before is the cost of its part.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from torch.utils.data import DataLoader, IterableDataset

from lightning_asgd.caches.cache import CachedDataset, cached_dataset
from lightning_asgd.caches.peer_caches import SampleCache
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.foundation.validation import whole
from lightning_asgd.data_stalls.stalls import Stalls
from lightning_asgd.plan.timing import TrainingStep

__all__ = ["forget", "stalls"]


def stalls(
    module: Any,
    loader: Any,
    *,
    steps: int = 50,
    warm_up: int = 5,
    repeats: int = 1,
    files: Path | None = None,
    exchanges: ExchangeStats | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Stalls:
    """Measure where a step's time goes. The module is trained a little; nothing else is changed.

    What is fetched and what is prepared is known where the loader's dataset is a :class:`CachedDataset`, or holds one
    as ``dataset``: what its source does is fetching. Elsewhere it is what the second reading of the same samples saves,
    since the operating system keeps files in memory; then name the ``files``: they may already be in memory.

    Args:
        module: a LightningModule.
        loader: a DataLoader over a map-style dataset; processes and all other settings are as it has them.
        steps: to be timed, per pass; fewer if the loader has fewer batches.
        warm_up: steps before that. With loader processes at least two batches of each.
        repeats: of everything; the fastest of each pass counts, since what else a machine does only adds to it.
        files: a folder, or a file, that is read from storage: the operating system is asked to drop it from memory.
        exchanges: of a fit, ``trainer.strategy.stats``, for the sync stall.
        clock: in seconds.

    Returns:
        seconds per step, and what follows from them.

    Raises:
        ConfigurationError: the loader does not give batches of a map-style dataset, or too few; or the module cannot
            be timed; or a number is out of range; or there are no such files.
    """
    _check(steps, warm_up, repeats, files)
    batches, warm_up = _batches(loader, steps, max(warm_up, 2 * getattr(loader, "num_workers", 0)))
    step, cached = TrainingStep(module), cached_dataset(loader.dataset)
    timed = partial(_seconds_per_pass, loader, batches, warm_up, clock)

    def train(batch: Any) -> None:
        step(step.to_device(batch))

    seconds: dict[str, list[float]] = {name: [] for name in ("cold_s", "load_s", "cached_s", "prep_s", "synthetic_s")}
    there = _on_device(step, loader, batches[0], cached)
    for _ in range(repeats):
        with _without_cache(cached):
            for name, use in (("cold_s", train), ("load_s", _nothing)):
                forget(files)
                seconds[name].append(timed(use))
        with _all_cached(cached):
            timed(_nothing)  # reads what is to be in memory
            seconds["cached_s"].append(timed(train))
            seconds["prep_s"].append(timed(_nothing))
        seconds["synthetic_s"].append(_seconds_per_batch(itertools.repeat(there, len(batches)), warm_up, step, clock))
    return Stalls(
        batch_size=len(batches[0]),
        processes=loader.num_workers,
        sync_s=exchanges.wait_s / exchanges.steps if exchanges is not None and exchanges.steps else 0.0,
        **{name: min(values) for name, values in seconds.items()},
    )


def _check(steps: int, warm_up: int, repeats: int, files: Path | None) -> None:
    whole("steps", steps)
    whole("warm_up", warm_up, 0)
    whole("repeats", repeats)
    if files is not None and not files.exists():
        raise ConfigurationError(f"files={str(files)!r} does not exist. Expected what the data are read from.")


def _on_device(step: TrainingStep, loader: Any, batch: list[int], cached: CachedDataset | None) -> Any:
    with _without_cache(cached):
        return step.to_device(next(iter(_loader(loader, [batch]))))


def _batches(loader: Any, steps: int, warm_up: int) -> tuple[list[list[int]], int]:
    """Indices of the samples of all batches, and how many batches are not timed."""
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset) or sampler is None:
        raise ConfigurationError(
            f"Cannot measure the data stalls of {type(loader).__name__} over {type(dataset).__name__}. Expected a "
            f"DataLoader that makes batches of a map-style dataset."
        )
    batches = [list(batch) for batch in itertools.islice(sampler, steps + warm_up)]
    needed = max(1, 2 * warm_up)
    if len(batches) < needed:
        raise ConfigurationError(
            f"The loader gives {len(batches)} batches. Expected at least {needed}, {warm_up} of them to warm up. Give "
            "it more samples, or lower its batch size, its processes or the steps to warm up."
        )
    return batches, warm_up


def _loader(like: Any, batches: list[list[int]]) -> DataLoader[Any]:
    """A loader of these batches, with another one's settings."""
    same = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    settings = {name: getattr(like, name) for name in (*same, "prefetch_factor")}
    return DataLoader(like.dataset, batch_sampler=batches, **settings)


def _seconds_per_pass(
    loader: Any,
    batches: list[list[int]],
    warm_up: int,
    clock: Callable[[], float],
    use: Callable[[Any], None],
) -> float:
    return _seconds_per_batch(_loader(loader, batches), warm_up, use, clock)


def _seconds_per_batch(
    batches: Iterable[Any], warm_up: int, use: Callable[[Any], None], clock: Callable[[], float]
) -> float:
    begun, count = clock(), 0
    for count, batch in enumerate(batches, 1):
        use(batch)
        if count == warm_up:
            begun = clock()
    return (clock() - begun) / (count - warm_up)


def _nothing(batch: Any) -> None:
    pass


@contextmanager
def _without_cache(dataset: CachedDataset | None) -> Iterator[None]:
    with _with_cache(dataset, None):
        yield


@contextmanager
def _all_cached(dataset: CachedDataset | None) -> Iterator[None]:
    """Room for all samples: memory counts only when it is used."""
    room = SampleCache(len(dataset), psutil.virtual_memory().available) if dataset is not None else None
    with _with_cache(dataset, room):
        yield


@contextmanager
def _with_cache(dataset: CachedDataset | None, cache: SampleCache | None) -> Iterator[None]:
    if dataset is None:
        yield
        return
    before, dataset.cache = dataset.cache, cache
    try:
        yield
    finally:
        dataset.cache = before


def forget(files: Path | None) -> None:
    """Ask the operating system to drop files from its memory. It does so with what has been written to storage.

    Args:
        files: a file, a folder and all below it, or None for nothing.
    """
    if files is None:
        return
    for path in [files] if files.is_file() else [p for p in files.rglob("*") if p.is_file()]:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
