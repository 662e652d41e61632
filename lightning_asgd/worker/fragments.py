"""A module in several fragments, each of which is exchanged at times of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_asgd.layout import Layout
from lightning_asgd.protocol import ReplicaState
from lightning_asgd.stats import ExchangeStats
from lightning_asgd.worker.exchanger import Exchanger
from lightning_asgd.worker.synchronizer import Synchronizer

__all__ = ["Fragments"]


class Fragments(Synchronizer):
    """Does everything for one fragment after the other. :attr:`versions` are the first fragment's."""

    def __init__(self, layout: Layout, exchangers: Sequence[Exchanger]) -> None:
        self._exchangers = list(exchangers)
        super().__init__(layout, len(exchangers[0].connection.servers))

    @property
    def stats(self) -> ExchangeStats:
        """Of all fragments together."""
        return self._stats

    @stats.setter
    def stats(self, stats: ExchangeStats) -> None:
        self._stats = stats
        for exchanger in self._exchangers:
            exchanger.stats = stats

    @property
    def unacknowledged(self) -> int:
        """See :class:`Synchronizer`."""
        return max(exchanger.unacknowledged for exchanger in self._exchangers)

    def begin(self) -> None:
        """See :class:`Synchronizer`."""
        for exchanger in self._exchangers:
            exchanger.begin()

    def count_step(self) -> None:
        """See :class:`Synchronizer`."""
        super().count_step()
        for exchanger in self._exchangers:
            exchanger.note_step()

    def advance(self) -> None:
        """See :class:`Synchronizer`."""
        for exchanger in self._exchangers:
            exchanger.advance()

    def flush(self) -> None:
        """See :class:`Synchronizer`."""
        for exchanger in self._exchangers:
            exchanger.flush()

    def fetch(self, *, park: bool = False) -> None:
        """See :class:`Synchronizer`."""
        super().fetch()
        for exchanger in self._exchangers:
            exchanger.fetch(park=park)
        self.versions = self._exchangers[0].versions

    def come_back(self) -> None:
        """See :class:`Synchronizer`."""
        for exchanger in self._exchangers:
            exchanger.come_back()

    def allocate(self, server: int) -> None:
        """See :class:`Synchronizer`."""
        for exchanger in self._exchangers:
            exchanger.allocate(server)

    def held(self, server: int) -> list[ReplicaState]:
        """See :class:`Synchronizer`."""
        return [held for exchanger in self._exchangers for held in exchanger.held(server)]

    def replay(self, server: int) -> None:
        """See :class:`Synchronizer`."""
        for exchanger in self._exchangers:
            exchanger.replay(server)

    def peek(self) -> dict[str, Tensor]:
        """See :class:`Synchronizer`."""
        return {name: value for exchanger in self._exchangers for name, value in exchanger.peek().items()}

    def catch_up(self) -> dict[str, Tensor]:
        """See :class:`Synchronizer`."""
        return {name: value for exchanger in self._exchangers for name, value in exchanger.catch_up().items()}

    def state(self) -> list[list[Any]]:
        """See :class:`Synchronizer`."""
        return [fragment for exchanger in self._exchangers for fragment in exchanger.state()]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """See :class:`Synchronizer`."""
        for exchanger, fragment in zip(self._exchangers, state, strict=True):
            exchanger.restore([fragment])

    def close(self) -> None:
        """See :class:`Synchronizer`."""
        for exchanger in self._exchangers:
            exchanger.close()
