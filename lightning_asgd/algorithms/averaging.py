r"""Model averaging: workers train alone for ``nsync`` steps, then all continue from the mean of their weights.

.. math::  w \leftarrow \frac1N \sum_i x_i = w + \frac1N \sum_i (x_i - w)

References:
    H. Yu, S. Yang, S. Zhu, "Parallel Restarted SGD with Faster Convergence and Less Communication", AAAI 2019
    (arXiv 1807.06629), algorithm 1 with *I* = nsync, and the remarks on theorem 1 for ``restarted_period``.
    H. Yu, R. Jin, S. Yang, "On the Linear Speedup Analysis of Communication Efficient Momentum SGD for Distributed
    Non-Convex Optimization", ICML 2019 (arXiv 1905.03817): the same period with momentum.
    P. Moritz, R. Nishihara, I. Stoica, M. Jordan, "SparkNet", ICLR 2016 (arXiv 1511.06051): tau = nsync, about 50.
    M. Zinkevich, M. Weimer, A. Smola, L. Li, "Parallelized Stochastic Gradient Descent", NIPS 2010: one average at the
    end, which is what is left if nsync exceeds the number of steps.
    T. Lin, S. Stich, K. Patel, M. Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (arXiv 1808.07217):
    post-local SGD.

Departures:
    Optimizer state (momentum) stays with its worker; it is neither averaged nor reset. A worker without further batches
    in an epoch is not waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lightning_asgd.algorithms.rounds import Barrier
from lightning_asgd.core.algorithms.asgd import factor
from lightning_asgd.core.algorithms.base import Algorithm, Push, Transform
from lightning_asgd.core.foundation.validation import at_least

__all__ = ["LocalSGD", "restarted_period"]


def restarted_period(steps: float, workers: int) -> int:
    r"""Steps between two averages of parallel restarted SGD: :math:`\max(1, \lfloor T^{1/4} / N^{3/4} \rfloor)`.

    With a period of this order, and the learning rate :math:`\sqrt N / (L \sqrt T)` for gradients that are
    *L*-Lipschitz, *N* workers converge as fast per step as one with *N* times the batch: in O(1 / sqrt(NT)). The
    theorem gives no constant; here it is 1. Longer periods often train as well.

    Args:
        steps: optimizer steps that every worker takes, *T*.
        workers: *N*.

    Reference:
        Yu, Yang and Zhu 2019, theorem 1 and remark 3.

    Example:
        >>> restarted_period(1_000_000, 4)
        11
    """
    return max(1, int(steps**0.25 / workers**0.75 + 1e-9))


@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Parallel restarted SGD, local SGD, SparkNet: the mean of all workers' weights every ``nsync`` steps.

    Args:
        post: steps during which the workers average after every step, before they begin to average every ``nsync``:
            post-local SGD.

    State:
        none beside the weights.

    Staleness:
        always 0: workers wait for each other.

    Example:
        >>> import torch
        >>> w = torch.zeros(1)
        >>> LocalSGD().apply(w, torch.tensor([2.0]), {}, Push(live=4, count=4))  # the mean of four
        >>> w.item()
        2.0
    """

    post: int = 0

    overlap: ClassVar[bool] = False
    averages: ClassVar[bool] = True
    always: ClassVar[tuple[Transform, ...]] = (Barrier(),)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("LocalSGD(post)", self.post, 0)

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """See :class:`Algorithm`."""
        weights.add_(update, alpha=factor("mean", push))

    def period(self, nsync: int, step: int) -> int:
        """See :class:`Algorithm`."""
        return 1 if step <= self.post else nsync
