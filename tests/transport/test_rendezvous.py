from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
import torch

from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.calls.transport import CallTimeoutError
from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.job import address as job_address
from lightning_asgd.core.job import registry
from lightning_asgd.core.job.addresses import LOOPBACK, interface_of, local_address_towards
from lightning_asgd.core.job.rendezvous import Rendezvous
from tests.helpers.ports import free_port
from tests.helpers.servers import SECRET

Host = Callable[..., Rendezvous]


@pytest.fixture
def guests(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """What the test opens, and the job's secret in its environment."""
    monkeypatch.setenv(SECRET_ENV, SECRET)
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["rpc", "zmq"])
def host(request: pytest.FixtureRequest, guests: ExitStack) -> Host:
    """Hosts a rendezvous as jobs with each transport do."""
    return lambda *where: guests.enter_context(registry.kind_of(request.param).host_rendezvous(*where))


def listening() -> set[tuple[str, int]]:
    process = psutil.Process()
    look: Any = getattr(process, "net_connections", None) or process.connections
    return {(c.laddr.ip, c.laddr.port) for c in look(kind="inet") if c.status == psutil.CONN_LISTEN}


def test_what_one_puts_the_other_gets(host: Host, guests: ExitStack) -> None:
    main = host()
    guest = guests.enter_context(Rendezvous.connect(*main.address, timeout_s=10.0))
    assert guest.peek("x") is None
    value = {"address": "tcp://somewhere", "pid": 3, "list": [1, None]}
    main.put("x", value)
    assert guest.get("x", "The host", 10.0) == value
    assert guest.peek("x") == value
    guest.put("y", {"error": "gone"})
    assert main.get("y", "The guest", 10.0) == {"error": "gone"}


def test_a_host_listens_on_loopback_only(host: Host) -> None:
    before = listening()
    address, port = host().address
    assert address == LOOPBACK
    assert port > 0
    assert listening() - before == {(LOOPBACK, port)}


def test_two_hosts_at_a_time_do_not_mix(host: Host, guests: ExitStack) -> None:
    first, second = host(), host()
    assert first.address != second.address
    first.put("x", 1)
    assert second.peek("x") is None
    second.put("x", 2)
    found = [guests.enter_context(Rendezvous.connect(*each.address, timeout_s=10.0)) for each in (first, second)]
    assert found[0].get("x", "The first", 10.0) == 1
    assert found[1].get("x", "The second", 10.0) == 2


def test_a_value_that_comes_later_is_waited_for(host: Host) -> None:
    main = host()
    asked = threading.Event()

    def put() -> None:
        asked.wait(10.0)
        with Rendezvous.connect(*main.address, timeout_s=10.0) as guest:
            guest.put("late", "here")

    thread = threading.Thread(target=put)
    thread.start()
    assert main.get("late", "The other", 20.0, check=asked.set) == "here"
    thread.join()


def test_a_value_that_never_comes_is_named(host: Host) -> None:
    with pytest.raises(LaunchError) as caught:
        host().get("server/7", "Server 7", 0.05)
    text = str(caught.value)
    assert "Server 7 did not start within 0.05 s. Expected it to publish 'server/7' at 127.0.0.1:" in text
    assert "raise timeouts.start_s" in text


def test_a_check_may_end_the_wait(host: Host) -> None:
    def check() -> None:
        raise LaunchError("the server died")

    with pytest.raises(LaunchError, match="the server died"):
        host().get("x", "Server 0", 20.0, check)


def test_nobody_at_the_address_is_an_error_in_time() -> None:
    with socket.socket() as reserved:
        reserved.bind((LOOPBACK, 0))  # taken, and not listened on
        port = reserved.getsockname()[1]
        begun = time.monotonic()
        with pytest.raises(LaunchError) as caught:
            Rendezvous.connect(LOOPBACK, port, timeout_s=1.0)
    assert time.monotonic() - begun < 15.0
    text = str(caught.value)
    assert f"Found no job at 127.0.0.1:{port}: " in text
    assert "Expected the main process to listen there" in text
    assert "MASTER_ADDR" in text


def test_somebody_else_at_the_address_is_an_error_in_time() -> None:
    caught: list[BaseException] = []

    def connect() -> None:
        try:
            Rendezvous.connect(LOOPBACK, stranger.getsockname()[1], timeout_s=1.0)
        except BaseException as error:
            caught.append(error)

    with socket.socket() as stranger:
        stranger.bind((LOOPBACK, 0))
        stranger.listen()  # takes connections, and never says a word
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(6.0)
        in_time = not thread.is_alive()
    thread.join(10.0)  # with the stranger gone the connection breaks
    assert in_time, "still waiting after 6 s"
    assert [type(error) for error in caught] == [LaunchError]


class Forwarder:
    """As of an SSH tunnel: closes the first connections at once, as if nothing listened at the far end yet."""

    def __init__(self, far: tuple[str, int], closes: float) -> None:
        self._far = far
        self._closes = closes
        self._ends: list[socket.socket] = []
        self.listener = socket.create_server((LOOPBACK, 0))
        self.closed = 0
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                if self.closed < self._closes:
                    self.closed += 1
                    near.close()
                    continue
                far = socket.create_connection(self._far)
                self._ends += [near, far]
                self._threads += [threading.Thread(target=self._copy, args=two) for two in ((near, far), (far, near))]
                for thread in self._threads[-2:]:
                    thread.start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for end in [self.listener, *self._ends]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(5.0)


def test_a_port_forwarder_that_closes_connections_at_first_is_asked_again(host: Host, guests: ExitStack) -> None:
    main = host()
    forwarder = Forwarder(main.address, closes=5)
    guests.callback(forwarder.close)
    guest = guests.enter_context(Rendezvous.connect(*forwarder.listener.getsockname(), timeout_s=20.0))
    main.put("x", 1)
    assert guest.get("x", "The host", 5.0) == 1
    assert forwarder.closed == 5


def test_a_port_forwarder_without_a_far_end_is_an_error_in_time(guests: ExitStack) -> None:
    forwarder = Forwarder((LOOPBACK, 1), closes=math.inf)
    guests.callback(forwarder.close)
    begun = time.monotonic()
    with pytest.raises(LaunchError, match=r"Found no job at .*closed the connection"):
        Rendezvous.connect(*forwarder.listener.getsockname(), timeout_s=0.5)
    assert time.monotonic() - begun < 15.0
    assert forwarder.closed > 3


@pytest.mark.parametrize(
    "call",
    [
        lambda guest: guest.get("x", "The host", 0.5),
        lambda guest: guest.put("x", 1),  # torch's store does not acknowledge it
        lambda guest: guest._store.is_foreign("x"),
    ],
    ids=["read", "write", "ask whose"],
)
def test_a_store_that_falls_silent_is_waited_for_no_longer_than_the_caller_said(call: Callable[[Any], Any]) -> None:
    """A foreign process that answers as torch's store does while a process connects, and never again."""
    open_: list[socket.socket] = []
    caught: list[type[BaseException] | None] = []

    def answer() -> None:
        with contextlib.suppress(OSError):  # the test is over
            while True:
                connection, _ = listener.accept()
                open_.append(connection)
                threading.Thread(target=greet, args=(connection,), daemon=True).start()

    def greet(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            told = connection.recv(10, socket.MSG_WAITALL)  # a magic number, and a number that it is to send back
            connection.sendall(told[-4:])

    def use() -> None:
        try:
            call(Rendezvous.connect(*listener.getsockname(), timeout_s=1.0))
            caught.append(None)
        except BaseException as error:
            caught.append(type(error))

    with socket.create_server((LOOPBACK, 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        thread = threading.Thread(target=use, daemon=True)
        thread.start()
        thread.join(8.0)
        in_time = not thread.is_alive()
        for connection in open_:
            connection.close()
        thread.join(10.0)
        listener.shutdown(socket.SHUT_RDWR)
    assert in_time, "still waiting after 8 s"
    assert caught[0] in (None, LaunchError, CallTimeoutError)


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_a_forked_process_does_not_keep_the_port(
    transport: str, guests: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted = [registry.kind_of(transport).host_rendezvous()]
    address = hosted[0].address
    monkeypatch.setattr(job_address, "_hosted", {address: hosted[0]})
    fork = multiprocessing.get_context("fork")
    mine, theirs = fork.Pipe()
    child = fork.Process(target=theirs.recv)
    child.start()
    try:
        with Rendezvous.connect(*address, timeout_s=10.0) as guest:  # the parent still serves
            hosted[0].put("x", 1)
            assert guest.get("x", "The host", 5.0) == 1
        job_address._hosted.clear()
        hosted.pop().close()
        gc.collect()  # torch closes a store with its last user
        socket.create_server(address).close()
    finally:
        mine.send(None)
        child.join(20.0)
    assert child.exitcode == 0


def test_a_port_in_use_is_an_error(host: Host) -> None:
    main = host()
    with pytest.raises(LaunchError, match=rf"Cannot listen on 127.0.0.1:{main.address[1]}: .*in use.*MASTER_PORT"):
        host(*main.address)


def test_an_address_of_another_machine_is_an_error(host: Host) -> None:
    with pytest.raises(LaunchError, match=r"Cannot listen on 192.0.2.1:0"):
        host("192.0.2.1")


def test_this_machine_reaches_itself_over_loopback() -> None:
    assert local_address_towards(LOOPBACK) == LOOPBACK
    assert interface_of(LOOPBACK) in ("lo", "lo0")
    assert interface_of("127.0.1.1") == interface_of(LOOPBACK)


def test_an_address_of_no_interface_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"No network interface of this machine has the address 192.0.2.1"):
        interface_of("192.0.2.1")


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A free port, where process groups meet; they are gone afterwards."""
    number = free_port()
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", str(number))
    yield number
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("transport", "group_first"),
    [("rpc", True), ("rpc", False), ("zmq", True)],  # with zmq a later group takes the port over: see release_port
)
def test_a_process_group_and_the_rendezvous_share_a_port(
    guests: ExitStack, port: int, transport: str, group_first: bool
) -> None:
    if group_first:
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    host = registry.kind_of(transport).host_rendezvous(LOOPBACK, port)
    if not group_first:
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    guest = Rendezvous.connect(LOOPBACK, port, timeout_s=10.0)
    assert host.serves_torch
    host.put("x", 1)
    assert guest.get("x", "The host", 5.0) == 1  # torch's store does not acknowledge what it is told
    torch.distributed.barrier()


def test_a_port_of_somebody_else_is_refused_beside_a_process_group(port: int) -> None:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    with socket.socket() as stranger:
        stranger.bind((LOOPBACK, 0))
        stranger.listen()
        with pytest.raises(LaunchError, match="Cannot listen on"):
            Rendezvous.host(LOOPBACK, stranger.getsockname()[1])
    begun = time.monotonic()
    with pytest.raises(LaunchError, match="Cannot listen on"):
        Rendezvous.host("192.0.2.1", port + 1)  # not this machine's
    assert time.monotonic() - begun < 5
