"""What a feature adds to a worker's fit. ``features.FIT`` names them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.worker.fleet import Fleet
from lightning_asgd.core.worker.synchronizer import Synchronizer
from lightning_asgd.features import FIT, load


class Fit(Protocol):
    """The fit that a feature is part of."""

    trainer: Any
    config: ExchangeConfig
    synchronizer: Synchronizer
    due: list[Callable[[], None]]
    """What is to be called once the present batch is trained."""

    @property
    def membership(self) -> Fleet:
        """This worker's membership in the session."""

    @property
    def in_search(self) -> bool:
        """Whether a callback searches a learning rate or batch size, which every worker does for itself."""

    def count_own_step(self, optimizer: object) -> None:
        """Count an optimizer's step that the strategy has not counted."""


class WorkerFeature:
    """One object per fit. The fit calls the methods that a feature defines, each at its moment."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit

    @classmethod
    def wanted(cls, fit: Fit) -> bool:
        """Whether this fit needs it."""
        return True

    def begin(self) -> None:
        """Training begins: the optimizers exist."""

    def data_ready(self) -> None:
        """Training data were set up. All workers call it together."""

    def between_batches(self) -> None:
        """A batch follows another one, without a sync point between them; before exchanges."""

    def before_batch(self) -> None:
        """A batch is about to be trained."""

    def after_batch(self) -> None:
        """A batch was trained; before its steps are counted."""

    def batch_done(self) -> None:
        """A batch was trained, and everything that follows from it is done."""

    def rejoin(self) -> None:
        """This worker was excluded, and takes the servers' weights."""

    def at_sync_point(self) -> None:
        """All workers have the same weights. All call it together."""

    def pause(self) -> None:
        """No exchange is half done, so that a checkpoint is whole."""

    def end(self) -> None:
        """Training has ended."""

    def close(self) -> None:
        """Undo what was done to the Trainer and its data."""


def moments_of(fit: Fit) -> Mapping[str, tuple[Callable[[], None], ...]]:
    """Make the features of a fit. Returns the methods to call, by the name of the moment.

    A feature whose module the program has not loaded is left out.
    """
    needed = [path for path, module in FIT.items() if not module or f"lightning_asgd.{module}" in sys.modules]
    made: list[WorkerFeature] = [kind(fit) for kind in map(load, needed) if kind.wanted(fit)]
    return {
        name: tuple(getattr(each, name) for each in made if getattr(type(each), name) is not method)
        for name, method in vars(WorkerFeature).items()
        if callable(method) and not name.startswith("_")
    }
