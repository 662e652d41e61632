"""Transforms that change how aggregated pushes are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_asgd.core.algorithms.base import Push, Transform
from lightning_asgd.core.foundation.errors import ConfigurationError

_NEAR_0 = 1e-6  # length of a mean of directions, below which rounding decides where it points


@dataclass(frozen=True)
class RadialDirectional(Transform):
    r"""Average the lengths and the directions of aggregated pushes apart, for every tensor: RDA [Douillard 2026].

    .. math::

        D = \frac{\sum_i w_i |D_i|}{\sum_i w_i} \; \phi\left(\frac{\sum_i w_i \phi(D_i)}{\sum_i w_i}\right), \qquad
        \phi(x) = \frac{x}{|x|}, \quad \phi(0) = 0

    After long periods the pushes of *N* workers are nearly orthogonal, and their mean is shorter than each of them by
    :math:`\sqrt N`. This one is as long as they are, so the outer learning rate suits any number of workers.

    Args:
        averaged: parts of names; tensors whose name contains one are averaged as usual. The pushes of embeddings are
            not orthogonal.

    References:
        A. Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv 2604.21428, appendix D.

    Departures:
        A tensor whose scalars lie on two servers counts as two. Tensors of one value, such as a bias of one output, are
        averaged: two workers' directions there are equal or cancel, and would leave such a value as it is.
    """

    averaged: Sequence[str] = ("embed", "wte", "wpe", "lm_head")
    per_tensor: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.averaged, str) or not all(isinstance(part, str) and part for part in self.averaged):
            raise ConfigurationError(
                f"RadialDirectional(averaged)={self.averaged!r}. Expected parts of names, such as ('embed', 'lm_head')."
            )
        object.__setattr__(self, "averaged", tuple(self.averaged))

    def start(self, weights: Tensor) -> dict[str, Any]:
        """See :class:`Transform`."""
        return {"length": torch.zeros((), dtype=torch.float64)}

    def change(self, update: Tensor, weights: Tensor, slots: dict[str, Tensor], push: Push) -> None:
        """See :class:`Transform`: make it a direction, and add its length up."""
        length = _length(update)
        if length > 0 and not self._averages(push, update):
            slots["length"] += push.scale * length
            update.div_(length)

    def merge(self, mean: Tensor, slots: dict[str, Tensor], push: Push) -> None:
        """See :class:`Transform`."""
        if self._averages(push, mean):
            return
        length, size = float(slots["length"]) / push.scale, _length(mean)
        slots["length"].zero_()
        mean.mul_(length / size if size > _NEAR_0 else 0.0)

    def forget(self, slots: dict[str, Tensor]) -> None:
        """See :class:`Transform`."""
        slots["length"].zero_()

    def _averages(self, push: Push, tensor: Tensor) -> bool:
        return tensor.numel() == 1 or any(part in push.tensor for part in self.averaged)


def _length(vector: Tensor) -> float:
    """Its norm, in double precision."""
    real = torch.view_as_real(vector) if vector.is_complex() else vector
    return float(torch.linalg.vector_norm(real, dtype=torch.float64))
