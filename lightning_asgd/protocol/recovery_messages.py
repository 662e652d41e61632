"""How a server that was lost is restored from what workers know of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_asgd.protocol.lease_messages import LeaseHoldings
from lightning_asgd.protocol.request import Request

__all__ = ["ReplayDone", "ReplicaState", "StateReport"]


@dataclass(frozen=True)
class ReplicaState:
    """What a worker has of a shard whose server was lost."""

    fragment: int  # number of the part of the module
    version: int  # of the weights
    weights: tuple[Tensor, ...]  # as they were fetched last, one tensor per group
    pushes: dict[int, int]  # see `Reply`
    epoch: str = ""  # the epoch that `done` is about
    done: tuple[tuple[int, int], ...] = ()  # see `Reply`


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


@dataclass(frozen=True)
class ReplayDone(Request):
    """A worker has sent again what the weights do not hold. Answered when all have."""
