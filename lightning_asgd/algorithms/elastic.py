r"""Elastic averaging: workers keep weights of their own, which a spring ties to the servers' centre.

.. math::  E = \alpha\,(x_i - w), \qquad x_i \leftarrow x_i - E, \qquad w \leftarrow w + E

References:
    S. Zhang, A. Choromanska, Y. LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015 (arXiv 1412.6651):
    algorithm 1 (EASGD), algorithm 2 (EAMSGD), section 2 for :math:`\beta = N \alpha`.

Departures:
    The paper's worker fetches *w* and computes *E* itself; here it sends :math:`x_i` and the server computes *E* with
    the centre of that moment, in one round trip and never stale. At sync points every worker holds the centre, which is
    what is validated and saved; training continues from the worker's own weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lightning_asgd.algorithms.optimizer_checks import needs_nesterov
from lightning_asgd.core.algorithms.base import Algorithm, Answer, Payload, Push, Run
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import between

__all__ = ["EAMSGD", "EASGD"]


@dataclass(frozen=True)
class EASGD(Algorithm):
    r"""Elastic averaging SGD.

    Args:
        beta: :math:`\beta = N\alpha`, how far the centre moves per round of N exchanges; the paper's 0.9.
            :math:`\alpha` follows the number of workers.
        alpha: a fixed :math:`\alpha` instead; times the number of workers it must not exceed 1.

    State:
        none beside the weights; every worker has its own.

    Staleness:
        of the centre does not arise; a worker's weights are its own.

    Example:
        >>> import torch
        >>> w, x = torch.tensor([0.0]), torch.tensor([1.0])
        >>> EASGD(beta=0.5).apply(w, x, {}, Push(live=2))
        >>> w.item(), x.item()  # x holds the force now
        (0.25, 0.25)
    """

    beta: float = 0.9
    alpha: float | None = None

    payload: ClassVar[Payload] = Payload.WEIGHTS
    answer: ClassVar[Answer] = Answer.FORCE

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        between(f"{name}(beta)", self.beta, 0, 1, above=True)
        if self.alpha is not None:
            between(f"{name}(alpha)", self.alpha, 0, 1, above=True)

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """See :class:`Algorithm`; ``update`` holds the worker's weights on entry and the force on return."""
        update.sub_(weights).mul_(self.beta / push.live if self.alpha is None else self.alpha)
        weights.add_(update)

    def check(self, run: Run) -> None:
        """See :class:`Algorithm`."""
        super().check(run)
        if self.alpha is not None and self.alpha * run.workers > 1:
            raise ConfigurationError(
                f"{type(self).__name__}(alpha={self.alpha}) with {run.workers} workers: alpha times workers is "
                f"{self.alpha * run.workers:g}, and above 1 the centre overshoots. Expected at most "
                f"{1 / run.workers:g}: pass beta instead, and alpha adapts to the number of workers."
            )


@dataclass(frozen=True)
class EAMSGD(EASGD):
    """Elastic averaging with momentum: :class:`EASGD` whose workers' optimizer is SGD with Nesterov momentum.

    Departures:
        The paper writes Nesterov momentum at the look-ahead point; torch's ``SGD(nesterov=True)`` is the same up to a
        change of variables, and the force acts on its variable.
    """

    def check(self, run: Run) -> None:
        """See :class:`Algorithm`."""
        super().check(run)
        needs_nesterov("EAMSGD", run)
