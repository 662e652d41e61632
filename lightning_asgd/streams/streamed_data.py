"""Training data that are read shard by shard: the samples that are leased of them. Their number may be unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.leases.plan import Plan
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.data_mode import why_not_shared
from lightning_asgd.core.lightning.loop_counters import NEVER
from lightning_asgd.core.lightning.private_names import combined_loader, loaders, training_loaders
from lightning_asgd.core.protocol import UNKNOWN, Epoch
from lightning_asgd.streams.find import batch_of, drops_last, is_streamed, shards_of
from lightning_asgd.streams.leased_stream import LeasedStream
from lightning_asgd.streams.sharded_data import ShardedData


class StreamedData:
    """The data of one fit, whose dataloader is replaced while they are leased. ``name`` is their digest."""

    def __init__(self, trainer: Any, leases: DataLeases, data: ShardedData, name: bytes) -> None:
        (loader,) = training_loaders(trainer)
        self._trainer, self._leases = trainer, leases
        self._data, self._name = data, name
        self.batch, self.samples, self.drop_last = batch_of(loader, data), data.samples, drops_last(loader, data)
        self._loader: StreamedLoader | None = None
        self._batch = 1

    @property
    def installed(self) -> bool:
        """Whether the training dataloader is still the same."""
        return self._loader is not None and training_loaders(self._trainer) == [self._loader]

    def install(self, batch: int, opened: Callable[[], Plan | None]) -> None:
        """Have the training dataloader yield what is granted; see :class:`StreamedLoader`."""
        (loader,) = training_loaders(self._trainer)
        self._batch = batch
        inner = loader.inner if isinstance(loader, StreamedLoader) else loader  # of a fit that failed
        stream = LeasedStream(inner, self._data, self._name, private_names.program_seed())
        self._loader = StreamedLoader(inner, stream, self._leases, opened)
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
        if self._loader is not None:
            self._loader.stream.close()
        self._loader = None

    def count(self, expected: float) -> int:
        """Batches of an epoch per worker, from the number that Lightning expects; more than exist, if it knows none."""
        return int(min(expected, max(1, len(self._data.lengths)) * UNKNOWN // self._batch))

    def begin_epoch(self, number: int, batches: int) -> tuple[int, bytes, tuple[int, ...]]:
        """Units of an epoch with at most ``batches``, a digest of their order, and where their shards end."""
        order, ends = self._stream.begin(number)
        return min(ends[-1] if ends else 0, batches * self._batch), order, ends

    def plan(self, epoch: Epoch, accumulate: int) -> Plan:
        """The epoch as this worker trains it."""
        return self._stream.plan(epoch, accumulate)

    @property
    def _stream(self) -> LeasedStream:
        if self._loader is None:
            raise RuntimeError("no dataloader was replaced")
        return self._loader.stream


def find(trainer: Any, leases: DataLeases, membership: Any) -> StreamedData | str:
    """The training data that all workers can read by shards, or why they cannot; empty if there are no shards.

    All workers call it together.
    """
    loaders, name = training_loaders(trainer), b""
    if len(loaders) != 1 or not is_streamed(loaders[0]):
        return ""
    data = why_not_shared(trainer) or shards_of(loaders[0])
    if isinstance(data, ShardedData):
        data, name = data.examined(private_names.program_seed())
    if not membership.all_have(name) and isinstance(data, ShardedData):
        data = "the workers' data differ" if name else "its samples cannot be pickled"
    return StreamedData(trainer, leases, data, name) if isinstance(data, ShardedData) else data


class StreamedLoader:
    """A training dataloader that yields what is granted, and otherwise looks like the one it replaces.

    ``plan`` tells which epoch begins if it is Lightning that begins to iterate, None if it is a program: that gets what
    the loader itself yields.
    """

    def __init__(self, inner: Any, stream: LeasedStream, leases: DataLeases, plan: Callable[[], Plan | None]) -> None:
        self.inner, self.stream = inner, stream
        self._leases = leases
        self._new_plan = plan
        self.begins = False  # whether Lightning begins to iterate: without a length it would fetch a batch in advance

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "state_dict", "load_state_dict"):  # while it is copied; a checkpoint says what is trained
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return NEVER if self.begins else len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        plan = self._new_plan()
        if plan is None:
            return iter(self.inner)
        batches = self.stream.granted(self._leases, plan)
        self.begins = True
        return _Batches(self, batches)


class _Batches(Iterator[Any]):
    def __init__(self, loader: StreamedLoader, batches: Iterator[Any]) -> None:
        self._loader, self._batches = loader, batches

    def __next__(self) -> Any:
        self._loader.begins = False
        return next(self._batches)
