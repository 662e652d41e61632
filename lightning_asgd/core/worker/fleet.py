"""A worker's membership in a session: joining, heartbeats, leaving. What jobs and elastic runs share.

``fixed_fleet.py`` is for a job, whose workers start and end together; ``elastic/elastic_run.py`` is for a run that
workers join and leave.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.errors import ConfigurationError, LayoutMismatchError, ProtocolError
from lightning_asgd.core.foundation.layout import Layout
from lightning_asgd.core.job import rank_variables, supervisor
from lightning_asgd.core.job.interruptions import ignoring_children, is_brief
from lightning_asgd.core.job.registry import kind_of
from lightning_asgd.core.job.training_job import TrainingJob
from lightning_asgd.core.leases.common_order import CommonOrder
from lightning_asgd.core.protocol import LeaseHoldings, Policy
from lightning_asgd.core.worker.collectives import Collectives, Phase
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.core.worker.exchanger import Exchanger
from lightning_asgd.core.worker.metrics_board import MetricsBoard
from lightning_asgd.core.worker.session_client import HeartbeatThread, SessionClient
from lightning_asgd.core.worker.shell import Shell
from lightning_asgd.core.worker.synchronizer import Synchronizer
from lightning_asgd.core.worker.untrained_state import UntrainedTensors
from lightning_asgd.recovery.failover_client import FailoverClient
from lightning_asgd.replacement.late_entry import EntryPoint

log = logging.getLogger(__name__)

_TRACEBACK_LINES = 20
_REFUSALS = ConfigurationError, LayoutMismatchError, ProtocolError  # of a worker that does not fit the others


class Roster:
    """Who takes part, and what the workers agree on. The defaults are those of a worker that decides by itself."""

    comes_and_goes = False
    """Whether workers join and leave. Then each of them reaches sync points by itself."""

    others_may_join = False
    """Whether a program that is started elsewhere may join."""

    another_chief = False
    """Whether another worker becomes chief when the chief is gone, and all write a checkpoint together."""

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """This worker's rank among those that take part, and their number."""
        return 0, 1

    def join(self) -> None:
        """Join, and wait until this worker can set up its module."""

    def begin_epoch(self) -> None:
        """Find out which workers take part in the epoch."""

    def follow_chief(self) -> None:
        """Apply a change of chief, between two batches and at sync points."""

    def begin_generation(self) -> None:
        """Move to another layout, together with all others. Raises if workers cannot agree on one."""

    def share_first_values(
        self, layout: Layout, constants: Mapping[str, Tensor], progress: Callable[[], dict[str, Any] | None]
    ) -> None:
        """Provide what a worker needs that joins later; ``progress`` is None at the very beginning."""

    def reference_batch(self, mine: int) -> int:
        """The batch size in which all workers count progress; ``mine`` is 0 if this worker's is not known."""
        return mine

    def of_first_worker(self, mine: int, what: str = "batches per step") -> int:
        """The first worker's value, where all workers call it together; else this worker's own."""
        return mine

    def all_have(self, data: bytes) -> bool:
        """Whether all workers have the same training data, named by a digest; empty if a worker has none to share.

        Where workers join and leave, who opens an epoch is checked to have those of the others.
        """
        return bool(data)

    def common_order(
        self, epoch: str, samplers: list[str], mine: list[list[Any]], *, unites: bool = False
    ) -> CommonOrder:
        """The order of an epoch's samples for all workers, of each dataloader; ``mine`` is that of this worker's.

        ``samplers`` are the classes of the program's own. ``unites``: where these divide the samples, all workers share
        all of them. Workers of a job call it together.
        """
        return CommonOrder(mine)

    def gather_optimizer_states(self, mine: Mapping[str, object]) -> Mapping[int, object]:
        """All workers' optimizer and scheduler states, for the checkpoint that the chief writes, if it has them."""
        return {}

    def agree_to_stop(self, should_stop: bool, progress: Callable[[], dict[str, Any]]) -> bool:
        """Whether training ends with this epoch."""
        return should_stop

    def publish_chief_state(self) -> None:
        """Publish what the next chief needs to know, if this worker is the chief."""

    def adopt_checkpoints(self) -> None:
        """Know what the chief has published of its checkpoint files."""

    def agree_on_checkpoints(self, published: bytes | None, *, final: bool) -> None:
        """At a sync point, know of the chief's files, which it has ``published``; None if it is gone."""

    def end_entries(self) -> None:
        """Training has ended: no worker can enter any more."""

    def lost_workers(self) -> dict[int, str]:
        """The workers that are not there at the end of a fit, and why."""
        return {}

    def refuse_a_split(self, reason: str) -> None:
        """Raise if the number of workers may change: each is to train its own part of the data."""

    def refuse_a_search(self) -> None:
        """Raise if others train: this training is a callback's search for a learning rate or batch size."""


class Fleet(Roster):
    """One worker's membership in one session, from the strategy's set-up to its teardown.

    It is ``alone`` if no other worker is there or will be. A rejoin or a new layout replaces client and collectives.
    """

    entry: EntryPoint | None = None
    """Where the others were when this worker joined, if they train already."""

    def __init__(
        self,
        job: TrainingJob,
        config: ExchangeConfig,
        policy: Policy,
        board: MetricsBoard,
        shell: Shell,
        *,
        alone: bool,
    ) -> None:
        self._job = job
        self._shell = shell
        self._config = config
        self._policy = policy
        self.board = board
        self.alone = alone
        self._heartbeat: HeartbeatThread | None = None
        self._recovery: FailoverClient | None = None
        self._failed = False
        self._looking: threading.Thread | None = None  # for servers in the place of silent ones
        self._told_order = False

    def _connect(self, worker: int, world_size: int, generation: int = 0, after: str = "") -> None:
        timeouts, transport = self._config.timeouts, self._job.connect()  # which learns the session's name
        connection = Connection(
            transport,
            f"{self.session}.{generation}" if generation else self.session,
            worker,
            world_size,
            timeout_s=self._config.reply_s,
            patience_s=timeouts.collective_s,
            with_last_output=supervisor.with_last_output,
        )
        connection.moving, connection.check = self._job.placed, self._shell.raise_signal
        self.client = SessionClient(connection, policy=self._policy, after=after)
        self.collectives = Collectives(self.client, timeouts.collective_s)

    @property
    def rank(self) -> int:
        """The worker's rank, as its program sees it."""
        return self.client.connection.worker

    @property
    def is_chief(self) -> bool:
        """Whether this worker logs and writes checkpoints."""
        return self.rank == 0

    @property
    def session(self) -> str:
        """The session's name, whatever the layout."""
        return self._job.session

    @property
    def transport(self) -> str:
        """How messages are sent, and why."""
        return f"{self._job.transport} ({self._job.why})"

    @property
    def secure_interface(self) -> str | None:
        """The network interface at which only the job's processes can connect; None if strangers can, too."""
        return self._job.interface if kind_of(self._job.transport).encrypted else None

    def restore_servers(self, synchronizer: Synchronizer, part: Callable[[], LeaseHoldings | None]) -> None:
        """Take part in the recovery of servers that are lost from now on, if the session is restorable."""
        if isinstance(synchronizer, Exchanger) and self._config.restorable and not self.alone:
            self._recovery = FailoverClient(self.client, self.collectives, synchronizer, part, self._job.successor)

    def _look_for_replacements(self, servers: list[int]) -> None:
        """These do not answer, and the coordinator does: others may have replaced them, with their machine lost."""
        # It is found out in a thread, so that heartbeats continue: the lease of a run's present host depends on them.
        recovery, before = self._recovery, tuple(self.client.connection.replaced)
        if recovery is None or (self._looking is not None and self._looking.is_alive()):
            return

        def look() -> None:
            try:
                found = self._job.replaced_among(servers)
            except Exception:
                log.exception("Worker %d could not look for other servers.", self.client.connection.worker)
                return
            for server in found:
                recovery.lose(server, before[server])

        self._looking = threading.Thread(target=look, name="lightning_asgd.look", daemon=True)
        self._looking.start()

    def begin_interval(
        self, synchronizer: Synchronizer, place: Mapping[str, Any] | None, progress: Callable[[], dict[str, Any]]
    ) -> None:
        """The first batch since a sync point, or of this worker: from now on all train by themselves.

        ``place`` in an epoch is empty at its beginning, None where nothing is leased; ``progress`` gives the rest.
        """
        self.collectives.phase = Phase.ASYNC

    def begin_untrained(self, tensors: UntrainedTensors) -> None:
        """Have a worker that enters take the buffers of those that train, or publish its own for workers to come."""

    def share_untrained(self, tensors: UntrainedTensors, steps: int) -> None:
        """Share the module's untrained tensors at a sync point, after ``steps`` of this worker's."""
        tensors.share(self.collectives, steps)
        self.begin_untrained(tensors)

    def _tell_order(self, samplers: list[str], what: str) -> None:
        """Say once that the workers' samplers disagree."""
        if not self._told_order:
            self._told_order = True
            log.warning("The order of %s differs between workers. %s", ", ".join(samplers) or "the samples", what)

    def check_session(self) -> None:
        """Raise at once if the session was ended, instead of training until the next exchange."""
        if self._heartbeat is not None and self._heartbeat.error is not None:
            raise self._heartbeat.error

    def leave(self) -> None:
        """Wait for the others and end the session, unless this worker has failed. Servers and connection stay.

        With other workers it stays an idle member until the next session or the process's end: its collectives still
        reach the others.
        """
        stays = False
        try:
            # While it enters, the others know nothing of this worker.
            if not self._failed and self.collectives.phase is not Phase.ENTERING:
                self.collectives.phase = Phase.SYNC
                self.collectives.barrier("teardown")
                stays = not self.alone and not self.comes_and_goes
        finally:
            if stays:
                self._stop_restoring()
            else:
                self._stop()
        if (overseer := supervisor.current()) is not None:
            overseer.rest()
        if stays:
            keep_idle(self)
        else:
            self.end_membership()

    def end_membership(self) -> None:
        """Leave the session permanently."""
        self._stop()
        if not self._failed:
            self._failed = True  # send the others nothing any more
            self.client.leave()
        self.collectives.phase = Phase.OFFLINE
        if (overseer := supervisor.current()) is not None:
            overseer.on_worker_exit(None)

    @ignoring_children()
    def fail(self, error: BaseException) -> None:
        """Report a failure at once, so that no worker waits for this one, and worker 0 can log it."""
        self._failed = True
        self._stop()
        what, details = self._failure(error)
        self.client.leave(what, details=details)
        if not self._policy.abort and rank_variables.main_process() in (None, os.getppid()):
            self._job.note_failure(self.rank, excused=not isinstance(error, _REFUSALS))

    def _failure(self, error: BaseException) -> tuple[str, str]:
        """What the others learn of an error in this process, and its last lines."""
        what = f"it raised {type(error).__name__}: {error}" if str(error) else f"it raised {error!r}"
        lines = [] if is_brief(error) else "".join(traceback.format_exception(error)).splitlines()[-_TRACEBACK_LINES:]
        if ended_by := self._shell.ended_by(error):
            what, lines = f"it was ended by {ended_by}", []
        return f"{what.strip()} ({here(os.getpid())})", "\n".join(lines)

    def _stop_restoring(self) -> None:
        if self._recovery is not None:
            self._recovery.close()
            self._recovery = None

    def _stop(self) -> None:
        """Stop taking part in recoveries, and sending heartbeats."""
        self._stop_restoring()
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None


def here(pid: int) -> str:
    """A process of this machine, as people look for it."""
    return f"process {pid} on {socket.gethostname()}"


_idle: Fleet | None = None  # of this process's latest session, if it is over and no other has begun


def idle_membership() -> Fleet | None:
    """This process's idle membership, between two sessions."""
    return _idle


@atexit.register
def end_idle_membership() -> None:
    """Leave the latest session permanently: another session begins, or the process ends."""
    global _idle
    membership, _idle = _idle, None
    if membership is not None:
        membership.end_membership()


def keep_idle(membership: Fleet) -> None:
    """Keep a membership until the next session begins, or the process ends."""
    global _idle
    _idle = membership
    # To run before the transport's own handler: what is registered last is called first.
    atexit.unregister(end_idle_membership)
    atexit.register(end_idle_membership)


def _after_fork() -> None:
    global _idle
    _idle = None


os.register_at_fork(after_in_child=_after_fork)
