"""Two processes that claim one rank, in every order: never do both hold it, and no late message of one that has lost it
counts.

A real service, whose worker 0 is alive. Worker 1 is started as process *a*, and started again as process *b*; each
joins, leases data, pushes twice and leaves. A message is on its way once the one before it was answered, and arrives at
any time after, also when its process has died. tests/helpers/orders.py enumerates the orders of these events:

* ``arrive``: a process's message reaches the server; its heartbeat has a connection of its own,
* ``start``: process b begins, and joins the session of that moment,

and of faults: ``die``: a process ends; ``tell``: its parent reports that, by the name of the process; ``silence``: the
server hears nothing of worker 1 for too long; ``proceed``: worker 0 begins the job's next session, that of another fit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.foundation.stats import Verdict
from lightning_asgd.core.protocol.lease import Epoch, LeaseRequest
from lightning_asgd.core.protocol.request import Request
from lightning_asgd.core.protocol.session import Failure, Heartbeat, Join, Joined, Leave, Policy
from lightning_asgd.core.protocol.update import Exchange, InitShard, Reply
from lightning_asgd.core.server.membership import Membership
from lightning_asgd.core.server.service import Service
from lightning_asgd.core.server.shard import Shard
from tests.helpers.orders import Explored, explore, fingerprint

SILENCE_S = 3.0
PUSHES = 2
SESSIONS = ("j.0.2", "j.0.3")
EPOCHS = {session: Epoch(f"{session}/0", 100, (100,)) for session in SESSIONS}  # each session is of a fit of its own
CLAIM: dict[str, Any] = {}
"""What the second start joins with, beside what all do."""

Event = tuple[str, ...]
Choose = Callable[[list[Event], Callable[[], Hashable]], Any]


@dataclass
class Process:
    """One start of worker 1."""

    name: str
    claim: dict[str, Any]
    session: str = SESSIONS[0]
    alive: bool = True
    told: bool = False  # whether its parent has reported its end
    returned: bool = False  # whether it has rejoined, after the server had gone on without it
    seq: int = 0
    pushes: int = 0
    units: int = 0  # that it has trained since it joined
    main: Request | None = None  # on its way
    sign: Request | None = None  # a heartbeat on its way

    def begin(self, session: str) -> None:
        self.session, self.units = session, 0
        self.main = Join(session, 1, 2, Policy(SILENCE_S), process=self.name, **self.claim)

    def go_on(self, message: Request, answer: Any, session: str) -> None:
        """What follows an answer."""
        about: Any = {"process": self.name}
        self.main = None
        if isinstance(answer, Failure):
            if answer.error == "WorkerAwayError" and not self.returned:
                self.returned, self.units = True, 0
                self.main = Join(self.session, 1, 2, Policy(SILENCE_S), again=True, **about)
            elif self.session != session and answer.error == "ProtocolError":
                self.begin(session)
        elif isinstance(answer, Joined):
            self.main = InitShard(self.session, 1, GROUPS, ASGD("sum"), None, **about)
            self.sign = Heartbeat(self.session, 1, **about)
        elif isinstance(message, InitShard):
            epoch = EPOCHS[self.session]
            self.main = LeaseRequest(self.session, 1, epoch.key, 0, 0, 0, 0.1, size=PUSHES, opens=epoch, **about)
        elif isinstance(message, LeaseRequest) or (isinstance(message, Exchange) and self.units < PUSHES):
            self.seq, self.pushes, self.units = self.seq + 1, self.pushes + 1, self.units + 1
            update = torch.zeros(LENGTH)
            update[(0 if self.name == NAMES["a"] else LENGTH // 2) + self.pushes - 1] = 1.0
            counts: Any = {"epoch": EPOCHS[self.session].key, "units": self.units}
            self.main = Exchange(self.session, 1, self.seq, 0, True, True, (update,), **counts, **about)
        elif isinstance(message, Exchange):
            self.main = Leave(self.session, 1, **about)


LENGTH = 16
GROUPS = ((Role.PARAMETER, "float32", LENGTH),)
NAMES = {"a": "there/1/aa", "b": "there/2/bb"}


class World:
    """See the module's docstring; ``most`` of the faults ``kinds`` happen in an order."""

    def __init__(self, kinds: tuple[str, ...], most: int) -> None:
        self.kinds, self.left = kinds, most
        self.now = 0.0
        self.service = Service(lambda: self.now)
        self.session = ""
        self.applied = dict.fromkeys(SESSIONS, 0)  # pushes
        self.processes = {"a": Process(NAMES["a"], {})}
        self.proceed()
        self.processes["a"].begin(self.session)

    def run(self, choose: Choose) -> None:
        while (event := choose(self.events(), self.fingerprint)) is not None:
            getattr(self, event[0])(*event[1:])

    @property
    def members(self) -> Membership:
        assert self.service.session is not None
        return self.service.session.members

    @property
    def shard(self) -> Shard:
        assert self.service.session is not None
        return self.service.session.shards[0]

    def events(self) -> list[Event]:
        there = self.processes.items()
        events: list[Event] = [
            ("arrive", key, line) for key, p in there for line in ("main", "sign") if getattr(p, line)
        ]
        events += [] if "b" in self.processes else [("start",)]
        events += [("tell", key) for key, p in there if not p.alive and not p.told]
        if not self.left:
            return events
        events += [("die", key) for key, p in there if p.alive and "die" in self.kinds]
        if "proceed" in self.kinds and self.session != SESSIONS[-1]:
            events.append(("proceed",))
        if "silence" in self.kinds and 1 in self.members.joined:
            events.append(("silence",))
        return events

    # ------------------------------------------------------------------ events

    def start(self) -> None:
        self.processes["b"] = Process(NAMES["b"], CLAIM)
        self.processes["b"].begin(self.session)

    def arrive(self, key: str, line: str) -> None:
        process = self.processes[key]
        message = getattr(process, line)
        setattr(process, line, None)
        before, holder, excused = self.state(), self.holder(message.session), self.is_away()
        answer = self.service.handle(message)
        counts = not isinstance(answer, Failure) and answer is not False
        if holder not in (None, process.name) and isinstance(answer, Joined):
            assert excused, f"{process.name} took the rank from {holder}, which was there"
        elif holder not in (None, process.name):
            assert not isinstance(answer, Reply | bool) or not counts, (
                f"{message} of a process without the rank counted"
            )
            assert self.state() == before, f"{message} of a process without the rank changed something"
        if isinstance(answer, Reply) and answer.verdict is Verdict.APPLIED:
            self.applied[self.session] += 1
            assert self.holder(self.session) == process.name
        if line == "main" and process.alive:
            process.go_on(message, answer, self.session)
        self.check()

    def die(self, key: str) -> None:
        self.left -= 1
        self.processes[key].alive = False

    def tell(self, key: str) -> None:
        process = self.processes[key]
        process.told = True
        before, holder = self.state(), self.holder(self.session)
        parent = process.name.rpartition("/")[0] + "/"
        self.service.handle(Leave(self.session, 1, "its process ended", final=True, process=parent))
        assert holder in (None, process.name) or self.state() == before, "the end of one process took out another one"

    def silence(self) -> None:
        self.left -= 1
        for _ in range(int(SILENCE_S) + 2):
            self.now += 1.0
            self.service.handle(Heartbeat(self.session, 0, process="here/0/00"))
            self.service.tick()

    def proceed(self) -> None:
        self.left -= bool(self.session)
        before, self.session = self.session, SESSIONS[bool(self.session)]
        about: Any = {"process": "here/0/00"}
        self.service.handle(Join(self.session, 0, 2, Policy(SILENCE_S), after=before, **about))
        self.service.handle(InitShard(self.session, 0, GROUPS, ASGD("sum"), (torch.zeros(LENGTH),), **about))

    # ------------------------------------------------------------------ what must hold

    def holder(self, session: str) -> str | None:
        """The process that is worker 1 in a session; of one that is over nobody is."""
        return self.members.processes.get(1) if session == self.members.session else "nobody"

    def is_away(self) -> bool:
        return 1 in self.members.left or 1 in self.members.suspected

    def state(self) -> Hashable:
        """What no stranger may change."""
        members, weights = self.members, self.shard.weights
        who = members.left, members.suspected, members.catching_up, members.fenced, members.processes, members.joined
        heard = members.silent_s(1, 0.0)
        return fingerprint((members.session, *who, heard, weights, self.service.state.epochs))

    def check(self) -> None:
        weights = self.shard.weights[0]
        assert weights.max() <= 1, f"a push was applied twice: {weights.tolist()}"
        latest = self.service.state.epochs.latest
        if latest is not None:
            done = sum(last - first for first, last in latest.finished)
            assert done == self.applied[latest.epoch.fit], f"{done} units are done by {self.applied} pushes"

    def fingerprint(self) -> Hashable:
        told = [
            (p.session, p.alive, p.told, p.returned, p.seq, p.pushes, p.units, p.main, p.sign)
            for p in self.processes.values()
        ]
        rest = self.members.incarnations, vars(self.shard)["latest_push"], self.service.state.registry.exits
        return fingerprint((tuple(told), self.state(), rest, self.left, self.applied))


def every_order(kinds: tuple[str, ...], most: int) -> Explored:
    found = explore(lambda: World(kinds, most))
    assert found.complete
    return found


def test_a_worker_is_started_twice() -> None:
    assert every_order((), 0).states > 50


@pytest.mark.parametrize("kind", ["die", "silence", pytest.param("proceed", marks=pytest.mark.slow)])
def test_a_worker_is_started_twice_and_one_fault(kind: str) -> None:
    assert every_order((kind,), 1).states > 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_faults() -> None:
    assert every_order(("die", "silence", "proceed"), 2).states > 1000


def any_process(self: Membership, worker: int, process: str, session: str = "") -> None:
    """In place of :meth:`Membership.check_process`."""


def any_end(self: Membership, worker: int, process: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("name", "broken", "kinds"), [("check_process", any_process, ()), ("is_process", any_end, ("die",))]
)
def test_what_is_broken_on_purpose_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Any, kinds: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Membership, name, broken)
    with pytest.raises(AssertionError, match=r"without the rank|took"):
        every_order(kinds, 1)
