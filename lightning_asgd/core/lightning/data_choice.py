"""The choice of a training loop for a fit: it leases the data to the workers, or gives each worker a fixed part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_asgd.combined.combined_data import CombinedData
from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.checkpointing import restart_epochs
from lightning_asgd.core.lightning.data_mode import batch_size_of, count_in, set_length, why_not_shared, why_split
from lightning_asgd.core.lightning.leased_loop import LeasedData, LeasedLoop
from lightning_asgd.core.lightning.private_names import training_loaders
from lightning_asgd.core.lightning.sampled_data import SampledData
from lightning_asgd.elastic.elastic_run import AnyFleet, ElasticFleet
from lightning_asgd.programs.fixed_split import FixedSplit, datasets_of
from lightning_asgd.streams.find import batch_of, drops_last, is_streamed, shards_of
from lightning_asgd.streams.sharded_data import ShardedData
from lightning_asgd.streams.streamed_data import StreamedData


class DataChoice:
    """The choice of one fit of one worker. All workers make it together.

    ``resumed`` returns once what a checkpoint says of the epoch that it was written in. With ``split`` every worker is
    to have its own part. At the start of an epoch another object may take the place of ``loop``, which is chosen.
    """

    def __init__(
        self,
        trainer: Any,
        membership: AnyFleet,
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
        self._shards: ShardedData | str = ""  # of the training data, or why there are none
        self._name = b""  # digest of them
        self._divided: str | None = None  # how its samplers divide the training data themselves

    def on_data(self) -> None:
        """New training data were set up: have all workers count progress in batches of the same size."""
        trainer = self._trainer
        batch, self._divided = batch_size_of(trainer), None
        self._leases.batch = batch
        if self._splits:
            return
        self._find_shards()
        if isinstance(self._shards, ShardedData):
            batch = self._leases.batch = batch_of(training_loaders(trainer)[0], self._shards)
        self._batch = self._membership.reference_batch(batch)
        if not isinstance(self._shards, ShardedData):
            if batch and self._batch not in (0, batch):
                count_in(trainer, self._batch)
        elif (samples := self._shards.samples) is not None:
            batches = samples / (self._batch or 1) / trainer.world_size
            set_length(trainer, batches, drop_last=drops_last(training_loaders(trainer)[0], self._shards))

    def _find_shards(self) -> None:
        """Find out whether all workers can read the same data by shards."""
        self._shards, self._name, loaders = "", b"", training_loaders(self._trainer)
        if len(loaders) != 1 or not is_streamed(loaders[0]):
            return
        self._shards = why_not_shared(self._trainer) or shards_of(loaders[0])
        if isinstance(self._shards, ShardedData):
            self._shards, self._name = self._shards.examined(private_names.program_seed())
        if not self._membership.all_have(self._name) and isinstance(self._shards, ShardedData):
            self._shards = "the workers' data differ" if self._name else "its samples cannot be pickled"

    def choose(self) -> None:
        """Choose for the epoch that begins."""
        if self._splits or self.loop.installed:
            return
        trainer, loop, entry = self._trainer, self.loop, self._membership.entry
        if loop is self._split and entry is not None and entry.between_epochs:
            restart_epochs(trainer)
        data, reason = self._shared()
        if data is None:
            if isinstance(self._membership, ElasticFleet):
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
        if isinstance(self._shards, ShardedData):
            return StreamedData(trainer, self._leases, self._shards, self._name), ""
        mine = self._shards or self._divided or why_split(trainer, self._batch)
        reason = self._membership.collectives.reduced("all_reduce", "why data are split", mine, "given").value
        if reason is None:
            kind = SampledData if len(training_loaders(trainer)) == 1 else CombinedData
            data = kind(trainer, self._leases, self._membership)
            self._divided = reason = data.order.why_divided(private_names.epochs_begun(trainer))
        return (data, "") if reason is None else (None, reason)

    def end(self) -> None:
        """Restore Lightning's own dataloader and counts."""
        self.loop.restore()
        self.loop = self._split
