"""All that one server knows, and the steps that change several parts of it at once. Pure: no network, no threads."""

from __future__ import annotations

from lightning_asgd.core.algorithms.base import Algorithm
from lightning_asgd.core.algorithms.compression import Compression
from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.foundation.process_name import for_users
from lightning_asgd.core.leases.epoch_history import Epochs
from lightning_asgd.core.protocol import Failure, InitShard, Join, Joined, RankHeld
from lightning_asgd.core.server.membership import Membership
from lightning_asgd.core.server.pending_replies import Completion, failure
from lightning_asgd.core.server.registry import Continuity, Registry, goes_on_from
from lightning_asgd.core.server.session_state import SessionState
from lightning_asgd.core.server.shard import Shard

_MOST_WORKERS = 1_000_000  # of a job
ASK_AGAIN = 1e9
"""Of :class:`RankHeld`: so long silent that its asker does not take it for a living process."""


class ServerState:
    """The session, the epochs of its data, and what outlives a session.

    ``run`` names the one elastic run that it serves; without, it serves the sessions of a ``job`` one after the other,
    of any if that is empty. With ``succeeds`` it may replace a lost server, so the run has weights already.
    """

    def __init__(self, run: str = "", *, job: str = "", succeeds: bool = False) -> None:
        self.run, self.succeeds = run, succeeds
        self.registry = Registry(job)
        self.recovery = Continuity()
        self.epochs = Epochs(all_train=not run)
        self.session: SessionState | None = None
        self._most_workers = 0  # of any session

    @property
    def unknown(self) -> bool:
        """Whether no worker of an elastic run has joined since this server began: those that did before know more."""
        return bool(self.run) and not (self.session and self.session.members.joined)

    @property
    def index(self) -> int:
        """The server's number, as far as it knows."""
        return 0 if self.session is None else self.session.members.index

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
        self.recovery.begin_session(elastic=bool(self.run))
        if not self.run:
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

    def took_part(self, worker: int) -> bool:
        """Whether a worker took part in a larger session before this one."""
        return self.session is not None and self.session.members.world_size <= worker < self._most_workers

    def enter(
        self, session: SessionState, message: Join, now: float, *, begun: bool
    ) -> tuple[list[Completion], Joined | RankHeld | Failure]:
        """Let a worker join, or replace a process that has died or is silent, and answer it.

        ``begun``: whether it has begun the session itself.
        """
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
        self.recovery.joins(session, message, now, begun=begun)
        session.collectives.join(worker, now, process, message.since)
        due = self.epochs.forget(worker, now) if message.again else []
        return due, session.joined(worker, late=False)

    def end_if_awaited(self, session: SessionState, worker: int, why: str) -> list[Completion]:
        """End the session if it waits for a worker that was refused; otherwise that process may be a stranger."""
        awaited = worker in session.members.awaited - session.members.joined
        return session.collectives.abort(why) if awaited else []

    def initialise(self, session: SessionState, message: InitShard) -> bool:
        """Lay a shard out, if that was not done, with a worker's weights. Returns whether memory can be shared."""
        rules = message.algorithm, message.compression
        if not isinstance(rules[0], Algorithm) or not (rules[1] is None or isinstance(rules[1], Compression)):
            raise ProtocolError(
                f"Worker {message.worker} sent {rules!r} as its algorithm and compression. Expected objects of "
                "lightning_asgd.algorithms and lightning_asgd.compression."
            )
        new = message.fragment not in session.shards
        if self.registry.bootstraps(message, session.members, new=new):
            new = True  # a worker that began to bootstrap the run before, and died, may have had others
            self.recovery.reset()  # what was lost was lost before
        if new:
            form = message.tensors, message.widths
            session.shards[message.fragment] = Shard(message.groups, message.algorithm, bool(self.run), *form)
        return session.initialise(message)
