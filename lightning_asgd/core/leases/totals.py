"""What is known of each worker in an epoch, and sums over all that are kept as they change. Pure.

So a lease request needs no look at the other workers, however many there are.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_asgd.core.leases.crowd import ONE, Crowd, Member, fixed
from lightning_asgd.core.leases.self_scheduling import Load
from lightning_asgd.core.protocol import LeaseRequest

_STALE = 8  # times as many changes as workers, of which most are past: they are dropped

Amounts = list[tuple["Counter[Any]", Any, int]]
"""A table, a key and what is added to its entry."""


@dataclass
class WorkerLeases:
    """What is known of a worker in this epoch."""

    held: deque[tuple[int, int]] = field(default_factory=deque)  # granted and not yet applied, in the order of training
    granted: int = 0
    trained: int = 0  # both count units, since the epoch began
    applied: int = 0
    acknowledged: int = 0  # of those applied here, the ones that the worker knows all servers to have
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
    urgency: float = 0.0  # of its request that waits; the least is the first
    turn: int = 0  # its place among the workers, in the order of their first requests

    @property
    def due(self) -> float:
        """When it has probably trained what it holds."""
        return self.at + (self.granted - self.trained) * self.unit_s

    @property
    def waits(self) -> bool:
        """Whether it has trained and pushed all it had, and its request is blocked."""
        return self.waiting is not None and self.waiting.wait

    def load(self, now: float, unit_s: float, size: int) -> Load:
        """What it holds and its final push, for scheduling; the arguments are for a worker of unknown speed or size.

        An overdue worker may need as long again.
        """
        unit_s, size = self.unit_s or unit_s, self.size or size
        due = self.at + (self.granted - self.trained) * unit_s
        backlog = due - now if now <= due else now - due
        return Load(self.flush + (backlog if self.waiting is None else 0.0), unit_s, size)

    def member(self, now: float) -> Member:
        """The same, with its final push and a step, for a crowd; its speed is known."""
        step_s = self.flush + self.size * self.unit_s
        if self.waiting is not None:
            return Member(0, step_s, self.unit_s, self.size)
        drift = 1 if now <= self.due else -1
        return Member(drift, step_s + drift * self.due, self.unit_s, self.size)

    def progress(self, now: float) -> tuple[float, float]:
        """Units that it has probably trained and that are not applied: at second 0, and per second."""
        reported = float(max(0, self.trained - self.applied))
        if not self.unit_s or now < self._rises:
            return reported, 0.0
        if now < self.due:
            rate = 1 / self.unit_s
            return self.trained - self.applied - self.at * rate, rate
        return float(max(0, self.granted - self.applied)), 0.0

    @property
    def _rises(self) -> float:
        """When it has probably trained more than is applied."""
        return self.at + max(0, self.applied - self.trained) * self.unit_s

    def changes(self, now: float) -> float | None:
        """When its expected progress changes next without a report; None if never."""
        return min((at for at in (self._rises, self.due) if at > now), default=None) if self.unit_s else None


class Queues(dict[int, list[tuple[float, int]]]):
    """Per sync interval, the workers whose requests wait, and what they are ordered by."""

    def add(self, request: LeaseRequest, urgency: float) -> None:
        """Have a request wait."""
        insort(self.setdefault(request.segment, []), (urgency, request.worker))

    def remove(self, request: LeaseRequest, urgency: float) -> None:
        """Take a request out, which was added with this urgency."""
        queue = self[request.segment]
        del queue[bisect_left(queue, (urgency, request.worker))]
        if not queue:
            del self[request.segment]


class Counted(NamedTuple):
    """What a worker adds to the sums: a worker, whether others wait for it, and the sync interval that waits for it."""

    worker: WorkerLeases
    counts: bool  # whether it takes part, and has not stopped
    known: bool  # whether it has made a request
    holds: int | None  # the first sync interval that is not over while it holds what it does


class Totals:
    """Sums over workers."""

    def __init__(self) -> None:
        self.crowd = Crowd()  # of those that count
        self.now = -math.inf
        self.others: Counter[int] = Counter()  # that count, by the last segment of which each was granted something
        self.sizes: Counter[int] = Counter()  # units of a step of each, by the same
        self.unsized: Counter[int] = Counter()  # how many of them have steps of unknown size, by the same
        self.holding: Counter[int] = Counter()  # workers that hold units, by the sync interval
        self.places: Counter[int] = Counter()  # where those that count read shards
        self.sums: Counter[str] = Counter()
        self._begin: float | None = None  # second 0 of the crowd
        self._parts: dict[int, tuple[int, Counted, Amounts, Member | None]] = {}  # with the number of the change
        self._put = 0  # changes so far
        self._changes: list[tuple[float, int, int]] = []  # when a part changes by itself: number of change, worker

    @property
    def progress(self) -> float:
        """Units that have probably been trained by now, and are not applied."""
        return max(0.0, (self.sums["progress"] + self.sums["rising"] * self.now) / ONE)

    def advance(self, now: float) -> None:
        """Have time pass; it never goes back."""
        self.now = max(self.now, now)
        self.crowd.now = self.now - (self._begin or 0.0)
        while self._changes and self._changes[0][0] < self.now:
            _, change, number = heapq.heappop(self._changes)
            if number in self._parts and self._parts[number][0] == change:  # else it has changed since
                self.put(number, self._parts[number][1])

    def take(self, number: int) -> None:
        """Count a worker no longer."""
        *_, amounts, member = self._parts.pop(number, (0, None, (), None))
        for table, key, amount in amounts:
            table[key] -= amount
            if not table[key]:
                del table[key]
        if member is not None:
            self.crowd.add(member, -1)

    def put(self, number: int, part: Counted) -> None:
        """Count a worker as it is now."""
        self.take(number)
        amounts, member = self._amounts(part)
        for table, key, amount in amounts:
            table[key] += amount
        if member is not None:
            self.crowd.add(member)
        self._put += 1
        self._parts[number] = self._put, part, amounts, member
        changes = part.worker.changes(self.now) if part.known or part.counts else None
        if changes is not None:
            heapq.heappush(self._changes, (changes, self._put, number))
        if len(self._changes) > _STALE * (1 + len(self._parts)):
            self._changes = [each for each in self._changes if self._parts.get(each[2], (0,))[0] == each[1]]
            heapq.heapify(self._changes)

    def _amounts(self, part: Counted) -> tuple[Amounts, Member | None]:
        worker, counts, known, holds = part
        amounts: Amounts = []
        member = None
        if known:
            begun, rate = worker.progress(self.now)
            amounts += [(self.sums, "lacking", worker.acknowledged < worker.applied and not worker.stopped)]
            amounts += [(self.sums, "progress", fixed(begun)), (self.sums, "rising", fixed(rate))]
        if holds is not None:
            amounts += [(self.holding, holds, 1)]
        if counts:
            size, served = worker.size, worker.served
            amounts += [(self.others, served, 1), (self.sizes, served, size), (self.unsized, served, not size)]
            amounts += [(self.sums, "training", known and not worker.waits)]
            amounts += [(self.sums, "begun", -worker.begun % size)] if worker.begun else []
            amounts += [(self.places, place, 1) for place in worker.places]
            amounts += [(self.sums, "unpaced", not worker.unit_s)]
            if worker.unit_s:
                if self._begin is None:
                    self._begin = worker.at
                    self.crowd.now = self.now - self._begin
                member = worker.member(self.now)
                member = member._replace(end_s=member.end_s - member.drift * self._begin)
                amounts += [(self.sums, "rate", member.rate)] if known else []
        return amounts, member
