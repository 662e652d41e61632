from __future__ import annotations

import inspect
import time
from typing import Any

import pytest
import torch
from torch.futures import Future

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.calls.transport import CallTimeoutError, Transport
from lightning_asgd.core.foundation import errors
from lightning_asgd.core.foundation.errors import ASGDError, CollectiveTimeoutError, ServerLostError
from lightning_asgd.core.foundation.layout import build_layout
from lightning_asgd.core.foundation.stats import Verdict
from lightning_asgd.core.protocol.collective import Contribution
from lightning_asgd.core.protocol.session import Failure, HeartbeatReply, Join, Joined, Leave
from lightning_asgd.core.protocol.update import Exchange, InitShard, Reply
from lightning_asgd.core.worker import collectives as collectives_module
from lightning_asgd.core.worker import connection as connection_module
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.connection import Connection, done_within
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.shard_client import ShardClient

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, ASGDError)]
LAYOUT = build_layout([("w", torch.zeros(4))], 2)


class Answers(Transport):
    """Two servers that answer what the test says: a value, an exception to fail with, or nothing at all."""

    num_servers = 2  # type: ignore[assignment]

    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.sent: list[tuple[int, Any, float]] = []

    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        self.sent.append((server, message, timeout_s))
        answer = self.answers[server]
        future: Future[Any] = Future()
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        return future

    def close(self) -> None:
        pass


class Unreachable(Answers):
    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        if isinstance(self.answers[server], Exception):
            raise self.answers[server]
        return super().call(server, message, timeout_s)


def client(transport: Transport, timeout_s: float = 7.0) -> SessionClient:
    return SessionClient(Connection(transport, "s", 3, 4, timeout_s=timeout_s))


def reply(version: int) -> Reply:
    return Reply(version, 0, Verdict.NONE)


def exchange(c: SessionClient) -> list[Reply]:
    updates = [(torch.zeros(2),), (torch.ones(2),)]
    shards = ShardClient(c)
    return shards.replies(shards.exchange(Exchange(*c.connection.sender, 5, 0, True, True), [1, 2], updates))


CALLS: dict[str, Any] = {
    "join": lambda c: c.join(),
    "initialise": lambda c: ShardClient(c).initialise(LAYOUT, ASGD(), [None, None]),
    "exchange": exchange,
    "collective": lambda c: Collectives(c, 1.0).contribute("barrier", "x"),
}


def first(call: Any) -> Any:
    """What the first server answers to a call."""
    return Joined(1) if call is CALLS["join"] else reply(0)


def test_every_server_is_sent_its_own_part() -> None:
    transport = Answers(reply(6), reply(7))
    assert [r.version for r in exchange(client(transport))] == [6, 7]
    (first, a, timeout), (second, b, _) = transport.sent
    assert (first, second, timeout) == (0, 1, 7.0)
    assert isinstance(a, Exchange)
    assert (a.session, a.worker, a.seq, a.base_version, a.push, a.fetch) == ("s", 3, 5, 1, True, True)
    assert (a.update[0].tolist(), b.update[0].tolist()) == ([0.0, 0.0], [1.0, 1.0])
    assert b.base_version == 2


def test_a_fetch_sends_no_update() -> None:
    transport = Answers(reply(0), reply(0))
    message = Exchange("s", 3, 5, 0, push=False, fetch=True)
    ShardClient(client(transport)).exchange(message, [1, 2], [(torch.zeros(2),)] * 2)
    assert [m.update for _, m, _ in transport.sent] == [None, None]


def test_joining_tells_every_server() -> None:
    transport = Answers(Joined(1), Joined(2))
    client(transport).join()
    assert [(s, m) for s, m, _ in transport.sent] == [(0, Join("s", 3, 4)), (1, Join("s", 3, 4, server=1))]


def test_initialise_brings_each_server_its_part() -> None:
    transport = Answers(True, False)
    seen = ShardClient(client(transport)).initialise(
        LAYOUT, ASGD("sum"), [None, None], [(torch.zeros(2),), (torch.ones(2),)], [8, 9]
    )
    assert seen == [True, False]
    messages = [m for _, m, _ in transport.sent]
    assert all(isinstance(m, InitShard) for m in messages)
    assert [m.version for m in messages] == [8, 9]
    assert [m.groups for m in messages] == [LAYOUT.shard(0), LAYOUT.shard(1)]
    assert messages[1].weights[0].tolist() == [1.0, 1.0]


def test_collectives_go_to_the_coordinator_and_are_counted() -> None:
    transport = Answers({0: "a"}, None)
    collectives = Collectives(client(transport), 2.0)
    for _ in range(2):
        assert collectives.contribute("broadcast", "x", "mine", source=0) == {0: "a"}
    messages = [m for s, m, _ in transport.sent if s == 0]
    assert len(messages) == 2
    assert messages[0] == Contribution("s", 3, 1, "broadcast", "x", "mine", 0, None, 2.0)
    assert messages[1].seq == 2


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("cls", CLASSES)
def test_a_servers_error_is_raised_here(call: Any, cls: type[ASGDError]) -> None:
    failure = Failure(cls.__name__, "what happened")
    with pytest.raises(ASGDError) as caught:
        call(client(Answers(failure, failure)))
    assert type(caught.value) is cls
    assert str(caught.value) == "what happened"


@pytest.mark.parametrize("call", list(CALLS.values())[:3], ids=list(CALLS)[:3])
def test_the_second_servers_error_is_raised_too(call: Any) -> None:
    with pytest.raises(errors.ProtocolError, match="what happened"):
        call(
            client(Answers(Joined(1) if call is CALLS["join"] else reply(0), Failure("ProtocolError", "what happened")))
        )


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("transport", [Answers, Unreachable])
def test_a_lost_server_is_named(call: Any, transport: type[Answers]) -> None:
    with pytest.raises(ServerLostError, match=r"Server 0 is lost: worker 3 got 'eof' instead of an answer. Expected"):
        call(client(transport(RuntimeError("eof\nand much more"), reply(0))))


@pytest.mark.parametrize("transport", [Answers, Unreachable])
def test_the_second_server_is_named_too(transport: type[Answers]) -> None:
    with pytest.raises(ServerLostError, match="Server 1 is lost"):
        exchange(client(transport(reply(0), RuntimeError("eof"))))


def test_an_error_without_text_is_named_by_its_class() -> None:
    with pytest.raises(ServerLostError, match="got 'RuntimeError' instead"):
        exchange(client(Answers(RuntimeError(), reply(0))))


@pytest.mark.parametrize("call", list(CALLS.values())[:3], ids=list(CALLS)[:3])
def test_a_server_that_does_not_answer_is_lost(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "GRACE_S", 0.0)
    with pytest.raises(ServerLostError, match=r"Server 1 did not answer worker 3 within 0.01 s.*timeouts.exchange_s"):
        call(client(Answers(first(call), None), timeout_s=0.01))


@pytest.mark.parametrize("text", ["RPC ran for more than set timeout", "ECONNREFUSED"])
def test_a_server_is_replaced_by_the_kind_of_the_error_not_by_its_text(text: str) -> None:
    for kind, server in ((RuntimeError, 0), (CallTimeoutError, None)):  # one that was slow may live
        with pytest.raises(ServerLostError, match="Server 0 is lost") as lost:
            client(Answers(kind(text), True)).join()
        assert lost.value.server == server


def test_a_coordinator_that_does_not_answer_is_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives_module, "GRACE_S", 0.0)
    with pytest.raises(CollectiveTimeoutError, match=r"barrier 'epoch' of worker 3 was not answered within 0.01 s"):
        Collectives(client(Answers(None, None)), 0.01).contribute("barrier", "epoch")


def test_a_worker_waits_longer_than_the_coordinator_does() -> None:
    transport = Answers({}, None)
    Collectives(client(transport), 5.0).contribute("barrier", "x")
    assert transport.sent[0][2] > 5.0


@pytest.mark.parametrize("transport", [Answers, Unreachable])
def test_leaving_ignores_servers_that_are_gone(transport: type[Answers]) -> None:
    link = transport(RuntimeError("eof"), True)
    client(link).leave("killed")
    assert (1, Leave("s", 3, "killed")) in [(s, m) for s, m, _ in link.sent]


def test_another_worker_can_be_reported() -> None:
    link = Answers(True, True)
    client(link).leave("killed", worker=1)
    assert [m for _, m, _ in link.sent] == [Leave("s", 1, "killed", final=True)] * 2


def test_waiting_ends_with_the_answer_or_with_the_time() -> None:
    done: Future[int] = Future()
    done.set_result(1)
    assert done_within(done, 0.0)
    assert not done_within(Future(), 0.01)


class Restores:
    def restore(self, servers: Any) -> None:
        pass

    def watch(self, server: int) -> None:
        pass


@pytest.mark.parametrize(("needed", "again"), [(0, [1, 2, 3, 4, 5]), (3, [3, 4, 5]), (4, [4, 5]), (9, [5])])
def test_a_worker_tells_again_what_it_was_answered_that_somebody_may_need(needed: int, again: list[int]) -> None:
    transport = Answers({3: "x"}, None)
    c = client(transport)
    c.connection.restorer = Restores()
    collectives = Collectives(c, 1.0)
    for _ in range(5):
        c.note_heartbeat(HeartbeatReply(needed=needed))
        collectives.contribute("barrier", "x")
    transport.sent.clear()
    collectives.repeat(c.connection)
    assert [(m.seq, m.answer) for _, m, _ in transport.sent] == [(seq, {3: "x"}) for seq in again]


def test_answers_are_not_kept_where_no_server_can_be_restored() -> None:
    collectives = Collectives(client(Answers({3: "x"}, None)), 1.0)
    for _ in range(5):
        collectives.contribute("barrier", "x")
    assert list(collectives._answers) == [5]


def test_what_one_alone_wants_is_not_kept_by_it_once_it_has_it() -> None:
    transport = Answers({3: "large"}, None)
    c = client(transport)
    c.connection.restorer = Restores()
    collectives = Collectives(c, 1.0)
    for _ in range(2):
        collectives.contribute("gather", "x", "mine", target=3)
    transport.sent.clear()
    collectives.repeat(c.connection)
    assert [(m.payload, m.answer) for _, m, _ in transport.sent] == [(None, {}), ("mine", {3: "large"})]


def test_a_wait_for_a_lost_server_heeds_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_PATIENCE_S", 0.01)
    connection, looks = client(Answers(None, None)).connection, []

    def check() -> None:
        looks.append(1)
        raise KeyboardInterrupt

    connection.check = check
    assert not connection.wait_interruptibly(Future(), 0.05)
    assert not looks  # the servers are there, and may be slow
    connection.gone.add(0)
    with pytest.raises(KeyboardInterrupt):
        connection.ask(0, Leave("s", 3))
    began = time.monotonic()
    with pytest.raises(ServerLostError):  # and not what ends the worker once more
        connection.ask(1, Leave("s", 3))
    assert time.monotonic() - began < 5
    assert looks == [1]


def test_a_worker_that_has_given_up_sends_no_farewell_to_a_lost_server() -> None:
    transport = Answers(None, reply(0))
    c = client(transport)
    c.connection.gone.add(0)
    c.leave()
    assert [server for server, _, _ in transport.sent] == [1]
