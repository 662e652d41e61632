r"""DiLoCo: many local steps, and an outer optimizer with Nesterov momentum on the servers.

With :math:`D = w - x_i`, the *pseudo-gradient* of a worker, or the mean of all workers':

.. math::  m \leftarrow B m + D, \qquad w \leftarrow w - \epsilon\,(D + B m)

*B* is capped by default: 0.9 after long periods, and less after short ones. After those, successive pseudo-gradients
are so similar that a momentum of 0.9 would make every step ten times as long.

References:
    A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105,
    algorithm 1: outer learning rate 0.7, momentum 0.9, 500 steps.
    B. Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135, algorithm 3 (Delayed
    Nesterov); its DyLU is :class:`DynamicSteps`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_asgd.algorithms.outer_momentum import OuterMomentum
from lightning_asgd.algorithms.rounds import Barrier
from lightning_asgd.core.algorithms.asgd import factor
from lightning_asgd.core.algorithms.base import Push, Run, Transform
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import between, whole

__all__ = ["DelayedNesterov", "DiLoCo", "StreamingDiLoCo"]


@dataclass(frozen=True)
class DiLoCo(OuterMomentum):
    """All workers push after ``nsync`` steps; the servers take one Nesterov step along the mean.

    Args:
        lr: the outer learning rate.
        momentum: the outer momentum *B*, or ``"capped"``. 0 with ``lr=1`` is :class:`LocalSGD`; the paper has 0.9.

    State:
        ``momentum``, one vector per shard. The workers' own optimizers keep theirs.

    Staleness:
        always 0: workers wait for each other.
    """

    overlap: ClassVar[bool] = False
    always: ClassVar[tuple[Transform, ...]] = (Barrier(),)

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """See :class:`Algorithm`; ``update`` is -D."""
        self.step(weights, update.mul_(factor("mean", push)), slots, push)


@dataclass(frozen=True)
class InFragments(DiLoCo):
    """DiLoCo that exchanges a part of the module at a time.

    Args:
        parts: fragments of the module, of nearly equal sizes.
        alpha: the part of its own weights that a worker keeps when it mixes in a reply.
    """

    parts: int = 4
    alpha: float = 0.5

    overlap: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(f"{type(self).__name__}(parts)", self.parts, 1, 1024)
        between(f"{type(self).__name__}(alpha)", self.alpha, 0, 1)

    @property
    def fragments(self) -> int:
        """See :class:`Algorithm`."""
        return self.parts

    @property
    def mix(self) -> float | None:
        """See :class:`Algorithm`."""
        return self.alpha


@dataclass(frozen=True)
class StreamingDiLoCo(InFragments):
    r"""DiLoCo in fragments: exchanges a part of the module at a time, while training continues.

    Fragment *p* of *P* is exchanged every ``nsync`` steps, ``nsync / P`` steps after fragment *p* - 1, so the link
    carries 1/P as much at a time. The reply arrives some steps later, and is mixed into the worker's weights,

    .. math::  x \leftarrow \alpha x + (1 - \alpha) w

    Args:
        lr: see :class:`DiLoCo`.
        momentum: see :class:`DiLoCo`.
        parts: *P*. The largest parameters are assigned first, each to the fragment that is the smallest then.
        alpha: :math:`\alpha`, the part of its own weights that a worker keeps.
        delay: steps after a push before which its reply is not merged. Where the period is shorter, as it may become
            with :class:`DynamicSteps` or ``nsync="auto"``, a reply is merged before the next push.

    References:
        A. Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, algorithm 2.

    Departures:
        The paper merges a reply after a fixed number of steps, and waits for one that is late. Here a worker merges it
        once it has arrived and ``delay`` steps have passed: while it waited, it would not push its next fragment, for
        which other workers may be waiting. The paper's fragments consist of layers at equal distances, and these of
        single parameters, since layers differ in size. Updates are quantised only if ``compression="4bit"`` is given.
    """

    delay: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("StreamingDiLoCo(delay)", self.delay, 0)

    def check(self, run: Run) -> None:
        """See :class:`Algorithm`."""
        super().check(run)
        if self.delay and self.delay >= run.nsync:
            raise ConfigurationError(
                f"StreamingDiLoCo(delay={self.delay}) was given with nsync={run.nsync}. Expected a delay below nsync: "
                "a fragment's reply is merged before its next exchange."
            )

    @property
    def merge_after(self) -> int:
        """See :class:`Algorithm`."""
        return self.delay


@dataclass(frozen=True)
class DelayedNesterov(OuterMomentum):
    r"""Asynchronous DiLoCo: every push moves the weights at once, the momentum only after every ``buffer`` pushes.

    .. math::

        S &\leftarrow S + D\\
        \text{every } K\text{-th push: } m &\leftarrow B m + S/K, \quad
        w \leftarrow w - \epsilon\,((1 - cK + c) B m + D/K), \quad S \leftarrow 0\\
        \text{else: } w &\leftarrow w - \epsilon\,(c B m + D/K)

    Args:
        lr: the outer learning rate :math:`\epsilon`.
        momentum: the outer momentum *B*, or ``"capped"``; the paper has 0.9.
        buffer: *K*; None for the number of workers.
        spread: *c* in [0, 1/K]: how much of the momentum is given to the pushes in between.

    State:
        ``momentum`` and ``sum``, two vectors per shard, and the number of pushes in the sum.

    Staleness:
        of a push is ignored; the momentum is the mean of K pushes, which a stale one cannot turn.
    """

    buffer: int | None = None
    spread: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer is not None:
            whole("DelayedNesterov(buffer)", self.buffer, 1)
        between("DelayedNesterov(spread)", self.spread, 0, 1 if self.buffer is None else 1 / self.buffer)

    def start(self, weights: Tensor) -> dict[str, Any]:
        """See :class:`Algorithm`."""
        number = torch.zeros((), dtype=torch.float64)
        return {**super().start(weights), "sum": torch.zeros_like(weights), "pushes": number}

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """See :class:`Algorithm`; ``update`` is -D."""
        size = self.buffer or push.live
        spread = min(self.spread, 1 / size)
        momentum, total, pushes = slots["momentum"], slots["sum"], slots["pushes"]
        total.add_(update.mul_(push.weight))
        pushes.add_(1)
        part = float(slots["factor"])
        if pushes >= size:  # more if workers have left since
            part = self.next_factor(slots, total.div_(float(pushes)), push)
            momentum.mul_(part).add_(total)
            total.zero_()
            pushes.zero_()
            spread = 1 - spread * size + spread
        weights.add_(update.div_(size).add_(momentum, alpha=spread * part), alpha=self.lr)
