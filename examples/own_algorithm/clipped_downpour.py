r"""Downpour SGD whose servers clip the gradients that workers push.

.. math::  w \leftarrow w - \frac{\eta}{N} \mathrm{clip}(A_i / k, -c, c)

:math:`A_i` is the sum of the :math:`k` gradients that worker *i* has accrued since its last push, and *N* the number of
live workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lightning_asgd.algorithms import Algorithm
from lightning_asgd.algorithms.base import Payload, Push
from lightning_asgd.errors import ConfigurationError


@dataclass(frozen=True)
class ClippedDownpour(Algorithm):
    """Gradients to the servers, which clip each value and take a step.

    Args:
        lr: learning rate of the servers.
        limit: largest absolute value of an element of the mean gradient.

    Raises:
        ConfigurationError: one of them is not positive.
    """

    lr: float = 0.1
    limit: float = 1.0

    payload: ClassVar[Payload] = Payload.GRADIENT

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lr", "limit"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(
                    f"ClippedDownpour({name})={getattr(self, name)!r}. Expected a number above 0, such as {name}=0.1."
                )

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """Take a step with the mean of the gradients, clipped element by element."""
        update.div_(push.steps).clamp_(-self.limit, self.limit)
        weights.sub_(update, alpha=self.lr / push.live)
