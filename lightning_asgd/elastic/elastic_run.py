"""A worker's membership in an elastic run, which workers join and leave.

What a worker learns when it joins, and publishes to the others, is in ``elastic/attachment.py``, without Lightning.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor

from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError, ServerLostError
from lightning_asgd.core.foundation.layout import Layout
from lightning_asgd.core.foundation.process_name import gone_among, pid_of
from lightning_asgd.core.job.training_job import TrainingJob
from lightning_asgd.core.leases.common_order import CommonOrder, overlap
from lightning_asgd.core.protocol import Policy
from lightning_asgd.core.worker.fleet import Fleet
from lightning_asgd.core.worker.metrics_board import MetricsBoard
from lightning_asgd.core.worker.session_client import HeartbeatThread
from lightning_asgd.core.worker.shell import Shell
from lightning_asgd.core.worker.untrained_state import UntrainedTensors
from lightning_asgd.elastic.attachment import Attachment
from lightning_asgd.replacement.late_entry import EntryPoint

log = logging.getLogger(__name__)

# Parts of the lease of a host, where another one may take over.
_BEAT = 0.4  # at most between two heartbeats: they extend the lease
_SILENT = 0.6  # without an answer, after which a worker looks for another host
_LOOK = 2.0  # for which it looks before the next heartbeat
_PAUSE = 0.12


class ElasticFleet(Fleet):
    """One worker's membership in a run. Raises a :class:`LaunchError` if its servers are missing or serve another run.

    ``attachment`` is what the worker learned when it joined, and publishes to the others.
    """

    comes_and_goes = others_may_join = True

    def __init__(
        self, job: TrainingJob, config: ExchangeConfig, policy: Policy, board: MetricsBoard, shell: Shell
    ) -> None:
        super().__init__(job, config, policy, board, shell, alone=False)  # others may join
        self._begun = False  # whether it has the run's first values
        self._living: tuple[int, ...] = ()  # as the latest epoch began
        self._heard = 0  # events from before this worker joined
        self._find()

    @property
    def rank(self) -> int:
        """0 for the chief, and for other workers their number."""
        return 0 if self.attachment.chief else self.client.connection.worker

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """The worker's rank among those that were alive when its epoch began, and their number."""
        living = sorted({*self._living, self.client.connection.worker})
        return living.index(self.client.connection.worker), len(living)

    # ------------------------------------------------------------------ joining and leaving

    def _find(self) -> None:
        """Connect to the run's servers, without a number until the coordinator assigns one."""
        self._job.find_run()
        self._connect(0, 0)
        self.attachment = Attachment(self.client, self._change_chief)

    def _check_loop(self) -> None:
        """Raise if the run's workers count epochs in another way."""
        theirs, mine = self.attachment.loop, self._shell.loop
        if theirs not in (None, mine):
            raise ConfigurationError(
                f"Run {self.session!r} was begun with {theirs}, but this worker trains with {mine}. Expected the same "
                f"kind of loop on all workers of a run. Train with {theirs} here too, or join another run."
            )

    def join(self) -> None:
        """Attach the worker; wait while the bootstrap worker provides the first weights."""
        self._heard = heard = self._arrive()
        self._check_loop()
        if not (attached := self.attachment).bootstraps:
            self.entry = EntryPoint(self.session, layout=attached.layout, progress=attached.progress)
        self._shell.speak_as(self.rank)
        worker = self.client.connection.worker
        self.board.living, self.board.places = (worker,), {worker: (socket.gethostname(), str(self._shell.device))}
        self.begin_epoch()
        try:
            self._report_dead()
        except ASGDError as error:  # such as a lost coordinator; a server then misses their heartbeats
            log.info("Worker %d could not report which workers of this machine have died: %s", worker, error)
        about = (self._tell, self.board, self.attachment.note_chief, heard)
        several, finder = self._has_several_hosts(), self._job.finder
        every_s = _BEAT * finder.lease_s if several and finder is not None else math.inf
        self._heartbeat = HeartbeatThread(
            self.client, self._config.timeouts.silence_s, *about, at_least_every_s=every_s
        )
        self._heartbeat.on_silence = self._look_for_host
        if several:
            self._heartbeat.on_silent_servers = self._look_for_replacements

    def _has_several_hosts(self) -> bool:
        """Whether the run has other hosts. Logs it if none of them can take over."""
        config, several = self._config, self._job.finder is not None and self._job.finder.several
        if several and not config.restorable:
            log.warning(
                "No other host can take over run %r: its servers cannot be restored from the workers' copies. Expected "
                "npush equal to nfetch, no compression, and an algorithm whose servers send their weights. This worker "
                "has npush=%d, nfetch=%d, compression=%r, algorithm=%s. If the host that serves is lost, begin another "
                "run with the last checkpoint.",
                self.session,
                config.npush,
                config.nfetch,
                config.compression,
                config.algorithm_name,
            )
        return several

    def _look_for_host(self, silent_s: float) -> None:
        """The coordinator does not answer: its machine may be lost, though no connection has broken."""
        finder, recovery = self._job.finder, self._recovery
        if finder is None or not finder.several or recovery is None or silent_s < _SILENT * finder.lease_s:
            return
        replaced, term = tuple(self.client.connection.replaced), finder.term
        until, pause_s = time.monotonic() + _LOOK * finder.lease_s, _PAUSE * finder.lease_s
        try:
            while finder.look() is None and time.monotonic() < until:
                time.sleep(pause_s)
        except Exception:  # else the heartbeats would end, and no message would say why
            log.exception("Worker %d could not look for another host of the run.", self.client.connection.worker)
        if finder.term != term:
            recovery.lose_all(replaced)

    def _report_dead(self) -> None:
        """Report this machine's workers whose processes have ended: a server elsewhere would notice it later."""
        before = self.attachment.processes
        gone = gone_among(before.values())
        for worker, process in before.items():
            if process in gone and worker in self.board.living:
                self.client.leave("its process has ended", worker=worker, pid=pid_of(process))

    def begin_epoch(self) -> None:
        """Ask which workers take part: this worker's next heartbeat would report them too late."""
        now = self.client.beat(self._heard, self._config.timeouts.silence_s)
        if now is not None:
            self.board.living = tuple(now.living)
        self._living = self.board.living

    def _arrive(self) -> int:
        while True:
            try:
                heard = self.attachment.arrive(self._shell.device)
                if self._job.finder is not None:
                    self._job.finder.worker = self.client.connection.worker
                return heard
            except ServerLostError as error:
                if error.server is None:
                    raise
                # It was lost just now: attach again, under a new number, once its replacement serves.
                self.client.leave()
                self._job.successor(error.server)
                self._find()

    def leave(self) -> None:
        """Leave the run, which continues."""
        super().leave()
        self._shell.speak_as(0)

    def follow_chief(self) -> None:
        """Apply a change of chief, between two batches and at sync points."""
        self.attachment.update()

    def _change_chief(self, chief: bool) -> None:
        worker = self.client.connection.worker
        log.info("Worker %d %s from now on.", worker, "writes the checkpoints" if chief else "writes no checkpoints")
        self._shell.speak_as(0 if chief else worker)
        if chief and self._begun:
            self._continue_as_chief()

    def _continue_as_chief(self) -> None:
        """Write checkpoints as the chief before has."""
        self.adopt_checkpoints()

    def _tell(self, news: str) -> None:
        self.board.note(news)
        if self.rank == 0:
            log.warning(news)

    # ------------------------------------------------------------------ a fit

    def share_first_values(
        self, layout: Layout, constants: Mapping[str, Tensor], progress: Callable[[], dict[str, Any] | None]
    ) -> None:
        """The bootstrap worker publishes its values; the others adopt them."""
        self._begun = True
        if self.attachment.bootstraps:
            self.attachment.publish(layout.describe(), constants, progress(), self._shell.loop)
        else:
            self.attachment.adopt(constants)

    def begin_untrained(self, tensors: UntrainedTensors) -> None:
        """The bootstrap worker publishes its buffers; the others take the chief's."""
        self._share_buffers(tensors, publishes=self.attachment.bootstraps, statistics=True)

    def share_untrained(self, tensors: UntrainedTensors, steps: int) -> None:
        """The chief publishes its buffers; the others take these, and keep their own statistics.

        There is no common sync point. What the chief published last may be from before the epoch that ends, and its
        statistics would not fit the weights that the worker has now.
        """
        self._share_buffers(tensors, publishes=self.is_chief, statistics=False)

    def _share_buffers(self, tensors: UntrainedTensors, *, publishes: bool, statistics: bool) -> None:
        if publishes:
            self.attachment.publish_buffers(tensors.values())
        else:
            tensors.take(self.attachment.buffers, statistics=statistics)

    def reference_batch(self, mine: int) -> int:
        """The batch size of the run's first worker."""
        return self.attachment.reference_batch(mine) if mine else 0

    def common_order(
        self, epoch: str, samplers: list[str], mine: list[list[Any]], *, unites: bool = False
    ) -> CommonOrder:
        """The order of the worker that opened the epoch, which has published it: others may join at any time."""
        theirs = self.attachment.first_order(epoch, mine)
        differs = theirs is not mine
        if differs and not overlap(mine, theirs):
            name = ", ".join(samplers) or "The sampler"
            self.refuse_a_split(f"{name} gives each worker samples that the others do not get")
        if differs:
            self._tell_order(samplers, "This worker shares that of the worker that began the epoch.")
        return CommonOrder(theirs, differs=differs)

    def publish_chief_state(self) -> None:
        """Publish what the chief knows of its checkpoint files, for the next chief."""
        if self.is_chief:
            self.attachment.publish_checkpoints(self._shell.checkpoint_states())

    def adopt_checkpoints(self) -> None:
        """Know what the chief has published of its checkpoint files."""
        files = self.attachment.files
        if files is not None:
            self._shell.adopt_checkpoint_states(files)

    def agree_to_stop(self, should_stop: bool, progress: Callable[[], dict[str, Any]]) -> bool:
        """Whether training ends: the run ends with the chief's; any other worker may leave it."""
        return self.attachment.end_epoch(progress, should_stop)

    # ------------------------------------------------------------------ what is not possible in a run

    def begin_generation(self) -> None:
        """Raise: workers of an elastic run do not synchronise, so they cannot agree on a layout."""
        raise ConfigurationError(
            "Weights were replaced, or parameters unfrozen, during training in an elastic run. Expected the same "
            "trainable parameters from the first batch to the last: workers of an elastic run cannot agree on others."
        )

    def refuse_a_split(self, reason: str) -> NoReturn:
        """Raise: a split needs a number of workers that does not change."""
        raise ConfigurationError(
            f"{reason}. Expected training data that the workers of an elastic run can share: one dataloader over a "
            f"dataset with a length, into which Lightning may put its distributed sampler."
        )

    def refuse_a_search(self) -> NoReturn:
        """Raise: this training is a callback's search for a learning rate or batch size."""
        raise ConfigurationError(
            "A search for a learning rate or batch size was started in an elastic run. Expected it to be done "
            "beforehand, with a separate Trainer: it would change the weights of all workers."
        )
