"""The choice of a training loop for a fit: it leases the data to the workers, or gives each worker a fixed part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.checkpointing import restart_epochs
from lightning_asgd.core.lightning.data_mode import batch_size_of, count_in, set_length, why_split
from lightning_asgd.core.lightning.leased_loop import LeasedLoop
from lightning_asgd.core.lightning.private_names import training_loaders
from lightning_asgd.core.lightning.sampled_data import LeasedData, SampledData
from lightning_asgd.core.worker.fleet import Fleet
from lightning_asgd.features import FINDERS, load
from lightning_asgd.programs.fixed_split import FixedSplit, datasets_of


class DataChoice:
    """The choice of one fit of one worker. All workers make it together.

    ``resumed`` returns once what a checkpoint says of the epoch that it was written in. With ``split`` every worker is
    to have its own part. At the start of an epoch another object may take the place of ``loop``, which is chosen.
    """

    def __init__(
        self,
        trainer: Any,
        membership: Fleet,
        leases: DataLeases,
        resumed: Callable[[], Mapping[str, Any]],
        *,
        split: bool,
    ) -> None:
        self._trainer, self._membership, self._leases, self._resumed = trainer, membership, leases, resumed
        self._splits = split
        self._split = FixedSplit(trainer, membership)
        self.loop: FixedSplit | LeasedLoop = self._split
        self._batch = 0  # samples of the batches in which all workers count progress
        self._streamed: Any = ""  # data that all read by shards, or why they cannot; empty: there are no shards
        self._divided: str | None = None  # how its samplers divide the training data themselves

    def on_data(self) -> None:
        """New training data were set up: have all workers count progress in batches of the same size."""
        trainer = self._trainer
        batch, self._divided = batch_size_of(trainer), None
        self._leases.batch = batch
        if self._splits:
            return
        data = self._streamed = load(FINDERS["streamed data"])(trainer, self._leases, self._membership)
        if not isinstance(data, str):
            batch = self._leases.batch = data.batch
        self._batch = self._membership.reference_batch(batch)
        if isinstance(data, str):
            if batch and self._batch not in (0, batch):
                count_in(trainer, self._batch)
        elif data.samples is not None:
            set_length(trainer, data.samples / (self._batch or 1) / trainer.world_size, drop_last=data.drop_last)

    def choose(self) -> None:
        """Choose for the epoch that begins."""
        if self._splits or self.loop.installed:
            return
        trainer, loop, entry = self._trainer, self.loop, self._membership.entry
        if loop is self._split and entry is not None and entry.between_epochs:
            restart_epochs(trainer)
        data, reason = self._shared()
        if data is None:
            self._membership.refuse_a_split(f"{datasets_of(trainer)}: {reason}")
            self.end()
            self._split.explain(reason)
            return
        if not isinstance(loop, LeasedLoop):
            loop = self.loop = LeasedLoop(trainer, self._membership, self._leases, self._resumed(), data)
        loop.install(data, self._batch)

    def _shared(self) -> tuple[LeasedData | None, str]:
        """The data that all workers can share; None if they cannot, and why."""
        trainer = self._trainer
        if not isinstance(self._streamed, str):
            return self._streamed, ""
        mine = self._streamed or self._divided or why_split(trainer, self._batch)
        reason = self._membership.collectives.reduced("all_reduce", "why data are split", mine, "given").value
        if reason is None:
            kind = SampledData if len(training_loaders(trainer)) == 1 else load(FINDERS["combined data"])
            data = kind(trainer, self._leases, self._membership)
            self._divided = reason = data.order.why_divided(private_names.epochs_begun(trainer))
        return (data, "") if reason is None else (None, reason)

    def end(self) -> None:
        """Restore Lightning's own dataloader and counts."""
        self.loop.restore()
        self.loop = self._split
