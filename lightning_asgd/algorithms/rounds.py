"""Transforms that make workers wait for each other: for algorithms with rounds, and for a warm start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_asgd.core.algorithms.base import Payload, Push, Table, Transform
from lightning_asgd.core.foundation.validation import at_least

__all__ = ["Barrier", "WarmStart"]


@dataclass(frozen=True)
class Barrier(Transform):
    """Block all replies until every worker that trains has pushed, then apply the mean of the pushes as one update.

    No worker waits for workers that have left or are at a sync point.
    """

    gathers: ClassVar[bool] = True
    waits: ClassVar[bool] = True

    def ready(self, table: Table) -> bool:
        """See :class:`Transform`."""
        return table.active <= table.gathered

    def holds(self, worker: int, table: Table) -> bool:
        """See :class:`Transform`."""
        return worker in table.gathered


@dataclass(frozen=True)
class WarmStart(Transform):
    """Let worker 0 train alone at first; then the others start, with pushes that grow to their full weight.

    With a cold start more workers make the first part of training slower, since early gradients disagree (Paine et al.
    2013, section 4; Dean et al. 2012, section 4.1). The others wait before their first batch until worker 0 has taken
    ``steps`` steps, or is at a sync point, so one epoch of worker 0's is the longest warm start; to start from a
    longer single run, give its checkpoint to ``fit`` and ``WarmStart(0)`` for the ramp alone.

    Args:
        steps: optimizer steps that worker 0 takes alone.
        ramp: pushes over which a later worker's weight grows to 1, in equal parts.

    Example:
        >>> [WarmStart(100, ramp=3).weigh(Push(worker=1, seq=seq)) for seq in (1, 2, 3, 4)]
        [0.25, 0.5, 0.75, 1.0]
    """

    steps: int = 500
    ramp: int = 5
    waits: ClassVar[bool] = True
    holds_at_start: ClassVar[bool] = True
    payloads: ClassVar[tuple[Payload, ...]] = (Payload.DELTA, Payload.GRADIENT)

    def __post_init__(self) -> None:
        at_least("WarmStart(steps)", self.steps, 0)
        at_least("WarmStart(ramp)", self.ramp, 0)

    def weigh(self, push: Push) -> float:
        """See :class:`Transform`."""
        return 1.0 if push.worker == 0 else min(1.0, push.seq / (self.ramp + 1))

    def holds(self, worker: int, table: Table) -> bool:
        """See :class:`Transform`."""
        return worker != 0 and 0 in table.active and table.steps[0] < self.steps
