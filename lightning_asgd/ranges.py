"""Ranges of whole numbers, from the first to one before the last."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["common", "merged"]


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
