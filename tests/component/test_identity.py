"""A rank is one process: what another one that claims it can do, and what it cannot."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.foundation.process_name import machine_and_pid, this_process
from lightning_asgd.core.protocol.collective import Contribution
from lightning_asgd.core.protocol.lease import Epoch, OpenEpoch
from lightning_asgd.core.protocol.request import Request
from lightning_asgd.core.protocol.session import Failure, Heartbeat, Join, Leave, Policy
from lightning_asgd.core.protocol.update import Exchange, InitShard
from lightning_asgd.core.server.service import Service

GROUPS = ((Role.PARAMETER, "float32", 2),)
STRAY = "elsewhere/77/0123456789abcdef"
TWO = ("here/1/aa", "there/2/bb")


def by(message: Request, process: str) -> Any:
    """The message as another process sends it."""
    return replace(message, process=process)


def job(*, silence_s: float = 0.0) -> Service:
    """A session of two workers, whose weights are zero; its time stands still."""
    service = Service(lambda: 0.0)
    for rank, process in enumerate(TWO):
        assert not isinstance(service.handle(by(Join("j.0.2", rank, 2, Policy(silence_s)), process)), Failure)
    weights = (torch.zeros(2),)
    for rank, process in enumerate(TWO):
        service.handle(by(InitShard("j.0.2", rank, GROUPS, ASGD(), weights if rank == 0 else None), process))
    return service


def push(rank: int, seq: int = 1) -> Exchange:
    return Exchange("j.0.2", rank, seq, 0, True, True, (torch.ones(2),))


def weights(service: Service) -> list[float]:
    assert service.session is not None
    return list(service.session.shards[0].weights[0].tolist())


def members(service: Service) -> Any:
    assert service.session is not None
    return service.session.members


EVERY = [
    Join("j.0.2", 1, 2),
    Join("j.0.2", 1, 2, again=True),
    Join("j.0.2", 1, 2, restore=True),
    Join("j.0.1", 1, 2),
    Heartbeat("j.0.2", 1),
    push(1),
    Contribution("j.0.2", 1, 1, "barrier", "join", None),
    OpenEpoch("j.0.2", 1, Epoch("e", 4, (4,), 1, "")),
    Leave("j.0.2", 1),
    Leave("j.0.2", 1, "it raised an error"),
    Leave("j.0.2", 1, "its process ended with exit code 1", final=True),
]


@pytest.mark.parametrize("message", EVERY, ids=lambda m: type(m).__name__)
def test_nothing_that_another_process_says_for_a_rank_changes_anything(message: Request) -> None:
    service = job()
    answer = service.handle(by(message, STRAY))
    if isinstance(message, Leave):
        assert answer is False
    else:
        assert isinstance(answer, Failure)
        assert answer.error == "LaunchError"
        claim = "Process 77 on elsewhere claimed rank 1, which process 2 on there has"
        assert (claim if message.session == "j.0.2" else "the job is in session 'j.0.2'") in answer.message
    assert weights(service) == [0.0, 0.0]
    assert members(service).session == "j.0.2"
    assert members(service).living == {0, 1}
    service.handle(by(push(1), TWO[1]))
    assert weights(service) == [0.5, 0.5]


def test_the_job_hears_of_a_process_that_was_refused_once() -> None:
    service = job()
    for _ in range(3):
        service.handle(by(Join("j.0.2", 1, 2), STRAY))
    news = service.handle(by(Heartbeat("j.0.2", 0), TWO[0])).news
    (text,) = news
    assert text.startswith("Process 77 on elsewhere claimed rank 1, which process 2 on there has. It was rejected")


def test_processes_without_number_fill_no_memory() -> None:
    service = job()
    for number in range(1000):
        service.handle(by(Join("j.0.2", 1, 2), f"elsewhere/{number}/aa"))
    assert len(members(service).events) == len(members(service).refused) == 20


def test_a_silent_worker_is_not_replaced_by_a_process_that_joins_as_others_do() -> None:
    """It may only sleep: if it wakes up its rank is still its own. See test_replaced_worker.py for who replaces it."""
    now = [0.0]
    service = Service(lambda: now[0])
    for rank, process in enumerate(TWO):
        service.handle(by(Join("j.0.2", rank, 2, Policy(1.0)), process))
    for now[0] in (0.5, 1.0, 1.5):
        service.handle(by(Heartbeat("j.0.2", 0), TWO[0]))
        service.tick()
    assert set(members(service).suspected) == {1}
    assert service.handle(by(Join("j.0.2", 1, 2), STRAY)).error == "LaunchError"
    assert not isinstance(service.handle(by(Join("j.0.2", 1, 2, again=True), TWO[1])), Failure)


@pytest.mark.parametrize("older", ["j.0.1", "j.0.1.1", "j.0", "j"])
def test_a_process_that_starts_late_begins_no_session_that_is_over(older: str) -> None:
    service = job()
    answer = service.handle(by(Join(older, 0, 2), STRAY))
    assert answer.error == "LaunchError"
    assert members(service).session == "j.0.2"
    for newer in ("j.0.2.1", "j.0.3", "j.1.1"):
        assert not isinstance(service.handle(by(Join(newer, 0, 2), TWO[0])), Failure)
        assert members(service).session == newer


def test_new_processes_take_the_ranks_of_those_that_have_left() -> None:
    """A Trainer that forks its workers makes new ones for every call."""
    service = job()
    for rank, process in enumerate(TWO):
        assert service.handle(by(Leave("j.0.2", rank), process)) is True
    for rank in (1, 0):
        assert not isinstance(service.handle(by(Join("j.0.3", rank, 2), f"new/{rank}/cc")), Failure)


def test_the_end_of_a_process_counts_for_its_own_rank_only() -> None:
    service = job()
    assert service.handle(by(Leave("j.0.2", 1, "exit code 1", final=True), "there/77/")) is False
    assert service.handle(by(Leave("j.0.2", 1, "exit code 1", final=True), "there/2/")) is True
    assert members(service).left == {1: "exit code 1"}


def test_the_main_process_can_report_a_worker_that_never_joined() -> None:
    service = Service(lambda: 0.0)
    service.handle(by(Join("j.0.2", 0, 2), TWO[0]))
    assert service.handle(by(Leave("j.0.2", 1, "exit code 1", final=True), "here/5/")) is True


@pytest.mark.parametrize("late", itertools.combinations(range(10), 5), ids=str)
def test_in_no_order_do_two_processes_hold_a_rank(late: tuple[int, ...]) -> None:
    """Two starts of worker 1 say the same, in every order: the one that joins first is the worker, to its end."""
    service = Service(lambda: 0.0)
    service.handle(by(Join("j.0.2", 0, 2), TWO[0]))
    service.handle(by(InitShard("j.0.2", 0, GROUPS, ASGD(), (torch.zeros(2),)), TWO[0]))

    def says() -> Iterator[Request]:
        yield from (Join("j.0.2", 1, 2), InitShard("j.0.2", 1, GROUPS, ASGD(), None), push(1), push(1, 2))
        yield Leave("j.0.2", 1, "it raised an error")

    turns = ["late" if turn in late else "early" for turn in range(10)]
    said = {"late": says(), "early": says()}
    for name in turns:
        message = next(said[name])
        answer = service.handle(by(message, f"there/{name}/aa"))
        refused = isinstance(answer, Failure) or (isinstance(message, Leave) and not answer)
        assert refused == (name != turns[0])
    assert weights(service) == [1.0, 1.0]  # two pushes, each divided by the number of workers
    late_push = service.handle(by(push(1, 3), f"there/{turns[0]}/aa"))
    assert isinstance(late_push, Failure)
    assert weights(service) == [1.0, 1.0]


def test_a_process_has_one_name_and_a_forked_one_another() -> None:
    assert this_process() == this_process()
    assert this_process().startswith(machine_and_pid(os.getpid()))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, this_process().encode())
        os._exit(0)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        os.close(write)
        assert pipe.read().decode().startswith(machine_and_pid(child))


@pytest.mark.parametrize("session", ["beef.0.1", "0.1", "cafe1.0.1", ""])
def test_a_worker_of_another_job_ends_no_session(session: str) -> None:
    service = Service(lambda: 0.0, job="cafe")
    service.handle(by(Join("cafe.0.1", 0, 1), TWO[0]))
    answer = service.handle(by(Join(session, 0, 1), STRAY))
    assert answer.error == "LaunchError"
    assert f"Worker 0 wants to join session {session!r}, but these servers belong to job 'cafe'" in answer.message
    assert members(service).session == "cafe.0.1"
    assert not isinstance(service.handle(by(Join("cafe.0.2", 0, 1), TWO[0])), Failure)
