"""Hogwild!: all workers train the same weights, in shared memory. No exchange, and no locks.

References:
    F. Niu, B. Recht, C. Re, S. Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent",
    NIPS 2011 (arXiv 1106.5730), algorithm 1.
    J. Deyringer, A. Fraser, H. Schmid, T. Okita, "Parallelization of Neural Network Training for NLP with Hogwild!",
    PBML 109, 2017: dense networks; on an accelerator the weights are copied before, and the change is added after
    every step.

Departures:
    The papers' workers compute a gradient and subtract it; here every worker's own optimizer changes the shared weights
    in place, momentum included. A coordinator still runs, for sync points; it receives no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lightning_asgd.core.algorithms.base import Algorithm, Payload, Push, Run
from lightning_asgd.core.foundation.errors import ConfigurationError

__all__ = ["Hogwild"]


@dataclass(frozen=True)
class Hogwild(Algorithm):
    """One machine, one set of weights, no locks.

    Args:
        copies: whether every worker trains a copy, takes the shared weights before and adds its change after every
            step. None: only on an accelerator, whose memory is not shared.

    State:
        none; every worker's optimizer has its own.

    Staleness:
        is the updates of others during a step. Updates of dense networks can overwrite each other; nothing is rejected,
        so one worker's NaN reaches all.
    """

    copies: bool | None = None

    payload: ClassVar[Payload] = Payload.NONE

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """See :class:`Algorithm`: the addition that no lock guards."""
        weights.add_(update)

    def check(self, run: Run) -> None:
        """See :class:`Algorithm`."""
        super().check(run)
        if run.nodes > 1:
            raise ConfigurationError(
                f"Hogwild was started on {run.nodes} nodes. Expected 1: its workers share memory. "
                "Use algorithm='asgd' between machines."
            )
