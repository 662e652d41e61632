"""A lease request that was sent, until its answer is taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.futures import Future

from lightning_asgd.core.protocol import LeaseGrant
from lightning_asgd.core.worker.connection import COORDINATOR
from lightning_asgd.core.worker.session_client import SessionClient


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

    def grant(self) -> LeaseGrant:
        """Wait for the answer; after a time-out nothing is granted, and the segment counts as over."""
        connection = self.client.connection
        if self.timeout_s is not None and not connection.wait(self.future, self.timeout_s):
            return LeaseGrant(over=True)
        grant: LeaseGrant = connection.result(COORDINATOR, self.future)
        members = self.client.members[COORDINATOR]
        members.incarnations |= grant.incarnations
        members.left = dict(grant.left)
        return grant
