"""When a worker exchanges with the servers, and what it does with the answer.

The training thread drives everything: at the start of a batch it merges an answer that has come and, if enough steps
were taken, starts the next exchange. Sending and receiving happen in the transport's own threads meanwhile. At most one
exchange is under way: one that falls due earlier is put off until the answer is there (its steps go into the next
push), so a slow network never stops the training, up to ``max_offline_steps``. None begins that the next sync point
would have to wait for. From a device an update takes a while to this machine's memory, and an answer back: what is to
be sent leaves after the step in which the device has finished that.

What may have to wait is a generator of the futures that it waits for, so that the simulator's one thread can go on with
another worker meanwhile; :func:`run` runs it without a break.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.futures import Future

from lightning_asgd.algorithms.base import Answer
from lightning_asgd.config import ExchangeConfig
from lightning_asgd.errors import ProtocolError, WorkerAwayError
from lightning_asgd.protocol import (
    Exchange,
    ReplicaState,
    Reply,
    nbytes,
)
from lightning_asgd.stats import ExchangeRecord, Verdict
from lightning_asgd.worker.connection import COORDINATOR, done_within
from lightning_asgd.worker.exchange_period import Pace
from lightning_asgd.worker.replica import Replica
from lightning_asgd.worker.shard_client import ShardClient
from lightning_asgd.worker.synchronizer import OwnData, Synchronizer, WorkFeed

__all__ = ["Exchanger", "Training", "Waits"]

_FORGET = 0.8  # what remains at a sync point of how long an exchange took
_MEASURE_S = 5.0  # between two measurements of the distance to the servers
_MEASURE_SHARE = 0.001  # of the time, at most, that they may take

Waits = Iterator[list[Future[Any]]]
"""What a worker does, which stops wherever it has to wait until all of these futures are done."""


def run(waits: Waits) -> None:
    """Run a waiting generator to its end on this thread; calls inside it block."""
    for _ in waits:
        pass


def _blocking(waiting: Callable[[Any], Waits]) -> Callable[[Any], None]:
    """A method that does the same without a break."""

    def block(self: Any) -> None:
        for _ in waiting(self):
            pass

    return block


@dataclass
class _Pending:
    push: bool
    fetch: bool
    epoch: str
    begun: float
    step: int
    local_steps: int
    common: bool  # whether the weights are those that all take
    step_s: float  # seconds per step before it; 0 if unknown
    about: dict[str, Any]  # fields of the message
    cost_s: float = 0.0  # in which the training thread was busy with it
    nbytes: int = 0  # of the update
    futures: list[Future[Any]] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)  # when each server has
    replies: list[Reply] = field(default_factory=list)  # where a checkpoint needed them before they were merged
    answers: list[tuple[Tensor, ...]] = field(default_factory=list)  # the weights in them


@dataclass(frozen=True)
class Training:
    """What an exchanger asks of the training that it serves, and tells it."""

    # Called after a server rejected an update; the weights are the servers' again by then.
    on_refused: Callable[[], None] = lambda: None
    lr: Callable[[], float] = lambda: 0.0  # the present learning rate
    data: WorkFeed = field(default_factory=OwnData)
    measure: bool = False  # whether the distance to the servers is measured now and then


class Exchanger(Synchronizer):
    """Drives the exchange of one worker, or of one of its module's fragments.

    Args:
        shards: on the servers, initialised.
        replica: the worker's weights.
        config: when to exchange.
        training: that it serves.
        fragments: in how many parts the module is exchanged. If these are several, pushes count no units: one is done
            when all fragments have it.
        clock: seconds; given by tests.
    """

    def __init__(
        self,
        shards: ShardClient,
        replica: Replica,
        config: ExchangeConfig,
        training: Training | None = None,
        *,
        fragments: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        training = training or Training()
        super().__init__(replica.layout, len(shards.connection.servers))
        self.shards = shards
        self.client = shards.client
        self.connection = shards.connection
        self.replica = replica
        self.config = config
        self._algorithm = config.algorithm
        # Where answers are held back a worker must not run away meanwhile.
        self._max_offline_steps = 0 if self._algorithm.waits else config.max_offline_steps
        # Nobody else changes the servers' weights: an answer that is what was expected moves none of the worker's.
        self._alone = self.connection.world_size == 1
        self._on_refused = training.on_refused
        self._lr = training.lr
        self._whole = fragments == 1
        # Fragments take turns: the first exchange comes that many steps earlier than after ``nsync``.
        self._lead = config.npush * (fragments - 1 - shards.fragment) // fragments
        self._data = training.data
        self._trip_s = 0.0  # that an exchange probably takes: the shorter one of the latest two
        self._latest_s = 0.0  # that the latest one did
        self._clock = clock
        self._measure_at = clock() if training.measure else math.inf
        self._wished: int | None = None  # steps between two exchanges that the servers want
        self._auto = Pace(config.npush) if config.auto else None
        self._busy_s = 0.0  # with exchanges, since the latest one began
        self._pace: tuple[int, float] | None = None  # steps taken and the time at the last exchange's beginning
        self._seq = 0
        self._since_push = 0
        self._since_fetch = 0
        self._leaving: _Pending | None = None  # the exchange that is sent once the device is through
        self._pending: _Pending | None = None
        self._pushed: list[Exchange] = []  # what was, and acknowledged, since the latest fetch
        self._pushes: list[dict[int, int]] = [{} for _ in self.versions]  # what the weights fetched last hold
        self._done: tuple[tuple[int, int], ...] = ()
        self._epoch = ""

    @property
    def final_once_pushed(self) -> bool:
        """See :class:`Synchronizer`: not where servers do something when all stand at the sync point."""
        return not self._algorithm.waits and not any(t.gathers for t in self._algorithm.transforms)

    @property
    def unacknowledged(self) -> int:
        """See :class:`Synchronizer`."""
        return self._since_push + sum(each.local_steps for each in (self._leaving, self._pending) if each is not None)

    # ------------------------------------------------------------------ the asynchronous phase

    def beginning(self) -> Waits:
        """See :class:`Synchronizer`."""
        if self._pushed and self.replica.remembers:
            # Nothing was trained since the flush. With two pushes between two fetches a lost server could not be told
            # what its weights held of them.
            moved = self.moved
            yield from self.fetching()
            self.moved = moved
        self.replica.resume()
        self._pace = None
        if any(t.holds_at_start for t in self._algorithm.transforms):
            self._start(push=False, fetch=True, full=True)
            yield from self._finish(adopt=True)

    begin = _blocking(beginning)

    def count_step(self) -> None:
        """Note that an optimizer step was taken."""
        super().count_step()
        self.note_step()

    def note_step(self) -> None:
        """The part of :meth:`count_step` that every fragment does for itself."""
        self.moved = True
        self.replica.accrue()
        self._since_push += 1
        self._since_fetch += 1

    @property
    def due(self) -> tuple[bool, bool]:
        """Whether a push, and whether a fetch is due."""
        steps = self.stats.steps
        npush, nfetch = self._wished or self._npush, self._wished or (self._npush if self._auto else self.config.nfetch)
        return (
            self._since_push + self._lead >= self._algorithm.period(npush, steps),
            self._since_fetch + self._lead >= self._algorithm.period(nfetch, steps),
        )

    @property
    def _npush(self) -> int:
        return self.config.npush if self._auto is None else self._auto.period

    @property
    def answered(self) -> bool:
        """Whether an exchange is under way and its answer has come."""
        return self._pending is not None and all(f.done() for f in self._pending.futures)

    def advancing(self) -> Waits:
        """Merge what has come, and start an exchange if one is due. To be called between two batches."""
        self.connection.attend()
        if self._leaving is not None and self.replica.arrived:
            self._send(self._leaving)
        if self.answered:
            yield from self._finish()
        push, fetch = self.due
        if not (push or fetch):
            return
        if self._pending is not None or self._leaving is not None:
            self.stats.deferred += 1
            if self._since_push < self._max_offline_steps:
                return
            yield from self._finish()
        elif self._data.left_s < self._trip_s and self._since_push < self._max_offline_steps:
            return  # the flush would have to wait for it, and what it brings would be replaced at once
        self._data.ask_ahead(self._trip_s)
        self._start(push=push, fetch=fetch)
        if not self.config.overlap:
            yield from self._finish()

    advance = _blocking(advancing)

    # ------------------------------------------------------------------ sync points

    def flushing(self) -> Waits:
        """Wait for the exchange under way, push what was trained since, and let nobody wait for this worker."""
        yield from self._finish(sync=True)
        if self._since_push or self._algorithm.waits:
            self._start(push=self._since_push > 0, fetch=False, rest=True)
            yield from self._finish(sync=True)

    flush = _blocking(flushing)

    def fetching(self, *, park: bool = False, common: bool = False) -> Waits:
        """Take the servers' weights as they are, what was not flushed being lost; see :class:`Synchronizer`.

        ``common`` says whether all workers fetch, while nobody pushes.
        """
        yield from self._finish(sync=True)
        self._trip_s *= _FORGET  # else one that took very long would be the last
        self._start(push=False, fetch=True, may_wait=False, full=True, common=common)
        yield from self._finish(adopt=True, park=park, sync=True)
        self._since_push = 0
        self.moved = False

    def fetch(self, *, park: bool = False) -> None:
        """Fetch at a sync point, without a break."""
        run(self.fetching(park=park, common=self.connection.world_size > 0))

    def _coming_back(self) -> Waits:
        """Join again. What was not applied is lost: others train those data."""
        pending, self._leaving = self._pending, None
        restoring = bool(self.connection.being_restored)
        if not restoring:  # else it may have to begin again, with one server more that is lost
            self._pending = None
        if pending is not None:
            if not all(f.done() for f in pending.futures):
                yield pending.futures
            if not restoring:  # else what was under way is not sent again: others train those data
                with suppress(WorkerAwayError):
                    self.shards.replies(pending.futures)  # if the first server took the push, all must
            for future in pending.futures:  # another server may still read what is on the wire
                done_within(future, self.connection.timeout_s)
        owed = self._owed(pending)
        self.client.must_rejoin, self._pending, self._pushed = False, None, []
        self._data.lose()
        self.client.join(again=True)
        for messages, futures in owed:
            for server in self.connection.may_lack:
                if messages[server].push:
                    self.replica.pack_again(server)
                futures[server] = self.connection.post(server, messages[server])
                self.connection.result(server, futures[server])
        self._since_push = 0
        self.shards.forget_residuals()
        yield from self.fetching()

    come_back = _blocking(_coming_back)

    def _owed(self, pending: _Pending | None) -> list[tuple[list[Exchange], list[Future[Any]]]]:
        """What the coordinator has answered, and servers that are being restored may lack: messages, and futures."""
        owed = []
        if self.connection.may_lack and self._pushed:
            owed.append((self._pushed, list[Future[Any]](Future() for _ in self._pushed)))
        if self.connection.may_lack and pending is not None:
            with suppress(WorkerAwayError):
                self.connection.result(COORDINATOR, pending.futures[COORDINATOR])
                owed.append((self.shards.latest, pending.futures))
        return owed

    def allocate(self, server: int) -> None:
        """See :class:`Synchronizer`."""
        block = self.replica.blocks[server]
        ref = None if block is None else block.ref
        sees = self.shards.allocate(server, ref)
        if not sees and ref is not None:
            raise ProtocolError(
                f"Server {server}, which took a lost one's place, cannot see the memory that worker "
                f"{self.connection.worker} shares with the servers. Expected one on the same machine."
            )

    def held(self, server: int) -> list[ReplicaState]:
        """See :class:`Synchronizer`."""
        fetched, pushes = self.replica.fetched(server), self._pushes[server]
        return [ReplicaState(self.shards.fragment, self.versions[server], fetched, pushes, self._epoch, self._done)]

    def replay(self, server: int) -> None:
        """See :class:`Synchronizer`. The server treats a push that its weights hold as a duplicate."""
        if self._pushed:
            self.replica.pack_again(server)
            self.connection.result(server, self.connection.post(server, self._pushed[server]))
        if self._pending is not None:
            if self._pending.push:
                if server != COORDINATOR and not self._algorithm.waits:
                    # Where that goes on without this worker no other server may have this.
                    self.connection.result(COORDINATOR, self._pending.futures[COORDINATOR])
                self.replica.pack_again(server)
            self._pending.answers = []
            self._pending.futures[server] = self.connection.post(server, self.shards.latest[server])
            self.connection.result(server, self._pending.futures[server])

    def catch_up(self) -> dict[str, Tensor]:
        """See :class:`Synchronizer`.

        Nothing is pushed, and no weights are merged: a program may have put others into the module for this checkpoint,
        and a push at another time than usual would upset the rounds of algorithms that have some. Only a force that has
        come goes into the module: the checkpoint holds the centre.
        """
        self.caught_up = self._epoch, self._done
        if self._leaving is not None:
            self.replica.await_arrival()
            self._send(self._leaving)
        pending = self._pending
        if pending is not None and self._algorithm.answer is Answer.WEIGHTS and pending.fetch:
            if self._algorithm.waits and not self.answered:
                return {}  # others hold the answer back: nobody has newer weights than this worker
            if not self._keep_answers(pending):
                return {}  # what has happened is seen to before the next batch
            self.caught_up = pending.replies[0].epoch, pending.replies[0].done
            return self.replica.ahead(pending.answers, alone=self._alone)
        run(self._finish(sync=True))
        replies = self._look()
        self.caught_up = replies[0].epoch, replies[0].done
        return self.replica.ahead(self.shards.answers(replies, self.replica.wire), alone=self._alone)

    def _keep_answers(self, pending: _Pending) -> bool:
        """Wait for the weights that an exchange brings, and leave them to be merged later.

        False if there are none: the update was rejected, or the others have gone on without this worker.
        """
        if not pending.answers:
            try:
                replies = self.shards.replies(pending.futures)
            except WorkerAwayError:
                return False
            if self._pending is not pending or self.client.must_rejoin or _refused(replies):
                return False
            pending.replies, pending.answers = (
                replies,
                self.shards.answers(replies, self.replica.wire, common=pending.common),
            )
        return True

    def peek(self) -> dict[str, Tensor]:
        """The servers' present weights by name; neither the module nor the exchange is touched."""
        run(self._finish())
        return self.replica.read(self.shards.answers(self._look(), self.replica.wire))

    def _look(self) -> list[Reply]:
        """The servers' present weights, while nothing is on its way through the memory that they come through."""
        self.replica.await_arrival()
        return self.shards.replies(  # never refused: only pushes are
            self.shards.exchange(
                self._seq,
                self.versions,
                push=False,
                fetch=True,
                updates=self.replica.updates(),
                full=True,
            )
        )

    def state(self) -> list[list[Any]]:
        """See :class:`Synchronizer`."""
        return [self.shards.state()]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """See :class:`Synchronizer`."""
        self.shards.state(state[0])

    def samples(self) -> list[dict[str, Tensor]]:
        """See :class:`Synchronizer`. Neither the module nor the exchange is touched."""
        return [self.replica.read(shards) for _, shards in self.shards.samples()]

    def close(self) -> None:
        """Forget the exchange under way and give the buffers back."""
        self._pending = self._leaving = None
        self.replica.close()

    # ------------------------------------------------------------------ one exchange

    def _start(
        self,
        *,
        push: bool,
        fetch: bool,
        may_wait: bool = True,
        rest: bool = False,
        full: bool = False,
        common: bool = False,
    ) -> None:
        fetch = fetch or (push and self._algorithm.answer is not Answer.WEIGHTS)  # the force must reach the worker
        local_steps = self._since_push if push else 0
        begun = self._clock()
        speed = step_s = 0.0
        if push:
            self._seq += 1
            self.replica.pack()
            self.stats.nsync = self._wished or self._npush
            self._since_push = 0
            if not rest:
                self._lead = 0
            if self._pace is not None and begun > self._pace[1] and self.stats.steps > self._pace[0]:
                steps, seconds = self.stats.steps - self._pace[0], begun - self._pace[1]
                speed, step_s = steps / seconds, max(0.0, seconds - self._busy_s) / steps
            self._busy_s = 0.0
            self._pace = (self.stats.steps, begun)
        if fetch:
            self._since_fetch = 0
        epoch, units = self._data.trained if self._whole else ("", 0)
        about = {
            "push": push,
            "fetch": fetch,
            "within_bounds": push and self.replica.within_bounds,
            "steps": local_steps,
            "lr": self._lr(),
            "speed": speed,
            "nsync": self._npush,
            "may_wait": may_wait and not rest,
            "rest": rest,
            "full": full,
            "epoch": epoch,
            "units": units,
            "batch": self._data.batch,
        }
        pending = _Pending(push, fetch, epoch, begun, self.stats.steps, local_steps, common, step_s, about)
        pending.cost_s = self._clock() - begun
        if self.replica.arrived:
            self._send(pending)
        else:
            self._leaving = pending

    def _send(self, pending: _Pending) -> None:
        """Send an exchange's messages."""
        begun, self._leaving = self._clock(), None
        pending.futures = self.shards.exchange(
            self._seq,
            self.versions,
            updates=self.replica.updates(),
            common=self.shards.common_names(self.replica.weights) if pending.common else None,
            **pending.about,
        )
        if pending.push:
            pending.nbytes = sum(self._nbytes(s, message.update) for s, message in enumerate(self.shards.latest))
        pending.cost_s += self._clock() - begun
        self._busy_s += pending.cost_s
        self._pending = pending
        for future in pending.futures:
            future.add_done_callback(lambda _: pending.answered.append(self._clock()))

    def _finish(self, *, adopt: bool = False, park: bool = False, sync: bool = False) -> Waits:
        if self._leaving is not None:
            self.replica.await_arrival()  # the device trains meanwhile: that is no waiting for an exchange
            self._send(self._leaving)
        pending = self._pending
        if pending is None:
            return
        waiting_since = self._clock()
        if not self.answered:
            yield pending.futures
        try:
            replies = self.shards.replies(pending.futures)
        except WorkerAwayError:
            yield from self._coming_back()
            return
        if self._pending is not pending:  # while it waited for a server to be restored it has come back
            return
        if self.client.must_rejoin:  # before the next push reaches some servers and not others
            yield from self._coming_back()
            return
        self._pending = None
        merging_since = self._clock()
        wait_s = merging_since - waiting_since
        trip_s = max(pending.answered, default=merging_since) - pending.begun
        if pending.push and pending.fetch:
            self._trip_s, self._latest_s = min(trip_s, self._latest_s or trip_s), trip_s
        refused = _refused(replies)
        if pending.fetch:
            # The versions move on only with the weights: a push is as stale as the weights it was trained from.
            self.versions = [r.version for r in replies]
            self._pushes = [r.pushes for r in replies]
            self._done, self._epoch = replies[0].done, replies[0].epoch
            self._pushed = []
            answers = pending.answers or self.shards.answers(replies, self.replica.wire, common=pending.common)
            if adopt:
                self.replica.adopt(answers, park=park, alone=self._alone and park)
            else:
                if pending.push and merging_since >= self._measure_at:
                    self._measure(answers)
                fresh, alone = refused or self._since_push == 0, self._alone and not refused
                self.replica.merge(answers, pushed=pending.push, fresh=fresh, alone=alone)
        elif pending.push:
            self._pushed = self.shards.latest
        wishes = [r.nsync for r in replies if r.nsync]
        self._wished = max(wishes) if wishes and max(wishes) != self._npush else None
        merge_s, device_s = self._clock() - merging_since, self.replica.took_s()
        self._busy_s += merge_s + wait_s
        if self._auto is not None and not sync and pending.push and pending.fetch:
            near = any(block is not None for block in self.replica.blocks)  # servers that take this machine's cores
            taken_s = sum(r.busy_s for r in replies) if near else 0.0
            cost_s = max(pending.cost_s + merge_s, device_s) + taken_s  # a device works while this thread does
            self._auto.note(step_s=pending.step_s, trip_s=trip_s, cost_s=cost_s)
        self._record(pending, replies, wait_s, sync)
        if refused:
            self._since_push = 0
            self.shards.forget_residuals()
            if not pending.fetch or self._algorithm.answer is not Answer.WEIGHTS:
                yield from self.fetching()
            self._on_refused()

    def _measure(self, answers: list[tuple[Tensor, ...]]) -> None:
        """Note how far this worker is from the servers, as seldom as costs next to nothing."""
        begun = self._clock()
        distance = self.replica.distance(answers)
        if math.isfinite(distance):
            self.stats.distance = distance
        now = self._clock()
        self._measure_at = now + max(_MEASURE_S, (now - begun) / _MEASURE_SHARE)

    def _nbytes(self, server: int, parts: Any) -> int:
        """Bytes of a shard that went one way, also where they went through shared memory."""
        return self.replica.layout.shard_nbytes(server) if parts is None else nbytes(parts)

    def _record(self, pending: _Pending, replies: list[Reply], wait_s: float, sync: bool) -> None:
        received = sum(self._nbytes(s, r.weights) for s, r in enumerate(replies)) if pending.fetch else 0
        record = ExchangeRecord(
            step=pending.step,
            versions=tuple(r.version for r in replies),
            staleness=tuple(r.staleness for r in replies),
            verdicts=tuple(r.verdict for r in replies),
            round_trip_s=self._clock() - pending.begun,
            wait_s=0.0 if sync else wait_s,
            bytes_pushed=pending.nbytes,
            bytes_fetched=received,
            local_steps=pending.local_steps,
            shared=any(block is not None for block in self.replica.blocks),
        )
        self.stats.sync_wait_s += wait_s if sync else 0.0
        self.stats.add(record, pushed=pending.push, fetched=pending.fetch)


def _refused(replies: Sequence[Reply]) -> bool:
    return any(r.verdict is Verdict.REFUSED for r in replies)
