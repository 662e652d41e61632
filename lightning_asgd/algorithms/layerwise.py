r"""Layer-wise asynchronous gradient descent: each layer's gradient leaves during backward, as soon as it exists.

.. math::  w_{t+1} = w_t - \eta\,\bar g_{t-k}, \qquad \bar g_t = \frac1N \sum_i g_{i,t}

:math:`k` is the delay. With k = 0 this is synchronous SGD, whose communication hides behind backward and the next
forward: a layer's gradient is waited for just before the layer is used again. With k >= 1 it has k steps of time, and
no worker waits unless it takes longer. If gradients are read before the optimizer's step (clipping, hooks,
manual optimization), or where parameters are tied, all layers are waited for in that step.

References:
    J. Daily, A. Vishnu, C. Siegel, "Layer-wise asynchronous gradient descent", submitted to ICLR 2017 (OpenReview
    rkFd2P5gl), from synchronous equivalence to "delaying gradient updates a fixed number of times"; MaTEx-Caffe.

Departures:
    Gradients are summed by the servers, layer by layer in turn, instead of by MPI; always in the order of ranks, so
    that the sum does not depend on the order of arrival. A layer is a submodule with parameters of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lightning_asgd.algorithms.base import Algorithm, Payload, Push, Run
from lightning_asgd.errors import ConfigurationError
from lightning_asgd.validation import whole

__all__ = ["LayerWise"]


@dataclass(frozen=True)
class LayerWise(Algorithm):
    """The mean of all workers' gradients, layer by layer.

    Args:
        delay: optimizer steps *k* between a gradient and its use. 0 has the bits of synchronous SGD. For SGD on a
            quadratic of curvature 1, learning rates below ``2 sin(pi / (2 (2 k + 1)))`` are stable: 2, 1, 0.62, ...

    State:
        none; all workers hold the same weights and optimizer state.

    Staleness:
        is the delay, for every gradient.
    """

    delay: int = 0

    payload: ClassVar[Payload] = Payload.LAYERS

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("LayerWise(delay)", self.delay, 0)

    def check(self, run: Run) -> None:
        """See :class:`Algorithm`."""
        super().check(run)
        if run.precision == "16-mixed":
            raise ConfigurationError(
                "LayerWise was given precision='16-mixed', where every worker scales its gradients by a factor of its "
                "own. Expected another precision, such as 'bf16-mixed'."
            )

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """See :class:`Algorithm`: one step of plain SGD along a mean gradient; workers use their own optimizers."""
        weights.sub_(update, alpha=push.lr)
