"""Snapshots that an earlier version wrote: servers go on from those of their own protocol, and reject others.

tests/data/snapshots-<protocol> stay as they were written. A new PROTOCOL needs new ones, beside the old:
python -m tests.component.test_recorded_snapshots
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_asgd.algorithms import Downpour
from lightning_asgd.core.foundation.errors import SnapshotError
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.protocol.lease import Epoch, OpenEpoch
from lightning_asgd.core.protocol.session import PROTOCOL, Attach, Join, Policy, RunMetadata
from lightning_asgd.core.protocol.update import Exchange, InitShard
from lightning_asgd.core.server.service import Service
from lightning_asgd.recovery.server import recovery_of
from lightning_asgd.recovery.snapshot_store import Snapshots
from tests.helpers.cluster import summary

DATA = Path(__file__).parent.parent / "data"
CURRENT = DATA / f"snapshots-{PROTOCOL}"
OLD = sorted(folder for folder in DATA.glob("snapshots-*") if folder != CURRENT)

RUN, SERVERS = "recorded", 2
GROUPS = ((Role.PARAMETER, "float32", 3), (Role.PARAMETER, "float64", 1))
ALGORITHM = Downpour("adam", lr=0.25, scale="sum")  # it keeps an optimizer on the servers


def push(service: Service, worker: int, seq: int) -> list[list[float]]:
    update = (torch.tensor([1.0, -2.0, 1.0 / seq]), torch.tensor([7.0 * seq], dtype=torch.float64))
    reply = service.handle(Exchange(RUN, worker, seq, 0, True, True, update, lr=0.1))
    return [group.tolist() for group in reply.weights]


def served(server: int) -> Service:
    """A server of a run with one worker, which has pushed three times and noted something."""
    service = Service(lambda: 0.0, run=RUN)
    if server == 0:
        service.handle(Attach(RUN, "here", Policy(10.0)))
        service.handle(RunMetadata(RUN, 1, "layout", "x"))
    else:
        service.handle(Join(RUN, 1, 0, server=server))
    service.handle(
        InitShard(RUN, 1, GROUPS, ALGORITHM, (torch.tensor([0.5, 0.0, -1.0]), torch.tensor([3.0], dtype=torch.float64)))
    )
    if server == 0:
        service.handle(RunMetadata(RUN, 1, "founded", True))
        service.handle(OpenEpoch(RUN, 1, Epoch(f"{RUN}/0", 12, (12,))))
    for seq in (1, 2, 3):
        push(service, 1, seq)
    return service


def come(service: Service, server: int) -> int:
    """Enter, as a worker that the server does not know. Returns its number."""
    worker = 9
    if server == 0:
        worker = service.handle(Attach(RUN, "there", Policy(10.0))).worker
    else:
        service.handle(Join(RUN, worker, 0, server=server))
    service.handle(InitShard(RUN, worker, GROUPS, ALGORITHM))
    return worker


def test_there_are_snapshots_of_this_protocol() -> None:
    assert Snapshots(CURRENT).check(RUN, SERVERS) == 3, "python -m tests.component.test_recorded_snapshots"


@pytest.mark.parametrize("server", range(SERVERS))
def test_servers_go_on_from_them_as_if_they_had_never_stopped(server: int) -> None:
    never = served(server)
    after = Service(lambda: 0.0, run=RUN)
    recovery_of(after).remembered = Snapshots(CURRENT).read
    assert recovery_of(after).restore_snapshot(server)
    ends = [push(service, come(service, server), 4) for service in (never, after)]
    assert ends[0] == ends[1]
    assert summary(after)["version"] == 4


def test_notes_and_numbers_of_workers_are_remembered() -> None:
    after = Service(lambda: 0.0, run=RUN)
    recovery_of(after).remembered = Snapshots(CURRENT).read
    recovery_of(after).restore_snapshot(0)
    attached = after.handle(Attach(RUN, "there", Policy(10.0)))
    assert attached.notes == {"layout": "x", "founded": True}
    assert attached.worker > 1


@pytest.mark.parametrize("folder", OLD, ids=lambda folder: folder.name)
def test_snapshots_of_another_protocol_are_refused_by_name(folder: Path) -> None:
    written = folder.name.rpartition("-")[2]
    with pytest.raises(SnapshotError, match=rf"with protocol {written} of lightning-asgd. Expected {PROTOCOL}:"):
        Snapshots(folder).check(RUN, SERVERS)


if __name__ == "__main__":
    for server in range(SERVERS):
        snapshot = recovery_of(served(server)).snapshot()
        assert snapshot is not None
        Snapshots(CURRENT).write(snapshot)
