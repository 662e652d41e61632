"""The batch sampler that yields what is granted, and the order that all workers share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Sampler

from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.leases.plan import Plan
from lightning_asgd.core.leases.random_numbers import same_random_numbers

_FEW = 100  # a longer list is none of samplers


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
    """Have a sampler that splits the samples between workers as torch's ``DistributedSampler`` yield all of them."""
    names = ("num_replicas", "rank", "num_samples", "total_size")
    if not all(hasattr(sampler, name) for name in (*names, "dataset")):
        yield
        return
    kept = {name: getattr(sampler, name) for name in names}
    sampler.num_replicas, sampler.rank = 1, 0
    sampler.num_samples = sampler.total_size = len(sampler.dataset)
    try:
        yield
    finally:
        vars(sampler).update(kept)


def in_common_order(sampler: Any, seed: int) -> list[Any]:
    """All that a sampler yields, in the order that every worker gets with the same seed.

    A sampler's own ``torch.Generator`` begins at this seed plus its own one, so that a worker which joins or resumes
    later has the same order. Afterwards its state is as before.
    """
    generators = [each for each in _within(sampler, {}) if isinstance(each, torch.Generator)]
    kept = [each.get_state() for each in generators]
    for each in generators:
        each.manual_seed((each.initial_seed() + seed) % 2**63)
    try:
        with same_random_numbers(seed):
            return list(sampler)
    finally:
        for each, state in zip(generators, kept, strict=True):
            each.set_state(state)


def own_samplers(sampler: Any) -> list[str]:
    """Class names of the samplers that are not torch's, among this one and those that it takes from."""
    found = (type(each) for each in (sampler, *_within(sampler, {})) if isinstance(each, Sampler))
    return [kind.__name__ for kind in found if not kind.__module__.startswith("torch.")]


def _within(sampler: Any, seen: dict[int, Any]) -> list[Any]:
    """The generators and samplers of a sampler, and of those that it takes from, directly or through another object."""
    found: list[Any] = []
    for value in _parts(sampler):
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Generator):
            found.append(value)
        elif isinstance(value, Sampler) or any(isinstance(part, Sampler | torch.Generator) for part in _parts(value)):
            found += [value, *_within(value, seen)]
    return found


def _parts(thing: Any) -> list[Any]:
    """Its attributes, and what lists among them hold."""
    values = list(getattr(thing, "__dict__", {}).values())
    short = (each for each in values if isinstance(each, list | tuple) and len(each) <= _FEW)
    return [*values, *(item for each in short for item in each)]


def digest(items: Sequence[Any]) -> bytes:
    """Short bytes that are equal on two workers exactly if their samples, or batches, are."""
    return hashlib.sha256(repr(items).encode()).digest()[:16]


def load_next(iterator: Any) -> None:
    """Have a loader with worker processes ask its sampler, though no batch has arrived."""
    iterator._try_put_index()
