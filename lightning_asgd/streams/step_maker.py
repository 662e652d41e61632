"""The batches of a step, as a loader process makes them of the shards that it reads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_asgd.streams.stream_reader import OpenShards


@dataclass(frozen=True)
class StepOrder:
    """What a loader process is to make."""

    ranges: tuple[tuple[int, int], ...]  # units
    sizes: tuple[int, ...]  # samples of each batch; what is left of the ranges is left out
    short: bool = False  # whether there may be fewer samples


@dataclass(frozen=True)
class MadeStep:
    """What it has made."""

    batches: list[Any] | None  # None if a shard ended before
    ended: tuple[int, ...] = ()  # numbers without a sample, where shards have ended


class StepMaker:
    """Reads the shards of one epoch like :class:`StreamReader`; ``collate`` makes a batch of a list of samples."""

    def __init__(
        self, read: Callable[[int, int], Iterator[Any]], ends: Sequence[int], collate: Callable[[list[Any]], Any]
    ) -> None:
        self._ends = ends
        self._shards = OpenShards(read, ends)
        self._collate = collate

    def make(self, order: StepOrder) -> MadeStep:
        """The batches of a step. If a shard has too few samples for it, they are read again for a later one."""
        taken, ended, samples = [], [], []
        beyond = max(1, -(-sum(order.sizes) // 2))  # see `StreamReader.fill`
        for first, last in order.ranges:
            shard = self._shards.at(first)
            place, found = shard.place, shard.take(last - first)
            taken.append((shard, place, found))
            if len(found) < last - first and not order.short:
                for each, start, read in reversed(taken):
                    each.give_back(start, read)
                return MadeStep(None, (first + len(found),))
            look = min(beyond, self._ends[bisect_right(self._ends, first)] - last)
            if (number := last + shard.upcoming(look)) < last + look:
                ended.append(number)
            samples += found
        batches, start = [], 0
        for size in order.sizes:
            if part := samples[start : start + size]:
                batches.append(self._collate(part))
            start += size
        return MadeStep(batches, tuple(ended))

    def close(self) -> None:
        """Read no more."""
        self._shards.close()
