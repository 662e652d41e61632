from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.futures import Future

from lightning_asgd.algorithms import ASGD, Barrier
from lightning_asgd.core.calls import shared_memory
from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.foundation.stats import Verdict
from lightning_asgd.core.protocol.collective import Contribution
from lightning_asgd.core.protocol.lease import Epoch, LeaseHoldings, LeaseRequest, OpenEpoch
from lightning_asgd.core.protocol.session import (
    PROTOCOL,
    Failure,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Policy,
    WorkerMetrics,
)
from lightning_asgd.core.protocol.update import Exchange, InitShard, Reply
from lightning_asgd.core.server.service import Service
from lightning_asgd.recovery.messages import ReplayDone, ReplicaState, StateReport
from tests.helpers.cluster import summary

GROUPS = ((Role.PARAMETER, "float32", 3),)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def service(
    workers: int = 2, session: str = "s", scale: str = "mean", clock: Callable[[], float] = lambda: 0.0
) -> Service:
    """A service whose workers have joined, with weights 0."""
    result = Service(clock)
    for rank in range(workers):
        assert isinstance(result.handle(Join(session, rank, workers)), Joined)
    assert result.handle(InitShard(session, 0, GROUPS, ASGD(scale), (torch.zeros(3),))) is False
    return result


def push(seq: int, value: float, worker: int = 0, session: str = "s") -> Exchange:
    return Exchange(session, worker, seq, 0, True, True, (torch.full((3,), value),))


def fetch(worker: int = 0, session: str = "s") -> Exchange:
    return Exchange(session, worker, 0, 0, False, True)


def failure(answer: Any) -> tuple[str, str]:
    if isinstance(answer, Future):
        assert answer.done()
        answer = answer.wait()
    assert isinstance(answer, Failure)
    return answer.error, answer.message


def test_joining_is_answered_with_the_servers_process() -> None:
    answer = Service().handle(Join("s", 0, 1))
    assert isinstance(answer, Joined)
    assert answer.pid == os.getpid()


def test_a_worker_of_another_protocol_is_refused() -> None:
    error, text = failure(Service().handle(Join("s", 1, 2, protocol=PROTOCOL + 1)))
    assert error == "ProtocolError"
    assert f"Worker 1 speaks protocol {PROTOCOL + 1}. Expected {PROTOCOL}. Install the same version" in text


@pytest.mark.parametrize(
    ("joined", "worker", "after", "ends"),
    [((0,), 1, "", True), ((0, 1), 1, "", False), ((0,), 7, "", False), ((), 1, "", False), ((0,), 1, "1.0", False)],
    ids=[
        "it is awaited",
        "another process has joined",
        "no rank of the job",
        "no session yet",
        "the session continues another one",
    ],
)
def test_a_worker_that_could_not_join_ends_the_session_only_if_it_is_awaited(
    joined: tuple[int, ...], worker: int, after: str, ends: bool
) -> None:
    s = Service()
    for rank in (0, 1) if after else ():
        s.handle(Join(after, rank, 2))
    for rank in joined:
        s.handle(Join("1.1", rank, 2, after=after))
    for _ in range(2):  # it is reported again as long as it stands
        s.report_refused(worker, "Worker 1 has another version.")
    assert isinstance(s.handle(Join("1.1", 0, 2, after=after)), Joined)
    waiting = s.handle(Contribution("1.1", 0, 1, "barrier", "x", None))
    assert waiting.done() is ends
    if ends:
        assert failure(waiting) == ("WorkerLostError", "Worker 1 has another version.")


def test_a_suspected_worker_that_comes_back_with_another_version_ends_nothing() -> None:
    now = [0.0]
    s = Service(lambda: now[0])
    policy = Policy(1.0)
    for rank in (0, 1):
        s.handle(Join("1.1", rank, 2, policy))
    now[0] = 5.0
    s.handle(Heartbeat("1.1", 0))
    s.tick()
    s.handle(Join("1.2", 0, 2, policy))
    assert summary(s)["living"] == [0]
    s.report_refused(1, "Worker 1 has another version.")
    assert s.session is not None
    assert not s.session.members.aborted


def test_the_dead_are_missed_by_nobody_from_the_beginning_and_in_new_layouts() -> None:
    s = Service()
    s.report_exit("1.1", 1, "killed")
    for session in ("1.1", "1.1.1"):
        s.handle(Join(session, 0, 2))
        assert summary(s)["living"] == [0]
    s.handle(Join("1.2", 0, 2))
    assert summary(s)["living"] == [0, 1]
    s.report_exit("1.2", 1, "killed again")
    assert summary(s)["living"] == [0]


def test_who_has_no_process_is_gone_in_later_sessions_too() -> None:
    s = service(3)
    s.handle(Leave("s", 1, "it raised an error"))
    s.handle(Leave("s", 2, "killed", final=True))
    s.handle(Join("t", 0, 3))
    assert summary(s)["living"] == [0, 1]
    s.handle(Leave("t", 1, "it raised an error"))
    s.handle(Join("u", 0, 3, after="t"))
    assert summary(s)["living"] == [0]


def test_a_push_of_one_that_is_away_is_refused_and_changes_nothing() -> None:
    clock = Clock()
    s = Service(clock)
    for rank in range(2):
        s.handle(Join("s", rank, 2, Policy(silence_s=10.0)))
    s.handle(InitShard("s", 0, GROUPS, ASGD("sum"), (torch.zeros(3),)))
    for _ in range(11):
        clock.now += 1
        s.handle(Heartbeat("s", 0))
        s.tick()
    (news,) = s.handle(Heartbeat("s", 0)).news
    assert "Worker 1 sent no heartbeat for 11 s" in news
    assert s.handle(Heartbeat("s", 0, heard=1)).news == ()
    assert failure(s.handle(push(1, 1.0, worker=1)))[0] == "WorkerAwayError"
    s.handle(Join("s", 1, 2, Policy(silence_s=10.0), again=True))
    assert s.handle(push(1, 2.0, worker=1)).verdict is Verdict.APPLIED
    assert torch.equal(s.handle(fetch()).weights[0], torch.full((3,), 2.0))


def test_when_the_session_is_ended_all_that_wait_are_told() -> None:
    s = Service()
    for rank in range(2):
        s.handle(Join("s", rank, 2, Policy(abort=True)))
    waiting = s.handle(Contribution("s", 0, 1, "barrier", "end"))
    s.handle(Leave("s", 1, "killed"))
    assert "Worker 1 is lost (killed), and on_worker_failure='abort'" in failure(waiting)[1]
    assert failure(s.handle(Heartbeat("s", 0)))[0] == "WorkerLostError"


def test_worker_0_is_told_the_latest_figures_of_all_and_who_is_alive() -> None:
    s = Service()
    for rank in range(3):
        s.handle(Join("s", rank, 3))
    first, later = WorkerMetrics(at_s=1.0, samples=8), WorkerMetrics(at_s=2.0, samples=16)
    for figures in (first, later, None):
        answer = s.handle(Heartbeat("s", 2, figures=figures))
        assert ((*answer.living,), answer.figures) == ((0, 1, 2), {})
    s.handle(Leave("s", 2, "killed"))
    answer = s.handle(Heartbeat("s", 0, figures=first))
    assert ((*answer.living,), answer.figures) == ((0, 1), {0: first, 2: later})
    assert s.session is not None
    assert s.session.members.metrics == answer.figures


def passes(s: Service, clock: Clock, seconds: int, *heard: int, session: str = "s") -> None:
    """Let time pass in which some workers give signs of life."""
    for _ in range(seconds):
        clock.now += 1
        for worker in heard:
            s.handle(Heartbeat(session, worker))
        s.tick()


def watched(clock: Clock, workers: int = 2) -> Service:
    s = Service(clock)
    for rank in range(workers):
        s.handle(Join("s", rank, workers, Policy(silence_s=10.0)))
    return s


def test_what_a_worker_behind_holds_is_granted_to_others_when_it_is_silent_again() -> None:
    clock = Clock()
    s = watched(clock)
    passes(s, clock, 11, 0)
    s.handle(Contribution("s", 0, 1, "barrier", "missed"))
    s.handle(Join("s", 1, 2, Policy(silence_s=10.0), again=True))  # it is behind
    epoch = Epoch("e/0", 2, (2,))
    for rank in range(2):
        s.handle(OpenEpoch("s", rank, epoch))
    held = s.handle(LeaseRequest("s", 1, "e/0", 0, 0, 0, 0.0))
    mine = s.handle(LeaseRequest("s", 0, "e/0", 0, 0, 0, 0.1))
    assert {held.ranges[0][0], mine.ranges[0][0]} == {0, 1}
    waiting = s.handle(LeaseRequest("s", 0, "e/0", 0, 1, 1, 0.1, wait=True))
    passes(s, clock, 11, 0)
    assert waiting.done()
    assert waiting.value().ranges == held.ranges


def test_a_claim_that_waits_is_answered_when_its_worker_is_away() -> None:
    clock = Clock()
    s = watched(clock)
    s.handle(OpenEpoch("s", 0, Epoch("e/0", 2, (2,))))
    s.handle(OpenEpoch("s", 1, Epoch("e/0", 2, (2,))))
    for rank in range(2):
        s.handle(LeaseRequest("s", rank, "e/0", 0, 0, 0, 0.0))
    waiting = s.handle(LeaseRequest("s", 1, "e/0", 0, 1, 1, 0.1, wait=True))
    passes(s, clock, 11, 0)
    assert failure(waiting)[0] == "WorkerAwayError"


def test_who_is_away_when_a_session_ends_is_not_waited_for_in_the_next() -> None:
    clock = Clock()
    s = watched(clock)
    passes(s, clock, 11, 0)
    s.handle(Leave("s", 0))
    s.handle(Join("t", 0, 2, Policy(silence_s=10.0)))
    barrier = s.handle(Contribution("t", 0, 1, "barrier", "join"))
    assert barrier.done()
    s.handle(Join("t", 1, 2, Policy(silence_s=10.0)))  # it has woken
    late = s.handle(Contribution("t", 1, 1, "barrier", "join"))
    assert late.done()
    assert s.handle(Contribution("t", 1, 2, "barrier", "end")).done() is False
    assert summary(s)["living"] == [0, 1]


def test_joining_a_session_again_that_is_over_does_not_end_the_present_one() -> None:
    s = service(session="s")
    s.handle(Join("t", 0, 2))
    error, text = failure(s.handle(Join("s", 1, 2, again=True)))
    assert error == "WorkerLostError"
    assert "Worker 1 was disconnected until session 's' was over" in text
    assert summary(s)["session"] == "t"


def test_a_process_that_ends_between_two_sessions_is_missed_by_nobody() -> None:
    s = service(session="s")
    s.handle(Join("t", 0, 1))
    s.handle(Leave("s", 1, "killed", final=True))
    for session, workers, living in (("u", 1, [0]), ("v", 2, [0]), ("w", 2, [0])):
        assert isinstance(s.handle(Join(session, 0, workers)), Joined)
        assert summary(s)["living"] == living


def test_the_end_of_the_main_process_ends_the_session() -> None:
    s = service()
    waiting = s.handle(Contribution("s", 0, 1, "barrier", "end"))
    s.abort("The main process has ended.")
    assert failure(waiting) == ("WorkerLostError", "The main process has ended.")
    assert failure(s.handle(push(1, 1.0, worker=1))) == ("WorkerLostError", "The main process has ended.")


def test_a_refused_worker_does_not_end_the_session() -> None:
    s = service()
    s.handle(Join("other", 1, 2, protocol=PROTOCOL + 1))
    assert summary(s)["session"] == "s"


def test_a_rank_that_was_not_expected_is_refused() -> None:
    assert failure(service().handle(Join("s", 2, 2)))[0] == "ProtocolError"


def test_another_session_ends_the_one_before() -> None:
    s = service()
    waiting = s.handle(Contribution("s", 0, 1, "barrier", "x"))
    s.handle(push(1, 1.0))
    assert not waiting.done()
    assert isinstance(s.handle(Join("t", 0, 1)), Joined)
    error, text = failure(waiting)
    assert error == "ProtocolError"
    assert text == "Worker 0's session ended: session 't' began."
    error, text = failure(s.handle(push(2, 1.0)))
    assert error == "ProtocolError"
    assert "Session 's' is not the current one ('t')" in text
    assert summary(s)["version"] == 0
    assert failure(s.handle(fetch(session="t")))[0] == "ProtocolError"  # the shard went with its session


@pytest.mark.parametrize(
    "message",
    [
        push(1, 1.0),
        InitShard("s", 0, GROUPS, ASGD(), (torch.zeros(3),)),
        Contribution("s", 0, 1, "barrier", "x"),
    ],
)
def test_nothing_goes_before_joining(message: Any) -> None:
    error, text = failure(Service().handle(message))
    assert error == "ProtocolError"
    assert "Session 's' is not the current one (None). Expected a join first." in text


def test_an_exchange_before_the_shard_is_laid_out_says_so() -> None:
    s = Service()
    s.handle(Join("s", 0, 1))
    error, text = failure(s.handle(push(1, 1.0)))
    assert error == "ProtocolError"
    assert text == "Worker 0 exchanged before its InitShard. Expected that first."


def test_an_exchange_before_the_shard_has_weights_says_so() -> None:
    s = Service()
    s.handle(Join("s", 1, 2))
    s.handle(InitShard("s", 1, GROUPS, ASGD()))
    error, text = failure(s.handle(push(1, 1.0, worker=1)))
    assert error == "ProtocolError"
    assert "before the shard had weights" in text


def test_workers_must_expect_the_same_shard() -> None:
    error, text = failure(service().handle(InitShard("s", 1, ((Role.PARAMETER, "float32", 4),), ASGD())))
    assert error == "ProtocolError"
    assert "Worker 1 expects a shard of" in text


@pytest.mark.parametrize("message", ["hello", None, 3, Reply(0, 0, Verdict.NONE)])
def test_an_unknown_message_is_answered_with_an_error(message: Any) -> None:
    error, text = failure(service().handle(message))
    assert error == "ProtocolError"
    assert f"A server received a {type(message).__name__}, which it cannot handle" in text


def test_an_error_nobody_thought_of_is_answered_too(caplog: pytest.LogCaptureFixture) -> None:
    s = service()
    error, text = failure(s.handle(Exchange("s", 0, 1, 0, True, True, ("no tensor",))))  # type: ignore[arg-type]
    assert error == "ASGDError"
    assert "A server failed on Exchange" in text
    assert "This is a bug" in text
    assert isinstance(s.handle(fetch()), Reply)  # it serves on
    assert "A message failed: Exchange" in caplog.text


@pytest.mark.parametrize("worker", [0, 2], ids=["a waiting worker", "the last worker"])
@pytest.mark.parametrize(
    "error", [ValueError("no room"), ProtocolError("no room")], ids=lambda error: type(error).__name__
)
def test_a_reply_that_cannot_be_made_keeps_no_other_worker_waiting(
    caplog: pytest.LogCaptureFixture, worker: int, error: Exception
) -> None:
    """A round is answered at once: what fails for one worker fails that one."""
    s = Service()
    for rank in range(3):
        s.handle(Join("s", rank, 3))
    s.handle(InitShard("s", 0, GROUPS, ASGD("sum", transforms=[Barrier()]), (torch.zeros(3),)))
    assert s.session is not None
    code = mock.Mock(encode=mock.Mock(side_effect=error))
    s.session.buffers._codes[worker, 0] = mock.Mock(decode=lambda parts, out: parts), code
    answers = [s.handle(replace(push(1, 3.0, rank), may_wait=True)) for rank in range(3)]
    replies = [answer.wait() if isinstance(answer, Future) and answer.done() else answer for answer in answers]
    kind, text = failure(replies.pop(worker))
    assert "no room" in text
    if isinstance(error, ProtocolError):
        assert kind == "ProtocolError"
    else:
        assert kind == "ASGDError"
        assert f"A server failed on its reply to worker {worker}" in text
        assert f"The reply to an exchange of worker {worker} failed" in caplog.text
    assert [(reply.version, reply.weights[0].tolist()) for reply in replies] == [(1, [3.0] * 3)] * 2


def test_weights_are_filled_once_and_versions_count_on() -> None:
    s = Service()
    s.handle(Join("s", 0, 1))
    s.handle(InitShard("s", 0, GROUPS, ASGD("sum"), (torch.ones(3),), version=7))
    reply = s.handle(push(1, 2.0))
    assert (reply.version, reply.staleness, reply.verdict) == (8, 7, Verdict.APPLIED)
    assert reply.weights[0].tolist() == [3.0] * 3


def test_the_mean_is_over_the_living() -> None:
    s = service(workers=4)
    assert s.handle(push(1, 4.0)).weights[0].tolist() == [1.0 + 3.0] * 3  # a step of the three others ahead
    assert s.handle(fetch()).weights[0].tolist() == [1.0] * 3
    s.handle(Leave("s", 3, "killed"))
    s.handle(Leave("s", 2))
    s.handle(push(2, 4.0))
    assert s.handle(fetch()).weights[0].tolist() == [3.0] * 3
    assert summary(s)["living"] == [0, 1]


def test_workers_that_disagree_about_their_number_all_learn_it_at_once() -> None:
    s = Service()
    s.handle(Join("s", 0, 2))
    waits = s.handle(Contribution("s", 0, 1, "all_gather", "join", "a"))
    refused = s.handle(Join("s", 1, 3))
    error, text = failure(refused)
    assert (error, failure(waits)[0]) == ("ProtocolError", "WorkerLostError")
    assert "joins as one of 3 workers, and others as one of 2. Expected the same devices and num_nodes" in text
    assert text in failure(waits)[1]
    assert failure(s.handle(Contribution("s", 0, 2, "barrier", "x")))[0] == "WorkerLostError"


@pytest.mark.parametrize(
    ("size", "joined", "left", "worker"), [(2, [0, 1], [], 1), (2, [0], [], 2), (3, [0, 2], [1], 1)]
)
def test_a_job_goes_on_when_a_process_comes_that_nobody_waits_for(
    size: int, joined: list[int], left: list[int], worker: int
) -> None:
    """All have joined, it has no rank of the job, or the worker was taken out before."""
    s = Service()
    for rank in joined:
        s.handle(Join("s", rank, size))
    for rank in left:
        s.handle(Leave("s", rank, "its process has ended"))
    error, text = failure(s.handle(Join("s", worker, size + 1, process="there/5/a")))
    assert (error, "no process that is left of an earlier job" in text) == ("ProtocolError", True)
    assert s.session is not None
    assert s.session.members.aborted == ""
    assert s.session.members.events[-1] == text


def test_a_collective_is_answered_to_everybody() -> None:
    s = service()
    first = s.handle(Contribution("s", 0, 1, "all_gather", "x", "a"))
    assert not first.done()
    second = s.handle(Contribution("s", 1, 1, "all_gather", "x", "b"))
    assert first.wait() == second.wait() == {0: "a", 1: "b"}


def test_a_mismatch_is_answered_to_everybody() -> None:
    s = service()
    answers = [s.handle(Contribution("s", rank, 1, kind, "x")) for rank, kind in enumerate(("barrier", "reduce"))]
    assert [failure(a)[0] for a in answers] == ["CollectiveMismatchError"] * 2


def test_one_that_trains_no_more_and_one_that_waits_for_it_are_told_so() -> None:
    s = service()
    s.handle(OpenEpoch("s", 0, Epoch("fit/3", 2, (2,))))
    s.handle(LeaseRequest("s", 0, "fit/3", 0, 0, 0, 0.0))
    claim = s.handle(LeaseRequest("s", 0, "fit/3", 0, 1, 1, 0.1, wait=True))
    s.tick()
    assert not claim.done()  # worker 1 may still come for its unit
    end = s.handle(Contribution("s", 1, 1, "gather", "train end"))
    s.tick()
    for answer in (claim, end):
        error, text = failure(answer)
        assert error == "CollectiveMismatchError"
        assert "worker 1 called gather 'train end', where data of epoch fit/3 were expected by worker 0" in text


def test_a_claim_that_is_refused_does_not_count_as_waiting() -> None:
    """It was sent before its worker had joined again, and comes after."""
    s = service()
    epoch = Epoch("fit/0", 9, (9,))
    s.handle(LeaseRequest("s", 1, "fit/0", 0, 0, 0, 0.1, opens=epoch))
    s.handle(Join("s", 1, 2, again=True))
    assert failure(s.handle(LeaseRequest("s", 1, "fit/0", 0, 1, 1, 0.1)))[0] == "WorkerAwayError"
    assert s.handle(LeaseRequest("s", 1, "fit/0", 0, 0, 0, 0.1)).ranges
    end = s.handle(Contribution("s", 0, 1, "sync point", "end"))
    s.tick()
    assert not end.done()  # worker 1 trains


def test_who_waits_for_data_of_one_that_is_behind_is_not_at_odds_with_those_who_wait_in_a_collective() -> None:
    clock = Clock()
    s = watched(clock, workers=3)
    passes(s, clock, 11, 0, 1)
    for rank in range(2):
        s.handle(Contribution("s", rank, 1, "sync point", "missed"))
    s.handle(Join("s", 2, 3, Policy(silence_s=10.0), again=True))
    assert s.handle(Contribution("s", 2, 1, "sync point", "missed")).done()  # it catches up, and trains
    epoch = Epoch("fit/0", 2, (2,))
    assert s.handle(LeaseRequest("s", 2, "fit/0", 0, 0, 0, 0.1, opens=epoch)).ranges == ((0, 1),)
    s.handle(LeaseRequest("s", 1, "fit/0", 0, 0, 0, 0.1, stop=True))
    end = s.handle(Contribution("s", 1, 2, "sync point", "end"))
    assert s.handle(LeaseRequest("s", 0, "fit/0", 0, 0, 0, 0.1)).ranges == ((1, 2),)
    claim = s.handle(LeaseRequest("s", 0, "fit/0", 0, 1, 1, 0.1, wait=True))
    passes(s, clock, 1, 0, 1, 2)
    assert not claim.done()
    assert not end.done()
    s.handle(LeaseRequest("s", 2, "fit/0", 0, 1, 1, 0.1))
    assert claim.wait().over


def test_who_was_away_before_its_offer_and_was_let_in_with_it_is_none_that_the_next_server_refuses() -> None:
    clock = Clock()
    s = to_be_restored(clock)
    passes(s, clock, 90, 0)  # worker 1 is away meanwhile
    offers = [s.handle(StateReport("s", rank, (ReplicaState(0, 5, (torch.ones(3),), {}),))) for rank in (1, 0)]
    assert [offer if offer is None else offer.wait() for offer in offers] == [None, None]
    for rank in range(2):
        s.handle(ReplayDone("s", rank))
    assert s.handle(fetch(worker=0)).incarnations == {}


def to_be_restored(clock: Clock) -> Service:
    """A service in a lost one's place, which waits for its two workers' word."""
    s = Service(clock)
    for rank in range(2):
        s.handle(Join("s", rank, 2, Policy(silence_s=10.0), restore=True))
        s.handle(InitShard("s", rank, GROUPS, ASGD("sum")))
    return s


def test_a_push_that_came_too_early_and_is_refused_keeps_nobody_from_an_answer() -> None:
    clock = Clock()
    s = to_be_restored(clock)
    early = s.handle(push(1, 1.0, worker=1))
    passes(s, clock, 90, 0)  # worker 1 is away meanwhile
    held = ReplicaState(0, 5, (torch.ones(3),), {})
    assert s.handle(StateReport("s", 0, (held,))) is None
    assert failure(early)[0] == "WorkerAwayError"
    assert summary(s)["version"] == 5


def test_what_was_lost_with_a_server_is_trained_by_those_who_are_not_past_the_segment() -> None:
    """The lost server had told worker 1 that all of it was trained: it waits for worker 0, which trained it last."""
    s = to_be_restored(Clock())
    epoch = Epoch("fit/0", 2, (2,))
    s.handle(
        StateReport("s", 0, (ReplicaState(0, 4, (torch.zeros(3),), {}),), part=LeaseHoldings(epoch, ((0, 1),), 1, 0))
    )
    s.handle(StateReport("s", 1, (ReplicaState(0, 5, (torch.ones(3),), {}),)))
    claim = s.handle(LeaseRequest("s", 0, "fit/0", 0, 1, 1, 0.1, wait=True))
    s.tick()
    assert not claim.done()  # a unit is kept for worker 1
    s.handle(Contribution("s", 1, 1, "sync point", "end"))
    s.tick()
    grant = claim.wait()
    assert grant.ranges == ((1, 2),)
    assert s.handle(LeaseRequest("s", 0, "fit/0", 0, 2, 2, 0.1, wait=True)).over


def test_who_has_offered_what_it_holds_is_not_given_up_while_the_others_are_awaited() -> None:
    """Another server may have taken the push that it is about to send again."""
    clock = Clock()
    s = to_be_restored(clock)
    offered = s.handle(StateReport("s", 1, (ReplicaState(0, 5, (torch.ones(3),), {}),)))
    passes(s, clock, 15, 0)
    assert not offered.done()
    assert s.handle(StateReport("s", 0, (ReplicaState(0, 4, (torch.zeros(3),), {}),))) is None
    assert offered.wait() is None
    assert s.handle(push(1, 1.0, worker=1)).verdict is Verdict.APPLIED
    for rank in range(2):
        s.handle(ReplayDone("s", rank))
    passes(s, clock, 15, 0)
    assert failure(s.handle(push(2, 1.0, worker=1)))[0] == "WorkerAwayError"


@pytest.mark.parametrize("falls_silent", ["has joined", "has reported"])
def test_a_worker_that_falls_silent_during_a_recovery_is_awaited_for_a_minute(falls_silent: str) -> None:
    """It may be the only one with a push that the others, which are past it, would not train again."""
    clock = Clock()
    s = to_be_restored(clock)
    passes(s, clock, 1, 0, 1)  # its heartbeat does not shorten the time
    theirs = s.handle(StateReport("s", 0, (ReplicaState(0, 4, (torch.zeros(3),), {}),)))
    report = StateReport("s", 1, (ReplicaState(0, 5, (torch.ones(3),), {}),))
    if falls_silent == "has reported":
        assert s.handle(report) is None
        theirs = s.handle(ReplayDone("s", 0))
    passes(s, clock, 55, 0)
    assert not theirs.done()
    if falls_silent == "has joined":
        assert s.handle(report) is None
    assert s.handle(push(1, 1.0, worker=1)).version == 6
    s.handle(ReplayDone("s", 1))
    assert theirs.done()


@pytest.mark.parametrize("falls_silent", ["has joined", "has reported"])
def test_a_worker_that_stays_silent_during_a_recovery_is_given_up_after_a_minute(falls_silent: str) -> None:
    clock = Clock()
    s = to_be_restored(clock)
    passes(s, clock, 1, 0, 1)
    theirs = s.handle(StateReport("s", 0, (ReplicaState(0, 4, (torch.zeros(3),), {}),)))
    if falls_silent == "has reported":
        s.handle(StateReport("s", 1, (ReplicaState(0, 5, (torch.ones(3),), {}),)))
        theirs = s.handle(ReplayDone("s", 0))
    passes(s, clock, 60 + 10, 0)
    assert theirs.done()
    assert failure(s.handle(push(1, 1.0, worker=1)))[0] == "WorkerAwayError"


def test_a_broadcast_from_a_worker_who_left_is_answered_to_everybody() -> None:
    s = service(workers=3)
    s.handle(Leave("s", 2))
    answers = [s.handle(Contribution("s", rank, 1, "broadcast", "x", source=2)) for rank in (0, 1)]
    assert [failure(a)[0] for a in answers] == ["WorkerLostError"] * 2


def test_a_collective_whose_time_is_up_is_answered_at_the_next_tick() -> None:
    clock = Clock()
    s = service(clock=clock)
    waiting = s.handle(Contribution("s", 1, 1, "barrier", "x", timeout_s=5.0))
    clock.now = 4.9
    s.tick()
    assert not waiting.done()
    clock.now = 5.0
    s.tick()
    error, text = failure(waiting)
    assert error == "CollectiveTimeoutError"
    assert "worker 0 did not call it" in text


def test_a_tick_without_a_session_does_nothing() -> None:
    Service().tick()


def test_leaving_completes_what_the_others_wait_for() -> None:
    s = service(workers=2)
    waiting = s.handle(Contribution("s", 0, 1, "all_gather", "x", "a"))
    assert s.handle(Leave("s", 1, "killed")) is True
    assert waiting.wait() == {0: "a"}


def test_leaving_another_session_changes_nothing() -> None:
    s = service()
    assert s.handle(Leave("earlier", 1)) is False
    assert summary(s)["living"] == [0, 1]
    assert Service().handle(Leave("s", 1)) is False


def test_a_worker_who_was_declared_gone_cannot_join_again() -> None:
    s = service()
    s.handle(Leave("s", 1, "killed"))
    assert failure(s.handle(Join("s", 1, 2)))[0] == "WorkerLostError"


def test_closing_answers_who_waits_and_may_be_repeated() -> None:
    s = service()
    waiting = s.handle(Contribution("s", 0, 1, "barrier", "x"))
    s.close()
    s.close()
    error, text = failure(waiting)
    assert error == "ProtocolError"
    assert "the server was stopped" in text
    assert summary(s) == {"session": None, "living": [], "version": 0, "counts": {}}


def test_status_counts() -> None:
    s = service()
    s.handle(push(1, 1.0))
    s.handle(push(1, 1.0))
    s.handle(push(2, float("nan")))
    s.handle(fetch())
    assert summary(s)["version"] == 1
    assert summary(s)["counts"] == {"applied": 1, "repeated": 1, "refused": 1, "dropped": 0, "fetched": 4}


needs_shared_memory = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd")


def mappings() -> int:
    """Blocks that are mapped or held open in this process."""
    mapped = Path("/proc/self/maps").read_text().count("memfd:lightning_asgd")
    return mapped + len(os.listdir("/proc/self/fd"))


@needs_shared_memory
def test_an_exchange_through_a_block() -> None:
    s = service(scale="sum")
    block = shared_memory.create(GROUPS)
    assert block is not None
    assert s.handle(InitShard("s", 1, GROUPS, ASGD("sum"), shared=block.ref)) is True
    block.tensors[0].fill_(5.0)
    reply = s.handle(Exchange("s", 1, 1, 0, True, True, shared=True))
    assert (reply.version, reply.verdict, reply.weights) == (1, Verdict.APPLIED, None)
    assert block.tensors[0].tolist() == [5.0] * 3
    assert s.handle(push(1, 1.0)).weights[0].tolist() == [6.0] * 3
    s.handle(replace(fetch(worker=1), shared=True))
    assert block.tensors[0].tolist() == [6.0] * 3
    s.close()
    block.close()


@needs_shared_memory
@pytest.mark.parametrize("end", [Leave("s", 1), Join("t", 0, 1), None])
def test_a_worker_takes_its_block_along(end: Any) -> None:
    s = service()
    block = shared_memory.create(GROUPS)
    assert block is not None
    before = mappings()
    s.handle(InitShard("s", 1, GROUPS, ASGD(), shared=block.ref))
    assert mappings() > before
    if end is None:
        s.close()
    else:
        s.handle(end)
    assert mappings() == before
    block.close()


@needs_shared_memory
def test_a_worker_that_comes_with_another_block_leaves_none_behind() -> None:
    s = service()
    blocks = [shared_memory.create(GROUPS) for _ in range(3)]
    before = mappings()
    for block in blocks:
        assert block is not None
        s.handle(InitShard("s", 1, GROUPS, ASGD(), shared=block.ref))
    s.close()
    assert mappings() == before
    for block in blocks:
        assert block is not None
        block.close()


@needs_shared_memory
def test_only_the_block_in_use_stays_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    s = service()
    blocks = [shared_memory.create(GROUPS) for _ in range(2)]
    for worker, block in enumerate(blocks):
        assert block is not None
        s.handle(InitShard("s", worker, GROUPS, ASGD(), shared=block.ref))
    unmapped: list[int] = []
    monkeypatch.setattr(shared_memory.SharedBlock, "unmap", lambda self: unmapped.append(self.ref.fd))
    descriptors = [block.ref.fd for block in blocks if block is not None]
    for seq, worker in enumerate([0, 0, 1, 1, 1, 0], 1):
        s.handle(Exchange("s", worker, seq, 0, True, True, shared=True))
    assert unmapped == descriptors
    s.handle(Leave("s", 0))
    s.handle(Exchange("s", 1, 7, 0, True, True, shared=True))
    assert unmapped == descriptors
    s.close()
    for block in blocks:
        assert block is not None
        block.close()


def test_a_server_in_a_lost_one_s_place_can_be_replaced_until_it_was_told_what_that_knew() -> None:
    """Nothing would be lost with it, and nobody can come to one whose door is shut."""
    assert Service(succeeds=True).replaceable
    assert not Service().replaceable


def test_a_server_whose_workers_could_not_restore_it_is_not_to_be_replaced() -> None:
    """Such as one whose worker compresses what it sends, or may do so."""
    s = Service()
    s.handle(Join("s", 0, 1))
    s.handle(InitShard("s", 0, GROUPS, ASGD(), (torch.zeros(3),), restorable=False))
    s.handle(push(1, 1.0))
    assert not s.replaceable


def test_a_server_whose_workers_are_all_away_can_be_replaced_since_they_come_back() -> None:
    """They may be cut off, and its door be shut when the cable is back: nobody would ever reach it again."""
    clock = Clock()
    s = Service(clock)
    for rank in (0, 1):
        s.handle(Join("s", rank, 2, Policy(silence_s=2.0)))
    s.handle(InitShard("s", 0, GROUPS, ASGD(), (torch.zeros(3),)))
    for rank in (0, 1):
        s.handle(push(1, 1.0, rank))
    assert s.replaceable
    for clock.now in range(1, 5):
        s.tick()
    assert not s.handle(Heartbeat("s", 0)).living
    assert s.replaceable
    for rank in (0, 1):
        s.handle(Leave("s", rank))
    assert not s.replaceable
