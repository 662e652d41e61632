"""A process that replaces a worker that has died or is silent: when it gets the rank, and where it begins."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.futures import Future

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.calls.inprocess import InProcessTransport
from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.foundation.process_name import is_gone, machine_and_pid, pid_of, this_process
from lightning_asgd.core.protocol.collective import Contribution
from lightning_asgd.core.protocol.lease import Epoch, LeaseGrant, LeaseRequest, OpenEpoch
from lightning_asgd.core.protocol.request import Request
from lightning_asgd.core.protocol.session import Failure, Heartbeat, Join, Joined, Leave, Policy, RankHeld
from lightning_asgd.core.protocol.update import Exchange, InitShard
from lightning_asgd.core.server import process as server_process
from lightning_asgd.core.server.service import Service
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.replacement.late_entry import EntryPoint, await_entry, publish_entry, take_rank

GROUPS = ((Role.PARAMETER, "float32", 2),)
NEW = "there/3/cc"
TWO = ("here/1/aa", "there/2/bb")
KEY = "j.0.1/0"


class Job:
    """A session of two workers; its time is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.service = Service(lambda: self.now)
        for rank, process in enumerate(TWO):
            assert isinstance(self.says(Join("j.0.1", rank, 2, Policy(1.0)), process), Joined)
        for rank, process in enumerate(TWO):
            first = (torch.zeros(2),) if rank == 0 else None
            self.says(InitShard("j.0.1", rank, GROUPS, ASGD("sum"), first), process)
            self.says(OpenEpoch("j.0.1", rank, Epoch(KEY, 8, (8,), b"")), process)

    def says(self, message: Request, process: str) -> Any:
        return self.service.handle(replace(message, process=process))

    def wait(self, seconds: float, *alive: int) -> None:
        """Time passes, in which some workers send heartbeats."""
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            for rank in alive:
                self.says(Heartbeat("j.0.1", rank), TWO[rank])
            self.service.tick()

    def comes(self, process: str = NEW) -> Any:
        return self.says(Join("j.0.1", 1, 2, Policy(1.0), replaces=True), process)

    def meets(self, rank: int, seq: int, process: str) -> Any:
        return self.says(Contribution("j.0.1", rank, seq, "barrier", f"number {seq}", rank), process)

    @property
    def members(self) -> Any:
        assert self.service.session is not None
        return self.service.session.members

    @property
    def weights(self) -> list[float]:
        assert self.service.session is not None
        return list(self.service.session.shards[0].weights[0].tolist())


def push(seq: int, units: int = 0) -> Exchange:
    return Exchange("j.0.1", 1, seq, 0, True, True, (torch.ones(2),), epoch=KEY, units=units)


def dies(job: Job) -> None:
    assert job.says(Leave("j.0.1", 1, "its process ended", final=True), "there/2/")


def is_silent(job: Job) -> None:
    job.wait(2.0, 0)
    assert set(job.members.suspected) == {1}


@pytest.mark.parametrize("lost", [dies, is_silent])
def test_a_process_replaces_one_that_died_or_is_silent(lost: Callable[[Job], None]) -> None:
    job = Job()
    assert job.comes() == RankHeld(TWO[1], 0.0)
    lost(job)
    joined = job.comes()
    assert isinstance(joined, Joined)
    assert joined.late
    assert job.members.living == {0}, "nobody waits for it before it trains"
    assert "Process 3 on there replaces process 2 on there as worker 1" in job.members.events[-1]
    job.says(Join("j.0.1", 1, 2, Policy(1.0), since=joined.collectives), NEW)
    assert job.members.living == {0, 1}


def test_a_worker_that_was_replaced_does_not_count_as_lost_once_its_replacement_takes_part() -> None:
    """Neither in the summary at the end of a fit, nor in a report to the replacement of a lost server."""
    job = Job()
    other = client_of(job.service, 0)
    job.members.processes[0] = this_process()
    dies(job)
    other.members[0].left = dict(job.members.reported_left)  # as the reply to an exchange says
    other.beat(0, 5.0)
    assert other.members[0].left == {1: "its process ended"}
    joined = job.comes()
    job.says(Join("j.0.1", 1, 2, Policy(1.0), since=joined.collectives), NEW)
    other.beat(0, 5.0)
    assert other.members[0].left == {}


@pytest.mark.parametrize("lost", [dies, is_silent])
def test_the_process_before_it_changes_nothing_when_it_wakes_up(lost: Callable[[Job], None]) -> None:
    job = Job()
    lost(job)
    job.comes()
    for message in (
        push(1),
        Heartbeat("j.0.1", 1),
        Join("j.0.1", 1, 2, again=True),
        OpenEpoch("j.0.1", 1, Epoch(KEY, 8, (8,), b"")),
    ):
        answer = job.says(message, TWO[1])
        assert isinstance(answer, Failure)
        assert "Process 2 on there claimed rank 1, which process 3 on there has" in answer.message
    assert job.says(Leave("j.0.1", 1, "it raised LaunchError"), TWO[1]) is False
    assert job.weights == [0.0, 0.0]
    assert job.members.processes[1] == NEW


def test_a_living_worker_is_not_replaced() -> None:
    job = Job()
    for _ in range(10):
        job.wait(0.5, 0, 1)
        held = job.comes()
        assert isinstance(held, RankHeld)
        assert held.silent_s == 0.0
    assert job.members.events == []
    assert job.says(Join("j.0.1", 1, 2), NEW).error == "LaunchError"


@pytest.mark.parametrize(("silence_s", "advice"), [(1.0, "its process"), (0.0, "the job")])
def test_a_worker_that_was_given_up_is_advised_to_be_started_again_if_that_helps(silence_s: float, advice: str) -> None:
    """Without heartbeats, as with Hogwild, no process can tell that another one is silent, and none is replaced."""
    service = Service(lambda: 0.0)
    for rank, process in enumerate(TWO):
        service.handle(Join("j.0.1", rank, 2, Policy(silence_s), process=process))
    service.handle(Leave("j.0.1", 1, "its process ended", final=True, process="there/2/"))
    answer = service.handle(Join("j.0.1", 1, 2, Policy(silence_s), process=TWO[1]))
    assert f"it was declared lost (its process ended). Start {advice} again" in answer.message


def test_one_that_has_ended_in_order_is_not_replaced() -> None:
    job = Job()
    job.says(Leave("j.0.1", 1), TWO[1])
    answer = job.comes()
    assert isinstance(answer, Failure)
    assert "it was declared lost (it had left)" in answer.message


def test_an_ended_session_takes_nobody_in() -> None:
    job = Job()
    job.says(Leave("j.0.1", 0, "it raised an error"), TWO[0])
    dies(job)
    answer = job.comes()
    assert isinstance(answer, Failure)
    assert "Worker 0, which logs and writes the checkpoints, is lost" in answer.message


def test_pushes_are_counted_on_so_none_is_taken_for_a_repeated_one() -> None:
    job = Job()
    for seq in (1, 2, 3):
        job.says(push(seq), TWO[1])
    dies(job)
    joined = job.comes()
    assert joined.pushed == 3
    job.says(push(joined.pushed + 1), NEW)
    assert job.weights == [4.0, 4.0]


def test_the_units_of_the_process_before_it_are_granted_again() -> None:
    job = Job()
    granted = job.says(LeaseRequest("j.0.1", 1, KEY, 0, 0, 0, 0.0, 0.0, size=2), TWO[1])
    assert isinstance(granted, LeaseGrant)
    ((start, _),) = granted.ranges
    dies(job)
    joined = job.comes()
    job.says(Join("j.0.1", 1, 2, Policy(1.0), since=joined.collectives), NEW)
    job.says(OpenEpoch("j.0.1", 1, Epoch(KEY, 8, (8,), b"")), NEW)
    trained, again = 0, LeaseGrant()
    while True:
        request = LeaseRequest("j.0.1", 1, KEY, 0, trained, trained, 0.001, 0.0, size=2)
        again = job.says(request, NEW)
        if isinstance(again, Future) or again.void or not again.ranges:
            break
        trained += sum(last - first for first, last in again.ranges)
        job.says(push(trained, trained), NEW)
    leases = job.service.state.epochs.latest
    assert leases is not None
    assert sum(last - first for first, last in leases.finished) == trained > 0
    assert leases.finished[0][0] == start


def test_collectives_that_are_completed_while_it_sets_up_are_kept_for_it() -> None:
    job = Job()
    waiting = job.meets(1, 1, TWO[1])
    job.meets(0, 1, TWO[0])
    assert waiting.value() == {0: 0, 1: 1}
    job.meets(1, 2, TWO[1])  # it dies while it waits for worker 0
    dies(job)
    joined = job.comes()
    assert joined.collectives == 1
    assert job.meets(0, 2, TWO[0]).value() == {0: 0}  # without it
    assert job.meets(0, 3, TWO[0]).value() == {0: 0}
    job.says(Join("j.0.1", 1, 2, Policy(1.0), since=joined.collectives), NEW)
    assert job.members.living == {0}
    assert job.meets(1, 2, NEW).value() == {0: 0}
    assert job.meets(1, 3, NEW).value() == {0: 0}
    mine = job.meets(1, 4, NEW)
    assert job.members.living == {0, 1}
    assert not mine.done()
    assert job.meets(0, 4, TWO[0]).value() == mine.value() == {0: 0, 1: 1}


def test_results_from_before_the_published_place_are_not_owed() -> None:
    job = Job()
    dies(job)
    joined = job.comes()
    assert joined.collectives == 0
    for seq in (1, 2):
        job.meets(0, seq, TWO[0])
    job.says(Join("j.0.1", 1, 2, Policy(1.0), since=2), NEW)
    assert job.members.living == {0, 1}


@pytest.mark.parametrize("moment", range(8))
def test_it_may_die_at_any_moment_and_be_replaced_again(moment: int) -> None:
    job = Job()
    dies(job)
    pushed = 0
    for generation in range(3):
        process = f"there/{10 + generation}/dd"
        joined = job.comes(process)
        assert joined.late
        steps: list[Request] = [
            InitShard("j.0.1", 1, GROUPS, ASGD("sum")),
            Exchange("j.0.1", 1, joined.pushed, 0, False, True),
            OpenEpoch("j.0.1", 1, Epoch(KEY, 8, (8,), b"")),
            LeaseRequest("j.0.1", 1, KEY, 0, 0, 0, 0.0, 0.0, size=2),
            Join("j.0.1", 1, 2, Policy(1.0), since=joined.collectives),
            push(joined.pushed + 1, 1),
            Contribution("j.0.1", 1, joined.collectives + 1, "barrier", "number 1", 1),
        ]
        for step in steps[:moment]:
            assert not isinstance(job.says(step, process), Failure), step
        pushed += moment > 5
        assert job.says(Leave("j.0.1", 1, "killed", final=True), f"there/{10 + generation}/")
    assert job.weights == [float(pushed)] * 2
    done = job.meets(0, 1, TWO[0])
    assert done.value() == {0: 0}


# ---------------------------------------------------------------------- the worker's side


def client_of(service: Service, rank: int) -> SessionClient:
    transport = InProcessTransport([service.handle])
    return SessionClient(Connection(transport, "j.0.1", rank, 2, timeout_s=10.0), policy=Policy(1.0))


def test_a_second_start_of_a_living_worker_is_refused_once_that_is_heard() -> None:
    job = Job()
    now = [0.0]

    def clock() -> float:
        now[0] += 0.3  # each look
        job.wait(0.5, 0, 1)
        return now[0]

    with pytest.raises(LaunchError, match=r"claimed rank 1, which process 2 on there has in session 'j.0.1'"):
        take_rank(client_of(job.service, 1), clock)
    assert len(job.members.refused) == 1


def test_where_the_process_before_it_has_ended_on_this_machine_it_does_not_wait() -> None:
    started = subprocess.run(
        [
            sys.executable,
            "-c",
            "from lightning_asgd.core.foundation.process_name import *; print(this_process(), flush=True)",
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    gone = started.stdout.strip()
    assert is_gone(gone)
    service = Service(lambda: 0.0)
    for rank, process in enumerate(("here/1/aa", gone)):
        service.handle(replace(Join("j.0.1", rank, 2, Policy(1.0)), process=process))
    assert take_rank(client_of(service, 1)).late


def test_a_process_is_gone_only_where_this_one_could_see_it() -> None:
    mine = this_process()
    assert pid_of(mine) == os.getpid()
    assert not is_gone(mine)
    host, _, rest = mine.split("/")
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and is still in the table
    assert is_gone(f"{host}/{child}/{rest}")
    os.waitpid(child, 0)
    assert is_gone(f"{host}/{child}/{rest}")
    assert not is_gone(f"elsewhere/{child}/{rest}")
    assert not is_gone(f"{machine_and_pid(child)}0123abcd-00")  # of another start of the machine, or a container
    assert not is_gone("")
    assert pid_of("no number") == 0


def test_a_server_sees_that_a_process_of_its_machine_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    gone = {TWO[1]}
    monkeypatch.setattr(server_process, "gone_among", lambda processes: [p for p in processes if p in gone])
    server_process._report_gone(job.service)
    assert job.members.events[-1] == (
        "Worker 1 is lost: its process has ended (2 on there); the others continue without it."
    )
    assert job.members.living == {0}
    server_process._report_gone(job.service)
    assert len(job.members.events) == 1, "once"
    assert isinstance(job.comes(), Joined)
    server_process._report_gone(job.service)
    assert job.members.processes[1] == NEW, "the process in its place stays"


def test_it_waits_for_a_place_of_its_own_session_after_what_was_completed() -> None:
    job = Job()
    chief, late = client_of(job.service, 0), client_of(job.service, 1)
    job.members.processes.clear()  # both are this process here
    places = iter(
        [
            EntryPoint("j.0.0", 9),
            EntryPoint("j.0.1", 2),
            EntryPoint("j.0.1", 3, progress={"between_epochs": True}),
            EntryPoint("j.0.1", 4),
        ]
    )
    entry = await_entry(late, 3, 10.0, lambda: publish_entry(chief, next(places)))
    assert entry.collective == 3
    assert entry.between_epochs


def test_it_says_why_it_cannot_enter() -> None:
    job = Job()
    chief, late = client_of(job.service, 0), client_of(job.service, 1)
    job.members.processes.clear()
    with pytest.raises(LaunchError, match=r"Worker 1 cannot be replaced .*: worker 0 did not train within 0 s"):
        await_entry(late, 0, 0.0, lambda: None)
    publish_entry(chief, EntryPoint("j.0.1", refused="training has ended"))
    with pytest.raises(
        LaunchError, match=r"replaced in session 'j.0.1': training has ended. Start the whole job again"
    ):
        await_entry(late, 0, 10.0, lambda: None)


def test_a_process_waits_while_a_lost_server_knows_nothing_of_its_session() -> None:
    """It joins the replacement before the workers that know the lost state, and must not begin the session."""
    now = [0.0]
    service = Service(lambda: now[0], succeeds=True)
    join = Join("j.0.1", 1, 2, Policy(1.0), replaces=True, process=NEW)
    assert isinstance(service.handle(join), RankHeld)
    assert service.session is None
    known = replace(join, worker=0, replaces=False, restore=True, process=TWO[0])
    assert isinstance(service.handle(known), Joined)
    now[0] = 6.0  # no worker has joined that knew more: the session is one that begins
    other = Service(lambda: now[0], succeeds=True)
    assert isinstance(other.handle(join), RankHeld)
    now[0] = 12.0
    assert isinstance(other.handle(join), Joined)


def test_the_late_report_of_a_processs_end_does_not_take_out_its_replacement() -> None:
    job = Job()
    job.wait(2.0, 0)
    job.service.report_exit("", 1, "its process ended", "there/2/")
    assert isinstance(job.says(Join("j.0.1", 1, 2, Policy(1.0), replaces=True), NEW), Joined)
    job.service.report_exit("", 1, "its process ended", "there/2/")
    session = job.service.session
    assert session is not None
    assert 1 not in session.members.left


def test_a_new_coordinator_takes_the_workers_chief_for_its_own_though_worker_0_is_there_again() -> None:
    service = Service(lambda: 0.0)
    for rank in range(3):
        service.handle(Join("j.0.2", rank, 3, Policy(1.0, another_chief=True, chief=1)))
    assert [service.handle(Heartbeat("j.0.2", rank)).chief for rank in range(3)] == [1, 1, 1]
