"""A server that islands train with is lost at any moment: no push is applied twice or in part, none that was
acknowledged is lost, and no process waits for ever.

The world of test_every_order.py, in which a worker may be an island: its processes are actors of their own, each with
connections of its own. A seed chooses the order of deliveries, and a server is killed at every moment of it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lightning_asgd import Advanced
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.errors import ServerLostError
from lightning_asgd.core.foundation.process_name import this_process
from lightning_asgd.core.protocol import Heartbeat, HeartbeatReply, Policy
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.core.worker.replica import Replica
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.setup import Start
from lightning_asgd.core.worker.synchronizer import Training, run
from lightning_asgd.elastic.attachment import Attachment
from lightning_asgd.islands import part_exchange as part_exchange_module
from lightning_asgd.islands.part_exchange import PartExchange, PartSender
from lightning_asgd.islands.synchronizer import IslandSynchronizer, set_up_island
from lightning_asgd.recovery.failover_client import FailoverClient
from tests.component.test_every_order import PATIENCE_S, Back, Choose, End, Event, Plan, World
from tests.helpers.actor_islands import ActorGroup, Talk


def called(name: str, call: Callable[[], Any] = lambda: None) -> Callable[[], Any]:
    """A call that all processes of an island share, of which only the first one makes it."""

    def act() -> Any:
        return call()

    act.__qualname__ = name
    return act


class Way(End):
    """An island's process's end of the wire."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return ("",) * self.num_servers


class Islands(World):
    """Workers that may be islands; see the module's docstring.

    Args:
        plan: see there; it is a run.
        sizes: processes of each worker, in the order in which they attach.
    """

    def __init__(self, plan: Plan, sizes: tuple[int, ...]) -> None:
        super().__init__(plan)
        self.sizes = sizes
        self.heard *= max(sizes)
        self.talks = [Talk(size, self.actors.wait_until) for size in sizes]
        self.ended: list[list[torch.Tensor]] = [[] for _ in sizes]  # the weights that processes had at the end
        weights = plan.servers * plan.workers * plan.pushes
        self.modules = [[torch.nn.Module() for _ in range(size)] for size in sizes]
        for module in itertools.chain(*self.modules):
            module.w = torch.nn.Parameter(torch.zeros(weights))
        self.overlapping = ExchangeConfig.create(
            nsync=1, algorithm=self.config.algorithm, advanced=Advanced(overlap=True)
        )

    def run(self, choose: Choose) -> None:
        for rank, size in enumerate(self.sizes):
            for process in range(1, size):
                self.actors.add(f"{rank}.{process}", partial(self.follow, rank, process))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(part_exchange_module, "done_within", self.actors.done_within)
            super().run(choose)

    # ------------------------------------------------------------------ an island's processes

    def live(self, rank: int) -> None:
        if self.sizes[rank] == 1:
            return super().live(rank)
        end, group = Way(self, rank), ActorGroup(self.talks[rank], 0)
        client = self.clients[rank] = SessionClient(Connection(end, "s", 0, 0), policy=Policy(silence_s=PATIENCE_S))
        attachment = Attachment(client)

        def attach() -> tuple[int, bool]:
            attachment.arrive("cpu")
            return client.connection.worker, attachment.bootstraps

        try:
            bootstraps = group.share(called("attach", attach))[1]
            sender = PartSender(client.connection, this_process())
            island = self.set_up(rank, group, sender, client, bootstraps)
            if bootstraps:
                group.share(called("publish", lambda: attachment.publish("layout", {}, None)))
            else:
                group.share(called("publish"))
        except ServerLostError:  # while it came
            self.end(rank)
            return None
        collectives, exchanger = Collectives(client), island.exchanger
        assert exchanger is not None
        FailoverClient(client, collectives, exchanger, lambda: None, end.successor, partial(self.search, rank))
        self.ready.add(rank)
        self.held = True
        self.train(rank, 0, group, island)
        self.done.add(rank)
        while True:
            self.actors.wait_until(lambda: client.connection.must_attend)
            group.share(called("attend", client.connection.attend))

    def follow(self, rank: int, process: int) -> None:
        """What an island's other process does."""
        end, group = Way(self, rank + process * self.plan.workers), ActorGroup(self.talks[rank], process)
        try:
            worker, bootstraps = group.share(called("attach"))
            sender = PartSender(Connection(end, "s", worker, 0), this_process())
            island = self.set_up(rank, group, sender, None, bootstraps)
            group.share(called("publish"))
            self.train(rank, process, group, island)
            while True:
                group.share(called("attend"))
        except ServerLostError:  # while it came
            return

    def set_up(
        self, rank: int, group: ActorGroup, sender: PartSender, client: SessionClient | None, fills: bool
    ) -> IslandSynchronizer:
        module = self.modules[rank][group.rank]
        training = Training(data=Back(self, rank))
        island = set_up_island(group, module, sender, client, self.overlapping, training, Start(fill=fills))
        if island.exchanger is not None:
            for channel in island.exchanger.channels:
                channel._clock = lambda: 0.0
        return island

    def train(self, rank: int, process: int, group: ActorGroup, island: IslandSynchronizer) -> None:
        plan, module = self.plan, self.modules[rank][process]
        if process == 0:
            self.actors.wait_until(lambda: len(self.ready | self.dead) == plan.workers)
        run(island.begin())
        mine = module.w.data.view(plan.servers, plan.workers, plan.pushes)[:, rank]
        for push in range(plan.pushes):
            before = self.back[rank]
            mine[:, push] += 1
            island.count_step()
            group.share(lambda: None)  # as the leases do
            run(island.advance())
            if push % 2 == 1:
                run(island.flush())
        run(island.flush())
        if process == 0 and self.back[rank] == before == 0:
            self.acknowledged |= {(rank, push) for push in range(plan.pushes)}
        run(island.fetch())
        self.ended[rank].append(module.w.detach().clone())

    # ------------------------------------------------------------------ what happens, and what must hold

    def check(self, *, at_end: bool) -> None:
        super().check(at_end=at_end)
        for rank, weights in enumerate(self.ended) if at_end else ():
            assert all(torch.equal(each, weights[0]) for each in weights), f"an island's processes differ: {weights}"
            assert self.sizes[rank] == 1 or rank in self.dead or len(weights) == self.sizes[rank]

    def kill(self, server: int) -> None:
        """A server ends, after all workers' heartbeats were answered: each knows who takes part."""
        for client in self.clients.values() if len(self.ready) == len(self.sizes) else ():
            beaten = self.servers[0].service.handle(Heartbeat("s", client.connection.worker))
            if isinstance(beaten, HeartbeatReply):
                client.note_heartbeat(beaten)
        super().kill(server)

    def end(self, worker: int) -> None:
        for process in range(self.sizes[worker]):
            super().end(worker + process * self.plan.workers)
        self.dead &= set(range(self.plan.workers))

    def die(self, worker: int) -> None:
        """A process of an island ends, and what has started it ends the others."""
        for process in range(1, self.sizes[worker]):
            self.actors.stopped.add(f"{worker}.{process}")
        super().die(worker)


def play(plan: Plan, sizes: tuple[int, ...], seed: int, faults: dict[int, Event]) -> int:
    """One order; returns the number of moments."""
    world, order, moment = Islands(plan, sizes), random.Random(seed), 0

    def choose(events: list[Event], _: Any) -> Event | None:
        nonlocal moment
        due = [event for event in events if event[0] not in plan.faults]
        if world.ready:
            moment += 1
            if moment in faults:
                return faults[moment]
        return order.choice(due) if due else None

    try:
        world.run(choose)
    except BaseException as error:
        raise AssertionError(f"order {seed}, islands {sizes}, faults {faults}") from error
    return moment


def at_every_moment(
    plan: Plan, sizes: tuple[int, ...], kinds: Iterable[dict[int, Event]], *, seed: int = 0, step: int = 1
) -> int:
    """Play an order again and again, with the first fault at every ``step``-th moment. Returns how often it was played.

    Faults are given by their distance in moments from the first one.
    """
    moments, count = play(plan, sizes, seed, {}), 0
    for faults, moment in itertools.product(kinds, range(1, moments, step)):
        play(plan, sizes, seed, {moment + later: fault for later, fault in faults.items()})
        count += 1
    return count


ONE = Plan(servers=2, pushes=2, faults=("kill",), most=1, comes=True)
TWO = replace(ONE, most=2)
DIES = Plan(servers=1, pushes=2, faults=("kill", "die"), most=2, comes=True)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("lost", [0, 1])
def test_one_of_two_servers_is_lost(sizes: tuple[int, ...], lost: int) -> None:
    assert at_every_moment(ONE, sizes, [{0: ("kill", lost)}], step=3) >= 20


@pytest.mark.parametrize("lost", [0, 1])
def test_another_server_or_the_replacement_is_lost_during_the_recovery(lost: int) -> None:
    kinds = [{0: ("kill", 0), later: ("kill", lost)} for later in (1, 9, 20)]
    assert at_every_moment(TWO, (2, 2), kinds, step=7) > 30


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2)], ids=str)
def test_a_process_of_an_island_dies_during_the_recovery(sizes: tuple[int, ...]) -> None:
    kinds: list[dict[int, Event]] = [{0: ("kill", 0), later: ("die", 1)} for later in (1, 5, 9, 14)]
    assert at_every_moment(DIES, sizes, kinds, step=5) > 30


def fetched(self: Replica, server: int) -> Any:
    return tuple(torch.zeros_like(each) for each in self._base[server])


def resend(self: PartExchange, server: int, exchange: int) -> None:
    pass


def receive(self: PartExchange) -> None:
    self._answers = [self._result(server, future) for server, future in enumerate(self._futures)]
    self._futures = []


BROKEN = {
    "processes bring other weights": (Replica, fetched),
    "a part is not sent again": (PartExchange, resend),
    "an answer counts before all processes have theirs": (PartExchange, receive),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_what_is_broken_on_purpose_is_found(broken: tuple[type, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, function = broken
    monkeypatch.setattr(owner, function.__name__, function)
    play(ONE, (2, 2), 0, {})
    with pytest.raises(AssertionError, match="'kill'"):
        at_every_moment(ONE, (2, 2), [{0: ("kill", 0)}])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 3))
def test_more_orders(seed: int) -> None:
    for sizes in ((2, 1), (1, 2), (3, 2)):
        assert at_every_moment(ONE, sizes, [{0: ("kill", lost)} for lost in (0, 1)], seed=seed) > 100
        twice: list[dict[int, Event]]
        twice = [{0: ("kill", a), later: ("kill", b)} for a in (0, 1) for b in (0, 1) for later in (1, 6, 13, 22)]
        assert at_every_moment(TWO, sizes, twice, seed=seed, step=5) > 100
        dies: list[dict[int, Event]] = [{0: ("kill", 0), later: ("die", 1)} for later in range(1, 20, 3)]
        assert at_every_moment(DIES, sizes, dies if sizes[1] > 1 else [], seed=seed, step=2) >= 0
