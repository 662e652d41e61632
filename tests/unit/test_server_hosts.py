"""Which worker hosts the servers when the one that did is lost: every worker's view is set by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from lightning_asgd.errors import LaunchError
from lightning_asgd.processes.server_hosts import HostAddress, ServerHosts
from lightning_asgd.transports.rendezvous import Rendezvous


class Workers:
    """Workers of a job, and what each sees of the others: True lives, False has ended, None does not answer."""

    def __init__(self, number: int, late: int | None = None) -> None:
        self.rendezvous = [Rendezvous.host() for _ in range(number)]
        self.sight: dict[tuple[int, int], bool | None] = {}
        self.hosted: list[tuple[int, Mapping[int, str]]] = []
        self.hosts = [self._worker(rank) for rank in range(number)]
        for worker in self.hosts:
            worker.places = {rank: each.mine for rank, each in enumerate(self.hosts)}
        if late is not None:  # it has replaced a process whose address the others know
            self.hosts[late].mine = HostAddress(*self.rendezvous[late].address, may_host=False)

    def _worker(self, rank: int) -> ServerHosts:
        def look(place: HostAddress) -> bool | None:
            other = next(r for r, each in enumerate(self.rendezvous) if each.address == (place.host, place.port))
            return self.sight.get((rank, other), True)

        return ServerHosts(rank, self.rendezvous[rank], self.rendezvous[0].address, look=look)

    def ends(self, *ranks: int) -> None:
        for rank in ranks:
            self.sight.update({(other, rank): False for other in range(len(self.hosts))})

    def cut(self, *side: int) -> None:
        """The network splits."""
        for one in range(len(self.hosts)):
            for other in range(len(self.hosts)):
                if (one in side) != (other in side):
                    self.sight[one, other] = None

    def moves(self, *ranks: int, living: Any = None) -> list[bool]:
        """Each of these looks once, in this order."""
        who = tuple(range(len(self.hosts))) if living is None else living
        return [
            self.hosts[rank].move(who, lambda _, gone, rank=rank: self.hosted.append((rank, gone)))  # type: ignore[misc]
            for rank in ranks
        ]

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
    assert workers.moves(3, 2) == [False, False], "worker 1 has not noticed yet"
    assert workers.moves(1, 2, 3) == [True, True, True]
    assert workers.hosted == [(1, {0: "its process has ended"})]
    assert {each.present for each in workers.hosts[1:]} == {1}
    assert {each.address for each in workers.hosts[1:]} == {workers.rendezvous[1].address}


def test_one_of_two_goes_on_if_the_other_process_has_ended(make: Any) -> None:
    workers = make(2)
    workers.ends(0)
    assert workers.moves(1) == [True]


def test_one_of_two_does_not_if_the_other_machine_cannot_be_reached(make: Any) -> None:
    workers = make(2)
    workers.cut(1)
    assert workers.moves(1, 1) == [False, False]
    with pytest.raises(LaunchError, match="at most half of the workers that may live have come to worker 1"):
        workers.hosts[1].locate((0, 1), lambda *_: None, 0.1)
    assert workers.hosts[1].gave_up
    assert workers.hosted == []


def test_most_workers_go_on_without_a_machine_that_cannot_be_reached(make: Any) -> None:
    workers = make(5)
    workers.cut(0, 1)
    assert workers.moves(2, 3, 2) == [False, False, False], "2 of 5"
    assert workers.moves(4, 2, 4, 3) == [False, True, True, True]
    assert workers.hosted == [(2, {0: "its machine cannot be reached"})]


@pytest.mark.parametrize("side", [(1,), (1, 2), (1, 2, 3), (2, 3)])
def test_after_a_split_only_one_side_hosts_servers(make: Any, side: tuple[int, ...]) -> None:
    workers = make(5)
    workers.ends(0)
    workers.cut(*side)
    for _ in range(4):
        workers.moves(*(rank for rank in (4, 3, 2, 1) if workers.hosts[rank].present == 0))
    assert len(workers.hosted) <= 1
    if len(side) != 2:  # else no side has more than half of the four
        assert len(workers.hosted) == 1


def test_a_second_host_may_be_lost_too(make: Any) -> None:
    workers = make(3)
    workers.ends(0)
    assert workers.moves(2, 1, 2) == [False, True, True]
    workers.ends(1)
    assert workers.hosts[2].is_lost
    assert workers.moves(2, living=(1, 2)) == [True]
    assert workers.hosted[1] == (2, dict.fromkeys((0, 1), "its process has ended"))


def test_a_host_that_ends_before_it_serves_is_passed_over(make: Any) -> None:
    workers = make(3)
    workers.ends(0)
    assert workers.moves(2) == [False]
    workers.ends(1)
    assert workers.moves(2) == [True]


def test_a_process_whose_address_the_others_do_not_know_hosts_nothing(make: Any) -> None:
    workers = make(3, late=1)
    workers.ends(0)
    workers.sight[2, 1] = False  # where the process before it was
    assert workers.moves(1) == [False]
    assert workers.moves(2, 1) == [True, True]
    assert workers.hosted == [(2, {0: "its process has ended"})]


def test_too_few_workers_end(make: Any) -> None:
    workers = make(3)
    workers.ends(0)
    workers.hosts[1].min_workers = 3
    with pytest.raises(LaunchError, match=r"is gone: its process has ended. 2 are left, and min_workers=3"):
        workers.hosts[1].locate((0, 1, 2), lambda *_: None, 10.0)
    assert workers.hosts[1].gave_up


def test_nothing_moves_while_the_host_answers(make: Any) -> None:
    workers = make(2)
    assert not workers.hosts[1].is_lost
    assert workers.hosts[1].locate((0, 1), lambda *_: None, 0.1) == workers.rendezvous[0].address
