"""Which batches a worker trains: it leases a few at a time from the coordinator, so that faster workers train more.

See :mod:`lightning_asgd.core.leases.table` for units, segments, and who is granted what. The worker's side
knows no Lightning: a sampler takes batches to load (:meth:`DataLeases.take`), and the training loop reports when each
begins and ends.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch.futures import Future

from lightning_asgd.core.foundation.errors import ServerLostError, WorkerAwayError
from lightning_asgd.core.foundation.ranges import without
from lightning_asgd.core.leases.plan import LeasedBatch, Plan, ReadingPlan
from lightning_asgd.core.protocol import Epoch, LeaseGrant, LeaseHoldings, LeaseRequest, OpenEpoch
from lightning_asgd.core.worker.connection import COORDINATOR, GRACE_S, done_within
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.synchronizer import WorkFeed

_T = TypeVar("_T")


class Live:
    """Base of objects that ``copy.deepcopy`` returns as they are: a copied Trainer is not another worker."""

    def __deepcopy__(self: _T, memo: Any) -> _T:
        return self


@dataclass
class Asked:
    """A lease request in flight."""

    future: Future[Any]
    trained: int
    begun: float
    timeout_s: float | None
    stop: bool
    halt: bool
    client: SessionClient  # it was sent over: a new layout brings another one
    restored: int  # how often the coordinator had been restored
    ended: tuple[int, ...]  # the ends of shards that it reported
    answered: list[float] = field(default_factory=list)

    def grant(self) -> LeaseGrant:
        """Wait for the answer; after a time-out nothing is granted, and the segment counts as over."""
        connection = self.client.connection
        if self.timeout_s is not None and not connection.wait(self.future, self.timeout_s):
            return LeaseGrant(over=True)
        grant: LeaseGrant = connection.result(COORDINATOR, self.future)
        members = self.client.members[COORDINATOR]
        members.incarnations |= grant.incarnations
        members.left = dict(grant.left)
        return grant


_SMOOTH = 0.3  # weight of the latest step in the unit_s
_AHEAD = 1.5  # times the seconds that an answer takes: when to ask for more before the work is out


class DataLeases(WorkFeed, Live):
    """A worker's part of the shared epochs. Once fenced, ``rejoin`` rejoins the session and calls :meth:`revoke`."""

    def __init__(
        self,
        client: Callable[[], SessionClient],
        *,
        timeout_s: float = 1800.0,
        rejoin: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._rejoin = rejoin
        self._clock = clock
        self.granted_wait_s = 0.0  # in which training waited for a lease
        self.others_wait_s = 0.0  # in which it waited for the others to train their leases
        self._exchange_s = 0.0  # round trip of a request
        self._plan: Plan | None = None
        self.reset()

    def reset(self, plan: Plan | None = None) -> None:
        """Forget the present epoch."""
        if self._plan is not None:
            self._plan.close()
        self._plan = plan
        self.segment = 0
        self.halted = self._stopped = False  # whether a worker has ended the present epoch early, for all or for itself
        self.exhausted = False  # whether its shards are, whatever the end of the segment
        self._waiting: deque[LeasedBatch] = deque()  # granted, not yet given to the loader
        self._loading: deque[LeasedBatch] = deque()  # given to the loader, not yet trained
        self._unapplied: deque[tuple[int, int]] = deque()  # per trained step, those taken until then, and its units
        self._granted: list[tuple[int, int]] = []  # ranges of units, without those of void grants
        self._served = -1  # the last segment of which anything was
        self._fed = -1  # the last segment of which there was a batch
        self._ended: list[int] = []  # see `LeaseRequest`; of the present epoch
        self._unreported: list[int] = []  # those that the coordinator may not know
        self._returned: tuple[tuple[int, int], ...] = ()  # see `LeaseRequest`; it may not know this either
        self._trained = self._applied = 0  # units
        self._unfinished: int | None = None  # the step of the batch that was trained last, if it has more
        self._dry = False  # whether the loader knows that the sync interval is over
        self._final = False  # whether there are probably no more units before the next sync point
        self._progress, self._ratio, self._since = 0.0, 1.0, 0
        self._reached = 0.0
        self._begun: float | None = None
        self._asked: Asked | None = None
        self._opens: Epoch | None = None  # the epoch that the next request opens
        self.unit_s = self._trip = 0.0
        self._flushes: deque[float] = deque(maxlen=3)  # durations of the latest flushes

    # ------------------------------------------------------------------ the loader's side

    def open(self, plan: Plan) -> None:
        """Begin an epoch, or begin to load the rest of it again."""
        self._dry = False
        if self._plan is not None and self._plan.epoch.key == plan.epoch.key:
            self._waiting.extendleft(reversed(self._loading))
            self._loading.clear()
            return
        known = self.unit_s, self._trip, self._flushes
        self.reset(plan)
        self.unit_s, self._trip, self._flushes = known
        done = plan.epoch.done
        if self._client().connection.world_size:
            self._opens = plan.epoch
        else:  # without sync points a late worker skips segments that are over
            done = self._open(plan.epoch)
        first = next((last for start, last in sorted(done) if start == 0), 0)  # first unit that is not done
        self._progress = float(sum(last - first for first, last in done))
        reached = int(self._progress) if plan.epoch.shards else first
        self.segment = min(bisect_right(plan.epoch.ends, reached), len(plan.epoch.ends) - 1)

    def take(self) -> Any:
        """Samples of the next batch to load; None if there is none now."""
        if not self._waiting and not self._get():
            self._dry = True
            return None
        self._dry = False
        batch = self._waiting.popleft()
        self._loading.append(batch)
        # Request early enough that there is still work while the answer is in flight, also on a slow network.
        if self._lasts_s() <= _AHEAD * self._trip or self.plan.runs_low:
            self._ask_early()
        return batch.samples

    def _lasts_s(self, loading: int = 0) -> float:
        """Expected seconds to train what was granted, with some of the batches that are being loaded."""
        return ((len(self._waiting) + loading) * (self.plan.batch or 1) + self.plan.unread) * self.unit_s

    def _ask_early(self, rtt_s: float = 0.0) -> None:
        if self._asked is None and not self._final:
            self._asked = self._ask(rtt_s=rtt_s)

    # ------------------------------------------------------------------ the training's side

    @property
    def plan(self) -> Plan:
        """The present epoch."""
        if self._plan is None:
            raise RuntimeError("no epoch was opened")
        return self._plan

    @property
    def opened(self) -> str:
        """Key of the present epoch; empty before the first."""
        return "" if self._plan is None else self._plan.epoch.key

    @property
    def last(self) -> bool:
        """Whether the present segment is the epoch's last."""
        return self.exhausted or self.segment + 1 == len(self.plan.epoch.ends)

    @property
    def reached(self) -> int:
        """Units that all workers have trained once the present segment is over."""
        return int(self._progress) if self.exhausted else self.plan.epoch.ends[self.segment]

    @property
    def dry(self) -> bool:
        """Whether the loader knows that the sync interval is over, and has no batch in flight."""
        return self._dry and not self._loading

    def ends(self, *, waits: bool) -> bool:
        """Whether the present batch is probably this worker's last in the epoch; ``waits`` if a grant is on its way."""
        alone = len(self._loading) == 1 and not self._waiting and self.plan.unread == 0
        if alone and self._asked is not None and (waits or self._asked.future.done()):
            alone = not self._take_prefetched()
        return alone and (self._dry or self._final) and self.last and self.closes

    @property
    def closes(self) -> bool:
        """Whether the batch that is trained now is the last one of its optimizer step."""
        return bool(self._loading) and not self._loading[0].left

    @property
    def counts(self) -> bool:
        """Whether the update of the batch that is trained now counts."""
        return not (self._loading and self._loading[0].void)

    def accumulate(self, batches: int) -> None:
        """Set the number of batches per optimizer step for future grants."""
        self._plan = replace(self.plan, accumulate=batches)

    @property
    def progress(self) -> float:
        """Estimate of the units that all workers have trained in this epoch; it never falls."""
        end = self.plan.epoch.ends[self.segment]
        now = min(float(end), self._progress + self._ratio * (self._trained - self._since))
        self._reached = max(self._reached, now)
        return self._reached

    @property
    def share(self) -> float:
        """This worker's part of the units that are left."""
        return 1 / max(self._ratio, 1.0)

    @property
    def left_s(self) -> float:
        """Expected seconds until this worker pushes the rest of its part of the segment; infinite if unknown."""
        if self._plan is None or not self.unit_s:
            return math.inf
        units = self.plan.epoch.ends[self.segment] - self.progress
        return units * self.share * self.unit_s - self._flush

    def begin_batch(self, begun_s: float = 0.0) -> None:
        """A batch is about to be trained, on which some seconds have been spent already."""
        if self._begun is None:
            self._begun = self._clock() - begun_s

    def end_batch(self, steps: int) -> bool:
        """Note a batch's end after ``steps`` of this fit. Returns False if its update must not reach the servers."""
        if not self._loading:
            return True
        batch = self._loading.popleft()
        self._unfinished = batch.step if batch.left else None
        if batch.void:
            self._begun = None
            return False
        if batch.left:
            return True
        now = self._clock()
        if self._begun is not None:
            took = (now - self._begun) / batch.units
            self.unit_s = took if not self.unit_s else (1 - _SMOOTH) * self.unit_s + _SMOOTH * took
        self._begun = now
        self._trained += batch.units
        self._unapplied.append((steps, batch.units))
        return True

    @property
    def trained(self) -> tuple[str, int]:
        """The epoch, and how many of the units granted in it were trained: what a push holds the updates of."""
        return self.opened, self._trained

    @property
    def own(self) -> list[tuple[int, int]]:
        """Ranges of the units that this worker has trained in this epoch."""
        left, own = self._trained, []
        for first, last in self._granted:
            if trained := min(left, last - first):
                own.append((first, first + trained))
            left -= trained
        return own

    @property
    def part(self) -> LeaseHoldings | None:
        """This worker's part of the present epoch, for the replacement of a lost coordinator."""
        if self._plan is None:
            return None
        about = self._trained, self._served, tuple(self._ended), self._applied, self._stopped
        return LeaseHoldings(self._plan.epoch, tuple(self._granted), *about)

    def revoke(self) -> None:
        """Drop all leases after this worker was fenced: the others have them, and its counts start over.

        Called before it rejoins. Batches already fetched are trained and their updates discarded.
        """
        asked, self._asked = self._asked, None
        if asked is not None:  # else it could arrive after the worker has rejoined
            done_within(asked.future, self._timeout_s)
        # A step that has begun is completed: Lightning's steps end after a fixed number of batches.
        begun = self._loading[-1].step if self._loading else self._unfinished
        self._waiting = deque(replace(batch, void=True) for batch in self._waiting if batch.step == begun)
        self._loading = deque(replace(batch, void=True) for batch in self._loading)
        self._unapplied.clear()
        self._granted.clear()
        self._trained = self._applied = self._since = 0
        self._final, self._begun = False, None
        self._unreported.clear()
        self._returned = ()
        if self._plan is not None:  # a server that was restored meanwhile may not know of it
            self._opens = self._plan.epoch
            self._plan.drop()

    def more(self, acknowledged: int) -> bool:
        """Whether there is another batch in this segment, as far as is known without waiting.

        ``acknowledged`` are the optimizer steps of this worker that the servers have, here and below.
        """
        self._note(acknowledged)
        return bool(self._loading or self._waiting) or self._get()

    @property
    def _flush(self) -> float:
        """Expected seconds of the final push. The median, since one flush may have waited for a lost server."""
        return statistics.median(self._flushes) if self._flushes else self._exchange_s / 2

    def ask_ahead(self, seconds: float) -> None:
        """Request enough units to last for an exchange (0 s: unknown), which is about to fill the network's queues."""
        self._exchange_s = seconds
        if self._plan is not None and (not seconds or self._lasts_s(len(self._loading)) < seconds):
            self._ask_early(seconds)

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """Measure the final push: the others learn how long it takes, and train more meanwhile."""
        begun = self._clock()
        yield
        self._flushes.append(self._clock() - begun)

    def wait(self, acknowledged: int) -> bool:
        """Wait until all have trained the segment. Returns whether there is another batch. Updates must be flushed."""
        self._note(acknowledged)
        more = self._take(self._ask(wait=True))
        while more and not self._waiting and not self._get():  # none of what was granted exists
            self._note(acknowledged)
            more = self._take(self._ask(wait=True))
        return self._has_waited(more=more)

    def _has_waited(self, *, more: bool) -> bool:
        self._begun = None
        self._reached = self._reached if more or self.halted else float(self.reached)
        return more

    def next_interval(self) -> None:
        """Move on to the next segment, if there is one, after all have trained the present one."""
        if not self.last:
            self.segment += 1
            self._final = False

    def stop(self, acknowledged: int, *, halt: bool = False) -> None:
        """Stop training in this epoch and release what is left to the others, unless ``halt`` ends it for them too."""
        self.halted |= halt
        self._note(acknowledged)
        self._take_prefetched()  # else it could arrive after what follows
        self._waiting.clear()
        self._loading.clear()
        self.plan.drop()
        self._take(self._ask(stop=True, halt=halt))
        self._granted = self.own

    def done(self) -> tuple[tuple[int, int], ...]:
        """Ranges of units whose updates have been applied, of all workers."""
        return self._open(self.plan.epoch)

    # ------------------------------------------------------------------ helpers

    def _open(self, epoch: Epoch) -> tuple[tuple[int, int], ...]:
        while True:
            try:
                connection = self._client().connection
                done: tuple[tuple[int, int], ...] = connection.ask(COORDINATOR, OpenEpoch(*connection.sender, epoch))
                return done
            except WorkerAwayError:
                self._rejoin()

    def _note(self, acknowledged: int) -> None:
        while self._unapplied and self._unapplied[0][0] <= acknowledged:
            self._applied += self._unapplied.popleft()[1]

    def _get(self) -> bool:
        """Make sure that a batch is ready. Returns False if only units that other workers hold are left."""
        return self._read(self.plan) if isinstance(self.plan, ReadingPlan) else self._request()

    def _read(self, plan: ReadingPlan) -> bool:
        """Read a step's samples from shards; fewer, if others hold the rest. Returns whether there are any."""
        last = False
        while (end := plan.fill(last=last)) is not None or (plan.wants_more and not last):
            if end is not None:
                self._report_end(plan, end)
                last = False
            elif plan.has_step and not (self._final or (self._asked is not None and self._asked.future.done())):
                break  # what follows is asked for while this step is trained
            else:
                last = not self._request()
        batches, left_out = plan.next_steps(self._trained, last=last, void=self._fed < self.segment)
        self._waiting.extend(batches)
        if left_out:
            self._trained += left_out  # with the steps before
            self._unapplied.append((0, left_out))
        if batches:
            self._fed = self.segment
        return bool(batches)

    def _report_end(self, plan: ReadingPlan, number: int) -> None:
        """Report the end of a shard. Nothing that was granted later may be trained before the coordinator knows it."""
        self._take_prefetched()  # it may hold more of the shard
        if any(first in range(*plan.epoch.shard(number)) for first, _ in self._granted):  # else all was revoked
            found = plan.end(number)
            for first, last in ((number, found.end), *found.returned):
                self._granted = without(self._granted, first, last)
            self._ended.append(number)
            self._unreported.append(number)
            self._returned = found.returned
            self._take(self._ask())

    def _request(self) -> bool:
        """Whether there are more units for this worker, as far as is known without waiting for others."""
        if self._asked is not None:
            return self._take_prefetched()
        return not self._final and self._take(self._ask())

    def _take_prefetched(self) -> bool:
        """Take the answer of an early request, if there was one."""
        asked, self._asked = self._asked, None
        return asked is not None and self._take(asked)

    def _ask(self, *, wait: bool = False, stop: bool = False, halt: bool = False, rtt_s: float = 0.0) -> Asked:
        begun, timeout_s, client, self._stopped = self._clock(), self._timeout_s if wait else None, self._client(), stop
        connection, restored = client.connection, client.connection.restored[COORDINATOR]
        at = self.plan.epoch.key, self.segment
        message = LeaseRequest(
            *(*connection.sender, *at, self._trained, self._applied, self.unit_s, max(rtt_s, self._trip)),
            flush=self._flush,
            wait=wait,
            stop=stop,
            halt=halt,
            opens=self._opens,
            ended=tuple(self._unreported),
            returned=self._returned,
            **self.plan.wishes,
        )
        future = connection.post(COORDINATOR, message, None if timeout_s is None else timeout_s + GRACE_S)
        asked = Asked(future, self._trained, begun, timeout_s, stop, halt, client, restored, message.ended)
        future.add_done_callback(lambda _: asked.answered.append(self._clock()))
        return asked

    def _take(self, asked: Asked) -> bool:
        """Take a grant. Returns whether it holds any units."""
        client, grant, waiting_since = asked.client, None, self._clock()
        try:
            grant = asked.grant()
        except WorkerAwayError:
            self._rejoin()
        except ServerLostError as error:
            client.connection.recover(error)
        if asked.timeout_s is None:
            self.granted_wait_s += self._clock() - waiting_since
        else:
            self.others_wait_s += self._clock() - waiting_since
        if grant is None or client.connection.restored[COORDINATOR] != asked.restored:  # it does not know of it
            return self._take(self._ask(wait=asked.timeout_s is not None, stop=asked.stop, halt=asked.halt))
        self._opens = None
        if asked.timeout_s is None:  # else it was blocked
            took = max(asked.answered, default=self._clock()) - asked.begun
            self._trip = max(took, (1 - _SMOOTH) * self._trip)
        self._progress, self._ratio, self._since, self._final = grant.progress, grant.ratio, asked.trained, grant.final
        self.halted |= grant.halted
        self.exhausted |= grant.exhausted
        self._unreported = [number for number in self._unreported if number not in asked.ended]
        self._returned = ()
        for first, last in grant.ranges:
            granted = self.plan.batches(first, last)
            self._waiting.extend(replace(batch, void=True) if grant.void else batch for batch in granted)
            self._served = self.segment
            if not grant.void:
                self._granted.append((first, last))
        return bool(grant.ranges)
