"""A server of an elastic run admits workers, and says what `lightning-asgd status` shows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from lightning_asgd.core.foundation.errors import (
    ASGDError,
    LaunchError,
    ProtocolError,
    ServerLostError,
    WorkerLostError,
)
from lightning_asgd.core.leases.table import Leases
from lightning_asgd.core.protocol import BOOTSTRAPPED, UNKNOWN, Attach, Attached, InitShard, RunMetadata
from lightning_asgd.core.server.feature import Server, ServerFeature
from lightning_asgd.core.server.membership import Membership
from lightning_asgd.core.server.pending_replies import Completion
from lightning_asgd.core.server.registry import Registry
from lightning_asgd.core.server.session_state import SessionState
from lightning_asgd.core.server.shard import Shard
from lightning_asgd.elastic.messages import Status, WorkerStatus
from lightning_asgd.recovery.server import recovery_of

_EVENTS = 8
_MOST_SILENT = 10_000  # workers that have joined, and of which nothing was heard since


def _is_endless(leases: Leases) -> bool:
    """Whether the number of steps of an epoch is not known before its end: a shard has an unknown length."""
    ends = (0, *leases.epoch.shards)
    return any(last - first >= UNKNOWN for first, last in pairwise(ends))


def view(members: Membership, shard: Shard | None, leases: Leases | None, now: float) -> Status:
    """What server 0 knows of a session: its members, its first fragment, and the data of the latest epoch."""
    workers = [
        WorkerStatus(
            worker,
            members.descriptions.get(worker, ""),
            members.suspected.get(worker, ""),
            members.silent_s(worker, now),
            *(leases.worker(worker) if leases is not None else (0.0, 0)),
            members.metrics.get(worker),
        )
        for worker in sorted(members.living | members.expected_back | members.catching_up)
    ]
    return Status(
        members.session,
        shard.version if shard is not None else 0,
        shard.counts.refused if shard is not None else 0,
        members.chief if workers else None,
        None if leases is None else leases.epoch.number,
        0 if leases is None else -(-sum(last - first for first, last in leases.finished) // leases.epoch.step),
        0 if leases is None or _is_endless(leases) else -(-leases.epoch.units // leases.epoch.step),
        tuple(workers),
        tuple(members.events[-_EVENTS:]),
    )


class RunRegistry(Registry):
    """The run of that name: who may join it, who bootstraps it, what its workers note."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.bootstrap_worker: int | None = None  # brings the run's first weights

    @property
    def bootstrapped(self) -> bool:
        """Whether the run has weights."""
        return BOOTSTRAPPED in self.metadata

    def check_can_join(self, session: str, worker: int | str, protocol: int, *, elastic: bool) -> None:
        """Raise unless a worker speaks this protocol, and means this run."""
        super().check_can_join(session, worker, protocol, elastic=False)
        if session != self.name or not elastic:
            raise ProtocolError(
                f"Worker {worker} wants to take part in {session!r}, but these servers serve run {self.name!r}, an "
                f"elastic run. Expected ASGDStrategy(run=...) with the address and name that "
                "`lightning-asgd serve` was given."
            )

    def bootstraps(self, message: InitShard, members: Membership, *, new: bool) -> bool:
        """Whether a worker brings the first weights of a run; raises if another worker does."""
        if message.weights is None and not message.in_parts:
            return False
        if members.index:
            if not new:  # of a worker that was away since, and in whose place another one has bootstrapped
                members.check(message.worker)
        elif self.bootstrapped or message.worker != self.bootstrap_worker:
            raise WorkerLostError(
                f"Worker {message.worker} missed its heartbeats before it had sent the run's first weights, and "
                f"another worker has sent them. Start it again: it will train with these."
            )
        return True

    def check_same_start(self, worker: int, members: Membership, *, again: bool) -> None:
        """Raise if a worker that waited here knows another run; ``again``: others may have begun the run again."""
        if worker in members.joined or (again and worker > members.admitted):
            raise WorkerLostError(
                f"Worker {worker} waited for the servers to be restarted, but other workers started run {self.name!r} "
                f"over first. Start it again to take part."
            )

    def admit(self, message: Attach, members: Membership, now: float) -> Attached | LaunchError | None:
        """Admit a worker, or not; None while the run has no weights, and another worker is to bring them."""
        bootstraps = not self.bootstrapped
        if bootstraps and self.bootstrap_worker in members.living:
            return None
        if len(members.unheard) >= _MOST_SILENT:
            return LaunchError(f"{_MOST_SILENT} workers have joined but do not respond. Look for a faulty one of them.")
        processes = dict(members.processes)
        for absent in processes.keys() - members.living:
            del processes[absent]
        worker = members.admit(message.about, now, message.process)
        if bootstraps:
            self.bootstrap_worker = worker
            self.metadata.clear()  # of a worker that was lost while it published them
        heard = members.forgotten + len(members.events)
        return Attached(worker, bootstraps, dict(self.metadata), heard, members.chief, processes)

    def note(self, message: RunMetadata, *, trusted: bool) -> bool:
        """Take a worker's metadata, unless others speak for it; returns whether they were taken."""
        bootstraps = message.worker == self.bootstrap_worker and not self.bootstrapped  # even if it was suspected
        return super().note(message, trusted=trusted or bootstraps)


class Admissions(ServerFeature):
    """Admits the workers that wait to join: once the run has weights, or one of them is to bring its own."""

    lasting = True

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        state = server.state
        self._run = RunRegistry(state.run)
        if state.run:  # else the message is refused
            state.registry = self._run

    def handle(self, message: Any) -> Any:
        """See :class:`ServerFeature`."""
        server = self._server
        server.state.registry.check_can_join(message.session, message.about, message.protocol, elastic=True)
        future = server.pending.add(message)
        self._admit()
        return future.value() if future.done() else future

    def tick(self, now: float) -> None:
        """See :class:`ServerFeature`."""
        self._admit()

    def members_changed(self) -> list[Completion]:
        """See :class:`ServerFeature`."""
        self._admit()
        return []

    def _admit(self) -> None:
        server, run = self._server, self._run
        state = server.state
        if state.recovery.phase.lost and not run.bootstrapped:
            self._reject()  # what the run is, its workers will report
            return
        for message in server.pending.of(Attach):
            session = state.session = state.session or SessionState(Membership(message.session, 0, message.policy))
            attached = run.admit(message, session.members, server.clock()) if message in server.pending else None
            if attached is not None:
                server.pending.complete(message, attached)
                server.members_changed(session)

    def _reject(self) -> None:
        """No worker can report what the lost server knew: continue from a snapshot, or reject joining workers."""
        pending, recovery = self._server.pending, recovery_of(self._server)
        waiting = recovery.unreported()
        try:
            if not waiting or recovery.restore_snapshot(self._server.state.index):
                return
        except ASGDError as error:  # no snapshot can be read
            pending.complete_each(waiting, error)
            return
        if not recovery.replaces:  # it only knows by hearsay of workers that are gone
            recovery.reset()
            self._admit()
            return
        lost = ServerLostError(
            f"The weights of run {self._run.name!r} were lost: a server ended while the run had no workers. Start "
            "`lightning-asgd serve` again, and a Trainer with ckpt_path=... to continue from a checkpoint. With "
            "--snapshots a run outlives its servers."
        )
        pending.complete_each(waiting, lost)


class StatusReports(ServerFeature):
    """Answers `lightning-asgd status`, also if there is no session."""

    observes = True

    def handle(self, message: Any) -> Status:
        """See :class:`ServerFeature`."""
        server, state = self._server, self._server.state
        status, session = Status(state.run), state.session
        if session is not None:
            status = view(session.members, session.shards.get(0), state.epochs.latest, server.clock())
        return replace(status, snapshot=recovery_of(server).report())
