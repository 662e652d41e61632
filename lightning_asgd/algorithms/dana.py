r"""DANA-Slim: momentum that looks ahead, so that it does not make updates staler.

.. math::  v_i \leftarrow \gamma v_i + g_i, \qquad u = \gamma v_i + g_i, \qquad w \leftarrow w - \eta u

Every worker keeps its own momentum :math:`v_i` and pushes *u*, which is exactly the step of ``torch.optim.SGD`` with
Nesterov momentum: so DANA-Slim is :class:`ASGD` with that optimizer and an exchange after every step.

References:
    I. Hakimi, S. Barkai, M. Gabel, A. Schuster, "Taming Momentum in a Distributed Asynchronous Environment" (DANA),
    arXiv 1907.11612, algorithm 3 (DANA-Slim).

Departures:
    The default ``scale="mean"`` of :class:`ASGD`; the paper's is ``"sum"``.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_asgd.algorithms.optimizer_checks import needs_nesterov
from lightning_asgd.core.algorithms.asgd import ASGD
from lightning_asgd.core.algorithms.base import Push, Run
from lightning_asgd.core.foundation.errors import ConfigurationError

__all__ = ["DANASlim"]


@dataclass(frozen=True)
class DANASlim(ASGD):
    """:class:`ASGD` for workers with Nesterov momentum that exchange after every step.

    Args:
        scale: see :class:`ASGD`.
    """

    def check(self, run: Run) -> None:
        """See :class:`Algorithm`."""
        super().check(run)
        needs_nesterov("DANASlim", run)
        if run.nsync != 1:
            raise ConfigurationError(
                f"DANASlim was given nsync={run.nsync}. Expected nsync=1: it looks ahead by one step. "
                "For several steps use ASGD."
            )

    def ahead(self, push: Push) -> float:
        """See :class:`Algorithm`: workers look ahead themselves."""
        return 0.0
