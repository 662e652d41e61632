"""Which worker trains which units of an epoch whose data have shards. Pure: no network, no clock, no threads.

These are shards of data, such as files; those of the weights are in ``core/server/shard.py``. Workers read
several shards at once, so a sync interval ends when a number of units have been trained, in any order. A worker is
granted more of the shard that it is reading. When that has ended, it continues a shard that another worker has left. If
there is none, it begins a new shard, and near the end of the epoch it shares a shard with another worker.

A shard of unknown length has many more numbers than samples. The worker that finds its end reports it before it trains
anything that it was granted later. So every unit that counts as trained exists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property

from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.foundation.ranges import without
from lightning_asgd.core.leases.self_scheduling import Load
from lightning_asgd.core.leases.table import Leases
from lightning_asgd.core.leases.totals import WorkerLeases
from lightning_asgd.core.protocol import UNKNOWN, Epoch, LeaseGrant, LeaseRequest

_ENDLESS = 100  # free ranges that are as good as endless; to count the samples in them would take long


class StreamLeases(Leases):
    """The units of one epoch, each of which lies in a shard; see :class:`Leases`."""

    _usual: float | None = None
    """Mean length of the shards of unknown length in the previous epoch."""

    _found = 0
    """Samples in those that have ended in this epoch."""

    def __init__(self, epoch: Epoch, *, all_train: bool = True, before: Leases | None = None, now: float = 0.0) -> None:
        super().__init__(epoch, all_train=all_train, before=before, now=now)
        if isinstance(before, StreamLeases):
            self._usual = before._mean_length or before._usual

    @cached_property
    def _begins(self) -> frozenset[int]:
        """The first number of each shard."""
        return frozenset((0, *self.epoch.shards))

    def learn_ends(self, numbers: Collection[int]) -> None:
        """Take note of what workers have reported to a lost coordinator: where shards of unknown length end."""
        for number in numbers:
            if number < self.epoch.numbers:
                self._end(number)

    def _end(self, number: int) -> None:
        """Note that a shard has no sample from a number on."""
        begin, end = self.epoch.shard(number)
        ended = min(number, self._ended.get(end, number))
        if self._is_unknown(number):
            self._found += ended - self._ended.get(end, begin)
        self._ended[end] = ended
        self._free.remove(number, end)

    def _note_ends(self, number: int, worker: WorkerLeases, ends: Collection[int]) -> None:
        for each in ends:
            begin, end = self._shard_of(number, each)
            if self._ended.get(end, end) <= each:
                continue  # a repeated call, or another worker has found it first
            if not any(begin <= first < end for first, _ in worker.held):
                raise ProtocolError(
                    f"Worker {number} says that a shard of epoch {self.epoch.key} ends at {each}. Expected a shard of "
                    "which it has units."
                )
            self._end(each)
        for each in ends:
            (_, end), before = self._shard_of(number, each), sum(last - first for first, last in worker.held)
            worker.held = deque(without(worker.held, each, end))
            ended = before - sum(last - first for first, last in worker.held)
            worker.granted -= ended
            self._held -= ended

    def _shard_of(self, number: int, unit: int) -> tuple[int, int]:
        """The numbers of the shard that a worker says ends at a unit: the first, and one past the last."""
        if not 0 <= unit < self.epoch.numbers:
            raise ProtocolError(f"Worker {number} says that a shard ends at {unit}, of {self.epoch.numbers} numbers.")
        return self.epoch.shard(unit)

    def _left(self, segment: int) -> int:
        """Free units, as many as may still be trained in the segments up to this one."""
        return max(0, min(self._free.total, self._left_in(segment), UNKNOWN))  # more is as good as endless

    def _left_in(self, segment: int) -> int:
        return self.epoch.ends[segment] - self._finished.total - self._held

    def _holds(self, worker: WorkerLeases) -> int | None:
        return worker.segment if worker.held else None

    def _urgency(self, worker: WorkerLeases, segment: int) -> float:
        return -1.0 if worker.begun else super()._urgency(worker, segment)

    def _steps(self, number: int, worker: WorkerLeases, left: int, now: float) -> int:
        return super()._steps(number, worker, min(left, self._expected_left), now)

    @property
    def _expected_left(self) -> int:
        """How many samples are probably free. A shard that is longer than expected probably has as many more."""
        length = self._usual or self._mean_length
        if length is None or len(self._free.ranges) > _ENDLESS:
            return UNKNOWN
        expected = 0.0
        for first, last in self._free.ranges:
            begin, _ = self.epoch.shard(first)
            expected += abs(length - (first - begin)) if self._is_open(last) else last - first
        return max(1, round(expected))

    @property
    def _mean_length(self) -> float | None:
        """Mean length of the shards that have ended."""
        return self._found / len(self._ended) if self._ended else None

    def _is_open(self, last: int) -> bool:
        """Whether a free range ends where its shard does, and that is not known yet."""
        return last in self._cut_at and self._is_unknown(last - 1)

    def _is_unknown(self, number: int) -> bool:
        """Whether a shard's length was unknown when the epoch began."""
        first, last = self.epoch.shard(number)
        return last - first >= UNKNOWN

    def _units_for(self, number: int, worker: WorkerLeases, segment: int, now: float) -> int:
        units = super()._units_for(number, worker, segment, now)
        if not self._halted and not self._unserved(segment, worker.size)[0]:
            units = self._at_the_end(number, worker, segment, units, now)
        if worker.begun and not self._halted and self._left(segment):  # else there would be a smaller step
            units = max(units, worker.size) - worker.begun
        return units

    def _at_the_end(self, number: int, worker: WorkerLeases, segment: int, units: int, now: float) -> int:
        """Leave no worker with too few units for half a step, so far as there are others to train them with."""
        left = self._left(segment)
        if 2 * left < worker.size and not self._all_wait(worker):
            return 0 if worker.waits else left  # a waiting worker has trained everything that it had
        if units and 2 * (left - units) < worker.size:
            return left
        # A shard of unknown length is read to its end by the worker that has a step of it already.
        free = None if worker.waits else self._free.at(worker.places[0])
        reads = free is not None and self._is_open(free[1]) and free[1] - free[0] <= left
        mine = Load(0.0, worker.unit_s, worker.size)
        fast = reads and not (worker.unit_s and self._others(number, worker, now).much_faster(mine))
        return max(units, min(left, worker.size)) if fast else units

    def _choose(
        self, number: int, worker: WorkerLeases, request: LeaseRequest, now: float
    ) -> Iterator[tuple[int, int]]:
        left = self._left_in(request.segment) - self._totals.sums["begun"]
        units = min(self._units_for(number, worker, request.segment, now), left)
        if units > 0:
            worker.served = request.segment
        turn, places = 0, worker.places
        while units > 0 and self._free:
            first, last = self._next_of(places[turn], places)
            step = worker.size - worker.begun  # a process reads a whole step before it is the next one's turn
            taken = min(last - first, units if len(places) == 1 else min(units, step))
            yield first, first + taken
            units -= taken
            places[turn] = first + taken
            worker.begun = (worker.begun + taken) % worker.size
            turn = (turn + (not worker.begun)) % len(places)

    def _next_of(self, place: int, own: Collection[int]) -> tuple[int, int]:
        """Choose a worker's next range: first from ``place``, then from abandoned, new and finally shared shards."""
        found = self._free.at(place)
        if found is None:
            free = self._free.ranges
            read = self._totals.places
            kinds = [1 if first in self._begins else 2 if first in read or first in own else 0 for first, _ in free]
            found = free[kinds.index(min(kinds))]
        return found

    @property
    def _exhausted(self) -> bool:
        return not (self._free or self._held or self._halted)

    def _dummy(self, worker: WorkerLeases, request: LeaseRequest, now: float) -> LeaseGrant:
        """No unit: a worker has samples of its own for a dummy batch."""
        over = request.wait and self._over(request.segment)
        return replace(self._grant(worker, (), now, over=over, final=True), halted=over and self._halted)
