"""A lease request that was sent, until its answer is taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.futures import Future

from lightning_asgd.worker.session_client import SessionClient

__all__ = ["Asked"]


@dataclass
class Asked:
    """A lease request in flight."""

    future: Future[Any]
    trained: int
    begun: float
    timeout_s: float | None
    stop: bool
    halt: bool
    client: SessionClient  # it was sent over: a new layout brings another one
    restored: int  # how often the coordinator had been restored
    ended: tuple[int, ...]  # the ends of shards that it reported
    answered: list[float] = field(default_factory=list)
