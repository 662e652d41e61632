"""A worker's membership in a session: joining, heartbeats, leaving.

:class:`FixedFleet` is for a job, whose workers start and end together; ``adapter/elastic_run.py`` is for a run that
workers join and leave. :class:`Fleet` is what both share.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_asgd.adapter import job_address, world
from lightning_asgd.adapter.checkpointing import Resumption, progress_in
from lightning_asgd.adapter.launchers import TrainingJob
from lightning_asgd.algorithms.base import Payload
from lightning_asgd.config import ExchangeConfig
from lightning_asgd.errors import LaunchError, ServerLostError
from lightning_asgd.layout import Layout
from lightning_asgd.monitoring.metrics_board import MetricsBoard
from lightning_asgd.processes import supervisor
from lightning_asgd.protocol import Joined, LeaseHoldings, Policy
from lightning_asgd.worker.collectives import Collectives, Phase
from lightning_asgd.worker.connection import COORDINATOR, Connection
from lightning_asgd.worker.exchanger import Exchanger
from lightning_asgd.worker.failover_client import FailoverClient
from lightning_asgd.worker.late_entry import EntryPoint, await_entry, publish_entry, take_rank
from lightning_asgd.worker.session_client import HeartbeatThread, SessionClient
from lightning_asgd.worker.synchronizer import Synchronizer

__all__ = ["FixedFleet", "Fleet", "end_idle_membership", "idle_membership", "release_process_group"]

log = logging.getLogger(__name__)

_NEWS_S = 1.0  # until worker 0 reports what has happened to another worker
_TRACEBACK_LINES = 20


class Fleet:
    """One worker's membership in one session, from the strategy's set-up to its teardown.

    Args:
        job: where the servers are.
        config: how the worker exchanges.
        policy: what happens to the session when workers fail.
        board: the metrics of this worker and of the others.
        alone: whether there is no other worker, and none will join.

    Attributes:
        client: the session's client; replaced when the worker rejoins, or with a new layout.
        collectives: collectives of all workers; replaced likewise.
    """

    comes_and_goes = False
    """Whether workers join and leave. Then each of them reaches sync points by itself."""
    entry: EntryPoint | None = None
    """Where the others were when this worker joined, if they train already."""

    def __init__(
        self, job: TrainingJob, config: ExchangeConfig, policy: Policy, board: MetricsBoard, *, alone: bool
    ) -> None:
        self._job = job
        self._config = config
        self._policy = policy
        self.board = board
        self.alone = alone
        self._heartbeat: HeartbeatThread | None = None
        self._recovery: FailoverClient | None = None
        self._failed = False

    def _connect(self, worker: int, world_size: int, policy: Policy, generation: int = 0, after: str = "") -> None:
        timeouts, transport = self._config.timeouts, self._job.connect()  # which learns the session's name
        connection = Connection(
            transport,
            f"{self.session}.{generation}" if generation else self.session,
            worker,
            world_size,
            # A reply blocked for other workers may take as long as these need to reach a sync point.
            timeout_s=timeouts.collective_s if self._config.algorithm.waits else timeouts.exchange_s,
            patience_s=timeouts.collective_s,
            with_last_output=supervisor.with_last_output,
        )
        self.client = SessionClient(connection, policy=policy, after=after)
        self.collectives = Collectives(self.client, timeouts.collective_s)

    @property
    def rank(self) -> int:
        """The worker's rank, as Lightning sees it."""
        return self.client.connection.worker

    @property
    def session(self) -> str:
        """The session's name, whatever the layout."""
        return self._job.session

    def restore_servers(self, synchronizer: Synchronizer, part: Callable[[], LeaseHoldings | None]) -> None:
        """Take part in the recovery of servers that are lost from now on, if the session is restorable."""
        if isinstance(synchronizer, Exchanger) and self._config.restorable and not self.alone:
            self._recovery = FailoverClient(self.client, self.collectives, synchronizer, part, self._job.successor)

    def begin_interval(
        self, synchronizer: Synchronizer, place: Mapping[str, Any] | None, progress: Callable[[], dict[str, Any]]
    ) -> None:
        """The first batch since a sync point, or of this worker: from now on all train by themselves.

        ``place`` is where an epoch is between two sync intervals; empty at the beginning of an epoch, None where
        nothing is leased. ``progress`` gives the rest.
        """
        self.collectives.phase = Phase.ASYNC

    def end_entries(self) -> None:
        """Training has ended: no worker can enter any more."""

    def check_session(self) -> None:
        """Raise at once if the session was ended, instead of training until the next exchange."""
        if self._heartbeat is not None and self._heartbeat.error is not None:
            raise self._heartbeat.error

    def leave(self) -> None:
        """Wait for the others and end the session, unless this worker has failed. Servers and connection stay.

        If there are other workers this one stays an idle member until the next session or the process's end: its
        collectives still reach the others.
        """
        stays = not self._failed and not self.alone and not self.comes_and_goes
        try:
            if self.collectives.phase is Phase.ENTERING:  # the others know nothing of this worker
                stays = False
            elif not self._failed:
                self.collectives.phase = Phase.SYNC
                self.collectives.barrier("teardown")
        except BaseException:
            stays = False
            raise
        finally:
            if stays:
                self._stop_restoring()
            else:
                self._stop()
        overseer = supervisor.current()
        if overseer is not None:
            overseer.rest()
        if stays:
            _keep_idle(self)
        else:
            self.end_membership()

    def end_membership(self) -> None:
        """Leave the session permanently."""
        self._stop()
        if not self._failed:
            self._failed = True  # send the others nothing any more
            self.client.leave()
        self.collectives.phase = Phase.OFFLINE
        overseer = supervisor.current()
        if overseer is not None:
            overseer.on_worker_exit(None)

    def fail(self, error: BaseException) -> None:
        """Report a failure at once, so that no worker waits for this one, and worker 0 can log it."""
        self._failed = True
        self._stop()
        what = f"it raised {type(error).__name__}: {error}" if str(error) else f"it raised {error!r}"
        lines = "".join(traceback.format_exception(error)).splitlines()[-_TRACEBACK_LINES:]
        self.client.leave(f"{what.strip()} ({_here(os.getpid())})", details="\n".join(lines))
        if not self._policy.abort:
            self._job.excuse(self.rank)

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


def _here(pid: int) -> str:
    """A process of this machine, as people look for it."""
    return f"process {pid} on {socket.gethostname()}"


class FixedFleet(Fleet):
    """One worker's membership in a session of a job, in which it ``fits`` or not.

    Raises a :class:`LaunchError` if the servers are not there.
    """

    def __init__(
        self,
        job: TrainingJob,
        config: ExchangeConfig,
        policy: Policy,
        board: MetricsBoard,
        place: tuple[int, int],  # rank and world size
        *,
        fits: bool,
    ) -> None:
        rank, world_size = place
        super().__init__(job, config, policy, board, alone=world_size == 1)
        self._fits = fits
        # What does not change during the fit, and the progress when the latest epoch began.
        self._start = EntryPoint("")
        # Hogwild and LayerWise cannot exclude a worker: its pushes cannot be undone. No worker waits for a single one.
        self._watched = not self.alone and config.algorithm.payload not in (Payload.LAYERS, Payload.NONE)
        self._layouts = 0  # layouts made in this session
        self._exited: set[int] = set()  # workers that this process had started
        self._connect(rank, world_size, self._watching)

    @property
    def _watching(self) -> Policy:
        """The policy, without heartbeats where the others cannot continue without a worker that sends none."""
        return self._policy if self._watched else replace(self._policy, silence_s=0.0)

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """The worker's rank among the members, and their number."""
        return self.rank, self.client.connection.world_size

    def join(self) -> None:
        """Join, and wait until all have joined; a replacement waits until the others train."""
        joined = self._join()
        overseer = supervisor.current()
        if overseer is not None:
            overseer.on_worker_exit(self._report_exit)
        if self._watched:
            silence_s, tells = self._policy.silence_s, self.rank == 0
            every_s = _NEWS_S if tells else math.inf
            self._heartbeat = HeartbeatThread(
                self.client, silence_s, self._tell if tells else None, self.board, at_least_every_s=every_s
            )
        if joined.late:
            self.entry = self._await_entry(joined.collectives)
            self.collectives.phase = Phase.ENTERING
        self.collectives.barrier("join")

    def _tell(self, event: str) -> None:
        """Print what has happened to another worker, unless this process has seen and printed it itself."""
        if not any(event.startswith(f"Worker {rank} is gone: its process ended") for rank in self._exited):
            log.warning(event)

    def begin_generation(self) -> None:
        """Move to the session's next generation, with another layout, together with all others."""
        self._layouts += 1
        self.entry = None
        waited_s = self.collectives.waited_s
        rank, world_size, before = *self.rank_and_size, self.client.connection.session
        self._connect(rank, world_size, self._watching, self._layouts, after=before)
        self._stop()
        self.collectives.waited_s = waited_s
        self.join()

    def _join(self) -> Joined:
        client = self.client
        try:
            return self._take_rank()
        except ServerLostError as error:  # the server ended between the sessions, while no worker used it
            if error.server is None:
                raise
            client.connection.transport.prepare(error.server, self._job.successor(error.server))
            client.connection.transport.replace(error.server)
            return self._take_rank()

    def _take_rank(self) -> Joined:
        if self._watched and not self._layouts:  # else no process can tell that the process before this one is gone
            return take_rank(self.client)
        self.client.join()
        return Joined(0)

    def _report_exit(self, rank: int, pid: int, code: int) -> None:
        """Called by the supervisor's thread when a worker's process has ended."""
        overseer = supervisor.current()
        rests = idle_membership() is self  # then no fit continues without it
        if overseer is not None and not self._policy.abort and not rests:
            overseer.excuse(rank)
        if code != 0 and rests:
            log.warning("Worker %d ended with exit code %d after the fit.", rank, code)
        elif code != 0:
            self._exited.add(rank)
            log.warning("Worker %d ended with exit code %d; the others continue without it.", rank, code)
        self.client.leave(f"its process ended with exit code {code} ({_here(pid)})", worker=rank, pid=pid)

    @property
    def lost(self) -> dict[int, str]:
        """The workers that are not there at the end of a fit, and why."""
        client = self.client
        away = set(range(self.rank_and_size[1])) - {self.rank, *client.heard.living} if client.heard.living else set()
        silent = dict.fromkeys(sorted(away), "it missed its heartbeats, and has not rejoined")
        return {**silent, **{worker: why for worker, why in client.members[COORDINATOR].left.items() if why}}

    def reference_batch(self, mine: int) -> int:
        """The reference batch size: the first worker's; ``mine`` is 0 if this worker's is not known."""
        return self._of_first("batch size", mine)

    def of_first_worker(self, mine: int) -> int:
        """The first worker's value. All workers call it together."""
        return self._of_first("batches per step", mine)

    def _of_first(self, what: str, mine: int) -> int:
        if self.entry is not None and self.collectives.phase is Phase.ENTERING:
            return self.entry.firsts.get(what, mine)
        values: dict[int, int] = self.collectives.gather("all_gather", what, mine)
        first = values.get(0, mine)
        self._start = replace(self._start, firsts={**self._start.firsts, what: first})
        return first

    def gather_optimizer_states(self, mine: Mapping[str, Any]) -> Mapping[int, Any]:
        """All workers' optimizer and scheduler states, for the checkpoint that worker 0 writes."""
        return self.collectives.gather("gather", "checkpoint", mine, target=0)

    def agree_to_stop(self, should_stop: bool, progress: Callable[[], dict[str, Any]]) -> bool:
        """Whether training ends with this epoch. All workers call it at the end of the epoch."""
        if self._publishes:
            self._start = replace(self._start, progress=progress())
        return self.collectives.decide(should_stop, all=False)

    # ------------------------------------------------------------------ a process that replaces a lost worker

    @property
    def _publishes(self) -> bool:
        """Whether it is for this worker to say where all are."""
        return self.rank == 0 and not self.alone and not self._layouts and self._watched

    def _await_entry(self, collectives: int) -> EntryPoint:
        if not self._fits:
            raise LaunchError(
                f"Worker {self.rank} cannot be replaced: the others do not fit now. Expected "
                "it in fit only. Start the whole job again."
            )
        return await_entry(self.client, collectives, self._config.timeouts.collective_s, self.check_session)

    def share_first_values(
        self, trainer: Any, layout: Layout, constants: Mapping[str, Tensor], resume: Resumption
    ) -> None:
        """Note where this fit begins, for a process that replaces a lost worker."""
        if self._publishes:
            progress = progress_in(trainer)
            if progress is not None:
                progress["data"] = resume.data
            session = self.client.connection.session
            self._start = EntryPoint(session, layout=layout.describe(), progress=progress)

    def begin_interval(
        self, synchronizer: Synchronizer, place: Mapping[str, Any] | None, progress: Callable[[], dict[str, Any]]
    ) -> None:
        """See :class:`Fleet`. Take part from now on if others trained already; as worker 0, publish where all are."""
        if self.collectives.phase is Phase.ENTERING and self.entry is not None:
            self.client.join(since=self.entry.collective)
            self.collectives.enter(self.entry.collective)
        elif self._publishes and isinstance(synchronizer, Exchanger) and place is not None:
            entry = replace(self._start, collective=self.collectives.called, constants=synchronizer.constants)
            if place:
                entry = replace(entry, progress={**progress(), "between_epochs": False, "data": place})
            publish_entry(self.client, entry)
        elif self._publishes:
            self._refuse("every worker trains a fixed part of the data, or what workers share cannot be undone")
        super().begin_interval(synchronizer, place, progress)

    def end_entries(self) -> None:
        """See :class:`Fleet`."""
        if self._publishes:
            self._refuse("training has ended")

    def _refuse(self, why: str) -> None:
        publish_entry(self.client, EntryPoint(self.client.connection.session, refused=why))


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


def release_process_group() -> None:
    """Release the default process group to another strategy of this process, which is about to make its own."""
    end_idle_membership()
    job_address.release_port()
    if world.is_ours():
        world.withdraw()


def _keep_idle(membership: Fleet) -> None:
    global _idle
    _idle = membership
    # To run before the transport's own handler: what is registered last is called first.
    atexit.unregister(end_idle_membership)
    atexit.register(end_idle_membership)


def _after_fork() -> None:
    global _idle
    _idle = None


os.register_at_fork(after_in_child=_after_fork)
