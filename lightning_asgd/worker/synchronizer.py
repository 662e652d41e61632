"""How a worker shares what it learns, whatever the algorithm; and what that asks of its training data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from lightning_asgd.layout import Layout
from lightning_asgd.protocol import ReplicaState
from lightning_asgd.stats import ExchangeStats

__all__ = ["OwnData", "Synchronizer", "WorkFeed"]


class WorkFeed(Protocol):
    """What an exchange asks and tells of the training data. Where nobody shares them, what stands here holds."""

    batch: int = 0
    """Samples of one of this worker's batches; 0 if unknown."""

    @property
    def trained(self) -> tuple[str, int]:
        """The epoch, and how many of the units granted in it were trained: what a push holds the updates of."""
        return "", 0

    @property
    def left_s(self) -> float:
        """Seconds until this worker will probably push the rest for the next sync point; infinite if unknown."""
        return math.inf

    def ask_ahead(self, seconds: float) -> None:
        """An exchange is about to begin, and will keep a slow network busy for ``seconds`` (0: unknown)."""

    def lose(self) -> None:
        """The others have gone on without this worker and have its batches. Called before it joins again."""


class OwnData(WorkFeed):
    """The training data of a worker that shares them with nobody."""


class Synchronizer:
    """Everything between a worker's training steps and the other workers. Shares nothing by itself.

    Args:
        layout: the module's shared tensors.
        num_servers: number of servers.
    """

    def __init__(self, layout: Layout, num_servers: int) -> None:
        self.layout = layout
        self.stats = ExchangeStats()
        self.versions = [0] * num_servers
        self.moved = False  # whether steps were taken since the last :meth:`fetch`
        # The epoch, and ranges of its units whose updates are in the common weights that :meth:`catch_up` found last.
        self.caught_up: tuple[str, tuple[tuple[int, int], ...]] = ("", ())  # no epoch: not known

    @property
    def final_once_pushed(self) -> bool:
        """Whether a fetch brings what all get, whose versions are :attr:`versions`, once all pushes have arrived."""
        return False

    @property
    def unacknowledged(self) -> int:
        """The latest of this worker's optimizer steps of which it does not know that the others have them."""
        return 0

    def begin(self) -> None:
        """Leave a sync point: to be called before the first batch after it."""

    def wrap(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        """What an optimizer is to call for gradients, instead of ``closure``."""
        return closure

    def count_step(self) -> None:
        """Note that an optimizer step was taken."""
        self.moved = True
        self.stats.steps += 1

    def advance(self) -> None:
        """Do what is due between two batches."""

    def flush(self) -> None:
        """Let nothing be under way, at a sync point's beginning, and let nobody wait for this worker."""

    def fetch(self, *, park: bool = False) -> None:
        """Take the weights that all workers are to have at a sync point.

        Args:
            park: at a sync point, where nothing is lost: :meth:`begin` is to bring back what the algorithm has each
                worker keep for itself.
        """
        self.moved = False

    def come_back(self) -> None:
        """The others have gone on without this worker: join again, and begin with the weights that they have."""

    def allocate(self, server: int) -> None:
        """Lay the shards out on the replacement of a lost server."""

    def held(self, server: int) -> list[ReplicaState]:
        """What this worker has of a server's shards: the weights it fetched last, and what they hold."""
        return []

    def replay(self, server: int) -> None:
        """Send a restored server what was under way to the lost one, or was pushed to it after the latest fetch."""

    def peek(self) -> dict[str, Tensor]:
        """The common weights by name, without touching the module."""
        return {}

    def catch_up(self) -> dict[str, Tensor]:
        """What a checkpoint is to hold: the common weights with all of this worker's steps. The module stays as it is.

        Returns:
            by name, what the checkpoint is to hold instead of the module's own tensors; those that miss are up to date.
        """
        return {}

    def samples(self) -> list[dict[str, Tensor]]:
        """What the algorithm has had the servers keep of the weights, by name, oldest first."""
        return []

    def state(self) -> list[list[Any]]:
        """What the servers keep beside the weights, per fragment and server."""
        return []

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Put back what :meth:`state` returned; one worker does it, before any pushes."""

    def close(self) -> None:
        """Give buffers and connections back. The module keeps its weights."""
