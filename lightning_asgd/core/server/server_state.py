"""All that one server knows, and the steps that change several parts of it at once. Pure: no network, no threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lightning_asgd.core.algorithms.base import Algorithm
from lightning_asgd.core.algorithms.compression import Compression
from lightning_asgd.core.foundation.errors import ProtocolError, SnapshotError
from lightning_asgd.core.foundation.process_name import for_users
from lightning_asgd.core.leases.epoch_history import Epochs
from lightning_asgd.core.protocol import Attach, Exchange, Failure, InitShard, Join, Joined, RankHeld
from lightning_asgd.core.server.membership import Membership
from lightning_asgd.core.server.pending_replies import Completion, failure
from lightning_asgd.core.server.session_state import SessionState
from lightning_asgd.core.server.shard import Shard
from lightning_asgd.elastic.run_registry import RunRegistry, goes_on_from
from lightning_asgd.recovery.shard_copy import ShardCopy
from lightning_asgd.recovery.snapshot_store import Snapshot
from lightning_asgd.recovery.state_recovery import StateRecovery

_REPORTS_S = 5.0  # that a new process waits for workers that know the lost state
_MOST_WORKERS = 1_000_000  # of a job
ASK_AGAIN = 1e9
"""Of :class:`RankHeld`: so long silent that its asker does not take it for a living process."""


class ServerState:
    """The run, the session, the epochs of its data, and the server's way back if its state was lost.

    ``run`` names the one elastic run that it serves; without, it serves the sessions of a ``job`` one after the other,
    of any if that is empty. With
    ``succeeds`` it may replace a lost server, so the run has weights already. ``remembered`` reads the latest snapshot
    of a server.
    """

    def __init__(
        self,
        run: str = "",
        *,
        job: str = "",
        succeeds: bool = False,
        remembered: Callable[[int], Snapshot | None] | None = None,
    ) -> None:
        self.registry = RunRegistry(run, job)
        self.recovery = StateRecovery(replaces=succeeds)
        self.epochs = Epochs(all_train=not run)
        self.session: SessionState | None = None
        self._most_workers = 0  # of any session
        self._asked_s = math.inf  # when a process first asked for a rank, while the state is lost
        self._remembered = remembered

    @property
    def unknown(self) -> bool:
        """Whether no worker of an elastic run has joined since this server began: those that did before know more."""
        return bool(self.registry.name) and not (self.session and self.session.members.joined)

    @property
    def replaceable(self) -> bool:
        """Whether a replacement could continue from the workers' copies, or from a snapshot."""
        if self.recovery.replaces and self.recovery.phase.lost:
            return True  # it knows nothing that would not be reported to another one
        held = self.session is not None and self.session.held_by_workers
        return held or (self._remembered is not None and bool(self.registry.name))

    def snapshot(self) -> tuple[Snapshot | None, list[ShardCopy]]:
        """What is to be written down once the copies are done; None if there are no weights yet."""
        session, run = self.session, self.registry
        if session is None or self.recovery.phase.lost or not session.initialised:
            return None, []
        if run.name and session.members.index == 0 and not run.bootstrapped:
            return None, []
        return session.snapshot(run.metadata, self.epochs.progress)

    def restore_from_snapshot(self, server: int, now: float) -> bool:
        """Restore the latest snapshot of the server with this number, without its workers; returns whether it did."""
        run = self.registry
        snapshot = None if self._remembered is None or not run.name else self._remembered(server)
        if snapshot is None or (snapshot.run, snapshot.server) != (run.name, server):
            return False
        if self.session is None:
            self.session = SessionState(Membership(snapshot.run, 0, snapshot.policy, server))
        self.session.restore_from_snapshot(snapshot, now)
        self.recovery.reset()
        run.metadata = {**snapshot.notes, **run.metadata}
        self.epochs.remember(snapshot.epochs)
        return True

    @property
    def index(self) -> int:
        """The server's number, as far as it knows."""
        return 0 if self.session is None else self.session.members.index

    def nobody_reports(self, waiting: Sequence[Attach | Exchange], now: float) -> bool:
        """Whether no worker is left to report what a run needs, which others wait for; they ask once in a while."""
        if not self.registry.name or not waiting:
            return False
        members = None if self.session is None else self.session.members
        policy = members.policy if members is not None else next(w.policy for w in waiting if isinstance(w, Attach))
        return self.recovery.nobody_reports(members.living if members is not None else (), policy.silence_s, now)

    def following(self, message: Join) -> Membership:
        """The members of the session that a worker begins; raises if the worker missed the end of the one before."""
        if message.world_size > _MOST_WORKERS:
            raise ProtocolError(
                f"Worker {message.worker} joins as one of {message.world_size}. Expected at most {_MOST_WORKERS}."
            )
        before = None if self.session is None else self.session.members
        return Membership.following(before, message, self.registry.exited(message.session))

    def begin_session(self, members: Membership) -> None:
        """Make another session; the one before has ended."""
        self.recovery.begin_session(elastic=bool(self.registry.name))
        if not self.registry.name:
            self.registry.metadata.clear()  # of the session before
        self.session = SessionState(members)
        self._most_workers = max(self._most_workers, members.world_size)

    def note_exit(self, session: str, worker: int, reason: str, process: str) -> bool:
        """Note that a process, whose name begins with ``process``, has ended; whether the given session continues."""
        members = None if self.session is None else self.session.members
        if members is not None and process and members.other_than(worker, process):
            return False
        self.registry.exits[session, worker] = reason
        return members is not None and goes_on_from(members.session, session)

    def had(self, worker: int) -> bool:
        """Whether a worker took part in a larger session before this one."""
        return self.session is not None and self.session.members.world_size <= worker < self._most_workers

    def must_wait(self, message: Join, now: float) -> bool:
        """Whether a process must wait a little for workers that know the lost state, which join at their next batch."""
        if not message.replaces or not self.recovery.phase.lost:
            return False
        self._asked_s = min(self._asked_s, now)
        return now < self._asked_s + _REPORTS_S

    def enter(
        self, session: SessionState, message: Join, now: float, *, begun: bool
    ) -> tuple[list[Completion], Joined | RankHeld | Failure]:
        """Let a worker join, or replace a process that has died or is silent, and answer it."""
        worker, process, members = message.worker, message.process, session.members
        if message.world_size != members.world_size:
            why = (
                f"Worker {worker} (process {for_users(process)}) joins as one of {message.world_size} workers, and "
                f"others as one of {members.world_size}. Expected the same devices and num_nodes on every machine, and "
                "no process that is left of an earlier job."
            )
            members.refuse(process, why)
            return self.end_if_awaited(session, worker, why), failure(ProtocolError(why))
        if message.replaces and members.can_replace(worker, process):
            due = [*session.replace(message, now), *self.epochs.forget(worker, now)]
            self.registry.exits = {who: why for who, why in self.registry.exits.items() if who[1] != worker}
            return due, session.joined(worker, late=True)
        if message.replaces and members.other_process(worker, process) and worker not in members.left:
            return [], RankHeld(members.other_process(worker, process), members.silent_s(worker, now))
        unknown = worker not in members.processes and worker not in members.left
        if message.replaces and worker in members.joined and unknown:
            return [], RankHeld("", ASK_AGAIN)  # a server that is lost knew its process, which may report
        return self.join(session, message, now, begun=begun), session.joined(worker, late=False)

    def end_if_awaited(self, session: SessionState, worker: int, why: str) -> list[Completion]:
        """End the session if it waits for a worker that was refused; otherwise that process may be a stranger."""
        awaited = worker in session.members.awaited - session.members.joined
        return session.collectives.abort(why) if awaited else []

    def join(self, session: SessionState, message: Join, now: float, *, begun: bool) -> list[Completion]:
        """Let a worker join, which has ``begun`` the session itself, or not; it may know more than this server."""
        run, recovery = self.registry, self.recovery
        knows_more = message.restore and not recovery.phase.begun
        fresh = recovery.phase.lost or begun or self.unknown  # else others may have started the run again
        if knows_more:
            run.check_same_start(message.worker, session.members, again=not fresh)
        if recovery.phase.lost or (knows_more and fresh):
            if recovery.join(message.worker, reports=message.restore):
                run.metadata.clear()
                self.epochs.clear()
            if message.restore:
                session.members.restore(now, message.holding, message.admitted)
                session.have_weights |= {message.worker, *message.holding} - set(session.members.left)
        session.collectives.join(message.worker, now, message.process, message.since)
        return self.epochs.forget(message.worker, now) if message.again else []

    def initialise(self, session: SessionState, message: InitShard) -> bool:
        """Lay a shard out, if that was not done, with a worker's weights. Returns whether memory can be shared."""
        rules = message.algorithm, message.compression
        if not isinstance(rules[0], Algorithm) or not (rules[1] is None or isinstance(rules[1], Compression)):
            raise ProtocolError(
                f"Worker {message.worker} sent {rules!r} as its algorithm and compression. Expected objects of "
                "lightning_asgd.algorithms and lightning_asgd.compression."
            )
        elastic = bool(self.registry.name)
        new = message.fragment not in session.shards
        if elastic and (message.weights is not None or message.in_parts):
            if session.members.index == 0:
                self.registry.check_bootstraps(message.worker)
            elif not new:  # of a worker that was away since, and in whose place another one has bootstrapped
                session.members.check(message.worker)
            new = True  # a worker that began to bootstrap the run before, and died, may have had others
            self.recovery.reset()  # what was lost was lost before
        if new:
            form = message.tensors, message.widths
            session.shards[message.fragment] = Shard(message.groups, message.algorithm, elastic, *form)
        return session.initialise(message)

    def recover(self, session: SessionState) -> set[int]:
        """Continue from the newest state that workers report; returns the workers whose reports are stale."""
        recovery, index = self.recovery, session.members.index
        newest = recovery.take()
        snapshot = None
        try:
            snapshot = self._remembered(index) if self._remembered else None
        except SnapshotError as error:  # the workers hold the weights
            session.members.publish(str(error))
        session.resume(newest, recovery, snapshot)
        if index == 0:
            self.registry.metadata = recovery.notes
            self.epochs.restore(recovery.parts, {held.epoch: held.done for held in newest if held.epoch})
        return recovery.drop_stale()
