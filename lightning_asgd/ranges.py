"""Ranges of whole numbers, from the first to one before the last."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, pairwise

__all__ = ["are_in_order", "common", "merged", "without"]


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
    return [(max(a, first), min(b, last)) for a, b in ranges if a < last and first < b]


def without(ranges: Iterable[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Ranges, in their order, without what lies in one range."""
    parts = (part for a, b in ranges for part in ((a, min(b, first)), (max(a, last), b)))
    return [(a, b) for a, b in parts if a < b]
