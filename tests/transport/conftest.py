from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from lightning_asgd.rendezvous import LOOPBACK, Rendezvous, interface_of
from lightning_asgd.server.service import Service
from lightning_asgd.transport.base import Transport
from lightning_asgd.transport.inprocess import InProcessTransport
from lightning_asgd.transport.rpc import RpcTransport
from tests.helpers.servers import ServerProcess

_sessions = itertools.count()


@dataclass
class Processes:
    """Two servers that live as long as the tests of this folder, and two to be killed."""

    servers: list[ServerProcess]
    spares: list[ServerProcess]
    transport: RpcTransport | None = None

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
    rendezvous = Rendezvous.host()
    started = [ServerProcess(rendezvous, f"server{i}") for i in range(4)]
    result = Processes(started[:2], started[2:])
    yield result
    if result.transport is not None:
        result.transport.close()
    for server in started:
        server.close()


@dataclass
class Link:
    """A transport to two servers, and a session nobody used before."""

    transport: Transport
    session: str


@pytest.fixture(scope="session", params=["inprocess", "rpc"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def link(kind: str, processes: Processes) -> Iterator[Link]:
    session = f"session {next(_sessions)}"
    if kind == "rpc":
        yield Link(processes.connect(), session)
        return
    services = [Service() for _ in range(2)]
    yield Link(InProcessTransport([s.handle for s in services]), session)
    for service in services:
        service.close()
