"""Servers that write down what they know, and others that go on from it."""

from __future__ import annotations

import copy
import os
import pickle
import socket
import subprocess
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.futures import Future

from lightning_asgd.algorithms import (
    ASGD,
    EASGD,
    SGMCMC,
    Algorithm,
    DelayedNesterov,
    Downpour,
    GapAware,
    Rennala,
    ScaleByStaleness,
)
from lightning_asgd.core.foundation.errors import SnapshotError
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.foundation.stats import Verdict
from lightning_asgd.core.protocol.lease import Epoch, LeaseRequest, OpenEpoch
from lightning_asgd.core.protocol.session import Attach, Failure, Heartbeat, Join, Leave, Policy, RunMetadata
from lightning_asgd.core.protocol.update import Exchange, InitShard
from lightning_asgd.core.server.service import Service
from lightning_asgd.elastic.messages import StatusRequest
from lightning_asgd.recovery.messages import ReplicaState, StateReport
from lightning_asgd.recovery.server import recovery_of
from lightning_asgd.recovery.snapshot_store import Snapshot, Snapshots, SnapshotWriter
from tests.component.test_membership import UNITS as UNITS_OF_WORLD
from tests.component.test_runs import EPOCHS, GROUPS, Clock, RunWorld, come
from tests.helpers.cluster import summary

UNITS = 12


def founded(algorithm: Algorithm | None = None) -> Service:
    """A run with one worker, number 1."""
    service = Service(Clock(), run="s")
    come(service)
    service.handle(RunMetadata("s", 1, "layout", "x"))
    service.handle(InitShard("s", 1, GROUPS, algorithm or ASGD("sum"), (torch.zeros(3),)))
    service.handle(RunMetadata("s", 1, "founded", True))
    return service


def push(service: Service, worker: int, seq: int, value: float, **about: Any) -> Any:
    update = (torch.tensor([value, -value, 1.0]),)
    return service.handle(Exchange("s", worker, seq, 0, True, True, update, lr=0.1, **about))


def fetch(service: Service, worker: int) -> torch.Tensor:
    answer = service.handle(Exchange("s", worker, 0, 0, False, True))
    assert not isinstance(answer, Failure), answer
    weights: torch.Tensor = answer.weights[0]
    return weights


def written(service: Service, folder: Path) -> Snapshots:
    snapshots = Snapshots(folder)
    snapshot = recovery_of(service).snapshot()
    assert snapshot is not None
    snapshots.write(snapshot)
    return snapshots


def remembering(read: Callable[[int], Snapshot | None], clock: Callable[[], float], **options: bool) -> Service:
    service = Service(clock, run="s", **options)
    recovery_of(service).remembered = read
    return service


def revived(snapshots: Snapshots, server: int = 0, clock: Callable[[], float] | None = None) -> Service:
    service = remembering(snapshots.read, clock or Clock())
    assert recovery_of(service).restore_snapshot(server)
    return service


def test_a_run_goes_on_where_the_snapshot_was_taken(tmp_path: Path) -> None:
    before = founded()
    come(before)
    push(before, 1, 1, 2.0)
    snapshots = written(before, tmp_path)
    push(before, 2, 1, 32.0)  # is lost
    after = revived(snapshots)
    attached = come(after)
    assert attached.worker > 2  # those who had numbers might think that they are still in
    assert not attached.bootstraps
    assert attached.chief == attached.worker
    assert attached.notes == {"layout": "x", "founded": True}
    after.handle(InitShard("s", attached.worker, GROUPS, ASGD("sum")))
    assert fetch(after, attached.worker).tolist() == [2.0, -2.0, 1.0]
    view = after.handle(StatusRequest())
    assert (view.session, view.version) == ("s", 1)
    assert "Server 0 continues from its snapshot, version 1." in view.news
    push(after, attached.worker, 1, 1.0)
    assert fetch(after, attached.worker).tolist() == [3.0, -3.0, 2.0]


@pytest.mark.parametrize(
    "algorithm",
    [
        ASGD("mean", transforms=(ScaleByStaleness(), GapAware())),
        ASGD("sum", transforms=(Rennala(3),)),
        DelayedNesterov(),
        Downpour("adam"),
        Downpour("adagrad", lr=0.5),
        EASGD(),
        SGMCMC(burn_in=0, thin=2, max_samples=3),
    ],
    ids=repr,
)
def test_what_an_algorithm_keeps_on_the_servers_is_in_it(tmp_path: Path, algorithm: Algorithm) -> None:
    before = founded(algorithm)
    for seq in range(1, 6):
        push(before, 1, seq, 1.0 / seq)
    before.handle(Leave("s", 1))
    after = revived(written(before, tmp_path))
    ends = []
    for service in (before, after):
        worker = come(service).worker
        service.handle(InitShard("s", worker, GROUPS, algorithm))
        torch.manual_seed(0)
        for seq in range(1, 6):
            push(service, worker, seq, 1.0 / (5 + seq))
        ends.append((fetch(service, worker), summary(service)["version"], service.session.shards[0].samples))
    (weights, version, samples), (same, again, kept) = ends
    assert torch.equal(weights, same)
    assert version == again
    assert [v for v, _ in samples] == [v for v, _ in kept]


def train(service: Service, worker: int, units: int) -> int:
    """Train so many units of an epoch with updates that count them, or as many as are left."""
    service.handle(OpenEpoch("s", worker, Epoch("s/0", UNITS, (UNITS,))))
    done = 0
    while done < units:
        answer = service.handle(LeaseRequest("s", worker, "s/0", 0, done, done, 0.1, wait=False))
        while isinstance(answer, Future):
            answer = answer.value()
        if answer.over or not answer.ranges:
            break
        ((first, last),) = answer.ranges
        for unit in range(first, min(last, first + units - done)):
            done += 1
            update = torch.zeros(UNITS)
            update[unit] = 1.0
            service.handle(Exchange("s", worker, done, 0, True, True, (update,), epoch="s/0", units=done))
    return done


@given(first=st.integers(0, UNITS - 1), lost=st.integers(0, UNITS))
@settings(max_examples=40, deadline=None)
def test_the_units_of_an_epoch_are_done_if_their_updates_are_in_the_weights(first: int, lost: int) -> None:
    groups = ((Role.PARAMETER, "float32", UNITS),)
    service = Service(Clock(), run="s")
    come(service)
    service.handle(InitShard("s", 1, groups, ASGD("sum"), (torch.zeros(UNITS),)))
    service.handle(RunMetadata("s", 1, "founded", True))
    assert train(service, 1, first) == first
    snapshot = recovery_of(service).snapshot()
    worker = come(service).worker
    train(service, worker, lost)
    after = remembering(lambda server: snapshot, Clock())
    recovery_of(after).restore_snapshot(0)
    worker = come(after).worker
    after.handle(InitShard("s", worker, groups, ASGD("sum")))
    train(after, worker, UNITS)
    assert fetch(after, worker).tolist() == [1.0] * UNITS


def test_a_job_that_is_no_run_is_written_down_too() -> None:
    service = Service(Clock())
    service.handle(Join("1.1", 0, 1))
    service.handle(InitShard("1.1", 0, GROUPS, Downpour("adam"), (torch.zeros(3),)))
    snapshot = recovery_of(service).snapshot()
    assert snapshot is not None
    assert snapshot.run == "1.1"


def test_nothing_is_written_before_the_run_has_weights_or_if_nothing_has_happened() -> None:
    service = Service(Clock(), run="s")
    assert recovery_of(service).snapshot() is None
    come(service)
    service.handle(InitShard("s", 1, GROUPS, ASGD("sum"), (torch.zeros(3),)))
    assert recovery_of(service).snapshot() is None
    service.handle(RunMetadata("s", 1, "founded", True))
    assert recovery_of(service).snapshot() is not None
    service.handle(StatusRequest())
    assert recovery_of(service).snapshot() is None
    push(service, 1, 1, 1.0)
    assert recovery_of(service).snapshot() is not None


def test_a_server_in_a_lost_ones_place_takes_the_snapshot_if_nobody_tells_it_more(tmp_path: Path) -> None:
    before = founded()
    push(before, 1, 1, 2.0)
    snapshots = written(before, tmp_path)
    clock = Clock()
    after = remembering(snapshots.read, clock, succeeds=True)
    waiting = after.handle(Attach("s", "here", Policy(100.0)))
    after.tick()
    assert not waiting.done()
    clock.now = 119.0  # workers might give signs of life every 20 s
    after.tick()
    assert not waiting.done()
    clock.now = 121.0
    after.tick()
    worker = waiting.value().worker
    after.handle(InitShard("s", worker, GROUPS, ASGD("sum")))
    assert fetch(after, worker).tolist() == [2.0, -2.0, 1.0]


def test_a_server_in_a_lost_ones_place_has_the_weights_from_workers_and_its_optimizer_from_the_snapshot(
    tmp_path: Path,
) -> None:
    algorithm = Downpour("adam")
    before = founded(algorithm)
    push(before, 1, 1, 2.0)
    snapshots = written(before, tmp_path)
    seen = push(before, 1, 2, 3.0)
    after = remembering(snapshots.read, Clock(), succeeds=True)
    after.handle(Join("s", 1, 0, restore=True))
    after.handle(InitShard("s", 1, GROUPS, algorithm))
    held = ReplicaState(0, seen.version, seen.weights, seen.pushes)
    assert after.handle(StateReport("s", 1, (held,), notes={"founded": True})) is None
    assert torch.equal(fetch(after, 1), seen.weights[0])
    assert summary(after)["version"] == 2
    shard = after.session.shards[0]
    (state,) = [group["slots"]["optimizer"]["state"][0] for group in shard.state()]
    assert state["step"] == 1.0  # that of the snapshot
    assert push(after, 1, 2, 3.0).verdict is Verdict.REPEATED
    push(after, 1, 3, 1.0)
    assert shard.state()[0]["slots"]["optimizer"]["state"][0]["step"] == 2.0


def test_a_server_in_a_lost_ones_place_serves_the_next_session_too() -> None:
    seen = push(founded(), 1, 1, 2.0)
    after = Service(Clock(), succeeds=True)
    after.handle(Join("1.1", 0, 1, restore=True))
    after.handle(InitShard("1.1", 0, GROUPS, ASGD("sum")))
    after.handle(StateReport("1.1", 0, (ReplicaState(0, seen.version, seen.weights, {0: 1}),)))
    for session in ("1.2", "1.3"):
        after.handle(Join(session, 0, 1))
        after.handle(InitShard(session, 0, GROUPS, ASGD("sum"), (torch.ones(3),)))
        answer = after.handle(Exchange(session, 0, 0, 0, False, True))
        assert not isinstance(answer, Future)
        assert answer.weights[0].tolist() == [1.0, 1.0, 1.0]


def test_without_a_snapshot_people_are_told_that_an_optimizer_begins_anew() -> None:
    seen = push(founded(), 1, 1, 2.0)
    for algorithm, told in ((Downpour("adam"), True), (ASGD("sum"), False)):
        after = Service(Clock(), run="s", succeeds=True)
        after.handle(Join("s", 1, 0, restore=True))
        after.handle(InitShard("s", 1, GROUPS, algorithm))
        after.handle(
            StateReport("s", 1, (ReplicaState(0, seen.version, seen.weights, seen.pushes),), notes={"founded": True})
        )
        assert any("had no snapshot" in news for news in after.handle(StatusRequest()).news) is told


def test_servers_that_are_started_again_take_the_newer_weights_of_workers_that_have_waited(tmp_path: Path) -> None:
    before = founded()
    push(before, 1, 1, 2.0)
    snapshots = written(before, tmp_path)
    seen = push(before, 1, 2, 3.0)
    after = revived(snapshots)
    after.handle(Join("s", 1, 0, restore=True, holding=(1,), admitted=1))
    after.handle(InitShard("s", 1, GROUPS, ASGD("sum")))
    held = ReplicaState(0, seen.version, seen.weights, seen.pushes)
    assert after.handle(StateReport("s", 1, (held,), notes={"founded": True})) is None
    assert fetch(after, 1).tolist() == [5.0, -5.0, 2.0]
    late = revived(snapshots)
    come(late)  # who comes first takes what is there
    late.handle(Join("s", 1, 0, restore=True, holding=(1,), admitted=1))
    assert late.handle(StateReport("s", 1, (held,))).error == "WorkerAwayError"


def test_the_second_server_too(tmp_path: Path) -> None:
    written(founded(), tmp_path)
    second = Service(Clock(), run="s")
    second.handle(Join("s", 1, 0, server=1))
    second.handle(InitShard("s", 1, GROUPS, ASGD("sum"), (torch.zeros(3),)))
    push(second, 1, 1, 4.0)
    snapshots = written(second, tmp_path)
    clock = Clock()
    after = remembering(snapshots.read, clock, succeeds=True)
    after.handle(Join("s", 2, 0, server=1))
    after.handle(InitShard("s", 2, GROUPS, ASGD("sum")))
    waiting = after.handle(Exchange("s", 2, 0, 0, False, True))
    after.tick()
    assert isinstance(waiting, Future)
    assert not waiting.done()
    for clock.now in (10.0, 20.0, 31.0):
        after.handle(Heartbeat("s", 2))  # but has nothing to tell
        after.tick()
    assert waiting.value().weights[0].tolist() == [4.0, -4.0, 1.0]


def test_a_server_that_nobody_has_asked_anything_takes_no_snapshot_of_another_one(tmp_path: Path) -> None:
    snapshots = written(founded(), tmp_path)
    clock = Clock()
    after = remembering(snapshots.read, clock, succeeds=True)
    after.handle(Heartbeat("s", 1))  # of a worker that ends before it joins
    clock.now = 100.0
    after.tick()
    assert summary(after)["session"] is None


def test_a_revived_shard_knows_that_workers_come_and_go(tmp_path: Path) -> None:
    before = founded(ASGD("mean"))
    push(before, 1, 1, 2.0)
    after = revived(written(before, tmp_path))
    worker = come(after).worker
    come(after)  # still sets up
    after.handle(InitShard("s", worker, GROUPS, ASGD("mean")))
    push(after, worker, 1, 2.0)
    assert fetch(after, worker).tolist() == [4.0, -4.0, 2.0]


def test_who_waits_for_servers_that_are_started_again_is_heard_before_newcomers(tmp_path: Path) -> None:
    after = Service(Clock(), run="s")  # without snapshots
    after.handle(Heartbeat("s", 1))
    waiting = after.handle(Attach("s", "there", Policy(10.0)))
    assert isinstance(waiting, Future)
    seen = push(founded(), 1, 1, 2.0)
    after.handle(Join("s", 1, 0, restore=True, holding=(1,), admitted=1))
    after.handle(InitShard("s", 1, GROUPS, ASGD("sum")))
    held = ReplicaState(0, seen.version, seen.weights, seen.pushes)
    assert after.handle(StateReport("s", 1, (held,), notes={"founded": True})) is None
    assert not waiting.value().bootstraps


def test_if_they_never_come_newcomers_begin(tmp_path: Path) -> None:
    clock = Clock()
    after = Service(clock, run="s")
    after.handle(Heartbeat("s", 1))
    waiting = after.handle(Attach("s", "there", Policy(10.0)))
    clock.now = 31.0
    after.tick()
    assert waiting.value().bootstraps


def test_who_comes_after_newcomers_have_begun_anew_is_told(tmp_path: Path) -> None:
    after = Service(Clock(), run="s")
    assert come(after).worker == 1
    failure = after.handle(Join("s", 1, 0, restore=True, holding=(1,), admitted=1))
    assert failure.error == "WorkerLostError"
    assert "started run 's' over" in failure.message


def test_a_founder_that_was_silent_does_not_wipe_what_another_one_has_founded() -> None:
    clock = Clock()
    service = Service(clock, run="s")
    come(service)
    waiting = service.handle(Attach("s", "there", Policy(10.0)))
    clock.now = 11.0
    service.tick()
    worker = waiting.value().worker
    service.handle(InitShard("s", worker, GROUPS, ASGD("sum"), (torch.zeros(3),)))
    service.handle(RunMetadata("s", worker, "founded", True))
    push(service, worker, 1, 5.0)
    failure = service.handle(InitShard("s", 1, GROUPS, ASGD("sum"), (torch.full((3,), 7.0),)))
    assert failure.error == "WorkerLostError"
    assert fetch(service, worker).tolist() == [5.0, -5.0, 1.0]


def test_units_of_an_epoch_that_only_the_lost_had_begun_are_not_trained_again() -> None:
    before = founded()
    before.handle(OpenEpoch("s", 1, Epoch("s/1", 4, (4,))))
    before.handle(LeaseRequest("s", 1, "s/1", 0, 0, 0, 0.1, wait=False))
    seen = push(before, 1, 1, 2.0, epoch="s/1", units=1)
    assert (seen.epoch, seen.done) == ("s/1", ((0, 1),))
    after = Service(Clock(), run="s", succeeds=True)
    after.handle(Join("s", 2, 0, restore=True))
    after.handle(InitShard("s", 2, GROUPS, ASGD("sum")))
    held = ReplicaState(0, seen.version, seen.weights, seen.pushes, seen.epoch, seen.done)
    after.handle(StateReport("s", 2, (held,), notes={"founded": True}))
    assert after.handle(OpenEpoch("s", 2, Epoch("s/1", 4, (4,)))) == ((0, 1),)


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_snapshots_go_on_after_one_could_not_be_taken(tmp_path: Path, kind: type[Exception]) -> None:
    taken, complaints = threading.Event(), list[str]()

    def take() -> Snapshot:
        if not complaints:
            raise kind("not enough memory")
        taken.set()
        return snapshot()

    with SnapshotWriter(take, Snapshots(tmp_path), 0.01, complaints.append, at_end=False):
        assert taken.wait(30)
    (told,) = complaints
    assert told.startswith(f"No snapshot was written to {tmp_path}: not enough memory (")
    assert Snapshots(tmp_path).read(0) is not None


def test_how_old_the_latest_snapshot_is_and_why_there_is_no_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    due: list[Snapshot | None] = [None, snapshot(), None, snapshot(version=4)]
    complaints = list[str]()
    writer = SnapshotWriter(lambda: due.pop(0), Snapshots(tmp_path / "folder"), 60.0, complaints.append)
    reports = []
    for clock.now in (0.0, 60.0, 120.0, 180.0):
        if clock.now == 180.0:
            (tmp_path / "folder").rename(tmp_path / "elsewhere")
            (tmp_path / "folder").write_text("")
        writer.write()
        clock.now += 10.0
        reports.append((writer.report(), bool(writer.error)))
    assert reports[0] == ("No snapshot for 10 s", False)
    assert reports[1] == reports[2] == ("The latest snapshot is 10 s old (version 3, 0.0 MB)", False)  # all there is
    assert reports[3] == ("The latest snapshot is 70 s old (version 3, 0.0 MB)", True)
    (told,) = complaints
    assert "folder: [Errno 17]" in told
    assert told.endswith("The latest snapshot is 60 s old (version 3, 0.0 MB).")


@pytest.mark.parametrize("of", ["workers", "newcomers"])
def test_a_snapshot_that_cannot_be_read_ends_no_worker_that_holds_the_weights(tmp_path: Path, of: str) -> None:
    algorithm, before = Downpour("adam"), founded(Downpour("adam"))
    seen = push(before, 1, 1, 2.0)
    snapshots = written(before, tmp_path)
    snapshots.path(0).write_bytes(b"garbage")
    clock = Clock()
    after = remembering(snapshots.read, clock, succeeds=True)
    if of == "newcomers":
        waiting = after.handle(Attach("s", "here", Policy(10.0)))
        clock.now = 31.0
        after.tick()
        failure = waiting.value()
        assert failure.error == "SnapshotError"
        assert "server0.pt cannot be read" in failure.message
        return
    after.handle(Join("s", 1, 0, restore=True))
    after.handle(InitShard("s", 1, GROUPS, algorithm))
    held = ReplicaState(0, seen.version, seen.weights, seen.pushes)
    assert after.handle(StateReport("s", 1, (held,), notes={"founded": True})) is None
    assert torch.equal(fetch(after, 1), seen.weights[0])
    news = after.handle(StatusRequest()).news
    assert any("server0.pt cannot be read" in told for told in news)
    assert any("had no snapshot: its algorithm's state there starts from zero" in told for told in news)


def test_what_could_not_be_written_is_tried_again() -> None:
    service = founded()
    assert recovery_of(service).snapshot() is not None
    assert recovery_of(service).snapshot() is None
    service.tell("No space left")
    assert recovery_of(service).snapshot() is not None


class Blackouts(RunWorld):
    """Serve is lost and started again, with snapshots, while workers train, come, leave and wait for it."""

    snapshot: Snapshot | None = None

    def serve(self, *, succeeds: bool = False) -> Service:
        service = remembering(lambda server: copy.deepcopy(self.snapshot), lambda: self.now)
        if succeeds:
            recovery_of(service).restore_snapshot(0)
        return service

    def beat(self, rank: int, service: Service) -> None:
        super().beat(rank, service)
        if self.turns.random.random() < 0.2:
            self.snapshot = recovery_of(service).snapshot() or self.snapshot


@pytest.mark.parametrize("leaves", [False, True])
def test_whenever_serve_is_started_again_every_unit_is_applied_once_per_epoch(leaves: bool) -> None:
    killed = 0
    for seed in range(40):
        world = Blackouts(seed, 4, sleeps=False, servers=1, kills=0.03, leaves=leaves)
        world.run()
        assert torch.equal(world.weights_at_the_end, torch.full((2 * UNITS_OF_WORLD,), float(EPOCHS))), seed
        killed += world.killed
    assert killed > 10


# ---------------------------------------------------------------------- files


def snapshot(server: int = 0, run: str = "s", version: int = 3) -> Snapshot:
    shard = {"version": version, "weights": (torch.ones(2), torch.empty(0))}
    return Snapshot(run, server, Policy(), 5, {"a": b"x", "b": {1: (2.5, None)}}, (Epoch("s/1", 4, (4,)),), {0: shard})


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "new" / "folder")
    assert snapshots.read(0) is None
    snapshots.write(snapshot())
    read = snapshots.read(0)
    assert read is not None
    assert read.shards[0]["weights"][0].tolist() == [1.0, 1.0]
    assert read.shards[0]["weights"][1].shape == (0,)
    assert (read.notes, read.epochs, read.admitted) == (snapshot().notes, snapshot().epochs, 5)
    assert [path.name for path in snapshots.folder.iterdir()] == ["server0.pt"]


def test_what_a_server_had_begun_to_write_when_it_was_killed_is_removed(tmp_path: Path) -> None:
    snapshots, here = Snapshots(tmp_path), socket.gethostname()
    killed = subprocess.Popen(["true"])
    killed.wait()
    left = f"server0.pt.{here}.{killed.pid}.aa.part"
    kept = {f"server0.pt.{here}.{os.getpid()}.bb.part"}  # of a process that may be writing yet
    kept |= {f"server1.pt.{here}.{killed.pid}.cc.part", f"server0.pt.elsewhere.{killed.pid}.dd.part", "mine.part"}
    for name in (left, *kept):
        (tmp_path / name).touch()
    snapshots.write(snapshot())
    assert {path.name for path in tmp_path.iterdir()} == {"server0.pt", *kept}


def test_a_second_servers_snapshot_counts_if_the_first_has_one(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    snapshots.write(snapshot(1, version=0))
    assert snapshots.read(1) is None
    assert snapshots.check("s", 2) is None  # the run had not begun
    snapshots.write(snapshot(1))
    with pytest.raises(SnapshotError, match=r"holds server1\.pt\. Expected one snapshot of each of 2 servers"):
        snapshots.check("s", 2)
    snapshots.write(snapshot(0))
    assert snapshots.read(1) is not None
    assert snapshots.check("s", 2) == 3


@pytest.mark.parametrize("harm", ["garbage", "folder"])
def test_a_second_servers_damaged_snapshot_is_named_before_anything_is_served(tmp_path: Path, harm: str) -> None:
    snapshots = Snapshots(tmp_path)
    for server in range(2):
        snapshots.write(snapshot(server))
    snapshots.path(1).unlink()
    if harm == "folder":
        snapshots.path(1).mkdir()
    else:
        snapshots.path(1).write_bytes(b"garbage")
    with pytest.raises(SnapshotError, match=r"server1\.pt cannot be read"):
        snapshots.check("s", 2)


def test_a_flipped_bit_is_never_read_as_another_weight(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    snapshots.write(snapshot())
    whole, refused = snapshots.path(0).read_bytes(), 0
    for place in range(0, len(whole), max(1, len(whole) // 200)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        snapshots.path(0).write_bytes(flipped)
        try:
            read = snapshots.read(0)
        except SnapshotError:
            refused += 1
        else:
            assert read is not None
            assert read.shards[0]["weights"][0].tolist() == [1.0, 1.0]
            assert replace(read, shards={}) == replace(snapshot(), shards={})
    assert refused > 20


def test_servers_go_on_with_their_own_run_only(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    snapshots.write(snapshot())
    assert snapshots.check("s", 1) == 3
    with pytest.raises(SnapshotError, match=r"snapshots of run 's'\. Expected those of run 'other'"):
        snapshots.check("other", 1)
    with pytest.raises(SnapshotError, match=r"holds server0\.pt\. Expected one snapshot of each of 2 servers"):
        snapshots.check("s", 2)


class Harm:
    def __reduce__(self) -> Any:
        return print, ("harm",)


@pytest.mark.parametrize("harm", ["cut", "garbage", "pickle", "protocol"])
def test_a_file_that_is_no_snapshot_is_refused_by_name(
    tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshots = Snapshots(tmp_path)
    snapshots.write(snapshot())
    path = snapshots.path(0)
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif harm == "garbage":
        path.write_bytes(b"garbage")
    elif harm == "pickle":
        path.write_bytes(pickle.dumps(Harm()))
    else:
        torch.save({"protocol": 1, "header": "", "buffers": []}, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wonders about the pickle's protocol
        with pytest.raises(SnapshotError, match=r"server0\.pt .*(cannot be read|protocol 1).*[Mm]ove"):
            snapshots.read(0)
    assert capsys.readouterr().out == ""


def test_the_last_snapshot_is_written_at_the_end(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    with SnapshotWriter(snapshot, snapshots, 1000.0, pytest.fail):
        pass
    assert snapshots.read(0) is not None


def test_a_folder_has_one_host_at_a_time(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    lock = snapshots.lock("a run", joins=False)
    for run, joins in (("a run", False), ("another", False), ("another", True)):
        with pytest.raises(SnapshotError, match="Another `lightning-asgd serve` writes its snapshots to"):
            Snapshots(tmp_path).lock(run, joins=joins)
    os.close(Snapshots(tmp_path).lock("a run", joins=True))  # a host of the same run, with a folder that both share
    os.close(lock)
    lock = snapshots.lock("another", joins=True)  # with a folder of its own
    with pytest.raises(SnapshotError):
        Snapshots(tmp_path).lock("a run", joins=True)
    os.close(lock)


def test_nothing_is_written_through_a_link_and_other_users_read_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "aa")
    snapshots, target = Snapshots(tmp_path / "folder"), tmp_path / "target"
    snapshots.folder.mkdir()
    target.write_text("mine")
    link = snapshots.folder / f"server0.pt.{socket.gethostname()}.{os.getpid()}.aa.part"
    link.symlink_to(target)
    with pytest.raises(FileExistsError):
        snapshots.write(snapshot())
    assert target.read_text() == "mine"
    snapshots.write(snapshot())
    assert snapshots.path(0).stat().st_mode & 0o777 == 0o600
