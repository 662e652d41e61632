"""A dataloader of data with shards, whose samples are leased, for any training loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.leases.plan import Plan
from lightning_asgd.core.leases.sampler import LeasedSteps, digest
from lightning_asgd.core.protocol import Epoch
from lightning_asgd.streams.find import batch_of, collate_of, drops_last, loader_of
from lightning_asgd.streams.loader_processes import LoaderProcesses, same
from lightning_asgd.streams.parallel_reader import ParallelPlan, ParallelReader
from lightning_asgd.streams.sharded_data import ShardedData
from lightning_asgd.streams.stream_reader import StreamPlan, StreamReader


class LeasedStream:
    """The samples of a dataloader, epoch after epoch. ``name``: digest of its data; ``seed``: of the shards' orders."""

    def __init__(self, loader: Any, data: ShardedData, name: bytes, seed: int) -> None:
        self._data, self._name, self._seed = data, name, seed
        torchs: Any = loader_of(loader)
        self._loader = torchs
        self.batch = batch_of(loader, data)
        """Samples of a batch; 0 if the data set yields batches."""
        self._drop_last = drops_last(loader, data)
        self._processes = LoaderProcesses(torchs, data, seed) if torchs.num_workers else None
        self._order: list[int] = []  # of the shards in the present epoch

    def begin(self, number: int) -> tuple[bytes, tuple[int, ...]]:
        """A digest of an epoch's units in their order, and where their shards end."""
        self._order = self._data.order(number, self._seed)
        return digest([self._name, *self._order]), self._data.ends(self._order)

    def plan(self, epoch: Epoch, accumulate: int) -> Plan:
        """The epoch that has begun, as this worker trains it."""
        order, number, about = self._order, epoch.number, (epoch, (), self.batch or None, accumulate)
        if self._processes is not None:
            ahead = self._processes.begin(number)
            parallel = ParallelReader(self._processes, epoch.shards, ahead)
            return ParallelPlan(*about, reader=parallel, ahead=ahead, drop_last=self._drop_last)
        reader = StreamReader(lambda shard, start: self._data.read(number, order[shard], start), epoch.shards)
        return StreamPlan(*about, reader=reader, drop_last=self._drop_last)

    def granted(self, leases: DataLeases, plan: Plan) -> Iterator[Any]:
        """The batches that are granted to this worker, of an epoch that begins or continues."""
        leases.open(plan)
        # A loader of torch's collates and pins as the program's own would.
        steps: Any = LeasedSteps(leases)
        if self._processes is not None or plan.batch is None:  # whole batches
            how = {"batch_size": None, "sampler": steps}
        else:
            how = {"batch_sampler": steps}
        convert = same if self._processes is not None else collate_of(self._loader.collate_fn, self._data)
        pin: bool = self._loader.pin_memory
        made: Any = DataLoader(_Samples(), collate_fn=convert, pin_memory=pin, **how)  # type: ignore[arg-type]
        return iter(made)

    def close(self) -> None:
        """End the loader's processes."""
        if self._processes is not None:
            self._processes.stop()


class _Samples:
    """A data set whose samples are their own numbers."""

    def __getitem__(self, sample: Any) -> Any:
        return sample
