"""What a server process answers: messages are dispatched to the state machines. Knows no transport and no process.

One lock guards everything: an update is a few passes over memory, and a server is given one core.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.futures import Future

from lightning_asgd.core.foundation.errors import (
    ASGDError,
    ProtocolError,
    ServerLostError,
    WorkerAwayError,
    WorkerLostError,
)
from lightning_asgd.core.leases.epoch_history import Ranges
from lightning_asgd.core.protocol import (
    Attach,
    Contribution,
    DisconnectWatch,
    Exchange,
    Failure,
    Heartbeat,
    HeartbeatReply,
    InitShard,
    Join,
    Joined,
    LeaseGrant,
    LeaseRequest,
    Leave,
    OpenEpoch,
    RankHeld,
    Reply,
    Request,
    RunMetadata,
    ShardState,
)
from lightning_asgd.core.server.feature import SessionFeatures
from lightning_asgd.core.server.membership import Membership
from lightning_asgd.core.server.pending_replies import Completion, PendingReplies, complete_with, failure
from lightning_asgd.core.server.server_state import ASK_AGAIN, ServerState
from lightning_asgd.core.server.session_state import SessionState
from lightning_asgd.features import SERVER
from lightning_asgd.recovery.messages import ReplayDone, StateReport
from lightning_asgd.recovery.shard_copy import complete
from lightning_asgd.recovery.snapshot_store import Snapshot
from lightning_asgd.recovery.state_recovery import RecoveryPhase

log = logging.getLogger(__name__)

_LATER = object()  # a reply that is not due yet


class Service:
    """The state of one server, and the messages that change it; see :class:`ServerState` for the arguments."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, run: str = "", **about: Any) -> None:
        self.clock = clock
        self.state = ServerState(run, **about)
        self._changed = False  # since the latest snapshot
        self.snapshot_report: Callable[[], str] = lambda: ""  # what `lightning-asgd status` shows of the latest one
        self._lock = threading.RLock()
        self._pending = PendingReplies()
        self._deferred: set[type] = set()  # kinds of messages that wait for a lost state to be restored
        self._features = SessionFeatures(self)
        self.handlers: dict[type, Callable[[Any], Any]] = {
            Attach: self._attach,
            RunMetadata: self._note,
            Join: self._join,
            Heartbeat: self._heartbeat,
            InitShard: self._initialise,
            Exchange: self.exchange,
            Contribution: self._contribute,
            OpenEpoch: self._open_epoch,
            LeaseRequest: self._lease,
            Leave: self._leave,
            DisconnectWatch: lambda message: self.current(message.session) and self._pending.add(message),
            StateReport: self._report_state,
            ReplayDone: self._replay_done,
            ShardState: lambda message: self.current(message.session).shard_state(message),
        }

    @property
    def session(self) -> SessionState | None:
        """The present session."""
        return self.state.session

    def handle(self, message: Any) -> Any:
        """Return a reply, a :class:`Failure`, or a future of either. Raises for nothing that a message can cause."""
        with self._lock:
            session = self.session
            try:
                parts = getattr(message, "island", 0) or getattr(message, "in_parts", False)
                kind = "ExchangePart" if parts else type(message).__name__
                feature = self._features.of(kind) if kind in SERVER else None
                self._changed |= feature is None or not feature.observes
                handler = self.handlers.get(type(message)) if feature is None else feature.handle
                if handler is None:
                    raise ProtocolError(f"A server received a {type(message).__name__}, which it cannot handle.")
                if isinstance(message, Request) and not isinstance(message, Join | Leave) and session is not None:
                    about = message.worker, message.process, message.session
                    session.members.check_sender(*about, early=isinstance(message, Heartbeat))
                if self._pending.full:
                    self._pending.check_room(message)
                return handler(message)
            except ASGDError as error:
                return failure(error)
            except Exception as error:
                log.exception("A message failed: %s", type(message).__name__)
                return Failure("ASGDError", f"A server failed on {type(message).__name__}: {error!r}. This is a bug.")

    def tick(self) -> None:
        """Fail collectives whose time is up; look again at lease requests that wait. Called a few times a second."""
        with self._lock:
            self._admit_waiting()
            session, now = self.session, self.clock()
            if session is None:
                return
            members = session.members
            for worker in self.state.recovery.waiting:
                # Another server may have applied already what they are about to replay: none may be suspected.
                members.note_heartbeat(worker, now)
            self.complete(session.tick(now))
            for worker in members.away_for_good(now):
                self._leave(Leave(members.session, worker, "it missed its heartbeats for too long", process=""))
            if members.changed or members.aborted:
                self._members_changed(session)
            self.complete(self.state.epochs.retry(now))
            if session.collectives.may_be_at_odds(self._pending.count(LeaseRequest)):
                self._separate(session)

    def report_exit(self, session: str, worker: int, reason: str, process: str = "") -> None:
        """Take out a worker whose process has ended, here and in later generations; another may have replaced it."""
        with self._lock:
            if self.state.note_exit(session, worker, reason, process) and self.session is not None:
                self._leave(Leave(self.session.members.session, worker, reason, process=""))

    def report_refused(self, worker: int, why: str) -> None:
        """Note a worker that could not join. Where a session continues another one it may be a stranger."""
        with self._lock:
            if self.session is not None and not self.session.members.follows:
                self.complete(self.state.end_if_awaited(self.session, worker, why))
                self._members_changed(self.session)

    def abort(self, why: str) -> None:
        """End the present session for all its workers."""
        with self._lock:
            if self.session is not None:
                self.complete(self.session.collectives.abort(why))
                self._members_changed(self.session)

    def snapshot(self) -> Snapshot | None:
        """What is to be written down; None if there are no weights yet, or nothing has happened since the last time."""
        with self._lock:
            snapshot, copies = self.state.snapshot() if self._changed else (None, [])
            self._changed &= snapshot is None
        complete(copies, self._lock)  # messages are handled meanwhile
        return snapshot

    def tell(self, what: str) -> None:
        """Publish an event to the workers' logs."""
        with self._lock:
            self._changed = True
            if self.session is not None:
                self.session.members.publish(what)

    def restore_from_snapshot(self, server: int) -> bool:
        """Restore the latest snapshot of the server with this number, without its workers; returns whether it did."""
        with self._lock:
            restored = self.state.restore_from_snapshot(server, self.clock())
            if restored and self.session is not None:
                self._members_changed(self.session)
                self._handle_deferred()
            return restored

    def close(self) -> None:
        """Release shared memory; waiting workers get an error."""
        with self._lock:
            self._end_session("the server was stopped")
            self._pending.complete_all(Attach, ServerLostError("The server was stopped."))

    def _attach(self, message: Attach) -> Any:
        self.state.registry.check_can_join(message.session, message.about, message.protocol, elastic=True)
        future = self._pending.add(message)
        self._admit_waiting()
        return future.value() if future.done() else future

    def _note(self, message: RunMetadata) -> Any:
        members = self.heard(message.session, message.worker).members
        if self.state.registry.note(message, trusted=message.worker in members.trusted):
            self._admit_waiting()
        return self.state.registry.metadata.get(message.name)

    def _join(self, message: Join) -> Joined | RankHeld | Failure:
        about = message.session, message.worker, message.protocol
        self.state.registry.check_can_join(*about, elastic=not message.world_size)
        begins = self.session is None or self.session.members.session != message.session
        if begins and self.state.must_wait(message, self.clock()):
            return RankHeld("", ASK_AGAIN)
        if begins:
            following = self.state.following(message)
            self._end_session(f"session {message.session!r} began")
            self.state.begin_session(following)
        session = self.current(message.session)
        due, joined = self.state.enter(session, message, self.clock(), begun=begins)
        self.complete(due)
        if isinstance(joined, Joined) and joined.late:
            self._features.forget(message.worker)
        self._members_changed(session)
        return replace(joined, pid=os.getpid()) if isinstance(joined, Joined) else joined

    def _heartbeat(self, message: Heartbeat) -> HeartbeatReply:
        self.state.recovery.note_heartbeat(message.worker, waited=self.state.unknown, now=self.clock())
        return self.heard(message.session, message.worker).heartbeat(message)

    def _initialise(self, message: InitShard) -> bool:
        shared = self.state.initialise(self.current(message.session), message)
        self._members_changed(self.current(message.session))
        return shared

    def exchange(self, message: Exchange, update: tuple[Tensor, ...] | None = None) -> Any:
        """See :class:`~lightning_asgd.core.server.feature.Server`."""
        session = self.heard(message.session, message.worker)
        if message.push:
            session.members.check(message.worker)
        session.have_weights.add(message.worker)
        if self.state.recovery.phase.lost and update is None:
            return self.defer(message)
        shard, begun = session.shards.get(message.fragment), self.clock()
        if shard is None:
            raise ProtocolError(f"Worker {message.worker} exchanged before its InitShard. Expected that first.")
        if update is None:
            update = session.buffers.update(message, shard.whole, lasting=shard.algorithm.waits)
        due = shard.exchange(message, update, begun)
        if message.push:
            self.state.epochs.applied(message.epoch, message.worker, message.units)
        return self.complete(due, message, begun)

    def defer(self, message: Request) -> Future[Any]:
        """See :class:`~lightning_asgd.core.server.feature.Server`."""
        self._deferred.add(type(message))
        return self._pending.add(message)

    def _contribute(self, message: Contribution) -> Future[Any]:
        session = self.heard(message.session, message.worker)
        earlier = session.collectives.called(message.worker, message.seq)
        if earlier is not None and earlier in self._pending:
            self._pending.take(earlier)  # its worker makes the call again, and waits for this one
        future, before = self._pending.add(message), session.collectives.member_counts
        self.complete(session.collectives.contribute(message, self.clock()))
        if session.collectives.member_counts != before:
            self._members_changed(session)
        return future

    def _open_epoch(self, message: OpenEpoch) -> Ranges:
        members = self.member(message).members
        return self.state.epochs.open(message.epoch, message.worker, members, self.clock()).finished

    def _lease(self, message: LeaseRequest) -> Any:
        members = self.member(message).members
        if message.opens is not None:
            self.state.epochs.open(message.opens, message.worker, members, self.clock())
        leases = self.state.epochs.find(message.key, message.worker)
        return self.complete(leases.serve(message, self.clock()), message)

    def _report_state(self, message: StateReport) -> Any:
        session, recovery = self.current(message.session), self.state.recovery
        if recovery.phase is RecoveryPhase.COLLECTING:
            # A worker that was silent since it joined has missed nothing.
            session.collectives.join(message.worker, self.clock(), message.process)
        else:
            self.member(message)
        for worker, reason in message.left.items():
            if not session.members.processes.get(worker):  # else it was replaced since
                self.complete(session.collectives.leave(worker, reason))
        if recovery.phase is RecoveryPhase.RESTORED and message.worker in recovery.offers:
            return None
        if recovery.phase is not RecoveryPhase.COLLECTING:
            raise WorkerAwayError(f"Worker {message.worker} was disconnected while a server was restored.")
        session.have_weights.add(message.worker)
        recovery.add(message)
        future = self._pending.add(replace(message, shards=()))
        self._recover(session)
        return future.value() if future.done() else future

    def _replay_done(self, message: ReplayDone) -> Any:
        session, future = self.heard(message.session, message.worker), self._pending.add(message)
        self.state.recovery.settled.add(message.worker)
        self._recover(session)
        return future.value() if future.done() else future

    def _leave(self, message: Leave) -> bool:
        session = self.session
        known = session is None or session.members.is_process(message.worker, message.process)
        if message.final and (known or self.state.had(message.worker)):
            self.state.registry.exits["", message.worker] = message.reason
        if not known or session is None or (session.members.session != message.session and not message.final):
            return False  # a process that was rejected ends, or that session is over
        self.complete(session.collectives.leave(message.worker, message.reason, message.details))
        self._members_changed(session)
        session.forget(message.worker)
        self._features.forget(message.worker)
        self._pending.complete_all(DisconnectWatch, None, [message.worker])
        return True

    def current(self, name: str) -> SessionState:
        """See :class:`~lightning_asgd.core.server.feature.Server`."""
        session = self.session
        if session is None or session.members.session != name:
            current = session.members.session if session else None
            raise ProtocolError(f"Session {name!r} is not the current one ({current!r}). Expected a join first.")
        return session

    def heard(self, name: str, worker: int) -> SessionState:
        """See :class:`~lightning_asgd.core.server.feature.Server`."""
        session = self.current(name)
        session.members.note_heartbeat(worker, self.clock())
        return session

    def member(self, message: Request) -> SessionState:
        """See :class:`~lightning_asgd.core.server.feature.Server`."""
        session = self.heard(message.session, message.worker)
        session.members.check(message.worker)
        return session

    def _admit_waiting(self) -> None:
        """Admit the workers that wait to join, if the run has weights; else have one of them bring its own."""
        run = self.state.registry
        if self.state.recovery.phase.lost and not run.bootstrapped:
            self._reject_waiting()  # what the run is, its workers will report
            return
        for message in self._pending.of(Attach):
            session = self.state.session = self.session or SessionState(Membership(message.session, 0, message.policy))
            attached = run.admit(message, session.members, self.clock()) if message in self._pending else None
            if attached is not None:
                self._pending.complete(message, attached)
                self._members_changed(session)

    def _reject_waiting(self) -> None:
        """No worker can report what the lost server knew: continue from a snapshot, or reject joining workers."""
        waiting = self._pending.of(Attach, *self._deferred)
        try:
            if not self.state.nobody_reports(waiting, self.clock()) or self.restore_from_snapshot(self.state.index):
                return
        except ASGDError as error:  # no snapshot can be read
            self._pending.complete_each(waiting, error)
            return
        if not self.state.recovery.replaces:  # it only knows by hearsay of workers that are gone
            self.state.recovery.reset()
            self._admit_waiting()
            return
        self._pending.complete_each(waiting, self.state.registry.lost)

    def _members_changed(self, session: SessionState) -> None:
        """Tell every state machine who takes part now, and complete what that makes due."""
        self._admit_waiting()
        members, changed = session.members, session.members.take_changes()
        leases = self.state.epochs.update_members(members.trusted, self.clock(), members.catching_up, changed)
        self.complete([*self._features.members_changed(), *session.members_changed(changed), *leases])
        if members.aborted:
            self._pending.complete_each(self._pending.but(Attach, DisconnectWatch), WorkerLostError(members.aborted))
        self._recover(session)

    def _recover(self, session: SessionState) -> None:
        """Continue from the workers' copies of a lost server's state, once all have reported."""
        recovery, members = self.state.recovery, session.members
        if recovery.complete(members.living):
            away = WorkerAwayError("This worker was disconnected when a server was lost.")
            self._pending.complete_all(StateReport, away, self.state.recover(session))
            self._pending.complete_all(StateReport, None)
            self._members_changed(session)
            self._handle_deferred()
        if recovery.over(members.living):
            members.end_recovery(self.clock())
            self._pending.complete_all(ReplayDone, None)

    def _handle_deferred(self) -> None:
        """Take the pushes that arrived before the state was restored."""
        for message in self._pending.of(*self._deferred):
            if message not in self._pending:
                continue  # one before it ended the session
            complete_with(self._pending.take(message), self.handle(message))  # which may add it again

    def _separate(self, session: SessionState) -> None:
        """Fail requests of workers that wait for each other, some in a collective and the rest for data."""
        # After a server was lost, some may know that a segment is over, of which others train a part again.
        collectives, claims = session.collectives, self._pending.of(LeaseRequest)
        past = collectives.at_odds({claim.worker for claim in claims}) if self.state.recovery.phase.begun else set()
        if past:
            self.complete(self.state.epochs.stop_waiting_for(past, self.clock()))
            claims = self._pending.of(LeaseRequest)
        due = collectives.separate({claim.worker: claim.key for claim in claims})
        if due:
            self._pending.complete_all(LeaseRequest, due[0].reply)
            self.complete(due)

    def complete(self, due: list[Completion], received: Any = None, begun: float | None = None) -> Any:
        """See :class:`~lightning_asgd.core.server.feature.Server`."""
        own, session = _LATER, self.session
        for request, reply in due:
            if session is None or (request is not received and request not in self._pending):
                continue  # it failed when the session ended
            members = session.members
            if isinstance(reply, Reply) and isinstance(reply := session.buffers.encoded(request, reply), Reply):
                if request.fetch:
                    epoch, done = self.state.epochs.done
                    reply = replace(reply, epoch=epoch, done=done, stopped=session.collectives.stopped)
                    reply = replace(reply, incarnations=members.reported_incarnations, left=members.reported_left)
                if begun is not None:
                    reply = replace(reply, busy_s=self.clock() - begun)
            elif isinstance(reply, LeaseGrant):
                reply = replace(reply, incarnations=members.reported_incarnations, left=members.reported_left)
            if request is received:
                own = failure(reply) if isinstance(reply, ASGDError) else reply
            else:
                self._pending.complete(request, reply)
        if received is None or own is not _LATER:
            return own
        return self._pending.add(received)

    def _end_session(self, why: str) -> None:
        self._pending.complete_all(DisconnectWatch, None)
        for request in self._pending.but(Attach):
            self._pending.complete(request, ProtocolError(f"Worker {request.worker}'s session ended: {why}."))
        self._features.close()
        if self.session is not None:
            self.session.close()
        self.state.session = None
