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
        """Count a step that the strategy does not see."""


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

    def take_data(self) -> None:
        """Training data were set up. All workers call it together."""

    def between_batches(self) -> None:
        """A batch follows another one, without a sync point between them; before exchanges."""

    def before_batch(self) -> None:
        """A batch is about to be trained."""

    def after_batch(self) -> None:
        """A batch was trained; before its steps are counted."""

    def after_all(self) -> None:
        """A batch was trained, and everything that follows from it is done."""

    def rejoin(self) -> None:
        """This worker was excluded, and takes the servers' weights."""

    def share(self) -> None:
        """At a sync point, once all workers have the same weights. All call it together."""

    def pause(self) -> None:
        """No exchange is half done, so that a checkpoint is whole."""

    def end(self) -> None:
        """Training has ended."""

    def close(self) -> None:
        """Undo what was done to the Trainer and its data."""


Moments = Mapping[str, tuple[Callable[[], None], ...]]
"""By the name of a moment, the methods to call."""


def moments_of(fit: Fit) -> Moments:
    """Make the features of a fit: those that every fit has, and those whose module the program has loaded."""
    needed = [path for path, module in FIT.items() if not module or f"lightning_asgd.{module}" in sys.modules]
    made: list[WorkerFeature] = [kind(fit) for kind in map(load, needed) if kind.wanted(fit)]
    return {
        name: tuple(getattr(each, name) for each in made if getattr(type(each), name) is not method)
        for name, method in vars(WorkerFeature).items()
        if callable(method) and not name.startswith("_")
    }
