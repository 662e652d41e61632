r"""What to do about stale pushes and slow workers: transforms of an update on the server.

:math:`\tau` is a push's staleness in versions, :math:`w` the shard's weights now, :math:`w_i` the weights in the latest
reply to the push's worker.

References:
    [Zhang 2016] W. Zhang, S. Gupta, X. Lian, J. Liu, "Staleness-aware Async-SGD", IJCAI 2016 (arXiv 1511.05950).
    [Jiang 2017] J. Jiang, B. Cui, C. Zhang, L. Yu, "Heterogeneity-aware distributed parameter servers", SIGMOD 2017.
    [Barkai 2019] S. Barkai, I. Hakimi, A. Schuster, "Gap Aware Mitigation of Gradient Staleness", arXiv 1909.10802.
    [Zheng 2017] S. Zheng et al., "Asynchronous SGD with Delay Compensation", ICML 2017 (arXiv 1609.08326).
    [Maranjyan 2025] A. Maranjyan, A. Tyurin, P. Richtarik, "Ringmaster ASGD", arXiv 2501.16168.
    [Tyurin 2023] A. Tyurin, P. Richtarik, "Optimal Time Complexities of Parallel Stochastic Optimization Methods Under
    a Fixed Computation Model" (Rennala SGD), arXiv 2305.12387.
    [Ho 2013] Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
    NIPS 2013.
    [Liu 2024] B. Liu et al., "Asynchronous Local-SGD Training for Language Modeling" (DyLU), arXiv 2401.09135.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_asgd.core.algorithms.base import Payload, Push, Table, Transform
from lightning_asgd.core.foundation.validation import at_least, between

__all__ = [
    "DelayCompensation",
    "DropStale",
    "DynamicSteps",
    "GapAware",
    "Rennala",
    "ScaleByStaleness",
    "SoftSync",
    "StaleSynchronous",
    "StalenessAware",
]


@dataclass(frozen=True)
class ScaleByStaleness(Transform):
    r"""Multiply a push with :math:`(1 + \tau)^{-p}`: DynSGD [Jiang 2017] for p = 1.

    Args:
        power: *p*; 0.5 is milder.

    Example:
        >>> ScaleByStaleness().weigh(Push(staleness=3))
        0.25
    """

    power: float = 1.0

    def __post_init__(self) -> None:
        at_least("ScaleByStaleness(power)", self.power, 0)

    def weigh(self, push: Push) -> float:
        """See :class:`Transform`."""
        return float((1 + push.staleness) ** -self.power)


@dataclass(frozen=True)
class StalenessAware(Transform):
    r"""Divide a push by its staleness, :math:`\alpha(\tau) = 1/\tau`, or take it whole if fresh [Zhang 2016, eq. 6].

    Between equal workers every push is about N - 1 versions stale, so this is mostly a smaller learning rate there; it
    distinguishes if speeds differ.

    Example:
        >>> StalenessAware().weigh(Push(staleness=4)), StalenessAware().weigh(Push(staleness=0))
        (0.25, 1.0)
    """

    def weigh(self, push: Push) -> float:
        """See :class:`Transform`."""
        return 1.0 / max(push.staleness, 1)


@dataclass(frozen=True)
class DropStale(Transform):
    r"""Drop a push with :math:`\tau \ge R`; its worker continues from the present weights: Ringmaster [Maranjyan 2025].

    Not for data that differ between workers: the slow one's would never count.

    Args:
        limit: *R* in versions; 2 to 4 times the number of workers is a start, infinity drops nothing.

    Example:
        >>> DropStale(4).weigh(Push(staleness=4)) is None
        True
    """

    limit: float = math.inf

    def __post_init__(self) -> None:
        at_least("DropStale(limit)", self.limit, 1)

    def weigh(self, push: Push) -> float | None:
        """See :class:`Transform`."""
        return 1.0 if push.staleness < self.limit else None


@dataclass(frozen=True)
class GapAware(Transform):
    r"""Divide each element by how far the weights have moved under it, in steps [Barkai 2019, algorithm 3].

    .. math::  C = 1 + \frac{|w - w_i|}{\eta\,\sqrt{\mathrm{EMA}(u^2)}}, \qquad u \leftarrow u / C

    with the worker's learning rate :math:`\eta` for gradients, and 1 for differences of weights, which contain it.
    Costs one vector per shard and one per worker.

    Args:
        decay: of the moving average over pushes.

    Departures:
        The paper averages squared momentum and takes the largest learning rate so far; a server of differences knows
        neither, so it averages the pushes, from the first push on without bias.
    """

    decay: float = 0.999
    slots: ClassVar[tuple[str, ...]] = ("square",)
    backup: ClassVar[bool] = True

    def __post_init__(self) -> None:
        between("GapAware(decay)", self.decay, 0, 1)

    def change(self, update: Tensor, weights: Tensor, slots: dict[str, Tensor], push: Push) -> None:
        """See :class:`Transform`."""
        square, now = slots["square"], update * update
        square.copy_(torch.where(square == 0, now, torch.lerp(now, square, self.decay)))
        step = square.sqrt().mul_(push.lr if push.payload is Payload.GRADIENT and push.lr > 0 else 1.0)
        gap = (weights - slots["backup"]).abs_()
        update.div_(torch.where(step > 0, gap / step, torch.zeros_like(gap)).add_(1.0))


@dataclass(frozen=True)
class DelayCompensation(Transform):
    r"""Correct a stale gradient by a diagonal second-order term: DC-ASGD [Zheng 2017, eq. 10 and 14].

    .. math::  g \leftarrow g + \lambda\, g \odot g \odot (w - w_i)

    Constant :math:`\lambda` is DC-ASGD-c; DC-ASGD-a divides :math:`\lambda` by
    :math:`\sqrt{\mathrm{MS} + 10^{-7}}`, MS being a moving average of :math:`g \odot g`. Of several steps in one push
    the mean gradient is taken as *g*. Costs one vector per worker, and one per shard if adaptive.

    Args:
        strength: :math:`\lambda`; the papers' 0.04, or 2 if adaptive. 0 changes nothing.
        adaptive: whether this is DC-ASGD-a.
        decay: of MS.
    """

    strength: float = 0.04
    adaptive: bool = False
    decay: float = 0.95
    slots: ClassVar[tuple[str, ...]] = ("square",)
    backup: ClassVar[bool] = True
    payloads: ClassVar[tuple[Payload, ...]] = (Payload.GRADIENT,)

    def __post_init__(self) -> None:
        at_least("DelayCompensation(strength)", self.strength, 0)
        between("DelayCompensation(decay)", self.decay, 0, 1)

    def change(self, update: Tensor, weights: Tensor, slots: dict[str, Tensor], push: Push) -> None:
        """See :class:`Transform`."""
        gradient = update / push.steps
        square = gradient * gradient
        strength: Tensor | float = self.strength
        if self.adaptive:
            mean = slots["square"].mul_(self.decay).add_(square, alpha=1 - self.decay)
            strength = self.strength / (mean + 1e-7).sqrt()
        update.add_(square.mul_(weights - slots["backup"]).mul_(strength), alpha=push.steps)


@dataclass(frozen=True)
class SoftSync(Transform):
    """Apply the mean of every ``floor(N / splits)`` pushes: n-softsync [Zhang 2016, eq. 3]. No worker waits.

    ``splits=1`` is loosely synchronous, ``splits=N`` plain asynchronous. The paper's learning rate is
    :class:`StalenessAware`, passed together with it.

    Args:
        splits: the paper's *n*: updates per round of N pushes.
    """

    splits: int = 1
    gathers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least("SoftSync(splits)", self.splits, 1)

    def ready(self, table: Table) -> bool:
        """See :class:`Transform`."""
        return table.count >= max(1, len(table.living) // self.splits)


@dataclass(frozen=True)
class Rennala(Transform):
    """Apply the mean of every ``batch`` pushes that were computed at the present weights; drop others [Tyurin 2023].

    Args:
        batch: number of pushes to one update, from any workers.
    """

    batch: int = 4
    gathers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least("Rennala(batch)", self.batch, 1)

    def weigh(self, push: Push) -> float | None:
        """See :class:`Transform`."""
        return 1.0 if push.staleness == 0 else None

    def ready(self, table: Table) -> bool:
        """See :class:`Transform`."""
        return table.count >= self.batch


@dataclass(frozen=True)
class StaleSynchronous(Transform):
    """A worker waits if it is more than ``bound`` exchanges ahead of the slowest worker that trains: SSP [Ho 2013].

    A worker's clock is the number of its pushes since the last sync point; no worker gets more than ``bound + 1``
    ahead. ``bound=0`` is bulk synchronous.

    Args:
        bound: the paper's *s*.
    """

    bound: int = 4
    waits: ClassVar[bool] = True
    payloads: ClassVar[tuple[Payload, ...]] = tuple(Payload)

    def __post_init__(self) -> None:
        at_least("StaleSynchronous(bound)", self.bound, 0)

    def holds(self, worker: int, table: Table) -> bool:
        """See :class:`Transform`."""
        limit = table.clocks[worker] - self.bound
        return any(table.clocks[each] < limit for each in table.living if each not in table.resting)


@dataclass(frozen=True)
class DynamicSteps(Transform):
    """Let slow workers take fewer steps between exchanges, in proportion to their speed: DyLU [Liu 2024, section 5].

    All exchange about equally often then, so that a slow worker's push is not staler than the others'.

    Args:
        least: the fewest steps that a worker takes.
    """

    least: int = 1
    payloads: ClassVar[tuple[Payload, ...]] = tuple(Payload)

    def __post_init__(self) -> None:
        at_least("DynamicSteps(least)", self.least, 1)

    def period(self, worker: int, table: Table, nsync: int) -> int:
        """See :class:`Transform`."""
        speed = table.speeds.get(worker, 0.0)
        top = max([speed, *(table.speeds.get(w, 0.0) for w in table.living)])
        return max(min(self.least, nsync), int(nsync * speed / top)) if speed > 0 else nsync
