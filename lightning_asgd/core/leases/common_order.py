"""The order of samples that workers share, also where each worker's sampler has one of its own.

Orders are compared by their digests, so that one is sent only where they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_asgd.core.leases.sampler import digest
from lightning_asgd.core.worker.collectives import Collectives

_NAME = "order of samples"
_SHARE = 0.5  # workers whose samples overlap less have shares of their own: the sampler has divided the data


@dataclass(frozen=True)
class CommonOrder:
    """What the workers have agreed on."""

    parts: list[list[Any]]  # the order of each dataloader's samples, or batches
    differs: bool = False  # whether a worker's sampler had another one
    divided: bool = False  # whether workers have shares of their own instead; then ``parts`` are this worker's
    about: str = ""  # what the workers do then


def agreed_order(collectives: Collectives, mine: list[list[Any]], *, unites: bool) -> CommonOrder:
    """The chief's order if they differ; if workers have shares of their own, with ``unites`` all of them together."""
    if collectives.reduced("all_reduce", _NAME, digest(mine), "same").value:
        return CommonOrder(mine)
    theirs = collectives.broadcast_of_chief(mine, _NAME)
    if not collectives.decide(overlap(mine, theirs) < _SHARE, all=False):
        about = f"They share that of worker {collectives.chief}, and train each of its samples once."
        return CommonOrder(theirs, differs=True, about=about)
    if not unites:
        return CommonOrder(mine, divided=True)
    found = collectives.gather("all_gather", _NAME, mine).values()
    parts = [[item for part in each for item in part] for each in zip(*found, strict=True)]
    return CommonOrder(parts, differs=True, about="They share the samples that any of them has.")


def overlap(mine: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> float:
    """The part of a worker's samples that another one has too, of the dataloader with the smallest."""
    return min(_overlap(*parts) for parts in zip(mine, theirs, strict=True))


def _overlap(mine: Sequence[Any], theirs: Sequence[Any]) -> float:
    samples = set(_samples(mine))
    return len(samples.intersection(_samples(theirs))) / len(samples) if samples else 1.0


def _samples(items: Sequence[Any]) -> Iterator[int | str]:
    """The samples in an order of samples or of batches; some have no hash."""
    for each in items:
        if isinstance(each, list):
            yield from _samples(each)
        else:
            yield each if isinstance(each, int) else repr(each)
