"""What is different where a Trainer attaches itself to a run, whose workers come and go.

What a worker is told when it comes, and tells the others, stands in ``worker/attachment.py``, without Lightning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from lightning_asgd.adapter.checkpointing import (
    Resumption,
    adopt_checkpoint_states,
    checkpoint_states,
    progress_in,
)
from lightning_asgd.adapter.class_trees import become_global_zero
from lightning_asgd.adapter.fleet import Fleet
from lightning_asgd.adapter.launchers import Job
from lightning_asgd.adapter.sync_callback import SyncPoints
from lightning_asgd.config import ExchangeConfig
from lightning_asgd.errors import ConfigurationError, ServerLostError
from lightning_asgd.layout import Layout
from lightning_asgd.monitoring.metrics_board import MetricsBoard
from lightning_asgd.protocol import Policy
from lightning_asgd.worker.attachment import Attachment
from lightning_asgd.worker.connection import Connection
from lightning_asgd.worker.session_client import HeartbeatThread, SessionClient

__all__ = ["ElasticFleet", "check_is_one_worker"]

log = logging.getLogger(__name__)


def check_is_one_worker(devices: int, num_nodes: int) -> None:
    """Check that a Trainer which attaches itself is a single worker."""
    if devices * num_nodes != 1:
        raise ConfigurationError(
            f"devices={devices} and num_nodes={num_nodes} were given with server=... Expected "
            "devices=1 and num_nodes=1: a Trainer attaches itself as one worker. Start one for every device."
        )


class ElasticFleet(Fleet):
    """One worker's place in a run.

    Args:
        job: says which run it is, and where.
        config: how the worker exchanges.
        policy: how long a worker may be silent.
        board: has this worker's figures, and is told the others'.
        device: what the worker trains on, for people.

    Raises:
        LaunchError: the run's servers are not there, or serve another one.
    """

    comes_and_goes = True

    def __init__(self, job: Job, config: ExchangeConfig, policy: Policy, board: MetricsBoard, device: Any) -> None:
        super().__init__(job, config, policy, board, rank=0, world_size=1)
        self._device = device
        self._trainer: Any = None  # while it fits
        self._living: tuple[int, ...] = ()  # as the latest epoch began
        self._heard = 0  # news that were there before this worker
        self._attachment = Attachment(self.client, self._change_chief)

    @property
    def rank(self) -> int:
        """The chief's is 0, that of others their number."""
        return 0 if self._attachment.chief else self.client.connection.worker

    @property
    def standing(self) -> tuple[int, int]:
        """The worker's place among those that lived when its epoch began, and their number."""
        living = sorted({*self._living, self.client.connection.worker})
        return living.index(self.client.connection.worker), len(living)

    @property
    def alone(self) -> bool:
        """Others may come."""
        return False

    # ------------------------------------------------------------------ coming and leaving

    def _connect(self, session: str, after: str = "") -> SessionClient:
        self._job.find_run()
        timeouts = self._config.timeouts
        connection = Connection(
            self._job.connect(),
            session,
            worker=0,  # until it is told
            world_size=0,
            timeout_s=timeouts.exchange_s,
            patience_s=timeouts.collective_s,
        )
        return SessionClient(connection, policy=self._policy)

    def join(self) -> None:
        """Attach the worker; waits while another one brings the run's first weights."""
        self._heard = heard = self._arrive()
        become_global_zero(self.rank)
        self.board.living = (self.client.connection.worker,)
        self.begin_epoch()
        about = (self._tell, self.board, self._attachment.follow, heard)
        self._heartbeat = HeartbeatThread(self.client, self._config.timeouts.silence_s, *about)

    def begin_epoch(self) -> None:
        """Ask who takes part: with its heartbeats alone this worker would hear of the others too late."""
        now = self.client.beat(self._heard, self._config.timeouts.silence_s)
        if now is not None:
            self.board.living = now.living
        self._living = self.board.living

    def _arrive(self) -> int:
        while True:
            try:
                return self._attachment.arrive(self._device)
            except ServerLostError as error:
                if error.server is None:
                    raise
                # It has just been lost: come again, as somebody else, when another one has taken its place.
                self.client.leave()
                self._job.successor(error.server)
                self._use(self._connect(self.client.connection.session))
                self._attachment = Attachment(self.client, self._change_chief)

    def leave(self) -> None:
        """Leave the run to the others."""
        super().leave()
        become_global_zero(0)

    def _change_chief(self, chief: bool) -> None:
        worker = self.client.connection.worker
        log.info("Worker %d %s checkpoints from now on.", worker, "logs and writes" if chief else "writes no")
        become_global_zero(0 if chief else worker)
        if chief and self._trainer is not None:
            self.know_checkpoints(self._trainer)

    def _tell(self, news: str) -> None:
        if self.rank == 0:
            log.warning(news)

    # ------------------------------------------------------------------ a fit

    @property
    def bootstraps(self) -> bool:
        """Whether the run had no weights when this worker came."""
        return self._attachment.bootstraps

    @property
    def fills(self) -> bool:
        """The bootstrap worker's weights are the run's first."""
        return self.bootstraps

    @property
    def layout(self) -> Any:
        """Description of the run's layout; None for the bootstrap worker."""
        return self._attachment.layout

    @property
    def progress(self) -> dict[str, Any] | None:
        """Where the run was when this worker came; None in its first epoch."""
        return self._attachment.progress

    @property
    def between_epochs(self) -> bool:
        """Whether that was the end of an epoch."""
        return self._attachment.between_epochs

    def agree_with_run(self, trainer: Any, layout: Layout, constants: Mapping[str, Tensor], resume: Resumption) -> None:
        """The bootstrap worker publishes its values; the others take them."""
        self._trainer = trainer
        if not self.bootstraps:
            self._attachment.adopt(constants)
            return
        progress = progress_in(trainer)
        if progress is not None:
            progress["data"] = resume.data
        self._attachment.found(layout.describe(), constants, progress)

    def update(self) -> None:
        """Become the chief, or cease to be, if that was heard of."""
        self._attachment.update()

    def living(self, met: Collection[int]) -> Collection[int]:
        """Those that were heard of: nobody is met."""
        return self.board.living

    def common_batch(self, mine: int) -> int:
        """That of the run's first worker."""
        return self._attachment.common_batch(mine) if mine else 0

    def of_the_first(self, mine: int) -> int:
        """This worker's own: nobody is met."""
        return mine

    def wrote_checkpoint(self, trainer: Any) -> None:
        """Note what the chief's callbacks know of their files, for the next one."""
        self._attachment.wrote(checkpoint_states(trainer))

    def know_checkpoints(self, trainer: Any) -> None:
        """Let checkpoint callbacks know what chiefs have written, in place of what this worker would have."""
        files = self._attachment.files
        if files is not None and len(files) == len(trainer.checkpoint_callbacks):
            adopt_checkpoint_states(trainer, files)

    def gather_states(self, mine: Mapping[str, Any]) -> Mapping[int, Any]:
        """The chief's state stands where Lightning looks for it, and that of others is not asked for."""
        return {}

    def agree_to_stop(self, should_stop: bool, progress: Callable[[], dict[str, Any]]) -> bool:
        """The run ends where the chief does; any other worker may leave it."""
        return self._attachment.end_epoch(progress, should_stop)

    # ------------------------------------------------------------------ what is not possible in a run

    def check_layout_may_change(self) -> None:
        """Raise: nobody waits for the others here."""
        raise ConfigurationError(
            "Weights were replaced, or parameters unfrozen, during fit in a run that workers attach themselves to. "
            "Expected the same trainable parameters from the first batch to the last: there is nobody to agree "
            "with about others."
        )

    def check_data_may_be_split(self, reason: str) -> None:
        """Raise: nobody knows how many workers there will be."""
        raise ConfigurationError(
            f"{reason}. Expected training data that workers can share in a run that they attach themselves to: one "
            "dataloader over a dataset with a length, whose batches Lightning may deal out."
        )

    def check_is_no_search(self, trainer: Any) -> None:
        """Raise if callbacks were put aside, as in a search for a learning rate or batch size."""
        if not any(isinstance(callback, SyncPoints) for callback in trainer.callbacks):
            raise ConfigurationError(
                "A search for a learning rate or batch size was begun in a run that workers attach themselves to. "
                "Expected it to be done before, with a Trainer of its own: it would spoil the weights of all."
            )
