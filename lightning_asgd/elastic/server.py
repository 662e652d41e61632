"""What `lightning-asgd status` shows of a session."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from lightning_asgd.core.leases.table import Leases
from lightning_asgd.core.protocol import UNKNOWN
from lightning_asgd.core.server.feature import ServerFeature
from lightning_asgd.core.server.membership import Membership
from lightning_asgd.core.server.shard import Shard
from lightning_asgd.elastic.messages import Status, WorkerStatus

_EVENTS = 8


def _is_endless(leases: Leases) -> bool:
    """Whether the number of steps of an epoch is not known before its end: a shard has an unknown length."""
    ends = (0, *leases.epoch.shards)
    return any(last - first >= UNKNOWN for first, last in pairwise(ends))


def view(members: Membership, shard: Shard | None, leases: Leases | None, now: float) -> Status:
    """What server 0 knows of a session: its members, its first fragment, and the data of the latest epoch."""
    workers = [
        WorkerStatus(
            worker,
            members.descriptions.get(worker, ""),
            members.suspected.get(worker, ""),
            members.silent_s(worker, now),
            *(leases.worker(worker) if leases is not None else (0.0, 0)),
            members.metrics.get(worker),
        )
        for worker in sorted(members.living | members.expected_back | members.catching_up)
    ]
    return Status(
        members.session,
        shard.version if shard is not None else 0,
        shard.counts.refused if shard is not None else 0,
        members.chief if workers else None,
        None if leases is None else leases.epoch.number,
        0 if leases is None else -(-sum(last - first for first, last in leases.finished) // leases.epoch.step),
        0 if leases is None or _is_endless(leases) else -(-leases.epoch.units // leases.epoch.step),
        tuple(workers),
        tuple(members.events[-_EVENTS:]),
    )


class StatusReports(ServerFeature):
    """Answers `lightning-asgd status`, also if there is no session."""

    observes = True

    def handle(self, message: Any) -> Status:
        """See :class:`ServerFeature`."""
        server, state = self._server, self._server.state
        status, session = Status(state.registry.name), state.session
        if session is not None:
            status = view(session.members, session.shards.get(0), state.epochs.latest, server.clock())
        return replace(status, snapshot=server.snapshot_report())
