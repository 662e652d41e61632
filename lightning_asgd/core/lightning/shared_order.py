"""The order of the training samples in each epoch, which the workers of a fit share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_asgd.core.leases.common_order import CommonOrder
from lightning_asgd.core.leases.sampler import own_samplers
from lightning_asgd.core.lightning.private_names import (
    expected_batches,
    may_replace_samplers,
    sampler_wrapper,
    validates_after,
)
from lightning_asgd.elastic.elastic_run import AnyFleet

Drawn = tuple[list[Any], list[list[Any]]]
"""The batch samplers of the training dataloaders, and the order that each has drawn."""


class SharedOrder:
    """The orders of a fit; ``draw`` draws this worker's of an epoch."""

    def __init__(self, trainer: Any, membership: AnyFleet, draw: Callable[[int], Drawn]) -> None:
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
            f"{again if may_replace_samplers(self._trainer) else ''}"
        )

    def _agreed(self, number: int) -> tuple[list[str], CommonOrder]:
        if self._latest is None or self._latest[0] != number:
            made, mine = self._draw(number)
            own = dict.fromkeys(name for each in made for name in own_samplers(each))
            samplers = [name for name in own if name != sampler_wrapper.attribute]
            found = self._membership.common_order(f"{self._membership.session}/{number}", samplers, mine)
            if found.differs:  # so may the lengths
                for count in (expected_batches, validates_after):
                    of_first = self._membership.of_first_worker(count(self._trainer), count.attribute)
                    count.set(self._trainer, of_first)
            self._latest = number, samplers, found
        return self._latest[1:]
