from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from lightning_asgd.core.calls.inprocess import InProcessTransport
from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.job.addresses import LOOPBACK, interface_of
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.server.service import Service
from lightning_asgd.transports.rpc import tensorpipe
from lightning_asgd.transports.rpc.transport import RpcTransport
from lightning_asgd.transports.zmq.transport import ZmqTransport
from tests.helpers.servers import SECRET, ServerProcess

_sessions = itertools.count()


@dataclass
class Processes:
    """Two servers that live as long as the tests of this folder, two to be killed, and two that talk ZeroMQ."""

    servers: list[ServerProcess]
    spares: list[ServerProcess]
    encrypted: list[ServerProcess]
    transport: RpcTransport | None = None
    zmq: ZmqTransport | None = None

    def connect_encrypted(self) -> ZmqTransport:
        """The connection to the two that talk ZeroMQ."""
        if self.zmq is None or not self.zmq.alive:
            self.zmq = ZmqTransport([server.address() for server in self.encrypted], SECRET)
        return self.zmq

    def connect(self) -> RpcTransport:
        """The connection to the lasting two; a new one if a test took the process's agent meanwhile."""
        if self.transport is None or not self.transport.alive:
            self.transport = connect(*self.servers)
        return self.transport


def connect(*servers: ServerProcess) -> RpcTransport:
    return RpcTransport([server.address() for server in servers], interface_of(LOOPBACK))


@pytest.fixture(scope="session", autouse=True)
def processes() -> Iterator[Processes]:
    # All start together, and load their modules while the first tests need none of them.
    rendezvous, rpc = Rendezvous.host(), 4 if tensorpipe.is_available() else 0
    started = [ServerProcess(rendezvous, f"server{i}", "rpc" if i < rpc else "zmq") for i in range(rpc + 2)]
    result = Processes(started[: rpc // 2], started[rpc // 2 : rpc], started[rpc:])
    yield result
    for transport in (result.transport, result.zmq):
        if transport is not None:
            transport.close()
    for server in started:
        server.close()


@dataclass
class Link:
    """A transport to two servers, and a session nobody used before."""

    transport: Transport
    session: str


@pytest.fixture(scope="session")
def encrypted(processes: Processes) -> ZmqTransport:
    """A connection that stays from one test to the next, and its thread."""
    return processes.connect_encrypted()


@pytest.fixture(scope="session", params=["inprocess", "rpc", "zmq"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "rpc" and not tensorpipe.is_available():
        pytest.skip("this torch has no RPC")
    if request.param == "zmq":
        request.getfixturevalue("encrypted")
    return str(request.param)


@pytest.fixture
def link(kind: str, processes: Processes) -> Iterator[Link]:
    session = f"session {next(_sessions)}"
    if kind == "rpc":
        yield Link(processes.connect(), session)
        return
    if kind == "zmq":
        yield Link(processes.connect_encrypted(), session)
        return
    services = [Service() for _ in range(2)]
    yield Link(InProcessTransport([s.handle for s in services]), session)
    for service in services:
        service.close()
