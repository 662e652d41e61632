"""What servers keep ends with the workers that it is for: a run may have thousands, one after the other."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from typing import Any

import pytest
import torch

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.protocol.lease import Epoch, LeaseRequest, OpenEpoch
from lightning_asgd.core.protocol.session import Attach, DisconnectWatch, Failure, Heartbeat, Leave, Policy, RunMetadata
from lightning_asgd.core.protocol.update import Exchange, InitShard
from lightning_asgd.core.server.service import Service

GROUPS = ((Role.PARAMETER, "float32", 2),)
EPOCH = Epoch("r/0", 10**6, (10**6,))
SILENCE_S = 10.0


class Run:
    """An elastic run whose first worker stays, while others join, train a little, and leave or vanish."""

    def __init__(self) -> None:
        self.now = 0.0
        self.service = Service(lambda: self.now, run="r")
        self.pushed = 0
        self.first = self.join()

    def say(self, message: Any) -> Any:
        answer = self.service.handle(message)
        assert not isinstance(answer, Failure), answer
        return answer

    def join(self) -> int:
        attached = self.say(Attach("r", "host a, process 1, cpu", Policy(SILENCE_S)))
        worker: int = attached.worker
        weights = (torch.zeros(2),) if attached.bootstraps else None
        self.say(InitShard("r", worker, GROUPS, ASGD(), weights))
        if attached.bootstraps:
            self.say(RunMetadata("r", worker, "founded", True))
        self.say(OpenEpoch("r", worker, EPOCH))
        self.say(Exchange("r", worker, 0, 0, False, True, None))
        self.say(LeaseRequest("r", worker, "r/0", 0, 0, 0, 0.01, size=8))
        self.say(Exchange("r", worker, 1, 0, True, True, (torch.ones(2),), epoch="r/0", units=8))
        self.pushed += 1
        return worker

    def others(self, number: int, *, vanish: bool) -> list[int]:
        found = []
        for _ in range(number):
            found.append(self.join())
            if not vanish:
                self.say(DisconnectWatch("r", found[-1]))
                self.say(Leave("r", found[-1]))
            for _ in range(2):  # a server that looks more seldom takes itself for suspended
                self.now += 1.9
                self.heartbeat()
                self.service.tick()
        return found

    def heartbeat(self) -> Any:
        return self.say(Heartbeat("r", self.first, 10**9))

    def work(self) -> int:
        """The bytecode instructions that a heartbeat takes, which unlike seconds are the same on a busy machine."""
        count = 0

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            self.heartbeat()
        finally:
            sys.settrace(before)
        return count


@pytest.mark.parametrize("vanish", [False, True], ids=["leave", "vanish"])
def test_two_thousand_workers_that_came_and_went_cost_nothing_any_more(vanish: bool) -> None:
    run = Run()
    before = run.work()
    tracemalloc.start()
    run.others(600, vanish=vanish)  # what is kept of the latest is full: two events of each
    full = run.work()
    gc.collect()
    begun = tracemalloc.get_traced_memory()[0]
    gone = run.others(2000, vanish=vanish)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - begun
    tracemalloc.stop()
    assert grown < 2000 * 150, "bytes: this test's own list has 40 per worker, and some events are kept; it was 460"
    assert run.work() < 1.2 * full
    assert vanish or full < 2 * before  # those that vanished are remembered for ten minutes; it was 11 times as much
    session = run.service.session
    assert session is not None
    assert session.members.living == {run.first, *(gone[-3:] if vanish else [])} - set(session.members.suspected)
    assert session.shards[0].version == run.pushed


def test_nothing_of_a_worker_that_left_waits_on() -> None:
    run = Run()
    early = run.join()
    watched, pending = run.say(DisconnectWatch("r", early)), run.service.pending
    run.say(Leave("r", early))
    assert watched.value() is None, "an error would mean that the server was lost"
    assert pending.of(object) == []


def test_a_worker_that_is_forgotten_trains_no_more() -> None:
    run = Run()
    early = run.join()
    run.say(Leave("r", early))
    run.others(300, vanish=False)
    version = run.service.session.shards[0].version  # type: ignore[union-attr]
    late = run.service.handle(Exchange("r", early, 2, 0, True, True, (torch.ones(2),), epoch="r/0", units=8))
    assert isinstance(late, Failure)
    assert late.error == "WorkerLostError"
    assert run.service.session.shards[0].version == version  # type: ignore[union-attr]


def test_a_worker_hears_of_what_happened_since_it_asked_last() -> None:
    run = Run()
    attached = run.say(Attach("r", "host b", Policy(SILENCE_S)))
    heard = attached.heard
    run.others(3, vanish=False)
    assert len(run.say(Heartbeat("r", run.first, heard)).news) >= 6
    run.others(1500, vanish=False)
    news = run.say(Heartbeat("r", run.first, heard + 6)).news
    assert news[-1].endswith("has left.")
    members = run.service.session.members  # type: ignore[union-attr]
    assert not run.say(Heartbeat("r", run.first, members.forgotten + len(members.events))).news
