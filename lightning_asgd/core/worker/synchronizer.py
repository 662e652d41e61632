"""The interface between training and an algorithm's exchanges, and what exchanges ask of the training data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.futures import Future

from lightning_asgd.core.foundation.layout import Layout
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.programs.batch_units import TrainedUnits

Waits = Iterable[list[Future[Any]]]
"""A worker's procedure, which yields the futures that must be done before it continues. It must be iterated over."""

Held = tuple[str, tuple[tuple[int, int], ...] | None]
"""The latest epoch of which some weights hold others' updates, and of which of its units; None if that is unknown."""

Skipped = bool | Tensor
"""Whether a ``GradScaler`` has skipped a step: if only the device knows, a scalar on it that is not 0 if so."""


def run(waits: Waits) -> None:
    """Run a procedure to its end on this thread; calls inside it block."""
    for _ in waits:
        pass


class WorkFeed(Protocol):
    """What exchanges need from the training data, and report to it. The defaults apply if data are not leased."""

    batch: int = 0
    """Samples of one of this worker's batches; 0 if unknown."""

    @property
    def trained(self) -> tuple[str, int]:
        """The epoch, and how many of the units granted in it were trained: what a push holds the updates of."""
        return "", 0

    @property
    def left_s(self) -> float:
        """Expected seconds until this worker's final push before the next sync point; infinite if unknown."""
        return math.inf

    def ask_ahead(self, seconds: float) -> None:
        """Prepare for an exchange that will keep a slow network busy for ``seconds`` (0: unknown)."""

    def revoke(self) -> None:
        """Drop all leases: this worker was fenced, and others have its batches. Called before it rejoins."""


class OwnData(WorkFeed):
    """Training data that are not leased."""


@dataclass(frozen=True)
class Training:
    """What an exchanger needs from the training loop, and reports to it."""

    # Called after a server rejected an update; the weights are the servers' again by then.
    on_refused: Callable[[], None] = lambda: None
    lr: Callable[[], float] = lambda: 0.0  # the present learning rate
    data: WorkFeed = field(default_factory=OwnData)
    measure: bool = False  # whether the distance to the servers is measured now and then
    units: TrainedUnits = field(default_factory=TrainedUnits)  # what counts where batches differ in size
    period: Callable[[], int] = lambda: 0  # steps between two exchanges where that follows from the run; else 0
    optimizers: Callable[[], Sequence[Any]] = lambda: ()  # this worker's, once they exist
    # Whether a layer's step may be as late as its next forward: no code reads gradients after backward.
    late_steps: bool = False
    closures: bool = True  # whether optimizers are given closures, which call backward


class Synchronizer(Protocol):
    """Everything between a worker's training steps and the other workers, for any algorithm. See :func:`run`.

    The defaults hold where servers hold no weights, and work units are not counted.
    """

    layout: Layout  # of the module's shared tensors
    stats: ExchangeStats

    @property
    def versions(self) -> Sequence[int]:
        """Per server, the version of the weights that this worker fetched last."""

    @property
    def moved(self) -> bool:
        """Whether steps were taken since the last :meth:`fetch`."""

    @property
    def final_once_pushed(self) -> bool:
        """Whether a fetch after all pushes brings final weights, the same for all, with versions :attr:`versions`."""
        return False

    @property
    def unacknowledged(self) -> int:
        """Number of this worker's latest optimizer steps that servers have not acknowledged."""
        return 0

    def begin(self) -> Waits:
        """Leave a sync point. Called before the next batch."""
        return ()

    def wrap(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure for the optimizer to call instead of ``closure``."""
        return closure

    def count_step(self, skipped: Skipped = False) -> None:
        """Note that an optimizer step was taken, or skipped because its gradients had overflowed."""

    def advance(self) -> Waits:
        """Do what is due between two batches."""
        return ()

    def flush(self) -> Waits:
        """Complete exchanges in flight, at a sync point's beginning, and mark this worker quiescent."""
        return ()

    def fetch(self, *, park: bool = False) -> Waits:
        """Take the weights that all get at a sync point; with ``park`` :meth:`begin` brings back the worker's own."""

    def come_back(self) -> Waits:
        """Rejoin after this worker was fenced, with the servers' weights."""
        return ()

    def peek(self) -> dict[str, Tensor]:
        """The servers' weights by name, without touching the module."""

    def catch_up(self) -> dict[str, Tensor]:
        """Weights for a checkpoint: the servers' weights with all of this worker's steps. The module is not touched.

        By name, tensors to save instead of the module's own; those that are missing here are up to date there.
        """

    @property
    def caught_up(self) -> Held:
        """What the weights of the last :meth:`catch_up` or :meth:`fetch` hold."""
        return "", ()

    def samples(self) -> list[dict[str, Tensor]]:
        """Copies of the weights that the algorithm had the servers keep, by name, oldest first."""
        return []

    def state(self) -> list[list[Any]]:
        """What the servers keep beside the weights, per fragment and server."""
        return []

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Restore what :meth:`state` returned; one worker calls this before any worker pushes."""
        return

    def changed(self) -> list[str]:
        """Names of the weights that a program has changed since the last :meth:`fetch`, if no step was taken since.

        None where workers share weights in memory, or take those of one of them at every sync point.
        """
        return []

    def weights(self) -> list[list[tuple[Tensor, ...]]]:
        """Copies of the module's weights, per fragment and server."""
        return []

    def replace(self, weights: Sequence[Sequence[tuple[Tensor, ...]]], *, sends: bool) -> None:
        """Have the servers take these, and forget what :meth:`fetch` has parked.

        All workers call this at a sync point, and fetch afterwards. Only the chief ``sends`` its weights.
        """
        return

    def close(self) -> None:
        """Release buffers and connections. The module keeps its weights."""
