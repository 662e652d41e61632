"""How the transport over RPC makes connections again, with a script in TensorPipe's place: no network, no waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.futures import Future

from lightning_asgd.core.calls.transport import CallTimeoutError
from lightning_asgd.transports.rpc import tensorpipe
from lightning_asgd.transports.rpc import transport as rpc_transport
from lightning_asgd.transports.rpc.transport import RpcTransport

BROKEN = "EOF: end of file (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)\nand a stack"
REFUSED = "ECONNREFUSED: connection refused (this error originated at tensorpipe/transport/uv/connection_impl.cc:72)"


class Script:
    """The agent: every message that is sent waits in :attr:`sent` until the test says what becomes of it."""

    def __init__(self) -> None:
        self.alive = True
        self.peers = 0
        self.sent: list[tuple[str, Callable[..., Any], Any, float, Future[Any]]] = []

    def add_peer(self, name: str, address: str) -> str | None:
        self.peers += 1
        return f"{name}:{self.peers}" if self.alive else None

    def send(self, name: str, function: Callable[..., Any], args: Any, timeout_s: float) -> Future[Any]:
        self.sent.append((name, function, args, timeout_s, Future()))
        return self.sent[-1][-1]

    def stop(self) -> None:
        self.alive = False

    def fails(self, text: str) -> str:
        """The oldest message fails; the name of its connection."""
        name, *_, future = self.sent.pop(0)
        future.set_exception(RuntimeError(text))
        return name

    def answers(self, value: Any) -> str:
        name, *_, future = self.sent.pop(0)
        future.set_result(value)
        return name


class Bulky:
    bulky = True


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(tensorpipe, "Agent", lambda *_: script)
    monkeypatch.setattr(tensorpipe, "reachable", lambda address: True)
    return script


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Callable[[], None]]]:
    """What was to be done later, and in how many seconds."""
    pauses: list[tuple[float, Callable[[], None]]] = []

    class Timer:
        def __init__(self, pause_s: float, work: Callable[..., None], args: tuple[Any, ...]) -> None:
            self.entry = (pause_s, lambda: work(*args))

        def start(self) -> None:
            pauses.append(self.entry)

    monkeypatch.setattr(rpc_transport.threading, "Timer", Timer)
    return pauses


def go_on(pauses: list[tuple[float, Callable[[], None]]]) -> float:
    ((pause_s, work),) = pauses
    pauses.clear()
    work()
    return pause_s


@pytest.fixture
def transport(script: Script) -> RpcTransport:
    return RpcTransport(["uv://127.0.0.1:1"])


def test_a_broken_connection_gets_one_successor_that_repeats_all(
    transport: RpcTransport, script: Script, pauses: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    futures = [transport.call(0, text, 0.0) for text in ("a", "b")]
    broken = {script.fails(BROKEN), script.fails(BROKEN)}
    futures.append(transport.call(0, "c", 0.0))  # meanwhile
    assert script.sent == []
    assert go_on(pauses) == 0.0
    assert [(args[1], args[3]) for _, _, args, _, _ in script.sent] == [(1, "a"), (2, "b"), (3, "c")]
    assert len({*broken, *(script.answers(number) for number in range(3))}) == 2
    assert [future.value() for future in futures] == [0, 1, 2]
    assert caplog.messages == ["The connection to server 0 broke (EOF: end of file) and was reopened."]


def test_pauses_grow_until_the_time_is_up(transport: RpcTransport, script: Script, pauses: list[Any]) -> None:
    future, seen = transport.call(0, "a", 1000.0), []
    for _ in range(7):
        script.fails(BROKEN)
        seen.append(go_on(pauses))
    assert seen == [0.0, 0.05, 0.2, 0.5, 1.0, 1.0, 1.0]
    assert 900.0 < script.sent[0][3] < 1000.0  # torch is told the rest
    script.answers("at last")
    assert future.value() == "at last"
    transport.call(0, "b", 0.0)
    script.fails(BROKEN)
    assert go_on(pauses) == 0.0, "an answer ends the outage"
    assert script.sent[0][3] == tensorpipe.INFINITE_S


def test_a_call_without_a_connection_runs_out_of_time(
    transport: RpcTransport, script: Script, pauses: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorpipe, "reachable", lambda address: False)
    future = transport.call(0, "a", 1e-9)
    assert script.sent == [], "TensorPipe ends a process that connects where there is no way to"
    go_on(pauses)
    with pytest.raises(CallTimeoutError, match="no answer within 1e-09 s, without a connection: the network is"):
        future.value()


def test_where_nobody_listens_calls_fail_and_the_next_one_tries_again(
    transport: RpcTransport, script: Script, pauses: list[Any]
) -> None:
    future, urgent = transport.call(0, "a", 0.0), type("Sign", (), {"urgent": True})()
    sign = transport.call(0, urgent, 0.0)
    _, *rest = script.sent
    script.fails(BROKEN)
    script.sent.clear()
    for _ in range(2):
        go_on(pauses)
        script.fails(REFUSED)
    assert not future.done()
    go_on(pauses)
    script.fails(REFUSED)
    with pytest.raises(RuntimeError, match=r"^ECONNREFUSED: connection refused$"):
        future.value()
    assert pauses == []
    assert not sign.done()
    rest[0][-1].set_result("the other connection stands")
    assert sign.value() == "the other connection stands"
    again = transport.call(0, "again", 0.0)
    script.answers("it is back")
    assert again.value() == "it is back"


def test_what_fails_on_the_server_is_not_repeated(transport: RpcTransport, script: Script, pauses: list[Any]) -> None:
    future = transport.call(0, "a", 0.0)
    script.fails("On WorkerInfo(id=1, name=server0:1):\nValueError('no')")
    with pytest.raises(RuntimeError, match="On WorkerInfo"):
        future.value()
    assert pauses == []


def test_acknowledgements_make_no_connection(transport: RpcTransport, script: Script, pauses: list[Any]) -> None:
    first = transport.call(0, "a", 0.0)
    script.answers(Bulky())
    assert isinstance(first.value(), Bulky)
    (name, function, args, *_) = script.sent[0]
    assert (function, args[1]) == (rpc_transport._forget, [1])
    script.fails(BROKEN)
    go_on(pauses)
    assert script.sent == [], "nothing waits for the new connection"
    transport.call(0, "b", 0.0)
    assert script.sent[0][0] != name
    assert script.sent[0][2][2] == [1], "what was not acknowledged goes with the next call"


def test_a_transport_that_was_closed_fails_its_calls(
    transport: RpcTransport, script: Script, pauses: list[Any]
) -> None:
    before = transport.call(0, "a", 0.0)
    script.fails(BROKEN)
    transport.close()
    after = transport.call(0, "b", 0.0)
    go_on(pauses)
    for future in (before, after):
        with pytest.raises(RuntimeError, match="the connection is closed"):
            future.value()
    assert script.sent == []
