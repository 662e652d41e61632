"""How a server that was lost is restored from what workers know of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from lightning_asgd.core.foundation.ranges import are_in_order
from lightning_asgd.core.protocol.lease import LeaseHoldings, is_key
from lightning_asgd.core.protocol.request import Fragment, Request, publish_path

__all__ = ["ReplayDone", "ReplicaState", "StateReport"]


@dataclass(frozen=True)
class ReplicaState:
    """What a worker has of a shard whose server was lost."""

    expected: ClassVar[str] = "ranges in order, of an epoch whose key has a slash and a number at its end"

    fragment: Fragment  # number of the part of the module
    version: int  # of the weights
    # As they were fetched last, one tensor per group; None if the processes of an island have brought them: `InitPart`.
    weights: tuple[Tensor, ...] | None
    pushes: dict[int, int]  # see `Reply`
    epoch: str = ""  # the epoch that `done` is about
    done: tuple[tuple[int, int], ...] = ()  # see `Reply`

    @property
    def can_be(self) -> bool:
        """Whether any epoch has such units."""
        return are_in_order(self.done, math.inf) and (not self.epoch or is_key(self.epoch))


@dataclass(frozen=True)
class StateReport(Request):
    """What a worker knows of a lost server, for the replacement. Answered when all workers have reported."""

    shards: tuple[ReplicaState, ...]  # the worker's copies, per fragment
    answered: int = 0  # number of its latest collective that was answered
    part: LeaseHoldings | None = None  # of the present epoch, if there is one
    incarnation: int = 0  # how often the lost server had declared this worker away when it joined last
    incarnations: dict[int, int] = field(default_factory=dict)  # see `Reply`, as far as this worker knows
    left: dict[int, str] = field(default_factory=dict)  # likewise
    # The last of every `RunMetadata` that it knows, for the coordinator.
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def in_parts(self) -> bool:
        """Whether the processes of an island have brought the weights: see `InitPart`."""
        return any(held.weights is None for held in self.shards)


@dataclass(frozen=True)
class ReplayDone(Request):
    """A worker has sent again what the weights do not hold. Answered when all have."""


publish_path(globals())
