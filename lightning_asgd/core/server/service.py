"""What a server process answers: messages are dispatched to the state machines. Knows no transport and no process.

One lock guards everything: an update is a few passes over memory, and a server is given one core.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.futures import Future

from lightning_asgd.core.foundation.errors import ASGDError, ProtocolError, ServerLostError, WorkerLostError
from lightning_asgd.core.protocol.collective import Contribution
from lightning_asgd.core.protocol.lease import LeaseGrant, LeaseRequest, OpenEpoch
from lightning_asgd.core.protocol.request import Request
from lightning_asgd.core.protocol.session import (
    Attach,
    DisconnectWatch,
    Heartbeat,
    Join,
    Joined,
    Leave,
    RankHeld,
    RunMetadata,
)
from lightning_asgd.core.protocol.update import Exchange, InitShard, Reply, ShardState
from lightning_asgd.core.server.feature import ServerFeature, ServerFeatures
from lightning_asgd.core.server.pending_replies import Completion, PendingReplies, failure
from lightning_asgd.core.server.server_state import ASK_AGAIN, ServerState
from lightning_asgd.core.server.session_state import SessionState
from lightning_asgd.features import SERVER

log = logging.getLogger(__name__)

_LATER = object()  # a reply that is not due yet


class Service:
    """The state of one server, and the messages that change it; see :class:`ServerState` for the arguments."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, run: str = "", **options: Any) -> None:
        self.clock = clock
        self.state = ServerState(run, **options)
        self.changed = False  # since the latest snapshot
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self.pending = PendingReplies()
        self._features = ServerFeatures(self)
        self.handlers: dict[type, Callable[[Any], Any]] = {
            RunMetadata: self._note,
            Join: self._join,
            Heartbeat: self._heartbeat,
            InitShard: self._initialise,
            Exchange: self.exchange,
            Contribution: self._contribute,
            OpenEpoch: self._open_epoch,
            LeaseRequest: self._lease,
            Leave: self._leave,
            DisconnectWatch: lambda message: self.current(message.session) and self.pending.add(message),
            ShardState: lambda message: self.current(message.session).shard_state(message),
        }
        if run:
            self.feature("Attach")
        if run or self.state.succeeds:
            self.feature("StateReport")

    @property
    def session(self) -> SessionState | None:
        """The present session."""
        return self.state.session

    def feature(self, kind: str) -> ServerFeature:
        """See :class:`~lightning_asgd.core.server.feature.Server`."""
        return self._features.of(kind)

    @property
    def replaceable(self) -> bool:
        """Whether another server could take this one's place."""
        return self.state.recovery.replaceable(self.session)

    def handle(self, message: Any) -> Any:
        """Return a reply, a :class:`Failure`, or a future of either. Raises for nothing that a message can cause."""
        with self.lock:
            session = self.session
            try:
                parts = getattr(message, "island", 0) or getattr(message, "in_parts", False)
                kind = "ExchangePart" if parts else type(message).__name__
                feature = self.feature(kind) if kind in SERVER else None
                self.changed |= feature is None or not feature.observes
                handler = self.handlers.get(type(message)) if feature is None else feature.handle
                if handler is None:
                    raise ProtocolError(f"A server received a {type(message).__name__}, which it cannot handle.")
                if isinstance(message, Request) and not isinstance(message, Join | Leave) and session is not None:
                    about = message.worker, message.process, message.session
                    session.members.check_sender(*about, early=isinstance(message, Heartbeat))
                if self.pending.full:
                    self.pending.check_room(message)
                return handler(message)
            except ASGDError as error:
                return failure(error)
            except Exception as error:
                log.exception("A message failed: %s", type(message).__name__)
                return failure(ASGDError(f"A server failed on {type(message).__name__}: {error!r}. This is a bug."))

    def tick(self) -> None:
        """Fail collectives whose time is up; look again at lease requests that wait. Called a few times a second."""
        with self.lock:
            now = self.clock()
            self._features.tick(now)
            session = self.session
            if session is None:
                return
            members = session.members
            self.complete(session.tick(now))
            for worker in members.away_for_good(now):
                self._leave(Leave(members.session, worker, "it missed its heartbeats for too long", process=""))
            if members.changed or members.aborted:
                self.members_changed(session)
            self.complete(self.state.epochs.retry(now))
            if session.collectives.may_be_at_odds(self.pending.count(LeaseRequest)):
                self._separate(session)

    def report_exit(self, session: str, worker: int, reason: str, process: str = "") -> None:
        """Take out a worker whose process has ended, here and in later generations; another may have replaced it."""
        with self.lock:
            if self.state.note_exit(session, worker, reason, process) and self.session is not None:
                self._leave(Leave(self.session.members.session, worker, reason, process=""))

    def report_refused(self, worker: int, why: str) -> None:
        """Note a worker that could not join. Where a session continues another one it may be a stranger."""
        with self.lock:
            if self.session is not None and not self.session.members.follows:
                self.complete(self.state.end_if_awaited(self.session, worker, why))
                self.members_changed(self.session)

    def abort(self, why: str) -> None:
        """End the present session for all its workers."""
        with self.lock:
            if self.session is not None:
                self.complete(self.session.collectives.abort(why))
                self.members_changed(self.session)

    def tell(self, what: str) -> None:
        """Publish an event to the workers' logs."""
        with self.lock:
            self.changed = True
            if self.session is not None:
                self.session.members.publish(what)

    def close(self) -> None:
        """Release shared memory; waiting workers get an error."""
        with self.lock:
            self._end_session("the server was stopped")
            self.pending.complete_all(Attach, ServerLostError("The server was stopped."))

    def _note(self, message: RunMetadata) -> object:
        members = self.heard(message.session, message.worker).members
        if self.state.registry.note(message, trusted=message.worker in members.trusted):
            self._features.tick(self.clock())  # some may wait for just this
        return self.state.registry.metadata.get(message.name)

    def _join(self, message: Join) -> object:
        about = message.session, message.worker, message.protocol
        self.state.registry.check_can_join(*about, elastic=not message.world_size)
        if message.restore:
            self.feature("StateReport")
        begins = self.session is None or self.session.members.session != message.session
        if begins and self.state.recovery.must_wait(message, self.clock()):
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
        self.members_changed(session)
        return replace(joined, pid=os.getpid()) if isinstance(joined, Joined) else joined

    def _heartbeat(self, message: Heartbeat) -> object:
        self.state.recovery.note_heartbeat(message.worker, waited=self.state.unknown, now=self.clock())
        return self.heard(message.session, message.worker).heartbeat(message)

    def _initialise(self, message: InitShard) -> bool:
        shared = self.state.initialise(self.current(message.session), message)
        self.members_changed(self.current(message.session))
        return shared

    def exchange(self, message: Exchange, update: tuple[Tensor, ...] | None = None) -> Any:
        """See :class:`~lightning_asgd.core.server.feature.Server`."""
        session = self.heard(message.session, message.worker)
        if message.push:
            session.members.check(message.worker)
        session.have_weights.add(message.worker)
        if self.state.recovery.phase.lost and update is None:
            return self.state.recovery.defer(message)
        shard, begun = session.shards.get(message.fragment), self.clock()
        if shard is None:
            raise ProtocolError(f"Worker {message.worker} exchanged before its InitShard. Expected that first.")
        if update is None:
            update = session.buffers.update(message, shard.whole, lasting=shard.algorithm.waits)
        due = shard.exchange(message, update, begun)
        if message.push:
            self.state.epochs.applied(message.epoch, message.worker, message.units)
        return self.complete(due, message, begun)

    def _contribute(self, message: Contribution) -> Future[Any]:
        session = self.heard(message.session, message.worker)
        earlier = session.collectives.called(message.worker, message.seq)
        if earlier is not None and earlier in self.pending:
            self.pending.take(earlier)  # its worker makes the call again, and waits for this one
        future, before = self.pending.add(message), session.collectives.member_counts
        self.complete(session.collectives.contribute(message, self.clock()))
        if session.collectives.member_counts != before:
            self.members_changed(session)
        return future

    def _open_epoch(self, message: OpenEpoch) -> object:
        members = self.member(message).members
        return self.state.epochs.open(message.epoch, message.worker, members, self.clock()).finished

    def _lease(self, message: LeaseRequest) -> object:
        members = self.member(message).members
        if message.opens is not None:
            self.state.epochs.open(message.opens, message.worker, members, self.clock())
        leases = self.state.epochs.find(message.key, message.worker)
        return self.complete(leases.serve(message, self.clock()), message)

    def _leave(self, message: Leave) -> bool:
        session = self.session
        known = session is None or session.members.is_process(message.worker, message.process)
        if message.final and (known or self.state.took_part(message.worker)):
            self.state.registry.exits["", message.worker] = message.reason
        if not known or session is None or (session.members.session != message.session and not message.final):
            return False  # a process that was rejected ends, or that session is over
        self.complete(session.collectives.leave(message.worker, message.reason, message.details))
        self.members_changed(session)
        session.forget(message.worker)
        self._features.forget(message.worker)
        self.pending.complete_all(DisconnectWatch, None, [message.worker])
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

    def members_changed(self, session: SessionState) -> None:
        """See :class:`~lightning_asgd.core.server.feature.Server`."""
        due = self._features.members_changed()
        members, changed = session.members, session.members.take_changes()
        leases = self.state.epochs.update_members(members.trusted, self.clock(), members.catching_up, changed)
        self.complete([*due, *session.members_changed(changed), *leases])
        if members.aborted:
            self.pending.complete_each(self.pending.but(Attach, DisconnectWatch), WorkerLostError(members.aborted))
        self.state.recovery.advance(session)

    def _separate(self, session: SessionState) -> None:
        """Fail requests of workers that wait for each other, some in a collective and the rest for data."""
        # After a server was lost, some may know that a segment is over, of which others train a part again.
        collectives, claims = session.collectives, self.pending.of(LeaseRequest)
        past = collectives.at_odds({claim.worker for claim in claims}) if self.state.recovery.phase.begun else set()
        if past:
            self.complete(self.state.epochs.stop_waiting_for(past, self.clock()))
            claims = self.pending.of(LeaseRequest)
        due = collectives.separate({claim.worker: claim.key for claim in claims})
        if due:
            self.pending.complete_all(LeaseRequest, due[0].reply)
            self.complete(due)

    def complete(self, due: list[Completion], received: Any = None, begun: float | None = None) -> Any:
        """See :class:`~lightning_asgd.core.server.feature.Server`."""
        own, session = _LATER, self.session
        for request, reply in due:
            if session is None or (request is not received and request not in self.pending):
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
                self.pending.complete(request, reply)
        if received is None or own is not _LATER:
            return own
        return self.pending.add(received)

    def _end_session(self, why: str) -> None:
        self.pending.complete_all(DisconnectWatch, None)
        for request in self.pending.but(Attach):
            self.pending.complete(request, ProtocolError(f"Worker {request.worker}'s session ended: {why}."))
        self._features.close()
        if self.session is not None:
            self.session.close()
        self.state.session = None
