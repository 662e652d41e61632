"""What a server process answers: messages are dispatched to the state machines. Knows no transport and no process.

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
)
from lightning_asgd.server.epoch_history import Epochs, Ranges
from lightning_asgd.server.lease_table import Leases
from lightning_asgd.server.membership import Membership
from lightning_asgd.server.pending_replies import Completion, PendingReplies, failure
from lightning_asgd.server.run_registry import RunRegistry, goes_on_from
from lightning_asgd.server.session_state import SessionState
from lightning_asgd.server.shard import Shard
from lightning_asgd.server.snapshot_store import Snapshot
from lightning_asgd.server.state_recovery import StateRecovery
from lightning_asgd.server.status_report import view

__all__ = ["Service"]

log = logging.getLogger(__name__)

_LATER = object()  # a reply that is not due yet
_REPORT_S = 20.0  # in which workers notice that a server was lost, and begin to report to its replacement


class Service:
    """The state of one server and the messages that change it.

    ``run`` names the one elastic run that it serves; without, it serves the sessions of a job one after the other. With
    ``succeeds`` it may replace a lost server, so the run has weights already. ``remembered`` reads the latest snapshot
    of a server.
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
        self._registry = RunRegistry(run)
        self._succeeds = succeeds
        self._to_be_restored = succeeds  # the workers have not reported yet what a lost server knew
        self._remembered = remembered
        self._changed = False  # since the latest snapshot
        self._asked: float | None = None  # when a worker asked that cannot be answered before the state is restored
        self._have_weights: set[int] = set()  # workers that can report them if this server is lost
        self._lock = threading.Lock()
        self.session: SessionState | None = None
        self._epochs = Epochs(all_train=not run)
        self._pending = PendingReplies()
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
        """Return a reply, a :class:`Failure`, or a future of either. Raises for nothing that a message can cause."""
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
        """Fail collectives whose time is up; look again at lease requests that wait. Called a few times a second."""
        with self._lock:
            self._let_in()
            session, now = self.session, self._clock()
            if session is None:
                return
            members = session.members
            before = members.composition
            if session.recovery is not None and not session.recovery.restored:
                # Workers that have reported wait for the others. Another server may have applied already what they are
                # about to replay, so none of them may be suspected.
                for worker in session.recovery.offers:
                    members.hear(worker, now)
            self._complete(session.collectives.expire(now))
            if members.composition != before or members.aborted:
                self._meet(session)
            for leases in self._epochs:
                self._complete(leases.retry(now))
            self._separate(session)

    def report_exit(self, session: str, worker: int, reason: str) -> None:
        """Take a worker out, whose process is known to have ended; later generations of the session count too."""
        with self._lock:
            self._registry.exits.append((session, worker, reason))
            if self.session is not None and goes_on_from(self.session.members.session, session):
                self._leave(Leave(self.session.members.session, worker, reason))

    def abort(self, why: str) -> None:
        """End the present session for all its workers."""
        with self._lock:
            if self.session is not None:
                self._complete(self.session.collectives.abort(why))
                self._meet(self.session)

    def status(self) -> dict[str, Any]:
        """Figures of the current session: version, live workers, counts."""
        with self._lock:
            session = self.session
            shard = session.shards.get(0) if session else None
            return {
                "session": session.members.session if session else None,
                "living": sorted(session.members.living) if session else [],
                "version": shard.version if shard else 0,
                "counts": vars(shard.counts).copy() if shard else {},
            }

    def snapshot(self) -> Snapshot | None:
        """What is to be written down; None if there are no weights yet, or nothing has happened since the last time."""
        with self._lock:
            session, run = self.session, self._registry
            if session is None or self._to_be_restored or not all(s.initialised for s in session.shards.values()):
                return None
            if not session.shards or (run.name and session.members.index == 0 and not run.bootstrapped):
                return None
            if not self._changed:
                return None  # the one before is as good
            self._changed = False
            return session.snapshot(run.metadata, self._epochs.progress)

    @property
    def replaceable(self) -> bool:
        """Whether another server could go on from what the workers hold, or from a snapshot."""
        with self._lock:
            if self._succeeds and self._to_be_restored:
                return True  # it knows nothing that would not be reported to another one
            held, session = False, self.session
            if session is not None:
                whole = all(shard.algorithm.leaves_weights for shard in session.shards.values())
                holding = self._have_weights & (session.members.living | session.members.expected_back)
                held = bool(holding and session.shards) and whole and not session.buffers.compressed
            return held or (self._remembered is not None and bool(self._registry.name))

    def tell(self, what: str) -> None:
        """Publish an event to the workers' logs."""
        with self._lock:
            self._changed = True
            if self.session is not None:
                self.session.members.events.append(what)

    def restore_from_snapshot(self, server: int) -> bool:
        """Go on from what the server with this number wrote down last, without its workers; returns whether it did."""
        with self._lock:
            return self._restore_from_snapshot(server)

    def _restore_from_snapshot(self, server: int) -> bool:
        run = self._registry
        snapshot = None if self._remembered is None or not run.name else self._remembered(server)
        if snapshot is None or (snapshot.run, snapshot.server) != (run.name, server):
            return False
        if self.session is None:
            self.session = SessionState(Membership(snapshot.run, 0, snapshot.policy, server))
        session = self.session
        session.members.restore(self._clock(), admitted=snapshot.admitted)
        session.members.events.append(f"Server {server} goes on from its snapshot, version {snapshot.version}.")
        self._to_be_restored, session.recovery = False, None
        run.metadata = {**snapshot.notes, **run.metadata}
        session.shards = {
            n: Shard.restore_from_snapshot(kept, comes_and_goes=True) for n, kept in snapshot.shards.items()
        }
        self._epochs.remember(snapshot.epochs)
        self._meet(session)
        self._take_up_deferred(session)
        return True

    def close(self) -> None:
        """Release shared memory; waiting workers get an error."""
        with self._lock:
            self._end_session("the server was stopped")
            for request in self._registry.arriving:
                self._pending.complete(request, ServerLostError("The server was stopped."))
            self._registry.arriving.clear()

    # ------------------------------------------------------------------ one method per message

    def _attach(self, message: Attach) -> Any:
        self._registry.check_can_join(message.session, message.about, message.protocol, elastic=True)
        future = self._pending.add(message)
        self._registry.arriving.append(message)
        self._let_in()
        return future.value() if future.done() else future

    def _let_in(self) -> None:
        """Admit the workers that wait, if the run has weights; else have one of them bring its own."""
        run = self._registry
        bootstrapped = run.bootstrapped
        if self._to_be_restored and not bootstrapped:
            self._turn_away()  # what the run is, its workers will report
            return
        waiting, run.arriving = run.arriving, []
        for message in waiting:
            if self.session is None:
                self.session = SessionState(Membership(message.session, 0, message.policy))
            session, members = self.session, self.session.members
            bootstraps = not bootstrapped and run.bootstrap_worker not in members.living
            if not bootstrapped and not bootstraps:
                run.arriving.append(message)
                continue
            worker = members.admit(message.about, self._clock())
            if bootstraps:
                run.bootstrap_worker = worker
            self._meet(session)
            attached = Attached(worker, bootstraps, dict(run.metadata), len(members.events), members.chief)
            self._pending.complete(message, attached)

    def _turn_away(self) -> None:
        """No worker is left to report what the lost server knew: go on from a snapshot, or reject joining workers."""
        run, session = self._registry, self.session
        deferred = [] if session is None else session.deferred
        if not run.name or not (run.arriving or deferred):
            return
        if self._asked is None:
            self._asked = self._clock()
        recovery = None if session is None else session.recovery
        if session is not None and recovery is not None and recovery.awaited(session.members.living):
            return
        policy = run.arriving[0].policy if session is None else session.members.policy
        if self._clock() <= self._asked + _REPORT_S + policy.silence_s:  # in which workers send heartbeats
            return
        if self._restore_from_snapshot(0 if session is None else session.members.index):
            return
        if not self._succeeds:  # it only knows by hearsay of workers that are gone
            self._to_be_restored = False
            if session is not None:
                session.recovery = None
            self._let_in()
            return
        error = ServerLostError(
            f"The weights of run {run.name!r} were lost: a server ended while the run had no workers. Start "
            "`lightning-asgd serve` again, and a Trainer with ckpt_path=... to go on from a checkpoint. With "
            "--snapshots a run outlives its servers."
        )
        for request in [*run.arriving, *deferred]:
            self._pending.complete(request, error)
        run.arriving.clear()
        deferred.clear()

    def _note(self, message: RunMetadata) -> Any:
        members = self._heard(message.session, message.worker).members
        if self._registry.note(message, trusted=message.worker in members.trusted):
            self._let_in()
        return self._registry.metadata.get(message.name)

    def _join(self, message: Join) -> Joined:
        run = self._registry
        run.check_can_join(message.session, message.worker, message.protocol, elastic=not message.world_size)
        begins = self.session is None or self.session.members.session != message.session
        if begins:
            self._begin(message)
        session = self._current(message.session)
        members, now = session.members, self._clock()
        untouched = bool(run.name) and not members.joined  # nobody has joined since its snapshot: workers know more
        goes_on = self._to_be_restored or begins or untouched  # else others may have started the run again
        earlier = message.worker in members.joined or (not goes_on and message.worker > members.admitted)
        if run.name and message.restore and earlier and not session.recovery:
            raise WorkerLostError(
                f"Worker {message.worker} waited for servers that were started again, but others came first and began "
                f"run {run.name!r} anew. Start it again to take part."
            )
        if session.recovery is None and (self._to_be_restored or (message.restore and (begins or untouched))):
            session.recovery = StateRecovery()
            self._to_be_restored = True
            run.metadata.clear()
            self._epochs.clear()
        if session.recovery is not None and self._to_be_restored:
            session.recovery.expect(message.worker, tells=message.restore)
            if message.restore:
                members.restore(now, message.holding, message.admitted)
        session.collectives.join(message.worker, now)
        if message.again:
            for leases in self._epochs:
                self._complete(leases.forget(message.worker, now))
        self._meet(session)
        return Joined(os.getpid(), members.incarnations.get(message.worker, 0))

    def _begin(self, message: Join) -> None:
        """Begin another session; workers that are gone or suspected already are so from its start."""
        before = None if self.session is None else self.session.members
        if message.again or (message.restore and before is not None):
            raise WorkerLostError(
                f"Worker {message.worker} was away until session {message.session!r} was over: the others have "
                "gone on without it. Raise timeouts.silence_s if workers are often silent for so long."
            )
        left = self._registry.exited(message.session)
        suspected = {}
        if before is not None:
            suspected = {**before.suspected, **dict.fromkeys(before.catching_up, "was behind")}
            if message.after == before.session:
                left |= {worker: why for worker, why in before.left.items() if why}
        left = {worker: why for worker, why in left.items() if worker < message.world_size}
        suspected = {w: why for w, why in suspected.items() if w < message.world_size and w not in left}
        self._end_session(f"session {message.session!r} began")
        self._to_be_restored = self._to_be_restored and bool(self._registry.name)  # another session has its own weights
        about = (message.session, message.world_size, message.policy, message.server)
        self.session = SessionState(Membership(*about, left, suspected))

    def _beat(self, message: Heartbeat) -> HeartbeatReply:
        recovery = None if self.session is None else self.session.recovery
        if self._registry.name and recovery is None and not (self.session and self.session.members.joined):
            self._to_be_restored = (
                True  # it has waited for `serve` to be started again, and knows more than this server
            )
        if self._to_be_restored and not (recovery and message.worker in recovery.excused):
            self._asked = self._clock()  # there is a worker that will report
        session = self._heard(message.session, message.worker)
        return session.heartbeat(message, self._have_weights)

    def _initialise(self, message: InitShard) -> bool:
        session, elastic = self._current(message.session), bool(self._registry.name)
        lays_out = message.fragment not in session.shards
        if elastic and message.weights is not None:
            if session.members.index == 0:
                self._registry.check_bootstraps(message.worker)
            lays_out = True  # a worker that began to bootstrap the run before, and died, may have had others
            self._to_be_restored, session.recovery = False, None  # what was lost was lost before
        if lays_out:
            session.shards[message.fragment] = Shard(message.groups, message.algorithm, elastic)
            self._meet(session)
        return session.initialise(message)

    def _exchange(self, message: Exchange) -> Any:
        session = self._heard(message.session, message.worker)
        if message.push:
            session.members.check(message.worker)
        self._have_weights.add(message.worker)
        if self._to_be_restored:
            session.deferred.append(message)
            return self._pending.add(message)
        shard = session.shards.get(message.fragment)
        if shard is None:
            raise ProtocolError(f"Worker {message.worker} exchanged before the shard was laid out.")
        begun = self._clock()
        update = session.buffers.update(message, shard.groups, lasting=shard.keeps_buffers)
        due = shard.exchange(message, update)
        if message.push:
            self._epochs.applied(message.epoch, message.worker, message.units)
        return self._complete(due, message, begun)

    def _average(self, message: LayerGradient) -> Any:
        return self._complete(self._member(message).means.add(message), message)

    def _contribute(self, message: Contribution) -> Future[Any]:
        session = self._heard(message.session, message.worker)
        for earlier in self._pending.of(Contribution):
            if (earlier.worker, earlier.seq) == (message.worker, message.seq):
                self._pending.take(earlier)  # its worker makes the call again, and waits for this one
        future = self._pending.add(message)
        before = session.members.composition
        self._complete(session.collectives.contribute(message, self._clock()))
        if session.members.composition != before:
            self._meet(session)
        return future

    def _open_epoch(self, message: OpenEpoch) -> Ranges:
        return self._open(self._member(message).members, message.epoch, message.worker).finished

    def _open(self, members: Membership, theirs: Epoch, worker: int) -> Leases:
        now = self._clock()
        leases, new = self._epochs.open(theirs, worker, now)
        if new:
            self._complete(leases.meet(members.trusted, now, members.catching_up))
        return leases

    def _claim(self, message: LeaseRequest) -> Any:
        members = self._member(message).members
        if message.opens is not None:
            self._open(members, message.opens, message.worker)
        leases = self._epochs.find(message.key, message.worker)
        return self._complete(leases.claim(message, self._clock()), message)

    def _watch(self, message: DisconnectWatch) -> Future[Any]:
        self._current(message.session)
        return self._pending.add(message)

    def _offer(self, message: StateReport) -> Any:
        session = self._current(message.session)
        recovery = session.recovery
        if recovery is not None and not recovery.restored:
            # A worker that was silent since it joined has missed nothing.
            session.collectives.join(message.worker, self._clock())
        else:
            self._member(message)
        for worker, reason in message.left.items():
            self._complete(session.collectives.leave(worker, reason))
        if recovery is None or (recovery.restored and message.worker not in recovery.offers):
            raise WorkerAwayError(f"Worker {message.worker} was away while a server was restored.")
        if recovery.restored:
            return None
        self._have_weights.add(message.worker)
        recovery.add(message)
        future = self._pending.add(replace(message, shards=()))
        self._restore(session)
        return future.value() if future.done() else future

    def _settle(self, message: ReplayDone) -> Any:
        session = self._heard(message.session, message.worker)
        future = self._pending.add(message)
        if session.recovery is not None:
            session.recovery.settled.add(message.worker)
        self._restore(session)
        return future.value() if future.done() else future

    def _leave(self, message: Leave) -> bool:
        session = self.session
        if message.final:
            self._registry.exits.append(("", message.worker, message.reason))
        if session is None or (session.members.session != message.session and not message.final):
            return False  # that session is over: nothing to leave
        self._complete(session.collectives.leave(message.worker, message.reason))
        self._meet(session)
        if session.members.elastic:
            self._have_weights.discard(message.worker)
        session.forget(message.worker)
        return True

    def _state(self, message: ShardState) -> Any:
        shard = self._current(message.session).shards.get(message.fragment)
        if shard is None:
            raise ProtocolError(f"Worker {message.worker} asked for a shard that was not laid out.")
        return shard.state() if message.state is None else shard.restore(message.state)

    def _samples(self, message: Samples) -> list[tuple[int, tuple[Tensor, ...]]]:
        shards = self._current(message.session).shards
        return list(shards[0].samples) if 0 in shards else []

    def _look(self, message: StatusRequest) -> Status:
        session = self.session
        if session is None:
            return Status(self._registry.name)
        return view(session.members, session.shards.get(0), self._epochs.latest, self._clock())

    # ------------------------------------------------------------------ helpers

    def _current(self, name: str) -> SessionState:
        session = self.session
        if session is None or session.members.session != name:
            current = session.members.session if session else None
            raise ProtocolError(f"Session {name!r} is not the current one ({current!r}). Expected a join first.")
        return session

    def _heard(self, name: str, worker: int) -> SessionState:
        """The session of a message, which counts as its worker's heartbeat."""
        session = self._current(name)
        session.members.hear(worker, self._clock())
        return session

    def _member(self, message: Any) -> SessionState:
        """The session of a message that only a worker that may train can send."""
        session = self._heard(message.session, message.worker)
        session.members.check(message.worker)
        return session

    def _meet(self, session: SessionState) -> None:
        """Tell every state machine who takes part now, and complete what that makes due."""
        self._let_in()
        members = session.members
        self._complete(session.members_changed())
        for leases in self._epochs:
            self._complete(leases.meet(members.trusted, self._clock(), members.catching_up))
        if members.aborted:
            for request in self._pending.of(Exchange, LayerGradient, LeaseRequest, StateReport, ReplayDone):
                self._pending.complete(request, WorkerLostError(members.aborted))
        self._restore(session)

    def _restore(self, session: SessionState) -> None:
        """Go on from what the workers hold of a lost server's state, once all have reported."""
        recovery, members = session.recovery, session.members
        if recovery is not None and recovery.offered(members.living):
            newest = recovery.take()
            self._to_be_restored = False
            session.resume(newest, recovery, self._remembered(members.index) if self._remembered else None)
            if members.index == 0:
                self._registry.metadata = recovery.notes
                self._epochs.restore(recovery.parts, {held.epoch: held.done for held in newest if held.epoch})
            stale = recovery.drop_stale()
            self._release(StateReport, WorkerAwayError("This worker was away when a server was lost."), stale)
            self._release(StateReport, None)
            self._meet(session)
            self._take_up_deferred(session)
        if recovery is not None and recovery.over(members.living):
            self._release(ReplayDone, None)

    def _take_up_deferred(self, session: SessionState) -> None:
        deferred, session.deferred = session.deferred, []
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

    def _separate(self, session: SessionState) -> None:
        """Fail requests of workers that wait for each other, some in a collective and the rest for data.

        After a server was lost, some may know that a segment is over, of which others train a part again.
        """
        collectives, claims = session.collectives, self._pending.of(LeaseRequest)
        past = collectives.at_odds({claim.worker for claim in claims}) if session.recovery else set()
        if past:
            for leases in self._epochs:
                self._complete(leases.go_without(past, self._clock()))
            claims = self._pending.of(LeaseRequest)
        due = collectives.separate({claim.worker: claim.key for claim in claims})
        if due:
            for claim in claims:
                self._pending.complete(claim, due[0].reply)
            self._complete(due)

    def _complete(self, due: list[Completion], received: Any = None, begun: float | None = None) -> Any:
        """Complete requests whose replies are due. Of the one just received, return the reply or a future of it."""
        own, session = _LATER, self.session
        for request, reply in due:
            if session is None or (request is not received and request not in self._pending):
                continue  # it failed when the session ended
            members = session.members
            if isinstance(reply, Reply):
                reply = replace(reply, weights=session.buffers.encode(request, reply))
                if request.fetch:
                    epoch, done = self._epochs.done
                    reply = replace(reply, epoch=epoch, done=done, stopped=session.collectives.stopped)
                    reply = replace(reply, incarnations=dict(members.incarnations), left=members.told_left)
                if begun is not None:
                    reply = replace(reply, busy_s=self._clock() - begun)
            elif isinstance(reply, LeaseGrant):
                reply = replace(reply, incarnations=dict(members.incarnations), left=members.told_left)
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
                self._pending.complete(request, ProtocolError(f"Worker {request.worker}'s session ended: {why}."))
        if self.session is not None:
            self.session.buffers.clear()
        self.session = None
