r"""Nesterov momentum of an outer optimizer, and a cap for it where successive updates point the same way.

With the momentum *b* of the updates before, an update *D* and the factor :math:`\mu`, Nesterov's step is

.. math::

    b' = \mu b + D, \qquad D + \mu b' = (1 + \mu) D + \mu^2 b
       = (1 + \mu + \mu^2 c) D + \mu^2 (b - c D), \qquad c = \frac{b \cdot D}{|D|^2}

So *D* is multiplied by the *gain* :math:`1 + \mu + \mu^2 c`, and :math:`\mu^2 (b - c D)` is added at right angles to
it. After short periods successive updates are much alike, *c* grows to 1 / (1 - :math:`\mu`), and the gain to ten. The
cap keeps the gain below :math:`1 + \mu_{max}` and the rest below the length of *D*:

.. math::

    \mu \le \mu_{max}, \qquad \mu + \mu^2 \max(c, 0) \le \mu_{max}, \qquad \mu^2 |b - c D| \le |D|

Here :math:`\mu_{max}` is 0.9 if all workers' pushes are merged into *D*. Where *N* workers' pushes move the weights
one after the other, the delay acts as a momentum of 1 - 1 / *N* by itself, which is subtracted. If *k* of the *N* are
merged, 1 - *k* / *N* is.

If the gain would be negative, :math:`\mu` is 0. It falls at once, and rises by a tenth of the gap per update. Each
tensor of the module has a factor of its own; one whose scalars lie on two servers has two.

References:
    Y. Nesterov, 1983, as I. Sutskever et al. write it, "On the importance of initialization and momentum in deep
    learning", ICML 2013. I. Mitliagkas, C. Zhang, S. Hadjis, C. Re, "Asynchrony begets Momentum, with an Application to
    Deep Learning", 2016 (arXiv 1605.09774), theorem 3, for the momentum of a delay. The cap is not from a published
    paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.core.algorithms.base import Algorithm, Push
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.numerics import inner_product
from lightning_asgd.core.foundation.validation import at_least, between

CAPPED = "capped"
MOST = 0.9  # largest factor
_NEAR_0 = 1e-9
_RISE = 0.1  # of the way to the cap, per update


@dataclass(frozen=True)
class Alignment:
    """How a momentum lies relative to an update.

    Attributes:
        along: *c*, the part along the update, in its lengths.
        across: the length of the rest, in the same unit.
    """

    along: float
    across: float

    @classmethod
    def of(cls, momentum: Tensor, update: Tensor) -> Alignment | None:
        """That of *b* and *D*, shape ``(n,)``; None if *D* is zero."""
        if update.is_complex():
            momentum, update = torch.view_as_real(momentum).flatten(), torch.view_as_real(update).flatten()
        length = float(torch.linalg.vector_norm(update, dtype=torch.float64))
        if length == 0:
            return None
        along = inner_product(momentum, update) / length / length
        size = float(torch.linalg.vector_norm(momentum, dtype=torch.float64)) / length
        return cls(along, math.sqrt(max(size * size - along * along, 0.0)))

    def gain(self, factor: float) -> float:
        """By how much Nesterov's step with a factor of the momentum is longer than *D*, along it."""
        return 1 + factor + factor**2 * self.along


def capped_factor(alignment: Alignment | None, before: float, most: float = MOST) -> float:
    """The factor of the momentum for an update, given the factor ``before`` of the previous one; at most ``most``."""
    if alignment is None:
        return min(before, most)
    along, across = alignment.along, alignment.across
    if not math.isfinite(along * across):
        return 0.0
    cap = (math.sqrt(1 + 4 * along * most) - 1) / (2 * along) if along > _NEAR_0 else most
    cap = min(cap, most, across**-0.5 if across > _NEAR_0 else most)
    if alignment.gain(cap) < 0:  # the momentum would turn the update back
        return 0.0
    return min(cap, before + _RISE * (cap - before))


@dataclass(frozen=True)
class OuterMomentum(Algorithm):
    """An algorithm whose servers take Nesterov steps.

    Args:
        lr: the outer learning rate.
        momentum: the outer momentum, or ``"capped"``.
    """

    lr: float = 0.7
    momentum: float | str = CAPPED

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        at_least(f"{name}(lr)", self.lr, 0, above=True)
        if not isinstance(self.momentum, str):
            between(f"{name}(momentum)", self.momentum, 0, 1)
        elif self.momentum != CAPPED:
            raise ConfigurationError(
                f"{name}(momentum)={self.momentum!r}. Expected {CAPPED!r} or a number from 0 to 1."
            )

    @property
    def per_tensor(self) -> bool:
        """See :class:`Algorithm`."""
        return True

    def start(self, weights: Tensor) -> dict[str, Any]:
        """See :class:`Algorithm`."""
        first = MOST if self.momentum == CAPPED else float(self.momentum)
        numbers = {"factor": torch.tensor(first, dtype=torch.float64), "gain": torch.zeros((), dtype=torch.float64)}
        return {"momentum": torch.zeros_like(weights), **numbers}

    def load(self, slots: dict[str, Any], saved: dict[str, Any]) -> None:
        """See :class:`Algorithm`. A checkpoint of a fixed momentum may lack factor and gain."""
        super().load(slots, {**slots, **saved})
        if self.momentum != CAPPED:
            slots["factor"].fill_(self.momentum)

    def next_factor(self, slots: dict[str, Any], update: Tensor, push: Push) -> float:
        """The factor of the momentum for an update."""
        alignment = Alignment.of(slots["momentum"], update)
        if self.momentum == CAPPED:
            of_the_delay = 1 - min(push.count / max(push.live, 1), 1.0)
            most = max(MOST - of_the_delay, 0.0)
            slots["factor"].fill_(capped_factor(alignment, float(slots["factor"]), most))
        factor = float(slots["factor"])
        slots["gain"].fill_(0.0 if alignment is None else alignment.gain(factor))
        return factor

    def gain(self, slots: dict[str, Any]) -> float:
        """See :class:`Algorithm`."""
        gain = float(slots["gain"])
        return gain if math.isfinite(gain) else 0.0

    def step(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """Take a Nesterov step; ``update`` is -D, and is overwritten."""
        factor = self.next_factor(slots, update, push)
        momentum = slots["momentum"].mul_(factor).add_(update)
        weights.add_(update.add_(momentum, alpha=factor), alpha=self.lr)
