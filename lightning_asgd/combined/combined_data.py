"""Training data of several dataloaders, which Lightning combines: their combined batches are leased."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.leases.plan import Plan
from lightning_asgd.core.leases.sampler import LeasedSteps, Replacement, digest, in_common_order, undivided
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.class_trees import apply_to_collection
from lightning_asgd.core.lightning.private_names import combined_loader, loaders, opened_loaders
from lightning_asgd.core.lightning.sampled_data import Drawn, SharedOrder
from lightning_asgd.core.protocol import Epoch
from lightning_asgd.core.worker.fleet import Fleet
from lightning_asgd.streams.loader_processes import InitCalls, same

Item = tuple[int, list[Any]]
"""A combined batch: its number, and for each loader the samples, or None."""


class CombinedData:
    """The data of one fit, whose combined dataloaders are replaced by one while they are leased."""

    def __init__(self, trainer: Any, leases: DataLeases, membership: Fleet) -> None:
        self._trainer, self._leases = trainer, leases
        self.order = SharedOrder(trainer, membership, self._draw)
        self._combined: LeasedCombination | None = None
        self._items: list[Item] = []  # of the present epoch, of all workers

    @property
    def installed(self) -> bool:
        """Whether the training dataloaders are still the same."""
        return self._combined is not None and combined_loader(self._trainer) is self._combined

    def install(self, batch: int, opened: Callable[[], Plan | None]) -> None:
        """Have the training dataloaders yield what is granted; see :class:`LeasedCombination`."""
        combined = combined_loader(self._trainer)
        inner = combined.inner if isinstance(combined, LeasedCombination) else combined  # of a fit that failed
        self._combined = LeasedCombination(
            inner, self._leases, opened, int(private_names.expected_batches(self._trainer))
        )
        private_names.replace_combined(self._trainer, self._combined)

    def start(self) -> None:
        """Have Lightning begin to iterate."""
        iter(private_names.fetcher(self._trainer))

    def uninstall(self) -> None:
        """Restore the training dataloaders."""
        if self._combined is not None and self.installed:
            private_names.replace_combined(self._trainer, self._combined.inner)
        if self._combined is not None:
            self._combined.stop()
        self._combined = None

    def count(self, expected: float) -> int:
        """Batches of an epoch per worker, from the number that Lightning expects."""
        return int(expected)

    def begin_epoch(self, number: int, batches: int) -> tuple[int, bytes, tuple[int, ...]]:
        """Units of an epoch with at most ``batches``, a digest of their order, and ends of shards: there are none."""
        mode = private_names.combination.of(combined_loader(self._trainer))
        self._items = combined_batches(mode, self.order.of_epoch(number))[:batches]
        return len(self._items), digest(self._items), ()

    def _draw(self, number: int) -> Drawn:
        combined, workers, parts = combined_loader(self._trainer), self._trainer.world_size, []
        samplers = [loader.batch_sampler for loader in loaders.of(combined)]
        for sampler, limit in zip(samplers, combined.limits, strict=True):  # of one worker's batches
            sampler.sampler.set_epoch(number)
            with undivided(sampler.sampler):
                part = in_common_order(sampler, private_names.program_seed() + number)
            parts.append(part[: int(min(len(part), limit * workers))])
        return samplers, parts

    def plan(self, epoch: Epoch, accumulate: int) -> Plan:
        """The epoch as this worker trains it."""
        return Plan(epoch, self._items, None, accumulate)


class LeasedCombination(Replacement):
    """Takes the place of combined dataloaders: one makes the batches of all, with the processes of all."""

    _loader: DataLoader[Any] | None = None
    _batches: Any = None  # an iterator

    def _granted(self) -> Iterator[Any]:
        if self._loader is None or not self._loader.persistent_workers:
            self._loader = _joint(loaders.of(self.inner), LeasedSteps(self._leases))
        self._batches = iter(self._loader)
        opened_loaders.set_of(self, [self._batches])
        private_names.loader_iterator.set_of(self, self)  # as of Lightning's, which have an object for that
        return self

    def __next__(self) -> tuple[Any, int, int]:
        """The batches in the loaders' structure, their number in the epoch, and 0."""
        number, made = next(self._batches)
        left = list(zip(loaders.of(self.inner), made, strict=True))

        def of(loader: Any) -> Any:
            return left.pop(next(n for n, (each, _) in enumerate(left) if each is loader))[1]

        return apply_to_collection(self.inner.iterables, DataLoader, of), number, 0

    def reset(self) -> None:
        """End the processes."""
        self.stop()
        self.inner.reset()

    def stop(self) -> None:
        """End the processes of the one dataloader."""
        self._loader = self._batches = None
        opened_loaders.set_of(self, [])
        private_names.loader_iterator.set_of(self, None)


def combined_batches(mode: str, parts: Sequence[Sequence[Any]]) -> list[Item]:
    """The combined batches of an epoch, from those of each loader. ``fit`` knows no mode that reads one by one."""
    count = (min if mode == "min_size" else max)(map(len, parts))
    cycle = mode == "max_size_cycle"
    return [(n, [part[n % len(part)] if cycle or n < len(part) else None for part in parts]) for n in range(count)]


def _joint(parts: Sequence[Any], steps: Any) -> DataLoader[Any]:
    """One dataloader for the batches of several."""
    busy = [loader for loader in parts if loader.num_workers]
    options: dict[str, Any] = {}
    if busy:
        processes = sum(each.num_workers for each in busy)
        ahead = max(each.num_workers * each.prefetch_factor for each in busy)
        options = {
            "num_workers": processes,
            "prefetch_factor": math.ceil(ahead / processes),
            "persistent_workers": all(each.persistent_workers for each in busy),
            "multiprocessing_context": busy[0].multiprocessing_context,
            "timeout": max(each.timeout for each in busy),
            "worker_init_fn": InitCalls(busy),
        }
    pins = any(each.pin_memory for each in parts)
    return DataLoader(_Batches(parts), batch_size=None, sampler=steps, collate_fn=same, pin_memory=pins, **options)


class _Batches(Dataset[Item]):
    """A data set whose samples are the batches of several loaders."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = [(each.dataset, each.collate_fn) for each in parts]

    def __getitem__(self, item: Item) -> Item:
        number, parts = item
        made = zip(self._parts, parts, strict=True)
        return number, [None if samples is None else _batch(*part, samples) for part, samples in made]


def _batch(dataset: Any, collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    many = getattr(dataset, "__getitems__", None)  # as torch does
    return collate(many(samples) if many else [dataset[number] for number in samples])
