"""How a worker shares what it learns, whatever the algorithm; and what that asks of its training data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.futures import Future

from lightning_asgd.layout import Layout
from lightning_asgd.stats import ExchangeStats

__all__ = ["OwnData", "Synchronizer", "Training", "Waits", "WorkFeed", "run"]

Waits = Iterator[list[Future[Any]]]
"""What a worker does, which stops wherever it has to wait until all of these futures are done."""


def run(waits: Waits) -> None:
    """Run a waiting generator to its end on this thread; calls inside it block."""
    for _ in waits:
        pass


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

    def revoke(self) -> None:
        """The others have gone on without this worker and have its batches. Called before it joins again."""


class OwnData(WorkFeed):
    """The training data of a worker that shares them with nobody."""


@dataclass(frozen=True)
class Training:
    """What an exchanger asks of the training that it serves, and tells it."""

    # Called after a server rejected an update; the weights are the servers' again by then.
    on_refused: Callable[[], None] = lambda: None
    lr: Callable[[], float] = lambda: 0.0  # the present learning rate
    data: WorkFeed = field(default_factory=OwnData)
    measure: bool = False  # whether the distance to the servers is measured now and then


class Synchronizer(Protocol):
    """Everything between a worker's training steps and the other workers, whatever the algorithm."""

    layout: Layout  # of the module's shared tensors
    stats: ExchangeStats

    @property
    def versions(self) -> list[int]:
        """Per server, the version of the weights that this worker fetched last."""

    @property
    def moved(self) -> bool:
        """Whether steps were taken since the last :meth:`fetch`."""

    @property
    def final_once_pushed(self) -> bool:
        """Whether a fetch brings what all get, whose versions are :attr:`versions`, once all pushes have arrived."""

    @property
    def unacknowledged(self) -> int:
        """The latest of this worker's optimizer steps of which it does not know that the others have them."""

    def begin(self) -> None:
        """Leave a sync point: to be called before the first batch after it."""

    def wrap(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        """What an optimizer is to call for gradients, instead of ``closure``."""

    def count_step(self) -> None:
        """Note that an optimizer step was taken."""

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

    def come_back(self) -> None:
        """The others have gone on without this worker: join again, and begin with the weights that they have."""

    def peek(self) -> dict[str, Tensor]:
        """The common weights by name, without touching the module."""

    def catch_up(self) -> dict[str, Tensor]:
        """What a checkpoint is to hold: the common weights with all of this worker's steps. The module stays as it is.

        Returns:
            by name, what the checkpoint is to hold instead of the module's own tensors; those that miss are up to date.
        """

    @property
    def caught_up(self) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The epoch, and ranges of its units whose updates are in the common weights that :meth:`catch_up` found last.

        No epoch: not known.
        """

    def samples(self) -> list[dict[str, Tensor]]:
        """What the algorithm has had the servers keep of the weights, by name, oldest first."""

    def state(self) -> list[list[Any]]:
        """What the servers keep beside the weights, per fragment and server."""

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Put back what :meth:`state` returned; one worker does it, before any pushes."""

    def close(self) -> None:
        """Give buffers and connections back. The module keeps its weights."""
