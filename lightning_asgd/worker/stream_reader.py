"""The samples of the shards that a worker is granted, read in the order in which it is granted them.

A shard is read from its beginning. To continue where another worker has stopped, what lies before is read and left
out. So every worker must get the same samples from a shard, in the same order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

from lightning_asgd.ranges import without

__all__ = ["StreamReader"]

_OPEN = 4  # shards at a time: one, and near the end of an epoch those that other workers read too
_NOTHING = object()


class StreamReader:
    """Reads what is granted of one epoch.

    ``read`` returns the samples of a shard from a position on. ``ends`` tells where the shards' numbers end.
    """

    def __init__(self, read: Callable[[int, int], Iterator[Any]], ends: Sequence[int]) -> None:
        self._read = read
        self._ends = ends
        self._granted: deque[tuple[int, int]] = deque()  # and not yet read
        self._open: dict[int, _Opened] = {}  # shards
        self._spare: list[Any] = []  # samples of the latest step
        self.samples: list[Any] = []  # read, and not yet taken

    @property
    def left(self) -> int:
        """Units that were granted and are not taken yet, so far as they exist."""
        return len(self.samples) + sum(last - first for first, last in self._granted)

    def add(self, first: int, last: int) -> None:
        """Units were granted."""
        self._granted.append((first, last))

    def fill(self, count: int) -> int | None:
        """Read until there are ``count`` samples. Stops at the end of a shard: returns the number that does not exist.

        After the last sample that was granted it looks whether there is another one, so that every end is found.
        """
        while len(self.samples) < count and self._granted:
            first, last = self._granted.popleft()
            if not self._find(first):
                self._granted.appendleft((first, last))
                return first
            self.samples.append(self._read_found(first))
            if first + 1 < last:
                self._granted.appendleft((first + 1, last))
            elif last not in self._ends and not self._find(last):
                return last
        return None

    def end(self, number: int) -> int:
        """Forget what was granted of a shard from a number on. Returns one past the shard's last number."""
        end = self._ends[bisect_right(self._ends, number)]
        self._granted = deque(without(self._granted, number, end))
        return end

    def take(self, count: int) -> list[Any]:
        """The first of the samples that were read."""
        taken, self.samples = self.samples[:count], self.samples[count:]
        self._spare = taken or self._spare
        return taken

    def drop(self) -> None:
        """Forget all that was granted."""
        self._granted.clear()
        self.samples = []

    def any(self, count: int) -> list[Any]:
        """Samples for a batch whose update is discarded; some of them several times, and none if there are none."""
        for shard in range(0 if self._spare else len(self._ends)):
            samples = self._read(shard, 0)
            self._spare = list(islice(samples, count))
            _finish(samples)
            if self._spare:
                break
        return list(islice(cycle(self._spare), count))

    def close(self) -> None:
        """Close all shards."""
        for shard in list(self._open):
            self._close(shard)

    def _find(self, number: int) -> bool:
        """Read a shard up to a sample. Returns whether it exists."""
        shard = bisect_right(self._ends, number)
        place = number - (self._ends[shard - 1] if shard else 0)
        opened = self._open.pop(shard, None)
        if opened is None or opened.place > place:
            opened = _Opened(self._read(shard, place), place)
        self._open[shard] = opened  # the latest
        if len(self._open) > _OPEN:
            self._close(next(iter(self._open)))
        if opened.skip_to(place):
            return True
        self._close(shard)
        return False

    def _read_found(self, number: int) -> Any:
        shard = bisect_right(self._ends, number)
        sample = self._open[shard].take()
        if number + 1 == self._ends[shard]:
            self._close(shard)
        return sample

    def _close(self, shard: int) -> None:
        _finish(self._open.pop(shard).samples)


class _Opened:
    """A shard that is being read. ``place`` is the position of the next sample."""

    def __init__(self, samples: Iterator[Any], place: int) -> None:
        self.samples, self.place = samples, place
        self._next: Any = _NOTHING  # that sample, if it has been read

    def skip_to(self, place: int) -> bool:
        """Whether there is a sample at a position."""
        while self.place < place and self._has_next():
            self.take()
        return self.place == place and self._has_next()

    def take(self) -> Any:
        """The next sample."""
        self._has_next()
        sample, self._next = self._next, _NOTHING
        self.place += 1
        return sample

    def _has_next(self) -> bool:
        if self._next is _NOTHING:
            self._next = next(self.samples, _NOTHING)
        return self._next is not _NOTHING


def _finish(samples: Any) -> None:
    """Close an iterator, if it is a generator."""
    if hasattr(samples, "close"):
        samples.close()
