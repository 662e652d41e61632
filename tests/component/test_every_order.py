"""Every order of deliveries and faults, for small worlds: no push is applied twice or in part, none that was
acknowledged is lost, and nobody waits for ever.

Real services, clients, exchangers, recoveries and calls that are answered once, over a wire on which every message and
every answer is an event of its own. tests/helpers/orders.py enumerates the orders. Worker r's push k adds 1 to weight
(r, k) of every server. An event is one of

* ``arrive``: the oldest message of a worker's connection reaches its server,
* ``answer``: an answer reaches its worker, answers of one server in any order,
* ``repeat``: a message that was thought to be lost, and was sent again, arrives all the same,
* ``notice``: a worker's watch tells it that a server was lost, which its other calls did at once,
* ``find``: a worker's search for the replacement of a lost server ends,

or a fault: ``kill`` a server, and another takes its place; ``cut`` a worker's connections to a server, and all calls
that were not answered are sent again; ``silence``: a server hears nothing of a worker for too long, and goes on without
it; ``die``: a worker ends, and the servers are told so one after the other (``bury``).

The workers of a job are there from the beginning, those of a run attach themselves.

What does not hold: where two servers go on without a worker whose push had reached the second one and not the first,
half of it stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.futures import Future

from lightning_asgd import Advanced
from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.calls.reliable_calls import Acknowledgements, ReplyCache
from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.foundation.errors import ServerLostError
from lightning_asgd.core.foundation.layout import build_layout
from lightning_asgd.core.protocol import DisconnectWatch, Heartbeat, Policy, SyncReport
from lightning_asgd.core.server.membership import Membership
from lightning_asgd.core.server.service import Service
from lightning_asgd.core.server.shard import Shard
from lightning_asgd.core.worker import connection as connection_module
from lightning_asgd.core.worker import session_client as session_module
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.core.worker.exchanger import Exchanger
from lightning_asgd.core.worker.replica import Replica
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.shard_client import ShardClient
from lightning_asgd.core.worker.sync_point import synchronize
from lightning_asgd.core.worker.synchronizer import Training, WorkFeed, run
from lightning_asgd.elastic.attachment import Attachment
from lightning_asgd.recovery import exchange_recovery as recovery_module
from lightning_asgd.recovery.failover_client import FailoverClient
from lightning_asgd.recovery.messages import StateReport
from lightning_asgd.recovery.state_recovery import StateRecovery
from tests.helpers.orders import Actors, Explored, explore, fingerprint

PATIENCE_S = 3.0
MOST_PATIENCE_S = 70.0  # with one of whom a server in another's place was told

Line = tuple[int, int, bool]  # a connection's worker, its server, and whether it is for what is urgent
Event = tuple[Any, ...]  # the name of one of World's methods, and its arguments
Choose = Callable[[list[Event], Callable[[], Hashable]], Any]


@dataclass(frozen=True)
class Plan:
    """What a world is like.

    Attributes:
        servers: number of them.
        pushes: number of them, per worker.
        faults: kinds of them.
        most: number of faults in an order.
        comes: whether it is a run, to which the second worker attaches itself while the first one trains.
        meets: whether workers meet at the end and fetch, as at a sync point.
        workers: number of them.
        late: whether workers notice at any time after that a server was lost, where they only watch it.
        searches: whether it takes time to find the replacement of a lost server.
    """

    servers: int = 1
    pushes: int = 2
    faults: tuple[str, ...] = ()
    most: int = 0
    comes: bool = False
    meets: bool = False
    workers: int = 2
    late: bool = False
    searches: bool = False


@dataclass
class Server:
    """A server's process."""

    service: Service
    now: float = 0.0
    once: ReplyCache = field(default_factory=lambda: ReplyCache(lambda: 0.0))


@dataclass(eq=False)
class Call:
    """A message on its way, until its answer is there."""

    worker: int
    server: int
    number: int
    message: Any
    arrived: list[int]
    arrivals: Acknowledgements
    future: Future[Any] = field(default_factory=Future)
    attempt: int = 0

    @property
    def line(self) -> Line:
        return self.worker, self.server, bool(getattr(self.message, "urgent", False))


class End(Transport):
    """A worker's end of the wire, which numbers calls as those of real transports do."""

    def __init__(self, world: World, worker: int) -> None:
        self._world, self._worker = world, worker
        self._connected = list(world.servers)
        self._calls = 0
        self.arrivals = [Acknowledgements() for _ in world.servers]

    @property
    def num_servers(self) -> int:
        return len(self._connected)

    def prepare(self, server: int, address: str) -> None:
        pass

    def successor(self, server: int) -> str:
        """Where another one is found; real workers would wait for it until the time-out."""
        assert self._connected[server] is not self._world.servers[server], "a server that lives was given up"
        return ""

    def replace(self, server: int) -> None:
        self._connected[server], self.arrivals[server] = self._world.servers[server], Acknowledgements()

    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        self._calls += 1
        arrived = self.arrivals[server].take()
        call = Call(self._worker, server, self._calls, copy.deepcopy(message), arrived, self.arrivals[server])
        if self._connected[server] is self._world.servers[server]:
            self._world.send(call)
        else:
            call.future.set_exception(RuntimeError("broken pipe"))
        return call.future

    def close(self) -> None:
        pass


class Back(WorkFeed):
    """Notes that a worker came back."""

    def __init__(self, world: World, worker: int) -> None:
        self._world, self._worker = world, worker

    def revoke(self) -> None:
        self._world.back[self._worker] += 1


class World:
    """See the module's docstring."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.servers = [self.serve() for _ in range(plan.servers)]
        self.held = False  # whether messages wait for their turn
        self.lines: dict[Line, list[Call]] = {}
        self.open: list[Call] = []  # sent and not answered
        self.answers: list[tuple[Call, Any]] = []  # on their way
        self.late: list[Call] = []
        self.lost: list[Call] = []  # watches of lost servers, which their workers have not noticed
        self.searches: list[tuple[int, int, Callable[[], None]]] = []  # worker, number; those that have not ended
        self.searched = [0] * plan.workers  # how often each worker has
        self.faults = 0
        self.killed = False
        self.silent: set[int] = set()
        self.actors = Actors()
        self.heard: list[Hashable] = [0] * plan.workers  # all that a worker was answered: its state follows from that
        self.ready: set[int] = set()
        self.clients: dict[int, SessionClient] = {}
        self.back = [0] * plan.workers  # how often it came back
        self.done: set[int] = set()
        self.dead: set[int] = set()
        self.acknowledged: set[tuple[int, int]] = set()
        self.fetched: dict[int, torch.Tensor] = {}
        self.weights = [torch.zeros(plan.servers * plan.workers * plan.pushes) for _ in range(plan.workers)]
        self.layout = build_layout([("w", self.weights[0])], plan.servers)
        self.config = ExchangeConfig.create(nsync=1, algorithm=ASGD("sum"), advanced=Advanced(overlap=False))

    def serve(self, *, succeeds: bool = False) -> Server:
        run = "s" if self.plan.comes else ""
        server = Server(Service(lambda: server.now, run=run, succeeds=succeeds and self.plan.comes))
        return server

    def run(self, choose: Choose) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for module in (connection_module, session_module, recovery_module):
                patch.setattr(module, "done_within", self.actors.done_within)
            for rank in range(self.plan.workers):
                self.actors.add(str(rank), partial(self.live, rank))
            self.actors.run(lambda: self.step(choose))

    # ------------------------------------------------------------------ workers

    def live(self, rank: int) -> None:
        plan, weights = self.plan, self.weights[rank]
        who = (0, 0) if plan.comes else (rank, plan.workers)
        end = End(self, rank)
        client = self.clients[rank] = SessionClient(Connection(end, "s", *who), policy=Policy(silence_s=PATIENCE_S))
        replica = Replica(self.layout, [([weights], 0)], [None] * plan.servers, remembers=True)
        shards, collectives = ShardClient(client), Collectives(client)
        training = Training(data=Back(self, rank))
        exchanger = Exchanger(self.layout, [(shards, replica)], self.config, training, clock=lambda: 0.0)
        try:
            self.come(rank, shards, replica)
            run(exchanger.fetch())
        except ServerLostError:  # while it came: it ends, and its user starts it again
            assert plan.comes
            self.end(rank)
            return
        FailoverClient(client, collectives, exchanger, lambda: None, end.successor, partial(self.search, rank))
        self.ready.add(rank)
        self.held = plan.comes or len(self.ready) == plan.workers
        self.actors.wait_until(lambda: self.held)
        run(exchanger.begin())
        mine = weights.view(plan.servers, plan.workers, plan.pushes)[:, rank]
        for push in range(plan.pushes):
            exchanger.client.connection.attend()
            mine[:, push] += 1
            exchanger.count_step()
            before = self.back[rank]
            run(exchanger.advance())
            if self.back[rank] == before:
                self.acknowledged.add((rank, push))
        if plan.meets:
            self.meet(rank, collectives, exchanger)
        self.done.add(rank)
        while True:
            self.actors.wait_until(lambda: bool(client.connection._lost_servers))
            client.connection.attend()

    def come(self, rank: int, shards: ShardClient, replica: Replica) -> None:
        """What the strategy does to enter a session, up to the first fetch."""
        attachment = Attachment(shards.client)
        if self.plan.comes:
            attachment.arrive("cpu")
        else:
            shards.client.join()
        weights = replica.weights() if rank == 0 else None
        shards.initialise(self.layout, self.config.algorithm, [None] * self.plan.servers, weights)
        if attachment.bootstraps:
            attachment.publish("layout", {}, None)

    def meet(self, rank: int, collectives: Collectives, exchanger: Exchanger) -> None:
        """What the strategy does at a sync point."""
        run(exchanger.flush())
        mine = SyncReport(exchanger.moved, False, False, [])
        synchronize(exchanger.client, collectives, exchanger, "end", mine, all_have_pushed=False, always=True)
        self.fetched[rank] = self.weights[rank].clone()

    # ------------------------------------------------------------------ what can happen

    def step(self, choose: Choose) -> bool:
        """Let something happen; whether that was all."""
        due = self.due()
        self.check(at_end=not due)
        # Where no fault can take an answer any more its order among other events makes no difference: a worker waits
        # for answers one by one, and sees from none when it came.
        events = due[:1] if self.answers and not self.may_fail else [*due, *self.optional()]
        event = choose(events, self.fingerprint)
        if event is not None:
            getattr(self, event[0])(*event[1:])
        return event is None

    @property
    def may_fail(self) -> bool:
        return self.faults < self.plan.most

    def due(self) -> list[Event]:
        """What happens some time, if nothing else does."""
        events: list[Event] = [("answer", call.worker, call.number) for call, _ in self.answers]
        events += [("arrive", *line) for line, calls in self.lines.items() if calls]
        events += [("notice", call.worker, call.number) for call in self.lost]
        events += [("find", worker, number) for worker, number, _ in self.searches]
        living = [members and members.living for members in self.memberships()]
        dead = [(rank, server) for rank in sorted(self.dead) for server in range(self.plan.servers)]
        return sorted(events) + [
            ("bury", r, s) for r, s in dead if self.clients[r].connection.worker in (living[s] or ())
        ]

    def optional(self) -> list[Event]:
        """What may happen, or not."""
        events: list[Event] = [("repeat", call.worker, call.number) for call in self.late]
        if not self.may_fail:
            return events
        servers = range(self.plan.servers)
        living = [rank for rank in sorted(self.ready) if rank not in self.dead]
        for kind in self.plan.faults:
            if kind == "kill":
                events += [(kind, server) for server in servers]
            elif kind == "die":
                events += [(kind, rank) for rank in living if rank > 0]  # without worker 0 the session ends
            else:
                events += [(kind, rank, server) for rank in living for server in servers]
        return events

    def send(self, call: Call) -> None:
        self.open.append(call)
        self.lines.setdefault(call.line, []).append(call)
        while not self.held and (due := self.due()):  # a world that sets out
            getattr(self, due[0][0])(*due[0][1:])

    def arrive(self, *line: Any) -> None:
        self.handle(self.lines[line].pop(0))

    def repeat(self, worker: int, number: int) -> None:
        call = next(call for call in self.late if (call.worker, call.number) == (worker, number))
        self.late.remove(call)
        self.handle(call)

    def handle(self, call: Call) -> None:
        server, attempt = self.servers[call.server], call.attempt

        def answered(done: Future[Any]) -> None:
            if call in self.open and call.attempt == attempt and self.servers[call.server] is server:
                self.answers.append((call, copy.deepcopy(done.value())))

        message = copy.deepcopy(call.message)
        once = server.once.answer(str(call.worker), call.number, call.arrived, lambda: server.service.handle(message))
        once.add_done_callback(answered)

    def answer(self, worker: int, number: int) -> None:
        ((call, value),) = [a for a in self.answers if (a[0].worker, a[0].number) == (worker, number)]
        self.answers.remove((call, value))
        self.open.remove(call)
        self.heard[worker] = hash((self.heard[worker], number, fingerprint(value)))
        call.arrivals.note(number)
        call.future.set_result(value)

    # ------------------------------------------------------------------ faults

    def kill(self, server: int) -> None:
        """A server ends, and another takes its place."""
        self.faults += 1
        self.killed = True
        self.servers[server] = self.serve(succeeds=True)
        for line in [line for line in self.lines if line[1] == server]:
            del self.lines[line]
        self.answers = [(call, value) for call, value in self.answers if call.server != server]
        self.late = [call for call in self.late if call.server != server]
        lost = [call for call in self.open if call.server == server]
        self.open = [call for call in self.open if call.server != server]
        self.lost += [call for call in lost if self.plan.late and isinstance(call.message, DisconnectWatch)]
        for call in lost:
            if call not in self.lost:
                self.fail(call)

    def notice(self, worker: int, number: int) -> None:
        """A worker is told by its watch that a server is lost: it may know that already, from another connection."""
        (call,) = [call for call in self.lost if (call.worker, call.number) == (worker, number)]
        self.lost.remove(call)
        self.fail(call)

    def search(self, worker: int, search: Callable[[], None]) -> None:
        """A worker begins to search for the replacement of a server."""
        self.searched[worker] += 1
        if self.plan.searches:
            self.searches.append((worker, self.searched[worker], search))
        else:
            search()

    def find(self, worker: int, number: int) -> None:
        """A worker's search ends."""
        (found,) = [search for search in self.searches if search[:2] == (worker, number)]
        self.searches.remove(found)
        self.heard[worker] = hash((self.heard[worker], "found", number))
        found[-1]()

    def fail(self, call: Call) -> None:
        self.heard[call.worker] = hash((self.heard[call.worker], call.number))
        call.future.set_exception(RuntimeError("eof"))

    def cut(self, worker: int, server: int) -> None:
        """A worker's connections to a server break; calls without an answer are sent again."""
        self.faults += 1
        for line in [line for line in self.lines if line[:2] == (worker, server)]:
            self.late += [replace(call, attempt=-1) for call in self.lines.pop(line)]
        between = [call for call in self.open if (call.worker, call.server) == (worker, server)]
        self.answers = [(call, value) for call, value in self.answers if call not in between]
        for call in between:
            call.attempt += 1
            self.lines.setdefault(call.line, []).append(call)

    def silence(self, worker: int, server: int) -> None:
        """A server hears nothing of a worker for so long that it goes on without it."""
        self.faults += 1
        self.silent.add(worker)
        self.pass_time(server, worker, PATIENCE_S)

    def pass_time(self, server: int, worker: int, seconds: float) -> None:
        """Let time pass for a server, in which it hears of all but one worker."""
        at = self.servers[server]
        for _ in range(int(seconds) + 2):
            at.now += 1.0
            for rank, client in self.clients.items():
                if rank not in {worker, *self.dead}:
                    at.service.handle(Heartbeat("s", client.connection.worker))
            at.service.tick()

    def die(self, worker: int) -> None:
        """A worker ends. What it has sent may arrive."""
        self.faults += 1
        self.actors.stopped.add(str(worker))
        self.end(worker)

    def end(self, worker: int) -> None:
        self.dead.add(worker)
        self.open = [call for call in self.open if call.worker != worker]
        self.answers = [(call, value) for call, value in self.answers if call.worker != worker]
        self.lost = [call for call in self.lost if call.worker != worker]
        self.searches = [search for search in self.searches if search[0] != worker]
        for line in [line for line in self.lines if line[0] == worker]:
            self.late += self.lines.pop(line)

    def bury(self, worker: int, server: int) -> None:
        """A server is told of that, or in a run finds it out."""
        if self.plan.comes:
            self.pass_time(server, worker, MOST_PATIENCE_S)
        else:
            self.servers[server].service.report_exit("s", worker, "it died")

    def memberships(self) -> list[Membership | None]:
        return [server.service.session and server.service.session.members for server in self.servers]

    # ------------------------------------------------------------------ what must hold

    def check(self, *, at_end: bool) -> None:
        plan = self.plan
        sessions = [server.service.session for server in self.servers]
        parts = [session.shards[0].weights for session in sessions if session is not None and 0 in session.shards]
        shards = [weights[0].view(plan.workers, plan.pushes) for weights in parts if weights]
        for shard in shards:
            assert shard.max() <= 1, f"a push was applied twice: {shard.tolist()}"
        if not at_end:
            return
        waiting = set(range(plan.workers)) - self.done - self.dead
        assert not waiting, f"workers {waiting} wait for ever"
        assert len(shards) == plan.servers
        assert all(torch.equal(shards[0], shard) for shard in shards), f"a push was applied in part: {shards}"
        for rank, push in self.acknowledged:
            # What its worker alone had fetched is lost with it where the server is lost too, or where nobody had heard
            # of it: others train those data again.
            alone = rank in self.dead | self.silent or (plan.comes and self.back[rank] > 0)
            known = not self.killed or not alone
            assert shards[0][rank, push] == 1 or not known, f"a push was lost: {shards[0].tolist()}"
        there = [weights for rank, weights in self.fetched.items() if not self.back[rank]]
        assert all(torch.equal(weights, there[0]) for weights in there), f"not the same weights: {there}"

    def fingerprint(self) -> Hashable:
        return hash(
            (
                tuple(map(told_from_others, self.servers)),
                tuple(self.heard),
                frozenset(self.done),
                frozenset(self.dead),
                frozenset((line, tuple(c.number for c in calls)) for line, calls in self.lines.items() if calls),
                frozenset((call.worker, call.number, fingerprint(value)) for call, value in self.answers),
                frozenset((call.worker, call.number) for call in self.late),
                frozenset((call.worker, call.number) for call in self.lost),
                frozenset(search[:2] for search in self.searches),
                tuple(self.back),
                frozenset(self.acknowledged),
                self.killed,
                frozenset(self.silent),
                self.faults,
            )
        )


def told_from_others(server: Server) -> Hashable:
    service = vars(server.service)
    held = frozenset(fingerprint(held) for held in vars(service["pending"])["_pending"].values())  # by identity
    rest = tuple(fingerprint(value) for name, value in service.items() if name != "pending")
    return held, rest, fingerprint(server.once), server.now


def every_order(plan: Plan) -> Explored:
    found = explore(lambda: World(plan))
    assert found.complete
    return found


FEW = {
    "a server is lost": Plan(pushes=1, faults=("kill",), most=1, late=True),
    "connections break": Plan(faults=("cut",), most=1),
    "a worker is silent, or dies": Plan(faults=("silence", "die"), most=1),
    "a worker comes, a server is lost": Plan(pushes=1, faults=("kill",), most=1, comes=True),
}
# Two servers without silence, see the docstring.
MORE = {
    "two servers, connections break": Plan(servers=2, pushes=1, faults=("cut",), most=1),
    "one of two servers is lost": Plan(servers=2, pushes=1, faults=("kill",), most=1),
    "a worker comes, a server is lost, noticed late": Plan(pushes=1, faults=("kill",), most=1, comes=True, late=True),
    "a worker comes": Plan(pushes=1, faults=("kill", "cut", "silence", "die"), most=1, comes=True),
}
# Of these there are too many orders to follow all: the first so many.
MOST_RUNS = 10_000
MOST = {
    "a server is lost, and all meet": Plan(faults=("kill",), most=1, meets=True),
    "two faults": Plan(pushes=1, faults=("kill", "cut", "silence", "die"), most=2),
}


@pytest.mark.parametrize("plan", FEW.values(), ids=FEW)
def test_one_fault(plan: Plan) -> None:
    assert every_order(plan).states > 30


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("plan", MORE.values(), ids=MORE)
def test_more(plan: Plan) -> None:
    assert every_order(plan).states > 1000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("plan", MOST.values(), ids=MOST)
def test_as_many_as_can_be(plan: Plan) -> None:
    assert explore(lambda: World(plan), MOST_RUNS).states > 1000


class CutOff(World):
    """Worker 1 is cut off with a push under way, and meanwhile one of two servers is lost, and the other goes on.

    Args:
        plan: see there.
        ahead: what happens then, besides what becomes of the other worker's messages; after that anything may.
    """

    def __init__(self, plan: Plan, ahead: list[Event]) -> None:
        super().__init__(plan)
        self.cut = False
        self.ahead = list(ahead)

    def due(self) -> list[Event]:
        events = super().due()
        self.cut = self.cut or (self.held and all(self.lines.get((1, server, False)) for server in range(2)))
        if not self.ahead or not self.cut:
            return events
        rest = [event for event in events if event[0] in ("answer", "arrive", "notice") and event[1] != 1]
        return rest or [self.ahead.pop(0)]

    def optional(self) -> list[Event]:
        return []


LOST: list[Event] = [("kill", 1), ("silence", 1, 0)]
ARRIVED: list[Event] = [("arrive", 1, 0, False), *LOST]
CUT_OFF: dict[str, tuple[int, list[Event]]] = {  # with the number of pushes
    "": (1, LOST),
    "its first part arrived, the others restore the server without it": (
        1,
        [*ARRIVED, ("pass_time", 1, 1, MOST_PATIENCE_S)],
    ),
    "its first part arrived, it is back in time to restore the server": (2, ARRIVED),
}


@pytest.mark.parametrize(("pushes", "ahead"), CUT_OFF.values(), ids=CUT_OFF)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one order", "every order"])
def test_a_worker_that_is_cut_off_while_a_server_is_lost_leaves_no_part_of_a_push(
    pushes: int, ahead: list[Event], every: bool
) -> None:
    world = CutOff(Plan(servers=2, pushes=pushes, faults=("kill", "silence"), most=2), ahead)
    if every:
        assert explore(lambda: CutOff(world.plan, ahead)).complete
    else:
        world.run(lambda events, _: events[0] if events else None)
    assert world.plan.most == world.faults or every


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("before", range(24))
def test_a_search_that_ends_late_loses_no_living_server(first: int, before: int) -> None:
    """Both servers are lost while workers wait for server 1, and the search that began first ends last."""
    world = World(Plan(servers=2, pushes=2, faults=("kill",), most=2, searches=True))
    calm = iter(range(before))

    def choose(events: list[Event], _: Any) -> Event | None:
        if next(calm, None) is not None:
            possible = [event for event in events if event[0] != "kill"]
            return min(possible, key=lambda event: event[0] == "arrive" and event[2] == 1, default=None)
        if world.may_fail:
            return ("kill", first if world.faults == 0 else 1 - first)
        other = [event for event in events if event[0] != "find"]
        return other[0] if other else max(events, key=lambda event: event[2], default=None)

    world.run(choose)
    assert world.faults in (0, world.plan.most)


MEETING = Plan(pushes=1, faults=("cut",), most=1, meets=True)


def applies_all(self: Shard, message: Any, buffer: Any, exchange: Any = Shard.exchange) -> Any:
    self.latest_push.pop(message.worker, None)
    return exchange(self, message, buffer)


def handles_all(self: ReplyCache, caller: str, number: int, arrived: Any, handle: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    answer = handle()
    if isinstance(answer, Future):
        answer.add_done_callback(lambda done: future.set_result(done.value()))
    else:
        future.set_result(answer)
    return future


def takes_the_first(self: StateRecovery, offer: StateReport) -> None:
    for held in offer.shards:
        self.newest.setdefault(held.fragment, held)
    self.offers[offer.worker] = replace(offer, shards=())


def forgets_pushes(self: Shard, weights: Any, version: int, pushes: Any) -> None:
    self.initialise(weights, version)


MUTATIONS: dict[str, tuple[Any, str, Any, Plan]] = {
    "pushes are not told apart by number": (Shard, "exchange", applies_all, FEW["a server is lost"]),
    "calls are handled as often as they come": (ReplyCache, "answer", handles_all, MEETING),
    "the first offer is taken, not the newest": (StateRecovery, "add", takes_the_first, FEW["a server is lost"]),
    "a restored shard forgets which pushes it holds": (Shard, "resume", forgets_pushes, FEW["a server is lost"]),
    "nobody waits for the others' offers": (StateRecovery, "awaited", lambda *_: set(), FEW["a server is lost"]),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_what_is_broken_on_purpose_is_found(mutation: tuple[Any, str, Any, Plan]) -> None:
    owner, name, broken, plan = mutation
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, broken)
        with pytest.raises(AssertionError):
            every_order(plan)
