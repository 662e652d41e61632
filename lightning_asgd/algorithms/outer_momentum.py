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

If the gain would be negative, :math:`\mu` is 0. It falls at once, and rises by a tenth of the gap per update. There is
one factor for what a server holds of a fragment in one dtype, so it depends on the number of servers.

References:
    Y. Nesterov, 1983, as I. Sutskever et al. write it, "On the importance of initialization and momentum in deep
    learning", ICML 2013. The cap is not from a published paper.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_asgd.errors import ConfigurationError
from lightning_asgd.validation import between

__all__ = ["CAPPED", "MOST", "capped_factor", "check_momentum"]

CAPPED = "capped"
MOST = 0.9  # without a cap
_NEAR_0 = 1e-9
_RISE = 0.1  # of the way to the cap, per update


def check_momentum(name: str, momentum: float | str) -> None:
    """Raise a :class:`ConfigurationError` unless a user's momentum is a number from 0 to 1 or ``"capped"``."""
    if isinstance(momentum, str):
        if momentum != CAPPED:
            raise ConfigurationError(f"{name}={momentum!r}. Expected {CAPPED!r} or a number from 0 to 1.")
    else:
        between(name, momentum, 0, 1)


def capped_factor(momentum: Tensor, update: Tensor, before: float) -> float:
    """The factor of the momentum for an update.

    Args:
        momentum: *b*, shape ``(n,)``.
        update: *D*, shape ``(n,)``.
        before: the factor for the update before.
    """
    if update.is_complex():
        momentum, update = torch.view_as_real(momentum).flatten(), torch.view_as_real(update).flatten()
    wide = torch.float64 if update.dtype is torch.float64 else torch.float32  # a product of 16 bits would overflow
    length = float(torch.linalg.vector_norm(update, dtype=torch.float64))
    if length == 0:
        return min(before, MOST)
    along = float(torch.dot(momentum.to(wide), update.to(wide))) / length / length
    size = float(torch.linalg.vector_norm(momentum, dtype=torch.float64)) / length
    if not math.isfinite(along * size):
        return 0.0
    across = math.sqrt(max(size * size - along * along, 0.0))
    cap = (math.sqrt(1 + 4 * along * MOST) - 1) / (2 * along) if along > _NEAR_0 else MOST
    cap = min(cap, MOST, across**-0.5 if across > _NEAR_0 else MOST)
    if 1 + cap + cap**2 * along < 0:  # the momentum would turn the update back
        return 0.0
    return min(cap, before + _RISE * (cap - before))
