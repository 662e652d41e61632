"""A plain loop's training data, whose batches are leased: which there are, and one pass over them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_asgd.errors import ConfigurationError
from lightning_asgd.worker.lease_client import DataLeases
from lightning_asgd.worker.lease_plan import Plan
from lightning_asgd.worker.leased_sampler import LeasedBatches, in_common_order, undivided

__all__ = ["LeasedPass", "SharedData", "Trainee"]

_LOADER_SETTINGS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device"),
)


class SharedData:
    """A map-style data set, or a dataloader of one, whose batches all workers share.

    Args:
        data: the data set, or a dataloader.
        options: arguments of ``DataLoader`` for a data set.
    """

    def __init__(self, data: Any, options: dict[str, Any]) -> None:
        self.data, self.options = data, options
        given = isinstance(data, DataLoader)
        if given and options:
            raise ConfigurationError(
                f"batches({type(data).__name__}, {', '.join(options)}) was called. Expected a data set with arguments "
                "of DataLoader, or a dataloader alone."
            )
        dataset = data.dataset if given else data
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigurationError(
                f"batches() was given a {type(dataset).__name__}, which has no samples by number. Expected a data set "
                "with __getitem__ and __len__: workers lease its samples by their numbers."
            )
        loader: DataLoader[Any] = data if given else DataLoader(data, **options)
        self._own = loader
        if type(loader).__iter__ is not DataLoader.__iter__ or loader.batch_sampler is None:
            raise ConfigurationError(
                f"batches() was given a {type(loader).__name__} that iterates in its own way, or has batch_size=None. "
                "Expected a torch DataLoader that makes batches, or its data set."
            )
        self._loader: DataLoader[Any] | None = None  # yields what is granted
        self._plan: Plan

    @property
    def batch(self) -> int:
        """Samples of this worker's batches; 0 where a sampler of the user's own makes them, and batches are leased."""
        sampler: Any = self._own.batch_sampler
        return int(sampler.batch_size) if type(sampler) is BatchSampler else 0

    def items(self, seed: int, number: int) -> list[Any]:
        """The samples of a pass in the order that all workers share; or its batches."""
        sampler: Any = self._own.batch_sampler
        each = sampler.sampler if self.batch else sampler
        if hasattr(each, "set_epoch"):
            each.set_epoch(number)
        if not hasattr(each, "num_replicas"):  # else it would yield this worker's part only
            return in_common_order(each, seed + number)
        with undivided(each):
            return in_common_order(each, seed + number)

    @property
    def drops_last(self) -> bool:
        """Whether samples at the end that fill no batch are left out."""
        return bool(self.batch and self._own.drop_last)

    def open(self, leases: DataLeases, plan: Plan) -> DataLoader[Any]:
        """The dataloader, made once, of what is granted to this worker, which opens the pass when it is iterated."""
        self._plan = plan
        if self._loader is None:
            own = self._own
            settings = {name: getattr(own, name) for name in _LOADER_SETTINGS if getattr(own, name, None)}
            sampler: Any = LeasedBatches(own.batch_sampler, leases, lambda: self._plan, len(self))
            self._loader = DataLoader(own.dataset, batch_sampler=sampler, **settings)
        return self._loader

    def close(self) -> None:
        """End the loader's processes."""
        self._loader = None

    def __len__(self) -> int:
        """Batches of a pass, if this worker trains alone."""
        return len(self._own)


class Trainee:
    """What a pass calls between batches; see :class:`~lightning_asgd.loop.loop_session.LoopSession`."""

    def begin_pass(self, data: SharedData, accumulate: int) -> DataLoader[Any] | None:
        """The dataloader of a pass over the data, with ``accumulate`` batches per optimizer step.

        None if all of it was trained before the checkpoint from which training continues.
        """
        raise NotImplementedError

    def before_batch(self) -> None:
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

    def __len__(self) -> int:
        return math.ceil(len(self._data) / self._trainee.workers)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches; exchanges happen between two of them."""
        trainee, nothing = self._trainee, object()
        loader = trainee.begin_pass(self._data, self._accumulate)
        if loader is None:
            trainee.end_pass()
            return
        batches, more = iter(loader), True
        try:
            while more:
                batch = next(batches, nothing)
                if batch is nothing:
                    more = trainee.has_more()
                else:
                    trainee.before_batch()
                    yield batch
                    more = trainee.after_batch()
                if more and (batch is nothing or trainee.must_reload):
                    batches = iter(loader)
        except GeneratorExit:  # Python reports no error from here
            trainee.abandon_pass()
            raise
        trainee.end_pass()
