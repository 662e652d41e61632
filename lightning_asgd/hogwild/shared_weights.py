"""Weights in memory that all workers of a machine share, for Hogwild!."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from lightning_asgd.algorithms.hogwild import Hogwild
from lightning_asgd.core.algorithms.base import Push
from lightning_asgd.core.calls import shared_memory
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.layout import Layout
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.replica_spans import Place, places_of
from lightning_asgd.core.worker.setup import Entry
from lightning_asgd.core.worker.synchronizer import Skipped, Synchronizer, Waits


def connect(entry: Entry) -> SharedWeights:
    """The weights that this worker shares with the others."""
    algorithm, places = cast(Hogwild, entry.algorithm), places_of(entry.module, entry.layout)
    return SharedWeights(entry.collectives, entry.layout, places, algorithm, len(entry.connection.servers))


class SharedWeights(Synchronizer):
    """Puts the module's tensors into worker 0's block of shared memory, or keeps copies of it up to date.

    ``places`` are those of the module's tensors in the layout's order; their ``data`` is replaced. Raises a
    :class:`ConfigurationError` if the workers cannot see each other's memory.
    """

    versions: Sequence[int] = ()
    moved = False

    def __init__(
        self, collectives: Collectives, layout: Layout, places: Sequence[Place], algorithm: Hogwild, num_servers: int
    ) -> None:
        self.layout = layout
        self.stats = ExchangeStats()
        self.versions = [0] * num_servers
        self._collectives = collectives
        self._places = places
        self._algorithm = algorithm
        groups = layout.shard(0)
        chief = collectives.chief
        own = shared_memory.create(groups) if collectives.rank == chief else None
        ref = collectives.broadcast(own.ref if own is not None else None, chief, "shared weights")
        block = own if own is not None else (shared_memory.attach(ref, groups) if ref is not None else None)
        able = collectives.reduced("all_reduce", "sees the shared weights", block is not None, "all")
        if block is None or not able.value:
            sees_it = collectives.gather("all_gather", "who sees the shared weights", block is not None)
            blind = [rank for rank, sees in sees_it.items() if not sees]
            raise ConfigurationError(
                f"Hogwild: workers {blind} cannot map the memory of worker {chief}. Expected all workers on one "
                "machine, of one user and in one container. Use algorithm='asgd' otherwise."
            )
        self._block = block
        self._shared = [
            block.tensors[spec.group][spec.offset : spec.offset + spec.numel].view(spec.shape)
            for spec in layout.tensors
        ]
        tensors = self._tensors
        self._copies = algorithm.copies if algorithm.copies is not None else tensors[0].device.type != "cpu"
        self._base: list[Tensor] = []
        self._alone = len(able.ranks) == 1
        if collectives.rank == chief:
            for shared, tensor in zip(self._shared, tensors, strict=True):
                shared.copy_(tensor.detach())
        collectives.barrier("the shared weights are there")
        if self._copies:
            self._base = [torch.empty_like(tensor.detach()) for tensor in tensors]
            self._take()
            return
        for shared, tensor in zip(self._shared, tensors, strict=True):
            tensor.data = shared

    @property
    def _tensors(self) -> list[Tensor]:
        return [place[key] for place, key in self._places]

    def begin(self) -> Waits:
        """Wait for all workers to leave the sync point: from now on each step changes the weights of all."""
        self._collectives.barrier("train on")
        return ()

    def count_step(self, skipped: Skipped = False) -> None:
        """See :class:`Synchronizer`; a copy's change is added to the shared weights, and these are taken."""
        self.moved = True
        self.stats.steps += 1
        if self._copies:
            self._add_change()

    def fetch(self, *, park: bool = False) -> Waits:
        """See :class:`Synchronizer`."""
        self.moved = False
        if self._copies and not self._alone:
            self._take()
        return ()

    def peek(self) -> dict[str, Tensor]:
        """See :class:`Synchronizer`."""
        return {s.name: shared.clone() for s, shared in zip(self.layout.tensors, self._shared, strict=True)}

    def catch_up(self) -> dict[str, Tensor]:
        """See :class:`Synchronizer`: the shared weights hold every step; the others keep changing them.

        The module's own tensors are the shared ones, unless they are copies: nothing may be written into them.
        """
        return self.peek() if self._copies and not self._alone else {}

    def close(self) -> None:
        """Move every tensor back to private memory."""
        for tensor, shared in zip(self._tensors, self._shared, strict=True):
            if tensor.data_ptr() == shared.data_ptr():
                tensor.data = shared.clone()
        self._shared = []
        self._block.close()

    def _add_change(self) -> None:
        """Rounding errors stay in the copy: see :class:`Replica`."""
        with torch.no_grad():
            for tensor, base, shared in zip(self._tensors, self._base, self._shared, strict=True):
                change = tensor.detach() - base
                self._algorithm.apply(shared, change.to(shared.device), {}, Push())
                expected = base + change
                base.copy_(shared)
                tensor.detach().sub_(expected - base)

    def _take(self) -> None:
        with torch.no_grad():
            for tensor, base, shared in zip(self._tensors, self._base, self._shared, strict=True):
                tensor.copy_(shared)
                base.copy_(tensor)
