"""A server's part in replacing one that was lost: reports of workers, pushes that wait for them, and snapshots."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch.futures import Future

from lightning_asgd.core.foundation.errors import SnapshotError, WorkerAwayError
from lightning_asgd.core.protocol import BOOTSTRAPPED, Attach, Join, Request
from lightning_asgd.core.server.feature import Server, ServerFeature
from lightning_asgd.core.server.membership import Membership
from lightning_asgd.core.server.pending_replies import complete_with
from lightning_asgd.core.server.registry import Phase
from lightning_asgd.core.server.session_state import SessionState
from lightning_asgd.core.server.shard import Shard
from lightning_asgd.recovery.messages import ReplayDone, ReplicaState, StateReport
from lightning_asgd.recovery.shard_copy import complete, copied
from lightning_asgd.recovery.snapshot_store import Snapshot, Snapshots, SnapshotWriter
from lightning_asgd.recovery.state_recovery import StateRecovery

if TYPE_CHECKING:
    from lightning_asgd.core.server.process import ServerArguments
    from lightning_asgd.core.server.service import Service

log = logging.getLogger(__name__)

_REPORTS_S = 5.0  # that a new process waits for workers that know the lost state


class Recovery(StateRecovery, ServerFeature):
    """The way back of one server, and its snapshots."""

    lasting = True

    def __init__(self, server: Server) -> None:
        ServerFeature.__init__(self, server)
        StateRecovery.__init__(self, replaces=server.state.succeeds)
        self.remembered: Callable[[int], Snapshot | None] | None = None
        """Reads the latest snapshot of a server; None if there are no snapshots."""
        self.report: Callable[[], str] = lambda: ""
        """What `lightning-asgd status` shows of the latest snapshot."""
        self._deferred: set[type] = set()  # kinds of messages that wait for a lost state to be restored
        self._asked_s = math.inf  # when a process first asked for a rank, while the state is lost
        server.state.recovery = self

    def replaceable(self, session: SessionState | None) -> bool:
        """See :class:`Continuity`."""
        if self.replaces and self.phase.lost:
            return True  # it knows nothing that would not be reported to another one
        kept = self.remembered is not None and bool(self._server.state.run)
        return kept or super().replaceable(session)

    def must_wait(self, message: Join, now: float) -> bool:
        """See :class:`Continuity`."""
        if not message.replaces or not self.phase.lost:
            return False
        self._asked_s = min(self._asked_s, now)
        return now < self._asked_s + _REPORTS_S

    def joins(self, session: SessionState, message: Join, now: float, *, begun: bool) -> None:
        """See :class:`Continuity`."""
        state, members = self._server.state, session.members
        knows_more = message.restore and not self.phase.begun
        fresh = self.phase.lost or begun or state.unknown  # else others may have started the run again
        if knows_more:
            state.registry.check_same_start(message.worker, members, again=not fresh)
        if not self.phase.lost and not (knows_more and fresh):
            return
        if self.join(message.worker, reports=message.restore):
            state.registry.metadata.clear()
            state.epochs.clear()
        if message.restore:
            members.restore(now, message.holding, message.admitted)
            session.have_weights |= {message.worker, *message.holding} - set(members.left)

    def tick(self, now: float) -> None:
        """See :class:`ServerFeature`."""
        session = self._server.state.session
        if session is not None:
            for worker in self.waiting:
                # Another server may have applied already what they are about to replay: none may be suspected.
                session.members.note_heartbeat(worker, now)

    # ------------------------------------------------------------------ messages that must wait

    def defer(self, message: Request) -> Future[object]:
        """See :class:`Continuity`."""
        self._deferred.add(type(message))
        return self._server.pending.add(message)

    def unreported(self) -> list[Any]:
        """The messages of an elastic run that wait for the lost state, if no worker is left to report it."""
        server = self._server
        waiting, session = server.pending.of(Attach, *self._deferred), server.state.session
        if not waiting:
            return []
        policy = next(w.policy for w in waiting if isinstance(w, Attach)) if session is None else session.members.policy
        living = () if session is None else session.members.living
        return waiting if self.nobody_reports(living, policy.silence_s, server.clock()) else []

    def _handle_deferred(self) -> None:
        """Take the pushes that arrived before the state was restored."""
        pending = self._server.pending
        for message in pending.of(*self._deferred):
            if message not in pending:
                continue  # one before it ended the session
            complete_with(pending.take(message), self._server.handle(message))  # which may add it again

    # ------------------------------------------------------------------ what workers report

    def handle(self, message: Any) -> Any:
        """See :class:`ServerFeature`."""
        server = self._server
        if isinstance(message, ReplayDone):
            session = server.heard(message.session, message.worker)
            self.settled.add(message.worker)
        else:
            session = server.current(message.session)
            if self._knows(session, message):
                return None
            session.have_weights.add(message.worker)
            self.add(message)
            message = replace(message, shards=())
        future = server.pending.add(message)
        self.advance(session)
        return future.value() if future.done() else future

    def _knows(self, session: SessionState, message: StateReport) -> bool:
        """Whether a report was taken before. Raises if it is too late."""
        server, phase = self._server, self.phase
        if phase is Phase.COLLECTING:
            # A worker that was silent since it joined has missed nothing.
            session.collectives.join(message.worker, server.clock(), message.process)
        else:
            server.member(message)
        for worker, reason in message.left.items():
            if not session.members.processes.get(worker):  # else it was replaced since
                server.complete(session.collectives.leave(worker, reason))
        if phase is Phase.RESTORED and message.worker in self.offers:
            return True
        if phase is not Phase.COLLECTING:
            raise WorkerAwayError(f"Worker {message.worker} was disconnected while a server was restored.")
        return False

    def advance(self, session: SessionState) -> None:
        """See :class:`Continuity`."""
        server, members = self._server, session.members
        if self.complete(members.living):
            away = WorkerAwayError("This worker was disconnected when a server was lost.")
            server.pending.complete_all(StateReport, away, self._restore(session))
            server.pending.complete_all(StateReport, None)
            server.members_changed(session)
            self._handle_deferred()
        if self.over(members.living):
            members.end_recovery(server.clock())
            server.pending.complete_all(ReplayDone, None)

    def _restore(self, session: SessionState) -> set[int]:
        """Continue from the newest state that workers report; returns the workers whose reports are stale."""
        members, snapshot = session.members, None
        newest = self.take()
        try:
            snapshot = self.remembered(members.index) if self.remembered else None
        except SnapshotError as error:  # the workers hold the weights
            members.publish(str(error))
        self._resume(session, newest, snapshot)
        if members.index == 0:
            state = self._server.state
            state.registry.metadata = self.notes
            state.epochs.restore(self.parts, {held.epoch: held.done for held in newest if held.epoch})
        return self.drop_stale()

    def _resume(self, session: SessionState, newest: Sequence[ReplicaState], snapshot: Snapshot | None) -> None:
        """Take the newest state that workers report, and the algorithm's, which none of them holds, from a snapshot."""
        members, shards = session.members, session.shards
        kept = snapshot.shards if snapshot is not None and snapshot.run == members.session else {}
        for fragment, shard in shards.items():
            before = kept.get(fragment)
            if before is not None and (before["groups"], before["algorithm"]) == (shard.groups, shard.algorithm):
                shards[fragment] = Shard.restore_from_snapshot(before, comes_and_goes=members.elastic)
        if not kept and any(shard.algorithm.keeps_state for shard in shards.values()):
            members.publish(f"Server {members.index} had no snapshot: its algorithm's state there starts from zero.")
        for state in newest:
            shards[state.fragment].resume(state.weights or (), state.version, state.pushes)
        members.resume(self.incarnations, self.stale)
        session.collectives.resume(self.answered)

    # ------------------------------------------------------------------ snapshots

    def snapshot(self) -> Snapshot | None:
        """What is to be written down; None if there are no weights yet, or nothing has happened since the last time."""
        server = self._server
        with server.lock:
            if not server.changed or not self._whole():
                return None
            session, state = cast(SessionState, server.state.session), server.state
            copies = {fragment: copied(shard) for fragment, shard in session.shards.items()}
            members, kept = session.members, {fragment: kept for fragment, (kept, _) in copies.items()}
            about = members.session, members.index, members.policy, members.admitted
            snapshot = Snapshot(*about, dict(state.registry.metadata), state.epochs.progress, kept)
            server.changed = False
        complete([copy for _, copy in copies.values()], server.lock)  # messages are handled meanwhile
        return snapshot

    def _whole(self) -> bool:
        """Whether the server has all that a snapshot holds."""
        state, session = self._server.state, self._server.state.session
        if session is None or self.phase.lost or not session.initialised:
            return False
        return not state.run or session.members.index > 0 or BOOTSTRAPPED in state.registry.metadata

    def restore_snapshot(self, server: int) -> bool:
        """Restore the latest snapshot of the server with this number, without its workers; returns whether it did."""
        state = self._server.state
        with self._server.lock:
            snapshot = self.remembered(server) if self.remembered is not None and state.run else None
            if snapshot is None or (snapshot.run, snapshot.server) != (state.run, server):
                return False
            if state.session is None:
                state.session = SessionState(Membership(snapshot.run, 0, snapshot.policy, server))
            session, members = state.session, state.session.members
            members.restore(self._server.clock(), admitted=snapshot.admitted)
            members.publish(f"Server {snapshot.server} continues from its snapshot, version {snapshot.version}.")
            shards = {n: Shard.restore_from_snapshot(kept, comes_and_goes=True) for n, kept in snapshot.shards.items()}
            session.shards = shards
            self.reset()
            state.registry.metadata = {**snapshot.notes, **state.registry.metadata}
            state.epochs.remember(snapshot.epochs)
            self._server.members_changed(session)
            self._handle_deferred()
            return True


def recovery_of(server: Server) -> Recovery:
    """The recovery of a server."""
    return cast(Recovery, server.feature(StateReport.__name__))


def writer_of(service: Service, arguments: ServerArguments) -> SnapshotWriter:
    """Have a server continue from its snapshot, if it replaces no other one. Returns what writes its next ones.

    A run's last one is written at its end. Those of a job are for its own servers only.
    """
    settings, recovery = arguments.settings, recovery_of(service)
    snapshots = Snapshots(settings.snapshots)
    recovery.remembered = snapshots.read
    if not arguments.succeeds:
        recovery.restore_snapshot(arguments.server)

    def complain(what: str) -> None:
        service.tell(what)
        if service.state.index:  # else it is logged as an event
            log.warning(what)

    every_s, at_end = settings.snapshot_every_s, bool(settings.run)
    writer = SnapshotWriter(recovery.snapshot, snapshots, every_s, complain, at_end=at_end)
    if settings.keeps:
        recovery.report = writer.report
    return writer
