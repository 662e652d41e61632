"""Training data that a distributed sampler of Lightning's divides: the batches that are leased of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.leases.common_order import CommonOrder
from lightning_asgd.core.leases.plan import Plan
from lightning_asgd.core.leases.sampler import LeasedBatches, digest, in_common_order, own_samplers, undivided
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.data_mode import batch_size_of
from lightning_asgd.core.lightning.private_names import expected_batches, training_loaders, validates_after
from lightning_asgd.core.protocol import Epoch
from lightning_asgd.core.worker.fleet import Fleet

Drawn = tuple[list[Any], list[list[Any]]]
"""The batch samplers of the training dataloaders, and the order that each has drawn."""


class LeasedData(Protocol):
    """The data of one fit, while they are leased."""

    @property
    def installed(self) -> bool:
        """Whether the training dataloaders are still the same."""

    def install(self, batch: int, opened: Callable[[], Plan | None]) -> None:
        """Have the training dataloaders yield what is granted, of the epoch that ``opened`` names."""

    def start(self) -> None:
        """Have Lightning begin to iterate."""

    def uninstall(self) -> None:
        """Restore the training dataloaders: they may be the user's own."""

    def count(self, expected: float) -> int:
        """Batches of an epoch per worker, from the number that Lightning expects."""

    def begin_epoch(self, number: int, batches: int) -> tuple[int, bytes, tuple[int, ...]]:
        """Units of an epoch with at most ``batches``, a digest of their order, and where their shards end."""

    def plan(self, epoch: Epoch, accumulate: int) -> Plan:
        """The epoch as this worker trains it."""


class SharedOrder:
    """The orders of a fit; ``draw`` draws this worker's of an epoch."""

    def __init__(self, trainer: Any, membership: Fleet, draw: Callable[[int], Drawn]) -> None:
        self._trainer, self._membership, self._draw = trainer, membership, draw
        self._latest: tuple[int, list[str], CommonOrder] | None = None  # the number of its epoch, and own samplers

    def of_epoch(self, number: int) -> list[list[Any]]:
        """The order of each dataloader. All workers call it together."""
        return self._agreed(number)[1].parts

    def why_divided(self, number: int) -> str | None:
        """Why each worker has to train what its own sampler yields; None if they can share it. As above."""
        samplers, found = self._agreed(number)
        if not found.divided:
            return None
        again = ", and Lightning divides those once more, unless use_distributed_sampler=False is passed"
        return (
            f"{', '.join(samplers) or 'the sampler'} gives each worker samples that others do not get"
            f"{again if private_names.may_replace_samplers(self._trainer) else ''}"
        )

    def _agreed(self, number: int) -> tuple[list[str], CommonOrder]:
        if self._latest is None or self._latest[0] != number:
            made, mine = self._draw(number)
            own = dict.fromkeys(name for each in made for name in own_samplers(each))
            samplers = [name for name in own if name != private_names.sampler_wrapper.attribute]
            found = self._membership.common_order(f"{self._membership.session}/{number}", samplers, mine)
            if found.differs:  # so may the lengths
                for count in (expected_batches, validates_after):
                    of_first = self._membership.of_first_worker(count(self._trainer), count.attribute)
                    count.set(self._trainer, of_first)
            self._latest = number, samplers, found
        return self._latest[1:]


class SampledData:
    """The data of one fit, whose dataloader has its batch sampler replaced while they are leased."""

    def __init__(self, trainer: Any, leases: DataLeases, membership: Fleet) -> None:
        self._trainer, self._leases = trainer, leases
        self._loader: Any = None
        self._in_order = True
        self._batch = 1
        self.order = SharedOrder(trainer, membership, self._draw)
        self._items: list[Any] = []  # of the present epoch, of all workers

    @property
    def installed(self) -> bool:
        """Whether the training dataloader is still the same."""
        return self._loader is not None and training_loaders(self._trainer) == [self._loader]

    def install(self, batch: int, opened: Callable[[], Plan | None]) -> None:
        """Have the training dataloader yield what is granted; see :class:`LeasedBatches`."""
        (loader,) = training_loaders(self._trainer)
        self._loader, self._batch = loader, batch
        inner, length = loader.batch_sampler, len(loader)
        if isinstance(inner, LeasedBatches):  # of a fit that failed
            inner = inner.inner
        # Leases know a batch by its turn.
        self._in_order, loader.in_order = getattr(loader, "in_order", True), True
        private_names.replace_batch_sampler(loader, LeasedBatches(inner, self._leases, opened, length))

    def start(self) -> None:
        """Have Lightning begin to iterate."""
        iter(private_names.fetcher(self._trainer))

    def uninstall(self) -> None:
        """Restore the training dataloader: it may be the user's own."""
        if self._loader is not None:
            private_names.replace_batch_sampler(self._loader, self._loader.batch_sampler.inner)
            self._loader.in_order = self._in_order
            self._loader = None

    def count(self, expected: float) -> int:
        """Batches of an epoch per worker, from the number that Lightning expects."""
        return int(expected)

    def begin_epoch(self, number: int, batches: int) -> tuple[int, bytes, tuple[int, ...]]:
        """Units of an epoch with at most ``batches``, a digest of their order, and ends of shards: there are none."""
        (items,) = self.order.of_epoch(number)
        cuts = batch_size_of(self._trainer) and self._loader.batch_sampler.inner.drop_last
        whole = len(items) // self._batch * self._batch if cuts else len(items)
        self._items = items[: min(whole, batches * self._batch)]
        return len(self._items), digest(self._items), ()

    def _draw(self, number: int) -> Drawn:
        (loader,) = training_loaders(self._trainer)
        batches = loader.batch_sampler
        if isinstance(batches, LeasedBatches):
            batches = batches.inner
        batches.sampler.set_epoch(number)
        with undivided(batches.sampler):
            drawn = batches.sampler if batch_size_of(self._trainer) else batches
            return [batches], [in_common_order(drawn, private_names.program_seed() + number)]

    def plan(self, epoch: Epoch, accumulate: int) -> Plan:
        """The epoch as this worker trains it."""
        return Plan(epoch, self._items, batch_size_of(self._trainer) or None, accumulate)
