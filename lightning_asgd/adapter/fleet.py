"""A worker's place in a session: how it comes, how it shows that it lives, how it leaves.

:class:`Fleet` is that of a job, whose workers start and end together. What is different in a run, whose workers
come and go, stands in ``adapter/elastic_run.py``, and nowhere else.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_asgd.adapter.checkpointing import Resumption
from lightning_asgd.adapter.launchers import Job
from lightning_asgd.algorithms.base import Payload
from lightning_asgd.config import ExchangeConfig
from lightning_asgd.errors import ServerLostError
from lightning_asgd.layout import Layout
from lightning_asgd.monitoring.metrics_board import MetricsBoard
from lightning_asgd.processes import supervisor
from lightning_asgd.protocol import LeaseHoldings, Policy
from lightning_asgd.worker.collectives import Collectives, Phase
from lightning_asgd.worker.connection import Connection
from lightning_asgd.worker.exchanger import Exchanger
from lightning_asgd.worker.failover_client import FailoverClient
from lightning_asgd.worker.session_client import HeartbeatThread, SessionClient
from lightning_asgd.worker.synchronizer import Synchronizer

__all__ = ["Fleet", "leave_resting", "resting"]

log = logging.getLogger(__name__)


class Fleet:
    """One worker's place in one session, from the strategy's set-up to its teardown. Connects to the servers.

    Args:
        job: where the servers are.
        config: how the worker exchanges.
        policy: what becomes of the session when workers fail.
        board: has this worker's figures, and is told the others'.
        rank: the worker's.
        world_size: number of workers.

    Attributes:
        client: connection to the servers; replaced when the worker joins once more, or weights are laid out again.
        collectives: what the worker does together with the others; the same.

    Raises:
        LaunchError: the servers are not there.
    """

    comes_and_goes = False
    """Whether workers do. Then each of them comes to sync points by itself."""

    def __init__(
        self, job: Job, config: ExchangeConfig, policy: Policy, board: MetricsBoard, rank: int, world_size: int
    ) -> None:
        self._job = job
        self._config = config
        self._policy = policy
        self.board = board
        self._rank = rank
        self._world_size = world_size
        self._heartbeat: HeartbeatThread | None = None
        self._recovery: FailoverClient | None = None
        self._layouts = 0  # made in this session
        self._failed = False
        self._use(self._connect(job.session))

    # ------------------------------------------------------------------ who and where

    @property
    def rank(self) -> int:
        """The worker's, as Lightning is to know it."""
        return self._rank

    @property
    def standing(self) -> tuple[int, int]:
        """The worker's rank among those that take part, and their number."""
        return self._rank, self._world_size

    @property
    def alone(self) -> bool:
        """Whether there is no other worker, and none will come."""
        return self._world_size == 1

    @property
    def session(self) -> str:
        """Its name, whatever the layout."""
        return self._job.session

    @property
    def num_servers(self) -> int:
        """Number of servers."""
        return self._job.num_servers

    # ------------------------------------------------------------------ coming

    @property
    def _watched(self) -> bool:
        """Whether the others go on without this worker when it is silent."""
        # Who is alone is missed by nobody; and what these algorithms share as they go cannot be taken back.
        return not self.alone and self._config.algorithm.payload not in (Payload.LAYERS, Payload.NONE)

    def _connect(self, session: str, after: str = "") -> SessionClient:
        timeouts = self._config.timeouts
        connection = Connection(
            self._job.connect(),
            session,
            self._rank,
            self._world_size,
            # Where answers are held back for other workers, those may take as long as to a sync point.
            timeout_s=timeouts.collective_s if self._config.algorithm.waits else timeouts.exchange_s,
            patience_s=timeouts.collective_s,
        )
        policy = self._policy if self._watched else replace(self._policy, silence_s=0.0)
        return SessionClient(connection, policy=policy, after=after)

    def _use(self, client: SessionClient) -> None:
        self.client, self.collectives = client, Collectives(client, self._config.timeouts.collective_s)

    def join(self) -> None:
        """Become a member, and wait until all are."""
        self._enter()
        overseer = supervisor.current()
        if overseer is not None:
            overseer.on_worker_exit(self._report_exit)
        if self._watched:
            news = log.warning if self.rank == 0 else None
            self._heartbeat = HeartbeatThread(self.client, self._policy.silence_s, news, self.board)
        self.collectives.barrier("join")

    def join_anew(self) -> None:
        """Leave for a session with another layout, together with all others."""
        self._layouts += 1
        waited_s = self.collectives.waited_s
        self._use(self._connect(f"{self.session}.{self._layouts}", after=self.client.connection.session))
        self._stop()
        self.collectives.waited_s = waited_s
        self.join()

    def _enter(self) -> None:
        client = self.client
        try:
            client.join()
        except ServerLostError as error:  # it has ended since the latest session, when nobody needed it
            if error.server is None:
                raise
            client.connection.transport.prepare(error.server, self._job.successor(error.server))
            client.connection.transport.replace(error.server)
            client.join()

    def _report_exit(self, rank: int, code: int) -> None:
        """Called by the supervisor's thread when a worker's process has ended."""
        overseer = supervisor.current()
        rests = resting() is self  # nobody trains on without it then
        if overseer is not None and not self._policy.abort and not rests:
            overseer.excuse(rank)
        if code != 0 and rests:
            log.warning("Worker %d ended with exit code %d after the fit.", rank, code)
        elif code != 0:
            log.warning("Worker %d ended with exit code %d; the others go on without it.", rank, code)
        self.client.leave(f"its process ended with exit code {code}", worker=rank)

    # ------------------------------------------------------------------ a fit

    @property
    def bootstraps(self) -> bool:
        """Whether nobody had trained in this session when this worker came."""
        return True

    @property
    def fills(self) -> bool | None:
        """Whether the servers are to have this worker's weights; None: if it is worker 0."""
        return None

    @property
    def layout(self) -> Any:
        """Description of the layout that the servers have already; None if they have none."""
        return None

    @property
    def progress(self) -> dict[str, Any] | None:
        """Where a run was when this worker came."""
        return None

    @property
    def between_epochs(self) -> bool:
        """Whether that was the end of an epoch."""
        return False

    def agree_with_run(self, trainer: Any, layout: Layout, constants: Mapping[str, Tensor], resume: Resumption) -> None:
        """Tell, or take from, those of a run what is not exchanged. The servers have the weights."""

    def restore_servers(self, synchronizer: Synchronizer, part: Callable[[], LeaseHoldings | None]) -> None:
        """Take part in restoring servers that are lost from now on, where workers can."""
        if isinstance(synchronizer, Exchanger) and self._config.restorable and not self.alone:
            self._recovery = FailoverClient(self.client, self.collectives, synchronizer, part, self._job.successor)

    def check_goes_on(self) -> None:
        """Do not train on until the next exchange if the session was ended."""
        if self._heartbeat is not None and self._heartbeat.error is not None:
            raise self._heartbeat.error

    def begin_epoch(self) -> None:
        """Take notice of who takes part, where that changes."""

    def update(self) -> None:
        """Take notice of who is chief, where that changes: between two batches and at sync points."""

    def living(self, met: Collection[int]) -> Collection[int]:
        """Workers that take part, of which ``met`` are those that this one has just met."""
        return met

    def common_batch(self, mine: int) -> int:
        """The reference batch size: the first worker's; ``mine`` is 0 if this worker's is not known."""
        sizes: dict[int, int] = self.collectives.gather("all_gather", "batch size", mine)
        return sizes.get(0, mine)

    def of_the_first(self, mine: int) -> int:
        """The first worker's number. All workers call it together."""
        numbers: dict[int, int] = self.collectives.gather("all_gather", "batches per step", mine)
        return numbers.get(0, mine)

    def wrote_checkpoint(self, trainer: Any) -> None:
        """A checkpoint was written by this worker."""

    def know_checkpoints(self, trainer: Any) -> None:
        """Let checkpoint callbacks know what was written by others, where those who write change."""

    def gather_states(self, mine: Mapping[str, Any]) -> Mapping[int, Any]:
        """All workers' optimizer and scheduler states, for the checkpoint that worker 0 writes."""
        return self.collectives.gather("gather", "checkpoint", mine, target=0)

    def agree_to_stop(self, should_stop: bool, progress: Callable[[], dict[str, Any]]) -> bool:
        """Whether training is to end with this epoch. Called by all when they end it."""
        return self.collectives.decide(should_stop, all=False)

    # ------------------------------------------------------------------ what is not possible everywhere

    def check_layout_may_change(self) -> None:
        """Raise if the workers cannot all lay their modules out again."""

    def check_data_may_be_split(self, reason: str) -> None:
        """Raise if the training data, which cannot be shared for ``reason``, cannot be split either."""

    def check_is_no_search(self, trainer: Any) -> None:
        """Raise if this training is a search that the others take no part in."""

    # ------------------------------------------------------------------ leaving

    def leave(self) -> None:
        """Wait for the others and end the session, unless this worker has failed. Servers and connection stay.

        Where there are other workers this one stays a member, at rest, until the next session or the process's end: its
        collectives are still real.
        """
        stays = not self._failed and not self.alone and not self.comes_and_goes
        try:
            if not self._failed:
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
            _rest(self)
        else:
            self.quit()

    def quit(self) -> None:
        """Be a member no more."""
        self._stop()
        if not self._failed:
            self._failed = True  # nothing is said to the others any more
            self.client.leave()
        self.collectives.phase = Phase.OFFLINE
        overseer = supervisor.current()
        if overseer is not None:
            overseer.on_worker_exit(None)

    def fail(self, why: str) -> None:
        """Tell the others at once, so that nobody waits for this worker."""
        self._failed = True
        self._stop()
        self.client.leave(why)
        if not self._policy.abort:
            self._job.excuse(self.rank)

    def _stop_restoring(self) -> None:
        if self._recovery is not None:
            self._recovery.close()
            self._recovery = None

    def _stop(self) -> None:
        """Stop restoring servers and sending heartbeats."""
        self._stop_restoring()
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None


_resting: Fleet | None = None  # of this process's latest session, if that is over and no other has begun


def resting() -> Fleet | None:
    """This process's membership between two sessions."""
    return _resting


@atexit.register
def leave_resting() -> None:
    """Leave the latest session for good: another one begins, or the process ends."""
    global _resting
    membership, _resting = _resting, None
    if membership is not None:
        membership.quit()


def _rest(membership: Fleet) -> None:
    global _resting
    _resting = membership
    # Before the transport's own: what is registered last is called first.
    atexit.unregister(leave_resting)
    atexit.register(leave_resting)


def _after_fork() -> None:
    global _resting
    _resting = None


os.register_at_fork(after_in_child=_after_fork)
