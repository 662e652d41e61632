"""A plain loop's training data, whose batches are leased: which there are, and one pass over them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.leases.plan import Plan
from lightning_asgd.core.leases.sampler import LeasedBatches, digest, in_common_order, own_samplers, undivided
from lightning_asgd.core.protocol import Epoch
from lightning_asgd.streams.find import drops_last, is_streamed, loader_of, shards_of
from lightning_asgd.streams.leased_stream import LeasedStream

_EXPECTED = (
    "Expected a data set with __getitem__ and __len__, whose samples workers lease by their numbers, or one with "
    "num_shards and open_shard(epoch, shard, start), whose shards they lease."
)

_ORDERS = "shuffle", "sampler", "batch_sampler"  # of samples by number

_LOADER_SETTINGS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device"),
)


Agree = Callable[[list[str], list[Any]], list[Any]]
"""Returns the order that all share, from the classes of the program's own samplers and this worker's order."""


class SharedData(ABC):
    """Data whose batches all workers share, pass after pass: a dataloader, or a data set with ``options`` for one."""

    def __init__(self, data: Any, options: dict[str, Any]) -> None:
        self.data, self.options = data, options

    @property
    @abstractmethod
    def batch(self) -> int:
        """Samples of this worker's batches; 0 where the program makes them, and batches are leased."""

    @abstractmethod
    def begin(self, number: int, reference: int, agree: Agree) -> tuple[bytes, int, tuple[int, ...]]:
        """A pass begins: a digest of its units in their order, their number, and where their shards end, if any do.

        ``reference``: samples of a batch in which all workers count.
        """

    @abstractmethod
    def open(self, leases: DataLeases, epoch: Epoch, accumulate: int) -> Iterable[Any]:
        """What is granted of that pass to this worker. It may be iterated over again when it has ended."""

    @abstractmethod
    def close(self) -> None:
        """End the loader's processes."""

    @abstractmethod
    def __len__(self) -> int:
        """Batches of a pass, if this worker trains alone."""


def share(data: Any, options: dict[str, Any], seed: int) -> SharedData:
    """The data that a program gave, with arguments of ``DataLoader`` for a data set. Orders begin at the seed."""
    given = isinstance(data, DataLoader) or loader_of(data) is not None
    if given and options:
        raise ConfigurationError(
            f"batches({type(data).__name__}, {', '.join(options)}) was called. Expected a data set with arguments "
            "of DataLoader, or a dataloader alone."
        )
    dataset = getattr(data, "dataset", None) if given else data
    unordered = {name: value for name, value in options.items() if name not in _ORDERS}
    loader = data if given else DataLoader(data, **unordered)
    if is_streamed(loader):
        stream = _Stream(data, options, loader, seed)
        if orders := [name for name in _ORDERS if options.get(name) is not None and options[name] is not False]:
            raise ConfigurationError(
                f"batches({type(data).__name__}, {', '.join(orders)}) was called. Expected none of "
                f"{', '.join(_ORDERS)} with data that are read shard by shard, in an order of their own."
            )
        return stream
    if not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(
            f"batches() was given a {type(dataset).__name__}, which has no samples by number. {_EXPECTED}"
        )
    return _Samples(data, options, data if given else DataLoader(data, **options), seed)


class _Samples(SharedData):
    """A map-style data set, or a dataloader of one."""

    def __init__(self, data: Any, options: dict[str, Any], loader: DataLoader[Any], seed: int) -> None:
        super().__init__(data, options)
        if type(loader).__iter__ is not DataLoader.__iter__ or loader.batch_sampler is None:
            raise ConfigurationError(
                f"batches() was given a {type(loader).__name__} that iterates in its own way, or has batch_size=None. "
                "Expected a torch DataLoader that makes batches, or its data set."
            )
        self._own, self._seed = loader, seed
        self._loader: DataLoader[Any] | None = None  # yields what is granted
        self._items: list[Any] = []  # of the present pass
        self._plan: Plan

    @property
    def batch(self) -> int:
        """See :class:`SharedData`, here and below."""
        sampler: Any = self._own.batch_sampler
        return int(sampler.batch_size) if type(sampler) is BatchSampler else 0

    def begin(self, number: int, reference: int, agree: Agree) -> tuple[bytes, int, tuple[int, ...]]:
        """The units are samples, or the batches of a sampler of the user's own; without those that fill no batch."""
        sampler: Any = self._own.batch_sampler
        each = sampler.sampler if self.batch else sampler
        if hasattr(each, "set_epoch"):
            each.set_epoch(number)
        dividing = next((one for one in (each, getattr(each, "sampler", None)) if hasattr(one, "num_replicas")), None)
        if dividing is not None and dividing is not each and hasattr(dividing, "set_epoch"):
            dividing.set_epoch(number)
        with nullcontext() if dividing is None else undivided(dividing):  # else it would yield a part only
            items = agree(own_samplers(each), in_common_order(each, self._seed + number))
        if self.batch and self._own.drop_last:
            items = items[: len(items) // reference * reference]
        self._items = items
        return digest(items), len(items), ()

    def open(self, leases: DataLeases, epoch: Epoch, accumulate: int) -> Iterable[Any]:
        """A dataloader, made once, which opens the pass when it is iterated."""
        self._plan = Plan(epoch, self._items, self.batch or None, accumulate)
        if self._loader is None:
            own = self._own
            settings = {name: getattr(own, name) for name in _LOADER_SETTINGS if getattr(own, name, None)}
            sampler: Any = LeasedBatches(own.batch_sampler, leases, lambda: self._plan, len(self))
            self._loader = DataLoader(own.dataset, batch_sampler=sampler, **settings)
        return self._loader

    def close(self) -> None:
        """Drop the loader."""
        self._loader = None

    def __len__(self) -> int:
        return len(self._own)


class _Stream(SharedData):
    """Data that are read shard by shard."""

    def __init__(self, data: Any, options: dict[str, Any], loader: Any, seed: int) -> None:
        super().__init__(data, options)
        found, kind = shards_of(loader), type(getattr(loader, "dataset", loader)).__name__
        if isinstance(found, str):
            raise ConfigurationError(f"batches() was given a {kind}, which workers cannot share: {found}. {_EXPECTED}")
        found, name = found.examined(seed)
        if not name:
            raise ConfigurationError(
                f"batches() was given a {kind} whose samples cannot be pickled. Expected samples that can: workers "
                "compare the first ones."
            )
        self._stream = LeasedStream(loader, found, name, seed)
        self._samples, self._drops_last = found.samples, drops_last(loader, found)

    @property
    def batch(self) -> int:
        """See :class:`SharedData`, here and below."""
        return self._stream.batch

    def begin(self, number: int, reference: int, agree: Agree) -> tuple[bytes, int, tuple[int, ...]]:
        """The units are samples, or batches that the data set makes. Shards of unknown length have more numbers."""
        order, ends = self._stream.begin(number)
        return order, ends[-1], ends

    def open(self, leases: DataLeases, epoch: Epoch, accumulate: int) -> Iterable[Any]:
        """What the data set's shards hold."""
        plan = self._stream.plan(epoch, accumulate)
        return _Again(lambda: self._stream.granted(leases, plan))

    def close(self) -> None:
        """End the loader's processes."""
        self._stream.close()

    def __len__(self) -> int:
        if self._samples is None:
            raise TypeError("batches() of data whose shards have unknown lengths have no len().")
        return (math.floor if self._drops_last else math.ceil)(self._samples / (self.batch or 1))


@dataclass(frozen=True)
class _Again:
    """Yields what a function does, as often as it is iterated over."""

    batches: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.batches()


class Trainee:
    """What a pass calls between batches; see :class:`~lightning_asgd.loops.session.LoopSession`."""

    pass_token: object = None
    """Tells the present pass from others; None if there is none."""

    def begin_pass(self, data: SharedData, accumulate: int) -> Iterable[Any] | None:
        """What is granted of a pass over the data; None if all of it was trained before the checkpoint."""
        raise NotImplementedError

    def before_batch(self, batch: Any) -> None:
        """A batch is about to be trained."""
        raise NotImplementedError

    def after_batch(self) -> bool:
        """It has been trained. Returns whether there is another one; waits while others train the last ones."""
        raise NotImplementedError

    def has_more(self) -> bool:
        """The loader has no batch left: whether there will be another one, as above."""
        raise NotImplementedError

    @property
    def must_reload(self) -> bool:
        """Whether the loader has ended before there was another batch."""
        raise NotImplementedError

    def end_pass(self, *, trained: bool = True) -> None:
        """The pass is over, or this worker has left it before all was ``trained``."""
        raise NotImplementedError

    def abandon_pass(self) -> None:
        """The program has left the loop over the batches, perhaps by an exception. Must not wait, and not raise."""
        raise NotImplementedError

    @property
    def workers(self) -> int:
        """How many take part."""
        raise NotImplementedError


class LeasedPass:
    """The batches of one pass that this worker is granted. Its length is what it is if all are equally fast."""

    def __init__(self, trainee: Trainee, data: SharedData, accumulate: int) -> None:
        self._trainee, self._data, self._accumulate = trainee, data, accumulate

    def _check_is_present(self, token: object) -> None:
        if self._trainee.pass_token is not token:
            raise ConfigurationError(
                "A pass over batches() was continued after another one had begun, or after its epoch had ended. "
                "Expected one pass at a time. To train on two data sets together, make one of them, for instance with "
                "torch.utils.data.StackDataset."
            )

    def __len__(self) -> int:
        return math.ceil(len(self._data) / self._trainee.workers)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches; exchanges happen between two of them."""
        trainee, nothing = self._trainee, object()
        loader = trainee.begin_pass(self._data, self._accumulate)
        if loader is None:
            trainee.end_pass()
            return
        batches, more, token = iter(loader), True, trainee.pass_token
        try:
            while more:
                batch = next(batches, nothing)
                if batch is nothing:
                    more = trainee.has_more()
                else:
                    trainee.before_batch(batch)
                    yield batch
                    self._check_is_present(token)
                    more = trainee.after_batch()
                if more and (batch is nothing or trainee.must_reload):
                    batches = iter(loader)
        except GeneratorExit:  # Python reports no error from here
            if trainee.pass_token is token:  # else a later pass has begun meanwhile
                trainee.abandon_pass()
            raise
        trainee.end_pass()
