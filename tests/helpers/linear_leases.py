"""Leases as they were granted by a look at every worker: what those that keep sums have to grant too."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lightning_asgd.core.foundation.errors import WorkerAwayError
from lightning_asgd.core.foundation.ranges import common, merged, without
from lightning_asgd.core.leases.self_scheduling import Load, finish_s
from lightning_asgd.core.protocol import Epoch, LeaseGrant, LeaseRequest
from lightning_asgd.core.server.pending_replies import Completion

__all__ = ["LinearLeases"]


@dataclass
class WorkerLeases:
    """What is known of a worker in this epoch."""

    held: deque[tuple[int, int]] = field(default_factory=deque)  # granted and not yet applied, in the order of training
    granted: int = 0
    trained: int = 0  # both count units, since the epoch began
    applied: int = 0
    acknowledged: int = 0
    unit_s: float = 0.0  # seconds per unit; 0 if unknown
    size: int = 0  # units per step; 0 if unknown
    rtt_s: float = 0.0  # seconds until a request of it is answered
    flush: float = 0.0  # seconds that its last push takes
    at: float = 0.0  # when it reported last
    segment: int = 0
    served: int = -1  # the last segment of which it was granted something
    places: list[int] = field(default_factory=lambda: [-1])  # see `LeaseRequest`
    begun: int = 0  # units that it has of a step which is to be completed
    stopped: bool = False
    waiting: LeaseRequest | None = None

    def backlog(self, now: float, unit_s: float) -> float:
        """Seconds until it has probably trained what it holds. One that is overdue may need as long again."""
        due = self.at + (self.granted - self.trained) * unit_s
        return due - now if now <= due else now - due

    def done(self, now: float) -> float:
        """Units that it has probably trained by now."""
        if not self.unit_s:
            return self.trained
        return min(self.granted, self.trained + max(0.0, now - self.at) / self.unit_s)


class LinearLeases:
    """The units of one epoch; those in ``epoch.done`` count as trained.

    With ``all_train`` one step of every segment is reserved for each living worker; without, a late worker trains a
    dummy batch, so that Lightning notices the end of the segment. ``before`` is the previous epoch, for its speeds.
    """

    def __init__(
        self, epoch: Epoch, *, all_train: bool = True, before: LinearLeases | None = None, now: float = 0.0
    ) -> None:
        self.epoch = epoch
        self._all_train = all_train
        self._expected: dict[int, WorkerLeases] = {}  # workers without a request yet, as in the previous epoch
        if before is not None:
            for number, w in (before._expected | before._workers).items():
                if number in before._living:
                    self._expected[number] = WorkerLeases(
                        unit_s=w.unit_s, size=w.size, rtt_s=w.rtt_s, flush=w.flush, at=now
                    )
        self._free: list[tuple[int, int]] = []
        self._workers: dict[int, WorkerLeases] = {}
        self._living: set[int] = set()
        self._finished: list[tuple[int, int]] = []
        self._cuts = epoch.shards or epoch.ends  # where free ranges end at the latest
        self._cut_at = frozenset(self._cuts)
        self._ended: dict[int, int] = {}  # first number without a sample, by the end of its shard
        self._halted = False  # whether nothing is granted any more
        start = 0
        for first, last in sorted(epoch.done):
            if start < first:
                self._release(start, first)
            self._finish(first, last)
            start = max(start, last)
        if start < epoch.numbers:
            self._release(start, epoch.numbers)

    @property
    def finished(self) -> tuple[tuple[int, int], ...]:
        """Ranges of units whose updates have been applied."""
        return tuple(self._finished)

    def update_members(self, living: Collection[int], now: float, behind: Collection[int] = ()) -> list[Completion]:
        """Update who takes part: the workers that others wait for, and those catching up, which may train too."""
        self._living = set(living)
        answers = [a for number in set(self._workers) - self._living - set(behind) for a in self._drop(number)]
        return answers + self.retry(now)

    def forget(self, number: int, now: float) -> list[Completion]:
        """Release all that a worker holds: it starts over."""
        return [*self._drop(number), *self.retry(now)] if number in self._workers else []

    def stop_waiting_for(self, numbers: Collection[int], now: float) -> list[Completion]:
        """Reserve nothing for workers that have finished the sync interval, as a lost server had announced."""
        for number in numbers:
            self._workers.setdefault(number, WorkerLeases()).stopped = True
        return self.retry(now)

    def applied(self, number: int, units: int) -> None:
        """Note how many of a worker's units are applied, at the moment when the push itself arrives.

        So a unit is either done or granted to others, whenever a worker is lost.
        """
        worker = self._workers.get(number)
        if worker is not None:
            self._apply(worker, units)

    def serve(self, request: LeaseRequest, now: float) -> list[Completion]:
        """Grant units to a worker; the reply to a request that waits comes later."""
        if request.worker not in self._workers and request.trained:
            # What it held was granted to others while it was silent.
            raise WorkerAwayError(f"Worker {request.worker} claims units of {self.epoch.key}, but was disconnected.")
        worker = self._workers.setdefault(request.worker, WorkerLeases())
        worker.size, worker.begun = request.size, request.begun % request.size
        self._take_back(worker, request.returned)
        worker.trained, worker.unit_s, worker.at, worker.segment = request.trained, request.unit_s, now, request.segment
        if request.wait:  # it has trained all it had; after a recovery more may be noted, which did not exist
            worker.granted = request.trained
        worker.rtt_s, worker.flush = request.rtt_s, request.flush
        worker.places = list(request.places) or [-1]
        answers: list[Completion] = []
        if worker.waiting is not None:
            answers.append(Completion(worker.waiting, LeaseGrant()))  # its call was repeated
        worker.waiting = None if request.stop else request
        worker.stopped = request.stop
        self._apply(worker, request.applied)
        worker.acknowledged = request.applied
        self._halted |= request.halt
        if request.stop:
            self._give_back(worker, trained_too=False)
            answers.append(Completion(request, LeaseGrant(over=True, progress=self._progress(now))))
        answers += self.retry(now)
        if worker.waiting is request and not request.wait:
            worker.waiting = None
            # If others hold all that is left, a worker without a unit would not notice the end of the segment.
            late = worker.served < request.segment
            grant = self._dummy(worker, request, now) if late else self._grant(worker, (), now, final=True)
            answers.append(Completion(request, grant))
        return answers

    def retry(self, now: float) -> list[Completion]:
        """Look again at the requests that wait."""
        answers: list[Completion] = []
        again = True
        while again:
            again = False
            for number, worker in self._workers.items():
                request = worker.waiting
                grant = None if request is None else self._answer(number, worker, request, now)
                if request is not None and grant is not None:
                    worker.waiting = None
                    answers.append(Completion(request, grant))
                    again = True
        return answers

    def _answer(self, number: int, worker: WorkerLeases, request: LeaseRequest, now: float) -> LeaseGrant | None:
        """What a waiting worker is granted; None if it must wait on."""
        ranges = []
        for first, last in self._choose(number, worker, request, now):
            self._hold(worker, first, last)
            worker.granted += last - first
            ranges.append((first, last))
        if ranges:
            worker.waiting = None  # or it would count as waiting
            final = not self._units_for(number, worker, request.segment, now)
            return self._grant(worker, ranges, now, final=final)
        if not self._over(request.segment):
            return None
        if worker.served < request.segment:
            return self._dummy(worker, request, now)
        return replace(self._grant(worker, (), now, over=True), halted=self._halted)

    # ------------------------------------------------------------------ choosing

    def _choose(
        self, number: int, worker: WorkerLeases, request: LeaseRequest, now: float
    ) -> Iterator[tuple[int, int]]:
        """Ranges of units for a worker, each held before the next is chosen; none if others will finish them sooner."""
        units = self._units_for(number, worker, request.segment, now)
        if units == 0:
            return
        worker.served = request.segment
        first, last = self._free_in(request.segment)[0]
        if not self._unserved(number, request.segment) and 2 * (last - first - units) < worker.size:
            units = last - first  # else too little would be left for a step
        yield first, min(last, first + units)

    def _units_for(self, number: int, worker: WorkerLeases, segment: int, now: float) -> int:
        """How many of the free units of a segment a worker should train next."""
        left = sum(last - first for first, last in self._free_in(segment))
        if not left or self._halted:
            return 0
        unserved = self._unserved(number, segment)
        others = self._others(number)
        surplus = left - sum(w.size or worker.size for w in unserved)
        steps = self._steps(worker, others, left, now) if surplus > 0 else 0
        units = (min(steps, max(0, surplus) // worker.size) if unserved else steps) * worker.size
        if worker.served >= segment:
            return units
        least = min(worker.size, max(1, left // (1 + len(unserved))))
        return max(least, units) if all(w.unit_s for w in others) else least

    def _steps(self, worker: WorkerLeases, others: list[WorkerLeases], left: int, now: float) -> int:
        """How many steps to grant, from the workers' speeds."""
        known = [w.unit_s for w in (worker, *others) if w.unit_s]
        if not worker.unit_s:
            return 1
        mean = sum(known) / len(known)
        loads = [
            Load(
                w.flush + (w.backlog(now, w.unit_s or mean) if w.waiting is None else 0.0),
                w.unit_s or mean,
                w.size or worker.size,
            )
            for w in others
        ]
        free_s = worker.flush + max(0, worker.granted - worker.trained) * worker.unit_s
        mine = Load(free_s, worker.unit_s, worker.size)
        # If all wait, each would leave the rest to another: the worker that finishes first must take it.
        return steps_to_grant(mine, loads, left, worker.rtt_s, must=self._all_wait)

    def _others(self, number: int) -> list[WorkerLeases]:
        known = self._expected | self._workers
        if self._all_train:  # else a worker that has just joined may take long to set up; others do not wait for it
            known = {n: WorkerLeases() for n in self._living} | known
        return [w for n, w in known.items() if n in self._living and n != number and not w.stopped]

    @property
    def _all_wait(self) -> bool:
        """Whether no worker trains any more, so that none will return for what is left."""
        there = (worker for number, worker in self._workers.items() if number in self._living)
        return all(worker.stopped or (worker.waiting is not None and worker.waiting.wait) for worker in there)

    def _unserved(self, number: int, segment: int) -> list[WorkerLeases]:
        """The other workers without a unit of the segment, which would not notice its end."""
        return [w for w in self._others(number) if w.served < segment] if self._all_train else []

    def _free_in(self, segment: int) -> list[tuple[int, int]]:
        """The free ranges of the segments up to this one."""
        return [(first, last) for first, last in self._free if first < self.epoch.ends[segment]]

    def _take_back(self, worker: WorkerLeases, ranges: Collection[tuple[int, int]]) -> None:
        """Release what a worker holds of some ranges."""
        for first, last in ranges:
            held = list(common(worker.held, first, last))
            worker.held = deque(without(worker.held, first, last))
            for a, b in held:
                worker.granted -= b - a
                self._release(a, b)

    @property
    def _exhausted(self) -> bool:
        """Whether the epoch's shards have ended; see :class:`LeaseGrant`."""
        return False

    def _over(self, segment: int) -> bool:
        end = self.epoch.ends[segment]
        if not self._all_train and any(w.acknowledged < w.applied for w in self._workers.values() if not w.stopped):
            return False
        held = (first for worker in self._workers.values() for first, _ in worker.held)
        return (self._halted or not self._free_in(segment)) and all(first >= end for first in held)

    # ------------------------------------------------------------------ book-keeping

    def _grant(
        self,
        worker: WorkerLeases,
        ranges: Sequence[tuple[int, int]],
        now: float,
        *,
        over: bool = False,
        final: bool = False,
    ) -> LeaseGrant:
        rates = [1 / w.unit_s for n, w in self._workers.items() if w.unit_s and n in self._living and not w.stopped]
        ratio = sum(rates) * worker.unit_s if worker.unit_s and rates else float(max(1, len(self._living)))
        exhausted = over and self._exhausted
        return LeaseGrant(tuple(ranges), over, self._progress(now), ratio, final=final, exhausted=exhausted)

    def _dummy(self, worker: WorkerLeases, request: LeaseRequest, now: float) -> LeaseGrant:
        """A dummy batch, whose update is discarded."""
        worker.served, end = request.segment, self.epoch.ends[request.segment]
        begin = self.epoch.ends[request.segment - 1] if request.segment else 0
        return replace(self._grant(worker, [(max(begin, end - request.size), end)], now, final=True), void=True)

    def _progress(self, now: float) -> float:
        """Units that have probably been trained by now."""
        done = sum(last - first for first, last in self._finished)
        return done + sum(max(0.0, w.done(now) - w.applied) for w in self._workers.values())

    def _hold(self, worker: WorkerLeases, first: int, last: int) -> None:
        index = next(i for i, (a, b) in enumerate(self._free) if a <= first < b)
        a, b = self._free.pop(index)
        if a < first:
            insort(self._free, (a, first))
        if last < b:
            insort(self._free, (last, b))
        worker.held.append((first, last))

    def _apply(self, worker: WorkerLeases, applied: int) -> None:
        """Note how many of the units granted to a worker have been applied, from the first on."""
        fresh = applied - worker.applied
        worker.applied = max(worker.applied, applied)
        while fresh > 0 and worker.held:
            first, last = worker.held.popleft()
            part = min(fresh, last - first)
            self._finish(first, first + part)
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
        worker.held = kept

    def _drop(self, number: int) -> list[Completion]:
        worker = self._workers.pop(number)
        self._give_back(worker, trained_too=True)
        if worker.waiting is None:
            return []
        return [
            Completion(worker.waiting, WorkerAwayError(f"Worker {number} was disconnected while it waited for data."))
        ]

    def _release(self, first: int, last: int) -> None:
        """Make units free, in ranges that end with segments, or shards, at the latest."""
        while first < last:
            end = self._cuts[bisect_right(self._cuts, first)]
            stop = min(last, self._ended.get(end, end))
            if first < stop:
                insort(self._free, (first, stop))
            first = min(last, end)
        self._free = merged(self._free, self._cut_at)

    def _finish(self, first: int, last: int) -> None:
        insort(self._finished, (first, last))
        self._finished = merged(self._finished)


def steps_to_grant(mine: Load, others: Sequence[Load], left: int, rtt_s: float, *, must: bool) -> int:
    """What it was: half of a worker's share of what is left; none if the others finish sooner without it.

    ``must``: no other worker will return for what is left, so this one need not finish sooner than much faster ones.
    """
    finish = mine.free_s + min(mine.size, left) * mine.unit_s
    if others and finish > 1.05 * finish_s(others, left):
        return 0
    faster = [load for load in others if load.unit_s * 4.0 < mine.unit_s]
    if faster and not must and finish > 0.85 * finish_s(faster, left):
        return 0
    share = max(0.0, finish_s([*others, mine], left) - mine.free_s) / mine.unit_s
    units = max(share / 2, min(share, rtt_s / mine.unit_s))  # enough until the next reply
    units = min(units, max(0.5, 2.0 * rtt_s) / mine.unit_s)
    return max(1, int(units / mine.size))
