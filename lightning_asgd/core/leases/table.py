"""Which worker trains which units of an epoch. Pure: no network, no clock, no threads.

An epoch is a sequence of *work units*, its samples, in an order that all workers know. It is divided into *sync
intervals* (``segment`` in the code), which end where all workers meet: at validations and at the end of the epoch. A
worker requests a few optimizer steps at a time, with as many units as its batches have (`self_scheduling.py`). A unit
is done once its update has been applied; the units of a worker that fails, or stops early, are granted to others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from lightning_asgd.core.foundation.errors import ProtocolError, WorkerAwayError
from lightning_asgd.core.foundation.ranges import RangeSet, are_in_order, common, without
from lightning_asgd.core.leases.crowd import FASTEST_S, ONE
from lightning_asgd.core.leases.self_scheduling import Few, Load, Others, steps_to_grant
from lightning_asgd.core.leases.totals import Counted, Queues, Totals, WorkerLeases
from lightning_asgd.core.protocol import Epoch, LeaseGrant, LeaseHoldings, LeaseRequest
from lightning_asgd.core.server.pending_replies import Completion


def check_epoch(epoch: Epoch, other: Epoch, worker: int) -> None:
    """Raise if a worker opens another epoch under the same key."""
    if other.order != epoch.order:
        raise ProtocolError(
            f"Worker {worker} has another order of samples for epoch {other.key} than the others. Expected the "
            "same: give your sampler a generator with the same seed on all workers, or pass data='split' to the "
            "strategy."
        )
    if other.step != epoch.step:
        raise ProtocolError(
            f"Worker {worker} counts {other.step} samples per optimizer step in epoch {other.key}, the others "
            f"{epoch.step}. Expected the same accumulate_grad_batches on every worker; batch sizes may differ."
        )
    if (other.units, other.ends, other.shards) != (epoch.units, epoch.ends, epoch.shards):
        raise ProtocolError(
            f"Worker {worker} has {other.units} units in sync intervals that end at {other.ends[-3:]} for epoch "
            f"{other.key}; the others have {epoch.units}, {epoch.ends[-3:]}. Expected the same data set "
            "and Trainer arguments on every worker, or data='split'."
        )


def check_request(epoch: Epoch, request: LeaseRequest) -> None:
    """Raise unless a request can be one of this epoch."""
    if not all(are_in_order([each], epoch.numbers) for each in request.returned):
        raise ProtocolError(
            f"Worker {request.worker} returns units {request.returned} of epoch {epoch.key}. Expected ranges of its "
            f"{epoch.numbers} numbers."
        )
    if not 0 <= request.segment < len(epoch.ends):
        raise ProtocolError(
            f"Worker {request.worker} asks for units after sync interval {request.segment} of epoch "
            f"{epoch.key}. Expected at least 0, and less than {len(epoch.ends)}."
        )


Ranges = Sequence[tuple[int, int]]

_UNKNOWN = WorkerLeases()
_FEW = 16  # others, or waiting workers, up to which each is looked at
_FIRST = 2  # if more wait, how many of the most urgent are looked at


class Leases:
    """The units of one epoch; those in ``epoch.done`` count as trained.

    With ``all_train`` one step of every segment is reserved for each living worker; without, a late worker trains a
    dummy batch, so that Lightning notices the end of the segment. ``before`` is the previous epoch, for its speeds.
    """

    def __init__(self, epoch: Epoch, *, all_train: bool = True, before: Leases | None = None, now: float = 0.0) -> None:
        self.epoch = epoch
        self._all_train = all_train
        self._expected: dict[int, WorkerLeases] = {}  # workers without a request yet, as in the previous epoch
        if before is not None:
            for number, w in (before._expected | before._workers).items():
                if number in before._living:
                    self._expected[number] = WorkerLeases(
                        unit_s=w.unit_s, size=w.size, rtt_s=w.rtt_s, flush=w.flush, at=now
                    )
        self._workers: dict[int, WorkerLeases] = {}
        self._living: set[int] = set()
        self._strangers: set[int] = set()  # known workers that are not living
        self._totals, self._queues = Totals(), Queues()
        self._pushed: set[int] = set()  # workers whose updates were applied since the totals were last updated
        self._cuts = epoch.shards or epoch.ends  # where free ranges end at the latest
        self._cut_at = frozenset(self._cuts)
        self._free = RangeSet(self._cut_at)
        self._free_until: Counter[int] = Counter()  # units, by the end of their segment or shard
        self._finished = RangeSet()
        self._ended: dict[int, int] = {}  # first number without a sample, by the end of its shard
        self._turns = self._held = 0  # workers so far; units that they hold
        self._halted = False  # whether nothing is granted any more
        start = 0
        for first, last in sorted(epoch.done):
            if start < first:
                self._release(start, first)
            self._finished.add(first, last)
            start = max(start, last)
        if start < epoch.numbers:
            self._release(start, epoch.numbers)

    @property
    def finished(self) -> tuple[tuple[int, int], ...]:
        """Ranges of units whose updates have been applied."""
        return tuple(self._finished.ranges)

    def worker(self, number: int) -> tuple[float, int]:
        """Seconds per step of a worker, and how many it has trained; both 0 if nothing is known."""
        worker = self._workers.get(number, WorkerLeases())
        size = worker.size or 1
        return worker.unit_s * size, -(-worker.trained // size)

    def update_members(
        self, living: Collection[int], now: float, behind: Collection[int] = (), changed: Collection[int] | None = None
    ) -> list[Completion]:
        """Note who takes part, those catching up too. ``changed``, if given, includes all whose status has changed."""
        changed = self._living.union(living) if changed is None else changed
        changed = {number for number in changed if (number in living) != (number in self._living)}
        self._living ^= changed
        self._strangers |= self._workers.keys() & changed
        self._strangers -= self._living & changed
        gone = sorted(self._strangers.difference(behind), key=lambda each: self._workers[each].turn)
        answers = [answer for number in gone for answer in self._drop(number)]
        for number in changed:
            if number not in self._living:
                self._expected.pop(number, None)
            self._note(number)
        return answers + self.retry(now)

    def forget(self, number: int, now: float) -> list[Completion]:
        """Release all that a worker holds: it starts over."""
        return [*self._drop(number), *self.retry(now)] if number in self._workers else []

    def stop_waiting_for(self, numbers: Collection[int], now: float) -> list[Completion]:
        """Reserve nothing for workers that have finished the sync interval, as a lost server had announced."""
        for number in numbers:
            self._of(number).stopped = True
            self._note(number)
        return self.retry(now)

    def reinstate(self, number: int, part: LeaseHoldings) -> None:
        """Restore what a worker reports that a lost coordinator granted it."""
        if number in self._workers:
            self._drop(number)
        worker = self._of(number)
        worker.trained, worker.acknowledged, worker.stopped = part.trained, part.applied, part.stopped
        worker.segment = worker.served = part.served
        for first, last in part.granted:
            worker.granted += last - first
            worker.applied += sum(b - a for a, b in common(self._finished.ranges, first, last))
            for a, b in common(self._free.ranges, first, last):
                self._hold(worker, a, b)
        self._note(number)

    def learn_ends(self, numbers: Collection[int]) -> None:
        """Take note of what workers have reported to a lost coordinator: where shards of unknown length end."""

    def applied(self, number: int, units: int) -> None:
        """Note how many of a worker's units are applied, when its push arrives: each is then done, not granted."""
        worker = self._workers.get(number)
        if worker is not None:
            self._apply(worker, units)
            self._pushed.add(number)

    def serve(self, request: LeaseRequest, now: float) -> list[Completion]:
        """Grant units to a worker; the reply to a request that waits comes later."""
        check_request(self.epoch, request)
        if request.worker not in self._workers and request.trained:
            # What it held was granted to others while it was silent.
            raise WorkerAwayError(f"Worker {request.worker} claims units of {self.epoch.key}, but was disconnected.")
        worker = self._of(request.worker)
        worker.size, worker.begun = request.size, request.begun % request.size
        self._note_ends(request.worker, worker, request.ended)
        self._take_back(worker, request.returned)
        worker.trained, worker.at, worker.segment = request.trained, now, request.segment
        worker.unit_s = max(request.unit_s, FASTEST_S) if request.unit_s else 0.0
        if request.wait:  # it has trained all it had; after a recovery more may be noted, which did not exist
            worker.granted = request.trained
        worker.rtt_s, worker.flush = request.rtt_s, request.flush
        worker.places = list(request.places) or [-1]
        repeated = worker.waiting
        answers = [] if repeated is None else [Completion(repeated, LeaseGrant())]
        self._block(worker, None if request.stop else request)
        worker.stopped = request.stop
        self._apply(worker, request.applied)
        worker.acknowledged = request.applied
        self._halted |= request.halt
        if request.stop:
            self._give_back(worker, trained_too=False)
        self._note(request.worker)
        if request.stop:
            answers.append(Completion(request, LeaseGrant(over=True, progress=self._progress(now))))
        answers += self.retry(now, request.worker)
        if worker.waiting is request and not request.wait:
            self._block(worker, None)
            self._note(request.worker)
            # If others hold all that is left, a worker without a unit would not notice the end of the segment.
            late = worker.served < request.segment
            grant = self._dummy(worker, request, now) if late else self._grant(worker, (), now, final=True)
            answers.append(Completion(request, grant))
        return answers

    def retry(self, now: float, *workers: int) -> list[Completion]:
        """Look again at the requests that wait, and at those of some ``workers`` in any case."""
        self._pass_time(now)
        answers: list[Completion] = []
        again = True
        while again:
            again = False
            for number in sorted({*self._candidates(), *workers}, key=lambda each: self._workers[each].turn):
                worker = self._workers[number]
                request = worker.waiting
                grant = None if request is None else self._answer(number, worker, request, now)
                if request is not None and grant is not None:
                    answers.append(Completion(request, grant))
                    again = True
        return answers

    def _candidates(self) -> list[int]:
        """Waiting workers whose requests may be due. If those that finish a step first have to wait, so do all."""
        found: list[int] = []
        for segment, waiting in self._queues.items():
            if self._over(segment):
                found += [number for _, number in waiting]
            elif not self._halted and self._left(segment):
                found += [number for _, number in waiting[: _FEW if len(waiting) <= _FEW else _FIRST]]
        return found

    def _answer(self, number: int, worker: WorkerLeases, request: LeaseRequest, now: float) -> LeaseGrant | None:
        """What a waiting worker is granted; None if it must wait on."""
        self._totals.take(number)
        ranges, final = [], False
        for first, last in self._choose(number, worker, request, now):
            self._hold(worker, first, last)
            worker.granted += last - first
            ranges.append((first, last))
        if ranges:
            self._block(worker, None)  # or it would count as waiting
            final = not self._units_for(number, worker, request.segment, now)
        self._note(number)
        if ranges:
            return self._grant(worker, ranges, now, final=final)
        if not self._over(request.segment):
            return None
        self._block(worker, None)
        self._note(number)
        if worker.served < request.segment:
            return self._dummy(worker, request, now)
        return replace(self._grant(worker, (), now, over=True), halted=self._halted)

    # ------------------------------------------------------------------ choosing

    def _choose(
        self, number: int, worker: WorkerLeases, request: LeaseRequest, now: float
    ) -> Iterable[tuple[int, int]]:
        """Ranges of units for a worker, each held before the next is chosen; none if others will finish them sooner."""
        units = self._units_for(number, worker, request.segment, now)
        if units == 0:
            return
        worker.served = request.segment
        first, last = self._free.ranges[0]
        if not self._unserved(request.segment, worker.size)[0] and 2 * (last - first - units) < worker.size:
            units = last - first  # else too little would be left for a step
        yield first, min(last, first + units)

    def _units_for(self, number: int, worker: WorkerLeases, segment: int, now: float) -> int:
        """How many of the free units of a segment a worker should train next. The totals must not include it."""
        left = self._left(segment)
        if not left or self._halted:
            return 0
        unserved, reserved = self._unserved(segment, worker.size)
        surplus = left - reserved
        steps = self._steps(number, worker, left, now) if surplus > 0 else 0
        units = (min(steps, max(0, surplus) // worker.size) if unserved else steps) * worker.size
        if worker.served >= segment:
            return units
        least = min(worker.size, max(1, left // (1 + unserved)))
        return least if self._totals.sums["unpaced"] else max(least, units)

    def _steps(self, number: int, worker: WorkerLeases, left: int, now: float) -> int:
        """How many steps to grant, from the workers' speeds."""
        if not worker.unit_s:
            return 1
        free_s = worker.flush + max(0, worker.granted - worker.trained) * worker.unit_s
        mine = Load(free_s, worker.unit_s, worker.size)
        # If all wait, each would leave the rest to another: the worker that finishes first must take it.
        return steps_to_grant(mine, self._others(number, worker, now), left, worker.rtt_s, must=self._all_wait(worker))

    def _others(self, number: int, worker: WorkerLeases, now: float) -> Others:
        """The other workers; one whose speed is unknown counts as a mean one."""
        crowd = self._totals.crowd
        crowd.unpaced = self._totals.sums["unpaced"]
        numbers: Collection[int] = self._living
        if len(crowd) > _FEW:
            if not self._all_wait(worker):
                return crowd
            numbers = [
                each for waiting in self._queues.values() for _, each in waiting[:_FEW]
            ]  # one of them must train
        known = (self._known(each) for each in numbers if each in self._living and each != number)
        others = [w for w in known if w is not None and not w.stopped]
        paces = [w.unit_s for w in (worker, *others) if w.unit_s]
        mean = sum(paces) / len(paces)
        return Few([w.load(now, mean, worker.size) for w in others])

    def _all_wait(self, worker: WorkerLeases) -> bool:
        """Whether no worker trains any more, this one neither, so that none will return for what is left."""
        return not self._totals.sums["training"] and (worker.stopped or worker.waits)

    def _unserved(self, segment: int, size: int) -> tuple[int, int]:
        """How many others have no unit of a segment, and units to leave: a step for each, of this size if unknown."""
        totals = self._totals
        served = [each for each in totals.others if each < segment] if self._all_train else []  # most often one
        reserved = sum(totals.sizes[each] + size * totals.unsized[each] for each in served)
        return sum(totals.others[each] for each in served), reserved

    def _left(self, segment: int) -> int:
        """Free units of the segments up to this one."""
        if not self._free or self._free.ranges[0][0] >= self.epoch.ends[segment]:
            return 0
        first = bisect_right(self.epoch.ends, self._free.ranges[0][0])
        return sum(self._free_until[end] for end in self.epoch.ends[first : segment + 1])

    def _note_ends(self, number: int, worker: WorkerLeases, ends: Collection[int]) -> None:
        """Take note of where a worker says that shards end."""
        if ends:
            raise ProtocolError(f"Worker {number} says that shards end in epoch {self.epoch.key}, which has none.")

    def _take_back(self, worker: WorkerLeases, ranges: Collection[tuple[int, int]]) -> None:
        """Release what a worker holds of some ranges."""
        for first, last in ranges:
            held = list(common(worker.held, first, last))
            worker.held = deque(without(worker.held, first, last))
            for a, b in held:
                worker.granted -= b - a
                self._held -= b - a
                self._release(a, b)

    @property
    def _exhausted(self) -> bool:
        """Whether the epoch's shards have ended; see :class:`LeaseGrant`."""
        return False

    def _over(self, segment: int) -> bool:
        """Whether a sync interval is over. Without a sync point to follow, all other servers have its updates, too."""
        held = min(self._totals.holding, default=segment + 1)
        return held > segment and not self._lacking and (self._halted or not self._left(segment))

    @property
    def _lacking(self) -> bool:
        """Whether other servers may lack an update, and no sync point follows."""
        return not self._all_train and self._totals.sums["lacking"] > 0

    def _holds(self, worker: WorkerLeases) -> int | None:
        """The first segment that is not over before a worker has trained what it holds; None if it holds nothing."""
        return bisect_right(self.epoch.ends, min(worker.held)[0]) if worker.held else None

    # ------------------------------------------------------------------ book-keeping

    def _of(self, number: int) -> WorkerLeases:
        """What is known of a worker that makes a request, or holds units."""
        if number not in self._workers:
            self._workers[number] = WorkerLeases(turn=self._turns)
            self._turns += 1
            self._strangers |= {number} - self._living
        return self._workers[number]

    def _known(self, number: int) -> WorkerLeases | None:
        """What is known of a worker; None if it takes part without a request, and others do not wait for it."""
        return self._workers.get(number) or self._expected.get(number) or (_UNKNOWN if self._all_train else None)

    def _note(self, number: int) -> None:
        """Keep the totals up to date with a worker that has changed."""
        known, lives = number in self._workers, number in self._living
        worker = self._known(number)
        if worker is None or not (known or lives):
            self._totals.take(number)
        else:
            holds = self._holds(worker) if known else None
            self._totals.put(number, Counted(worker, lives and not worker.stopped, known, holds))

    def _block(self, worker: WorkerLeases, request: LeaseRequest | None) -> None:
        """Have a request wait, or none any more."""
        if worker.waiting is not None:
            self._queues.remove(worker.waiting, worker.urgency)
        worker.waiting = request
        if request is not None:
            worker.urgency = self._urgency(worker, request.segment)
            self._queues.add(request, worker.urgency)

    def _urgency(self, worker: WorkerLeases, segment: int) -> float:
        """What those that wait are ordered by: a reservation, then the seconds that a step and its push would take."""
        return -1.0 if worker.served < segment else worker.flush + worker.size * worker.unit_s

    def _grant(
        self, worker: WorkerLeases, ranges: Ranges, now: float, *, over: bool = False, final: bool = False
    ) -> LeaseGrant:
        rate = self._totals.sums["rate"] / ONE
        ratio = rate * worker.unit_s if worker.unit_s and rate else float(max(1, len(self._living)))
        exhausted = over and self._exhausted
        return LeaseGrant(tuple(ranges), over, self._progress(now), ratio, final=final, exhausted=exhausted)

    def _dummy(self, worker: WorkerLeases, request: LeaseRequest, now: float) -> LeaseGrant:
        """A dummy batch, whose update is discarded."""
        worker.served, end = request.segment, self.epoch.ends[request.segment]
        self._note(request.worker)
        begin = self.epoch.ends[request.segment - 1] if request.segment else 0
        return replace(self._grant(worker, [(max(begin, end - request.size), end)], now, final=True), void=True)

    def _progress(self, now: float) -> float:
        """Units that have probably been trained by now."""
        self._pass_time(now)
        return self._finished.total + self._totals.progress

    def _pass_time(self, now: float) -> None:
        """Bring the totals up to date."""
        self._totals.advance(now)
        while self._pushed:
            self._note(self._pushed.pop())

    def _hold(self, worker: WorkerLeases, first: int, last: int) -> None:
        self._free.remove(first, last)
        self._free_until[self._cuts[bisect_right(self._cuts, first)]] -= last - first
        worker.held.append((first, last))
        self._held += last - first

    def _apply(self, worker: WorkerLeases, applied: int) -> None:
        """Note how many of the units granted to a worker have been applied, from the first on."""
        fresh = applied - worker.applied
        worker.applied = max(worker.applied, applied)
        while fresh > 0 and worker.held:
            first, last = worker.held.popleft()
            part = min(fresh, last - first)
            self._finished.add(first, first + part)
            self._held -= part
            fresh -= part
            if first + part < last:
                worker.held.appendleft((first + part, last))

    def _give_back(self, worker: WorkerLeases, *, trained_too: bool) -> None:
        """Release what a worker holds: all of it, or what it has not trained yet."""
        keep = 0 if trained_too else worker.trained - worker.applied
        kept: deque[tuple[int, int]] = deque()
        for first, last in worker.held:
            part = min(keep, last - first)
            keep -= part
            if part:
                kept.append((first, first + part))
            if first + part < last:
                self._release(first + part, last)
                worker.granted -= last - first - part
                self._held -= last - first - part
        worker.held = kept

    def _drop(self, number: int) -> list[Completion]:
        worker = self._workers.pop(number)
        self._strangers.discard(number)
        request = worker.waiting
        self._block(worker, None)
        self._give_back(worker, trained_too=True)
        self._note(number)
        if request is None:
            return []
        return [Completion(request, WorkerAwayError(f"Worker {number} was disconnected while it waited for data."))]

    def _release(self, first: int, last: int) -> None:
        """Make units free, in ranges that end with segments, or shards, at the latest."""
        while first < last:
            end = self._cuts[bisect_right(self._cuts, first)]
            stop = min(last, self._ended.get(end, end))
            if first < stop:
                self._free_until[end] += self._free.add(first, stop)
            first = min(last, end)
