"""Ranges of whole numbers, from the first to one before the last."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, pairwise


def are_in_order(ranges: Iterable[tuple[int, int]], end: float) -> bool:
    """Whether ranges are ascending, do not overlap, and lie between 0 and an end."""
    return all(a <= b for a, b in pairwise((0, *chain.from_iterable(ranges), end)))


def merged(ranges: Sequence[tuple[int, int]], ends: Collection[int] = ()) -> list[tuple[int, int]]:
    """Ascending ranges with those put together that touch or overlap, but for those that touch at given ends."""
    joined: list[tuple[int, int]] = []
    for a, b in ranges:
        if joined and (joined[-1][1] > a or (joined[-1][1] == a and a not in ends)):
            joined[-1] = (joined[-1][0], max(joined[-1][1], b))
        else:
            joined.append((a, b))
    return joined


def common(ranges: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """The intersection of two lists of ranges."""
    return [(max(a, first), min(b, last)) for a, b in ranges if max(a, first) < min(b, last)]


def without(ranges: Iterable[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Ranges, in their order, without what lies in one range."""
    parts = (part for a, b in ranges for part in ((a, min(b, first)), (max(a, last), b)))
    return [(a, b) for a, b in parts if a < b]


class RangeSet:
    """Ascending ranges that do not overlap, and how many numbers they hold.

    Ranges that touch are one, but at given ``ends``. A change looks only at the ranges beside it.
    """

    def __init__(self, ends: Collection[int] = ()) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.total = 0
        self._ends = ends

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __contains__(self, number: int) -> bool:
        index = bisect_left(self.ranges, (number + 1, 0))
        return index > 0 and self.ranges[index - 1][1] > number

    def add(self, first: int, last: int) -> int:
        """Add the numbers of a range; returns how many were not there."""
        before = self.total
        low = high = bisect_left(self.ranges, (first, 0))
        if low and (self.ranges[low - 1][1] > first or (self.ranges[low - 1][1] == first and first not in self._ends)):
            low -= 1
        while high < len(self.ranges) and self.ranges[high][0] <= last:
            high += 1
        self._replace(low, high, merged(sorted([*self.ranges[low:high], (first, last)]), self._ends))
        return self.total - before

    def remove(self, first: int, last: int) -> None:
        """Remove the numbers of a range."""
        low = high = bisect_left(self.ranges, (first, 0))
        low -= low > 0 and self.ranges[low - 1][1] > first
        while high < len(self.ranges) and self.ranges[high][0] < last:
            high += 1
        self._replace(low, high, without(self.ranges[low:high], first, last))

    def at(self, first: int) -> tuple[int, int] | None:
        """The range that begins with a number, if there is one."""
        index = bisect_left(self.ranges, (first, 0))
        return self.ranges[index] if index < len(self.ranges) and self.ranges[index][0] == first else None

    def _replace(self, low: int, high: int, by: list[tuple[int, int]]) -> None:
        self.total += sum(b - a for a, b in by) - sum(b - a for a, b in self.ranges[low:high])
        self.ranges[low:high] = by
