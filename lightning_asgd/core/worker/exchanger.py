"""When a worker exchanges with the servers, and what it does with the answer.

The training thread drives everything: at the start of a batch it merges an answer that has come and, if enough steps
were taken, starts the next exchange. Sending and receiving happen in the transport's own threads meanwhile. At most one
exchange is in flight: if the next one falls due earlier it is deferred until the answer is there (its steps go into
the next push), so a slow network never stops training, up to ``max_offline_steps``. No exchange begins that the next
sync point would have to wait for. On a device, copies to and from host memory take a while: an update is sent after the
step in which its copy has finished. A module may be exchanged in several fragments, at times of their own.

A method that may have to wait is a generator of the futures that it waits for, so that the simulator's only thread can
run another worker meanwhile. Elsewhere it is run to its end, and waits for them itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

from torch import Tensor

from lightning_asgd.core.algorithms.base import Answer
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.errors import WorkerAwayError
from lightning_asgd.core.foundation.layout import Layout
from lightning_asgd.core.foundation.stats import UNAPPLIED, ExchangeStats, Verdict
from lightning_asgd.core.protocol import Exchange
from lightning_asgd.core.worker.exchange_period import Schedule, Turns
from lightning_asgd.core.worker.replica import Replica
from lightning_asgd.core.worker.shard_client import InFlight, ShardClient
from lightning_asgd.core.worker.synchronizer import Held, Skipped, Training, Waits, run
from lightning_asgd.fragments.fragments import Fragments
from lightning_asgd.recovery.exchange_recovery import ExchangeLog

_MEASURE_S = 5.0  # between two measurements of the distance to the servers
_MEASURE_SHARE = 0.001  # of the time, at most, that they may take


class ExchangeKind(Enum):
    """What an exchange is for."""

    REGULAR = auto()  # it fell due between two batches
    FLUSH = auto()  # the remaining steps at a sync point, where no worker waits for this one any more
    FETCH = auto()  # the servers' weights, whole and at once
    FETCH_AT_SYNC_POINT = auto()  # those that all workers take, while none pushes
    HOLD_AT_START = auto()  # the first weights after a sync point, which a transform may hold back


class Channel:
    """The exchanges of one fragment, at most one in flight. With several ``fragments`` pushes count no units."""

    def __init__(
        self,
        shards: ShardClient,
        replica: Replica,
        config: ExchangeConfig,
        training: Training,
        turns: Turns,
        clock: Callable[[], float],
    ) -> None:
        self.shards, self.replica = shards, replica
        self.log = ExchangeLog(shards, replica, training.data, waits=config.algorithm.waits)
        lead = turns.lead(shards.fragment)
        self.turns, self.schedule = turns, Schedule(config, lead, training.period, turns, shards.fragment)
        self.leaving: InFlight | None = None  # the exchange that is sent once the device has copied it
        self.stats = ExchangeStats()  # of all channels; set by the exchanger
        self.moved = False  # whether steps were taken since the last :meth:`fetch`
        self.caught_up: Held = ("", ())
        self._algorithm, self._training = config.algorithm, training
        self._whole = turns.fragments == 1
        self.come_back: Callable[[], Waits] = self.rejoin  # also of the other fragments; set by the exchanger
        self._alone = shards.connection.world_size == 1  # no other worker has changed the weights fetched last
        self._clock, self._measure_at = clock, clock() if training.measure else math.inf
        self._pushed_units = training.units.total

    @property
    def answered(self) -> bool:
        """Whether the exchange in flight has been answered."""
        return (each := self.log.in_flight) is not None and not each.held and all(f.done() for f in each.futures)

    @property
    def unacknowledged(self) -> int:
        """Steps that servers have not acknowledged."""
        begun = (each for each in (self.leaving, self.log.in_flight) if each is not None)
        return self.schedule.since_push + sum(each.message.steps for each in begun)

    def start(self, kind: ExchangeKind = ExchangeKind.REGULAR, *, push: bool = False, fetch: bool = True) -> None:
        """Begin an exchange: pack, and send unless the device still copies."""
        rest = kind is ExchangeKind.FLUSH
        fetch = fetch or (push and self._algorithm.answer is not Answer.WEIGHTS)  # the force must reach the worker
        begun, local_steps, speed, step_s = self._clock(), 0, 0.0, 0.0
        if push:
            local_steps = self.schedule.since_push
            self.log.seq += 1
            self.replica.pack(thorough=rest)
            self.stats.nsync = self.schedule.nsync
            speed, step_s = self.schedule.pushed(self.stats.steps, begun, rest=rest)
        if fetch:
            self.schedule.since_fetch = 0
        epoch, units = self._training.data.trained if self._whole else ("", 0)
        message = Exchange(
            *self.shards.connection.sender,
            self.log.seq,
            0,
            push,
            fetch,
            steps=local_steps,
            lr=self._training.lr(),
            speed=speed,
            nsync=self.schedule.npush,
            may_wait=kind in (ExchangeKind.REGULAR, ExchangeKind.HOLD_AT_START),
            rest=rest,
            within_bounds=push and self.replica.within_bounds,
            full=kind not in (ExchangeKind.REGULAR, ExchangeKind.FLUSH),
            common="" if kind is ExchangeKind.FETCH_AT_SYNC_POINT else None,
            epoch=epoch,
            units=units,
            batch=self._per_step(local_steps),
        )
        self.leaving = InFlight(message, begun, self.stats.steps, step_s, cost_s=self._clock() - begun)
        if self.replica.arrived:
            self.send(self.leaving)

    def _per_step(self, steps: int) -> float:
        """What a step of a push has trained on average; 0 if that is not known."""
        units = self._training.units
        if not units.name:
            return self._training.data.batch
        before, self._pushed_units = self._pushed_units, units.total if steps else self._pushed_units
        return (self._pushed_units - before) / max(steps, 1)

    def send(self, leaving: InFlight) -> None:
        """Send the messages of an exchange that was begun."""
        begun, self.leaving = self._clock(), None
        common = None if leaving.message.common is None else self.shards.common_names(self.replica.weights)
        rows = self.replica.row_updates(push=leaving.message.push)
        leaving.futures = self.shards.exchange(leaving.message, self.log.versions, self.replica.updates(), common, rows)
        leaving.nbytes = self.shards.pushed_nbytes if leaving.message.push else 0
        leaving.cost_s += self._clock() - begun
        self.schedule.busy_s += leaving.cost_s
        self.log.in_flight = leaving
        for future in leaving.futures:
            future.add_done_callback(lambda _: leaving.answered.append(self._clock()))

    def finish(self, *, adopt: bool = False, park: bool = False, sync: bool = False) -> Waits:
        """Wait for the answer of the exchange in flight, if there is one, and merge or adopt it."""
        if self.leaving is not None:
            self.replica.await_arrival()  # the device trains meanwhile, so this is not a wait for an exchange
            self.send(self.leaving)
        log, schedule, pending, connection = self.log, self.schedule, self.log.in_flight, self.shards.connection
        if pending is None:
            return
        waiting_since = self._clock()
        if not self.answered:
            yield pending.futures
        try:
            replies = self.shards.replies(pending.futures)
        except WorkerAwayError:
            return (yield from self.come_back())
        if log.in_flight is not pending:  # it has rejoined while it waited for a server's recovery
            return
        if self.shards.client.must_rejoin:  # before the next push reaches some servers and not others
            return (yield from self.come_back())
        log.in_flight, pending.replies = None, replies
        merging_since = self._clock()
        push, fetch, wait_s = pending.message.push, pending.message.fetch, merging_since - waiting_since
        trip_s = max(pending.answered, default=merging_since) - pending.begun
        refused = any(r.verdict is Verdict.REFUSED for r in replies)
        if fetch:
            if connection.world_size == 0:  # others may join, and leave
                newer = max(r.version - before for r, before in zip(replies, log.versions, strict=True))
                mine = all(set(r.pushes) <= {connection.worker} for r in replies)
                self._alone = mine and newer <= push + bool(log.pushed)
            # Versions advance only with the weights: a push is as stale as the weights it was trained from.
            log.versions, self.stats.outer_gain = [r.version for r in replies], replies[0].gain
            log.pushes = [r.pushes for r in replies]
            log.done, log.epoch, log.pushed = replies[0].done, replies[0].epoch, []
            answers = pending.answers or self.shards.answers(replies, self.replica.wire)
            if adopt or (refused and self._algorithm.answer is Answer.WEIGHTS):  # the steps are lost
                self.replica.adopt(answers, park=park, alone=self._alone and park)
            else:
                if push and merging_since >= self._measure_at:
                    self._measure(answers)
                fresh, alone = refused or schedule.since_push == 0, self._alone and not refused
                self.replica.merge(answers, pushed=push, fresh=fresh, alone=alone)
        elif push:
            log.pushed = self.shards.latest
        schedule.replied(max(r.nsync for r in replies), refused=refused)
        merge_s, device_s = self._clock() - merging_since, self.replica.took_s()
        schedule.busy_s += merge_s + wait_s
        if push and fetch:
            servers_s = sum(r.busy_s for r in replies) if self.replica.shares_memory else 0.0  # of this machine
            cost_s = max(pending.cost_s + merge_s, device_s) + servers_s  # a device works while this thread does
            schedule.answered(pending.step, step_s=pending.step_s, trip_s=trip_s, cost_s=cost_s, sync=sync)
        self.stats.sync_wait_s += wait_s if sync else 0.0
        record = self.shards.record(pending, round_trip_s=self._clock() - pending.begun, wait_s=0.0 if sync else wait_s)
        self.stats.add(record, pushed=push, fetched=fetch)
        if unapplied := [s for s, r in enumerate(replies) if r.verdict in UNAPPLIED]:
            self.shards.give_up(unapplied)
        if refused:
            self._forget_steps()
            if not fetch or self._algorithm.answer is not Answer.WEIGHTS:
                yield from self.fetch()
            self._training.on_refused()

    def _forget_steps(self) -> None:
        self.schedule.since_push, self._pushed_units = 0, self._training.units.total

    def fetch(self, kind: ExchangeKind = ExchangeKind.FETCH, *, park: bool = False) -> Waits:
        """Adopt the servers' weights."""
        yield from self.finish(sync=True)
        self.schedule.forget_trip()
        connection, restored = self.shards.connection, list[int]()
        while restored != connection.restored:  # a server that was lost meanwhile answers before all have replayed
            restored = list(connection.restored)
            self.start(kind)
            yield from self.finish(adopt=True, park=park, sync=True)
        self._forget_steps()
        self.moved, self.caught_up = False, (self.log.epoch, self.log.done)

    def rejoin(self) -> Waits:
        """Rejoin, with the servers' weights."""
        self.leaving = None
        yield from self.log.rejoin()
        self._forget_steps()
        self.schedule.rejoin()
        self.shards.give_up(self.log.take_unapplied())
        yield from self.fetch()

    def catch_up(self) -> dict[str, Tensor]:
        """See :meth:`Synchronizer.catch_up`.

        Nothing is pushed or merged: a program may have put other weights into the module for this checkpoint, and an
        extra push would upset algorithms with rounds. Only a force that has arrived goes into the module: the
        checkpoint holds the centre.
        """
        self.caught_up = self.log.epoch, self.log.done
        if self.leaving is not None:
            self.replica.await_arrival()
            self.send(self.leaving)
        pending = self.log.in_flight
        if pending is not None and self._algorithm.answer is Answer.WEIGHTS and pending.message.fetch:
            if self._algorithm.waits and not self.answered:
                return {}  # the answer may be held for long, until other workers have pushed
            if not self.log.keep_answers(pending):
                return {}  # the failure is handled before the next batch
            replies, answers = pending.replies, pending.answers
        else:
            run(self.finish(sync=True))
            replies, answers = self.log.peek()
        self.caught_up = replies[0].epoch, replies[0].done
        return self.replica.ahead(answers)

    def peek(self) -> dict[str, Tensor]:
        """See :meth:`Synchronizer.peek`."""
        run(self.finish())
        return self.replica.read(self.log.peek()[1])

    def close(self) -> None:
        """Forget the exchange in flight and release the buffers."""
        self.log.in_flight = self.leaving = None
        self.replica.close()

    def _measure(self, answers: list[tuple[Tensor, ...]]) -> None:
        """Measure the distance to the servers' weights, rarely enough to cost next to nothing."""
        begun = self._clock()
        distance = self.replica.distance(answers)
        if math.isfinite(distance):
            self.stats.distance = distance
        now = self._clock()
        self._measure_at = now + max(_MEASURE_S, (now - begun) / _MEASURE_SHARE)


class Exchanger(Fragments):
    """Drives the exchanges of one worker: its module's fragments, each with its shards and replica, in turn."""

    def __init__(
        self,
        layout: Layout,
        parts: Sequence[tuple[ShardClient, Replica]],
        config: ExchangeConfig,
        training: Training | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(parts)
        training = training or Training()
        self.layout = layout
        self.client = parts[0][0].client
        turns = Turns(len(parts), config)
        self.channels = [Channel(shards, replica, config, training, turns, clock) for shards, replica in parts]
        self.stats = ExchangeStats()
        self._connection = self.client.connection
        for channel in self.channels:
            channel.come_back = self.come_back
        self.constants = b""  # digest of the tensors that are not exchanged, as they were when this worker began
        self._algorithm = config.algorithm
        # Where servers hold answers back, a worker must not run ahead.
        self._max_offline_steps = 0 if config.algorithm.lockstep else config.max_offline_steps
        self._data = training.data

    @property
    def stats(self) -> ExchangeStats:
        """Of all channels together."""
        return self.channels[0].stats

    @stats.setter
    def stats(self, stats: ExchangeStats) -> None:
        for channel in self.channels:
            channel.stats = stats

    @property
    def versions(self) -> list[int]:
        """See :class:`Synchronizer`; the first channel's."""
        return self.channels[0].log.versions

    @property
    def moved(self) -> bool:
        """See :class:`Synchronizer`."""
        return any(channel.moved for channel in self.channels)

    @property
    def caught_up(self) -> Held:
        """See :class:`Synchronizer`; unknown where there are several fragments, since their pushes count no units."""
        return self.channels[0].caught_up if len(self.channels) == 1 else ("", None)

    @property
    def final_once_pushed(self) -> bool:
        """See :class:`Synchronizer`: not where servers act once all workers are at the sync point."""
        waits = self._algorithm.waits or any(t.gathers for t in self._algorithm.transforms)
        return len(self.channels) == 1 and not waits

    @property
    def unacknowledged(self) -> int:
        """See :class:`Synchronizer`."""
        return max(channel.unacknowledged for channel in self.channels)

    # ------------------------------------------------------------------ the asynchronous phase

    def begin(self) -> Waits:
        """See :class:`Synchronizer`."""
        for channel in self.channels:
            if channel.log.pushed and channel.replica.remembers:
                # Nothing was trained since the flush; of two pushes a replacement cannot tell which is in the weights.
                moved = channel.moved
                yield from channel.fetch()
                channel.moved = moved
            channel.replica.resume()
            channel.schedule.pause()
            if any(t.holds_at_start for t in self._algorithm.transforms):
                channel.start(ExchangeKind.HOLD_AT_START)
                yield from channel.finish(adopt=True)

    def wrap(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        """See :class:`Synchronizer`: gradients are the worker's own."""
        return closure

    def count_step(self, skipped: Skipped = False) -> None:
        """See :class:`Synchronizer`."""
        self.stats.steps += 1
        for channel in self.channels:
            channel.moved = True
            channel.replica.accrue(skipped)
            channel.schedule.since_push += 1
            channel.schedule.since_fetch += 1

    def advance(self) -> Waits:
        """Merge an answer that has arrived, and start an exchange if one is due. Called between two batches."""
        for channel in self.channels:
            self._connection.attend()
            if channel.leaving is not None and channel.replica.arrived:
                channel.send(channel.leaving)
            schedule = channel.schedule
            if channel.answered and schedule.since_push >= self._algorithm.merge_after:
                yield from channel.finish()
            if not any(schedule.due(self.stats.steps)):
                continue
            if channel.log.in_flight is not None or channel.leaving is not None:
                self.stats.deferred += 1
                if schedule.since_push < self._max_offline_steps:
                    continue
                yield from channel.finish()
            elif self._data.left_s < schedule.trip_s and schedule.since_push < self._max_offline_steps:
                continue  # the flush would wait for it, and the sync point would replace its answer at once
            push, fetch = schedule.due(self.stats.steps)  # again: a rejoin or a refused push may have changed it
            if push or fetch:
                self._data.ask_ahead(schedule.trip_s)
                channel.start(push=push, fetch=fetch)
                if channel.turns.stops:
                    yield from channel.finish()

    # ------------------------------------------------------------------ sync points

    def flush(self) -> Waits:
        """Complete the exchange in flight, push the remaining steps, and mark this worker quiescent."""
        for channel in self.channels:
            yield from channel.finish(sync=True)
            untold = channel.schedule.since_push > 0 or channel.replica.lags
            if untold or self._algorithm.waits:
                channel.start(ExchangeKind.FLUSH, push=untold, fetch=False)
                yield from channel.finish(sync=True)

    def fetch(self, *, park: bool = False, together: bool = True) -> Waits:
        """Adopt the servers' weights; steps that were not flushed are lost. See :class:`Synchronizer`."""
        at_sync_point = together and self._connection.world_size > 0  # there are none in an elastic run
        kind = ExchangeKind.FETCH_AT_SYNC_POINT if at_sync_point else ExchangeKind.FETCH
        for channel in self.channels:
            yield from channel.fetch(kind, park=park)

    def catch_up(self) -> dict[str, Tensor]:
        """See :class:`Synchronizer`."""
        return {name: tensor for channel in self.channels for name, tensor in channel.catch_up().items()}

    def peek(self) -> dict[str, Tensor]:
        """See :class:`Synchronizer`."""
        return {name: tensor for channel in self.channels for name, tensor in channel.peek().items()}

    def forget_exchanges(self) -> None:
        """Drop the exchanges in flight: their session has ended."""
        for channel in self.channels:
            channel.log.in_flight = channel.leaving = None

    def close(self) -> None:
        """See :class:`Synchronizer`."""
        for channel in self.channels:
            channel.close()

    def come_back(self) -> Waits:
        """See :class:`Synchronizer`."""
        for channel in self.channels:
            yield from channel.rejoin()
