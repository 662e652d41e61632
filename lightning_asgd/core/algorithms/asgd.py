r"""Asynchronous SGD with weight deltas: the rule of the original paper, and the mean that converges like DDP.

.. math::  w \leftarrow w + s\,(x_i - w_i)

:math:`x_i` are worker *i*'s weights when it pushes, :math:`w_i` the server's weights it last fetched, and *s* the
scale.

The weights that answer a push of :math:`k` steps are :math:`w + (1 - s)\,(x_i - w_i) / k`: the others are taken to move
as worker *i* did, for one step. It computes gradients there, and measures its next push from there.

References:
    T. Paine, H. Jin, J. Yang, Z. Lin, T. Huang, "GPU Asynchronous Stochastic Gradient Descent to Speed Up Neural
    Network Training", 2013 (arXiv 1312.6186): ``s = 1``, every push is added in full.
    J. Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, Algorithm 1.1 (Downpour SGD client).
    I. Hakimi, S. Barkai, M. Gabel, A. Schuster, "Taming Momentum in a Distributed Asynchronous Environment", 2019
    (arXiv 1907.11612): the look-ahead of DANA-Zero, which takes it from the momenta of all workers.

Departures:
    The papers add every push whole (``scale="sum"``), which multiplies the outer learning rate by the number of
    workers and needs a warm start. The default ``scale="mean"`` adds 1/N of each, so that one round of N pushes moves
    the weights by their mean, as DDP's averaged gradient does. Where batch sizes :math:`b_i` differ it adds
    :math:`b_i / \sum_j b_j`, so that a sample weighs the same on every worker (McMahan et al., "Communication-Efficient
    Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_asgd.core.algorithms.base import Algorithm, Push, Transform
from lightning_asgd.core.foundation.errors import ConfigurationError

__all__ = ["ASGD", "factor", "leaves_pushes", "parse_scale"]


@dataclass(frozen=True)
class ASGD(Algorithm):
    """Add each update, scaled.

    Args:
        scale: ``"mean"`` adds 1 / live workers of an update, or its part of their samples where batch sizes differ;
            ``"sum"`` all of it, a number that fraction of it.

    State:
        none beside the weights.

    Staleness:
        ignored, unless a transform looks at it: an update is added in full, however old its base is.

    Example:
        >>> import torch
        >>> w = torch.zeros(2)
        >>> ASGD("mean").apply(w, torch.tensor([1.0, 3.0]), {}, Push(live=2))
        >>> w.tolist()
        [0.5, 1.5]
    """

    scale: str | float = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "scale", parse_scale(self.scale))

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """See :class:`Algorithm`."""
        weights.add_(update, alpha=factor(self.scale, push))

    def ahead(self, push: Push) -> float:
        """See :class:`Algorithm`: what the other workers add during one step, if they move as the sender did."""
        plain = type(self).apply is ASGD.apply and self.scale == "mean" and all(map(leaves_pushes, self.transforms))
        return (1 - factor("mean", push)) / push.steps if plain else 0.0


def leaves_pushes(transform: Transform) -> bool:
    """Whether a transform scales, changes, drops and aggregates no push, but decides when workers exchange."""
    kind = type(transform)
    return not kind.gathers and kind.weigh is Transform.weigh and kind.change is Transform.change


def factor(scale: str | float, push: Push) -> float:
    """What an update is multiplied with: one of N workers' pushes, or the mean of several of them."""
    if scale == "mean":
        return min(push.count * push.weight / max(push.live, 1), 1.0)
    return 1.0 if scale == "sum" else float(scale)


def parse_scale(scale: object) -> str | float:
    """Check ``scale``. Raises a ``ConfigurationError`` if it is not ``"mean"``, ``"sum"`` or a positive number."""
    if isinstance(scale, str) and scale in ("mean", "sum"):
        return scale
    if isinstance(scale, (int, float)) and not isinstance(scale, bool) and math.isfinite(scale) and scale > 0:
        return float(scale)
    raise ConfigurationError(
        f"scale={scale!r} is unknown. Expected 'mean', 'sum' or a positive number. Use 'mean' unless you have measured "
        f"otherwise: it converges like DDP with the same hyper-parameters."
    )
