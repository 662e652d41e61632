"""What somebody who looks at a run is shown of it."""

from __future__ import annotations

from lightning_asgd.protocol import Status, WorkerStatus
from lightning_asgd.server.coordinator import Coordinator
from lightning_asgd.server.lease_table import Leases
from lightning_asgd.server.shard import Shard

__all__ = ["view"]

_NEWS = 8


def view(coordinator: Coordinator, shard: Shard | None, leases: Leases | None, now: float) -> Status:
    """What the first server knows of a session.

    Args:
        coordinator: its members.
        shard: the first fragment, once it is laid out.
        leases: the data of the latest epoch, once there is one.
        now: seconds, on the clock by which the coordinator hears from its workers.
    """
    workers = [
        WorkerStatus(
            worker,
            coordinator.about.get(worker, ""),
            coordinator.away.get(worker, ""),
            coordinator.silent_s(worker, now),
            *(leases.worker(worker) if leases is not None else (0.0, 0)),
            coordinator.figures.get(worker),
        )
        for worker in sorted(coordinator.living | coordinator.expected_back | coordinator.behind)
    ]
    return Status(
        coordinator.session,
        shard.version if shard is not None else 0,
        shard.counts.refused if shard is not None else 0,
        coordinator.chief if workers else None,
        None if leases is None else leases.epoch.number,
        0 if leases is None else -(-sum(last - first for first, last in leases.finished) // leases.epoch.step),
        0 if leases is None else -(-leases.epoch.units // leases.epoch.step),
        tuple(workers),
        tuple(coordinator.news[-_NEWS:]),
    )
