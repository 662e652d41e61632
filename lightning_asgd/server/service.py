"""What a server process answers: from a message to the shard or the coordinator. Knows no transport and no process.

One lock guards everything: an update is a few passes over memory, and a server is given one core.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.futures import Future

from lightning_asgd.errors import ASGDError, ProtocolError, ServerLostError, WorkerAwayError, WorkerLostError
from lightning_asgd.protocol import (
    BOOTSTRAPPED,
    PROTOCOL,
    Attach,
    Attached,
    Contribution,
    DisconnectWatch,
    Epoch,
    Exchange,
    Failure,
    Heartbeat,
    HeartbeatReply,
    InitShard,
    Join,
    Joined,
    LayerGradient,
    LeaseGrant,
    LeaseRequest,
    Leave,
    OpenEpoch,
    ReplayDone,
    Reply,
    RunMetadata,
    Samples,
    ShardState,
    StateReport,
    Status,
    StatusRequest,
    WorkerMetrics,
)
from lightning_asgd.server.coordinator import Coordinator
from lightning_asgd.server.epoch_history import Epochs, Ranges
from lightning_asgd.server.layer_means import Means
from lightning_asgd.server.lease_table import Leases
from lightning_asgd.server.pending_replies import Completion, PendingReplies, failure
from lightning_asgd.server.shard import Shard
from lightning_asgd.server.snapshot_store import Snapshot
from lightning_asgd.server.state_recovery import StateRecovery
from lightning_asgd.server.status_report import view
from lightning_asgd.server.update_buffers import Buffers

__all__ = ["Service"]

log = logging.getLogger(__name__)

_LATER = object()  # a reply that is not due yet
_TOLD_S = 20.0  # in which workers notice that a server was lost, and begin to tell the one in its place


class Service:
    """The state of one server and the messages that change it.

    Args:
        clock: seconds, monotonic; given by tests.
        run: name of the one session that is served, whose workers come and go; empty to serve one session after the
            other, each with as many workers as it began with.
        succeeds: whether this may take the place of a server that was lost, so that the run has weights already.
        remembered: what the server with this number wrote down last, if it did.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        run: str = "",
        *,
        succeeds: bool = False,
        remembered: Callable[[int], Snapshot | None] | None = None,
    ) -> None:
        self._clock = clock
        self._run = run
        self._succeeds = succeeds
        self._to_be_restored = succeeds  # the workers have not told yet what a lost server knew
        self._remembered = remembered
        self._changed = False  # since the latest snapshot
        self._asked: float | None = None  # when somebody did who cannot be answered before it is restored
        self._notes: dict[str, Any] = {}
        self._have_weights: set[int] = set()  # workers that can tell of them if this server is lost
        self._founder: int | None = None  # who brings the run's weights
        self._arriving: list[Attach] = []  # of workers that wait for these
        self._lock = threading.Lock()
        self._coordinator: Coordinator | None = None
        self._shards: dict[int, Shard] = {}  # by fragment
        self._means = Means()
        self._epochs = Epochs(all_train=not run)  # a new layout in the midst of one changes nothing
        self._buffers = Buffers()
        self._pending = PendingReplies()
        self._buried: list[tuple[str, int, str]] = []  # session (empty for all), worker, reason
        self._restoration: StateRecovery | None = None
        self._deferred: list[Exchange] = []  # until the state is restored
        self._handlers: dict[type, Callable[[Any], Any]] = {
            Attach: self._attach,
            RunMetadata: self._note,
            Join: self._join,
            Heartbeat: self._beat,
            InitShard: self._initialise,
            Exchange: self._exchange,
            LayerGradient: self._average,
            Contribution: self._contribute,
            OpenEpoch: self._open_epoch,
            LeaseRequest: self._claim,
            Leave: self._leave,
            DisconnectWatch: self._watch,
            StateReport: self._offer,
            ReplayDone: self._settle,
            Samples: self._samples,
            StatusRequest: self._look,
            ShardState: self._state,
        }

    def handle(self, message: Any) -> Any:
        """Answer a message.

        Returns:
            the answer, a :class:`Failure`, or a future of either. Never raises for what a message can cause.
        """
        with self._lock:
            self._changed = self._changed or not isinstance(message, StatusRequest)
            return self._handle(message)

    def _handle(self, message: Any) -> Any:
        handler = self._handlers.get(type(message))
        try:
            if handler is None:
                raise ProtocolError(f"A server was sent a {type(message).__name__}, which it does not know.")
            return handler(message)
        except ASGDError as error:
            return failure(error)
        except Exception as error:
            log.exception("Message %s failed", type(message).__name__)
            return Failure("ASGDError", f"A server failed on {type(message).__name__}: {error!r}. This is a bug.")

    def tick(self) -> None:
        """Fail collectives whose time is up, look after claims that wait. To be called a few times a second."""
        with self._lock:
            self._let_in()
            coordinator = self._coordinator
            if coordinator is not None:
                before = coordinator.membership
                if self._restoration is not None and not self._restoration.restored:
                    # They wait for others, and nothing is done without them; another server may have taken already
                    # what they are about to send again.
                    for worker in self._restoration.offers:
                        coordinator.hear(worker, self._clock())
                self._complete(coordinator.expire(self._clock()))
                if coordinator.membership != before or coordinator.aborted:
                    self._meet(coordinator)
            for leases in self._epochs:
                self._complete(leases.retry(self._clock()))
            if coordinator is not None:
                self._separate(coordinator)

    def bury(self, session: str, worker: int, reason: str) -> None:
        """Take a worker out, whose process is known to have ended.

        Args:
            session: the one that the launcher began; those with a new layout go on from it.
            worker: global rank.
            reason: why.
        """
        with self._lock:
            self._buried.append((session, worker, reason))
            if self._coordinator is not None and _goes_on_from(self._coordinator.session, session):
                self._leave(Leave(self._coordinator.session, worker, reason))

    def abort(self, why: str) -> None:
        """End the present session for all its workers."""
        with self._lock:
            if self._coordinator is not None:
                self._complete(self._coordinator.abort(why))
                self._meet(self._coordinator)

    def status(self) -> dict[str, Any]:
        """Figures of the current session: version, live workers, counts."""
        with self._lock:
            shard, coordinator = self._shards.get(0), self._coordinator
            return {
                "session": coordinator.session if coordinator else None,
                "living": sorted(coordinator.living) if coordinator else [],
                "version": shard.version if shard else 0,
                "counts": vars(shard.counts).copy() if shard else {},
            }

    def snapshot(self) -> Snapshot | None:
        """What is to be written down; None if there are no weights yet, or nothing has happened since the last time."""
        with self._lock:
            coordinator, shards = self._coordinator, self._shards
            if coordinator is None or self._to_be_restored or not all(s.initialised for s in shards.values()):
                return None
            if not shards or (self._run and coordinator.index == 0 and BOOTSTRAPPED not in self._notes):
                return None
            if not self._changed:
                return None  # the one before is as good
            self._changed = False
            about = coordinator.session, coordinator.index, coordinator.policy, coordinator.admitted, dict(self._notes)
            kept = {number: shard.snapshot() for number, shard in shards.items()}
            return Snapshot(*about, self._epochs.progress, kept)

    @property
    def replaceable(self) -> bool:
        """Whether another server could go on from what the workers hold, or from a snapshot."""
        with self._lock:
            if self._succeeds and self._to_be_restored:
                return True  # it knows nothing yet that another one would not be told
            coordinator = self._coordinator
            there = set() if coordinator is None else coordinator.living | coordinator.expected_back
            holding = self._have_weights & there
            whole = all(shard.algorithm.leaves_weights for shard in self._shards.values())
            held = bool(holding and self._shards) and whole and not self._buffers.compressed
            return held or (self._remembered is not None and bool(self._run))

    def tell(self, what: str) -> None:
        """Have the workers' people read something."""
        with self._lock:
            self._changed = True
            if self._coordinator is not None:
                self._coordinator.news.append(what)

    def restore_from_snapshot(self, server: int) -> bool:
        """Go on from what the server with this number wrote down last, without the workers that it had.

        Returns:
            whether it did.
        """
        with self._lock:
            return self._revive(server)

    def _revive(self, server: int) -> bool:
        snapshot = None if self._remembered is None or not self._run else self._remembered(server)
        if snapshot is None or (snapshot.run, snapshot.server) != (self._run, server):
            return False
        coordinator = self._coordinator = self._coordinator or Coordinator(snapshot.run, 0, snapshot.policy, server)
        coordinator.restore(self._clock(), admitted=snapshot.admitted)
        coordinator.news.append(f"Server {server} goes on from its snapshot, version {snapshot.version}.")
        self._to_be_restored, self._restoration = False, None
        self._notes = {**snapshot.notes, **self._notes}
        self._shards = {
            n: Shard.restore_from_snapshot(kept, comes_and_goes=True) for n, kept in snapshot.shards.items()
        }
        self._epochs.remember(snapshot.epochs)
        self._meet(coordinator)
        self._take_up_deferred()
        return True

    def close(self) -> None:
        """Release shared memory; waiting workers get an error."""
        with self._lock:
            self._end_session("the server was stopped")
            for request in self._arriving:
                self._pending.complete(request, ServerLostError("The server was stopped."))
            self._arriving.clear()

    # ------------------------------------------------------------------ one method per message

    def _attach(self, message: Attach) -> Any:
        self._check_can_join(message.session, message.about, message.protocol, comes_and_goes=True)
        future = self._pending.add(message)
        self._arriving.append(message)
        self._let_in()
        return future.value() if future.done() else future

    def _let_in(self) -> None:
        """Answer the workers that have come, if the run has weights; else have one of them bring its own."""
        founded = BOOTSTRAPPED in self._notes
        if self._to_be_restored and not founded:
            self._turn_away()  # what the run is, its workers will tell
            return
        waiting, self._arriving = self._arriving, []
        for message in waiting:
            coordinator = self._coordinator = self._coordinator or Coordinator(message.session, 0, message.policy)
            bootstraps = not founded and self._founder not in coordinator.living
            if not founded and not bootstraps:
                self._arriving.append(message)
                continue
            worker = coordinator.admit(message.about, self._clock())
            if bootstraps:
                self._founder = worker
            self._meet(coordinator)
            news, chief = len(coordinator.news), coordinator.chief
            self._pending.complete(message, Attached(worker, bootstraps, dict(self._notes), news, chief))

    def _turn_away(self) -> None:
        """Nobody is left to tell what the lost server knew: go on from a snapshot, or say so to those who come."""
        if not self._run or not (self._arriving or self._deferred):
            return
        if self._asked is None:
            self._asked = self._clock()
        coordinator, restoration = self._coordinator, self._restoration
        told = coordinator is not None and restoration is not None and bool(restoration.awaited(coordinator.living))
        policy = self._arriving[0].policy if coordinator is None else coordinator.policy
        if not told and self._clock() > self._asked + _TOLD_S + policy.silence_s:  # in which workers give signs of life
            if self._revive(0 if coordinator is None else coordinator.index):
                return
            if not self._succeeds:  # it has only heard of workers that were there before, and are no more
                self._to_be_restored, self._restoration = False, None
                self._let_in()
                return
            waiting = [*self._arriving, *self._deferred]
            self._arriving, self._deferred = [], []
            for request in waiting:
                text = (
                    f"The weights of run {self._run!r} were lost: a server ended while the run had no workers. Start "
                    "`lightning-asgd serve` again, and a Trainer with ckpt_path=... to go on from a checkpoint. With "
                    "--snapshots a run outlives its servers."
                )
                self._pending.complete(request, ServerLostError(text))

    def _note(self, message: RunMetadata) -> Any:
        coordinator = self._session(message.session)
        coordinator.hear(message.worker, self._clock())
        known = message.first and message.name in self._notes
        founds = message.worker == self._founder and BOOTSTRAPPED not in self._notes  # even if it was silent meanwhile
        speaks = founds or message.first or message.worker in coordinator.trusted  # else others speak for it
        if message.value is not None and not known and speaks:
            self._notes[message.name] = message.value
            self._let_in()
        return self._notes.get(message.name)

    def _check_can_join(self, session: str, worker: int | str, protocol: int, *, comes_and_goes: bool) -> None:
        if protocol != PROTOCOL:
            raise ProtocolError(
                f"Worker {worker} speaks protocol {protocol}. Expected {PROTOCOL}. "
                "Install the same version of lightning-asgd on every machine."
            )
        if self._run and (session != self._run or not comes_and_goes):
            raise ProtocolError(
                f"Worker {worker} wants to take part in {session!r}, but these servers serve run {self._run!r}, to "
                "which workers attach themselves. Expected ASGDStrategy(server=..., run_id=...) with the run_id that "
                "`lightning-asgd serve` was given."
            )
        if comes_and_goes and not self._run:
            raise ProtocolError(
                f"Worker {worker} wants to attach itself to run {session!r}, but these servers belong to a job with a "
                "fixed number of workers. Expected servers started with `lightning-asgd serve`."
            )

    def _join(self, message: Join) -> Joined:
        comes_and_goes = not message.world_size
        self._check_can_join(message.session, message.worker, message.protocol, comes_and_goes=comes_and_goes)
        current, begins = self._coordinator, False
        if current is None or current.session != message.session:
            begins = True
            if message.again or (message.restore and current is not None):
                raise WorkerLostError(
                    f"Worker {message.worker} was away until session {message.session!r} was over: the others have "
                    "gone on without it. Raise timeouts.silence_s if workers are often silent for so long."
                )
            left = self._gone(current, message)
            away = {} if current is None else {**current.away, **dict.fromkeys(current.behind, "was behind")}
            away = {worker: why for worker, why in away.items() if worker < message.world_size and worker not in left}
            self._end_session(f"session {message.session!r} began")
            self._to_be_restored = self._to_be_restored and bool(self._run)  # another session has its own weights
            about = (message.session, message.world_size, message.policy, message.server)
            self._coordinator = Coordinator(*about, left, away)
        coordinator = self._session(message.session)
        untouched = bool(self._run) and not coordinator.joined  # nobody goes on from its snapshot: workers know more
        goes_on = self._to_be_restored or begins or untouched  # else others may have begun it anew
        earlier = message.worker in coordinator.joined or (not goes_on and message.worker > coordinator.admitted)
        if self._run and message.restore and earlier and not self._restoration:
            raise WorkerLostError(
                f"Worker {message.worker} waited for servers that were started again, but others came first and began "
                f"run {self._run!r} anew. Start it again to take part."
            )
        if self._restoration is None and (self._to_be_restored or (message.restore and (begins or untouched))):
            self._restoration = StateRecovery()
            self._to_be_restored = True
            self._notes.clear()
            self._epochs.clear()
        if self._restoration is not None and self._to_be_restored:
            self._restoration.expect(message.worker, tells=message.restore)
            if message.restore:
                coordinator.restore(self._clock(), message.holding, message.admitted)
        coordinator.join(message.worker, self._clock())
        if message.again:
            for leases in self._epochs:
                self._complete(leases.forget(message.worker, self._clock()))
        self._meet(coordinator)
        return Joined(os.getpid(), coordinator.incarnations.get(message.worker, 0))

    def _gone(self, before: Coordinator | None, message: Join) -> dict[int, str]:
        """Who is missing from the beginning of a session, after another one."""
        gone = {w: why for session, w, why in self._buried if _goes_on_from(message.session, session)}
        if before is not None and message.after == before.session:
            gone |= {worker: why for worker, why in before.left.items() if why}
        return {worker: why for worker, why in gone.items() if worker < message.world_size}

    def _beat(self, message: Heartbeat) -> HeartbeatReply:
        if self._run and self._restoration is None and not (self._coordinator and self._coordinator.joined):
            self._to_be_restored = True  # it has waited for `serve` to be started again, and knows more than is here
        if self._to_be_restored and not (self._restoration and message.worker in self._restoration.excused):
            self._asked = self._clock()  # there is somebody who will tell
        coordinator = self._session(message.session)
        coordinator.hear(message.worker, self._clock())
        if coordinator.aborted:
            raise WorkerLostError(coordinator.aborted)
        if isinstance(message.figures, WorkerMetrics):
            coordinator.figures[message.worker] = message.figures
        return HeartbeatReply(
            tuple(coordinator.news[message.heard :]),
            tuple(sorted(coordinator.living)),
            dict(coordinator.figures) if message.worker == coordinator.chief else {},
            coordinator.chief,
            tuple(sorted(coordinator.living & self._have_weights)),
            coordinator.admitted,
            message.worker in coordinator.fenced,
            coordinator.needed,
        )

    def _initialise(self, message: InitShard) -> bool:
        coordinator = self._session(message.session)
        shard = self._shards.get(message.fragment)
        if self._run and message.weights is not None:
            if coordinator.index == 0 and (BOOTSTRAPPED in self._notes or message.worker != self._founder):
                raise WorkerLostError(
                    f"Worker {message.worker} was silent before it had brought the run's first weights, and another "
                    "one has brought them. Start it again: it will take these."
                )
            shard = None  # one that founded the run before and died may have had others
            self._to_be_restored, self._restoration = False, None  # what was lost was lost before
        if shard is None:
            shard = self._shards[message.fragment] = Shard(message.groups, message.algorithm, bool(self._run))
            self._meet(coordinator)
        if shard.groups != message.groups:
            raise ProtocolError(
                f"Worker {message.worker} expects a shard of {message.groups}, others one of {shard.groups}."
            )
        if self._run and shard.algorithm != message.algorithm:
            raise ProtocolError(
                f"Worker {message.worker} has the algorithm {message.algorithm}, the run {shard.algorithm}. Expected "
                "the same arguments of ASGDStrategy on every worker."
            )
        if message.weights is not None:
            shard.initialise(message.weights, message.version)
        return self._buffers.open(message)

    def _exchange(self, message: Exchange) -> Any:
        coordinator = self._session(message.session)
        coordinator.hear(message.worker, self._clock())
        if message.push:
            coordinator.check(message.worker)
        self._have_weights.add(message.worker)
        if self._to_be_restored:
            self._deferred.append(message)
            return self._pending.add(message)
        shard = self._shards.get(message.fragment)
        if shard is None:
            raise ProtocolError(f"Worker {message.worker} exchanged before the shard was laid out.")
        begun = self._clock()
        update = self._buffers.update(message, shard.groups, lasting=shard.keeps_buffers)
        due = shard.exchange(message, update)
        if message.push:
            self._epochs.applied(message.epoch, message.worker, message.units)
        return self._complete(due, message, begun)

    def _average(self, message: LayerGradient) -> Any:
        self._member(message)
        return self._complete(self._means.add(message), message)

    def _contribute(self, message: Contribution) -> Future[Any]:
        coordinator = self._session(message.session)
        coordinator.hear(message.worker, self._clock())
        for earlier in self._pending.of(Contribution):
            if (earlier.worker, earlier.seq) == (message.worker, message.seq):
                self._pending.take(earlier)  # its worker makes the call again, and waits for this one
        future = self._pending.add(message)
        before = coordinator.membership
        self._complete(coordinator.contribute(message, self._clock()))
        if coordinator.membership != before:
            self._meet(coordinator)
        return future

    def _open_epoch(self, message: OpenEpoch) -> Ranges:
        return self._open(self._member(message), message.epoch, message.worker).finished

    def _open(self, coordinator: Coordinator, theirs: Epoch, worker: int) -> Leases:
        leases, new = self._epochs.open(theirs, worker, self._clock())
        if new:
            self._complete(leases.meet(coordinator.trusted, self._clock(), coordinator.behind))
        return leases

    def _claim(self, message: LeaseRequest) -> Any:
        coordinator = self._member(message)
        if message.opens is not None:
            self._open(coordinator, message.opens, message.worker)
        leases = self._epochs.find(message.key, message.worker)
        return self._complete(leases.claim(message, self._clock()), message)

    def _watch(self, message: DisconnectWatch) -> Future[Any]:
        self._session(message.session)
        return self._pending.add(message)

    def _offer(self, message: StateReport) -> Any:
        coordinator, restoration = self._session(message.session), self._restoration
        if restoration is not None and not restoration.restored:
            coordinator.join(message.worker, self._clock())  # whoever was silent since it joined has missed nothing
        else:
            self._member(message)
        for worker, reason in message.left.items():
            self._complete(coordinator.leave(worker, reason))
        if restoration is None or (restoration.restored and message.worker not in restoration.offers):
            raise WorkerAwayError(f"Worker {message.worker} was away while a server was restored.")
        if restoration.restored:
            return None
        self._have_weights.add(message.worker)
        restoration.add(message)
        future = self._pending.add(replace(message, shards=()))
        self._restore(coordinator)
        return future.value() if future.done() else future

    def _settle(self, message: ReplayDone) -> Any:
        coordinator = self._session(message.session)
        coordinator.hear(message.worker, self._clock())
        future = self._pending.add(message)
        if self._restoration is not None:
            self._restoration.settled.add(message.worker)
        self._restore(coordinator)
        return future.value() if future.done() else future

    def _leave(self, message: Leave) -> bool:
        coordinator = self._coordinator
        if message.final:
            self._buried.append(("", message.worker, message.reason))
        if coordinator is None or (coordinator.session != message.session and not message.final):
            return False  # that session is over: nothing to leave
        self._complete(coordinator.leave(message.worker, message.reason))
        self._meet(coordinator)
        if self._run:  # or a run that goes on for long would remember all that ever came
            coordinator.figures.pop(message.worker, None)
            self._have_weights.discard(message.worker)
            for shard in self._shards.values():
                shard.forget(message.worker)
        self._buffers.forget(message.worker)
        return True

    def _state(self, message: ShardState) -> Any:
        self._session(message.session)
        shard = self._shards.get(message.fragment)
        if shard is None:
            raise ProtocolError(f"Worker {message.worker} asked for a shard that was not laid out.")
        return shard.state() if message.state is None else shard.restore(message.state)

    def _samples(self, message: Samples) -> list[tuple[int, tuple[Tensor, ...]]]:
        self._session(message.session)
        return list(self._shards[0].samples) if 0 in self._shards else []

    def _look(self, message: StatusRequest) -> Status:
        coordinator = self._coordinator
        if coordinator is None:
            return Status(self._run)
        return view(coordinator, self._shards.get(0), self._epochs.latest, self._clock())

    # ------------------------------------------------------------------ helpers

    @property
    def _terms(self) -> dict[int, int]:
        return dict(self._coordinator.incarnations) if self._coordinator is not None else {}

    @property
    def _left(self) -> dict[int, str]:
        if self._coordinator is None or self._run:  # of a run that goes on for long it would get long
            return {}
        return dict(self._coordinator.left)

    def _member(self, message: Any) -> Coordinator:
        """The session of a message that only those who take part in it may send."""
        coordinator = self._session(message.session)
        coordinator.hear(message.worker, self._clock())
        coordinator.check(message.worker)
        return coordinator

    def _session(self, session: str) -> Coordinator:
        if self._coordinator is None or self._coordinator.session != session:
            current = self._coordinator.session if self._coordinator else None
            raise ProtocolError(f"Session {session!r} is not the current one ({current!r}). Expected a join first.")
        return self._coordinator

    def _meet(self, coordinator: Coordinator) -> None:
        """Tell those who wait for workers who takes part."""
        self._let_in()
        self._complete(self._means.meet(coordinator.living))
        for shard in self._shards.values():
            self._complete(shard.meet(coordinator.living))
        for leases in self._epochs:
            self._complete(leases.meet(coordinator.trusted, self._clock(), coordinator.behind))
        if coordinator.aborted:
            for request in self._pending.of(Exchange, LayerGradient, LeaseRequest, StateReport, ReplayDone):
                self._pending.complete(request, WorkerLostError(coordinator.aborted))
        self._restore(coordinator)

    def _restore(self, coordinator: Coordinator) -> None:
        """Go on from what the workers hold of a lost server's state, once all have told."""
        restoration = self._restoration
        if restoration is not None and restoration.offered(coordinator.living):
            newest = restoration.take()
            self._to_be_restored = False
            self._remember_state(coordinator)
            for held in newest:
                self._shards[held.fragment].resume(held.weights, held.version, held.pushes)
            stale = restoration.stale
            coordinator.resume(restoration.answered, restoration.incarnations, stale)
            if coordinator.index == 0:
                self._notes = restoration.notes
                parts = {w: o.part for w, o in restoration.offers.items() if o.part is not None and w not in stale}
                self._epochs.restore(parts, {held.epoch: held.done for held in newest if held.epoch})
            for worker in stale:
                del restoration.offers[worker]
            self._release(StateReport, WorkerAwayError("This worker was away when a server was lost."), stale)
            self._release(StateReport, None)
            self._meet(coordinator)
            self._take_up_deferred()
        if restoration is not None and restoration.over(coordinator.living):
            self._release(ReplayDone, None)

    def _remember_state(self, coordinator: Coordinator) -> None:
        """Have what the algorithm keeps beside the weights from the latest snapshot, since no worker holds it."""
        server = coordinator.index
        snapshot = None if self._remembered is None else self._remembered(server)
        kept = snapshot.shards if snapshot is not None and snapshot.run == coordinator.session else {}
        for fragment, shard in self._shards.items():
            before = kept.get(fragment)
            if before is not None and (before["groups"], before["algorithm"]) == (shard.groups, shard.algorithm):
                self._shards[fragment] = Shard.restore_from_snapshot(before, comes_and_goes=bool(self._run))
        if not kept and any(shard.algorithm.keeps_state for shard in self._shards.values()):
            coordinator.news.append(f"Server {server} had no snapshot: what its algorithm keeps there begins anew.")

    def _take_up_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for message in deferred:
            if message not in self._pending:
                continue
            future = self._pending.take(message)
            answer = self._handle(message)
            if isinstance(answer, Future):
                answer.add_done_callback(lambda done, future=future: future.set_result(done.value()))  # type: ignore[misc]
            else:
                future.set_result(answer)

    def _release(self, kind: type, answer: Any, workers: Collection[int] | None = None) -> None:
        """Answer pending requests of a kind: those of some workers, or all."""
        for request in self._pending.of(kind):
            if workers is None or request.worker in workers:
                self._pending.complete(request, answer)

    def _separate(self, coordinator: Coordinator) -> None:
        """Tell workers that wait for each other, some in a collective and the rest for data, that they do.

        Where a server was lost some may have been told that a segment is over, of which others train a part again.
        """
        claims = self._pending.of(LeaseRequest)
        past = coordinator.at_odds({claim.worker for claim in claims}) if self._restoration else set()
        if past:
            for leases in self._epochs:
                self._complete(leases.go_without(past, self._clock()))
            claims = self._pending.of(LeaseRequest)
        due = coordinator.separate({claim.worker: claim.key for claim in claims})
        if due:
            for claim in claims:
                self._pending.complete(claim, due[0].reply)
            self._complete(due)

    def _complete(self, due: list[Completion], received: Any = None, begun: float | None = None) -> Any:
        """Complete requests whose replies are due. Of the one just received, return the reply or a future of it."""
        own = _LATER
        for request, reply in due:
            if request is not received and request not in self._pending:
                continue  # it failed when the session ended
            if isinstance(reply, Reply):
                reply = replace(reply, weights=self._buffers.encode(request, reply))
                if request.fetch:
                    epoch, done = self._epochs.done
                    reply = replace(reply, epoch=epoch, done=done, incarnations=self._terms, left=self._left)
                    reply = replace(reply, stopped=0 if self._coordinator is None else self._coordinator.stopped)
                if begun is not None:
                    reply = replace(reply, busy_s=self._clock() - begun)
            elif isinstance(reply, LeaseGrant):
                reply = replace(reply, incarnations=self._terms, left=self._left)
            if request is received:
                own = failure(reply) if isinstance(reply, ASGDError) else reply
            else:
                self._pending.complete(request, reply)
        if received is None or own is not _LATER:
            return own
        return self._pending.add(received)

    def _end_session(self, why: str) -> None:
        for request in self._pending.of(object):
            if isinstance(request, DisconnectWatch):
                self._pending.complete(request, None)
            elif not isinstance(request, Attach):
                error = ProtocolError(f"Worker {request.worker}'s session ended: {why}.")
                self._pending.complete(request, error)
        self._deferred.clear()
        self._restoration = None
        self._buffers.clear()
        self._shards.clear()
        self._means = Means()
        self._coordinator = None


def _goes_on_from(session: str, first: str) -> bool:
    """Whether a session is one that a launcher began, or a later one of the same run, with a new layout."""
    return not first or session == first or session.startswith(f"{first}.")
