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
    """What a worker has of a shard whose server was lost.

    Attributes:
        fragment: number of the part of the module.
        version: of the weights.
        weights: as they were fetched last, one tensor per group.
        pushes: see :class:`Reply`.
        epoch: the epoch that ``done`` is about.
        done: see :class:`Reply`.
    """

    fragment: int
    version: int
    weights: tuple[Tensor, ...]
    pushes: dict[int, int]
    epoch: str = ""
    done: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class StateReport(Request):
    """What a worker knows of a lost server, for the replacement. Answered when all workers have reported.

    Attributes:
        shards: the worker's copies, per fragment.
        answered: number of its latest collective that was answered.
        part: of the present epoch, if there is one.
        incarnation: how often the lost server had declared this worker away when it joined last.
        incarnations: see :class:`Reply`, as far as this worker knows.
        left: likewise.
        notes: the last of every :class:`RunMetadata` that it knows, for the coordinator.
    """

    shards: tuple[ReplicaState, ...]
    answered: int = 0
    part: LeaseHoldings | None = None
    incarnation: int = 0
    incarnations: dict[int, int] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplayDone(Request):
    """A worker has sent again what the weights do not hold. Answered when all have."""
