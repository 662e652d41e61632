"""One fault at every moment of a run: no push is applied twice, none is lost, nobody waits for ever.

The world of test_membership.py, with fewer units. An order of events is run without a fault first, to count its turns;
then once for every turn and every kind of fault, with the same order up to there. So the moment of a fault is
enumerated, not drawn: every third one in the usual tests, all of four orders in the slow one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch

from lightning_asgd.core.foundation.errors import WorkerLostError
from lightning_asgd.core.protocol import Leave
from lightning_asgd.core.server.service import Service
from tests.component import test_membership
from tests.component.test_membership import PATIENCE_S, World

UNITS, ENDS = 6, (2, 6)
WORKERS = 2


def sleep(world: World, rank: int) -> None:
    """A worker is stopped for longer than the others wait for it."""
    world.asleep_until[rank] = world.now + 3 * PATIENCE_S


def doze(world: World, rank: int) -> None:
    """A worker is stopped, but not for so long."""
    world.asleep_until[rank] = world.now + PATIENCE_S / 2


def die(world: World, rank: int) -> None:
    """A worker's machine is gone."""
    world.asleep_until[rank] = float("inf")
    world.ended[rank] = True


def bury(world: World, rank: int) -> None:
    """A worker's process ends, and its parent says so at once."""
    die(world, rank)
    for service in world.services:
        service.report_exit("s", rank, "its process ended")
    world.lost[rank] = "its process ended"


def kill(world: World, server: int, handles: bool) -> None:
    """A server ends, with or without having done what was on its way, and another takes its place."""
    successor = Service(lambda: world.now)
    for rank, reason in world.lost.items():
        successor.report_exit("s", rank, reason)
    world.killed += 1
    world.wire.kill(server, successor, lambda: handles)


Fault = Callable[[World], None]
SLEEPS: dict[str, Fault] = {
    "worker 0 sleeps": partial(sleep, rank=0),
    "worker 1 sleeps": partial(sleep, rank=1),
    "worker 0 dozes": partial(doze, rank=0),
    "worker 1 dies": partial(die, rank=1),
    "worker 1 is buried": partial(bury, rank=1),
}
KILLS: dict[str, Fault] = {
    "server 0 has done nothing more": partial(kill, server=0, handles=False),
    "server 0 has done all": partial(kill, server=0, handles=True),
    "server 1 has done nothing more": partial(kill, server=1, handles=False),
    "server 1 has done all": partial(kill, server=1, handles=True),
}


class Moments(World):
    """A world with faults at given turns.

    Args:
        seed: of the order.
        servers: number of servers.
        faults: what happens at which turn.
    """

    def __init__(self, seed: int, servers: int, faults: dict[int, Fault]) -> None:
        super().__init__(seed, WORKERS, sleeps=False, servers=servers)
        self.faults = faults
        self.number = 0  # of turns after all have begun

    def turn(self) -> None:
        if self.ready == WORKERS and not all(self.ended):
            fault = self.faults.get(self.number)
            if fault is not None:
                fault(self)
            self.number += 1

    def live_or_be_lost(self, rank: int) -> None:
        try:
            self.live(rank)
        except WorkerLostError as error:  # while it slept a server was lost, with what it had missed
            if type(error) is not WorkerLostError or len(self.faults) < 2:
                raise
            self.lost[rank] = str(error)
            for service in self.services:
                service.handle(Leave("s", rank, str(error)))
            self.ended[rank] = True

    def run(self) -> None:
        self.turns.before_turn = self.turn
        super().run()
        assert torch.equal(self.weights_at_the_end, torch.ones(2 * UNITS))
        missed = len(self.faults) > 1  # a worker that slept after a server was lost may have missed a sync point
        for weights in self.fetched.values() if self.killed and not missed else ():  # as one that was away
            assert all(torch.equal(w, weights[0]) for w in weights)


def at_every_moment(seed: int, servers: int, kinds: Iterable[str], step: int = 1) -> int:
    """How many runs there were, one for every so many moments."""
    quiet = Moments(seed, servers, {})
    quiet.run()
    runs = 0
    for kind, moment in itertools.product(kinds, range(0, quiet.number, step)):
        run(seed, servers, {moment: kind})
        runs += 1
    return runs


def run(seed: int, servers: int, faults: dict[int, str]) -> None:
    try:
        Moments(seed, servers, {moment: {**SLEEPS, **KILLS}[kind] for moment, kind in faults.items()}).run()
    except Exception as error:
        raise AssertionError(f"order {seed}, {servers} servers, faults {faults}") from error


@pytest.fixture(autouse=True)
def few_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_membership, "UNITS", UNITS)
    monkeypatch.setattr(test_membership, "ENDS", ENDS)


@pytest.mark.parametrize("kind", SLEEPS)
def test_workers(kind: str) -> None:
    servers = 1 if kind == "worker 1 is buried" else 2  # of its last push one of two may have got its half alone
    assert at_every_moment(0, servers, [kind], step=2) > 30


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_moment_of_some_orders() -> None:
    kinds = [*SLEEPS, *KILLS]
    assert sum(at_every_moment(seed, 1, kinds[:-2]) for seed in (1, 4)) > 800
    kinds.remove("worker 1 is buried")
    assert sum(at_every_moment(seed, 2, kinds) for seed in (0, 2, 3, 5)) > 1500


@pytest.mark.parametrize("kind", KILLS)
def test_servers(kind: str) -> None:
    assert at_every_moment(0, 2, [kind], step=2) > 30


def test_a_worker_that_sleeps_while_a_server_is_restored() -> None:
    """Others, which may be past the segment, wait for what it alone can tell, also once it has joined or reported."""
    quiet = Moments(0, 1, {})
    quiet.run()
    for moment in range(0, quiet.number, 3):
        for later in (4, 12):
            run(0, 1, {moment: "server 0 has done all", moment + later: "worker 1 sleeps"})
