"""The samples of the shards that a worker is granted, read in the order in which it is granted them.

A shard is read from its beginning. To continue where another worker has stopped, what lies before is read and left
out. So every worker must get the same samples from a shard, in the same order.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

from lightning_asgd.core.foundation.ranges import without
from lightning_asgd.core.leases.plan import Ended, LeasedBatch, ReadingPlan, even_parts

_NEVER = 1 << 62  # a position behind all others: the shard is opened again
_OPEN = 4  # shards at a time: one, and near the end of an epoch those that other workers read too


class StreamReader:
    """Reads what is granted of an epoch: ``read`` returns a shard's samples from a position on, up to its ``ends``."""

    def __init__(self, read: Callable[[int, int], Iterator[Any]], ends: Sequence[int]) -> None:
        self._read = read
        self._ends = ends
        self._granted: deque[tuple[int, int]] = deque()  # and not yet read
        self._shards = OpenShards(read, ends)
        self._known = set(ends)  # where shards are known to end
        self._spare: list[Any] = []  # samples of the latest step
        self.samples: list[Any] = []  # read, and not yet taken
        self.place = -1  # one past the last unit that was granted

    @property
    def left(self) -> int:
        """Units that were granted and are not taken yet, so far as they exist."""
        return len(self.samples) + sum(last - first for first, last in self._granted)

    def add(self, first: int, last: int) -> None:
        """Units were granted."""
        self._granted.append((first, last))
        self.place = last

    def fill(self, count: int, beyond: int) -> int | None:
        """Read until there are ``count`` samples. Stops at the end of a shard: returns the number that does not exist.

        The reader looks up to ``beyond`` samples further than it was granted. This finds the end of every shard. If a
        shard has a rest that is too small for a batch, the rest is found before the batch is trained that it can join.
        """
        while len(self.samples) < count and self._granted:
            first, last = self._granted.popleft()
            shard = self._shards.at(first)
            sample = shard.take(1)
            if not sample:
                self._granted.appendleft((first, last))
                return first
            self.samples += sample
            if first + 1 < last:
                self._granted.appendleft((first + 1, last))
            else:
                look = min(beyond, self._ends[bisect_right(self._ends, first)] - last)
                found = last + shard.upcoming(look)
                if found < last + look and found not in self._known:
                    return found
        return None

    def end(self, number: int) -> int:
        """Forget what was granted of a shard from a number on. Returns one past the shard's last number."""
        end = self._ends[bisect_right(self._ends, number)]
        self._known.add(number)
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
        self._known = set(self._ends)
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
        self._shards.close()


class OpenShards:
    """The shards that are being read; the arguments are those of :class:`StreamReader`."""

    def __init__(self, read: Callable[[int, int], Iterator[Any]], ends: Sequence[int]) -> None:
        self._read, self._ends = read, ends
        self._open: dict[int, OpenShard] = {}  # in the order of their latest use

    def at(self, number: int) -> OpenShard:
        """A unit's shard. Read next from it is the unit, and nothing if the unit does not exist."""
        shard = bisect_right(self._ends, number)
        place = number - (self._ends[shard - 1] if shard else 0)
        opened = self._open.pop(shard, None)
        if opened is None or opened.place > place:
            if opened is not None:
                opened.close()
            opened = OpenShard(self._read(shard, place), place)
        self._open[shard] = opened
        if len(self._open) > _OPEN:
            self._open.pop(next(iter(self._open))).close()
        opened.skip_to(place)
        return opened

    def close(self) -> None:
        """Close all shards."""
        while self._open:
            self._open.popitem()[1].close()


class OpenShard:
    """A shard that is being read. ``place`` is the position of the next sample."""

    def __init__(self, samples: Iterator[Any], place: int) -> None:
        self._samples, self.place = samples, place
        self._next: deque[Any] = deque()  # samples that have been read, from there on

    def upcoming(self, count: int) -> int:
        """How many samples follow, at most ``count``."""
        self._next.extend(islice(self._samples, max(0, count - len(self._next))))
        return min(count, len(self._next))

    def skip_to(self, place: int) -> None:
        """Leave out what lies before a position, so far as it exists."""
        while self.place < place and self.take(1):
            pass

    def take(self, count: int) -> list[Any]:
        """The next samples, as many as there are."""
        taken: list[Any] = []
        while len(taken) < count and self.upcoming(1):
            taken.append(self._next.popleft())
        self.place += len(taken)
        return taken

    def give_back(self, place: int, samples: list[Any]) -> None:
        """These samples, from a position on, are to be read again. If others have been read since, all are."""
        if place + len(samples) == self.place:
            self._next.extendleft(reversed(samples))
            self.place = place
        else:
            self.place = _NEVER

    def close(self) -> None:
        """Read no more."""
        _finish(self._samples)


def _finish(samples: Any) -> None:
    """Close an iterator, if it is a generator."""
    if hasattr(samples, "close"):
        samples.close()


@dataclass(frozen=True)
class StreamPlan(ReadingPlan):
    """One epoch on a worker that reads shards in its own process."""

    reader: StreamReader = field(kw_only=True)

    def batches(self, first: int, last: int) -> Iterator[LeasedBatch]:
        """None yet: the units are to be read."""
        self.reader.add(first, last)
        return iter(())

    @property
    def has_step(self) -> bool:
        """Whether there are samples for a step, and for half of the next one, or none."""
        samples = len(self.reader.samples)
        return samples == self.step or samples >= self._ahead

    @property
    def wants_more(self) -> bool:
        """Whether more samples are to be read: there are too few for a step and half of the next one."""
        return len(self.reader.samples) < self._ahead

    @property
    def _ahead(self) -> int:
        return self.step + math.ceil(self.step / 2)  # a smaller rest is trained in equal parts with the step before

    @property
    def wishes(self) -> dict[str, Any]:
        """What a request says of the units that suit this worker."""
        return {"size": self.step, "begun": self.reader.left % self.step, "places": (self.reader.place,)}

    @property
    def runs_low(self) -> bool:
        """Whether there are too few units for two steps."""
        return self.reader.left < 2 * self.step

    def fill(self, *, last: bool) -> int | None:
        """Read the samples of a step, and more; see :meth:`StreamReader.fill`."""
        return self.reader.fill(self._ahead, math.ceil(self.step / 2))

    def end(self, number: int) -> Ended:
        """Forget what was granted of a shard from a number on."""
        return Ended(number, self.reader.end(number))

    def next_steps(self, first: int, *, last: bool, void: bool) -> tuple[list[LeasedBatch], int]:
        """See :meth:`ReadingPlan.next_steps`."""
        samples, size = self.reader.take(self._ahead if last and self.wants_more else self.step), self.batch or 1
        left_out = len(samples) % size if self.drop_last else 0
        kept = len(samples) - left_out
        steps = even_parts(0, kept, self.step)
        if self.drop_last:  # equal parts would not be full batches
            steps = [(begin, min(begin + self.step, kept)) for begin in range(0, kept, self.step)]
        batches = [batch for begin, end in steps for batch in self._cut(samples[begin:end], first + begin)]
        if void and not batches:
            batches = [replace(each, void=True) for each in self._cut(self.reader.any(size), first)]
        return batches, left_out
