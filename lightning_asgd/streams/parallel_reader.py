"""The steps that a worker is granted, made in loader processes, each of which reads shards of its own.

The processes take turns, a step each. The coordinator knows where each of them reads (``LeaseRequest.places``) and
grants accordingly. Steps are trained in the order in which they were granted. If a shard ends within a step, the step's
other units are returned, and granted again together with units of another shard, so that steps stay full.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_asgd.core.foundation.ranges import without
from lightning_asgd.core.leases.plan import Ended, LeasedBatch, ReadingPlan
from lightning_asgd.streams.step_maker import MadeStep, StepOrder


class Processes(Protocol):
    """Loader processes, each with a :class:`StepMaker`."""

    count: int

    def ask(self, process: int, order: StepOrder) -> None:
        """Have a process make a step."""

    def get(self, process: int) -> MadeStep:
        """The first of the steps that a process was asked for and that have not been got. Waits for it."""

    def close(self) -> None:
        """The epoch is over."""


@dataclass
class _Step:
    process: int
    ranges: list[tuple[int, int]]
    left_out: int  # of its units
    void: bool = False  # whether it is not to be trained


class ParallelReader:
    """Has processes read what is granted of an epoch, up to ``ahead`` steps early; ``ends`` tells where shards end."""

    def __init__(self, processes: Processes, ends: Sequence[int], ahead: int) -> None:
        self._processes, self._ends, self._ahead = processes, ends, ahead
        self._turn = 0  # the process that makes the next step
        self._places = [-1] * processes.count  # one past what each reads
        self._part: list[tuple[int, int]] = []  # what was granted of the next step so far
        self._asked: deque[_Step] = deque()
        self._made: deque[tuple[_Step, list[Any]]] = deque()
        self._broken: list[_Step] = []  # a step within which a shard has ended
        self._found: deque[int] = deque()  # numbers at which shards have ended, not reported yet
        self._known = set(ends)  # those that were reported
        self._spare: list[Any] = []  # a batch of an earlier step

    @property
    def places(self) -> tuple[int, ...]:
        """Where each process continues: one past the last unit that it was granted. The process in turn comes first."""
        return (*self._places[self._turn :], *self._places[: self._turn])

    @property
    def begun(self) -> int:
        """Units of a step that is not complete."""
        return _count(self._part)

    @property
    def left(self) -> int:
        """Units that were granted and are not taken yet, so far as they exist."""
        steps = [*self._asked, *(step for step, _ in self._made)]
        return self.begun + sum(_count(step.ranges) for step in steps if not step.void)

    @property
    def steps(self) -> int:
        """Steps on the way, and those that are made."""
        return sum(not step.void for step in self._asked) + len(self._made)

    @property
    def has_step(self) -> bool:
        """Whether there is a step to train, and no rest that may have to be added to it: see :meth:`join_rest`."""
        return bool(self._made) and not (self.steps == 1 and self.begun)

    def add(self, first: int, last: int, step: int, batch: int | None, *, drop_last: bool) -> None:
        """Units were granted, for steps of ``step`` units in batches of ``batch``; None if a sample is a batch."""
        while first < last:
            stop = min(last, first + max(1, step - self.begun))
            self._part.append((first, stop))
            self._places[self._turn] = first = stop
            if self.begun >= step:
                self.ask(batch, drop_last=drop_last)

    def ask(self, batch: int | None, *, drop_last: bool) -> None:
        """Have the step made of which a part was granted, complete or not."""
        units, size = self.begun, batch or 1
        if not units:
            return
        left_out = units % size if drop_last else 0
        self._order(self._turn, self._part, size, left_out)
        self._part = []
        self._turn = (self._turn + 1) % self._processes.count

    def _order(self, process: int, ranges: list[tuple[int, int]], size: int, left_out: int = 0) -> None:
        """Have a process make a step in nearly equal batches of at most ``size``."""
        units = _count(ranges) - left_out
        count = -(-units // size)
        sizes = [units * (n + 1) // count - units * n // count for n in range(count)]
        self._processes.ask(process, StepOrder(tuple(ranges), tuple(sizes)))
        self._asked.append(_Step(process, ranges, left_out))

    def join_rest(self, step: int, batch: int | None) -> bool:
        """Order the last step again, together with a rest too small for a step. Returns False if there are none."""
        if len(self._made) != 1 or self.steps != 1 or not self.begun:
            return False
        last, _ = self._made.popleft()
        ranges, self._part = last.ranges + self._part, []
        units = _count(ranges)
        for part in (ranges,) if units <= step else _split(ranges, -(-units // 2)):
            self._order(last.process, part, batch or 1)
        return True

    def fill(self, *, last: bool) -> int | None:
        """Wait until a step is made, and the next one, if enough of them, or the ``last`` ones, are on the way.

        A shard may end within the next step, and the rest may have to join the first step; see :meth:`join_rest`.
        Stops where a shard ends: returns the number that does not exist.
        """
        while not self._found and len(self._made) < 2 and self._asked:
            if not (last or self._made or self.steps >= self._ahead):
                break
            made, step = self._processes.get(self._asked[0].process), self._asked.popleft()
            if step.void:
                continue
            if made.batches is None:
                self._broken = [step]
                self._found.extend(made.ended)
            else:
                self._made.append((step, made.batches))
                self._found.extend(number for number in made.ended if number not in self._known)
        return self._found[0] if self._found else None

    def end(self, number: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Forget a shard's numbers from ``number`` on. Returns its end, and other units of steps that lack these."""
        end = self._ends[bisect_right(self._ends, number)]
        self._found = deque(each for each in self._found if each != number)
        self._known.add(number)
        broken, self._broken = self._broken, []
        for step in self._asked:
            if not step.void and any(first < end and number < last for first, last in step.ranges):
                step.void = True
                broken.append(step)
        self._part = without(self._part, number, end)
        returned: list[tuple[int, int]] = []
        for step in reversed(broken):
            left = without(step.ranges, number, end)
            returned[:0] = left
            if left:
                self._places[step.process] = left[0][0]  # it has read these samples
        return end, tuple(returned)

    def take(self) -> tuple[list[Any], int, int]:
        """The batches of a step, its units, and how many of them were left out; none if no step is made."""
        if not self._made:
            return [], 0, 0
        step, batches = self._made.popleft()
        self._spare = batches[:1] or self._spare
        return batches, _count(step.ranges) - step.left_out, step.left_out

    def drop(self) -> None:
        """Forget all that was granted."""
        for step in self._asked:
            step.void = True
        self._made.clear()
        self._found.clear()
        self._part, self._broken, self._known = [], [], set(self._ends)

    def any(self, count: int) -> list[Any]:
        """A batch whose update is discarded, of samples that are trained elsewhere; none if there are none."""
        while self._asked:
            self._processes.get(self._asked.popleft().process)
        for shard in range(0 if self._spare else len(self._ends)):
            first = self._ends[shard - 1] if shard else 0
            order = StepOrder(((first, min(first + count, self._ends[shard])),), (count,), short=True)
            self._processes.ask(0, order)
            self._spare = self._processes.get(0).batches or []
            if self._spare:
                break
        return self._spare

    def close(self) -> None:
        """The epoch is over."""
        self._processes.close()


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(last - first for first, last in ranges)


def _split(ranges: Sequence[tuple[int, int]], count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The first ``count`` units of ranges, and the others."""
    first: list[tuple[int, int]] = []
    others: list[tuple[int, int]] = []
    for a, b in ranges:
        cut = min(b, a + count - _count(first))
        first += [(a, cut)] if a < cut else []
        others += [(cut, b)] if cut < b else []
    return first, others


@dataclass(frozen=True)
class ParallelPlan(ReadingPlan):
    """One epoch on a worker whose loader processes read shards."""

    reader: ParallelReader = field(kw_only=True)
    ahead: int = field(kw_only=True)  # steps that are made in advance

    def batches(self, first: int, last: int) -> Iterator[LeasedBatch]:
        """None yet: they are to be made."""
        self.reader.add(first, last, self.step, self.batch, drop_last=self.drop_last)
        return iter(())

    @property
    def has_step(self) -> bool:
        """Whether there is a step to train."""
        return self.reader.has_step

    @property
    def wants_more(self) -> bool:
        """Whether a process has too little to do."""
        return self.reader.steps < self.ahead

    @property
    def wishes(self) -> dict[str, Any]:
        """What a request says of the units that suit this worker."""
        return {"size": self.step, "begun": self.reader.begun, "places": self.reader.places}

    @property
    def runs_low(self) -> bool:
        """Whether a process has too little to do."""
        return self.wants_more

    def fill(self, *, last: bool) -> int | None:
        """Wait for a step; see :meth:`ParallelReader.fill`."""
        found = self.reader.fill(last=last)
        if last and found is None and self.reader.steps <= 1:
            small = 2 * self.reader.begun < self.step and not self.drop_last
            if not (small and self.reader.join_rest(self.step, self.batch)):
                self.reader.ask(self.batch, drop_last=self.drop_last)
            found = self.reader.fill(last=True)
        return found

    def end(self, number: int) -> Ended:
        """Forget what was granted of a shard from a number on."""
        return Ended(number, *self.reader.end(number))

    def next_steps(self, first: int, *, last: bool, void: bool) -> tuple[list[LeasedBatch], int]:
        """See :meth:`ReadingPlan.next_steps`."""
        made, units, left_out = self.reader.take()
        left = range(len(made) - 1, -1, -1)
        batches = [LeasedBatch(batch, first, units, n) for batch, n in zip(made, left, strict=True)]
        if void and not batches:
            batches = [LeasedBatch(batch, first, 1, 0, void=True) for batch in self.reader.any(self.batch or 1)]
        return batches, left_out
