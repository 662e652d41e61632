"""The one port of a job: what it leads to, what strangers can do there, and connections that are cut."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.tunnel import Tunnel
from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.foundation.errors import LaunchError, ServerLostError
from lightning_asgd.core.foundation.process_name import this_network
from lightning_asgd.core.job import registry, rendezvous
from lightning_asgd.core.job.addresses import LOOPBACK, ServerAddress, listen, listens
from lightning_asgd.core.job.rendezvous import Rendezvous, successor_of
from lightning_asgd.core.protocol import Heartbeat
from lightning_asgd.core.server.service import Service
from lightning_asgd.one_port import gateway
from lightning_asgd.transports.zmq import transport as zmq_transport
from lightning_asgd.transports.zmq.server import ZmqServer
from lightning_asgd.transports.zmq.store import HostedZmqStore
from lightning_asgd.transports.zmq.transport import ZmqTransport
from tests.helpers.servers import SECRET
from tests.transport.test_rpc import client_of

ELSEWHERE = "another machine"
DEADLINE_S = 10.0


class Place:
    """A rendezvous at a port that leads to servers, too, which say that they are on another machine."""

    def __init__(self, host: str) -> None:
        self.rendezvous = registry.kind_of("zmq").host_rendezvous(host)
        self.early = Rendezvous.connect(*self.rendezvous.address, timeout_s=DEADLINE_S)
        assert self.rendezvous.open_gateway()
        self.services: list[Service] = []
        self.servers: list[ZmqServer] = []

    @property
    def address(self) -> tuple[str, int]:
        return self.rendezvous.address

    @property
    def process(self) -> psutil.Process:
        store: Any = self.rendezvous._store
        assert isinstance(store, HostedZmqStore)
        assert store._gateway is not None
        return psutil.Process(store._gateway.pid)

    def serve(self, key: str, network: str = ELSEWHERE) -> ZmqServer:
        self.services.append(Service())
        name = key.rpartition("/")[2].ljust(12, "x")
        server = ZmqServer(self.services[-1].handle, LOOPBACK, SECRET, name=name)
        self.servers.append(server)
        self.rendezvous.put(key, {"address": server.address, "network": network, "name": name})
        return server

    def close(self) -> None:
        self.early.close()
        self.rendezvous.close()
        for each in (*self.servers, *self.services):
            each.close()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Place]:
    monkeypatch.setenv(SECRET_ENV, SECRET)
    monkeypatch.setattr(rendezvous, "_GREETING_S", 10.0)  # else torch's client is tried on a busy machine
    made = Place(getattr(request, "param", LOOPBACK))
    yield made
    made.close()


@pytest.fixture
def connect(place: Place) -> Iterator[Callable[..., Transport]]:
    made: list[Transport] = []

    def connect(*addresses: str, refused_s: float = 0.0) -> Transport:
        made.append(ZmqTransport(addresses, SECRET, refused_s))
        return made[-1]

    yield connect
    for transport in made:
        transport.close()


def beats(transport: Transport, server: int = 0) -> None:
    transport.call(server, Heartbeat("s", 0), DEADLINE_S).wait()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize("place", [LOOPBACK, "::1", "localhost"], indirect=True)
def test_one_port_leads_to_the_rendezvous_and_to_all_servers(place: Place, connect: Callable[..., Transport]) -> None:
    """Also where the address is IPv6, or a name. A server of this machine is reached without a detour."""
    for number in range(2):
        place.serve(f"server/{number}")
    near = place.serve("server/near", this_network())
    place.early.put("x", 1)  # over a connection that is older than the gateway
    with Rendezvous.connect(*place.address, timeout_s=DEADLINE_S) as guest:
        assert guest.get("x", "The first", DEADLINE_S) == 1
        ways = [guest.server(number, f"server/{number}", DEADLINE_S) for number in range(2)]
        port = place.address[1]
        assert [ServerAddress.of(each)[1:] for each in ways] == [(port, f"{i}xxxxxxxxxxx", 24 + i) for i in range(2)]
        assert guest.server(2, "server/near", DEADLINE_S) == near.address
    transport = connect(*ways)
    client_of(transport, "s").join()
    for server in range(2):
        beats(transport, server)
    open_to_others = {c.laddr.port for c in place.process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert open_to_others == {place.address[1]}


def test_a_replacement_is_reached_through_the_same_port(place: Place, connect: Callable[..., Transport]) -> None:
    lost = place.serve("server/lost")
    with Rendezvous.connect(*place.address, timeout_s=DEADLINE_S) as guest:
        before = guest.server(0, "server/lost", DEADLINE_S)
        transport = connect(before, refused_s=DEADLINE_S)
        client_of(transport, "s").join()
        lost.close()
        with pytest.raises(RuntimeError, match="no process listens at"):
            beats(transport)
        place.serve("server/next")
        place.rendezvous.put(successor_of("server/lost"), "server/next")
        transport.prepare(0, guest.server(0, "server/lost", DEADLINE_S, before))
        transport.replace(0)
        client_of(transport, "s").join()


def test_what_strangers_say_leads_nowhere(place: Place, connect: Callable[..., Transport]) -> None:
    place.serve("server/name")
    signature = lambda number, kind: b"\xff" + (number + 1).to_bytes(8, "big") + kind  # noqa: E731
    chance = random.Random(0)
    for said, answers in (
        (signature(25, b"\x7f"), b""),  # another server than there is
        (signature(1 << 40, b"\x7f"), b""),
        (signature(24, b"?") + b"another name", b"\0"),
        (signature(25, b"?") + b"namexxxxxxxx", b"\0"),
        (signature(24, b"?") + b"namexxxxxxxx", b"\1"),
        (signature(24, b"x") + chance.randbytes(600), None),
        (signature(0, b"\x7f") + chance.randbytes(600), None),
        (chance.randbytes(600), None),
        (b"GET / HTTP/1.1\r\n\r\n", None),
        (signature(24, b"\x7f")[:5], None),
    ):
        with socket.create_connection(place.address, DEADLINE_S) as stranger:
            stranger.sendall(said)
            stranger.settimeout(DEADLINE_S if answers is not None else 0.2)
            answer = b""
            with contextlib.suppress(ConnectionResetError, TimeoutError):
                while more := stranger.recv(4096):
                    answer += more
        assert answer == answers if answers is not None else len(answer) <= 64, "more than a greeting"
    with Rendezvous.connect(*place.address, timeout_s=DEADLINE_S) as guest:
        transport = connect(guest.server(0, "server/name", DEADLINE_S))
        client_of(transport, "s").join()
    assert place.servers[0].refused == 0


@pytest.mark.slow  # it waits for time-outs
def test_connections_that_say_nothing_are_closed(place: Place) -> None:
    idle = [socket.create_connection(place.address, DEADLINE_S) for _ in range(50)]
    for stranger in idle[::2]:
        stranger.sendall(b"\xff")  # and no more
    wait_for(lambda: place.process.num_fds() > 50, "they are there")
    wait_for(lambda: place.process.num_fds() < 30, "they are closed")
    used = sum(place.process.cpu_times()[:2])
    time.sleep(0.5)
    assert sum(place.process.cpu_times()[:2]) - used < 0.1, "it spins"
    for stranger in idle:
        stranger.close()


class Relayed:
    """The gateway's loop in this process, step by step, and where it leads."""

    def __init__(self, ahead: int) -> None:
        self.listener = listen(LOOPBACK, 0)
        self.listener.setblocking(False)
        self.relay = gateway._Relay(os.getppid(), self.listener, ahead)
        self.relay._servers[0] = "", ahead
        self.relay._opened = True
        self.relay._look_after_callers()

    def ready(self) -> list[Any]:
        return [key for key, _ in self.relay._selector.select(DEADLINE_S)]

    def step(self) -> None:
        for key in self.ready():
            key.data(1)

    def connect(self, said: bytes) -> socket.socket:
        caller = socket.create_connection(self.listener.getsockname())
        caller.settimeout(DEADLINE_S)
        caller.sendall(said)
        self.step()
        return caller


@pytest.fixture
def ahead() -> Iterator[socket.socket]:
    with listen(LOOPBACK, 0) as listener:
        yield listener


def test_a_connection_that_is_dropped_when_it_is_about_to_be_passed_on(
    monkeypatch: pytest.MonkeyPatch, ahead: socket.socket
) -> None:
    """Strangers open many connections, so the gateway drops the oldest one, which has just reached its server."""
    monkeypatch.setattr(gateway, "_MOST_CALLERS", 1)
    relayed = Relayed(ahead.getsockname()[1])
    with relayed.connect(b"\xff" + (1).to_bytes(8, "big") + b"\x7f") as first:
        relayed.step()  # hears it, and connects
        with socket.create_connection(relayed.listener.getsockname()):
            both = sorted(relayed.ready(), key=lambda key: key.fileobj is not relayed.listener)
            assert len(both) == 2
            for key in both:
                key.data(1)
            assert first.recv(1) == b""
            assert len(relayed.relay._callers) == 1
            assert not relayed.relay._ends


def test_only_a_server_that_refuses_is_gone(monkeypatch: pytest.MonkeyPatch, ahead: socket.socket) -> None:
    relayed = Relayed(1)
    relayed.relay._servers[gateway._FIRST] = "s" * gateway._NAME, ahead.getsockname()[1]

    def asked() -> bytes:
        said = b"\xff" + (gateway._FIRST + 1).to_bytes(8, "big") + gateway._ASKS + b"s" * gateway._NAME
        with relayed.connect(said) as caller:
            relayed.step()
            if relayed.relay._callers:
                relayed.step()
            return caller.recv(1)

    assert asked() == gateway._YES
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", NoFiles)
        assert asked() == b""
    place = ahead.getsockname()
    ahead.close()
    assert asked() == gateway._NO
    with socket.create_server(place):  # a stranger, who has its port now
        assert asked() == gateway._NO


class NoFiles(socket.socket):
    """What a process gets that may open no further file."""

    def __init__(self, family: int = -1, kind: int = -1, proto: int = -1, fileno: int | None = None) -> None:
        if fileno is None and family == -1:
            raise OSError(errno.EMFILE, "Too many open files")
        super().__init__(family, kind, proto, fileno)


def test_a_message_for_the_server_before_finds_that_it_is_gone(place: Place, connect: Callable[..., Transport]) -> None:
    server = place.serve("server/b")  # has the number of the one before, whose gateway is gone, too
    host, port = ServerAddress.of(server.address)[:2]
    with pytest.raises(RuntimeError, match="another process listens at its address"):
        beats(connect(str(ServerAddress(host, port, "a".ljust(12, "x"), 24))))
    beats(connect(str(ServerAddress(host, port, "b".ljust(12, "x"), 24))))


def test_a_gateway_that_is_killed_is_started_again(place: Place, connect: Callable[..., Transport]) -> None:
    place.serve("server/name")
    with Rendezvous.connect(*place.address, timeout_s=DEADLINE_S) as guest:
        transport = connect(guest.server(0, "server/name", DEADLINE_S))
        client_of(transport, "s").join()
        before = place.process
        before.kill()
        beats(transport)
        assert place.process.pid != before.pid
        place.early.put("x", 2)
        assert guest.peek("x") == 2


def test_a_tunnel_that_is_restarted_is_waited_for(place: Place, connect: Callable[..., Transport]) -> None:
    place.serve("server/name")
    tunnel = Tunnel((LOOPBACK, 0), place.address)
    try:
        with Rendezvous.connect(*tunnel.entrance, timeout_s=DEADLINE_S) as guest:
            address = guest.server(0, "server/name", DEADLINE_S)
        assert address == str(ServerAddress(*tunnel.entrance, "namexxxxxxxx", 24))
        patient, hasty = connect(address, refused_s=60.0), connect(address)
        for number, transport in enumerate((patient, hasty)):
            client_of(transport, f"s{number}").join()
        tunnel.cut()
        waits = patient.call(0, Heartbeat("s", 0), DEADLINE_S)
        with pytest.raises(ServerLostError, match="no process listens at"):
            client_of(hasty, "s").join()
        time.sleep(0.5)
        tunnel.restart()
        waits.wait()
    finally:
        tunnel.cut()


def test_a_connection_that_begins_late_is_made_again(place: Place, connect: Callable[..., Transport]) -> None:
    """Meanwhile it is taken for one to the rendezvous, which says something first."""
    place.serve("server/name")
    signature = b"\xff" + (25).to_bytes(8, "big") + b"\x7f"
    with socket.create_connection(place.address, DEADLINE_S) as late:
        assert late.recv(1) == b"\xff"
        late.sendall(signature)
        with contextlib.suppress(ConnectionResetError):
            while late.recv(64):
                pass
    client_of(connect(str(ServerAddress(*place.address, "namexxxxxxxx", 24))), "s").join()


def test_an_answer_that_a_broken_tunnel_has_lost_is_asked_for_again(
    place: Place, connect: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_transport, "_SETUP_MS", 300)
    place.serve("server/name")
    tunnel = Tunnel((LOOPBACK, 0), place.address)
    tunnel.mute = True
    try:
        transport = connect(str(ServerAddress(*tunnel.entrance, "namexxxxxxxx", 24)))
        waits = transport.call(0, Heartbeat("s", 0), DEADLINE_S)
        time.sleep(0.5)
        assert not waits.done()
        tunnel.mute = False
        waits.wait()
    finally:
        tunnel.cut()


def test_a_server_keeps_its_number_and_numbers_are_limited(place: Place) -> None:
    store: Any = place.rendezvous._store
    made = store._gateway
    assert [made.add(f"{i:012}", 1) for i in (0, 1, 0, 2)] == [24, 25, 24, 26]
    with pytest.raises(ValueError, match="names no server"):
        made.add("short", 1)
    assert [made.add(f"{i:012}", 1) for i in range(232)][-1] == 255
    with pytest.raises(ValueError, match="232 servers have been started at this port"):
        made.add("x" * 12, 1)


def test_nothing_is_left_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_ENV, SECRET)
    place = Place(LOOPBACK)
    process, address = place.process, place.address
    place.close()
    assert not process.is_running()
    assert listens(*address) is False
    listen(*address).close()


MAIN = """
import os, signal, socket, sys
from lightning_asgd.one_port.gateway import Gateway
listener = socket.create_server(("127.0.0.1", 0))
behind = socket.create_server(("127.0.0.1", 0))
made = Gateway(listener, behind.getsockname()[1])
print(listener.getsockname()[1], made.pid, flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_with_a_main_process_that_is_killed() -> None:
    root = str(Path(gateway.__file__).resolve().parents[2])
    command = [sys.executable, "-c", MAIN]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
    ) as main:
        assert main.stdin
        assert main.stdout
        port, pid = map(int, main.stdout.readline().split())
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGTERM)  # as to all processes of a job: it has something left to do
        with socket.create_connection((LOOPBACK, port), DEADLINE_S):
            main.stdin.close()
            assert main.wait(DEADLINE_S) == -signal.SIGKILL
            wait_for(lambda: listens(LOOPBACK, port) is False, "the port is free")
            process.wait(DEADLINE_S)


def test_rpc_says_that_it_needs_ports_of_its_own(place: Place) -> None:
    entry = {"address": "uv://127.0.0.1:4711", "network": ELSEWHERE, "name": "0"}
    place.rendezvous.put("server/0", entry)
    with pytest.raises(
        LaunchError, match=r"have transport='rpc', which connects to ports of their own. Expected .*zmq"
    ):
        place.early.server(0, "server/0", 1.0)
