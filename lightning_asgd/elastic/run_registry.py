"""What outlives the sessions of a server: the elastic run that it serves, and which workers' processes have ended."""

from __future__ import annotations

from typing import Any

from lightning_asgd.core.foundation.errors import LaunchError, ProtocolError, ServerLostError, WorkerLostError
from lightning_asgd.core.protocol import BOOTSTRAPPED, PROTOCOL, Attach, Attached, RunMetadata, forget_old_orders
from lightning_asgd.core.server.membership import Membership

_MOST_NAMES = 1000  # of metadata
_MOST_SILENT = 10_000  # workers that have joined, and of which nothing was heard since


class RunRegistry:
    """The run: who may join it, who bootstraps it, what its workers note. For a ``job`` its ``name`` is empty."""

    def __init__(self, name: str, job: str = "") -> None:
        self.name = name
        self.job = job
        self.metadata: dict[str, Any] = {}
        self.bootstrap_worker: int | None = None  # brings the run's first weights
        self.exits: dict[tuple[str, int], str] = {}  # of processes, and why: by session (empty for all) and worker

    @property
    def bootstrapped(self) -> bool:
        """Whether the run has weights."""
        return BOOTSTRAPPED in self.metadata

    def check_can_join(self, session: str, worker: int | str, protocol: int, *, elastic: bool) -> None:
        """Raise unless a worker speaks this protocol, and means this run or this job."""
        if protocol != PROTOCOL:
            raise ProtocolError(
                f"Worker {worker} speaks protocol {protocol}. Expected {PROTOCOL}. "
                "Install the same version of lightning-asgd on every machine."
            )
        if self.job and not goes_on_from(session, self.job):
            raise LaunchError(
                f"Worker {worker} wants to join session {session!r}, but these servers belong to job {self.job!r}. It "
                f"was rejected: its own job has ended, or uses the same address. Expected a MASTER_PORT of its own for "
                "each job."
            )
        if self.name and (session != self.name or not elastic):
            raise ProtocolError(
                f"Worker {worker} wants to take part in {session!r}, but these servers serve run {self.name!r}, an "
                f"elastic run. Expected ASGDStrategy(run=...) with the address and name that "
                "`lightning-asgd serve` was given."
            )
        if elastic and not self.name:
            raise ProtocolError(
                f"Worker {worker} wants to join the elastic run {session!r}, but these servers belong to a job with a "
                "fixed number of workers. Expected servers started with `lightning-asgd serve`."
            )

    def check_bootstraps(self, worker: int) -> None:
        """Raise unless it is for this worker to bring the first weights."""
        if self.bootstrapped or worker != self.bootstrap_worker:
            raise WorkerLostError(
                f"Worker {worker} missed its heartbeats before it had sent the run's first weights, and another worker "
                f"has sent them. Start it again: it will train with these."
            )

    def check_same_start(self, worker: int, members: Membership, *, again: bool) -> None:
        """Raise if a worker that waited here knows another run; ``again``: others may have begun the run again."""
        if self.name and (worker in members.joined or (again and worker > members.admitted)):
            raise WorkerLostError(
                f"Worker {worker} waited for the servers to be restarted, but other workers started run {self.name!r} "
                f"over first. Start it again to take part."
            )

    @property
    def lost(self) -> ServerLostError:
        """The error of workers that join a run whose weights are lost."""
        return ServerLostError(
            f"The weights of run {self.name!r} were lost: a server ended while the run had no workers. Start "
            "`lightning-asgd serve` again, and a Trainer with ckpt_path=... to continue from a checkpoint. With "
            "--snapshots a run outlives its servers."
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

    def exited(self, session: str) -> dict[int, str]:
        """Workers whose processes have ended, as far as a session is concerned, and why."""
        return {worker: why for (first, worker), why in self.exits.items() if goes_on_from(session, first)}

    def note(self, message: RunMetadata, *, trusted: bool) -> bool:
        """Take a worker's metadata, unless others speak for it; returns whether they were taken."""
        known = message.first and message.name in self.metadata
        bootstraps = message.worker == self.bootstrap_worker and not self.bootstrapped  # even if it was suspected
        if message.value is None or known or not (bootstraps or message.first or trusted):
            return False
        if len(self.metadata) >= _MOST_NAMES and message.name not in self.metadata:
            raise ProtocolError(f"Worker {message.worker} publishes more than {_MOST_NAMES} names. Expected fewer.")
        self.metadata[message.name] = message.value
        forget_old_orders(self.metadata)
        return True


def goes_on_from(session: str, first: str) -> bool:
    """Whether a session is one that a launcher began, or a later generation of it, with a new layout."""
    return not first or session == first or session.startswith(f"{first}.")
