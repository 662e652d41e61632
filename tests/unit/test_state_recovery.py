"""A server's way back: each transition of the table in state_recovery, and what must not happen in each phase."""

from __future__ import annotations

import pytest
import torch

from lightning_asgd.core.server.registry import Phase
from lightning_asgd.recovery.messages import ReplicaState, StateReport
from lightning_asgd.recovery.state_recovery import StateRecovery


def report(worker: int, version: int = 0, **about: object) -> StateReport:
    held = ReplicaState(0, version, (torch.zeros(1),), {})
    return StateReport("s", worker, (held,), **about)  # type: ignore[arg-type]


def collecting(*workers: int) -> StateRecovery:
    recovery = StateRecovery(replaces=True)
    for worker in workers:
        recovery.join(worker, reports=True)
    return recovery


def restored(*workers: int) -> StateRecovery:
    recovery = collecting(*workers)
    for worker in workers:
        recovery.add(report(worker))
    recovery.take()
    return recovery


def test_a_new_server_is_intact_and_a_replacement_is_lost() -> None:
    assert StateRecovery().phase is Phase.INTACT
    assert StateRecovery(replaces=True).phase is Phase.LOST


def test_only_the_phases_before_the_newest_state_is_taken_defer_pushes() -> None:
    assert [phase for phase in Phase if in_phase(phase).phase.lost] == [
        Phase.LOST,
        Phase.COLLECTING,
    ]
    assert [phase for phase in Phase if in_phase(phase).phase.begun] == [
        Phase.COLLECTING,
        Phase.RESTORED,
    ]


def in_phase(phase: Phase) -> StateRecovery:
    return {
        Phase.INTACT: StateRecovery,
        Phase.LOST: lambda: StateRecovery(replaces=True),
        Phase.COLLECTING: lambda: collecting(1),
        Phase.RESTORED: lambda: restored(1),
    }[phase]()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Phase.INTACT, Phase.LOST),
        (Phase.LOST, Phase.LOST),
        (Phase.COLLECTING, Phase.COLLECTING),
        (Phase.RESTORED, Phase.RESTORED),
    ],
    ids=lambda phase: phase.name,
)
def test_a_heartbeat_of_a_worker_that_waited_shows_that_a_state_was_lost(before: Phase, after: Phase) -> None:
    recovery = in_phase(before)
    recovery.note_heartbeat(1, waited=True, now=0.0)
    assert recovery.phase is after
    recovery = in_phase(before)
    recovery.note_heartbeat(1, waited=False, now=0.0)
    assert recovery.phase is before


@pytest.mark.parametrize("before", [Phase.INTACT, Phase.LOST], ids=lambda phase: phase.name)
@pytest.mark.parametrize("reports", [True, False], ids=["reports", "is new"])
def test_the_first_worker_that_joins_begins_the_collecting(before: Phase, reports: bool) -> None:
    recovery = in_phase(before)
    recovery.settled.add(7)  # nothing of before counts
    assert recovery.join(1, reports=reports) is True
    assert recovery.phase is Phase.COLLECTING
    assert recovery.settled == set()
    assert recovery.join(2, reports=True) is False
    assert recovery.awaited([1, 2]) == ({1, 2} if reports else {2})


def test_a_worker_that_joins_again_with_nothing_to_report_is_not_awaited() -> None:
    recovery = collecting(1, 2)
    recovery.join(2, reports=False)
    assert recovery.awaited([1, 2]) == {1}
    recovery.join(2, reports=True)
    assert recovery.awaited([1, 2]) == {1, 2}


def test_the_newest_state_is_taken_once_all_living_workers_have_reported() -> None:
    recovery = collecting(1, 2, 3)
    assert not recovery.complete([])  # nobody has reported
    recovery.add(report(1, version=4))
    assert not recovery.complete([1, 2])
    recovery.add(report(2, version=9))
    assert not recovery.complete([1, 2, 3])
    assert recovery.complete([1, 2])  # the third died
    assert [held.version for held in recovery.take()] == [9]
    assert recovery.phase is Phase.RESTORED
    assert recovery.newest == {}
    assert not recovery.complete([1, 2])  # it is taken once


def test_it_is_over_when_all_living_workers_that_reported_have_replayed() -> None:
    recovery = restored(1, 2)
    assert not recovery.over([1, 2, 3])
    recovery.settled.add(1)
    assert not recovery.over([1, 2, 3])
    assert recovery.over([1, 3])  # the second died, the third is new
    recovery.settled.add(2)
    assert recovery.over([1, 2, 3])


@pytest.mark.parametrize("phase", [Phase.INTACT, Phase.LOST, Phase.COLLECTING], ids=lambda phase: phase.name)
def test_nothing_is_over_before_a_state_was_taken(phase: Phase) -> None:
    assert not in_phase(phase).over([])


@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.name)
def test_a_session_of_a_job_begins_with_nothing_lost(phase: Phase) -> None:
    recovery = in_phase(phase)
    recovery.begin_session(elastic=False)
    assert recovery.phase is Phase.INTACT
    assert recovery.offers == {}


def test_an_elastic_run_whose_state_was_lost_has_lost_it_from_its_session_too() -> None:
    for phase in Phase:
        recovery = in_phase(phase)
        recovery.begin_session(elastic=True)
        assert recovery.phase is (Phase.LOST if phase in (Phase.LOST, Phase.COLLECTING) else Phase.INTACT)


def test_workers_that_have_reported_are_waiting_only_while_others_have_not() -> None:
    recovery = collecting(1, 2)
    recovery.add(report(1))
    assert list(recovery.waiting) == [1]
    recovery.add(report(2))
    recovery.take()
    assert list(recovery.waiting) == []


def test_nobody_reports_any_more_after_the_time_in_which_workers_notice_the_loss() -> None:
    recovery = StateRecovery(replaces=True)
    assert not recovery.nobody_reports([], silence_s=10.0, now=100.0)  # the clock starts with the first question
    assert not recovery.nobody_reports([], silence_s=10.0, now=130.0)
    recovery.note_heartbeat(1, waited=True, now=130.0)  # it will report
    assert not recovery.nobody_reports([], silence_s=10.0, now=131.0)
    assert recovery.nobody_reports([], silence_s=10.0, now=160.1)


def test_a_living_worker_that_is_to_report_is_waited_for_without_end() -> None:
    recovery = collecting(1)
    assert not recovery.nobody_reports([1], silence_s=10.0, now=0.0)
    assert not recovery.nobody_reports([1], silence_s=10.0, now=1e6)
    assert recovery.nobody_reports([], silence_s=10.0, now=1e6)


def test_a_new_worker_that_sends_heartbeats_does_not_prolong_the_wait_for_reports() -> None:
    recovery = StateRecovery(replaces=True)
    recovery.join(1, reports=False)
    assert not recovery.nobody_reports([1], silence_s=10.0, now=0.0)
    recovery.note_heartbeat(1, waited=False, now=29.0)
    assert recovery.nobody_reports([1], silence_s=10.0, now=30.1)


def test_workers_that_do_not_know_that_they_were_suspected_are_stale() -> None:
    recovery = collecting(1, 2)
    recovery.add(report(1, incarnations={2: 1}, answered=5))
    recovery.add(report(2, incarnation=0, answered=3))
    assert recovery.incarnations == {2: 1}
    assert recovery.stale == {2}
    assert recovery.answered == 5
    assert recovery.drop_stale() == {2}
    assert set(recovery.offers) == {1}
