"""Which worker hosts the servers when the one that did is lost: every worker's view is set by hand."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.hosting.server_hosts import HostAddress, ServerHosts


class Workers:
    """Workers of a job, and what each sees of the others: True lives, False has ended, None does not answer."""

    def __init__(self, number: int) -> None:
        self.now = 0.0
        self.rendezvous = [Rendezvous.host() for _ in range(number)]
        self.sight: dict[tuple[int, int], bool | None] = {}
        self.hosted: list[tuple[int, Mapping[int, str]]] = []
        self.hosts = [self._worker(rank) for rank in range(number)]
        for worker in self.hosts:
            worker.joined({rank: each.mine for rank, each in enumerate(self.hosts)})

    def _worker(self, rank: int) -> ServerHosts:
        def look(place: HostAddress) -> bool | None:
            other = next(r for r, each in enumerate(self.rendezvous) if each.address == (place.host, place.port))
            return self.sight.get((rank, other), True)

        return ServerHosts(rank, self.rendezvous[rank], self.rendezvous[0].address, look=look, clock=lambda: self.now)

    def replace(self, rank: int) -> None:
        """Another process takes a worker's place, at another address."""
        before = self.hosts[rank]
        self.rendezvous.append(Rendezvous.host())
        entered = ServerHosts(
            rank, self.rendezvous[-1], self.rendezvous[0].address, look=before._look, clock=lambda: self.now
        )
        entered.enter(before.places, 0)
        self.hosts[rank] = entered

    def ends(self, *ranks: int) -> None:
        for rank in ranks:
            self.sight.update({(other, rank): False for other in range(len(self.hosts))})

    def cut(self, *side: int) -> None:
        """The network splits."""
        for one in range(len(self.hosts)):
            for other in range(len(self.hosts)):
                if (one in side) != (other in side):
                    self.sight[one, other] = None

    def moves(self, *ranks: int, rounds: int = 3) -> list[int]:
        """Each of these looks some times, in this order; returns those that have found another host, in order."""
        found: list[int] = []
        for _ in range(rounds):
            for rank in ranks:
                if rank not in found and self.hosts[rank].is_lost and self.hosts[rank].move(self._take_over(rank)):
                    found.append(rank)
            self.now += 0.5
        return found

    def _take_over(self, rank: int) -> Any:
        return lambda _, gone: self.hosted.append((rank, gone))

    def close(self) -> None:
        for rendezvous in self.rendezvous:
            rendezvous.close()


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Workers] = []

    def new(number: int, **about: Any) -> Workers:
        made.append(Workers(number, **about))
        return made[-1]

    yield new
    for workers in made:
        workers.close()


def test_the_lowest_living_rank_hosts_the_servers_and_the_others_follow(make: Any) -> None:
    workers = make(4)
    workers.ends(0)
    assert workers.moves(3, 2) == [], "worker 1 has not noticed yet"
    assert workers.moves(1, 2, 3) == [1, 2, 3]
    assert workers.hosted == [(1, {0: "its process has ended"})]
    assert {each.present for each in workers.hosts[1:]} == {1}
    assert {each.address for each in workers.hosts[1:]} == {workers.rendezvous[1].address}


def test_a_host_that_was_started_again_is_lost_no_longer(make: Any) -> None:
    workers = make(4)
    workers.ends(0)
    assert workers.moves(1, 2, 3) == [1, 2, 3]
    first = workers.hosts[1]
    first.hear((1, 2, 3), (0,))
    assert not first.has_returned(0)
    assert list(first.lost) == [0]
    workers.replace(0)
    first.hear((1, 2, 3), (0,))
    assert first.has_returned(0)
    assert first.lost == {}
    assert first.moved
    workers.hosts[0].follow(1, first.address, 1)
    workers.cut(2, 3)  # from 0 and 1
    workers.sight.update({(rank, len(workers.rendezvous) - 1): None for rank in (2, 3)})
    assert workers.moves(2, 3) == [], "worker 0 counts again: half of them are with the servers"
    workers.ends(1)
    assert workers.moves(2, 3) == [2, 3]
    assert workers.rendezvous[2].peek("lost host 0", bool), "for workers that were suspended since worker 0 was lost"


def test_a_host_whose_process_was_started_again_is_lost(make: Any) -> None:
    workers = make(3)
    workers.rendezvous[0].put("job", "the job")
    workers.hosts[1].check_host("the job")
    assert not workers.hosts[1].is_lost
    workers.rendezvous[0].put("job", "another one")
    workers.now += 2
    with pytest.raises(LaunchError, match="Worker 0 no longer hosts the servers"):
        workers.hosts[1].check_host("the job")
    assert workers.hosts[1].is_lost


def test_one_of_two_continues_if_the_other_process_has_ended(make: Any) -> None:
    workers = make(2)
    workers.ends(0)
    assert workers.moves(1) == [1]


def test_one_of_two_does_not_if_the_other_machine_cannot_be_reached(make: Any) -> None:
    workers = make(2)
    workers.cut(1)
    assert workers.moves(1) == []
    with pytest.raises(LaunchError, match="At most half of the workers that may live have come to worker 1"):
        workers.hosts[1].locate(workers._take_over(1), -1.0)
    assert workers.hosts[1].gave_up
    assert workers.moves(1) == []
    assert workers.hosted == []


def test_most_workers_continue_without_a_machine_that_cannot_be_reached(make: Any) -> None:
    workers = make(5)
    workers.cut(0, 1)
    assert workers.moves(2, 3) == [], "2 of 5"
    assert workers.moves(2, 3, 4) == [2, 3, 4]
    assert workers.hosted == [(2, dict.fromkeys((1, 0), "its machine cannot be reached"))]


@pytest.mark.parametrize("side", [(1,), (1, 2), (1, 2, 3), (2, 3)])
def test_after_a_split_only_one_side_hosts_servers(make: Any, side: tuple[int, ...]) -> None:
    workers = make(5)
    workers.ends(0)
    workers.cut(*side)
    workers.moves(4, 3, 2, 1, rounds=6)
    assert len(workers.hosted) == (0 if len(side) == 2 else 1), "two of four are not more than half"


def test_votes_of_workers_that_see_the_host_again_do_not_count(make: Any) -> None:
    workers = make(5)
    workers.cut(0)
    assert workers.moves(2, 3) == []
    workers.sight.clear()  # the network is there again
    workers.now += 10.0
    workers.cut(1)
    assert workers.moves(1, 2, 3, 4, rounds=6) == []
    assert workers.hosted == []


def test_workers_that_the_coordinator_does_not_hear_count_until_they_are_away_for_long(make: Any) -> None:
    workers = make(5)
    workers.cut(0, 1, 2)
    for seconds, expected in ((10.0, []), (400.0, [3, 4])):
        workers.now += seconds
        for rank in (3, 4):
            workers.hosts[rank].hear((0, 3, 4), ())  # 1 and 2 were silent when these heard the coordinator last
        assert workers.moves(3, 4) == expected


def test_a_second_host_may_be_lost_too(make: Any) -> None:
    workers = make(3)
    workers.ends(0)
    assert workers.moves(1, 2) == [1, 2]
    workers.ends(1)
    assert workers.moves(2) == [2]
    assert workers.hosted[1] == (2, dict.fromkeys((0, 1), "its process has ended"))


def test_a_worker_that_slept_through_two_moves_follows(make: Any) -> None:
    workers = make(4)
    workers.ends(0)
    assert workers.moves(1, 2) == [1, 2]
    workers.ends(1)
    assert workers.moves(2, 3) == [2, 3]
    assert workers.hosts[3].address == workers.rendezvous[2].address


def test_a_host_that_ends_before_it_serves_is_passed_over(make: Any) -> None:
    workers = make(3)
    workers.ends(0)
    assert workers.moves(2) == []
    workers.ends(1)
    assert workers.moves(2) == [2]


def test_a_worker_that_has_failed_hosts_nothing_even_if_its_process_lives(make: Any) -> None:
    workers = make(4)
    workers.hosts[0].resign()
    assert workers.moves(1, 2, 3) == []
    for worker in workers.hosts[1:]:
        with pytest.raises(LaunchError, match="Worker 0 no longer hosts the servers"):
            worker.check_host("")
    workers.hosts[1].resign()
    assert workers.moves(2, 3, rounds=6) == [2, 3]
    assert workers.hosted == [(2, dict.fromkeys((1, 0), "it has failed"))]


def test_a_worker_that_failed_in_the_session_before_may_host_again(make: Any) -> None:
    workers = make(3)
    workers.hosts[1].resign()
    for worker in workers.hosts:
        worker.begin_session()
        worker.joined(worker.places)
    workers.ends(0)
    assert workers.moves(1, 2) == [1, 2]


def test_a_worker_that_failed_as_host_finds_the_one_after_it_in_the_next_session(make: Any) -> None:
    workers = make(3)
    workers.hosts[0].resign()
    for worker in workers.hosts[1:]:
        with pytest.raises(LaunchError):
            worker.check_host("")
    assert workers.moves(1, 2) == [1, 2]
    for worker in workers.hosts:
        worker.begin_session()
    assert {worker.present for worker in workers.hosts} == {1}
    assert workers.hosts[0].address == workers.rendezvous[1].address


def test_a_worker_that_has_failed_neither_votes_nor_hosts(make: Any) -> None:
    workers = make(3)
    workers.hosts[1].resign()
    workers.ends(0, 2)
    assert workers.moves(1, rounds=6) == []
    with pytest.raises(LaunchError):
        workers.hosts[1].locate(workers._take_over(1), 10.0)


def test_workers_that_have_left_do_not_count(make: Any) -> None:
    workers = make(3)
    workers.hosts[1].hear((0, 1), {2: "it raised KeyError"})
    workers.ends(0)
    assert workers.moves(1) == [1], "the process of worker 2 still lives"


def test_a_worker_that_is_cut_off_for_long_hosts_nothing(make: Any) -> None:
    workers = make(5)
    workers.hosts[4].hear((0, 1, 2, 3, 4), ())
    workers.cut(4)
    workers.now += 1000.0
    assert workers.moves(4, rounds=6) == []


def test_a_process_that_has_replaced_a_worker_votes_and_does_not_host(make: Any) -> None:
    workers = make(3)
    workers.ends(1)
    workers.replace(1)
    workers.ends(0)
    assert workers.moves(1) == []
    assert workers.moves(2, 1) == [2, 1]
    assert workers.hosted == [(2, {0: "its process has ended"})], "the process in its place lives"


def test_workers_that_have_ended_too_are_named_and_not_awaited(make: Any) -> None:
    workers = make(4)
    workers.ends(0, 1)
    assert workers.moves(2, 3) == [2, 3]
    assert workers.hosted == [(2, {1: "its process has ended", 0: "its process has ended"})]


def test_a_resignation_heard_late_is_not_taken_for_the_next_host_s(make: Any) -> None:
    workers = make(3)
    workers.hosts[0].resign()
    before = workers.hosts[2].places[0]
    for worker in workers.hosts[1:]:
        with pytest.raises(LaunchError):
            worker.check_host("")
    assert workers.moves(1, 2) == [1, 2]
    assert workers.hosts[2].places[0] == before
    assert not workers.hosts[2].is_lost


def test_a_candidate_that_answers_and_hosts_nothing_is_passed_over(make: Any) -> None:
    workers = make(4)
    workers.ends(0)
    for _ in range(3):
        assert workers.moves(2, 3, rounds=1) == [], "worker 1 hangs, and its store answers"
        workers.now += 16.0
    assert workers.moves(2, 3) == [2, 3]
    assert workers.hosted == [(2, {0: "its process has ended"})]


def test_a_vote_does_not_count_for_two(make: Any) -> None:
    workers = make(6)
    workers.ends(0)
    assert workers.moves(1, 3, 4, rounds=1) == []
    workers.sight[3, 1] = workers.sight[4, 1] = workers.sight[2, 1] = None  # they cannot reach worker 1 any more
    workers.moves(3, 4, 5, 2, rounds=4)
    assert workers.hosted == [], "worker 1 may count their votes still"
    workers.moves(3, 4, 5, 2, 1, rounds=20)
    assert [rank for rank, _ in workers.hosted] == [2]


def test_others_are_looked_at_together(make: Any) -> None:
    workers = make(12)
    together = threading.Barrier(10)  # all but worker 0, which is lost, and worker 11, which looks

    def look(place: HostAddress) -> bool | None:
        if place == workers.hosts[0].mine:
            return False
        together.wait(10.0)
        return None

    workers.hosts[11]._look = look
    assert workers.moves(11, rounds=1) == [], "1 of 11"
    assert not together.broken


def test_a_thread_that_finds_the_next_host_does_not_make_another_give_up(make: Any) -> None:
    """One thread looks for the replacement of each server; the last worker is the next host."""
    workers = make(3)
    workers.ends(0, 1)
    last, looks = workers.hosts[2], itertools.count()
    look, other = last._look, threading.Thread(target=lambda: last.move(workers._take_over(2)))

    def slow(place: HostAddress) -> bool | None:
        if next(looks) == 1:  # between two looks of the first thread
            other.start()
            other.join()
        return look(place)

    last._look = slow
    assert last.locate(workers._take_over(2), 10.0) == workers.rendezvous[2].address
    assert len(workers.hosted) == 1
    assert not last.gave_up


def test_too_few_workers_end(make: Any) -> None:
    workers = make(3)
    workers.ends(0)
    workers.hosts[1].min_workers = 3
    with pytest.raises(LaunchError, match=r"is lost: its process has ended. 2 are left, but Advanced.min_workers=3"):
        workers.hosts[1].locate(workers._take_over(1), 10.0)
    assert workers.hosts[1].gave_up


def test_nothing_moves_while_the_host_answers(make: Any) -> None:
    workers = make(2)
    assert not workers.hosts[1].is_lost
    assert workers.hosts[1].locate(workers._take_over(1), 0.1) == workers.rendezvous[0].address
