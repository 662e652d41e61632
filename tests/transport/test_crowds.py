"""More connections than a process may usually have files."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlparse

import psutil
import pytest

from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.job.addresses import LOOPBACK, interface_of
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.protocol import Joined
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.transports.rpc.transport import RpcTransport
from lightning_asgd.transports.zmq.transport import ZmqTransport
from tests.helpers.servers import SECRET, ServerProcess

IDLE = 1500
USUAL = 1024


@contextlib.contextmanager
def files(limit: int) -> Iterator[None]:
    """The usual limit of open files is another one, here and in what is started here."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 3 * IDLE, reason="this system allows no process that many files"
)
@pytest.mark.parametrize("kind", ["rpc", pytest.param("zmq", marks=pytest.mark.slow)])
def test_idle_connections_of_strangers_do_not_stop_a_server(kind: str) -> None:
    with files(USUAL):
        server = ServerProcess(Rendezvous.host(), "server", kind)
    strangers: list[socket.socket] = []
    transport: Transport | None = None
    try:
        address = server.address()
        place = urlparse(address if "://" in address else f"tcp://{address}")
        with files(3 * IDLE):
            for _ in range(IDLE):
                strangers.append(socket.create_connection((place.hostname, place.port), 5.0))
            transport = (
                ZmqTransport([address], SECRET) if kind == "zmq" else RpcTransport([address], interface_of(LOOPBACK))
            )
            client = SessionClient(Connection(transport, "s", 0, 1, timeout_s=10.0))
            begun = time.monotonic()
            client.join()
            assert time.monotonic() - begun < 10.0
            assert isinstance(transport.call(0, client.join_message(0), 10.0).wait(), Joined)
            process = psutil.Process(server.popen.pid)
            assert process.num_fds() > IDLE
            used_s = sum(process.cpu_times()[:2])
            time.sleep(1.0)
            assert sum(process.cpu_times()[:2]) - used_s < 0.5, "it spins"
        assert server.popen.poll() is None, server.output()
    finally:
        for stranger in strangers:
            stranger.close()
        if transport is not None:
            transport.close()
        server.close()
