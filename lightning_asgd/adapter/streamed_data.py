"""Training data that are read shard by shard: the samples that are leased of them. Their number may be unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_asgd.adapter import private_names
from lightning_asgd.adapter.loader_processes import LoaderProcesses, same
from lightning_asgd.adapter.loop_counters import NEVER
from lightning_asgd.adapter.private_names import combined_loader, loaders, training_loaders
from lightning_asgd.protocol import UNKNOWN, Epoch
from lightning_asgd.streams.find import batch_of, collate_of, drops_last, loader_of
from lightning_asgd.streams.sharded_data import ShardedData
from lightning_asgd.worker.lease_client import DataLeases
from lightning_asgd.worker.lease_plan import ParallelPlan, Plan, StreamPlan
from lightning_asgd.worker.leased_sampler import LeasedSteps, digest
from lightning_asgd.worker.parallel_reader import ParallelReader
from lightning_asgd.worker.stream_reader import StreamReader

__all__ = ["StreamedData"]


class StreamedData:
    """The data of one fit, whose dataloader is replaced while they are leased. ``name`` is their digest."""

    def __init__(self, trainer: Any, leases: DataLeases, data: ShardedData, name: bytes) -> None:
        self._trainer, self._leases = trainer, leases
        self._data, self._name = data, name
        self._loader: StreamedLoader | None = None
        self._batch = 1
        self._order: list[int] = []  # of the shards in the present epoch

    @property
    def installed(self) -> bool:
        """Whether the training dataloader is still the same."""
        return self._loader is not None and training_loaders(self._trainer) == [self._loader]

    def install(self, batch: int, opened: Callable[[], Plan | None]) -> None:
        """Have the training dataloader yield what is granted; see :class:`StreamedLoader`."""
        (loader,) = training_loaders(self._trainer)
        self._batch = batch
        inner = loader.inner if isinstance(loader, StreamedLoader) else loader  # of a fit that failed
        self._loader = StreamedLoader(inner, self._data, self._leases, opened)
        loaders.set_of(combined_loader(self._trainer), [self._loader])

    def start(self) -> None:
        """Have Lightning begin to iterate."""
        iter(private_names.fetcher(self._trainer))
        if self._loader is not None:
            self._loader.begins = False

    def uninstall(self) -> None:
        """Restore the training dataloader."""
        if self._loader is not None and self.installed:
            loaders.set_of(combined_loader(self._trainer), [self._loader.inner])
        if self._loader is not None and self._loader.processes is not None:
            self._loader.processes.stop()
        self._loader = None

    def count(self, expected: float) -> int:
        """Batches of an epoch per worker, from the number that Lightning expects; more than exist, if it knows none."""
        return int(min(expected, max(1, len(self._data.lengths)) * UNKNOWN // self._batch))

    def begin_epoch(self, number: int, batches: int) -> tuple[int, bytes, tuple[int, ...]]:
        """Units of an epoch with at most ``batches``, a digest of their order, and where their shards end."""
        self._order = self._data.order(number, private_names.program_seed())
        ends = self._data.ends(self._order)
        return min(ends[-1] if ends else 0, batches * self._batch), digest([self._name, *self._order]), ends

    def plan(self, epoch: Epoch, accumulate: int) -> Plan:
        """The epoch as this worker trains it."""
        order, number, loader = self._order, epoch.number, self._loader
        if loader is None:
            raise RuntimeError("no dataloader was replaced")
        batch = batch_of(loader.inner, self._data) or None
        if loader.processes is not None:
            ahead = loader.processes.begin(number)
            parallel = ParallelReader(loader.processes, epoch.shards, ahead)
            return ParallelPlan(epoch, (), batch, accumulate, reader=parallel, ahead=ahead, drop_last=loader.drop_last)
        reader = StreamReader(lambda shard, start: self._data.read(number, order[shard], start), epoch.shards)
        return StreamPlan(epoch, (), batch, accumulate, reader=reader, drop_last=loader.drop_last)


class StreamedLoader:
    """A training dataloader that yields what is granted, and otherwise looks like the one it replaces.

    ``plan`` tells which epoch begins if it is Lightning that begins to iterate, None if it is a program: that gets what
    the loader itself yields.
    """

    def __init__(self, inner: Any, data: ShardedData, leases: DataLeases, plan: Callable[[], Plan | None]) -> None:
        self.inner = inner
        self._data = data
        self._leases = leases
        self._new_plan = plan
        torchs: Any = loader_of(inner)
        seed = private_names.program_seed()
        self.processes = LoaderProcesses(torchs, data, seed) if torchs.num_workers else None
        self.begins = False  # whether Lightning begins to iterate: without a length it would fetch a batch in advance

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "state_dict", "load_state_dict"):  # while it is copied; a checkpoint says what is trained
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return NEVER if self.begins else len(self.inner)

    @property
    def drop_last(self) -> bool:
        """Whether a batch that is not full is left out."""
        return drops_last(self.inner, self._data)

    def __iter__(self) -> Iterator[Any]:
        plan = self._new_plan()
        if plan is None:
            return iter(self.inner)
        self._leases.open(plan)
        inner: Any = loader_of(self.inner)
        # A loader of torch's collates and pins as the program's own would.
        steps: Any = LeasedSteps(self._leases)
        if self.processes is not None or plan.batch is None:  # whole batches
            how = {"batch_size": None, "sampler": steps}
        else:
            how = {"batch_sampler": steps}
        convert = same if self.processes is not None else collate_of(inner.collate_fn, self._data)
        made: Any = DataLoader(_Samples(), collate_fn=convert, pin_memory=inner.pin_memory, **how)  # type: ignore[arg-type]
        self.begins = True
        return _Batches(self, iter(made))


class _Batches(Iterator[Any]):
    def __init__(self, loader: StreamedLoader, batches: Iterator[Any]) -> None:
        self._loader, self._batches = loader, batches

    def __next__(self) -> Any:
        self._loader.begins = False
        return next(self._batches)


class _Samples:
    """A data set whose samples are their own numbers."""

    def __getitem__(self, sample: Any) -> Any:
        return sample
