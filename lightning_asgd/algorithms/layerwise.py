r"""Layer-wise asynchronous gradient descent: each layer's gradient leaves during backward, as soon as it exists.

.. math::  w_{t+1} = w_t - \eta\,\bar g_{t-k}, \qquad \bar g_t = \frac1N \sum_i g_{i,t}

:math:`k` is the delay. With k = 0 this is synchronous SGD, whose communication hides behind backward and the next
forward: a layer's gradient is waited for just before the layer is used again. With k >= 1 it has k steps of time, and
no worker waits unless it takes longer. If gradients are read before the optimizer's step (clipping, hooks,
manual optimization), or where parameters are tied, all layers are waited for in that step.

A late gradient needs smaller steps: with momentum :math:`m`, SGD is stable on a quadratic of curvature 1 for learning
rates below :math:`2 (1 + m)` without a delay, and below :math:`1 - m` with k = 1. So with a delay, learning rates are
divided by :math:`k + 1`, and SGD's momentum is compensated:

.. math::  v_{t+1} = m v_t + \bar g_{t-k}, \qquad w_{t+1} = w_t - \frac{\eta}{k+1}\,(a v_{t+1} + b\,\bar g_{t-k}),
    \qquad a = m^k, \quad b = \frac{1 - m^k}{1 - m}

This takes at once the steps that momentum would have taken while the gradient was in flight.

References:
    J. Daily, A. Vishnu, C. Siegel, "Layer-wise asynchronous gradient descent", submitted to ICLR 2017 (OpenReview
    rkFd2P5gl), from synchronous equivalence to "delaying gradient updates a fixed number of times"; MaTEx-Caffe.

    A. Kosson, V. Chiley, A. Venigalla, J. Hestness, U. Köster, "Pipelined Backpropagation at Scale: Training Large
    Models without Batches", MLSys 2021 (arXiv:2003.11666), section 3: spike compensation, :math:`a` and :math:`b`.

Departures:
    Gradients are summed by the servers, layer by layer in turn, instead of by MPI; always in the order of ranks, so
    that the sum does not depend on the order of arrival. A layer is a submodule with parameters of its own. Layers of
    less than 256 KiB are sent together with their neighbours, and those of more than 512 KiB in pieces. The division of
    learning rates by k + 1 is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_asgd.core.algorithms.base import Algorithm, Payload, Push, Run
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import whole

__all__ = ["LayerWise"]


@dataclass(frozen=True)
class LayerWise(Algorithm):
    """The mean of all workers' gradients, layer by layer.

    Args:
        delay: optimizer steps *k* between a gradient and its use. 0 has the bits of synchronous SGD. For SGD on a
            quadratic of curvature 1, learning rates (after the division) below ``2 sin(pi / (2 (2 k + 1)))`` are
            stable without momentum: 2, 1, 0.62, ...; with momentum 0.9, compensated, those below 3.8, 0.25, 0.11, ...
        compensate: with a delay, divide learning rates by k + 1 and compensate SGD's momentum. Otherwise gradients are
            only delayed.

    State:
        none; all workers hold the same weights and optimizer state.

    Staleness:
        is the delay, for every gradient.
    """

    delay: int = 0
    compensate: bool = True

    payload: ClassVar[Payload] = Payload.LAYERS

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("LayerWise(delay)", self.delay, 0)

    @property
    def late(self) -> bool:
        """Whether the workers' optimizers step in another way, since gradients are late."""
        return self.compensate and self.delay > 0

    @property
    def lr_factor(self) -> float:
        """What learning rates are multiplied by."""
        return 1 / (self.delay + 1) if self.compensate else 1.0

    def compensation(self, momentum: float) -> tuple[float, float]:
        """The factors *a* of SGD's momentum and *b* of the gradient."""
        if not self.late:
            return 1.0, 0.0
        a = momentum**self.delay
        return a, (1 - a) / (1 - momentum) if momentum < 1 else float(self.delay)

    def check(self, run: Run) -> None:
        """See :class:`Algorithm`."""
        super().check(run)
        if run.precision == "16-mixed":
            raise ConfigurationError(
                "LayerWise was given precision='16-mixed', where every worker scales its gradients by a factor of its "
                "own. Expected another precision, such as 'bf16-mixed'."
            )
        for optimizer in run.optimizers if self.delay else ():
            self._check_optimizer(optimizer)

    def _check_optimizer(self, optimizer: Any) -> None:
        name = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError(
                f"LayerWise(delay={self.delay}) was given {name}, which computes gradients several times in a step. "
                "Expected another optimizer, or no delay."
            )
        rates = [group.get("lr") for group in getattr(optimizer, "param_groups", [{}])]
        usable = isinstance(optimizer, torch.optim.Optimizer) and all(
            isinstance(r, (int, float, Tensor)) for r in rates
        )
        if self.late and not usable:
            raise ConfigurationError(
                f"LayerWise(delay={self.delay}) divides learning rates by {self.delay + 1}, but {name} has none that "
                f"is a number: {rates}. Expected an optimizer of torch's with learning rates, or compensate=False."
            )

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """See :class:`Algorithm`: one step of plain SGD along a mean gradient; workers use their own optimizers."""
        weights.sub_(update, alpha=push.lr)
