from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asgd.core.foundation.errors import (
    ASGDError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ProtocolError,
    WorkerAwayError,
    WorkerLostError,
)
from lightning_asgd.core.protocol import Contribution, Join, Policy
from lightning_asgd.core.server.collective_table import CollectiveTable
from lightning_asgd.core.server.membership import Membership
from lightning_asgd.core.server.pending_replies import Completion


def coordinator(workers: int) -> CollectiveTable:
    result = CollectiveTable(Membership("7.1", workers))
    for rank in range(workers):
        result.join(rank)
    return result


def say(worker: int, seq: int = 1, kind: str = "all_gather", name: str = "loss", **fields: Any) -> Contribution:
    return Contribution("7.1", worker, seq, kind, name, **{"payload": f"value {worker}", **fields})


def values(due: list[Completion]) -> dict[int, Any]:
    assert not [d for d in due if isinstance(d.reply, ASGDError)]
    return {d.request.worker: d.reply for d in due}


def errors(due: list[Completion]) -> dict[int, ASGDError]:
    found = {d.request.worker: d.reply for d in due if isinstance(d.reply, ASGDError)}
    assert len(found) == len(due)
    return found


def test_everybody_gets_everybodys_value_once_the_last_has_come() -> None:
    c = coordinator(3)
    assert c.contribute(say(2), 0.0) == []
    assert c.contribute(say(0), 0.0) == []
    due = c.contribute(say(1), 0.0)
    everything = {0: "value 0", 1: "value 1", 2: "value 2"}
    assert values(due) == {0: everything, 1: everything, 2: everything}
    assert [list(d.reply) for d in due] == [[0, 1, 2]] * 3  # in the order of ranks


def test_a_worker_alone_does_not_wait() -> None:
    assert values(coordinator(1).contribute(say(0), 0.0)) == {0: {0: "value 0"}}


def test_a_broadcast_delivers_the_sources_value_only() -> None:
    c = coordinator(3)
    for rank in (0, 2):
        assert c.contribute(say(rank, kind="broadcast", source=1), 0.0) == []
    due = c.contribute(say(1, kind="broadcast", source=1), 0.0)
    assert values(due) == {rank: {1: "value 1"} for rank in range(3)}


def test_a_gather_delivers_to_the_target_only() -> None:
    c = coordinator(2)
    c.contribute(say(0, kind="gather", target=0), 0.0)
    due = c.contribute(say(1, kind="gather", target=0), 0.0)
    assert values(due) == {0: {0: "value 0", 1: "value 1"}, 1: {}}


def test_collectives_are_numbered_and_may_overlap() -> None:
    c = coordinator(2)
    assert c.contribute(say(0, 1), 0.0) == []
    c.contribute(say(1, 1), 0.0)
    assert c.contribute(say(1, 2, payload="b"), 0.0) == []
    assert values(c.contribute(say(0, 2, payload="a"), 0.0)) == {0: {0: "a", 1: "b"}, 1: {0: "a", 1: "b"}}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"kind": "barrier", "name": "join"}, {"kind": "broadcast", "name": "join"}),
        ({"kind": "reduce", "name": "train_loss"}, {"kind": "reduce", "name": "val_loss"}),
    ],
)
def test_a_mismatch_names_both_calls_on_both_sides(first: dict[str, str], second: dict[str, str]) -> None:
    c = coordinator(2)
    c.contribute(say(0, 3, **first), 0.0)
    found = errors(c.contribute(say(1, 3, **second), 0.0))
    assert set(found) == {0, 1}
    for error in found.values():
        assert isinstance(error, CollectiveMismatchError)
        text = str(error)
        assert f"worker 1 called {second['kind']} {second['name']!r}" in text
        assert f"worker 0 called {first['kind']} {first['name']!r}" in text
        assert "collective 3 of session '7.1'" in text
        assert "Expected every worker to make the same calls" in text


@pytest.mark.parametrize(("first", "second"), [({"source": 0}, {"source": 1}), ({"target": 0}, {"target": None})])
def test_a_mismatch_in_direction_fails_both_sides(first: dict[str, Any], second: dict[str, Any]) -> None:
    c = coordinator(2)
    c.contribute(say(0, **first), 0.0)
    found = errors(c.contribute(say(1, **second), 0.0))
    assert {type(e) for e in found.values()} == {CollectiveMismatchError}
    assert set(found) == {0, 1}


def test_a_mismatch_names_all_who_agreed() -> None:
    c = coordinator(3)
    c.contribute(say(0, kind="barrier"), 0.0)
    c.contribute(say(2, kind="barrier"), 0.0)
    found = errors(c.contribute(say(1, kind="broadcast"), 0.0))
    assert set(found) == {0, 1, 2}
    assert "workers 0, 2 called barrier" in str(found[0])


def test_a_worker_who_leaves_is_not_waited_for() -> None:
    c = coordinator(3)
    c.contribute(say(0), 0.0)
    c.contribute(say(1), 0.0)
    due = c.leave(2, "killed")
    assert values(due) == {0: {0: "value 0", 1: "value 1"}, 1: {0: "value 0", 1: "value 1"}}
    assert c.members.living == {0, 1}
    c.contribute(say(0, 2), 0.0)
    assert set(values(c.contribute(say(1, 2), 0.0))) == {0, 1}


def test_the_value_of_a_worker_who_left_while_waiting_does_not_count() -> None:
    c = coordinator(3)
    c.contribute(say(0), 0.0)
    c.contribute(say(2), 0.0)
    c.leave(2, "killed")
    due = c.contribute(say(1), 0.0)
    assert values([d for d in due if d.request.worker != 2]) == {
        0: {0: "value 0", 1: "value 1"},
        1: {0: "value 0", 1: "value 1"},
    }


def test_leaving_twice_changes_nothing() -> None:
    c = coordinator(2)
    c.leave(1)
    assert c.leave(1, "killed") == []
    assert c.members.left == {1: ""}


def test_worker_zeros_death_fails_everybody_now_and_later() -> None:
    c = coordinator(3)
    c.contribute(say(1), 0.0)
    found = errors(c.leave(0, "its process ended with exit code -9"))
    assert set(found) == {1}
    late = errors(c.contribute(say(2), 0.0))
    for error in (found[1], late[2]):
        assert isinstance(error, WorkerLostError)
        assert "Worker 0" in str(error)
        assert "exit code -9" in str(error)
        assert "ckpt_path='last'" in str(error)


def test_worker_zero_may_leave_in_order() -> None:
    c = coordinator(2)
    assert c.leave(0) == []
    assert values(c.contribute(say(1), 0.0)) == {1: {1: "value 1"}}


def test_a_broadcast_fails_when_its_source_leaves_before_it_spoke() -> None:
    c = coordinator(3)
    c.contribute(say(0, kind="broadcast", name="layout", source=1), 0.0)
    found = errors(c.leave(1, "killed"))
    assert set(found) == {0}
    assert isinstance(found[0], WorkerLostError)
    assert re.search("broadcast 'layout' cannot be completed: worker 1, .*lost.*killed", str(found[0]))


@pytest.mark.parametrize("reason", ["", "killed"])
def test_a_broadcast_whose_source_left_before_it_began_fails_for_all_who_call_it(reason: str) -> None:
    c = coordinator(3)
    c.leave(1, reason)
    due = [d for rank in (0, 2) for d in c.contribute(say(rank, kind="broadcast", source=1), 0.0)]
    found = errors(due)
    assert set(found) == {0, 2}
    assert {type(e) for e in found.values()} == {WorkerLostError}


def test_a_broadcast_from_a_rank_that_does_not_exist_fails_for_all_who_call_it() -> None:
    c = coordinator(2)
    due = [d for rank in (0, 1) for d in c.contribute(say(rank, kind="broadcast", source=7), 0.0)]
    assert set(errors(due)) == {0, 1}


def test_a_worker_who_is_declared_gone_while_it_waits_is_told_so() -> None:
    c = coordinator(3)
    c.contribute(say(1), 0.0)
    found = errors(c.leave(1, "reported by worker 0"))
    assert {rank: type(e) for rank, e in found.items()} == {1: WorkerLostError}


def test_a_worker_who_was_declared_gone_is_told_so_when_it_calls() -> None:
    c = coordinator(2)
    c.leave(1, "it raised ValueError")
    found = errors(c.contribute(say(1), 0.0))
    assert isinstance(found[1], WorkerLostError)
    assert re.search("Worker 1 called all_gather 'loss' after it was declared lost .*ValueError", str(found[1]))


def test_what_a_worker_called_before_it_left_does_not_bind_the_others() -> None:
    c = coordinator(3)
    c.contribute(say(2, kind="broadcast", source=2, timeout_s=1.0), 0.0)
    c.leave(2, "killed")
    c.contribute(say(0), 0.0)
    everything = {0: "value 0", 1: "value 1"}
    assert values(c.contribute(say(1), 0.0)) == {0: everything, 1: everything}


def test_a_collective_expires_and_names_who_is_missing() -> None:
    c = coordinator(4)
    c.contribute(say(0, timeout_s=10.0), 100.0)
    c.contribute(say(2, timeout_s=10.0), 105.0)
    assert c.expire(114.9) == []
    found = errors(c.expire(115.0))
    assert set(found) == {0, 2}
    text = str(found[0])
    assert isinstance(found[0], CollectiveTimeoutError)
    assert "all_gather 'loss' (collective 1 of session '7.1') was not completed within 10 s" in text
    assert "workers 1, 3 did not call it" in text
    assert "never joined" not in text
    assert "raise timeouts.collective_s" in text
    assert c.expire(1000.0) == []


def test_a_collective_that_expires_names_who_never_joined() -> None:
    c = CollectiveTable(Membership("7.1", 3))
    c.join(0)
    c.join(1)
    c.contribute(say(0, timeout_s=10.0), 0.0)
    text = str(errors(c.expire(10.0))[0])
    assert "workers 1, 2 did not call it. Worker 2 never joined." in text


def test_all_are_told_once_who_has_not_joined() -> None:
    c = CollectiveTable(Membership("7.1", 4))
    c.join(0)
    c.contribute(say(0, timeout_s=1800.0), 100.0)
    c.expire(129.9)
    assert c.members.events == []
    c.expire(130.0)
    c.expire(140.0)
    assert c.members.events == ["Workers 1, 2, 3 did not join within 30 s. Others wait."]
    for worker in (1, 2, 3):
        c.join(worker, 150.0)
        c.contribute(say(worker, timeout_s=1800.0), 150.0)
    c.contribute(say(0, 2, timeout_s=1800.0), 160.0)
    c.expire(300.0)
    assert len(c.members.events) == 1


def test_workers_who_left_are_not_missing() -> None:
    c = coordinator(3)
    c.contribute(say(0, timeout_s=10.0), 0.0)
    c.leave(2, "killed")
    text = str(errors(c.expire(10.0))[0])
    assert "worker 1 did not call it" in text
    assert "[0, 1]" in text


def test_a_repeated_contribution_changes_nothing_while_others_are_waited_for() -> None:
    c = coordinator(2)
    assert c.contribute(say(0), 0.0) == []
    assert c.contribute(say(0), 0.0) == []
    due = c.contribute(say(1), 0.0)
    assert sorted(d.request.worker for d in due) == [0, 1]
    assert values(due)[0] == {0: "value 0", 1: "value 1"}


def test_a_contribution_repeated_after_the_answer_is_an_error() -> None:
    c = coordinator(2)
    c.contribute(say(0), 0.0)
    c.contribute(say(1), 0.0)
    found = errors(c.contribute(say(0), 0.0))
    assert isinstance(found[0], ProtocolError)
    assert "Worker 0 called collective 1 again" in str(found[0])


def test_joining_again_changes_nothing() -> None:
    c = coordinator(2)
    c.join(1)
    assert c.members.joined == {0, 1}


@pytest.mark.parametrize("rank", [2, 100, -1])
def test_a_rank_that_was_not_expected_cannot_join(rank: int) -> None:
    with pytest.raises(ProtocolError, match=f"Worker {rank} cannot join session '7.1'. Expected a rank below 2. All"):
        coordinator(2).join(rank)


@pytest.mark.parametrize(("reason", "shown"), [("killed", "killed"), ("", "it had left")])
def test_a_worker_who_left_cannot_join_again(reason: str, shown: str) -> None:
    c = coordinator(2)
    c.leave(1, reason)
    with pytest.raises(WorkerLostError, match=f"Worker 1 cannot join .* again: .*{shown}.*checkpoint to resume"):
        c.join(1)


# ---------------------------------------------------------------------- every order of events

Program = tuple[dict[str, Any], ...]
Event = tuple[str, int]


@dataclass
class World:
    """Three workers who make their calls one after another; a worker who gets an error calls nothing more.

    Args:
        programs: per worker, the calls it makes.
        leavers: worker -> reason of those who leave at some moment.
        waiters_leave: whether that moment may be while they wait for an answer: others report them.
        failed_leave: whether a worker who got an error leaves at some later moment, as the strategy sees to.
    """

    programs: tuple[Program, Program, Program]
    leavers: dict[int, str]
    waiters_leave: bool = False
    failed_leave: bool = False
    coordinator: CollectiveTable = field(default_factory=lambda: coordinator(3))
    answers: tuple[list[Any], list[Any], list[Any]] = field(default_factory=lambda: ([], [], []))
    waiting: list[bool] = field(default_factory=lambda: [False] * 3)
    gone: set[int] = field(default_factory=set)

    def failed(self, rank: int) -> bool:
        return bool(self.answers[rank]) and isinstance(self.answers[rank][-1], ASGDError)

    def events(self) -> Iterator[Event]:
        for rank in set(range(3)) - self.gone:
            if not self.waiting[rank] and not self.failed(rank) and len(self.answers[rank]) < len(self.programs[rank]):
                yield "call", rank
            leaves = rank in self.leavers or (self.failed_leave and self.failed(rank))
            if leaves and (self.waiters_leave or not self.waiting[rank]):
                yield "leave", rank

    def after(self, event: Event) -> World:
        world = copy.deepcopy(self)
        what, rank = event
        if what == "leave":
            world.gone.add(rank)
            due = world.coordinator.leave(rank, world.leavers.get(rank, "it raised an error"))
        else:
            world.waiting[rank] = True
            done = len(world.answers[rank])
            due = world.coordinator.contribute(say(rank, done + 1, **world.programs[rank][done]), 0.0)
        for delivery in due:
            worker = delivery.request.worker
            assert world.waiting[worker], "an answer nobody waits for"
            assert delivery.request.seq == len(world.answers[worker]) + 1
            world.waiting[worker] = False
            world.answers[worker].append(delivery.reply)
        return world

    def ends(self) -> Iterator[World]:
        """What becomes of it in every order of events."""
        events = list(self.events())
        if not events:
            yield self
        for event in events:
            yield from self.after(event).ends()


GATHER: dict[str, Any] = {"kind": "all_gather"}
PROGRAMS: dict[str, Program] = {
    "gather, gather": (GATHER, GATHER),
    "broadcast, gather": ({"kind": "broadcast", "source": 0}, GATHER),
    "gather, broadcast from 1": (GATHER, {"kind": "broadcast", "source": 1}),
    "gather to 0, barrier": ({"kind": "gather", "target": 0}, {"kind": "barrier", "payload": None}),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("leaver", [0, 1, 2])
@pytest.mark.parametrize(("reason", "reported"), [("", False), ("it raised", False), ("killed", True)])
def test_in_every_order_nobody_waits_for_ever_and_all_agree(
    program: Program, leaver: int, reason: str, reported: bool
) -> None:
    count = 0
    stayed = {0, 1, 2} - {leaver}
    zero_died = leaver == 0 and bool(reason)
    for world in World((program,) * 3, {leaver: reason}, waiters_leave=reported).ends():
        count += 1
        assert not [rank for rank in stayed if world.waiting[rank]], "somebody waits for ever"
        fatal = zero_died
        for number, call in enumerate(program):
            fatal = fatal or call.get("source") == leaver
            answers = {rank: world.answers[rank][number] for rank in range(3) if len(world.answers[rank]) > number}
            bad = {rank: a for rank, a in answers.items() if isinstance(a, ASGDError)}
            good = {rank: a for rank, a in answers.items() if rank not in bad}
            if call.get("target") is not None:
                assert all(a == {} for rank, a in good.items() if rank != call["target"])
                good = {rank: a for rank, a in good.items() if rank == call["target"]}
            assert len({repr(a) for a in good.values()}) <= 1, "workers got different values"
            for answer in good.values():
                assert set(answer) == {call["source"]} if call.get("source") is not None else stayed <= set(answer)
            assert {type(a) for rank, a in bad.items() if rank in stayed} <= {WorkerLostError}
            assert fatal or not stayed & set(bad), "an error without a cause"
            assert fatal or stayed <= set(answers)
    assert count >= 50


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("call", [0, 1])
def test_in_every_order_a_mismatch_leaves_nobody_waiting(odd: int, call: int) -> None:
    right: Program = (GATHER, GATHER)
    wrong = tuple({"kind": "barrier"} if number == call else GATHER for number in range(2))
    programs = tuple(wrong if rank == odd else right for rank in range(3))
    kinds = set()
    for world in World(programs, {}, failed_leave=True).ends():  # type: ignore[arg-type]
        assert not any(world.waiting), "somebody waits for ever"
        kinds |= {type(answers[-1]) for answers in world.answers if isinstance(answers[-1], ASGDError)}
    assert CollectiveMismatchError in kinds


# ---------------------------------------------------------------- workers that are silent


def watched(workers: int, **policy: Any) -> CollectiveTable:
    result = CollectiveTable(Membership("7.1", workers, Policy(**{"silence_s": 10.0, **policy})))
    for rank in range(workers):
        result.join(rank, 0.0)
    return result


def pass_time(c: CollectiveTable, until: float, *heard: int) -> list[Completion]:
    """Let time pass in steps of a second, in which some workers give signs of life."""
    due: list[Completion] = []
    start = int(c.members._silence._looked or 0)
    for now in range(start, int(until) + 1):
        for worker in heard:
            c.members.note_heartbeat(worker, float(now))
        due += c.expire(float(now))
    return due


def test_a_silent_worker_is_not_waited_for() -> None:
    c = watched(3)
    c.contribute(say(0), 0.0)
    c.contribute(say(1), 0.0)
    assert pass_time(c, 10, 0, 1) == []
    due = pass_time(c, 11, 0, 1)
    assert values(due) == {0: {0: "value 0", 1: "value 1"}, 1: {0: "value 0", 1: "value 1"}}
    assert c.members.living == {0, 1}
    assert c.members.events == ["Worker 2 sent no heartbeat for 11 s; the others continue without it. It may rejoin."]
    with pytest.raises(WorkerAwayError, match="Worker 2 sent no heartbeat for 11 s"):
        c.members.check(2)
    c.members.check(1)


def test_it_is_told_what_it_missed_and_then_takes_part_again() -> None:
    c = watched(2)
    pass_time(c, 11, 0)
    assert values(c.contribute(say(0, 1), 11.0)) == {0: {0: "value 0"}}
    assert values(c.contribute(say(0, 2, "broadcast", "seed", source=0), 11.0)) == {0: {0: "value 0"}}
    assert values(c.contribute(say(0, 3, "gather", "states", target=0), 11.0)) == {0: {0: "value 0"}}
    c.join(1, 12.0)
    c.members.check(1)  # it may train
    assert c.members.living == {0}  # but nobody waits for it
    assert c.members.catching_up == {1}
    assert values(c.contribute(say(1, 1), 12.0)) == {1: {0: "value 0"}}
    assert values(c.contribute(say(1, 2, "broadcast", "seed", source=0), 12.0)) == {1: {0: "value 0"}}
    assert values(c.contribute(say(1, 3, "gather", "states", target=0), 12.0)) == {1: {}}
    assert c.contribute(say(0, 4), 12.0) == [(say(0, 4), {0: "value 0"})]  # still behind: 4 was not waited for
    assert values(c.contribute(say(1, 4), 12.0)) == {1: {0: "value 0"}}
    assert c.contribute(say(1, 5), 12.0) == []  # the first that is open
    assert c.members.living == {0, 1}
    assert c.members.events[-1] == "Worker 1 has rejoined."
    both = {0: "value 0", 1: "value 1"}
    assert values(c.contribute(say(0, 5), 12.0)) == {0: both, 1: both}
    assert not c._missed


def test_one_that_has_missed_nothing_takes_part_at_once() -> None:
    c = watched(2)
    pass_time(c, 11, 0)
    c.join(1, 12.0)
    assert c.members.living == {0, 1}
    assert not c.members.catching_up


def test_one_that_waits_in_a_collective_gets_its_answer_when_it_wakes() -> None:
    c = watched(2)
    c.contribute(say(1), 0.0)
    pass_time(c, 11, 0)
    both = {0: "value 0", 1: "value 1"}
    assert values(c.contribute(say(0), 11.0)) == {0: both, 1: both}


def test_what_it_missed_must_fit_what_it_calls() -> None:
    c = watched(2)
    pass_time(c, 11, 0)
    c.contribute(say(0, name="loss"), 11.0)
    c.join(1, 12.0)
    (error,) = errors(c.contribute(say(1, name="accuracy"), 12.0)).values()
    assert isinstance(error, CollectiveMismatchError)
    assert "worker 1 called all_gather 'accuracy' where worker 0 called all_gather 'loss'" in str(error)


def test_worker_0_is_waited_for_at_sync_points_and_not_for_its_data() -> None:
    c = watched(2)
    pass_time(c, 11, 1)
    assert c.members.living == {1}
    assert c.contribute(say(1), 11.0) == []
    assert set(values(c.contribute(say(0), 12.0))) == {0, 1}
    assert c.members.living == {0, 1}


def test_one_that_takes_part_in_a_collective_may_still_not_train_before_it_joins_again() -> None:
    c = watched(2)
    pass_time(c, 11, 0)
    c.members.note_heartbeat(1, 11.0)
    c.contribute(say(1), 11.0)
    assert c.members.living == {0, 1}
    assert c.members.trusted == {0}
    with pytest.raises(WorkerAwayError, match="Worker 1 was disconnected"):
        c.members.check(1)
    c.join(1, 11.0)
    assert c.members.trusted == {0, 1}


def test_only_the_first_server_ends_a_session_for_silence() -> None:
    c = CollectiveTable(Membership("7.1", 2, Policy(silence_s=10.0, abort=True), index=1))
    for rank in range(2):
        c.join(rank, 0.0)
    pass_time(c, 8, 0)  # it loses patience sooner
    assert c.members.living == {0}
    assert not c.members.aborted
    assert not c.members.events


def test_ranks_of_another_session_cannot_leave() -> None:
    c = watched(1, abort=True)
    assert c.leave(1, "killed") == []
    c.members.check(0)


# ---------------------------------------------------------------- in a lost one's place


def successor(workers: int, answered: int, *, incarnations: dict[int, int] | None = None) -> CollectiveTable:
    c = coordinator(workers)
    c.members.resume(incarnations or {}, set())
    c.resume(answered)
    return c


def test_a_collective_that_a_lost_server_had_answered_waits_for_nobody() -> None:
    """Not for worker 0 either, which is away; it gets the same answer when it wakes."""
    c = CollectiveTable(Membership("7.1", 3, Policy(silence_s=10.0)))
    for rank in range(3):
        c.join(rank, 0.0)
    c.members.resume({}, set())
    c.resume(4)
    for now in range(1, 12):
        c.members.note_heartbeat(1, now)
        c.members.note_heartbeat(2, now)
        c.expire(now)
    assert c.members.living == {1, 2}
    everything = {0: "a", 1: "b", 2: "c"}
    assert c.contribute(say(1, 4), 11.0) == []  # it was not answered
    assert values(c.contribute(say(2, 4, answer=everything), 11.0)) == {1: everything, 2: everything}
    c.join(0, 12.0)
    assert values(c.contribute(say(0, 4), 12.0)) == {0: everything}
    assert not c._missed


def test_who_calls_it_later_is_answered_as_the_others_were_by_the_lost_server() -> None:
    c = successor(3, answered=4)
    everything = {0: "a", 1: "b", 2: "c"}
    assert values(c.contribute(say(1, 4, answer=everything), 0.0)) == {1: everything}
    assert c.contribute(say(1, 5), 0.0) == []  # it goes on, and waits for the others there
    assert values(c.contribute(say(0, 4), 0.0)) == {0: everything}
    assert values(c.contribute(say(2, 4, answer=everything), 0.0)) == {2: everything}
    c.contribute(say(0, 5), 0.0)
    assert set(values(c.contribute(say(2, 5), 0.0))) == {0, 1, 2}
    assert not c._missed


def test_what_one_alone_wants_is_waited_for_where_only_the_others_were_answered() -> None:
    c = successor(2, answered=4)
    assert c.contribute(say(1, 4, kind="gather", target=0, answer={}), 0.0) == []
    due = c.contribute(say(0, 4, kind="gather", target=0), 0.0)
    assert values(due) == {0: {0: "value 0", 1: "value 1"}, 1: {}}


def test_nothing_is_kept_for_a_worker_that_calls_a_later_one() -> None:
    """It was answered the earlier one by a server that was lost, and says no more about it."""
    c = successor(3, answered=4)
    c.contribute(say(1, 4, answer={0: "a"}), 0.0)
    for rank in (0, 2):
        c.contribute(say(rank, 5), 0.0)
    assert not c._missed


def test_whom_a_coordinator_declares_away_before_it_knows_of_earlier_times_the_next_one_knows_of() -> None:
    c = CollectiveTable(Membership("7.1", 2, Policy(silence_s=10.0)))
    for rank in range(2):
        c.join(rank, 0.0)
    for now in range(1, 12):
        c.members.note_heartbeat(0, now)
        c.expire(now)
    assert c.members.suspected
    c.members.resume({1: 3}, set())  # three times before, as the workers tell, and once now
    assert c.members.incarnations == {1: 4}


def test_what_a_worker_that_sleeps_has_missed_outlives_the_server_that_kept_it() -> None:
    """The others tell the next one, and the one after that."""
    sleeps = CollectiveTable(Membership("7.1", 3, Policy(silence_s=10.0)))
    for rank in range(3):
        sleeps.join(rank, 0.0)
    told: dict[int, dict[int, Any]] = {}
    for seq in (1, 2, 3):
        if seq == 2:
            for now in range(1, 12):
                sleeps.members.note_heartbeat(0, now)
                sleeps.members.note_heartbeat(1, now)
                sleeps.expire(now)
        for rank in (0, 1) if seq > 1 else (2, 0, 1):
            for due in sleeps.contribute(say(rank, seq), 12.0):
                told[seq] = due.reply
    assert sleeps.needed == 1  # it has called the first one, but perhaps knows of no answer
    for _ in range(2):
        after = successor(3, answered=3)
        for rank, seq in ((0, 1), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)):
            assert values(after.contribute(say(rank, seq, answer=told[seq]), 0.0))[rank] == told[seq]
    for seq in (1, 2, 3):
        assert values(after.contribute(say(2, seq), 0.0)) == {2: told[seq]}
    assert not after._missed
    assert [len(after.contribute(say(rank, 4), 0.0)) for rank in range(3)] == [0, 0, 3]
    assert after.needed == 3


def test_what_one_alone_wanted_of_a_collective_is_not_kept_for_the_others() -> None:
    after = successor(3, answered=3)
    answer = {rank: f"value {rank}" for rank in range(3)}
    after.contribute(say(0, 1, kind="gather", target=0, answer=answer), 0.0)
    assert values(after.contribute(say(2, 1, kind="gather", target=0), 0.0)) == {2: {}}


def test_whom_a_coordinator_has_let_in_again_was_not_away() -> None:
    c = CollectiveTable(Membership("7.1", 2, Policy(silence_s=10.0)))
    for rank in range(2):
        c.join(rank, 0.0)
    for now in range(1, 12):
        c.members.note_heartbeat(0, now)
        c.expire(now)
    c.join(1, 12.0)  # with its offer: it tells all that it knows
    c.members.resume({1: 3}, set())
    assert c.members.incarnations == {1: 3}


def test_workers_are_at_odds_where_some_wait_in_a_collective_and_all_others_for_data() -> None:
    c = coordinator(3)
    assert c.at_odds({0, 1, 2}) == set()
    c.contribute(say(2), 0.0)
    assert c.at_odds({0}) == set()  # worker 1 is busy
    assert c.at_odds({0, 1}) == {2}
    c.contribute(say(1), 0.0)
    c.contribute(say(0), 0.0)
    assert c.at_odds(set()) == set()


def test_a_coordinator_that_slept_declares_nobody_away() -> None:
    c = watched(2)
    pass_time(c, 5, 0, 1)
    assert c.expire(100.0) == []
    assert c.members.living == {0, 1}
    assert pass_time(c, 109, 0) == []
    pass_time(c, 111, 0)
    assert c.members.living == {0}


def test_without_patience_nobody_is_away() -> None:
    c = coordinator(2)
    assert pass_time(c, 1000) == []
    assert c.members.living == {0, 1}


def test_too_few_workers_end_the_session() -> None:
    c = watched(3, min_workers=2)
    c.contribute(say(0), 0.0)
    assert c.leave(2, "killed") == []
    (error,) = errors(c.leave(1, "killed too")).values()
    assert isinstance(error, WorkerLostError)
    assert "Worker 1 is lost (killed too). 1 are left, but Advanced.min_workers=2. Start the job again" in str(error)
    with pytest.raises(WorkerLostError, match="min_workers=2"):
        c.members.check(0)
    (error,) = errors(c.contribute(say(0, 2), 0.0)).values()
    assert "min_workers=2" in str(error)


@pytest.mark.parametrize("last", [0.0, 0.4, 0.8])
def test_too_few_workers_end_the_session_only_if_the_others_are_heard(last: float) -> None:
    """If none is, this process's network may be down."""
    c = watched(3, min_workers=2)
    for worker in range(3):
        c.members.note_heartbeat(worker, worker * last)
    for tenths in range(1, 200):
        c.expire(tenths / 10)
    assert c.members.living == set()
    assert not c.members.aborted
    c = watched(3, min_workers=2)
    pass_time(c, 30, 0)
    assert "1 are left, but Advanced.min_workers=2" in c.members.aborted


def test_orderly_leaving_ends_nothing() -> None:
    c = watched(3, min_workers=3, abort=True)
    c.leave(2)
    c.leave(1)
    c.members.check(0)


@pytest.mark.parametrize("hangs", [True, False])
def test_abort_names_who_and_why(hangs: bool) -> None:
    c = watched(3, abort=True)
    c.contribute(say(0), 0.0)
    due = pass_time(c, 11, 0, 1) if hangs else c.leave(2, "out of memory")
    (error,) = errors(due).values()
    fate = "sent no heartbeat for 11 s" if hangs else "is lost (out of memory)"
    assert f"Worker 2 {fate}, and on_worker_failure='abort'." in str(error)


def test_one_that_misses_too_much_is_gone_for_good() -> None:
    c = watched(2)
    pass_time(c, 11, 0)
    for seq in range(1, 1002):
        c.contribute(say(0, seq), 11.0)
    assert not c._missed
    with pytest.raises(WorkerLostError, match="it missed more than 1000 collectives"):
        c.join(1, 12.0)


EVENTS = st.tuples(st.sampled_from(["time", "sleep", "wake", "call"]), st.sampled_from(range(3)))


@given(st.lists(EVENTS, max_size=80))
@settings(max_examples=100)
def test_whatever_sleeps_all_living_get_the_same_answers_and_nobody_waits_for_ever(events: list[Any]) -> None:
    """Workers 1 and 2 sleep and wake as they like; 0 goes on. All see the same answers in the same order."""
    workers, rounds = 3, 6
    c = watched(workers)
    now = 0.0
    asleep: set[int] = set()
    called = dict.fromkeys(range(workers), 0)
    answered: dict[int, dict[int, Any]] = {w: {} for w in range(workers)}

    def take(due: list[Completion]) -> None:
        for d in due:
            assert not isinstance(d.reply, ASGDError), d.reply
            answered[d.request.worker][d.request.seq] = d.reply

    for what, who in events:
        if what == "time":
            for _ in range(11):
                now += 1
                for worker in set(range(workers)) - asleep:
                    c.members.note_heartbeat(worker, now)
                take(c.expire(now))
        elif what == "sleep" and who != 0:
            asleep.add(who)
        elif what == "wake" and who in asleep:
            asleep.discard(who)
            c.members.note_heartbeat(who, now)
            c.join(who, now)
        elif what == "call" and who not in asleep and called[who] == len(answered[who]) < rounds:
            called[who] += 1
            take(c.contribute(say(who, called[who], payload=(who, called[who])), now))
    asleep.clear()  # and whatever happened, all can finish
    for worker in range(1, workers):
        c.join(worker, now)
    for _ in range(rounds * workers):
        for worker in range(workers):
            if called[worker] == len(answered[worker]) < rounds:
                called[worker] += 1
                take(c.contribute(say(worker, called[worker], payload=(worker, called[worker])), now))
    for worker in range(workers):
        assert answered[worker] == answered[0]
        assert list(answered[worker]) == list(range(1, rounds + 1))
        assert all(0 in value for value in answered[worker].values())
    assert not c._missed
    assert not c._operations


# ---------------------------------------------------------------------- another chief


def succession(workers: int, silence_s: float = 0.0) -> CollectiveTable:
    result = CollectiveTable(Membership("7.1", workers, Policy(silence_s, another_chief=True)))
    for rank in range(workers):
        result.join(rank)
    return result


def test_another_worker_becomes_chief_and_the_collective_is_completed_without_worker_0() -> None:
    c = succession(3)
    c.contribute(say(1), 0.0)
    c.contribute(say(2), 0.0)
    assert c.members.chief == 0
    due = values(c.leave(0, "its process ended with exit code -9"))
    assert set(due) == {1, 2}
    assert set(due[1]) == {1, 2}
    assert not c.members.aborted
    assert c.members.chief == 1
    assert c.members.events[-1].endswith("the others continue without it.")


def test_the_chief_stays_when_a_lower_rank_comes_back() -> None:
    c = succession(3, silence_s=10.0)
    for second in range(12):
        for rank in (0, 2):
            c.members.note_heartbeat(rank, float(second))
        c.expire(float(second))
    assert set(c.members.suspected) == {1}
    c.leave(0, "killed")
    assert c.members.chief == 2  # until the workers agree
    assert set(values(c.contribute(say(2), 11.0))) == {2}
    c.join(1, 12.0)
    assert values(c.contribute(say(1), 12.0))[1] == {2: "value 2"}  # from which it learns who is chief
    c.contribute(say(1, 2), 12.0)
    assert set(values(c.contribute(say(2, 2), 12.0))) == {1, 2}
    assert c.members.chief == 2


def test_the_next_session_has_the_chief_of_the_one_before() -> None:
    c = succession(3)
    c.members.agreed_chief = 2
    join = Join("7.1.1", 1, 3, Policy(another_chief=True), after="7.1")
    assert Membership.following(c.members, join, {}).chief == 2
    assert Membership.following(c.members, replace(join, session="7.2", after=""), {}).chief == 0


@pytest.mark.parametrize("policy", [Policy(abort=True, another_chief=True), Policy(min_workers=3, another_chief=True)])
def test_worker_zeros_death_ends_a_session_that_any_death_ends(policy: Policy) -> None:
    c = CollectiveTable(Membership("7.1", 3, policy))
    for rank in range(3):
        c.join(rank)
    c.contribute(say(1), 0.0)
    assert set(errors(c.leave(0, "killed"))) == {1}
    assert "Worker 0 is lost (killed)" in c.members.aborted
