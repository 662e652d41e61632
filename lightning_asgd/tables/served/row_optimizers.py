"""Optimizers for the rows of served tables. Each changes some rows and their state in place, and no others.

=================  =====================================================================================================
``sgd``            ``w -= lr * g``
``adagrad``        ``h += g^2; w -= lr * g / (sqrt(h) + eps)``, as ``torch.optim.Adagrad`` (Duchi et al. 2011)
``row_adagrad``    the same with one ``h`` per row, to which the mean of ``g^2`` is added (DLRM, Naumov et al. 2019)
``adam``           as ``torch.optim.SparseAdam``, but bias correction counts each row's own updates (Kingma, Ba 2015)
=================  =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_EPS = 1e-10
_BETA1, _BETA2, _ADAM_EPS = 0.9, 0.999, 1e-8


@dataclass(frozen=True)
class RowOptimizer:
    """An optimizer of rows.

    ``step(values, state, updates, gradients, lr)`` changes ``values``, shape ``(k, width)``, and ``state``, shape ``(k,
    state)``, in place. ``updates``, shape ``(k, 1)``, is each row's number of updates, this one included; ``gradients``
    has shape ``(k, width)``.
    """

    state: Callable[[int], int]  # scalars of state per row, given its width
    step: Callable[[Tensor, Tensor, Tensor, Tensor, float], None]


def _sgd(values: Tensor, state: Tensor, updates: Tensor, gradients: Tensor, lr: float) -> None:
    values.sub_(gradients, alpha=lr)


def _adagrad(values: Tensor, state: Tensor, updates: Tensor, gradients: Tensor, lr: float) -> None:
    state.addcmul_(gradients, gradients)
    values.addcdiv_(gradients, state.sqrt().add_(_EPS), value=-lr)


def _row_adagrad(values: Tensor, state: Tensor, updates: Tensor, gradients: Tensor, lr: float) -> None:
    state.add_(gradients.square().mean(1, keepdim=True))
    values.sub_(gradients / state.sqrt().add_(_EPS), alpha=lr)


def _adam(values: Tensor, state: Tensor, updates: Tensor, gradients: Tensor, lr: float) -> None:
    mean, square = state[:, : values.shape[1]], state[:, values.shape[1] :]
    mean.lerp_(gradients, 1 - _BETA1)
    square.mul_(_BETA2).addcmul_(gradients, gradients, value=1 - _BETA2)
    counts = updates.double()
    step = (lr * torch.sqrt(1 - _BETA2**counts) / (1 - _BETA1**counts)).float()
    values.sub_(step * mean / square.sqrt().add_(_ADAM_EPS))


ROW_OPTIMIZERS = {
    "sgd": RowOptimizer(lambda width: 0, _sgd),
    "adagrad": RowOptimizer(lambda width: width, _adagrad),
    "row_adagrad": RowOptimizer(lambda width: 1, _row_adagrad),
    "adam": RowOptimizer(lambda width: 2 * width, _adam),
}
