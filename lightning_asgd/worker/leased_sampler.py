"""The batch sampler that yields what is granted, and the order that all workers share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_asgd.worker.lease_client import DataLeases
from lightning_asgd.worker.lease_plan import Plan
from lightning_asgd.worker.random_numbers import same_random_numbers

__all__ = ["LeasedBatches", "LeasedSteps", "Replacement", "digest", "in_common_order", "undivided"]


class Replacement:
    """Yields what is granted to this worker; otherwise like the object it replaces, with a ``length``.

    ``plan`` tells which epoch begins if it is Lightning that begins to iterate, None if it is a program: that gets what
    the object itself yields, this worker's part if all were equally fast.
    """

    def __init__(self, inner: Any, leases: DataLeases, plan: Callable[[], Plan | None], length: int) -> None:
        self.inner = inner
        self._leases = leases
        self._new_plan = plan
        self._length = length

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is being copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        plan = self._new_plan()
        if plan is None:
            return iter(self.inner)
        self._leases.open(plan)
        return self._granted()

    def _granted(self) -> Iterator[Any]:
        """What is granted, as the object would yield it."""
        raise NotImplementedError


class LeasedBatches(Replacement):
    """Takes the place of a batch sampler."""

    def _granted(self) -> Iterator[Any]:
        return LeasedSteps(self._leases)


class LeasedSteps(Iterator[Any]):
    """What is granted. Not a generator: it may yield again after it was exhausted."""

    def __init__(self, leases: DataLeases) -> None:
        self._leases = leases

    def __next__(self) -> Any:
        samples = self._leases.take()
        if samples is None:
            raise StopIteration
        return samples


@contextmanager
def undivided(sampler: Any) -> Iterator[None]:
    """Have a sampler that splits the samples between workers yield all of them."""
    kept = {name: getattr(sampler, name) for name in ("num_replicas", "rank", "num_samples", "total_size")}
    sampler.num_replicas, sampler.rank = 1, 0
    sampler.num_samples = sampler.total_size = len(sampler.dataset)
    try:
        yield
    finally:
        vars(sampler).update(kept)


def in_common_order(sampler: Any, seed: int) -> list[Any]:
    """All that a sampler yields, in the order that every worker gets with the same seed."""
    with same_random_numbers(seed):
        return list(sampler)


def digest(items: Sequence[Any]) -> bytes:
    """Short bytes that are equal on two workers exactly if their samples, or batches, are."""
    return hashlib.sha256(repr(items).encode()).digest()[:16]
