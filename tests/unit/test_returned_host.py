"""Worker 0 is started again after another worker has begun to host the servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.hosting.returned_host import Arrival, Moved, Signpost

THERE = Moved("127.0.0.1", 4711, 2, 3, "train.py 4")


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    with Rendezvous.host() as hosted:
        yield hosted


def arrive(rendezvous: Rendezvous, events: dict[float, Callable[[], None]]) -> tuple[Moved | None, float]:
    """Where worker 0 of four is told to go, and after how many seconds, if these events happen meanwhile."""
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds
        for at in [at for at in events if at <= now[0]]:
            events.pop(at)()

    arrival = Arrival(0, range(1, 4), THERE.program)
    return arrival.await_moved(rendezvous, clock=lambda: now[0], pause=pause), now[0]


def note(rendezvous: Rendezvous, found: Any) -> Callable[[], None]:
    return lambda: rendezvous.put("moved", found)


def comes(rendezvous: Rendezvous, rank: int) -> Callable[[], None]:
    return lambda: Arrival(rank, (), THERE.program).announce(rendezvous)


def test_it_begins_once_all_others_have_come(rendezvous: Rendezvous) -> None:
    found, after = arrive(rendezvous, {0.1 * rank: comes(rendezvous, rank) for rank in (1, 2, 3)})
    assert found is None
    assert after < 0.5


def test_it_begins_without_them_after_a_while(rendezvous: Rendezvous) -> None:
    found, after = arrive(rendezvous, {0.1: comes(rendezvous, 1)})
    assert found is None
    assert 4.9 < after < 5.2


def test_it_goes_where_the_servers_are_and_the_others_follow(rendezvous: Rendezvous) -> None:
    third = Arrival(3, {0, 1, 2}, THERE.program)
    noted = note(rendezvous, ["127.0.0.1", 4711, 2, 3, "train.py 4"])
    undecided = []
    events = {0.1: comes(rendezvous, 3), 1.0: lambda: (noted(), undecided.append(third.follows(rendezvous)))}
    found, after = arrive(rendezvous, events)  # type: ignore[arg-type]
    assert found == THERE, "worker 3 has been started again, too"
    assert after < 1.2
    assert undecided == [None]
    assert third.follows(rendezvous) == THERE
    assert Arrival(2, {0, 1, 3}, THERE.program).follows(rendezvous) is None, "it was there itself before"


@pytest.mark.parametrize(
    "found",
    [
        ["127.0.0.1", 4711, 2, 3, "other.py 4"],
        ["127.0.0.1", 4711, 2, 3],
        ["127.0.0.1", "4711", 2, 3, "train.py 4"],
        ["127.0.0.1", 70000, 2, 3, "train.py 4"],
        [],
    ],
)
def test_what_another_program_has_noted_counts_for_nothing(rendezvous: Rendezvous, found: Any) -> None:
    assert arrive(rendezvous, {0.1: note(rendezvous, found)})[0] is None


def test_a_whole_job_that_is_started_again_is_another_job(rendezvous: Rendezvous) -> None:
    events = {0.1: comes(rendezvous, 2), 0.2: note(rendezvous, ["127.0.0.1", 4711, 2, 3, "train.py 4"])}
    assert arrive(rendezvous, events)[0] is None, "worker 2, whose old process has noted that, has been started again"


def test_the_host_notes_it_where_a_process_listens(rendezvous: Rendezvous) -> None:
    hosts = [False]
    signpost = Signpost(rendezvous.address, lambda: THERE if hosts[0] else None)
    try:
        time.sleep(1.2)
        assert rendezvous.peek("moved") is None, "it hosts nothing"
        hosts[0], deadline = True, time.monotonic() + 10
        while rendezvous.peek("moved") is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert rendezvous.peek("moved") == ["127.0.0.1", 4711, 2, 3, "train.py 4"]
    finally:
        signpost.close()
