"""What only real connections can show: processes that die, idle or listen."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
import torch

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.calls.transport import CallTimeoutError, Transport
from lightning_asgd.core.foundation.errors import ServerLostError
from lightning_asgd.core.protocol import Contribution, Epoch, Exchange, Heartbeat, Joined, LeaseRequest, OpenEpoch
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.connection import Connection, done_within
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.shard_client import ShardClient
from lightning_asgd.transports.rpc import tensorpipe
from lightning_asgd.transports.rpc import transport as rpc_transport
from lightning_asgd.transports.rpc.transport import RpcServer
from tests.helpers.cluster import layout_of_floats
from tests.helpers.idle import idle_cpu_s
from tests.helpers.servers import ServerProcess
from tests.transport.conftest import Processes, connect

pytestmark = pytest.mark.skipif(not tensorpipe.is_available(), reason="this torch has no RPC")


def client_of(transport: Transport, session: str, workers: int = 1) -> SessionClient:
    return SessionClient(Connection(transport, session, 0, workers, timeout_s=20.0))


def exchange_once(client: SessionClient) -> list[list[float]]:
    """Join, fill the servers with zeros, push ones; what the servers answer."""
    n = len(client.connection.servers)
    client.join()
    shards = ShardClient(client)
    shards.initialise(layout_of_floats(2 * n, n), ASGD("sum"), [None] * n, [(torch.zeros(2),)] * n)
    replies = shards.replies(
        shards.exchange(Exchange(*shards.connection.sender, 1, 0, True, True), [0] * n, [(torch.ones(2),)] * n)
    )
    return [r.weights[0].tolist() for r in replies if r.weights is not None]


def test_rpc_is_there() -> None:
    tensorpipe.check_available()


def test_a_worker_may_connect_again_and_again(processes: Processes) -> None:
    for number in range(3):
        transport = connect(*processes.servers)
        assert transport.alive
        assert exchange_once(client_of(transport, f"again {number}")) == [[1.0, 1.0]] * 2
    assert not torch.distributed.is_initialized()


def test_a_new_connection_takes_over_from_the_old(processes: Processes) -> None:
    old = connect(*processes.servers)
    new = connect(processes.servers[0])
    assert (old.alive, new.alive) == (False, True)
    old.close()  # no longer its own to close
    assert new.alive
    assert exchange_once(client_of(new, "took over")) == [[1.0, 1.0]]


def test_a_closed_connection_says_so(processes: Processes) -> None:
    transport = connect(*processes.servers)
    client = client_of(transport, "closed")
    client.join()
    transport.close()
    transport.close()
    assert not transport.alive
    with pytest.raises(ServerLostError, match="Server 0 is lost"):
        client.join()
    with pytest.raises(ServerLostError, match="Server 0 is lost"):
        Collectives(client, 5.0).contribute("barrier", "x")
    client.leave()


def test_a_call_that_is_not_answered_in_time_fails(processes: Processes) -> None:
    transport = processes.connect()
    client_of(transport, "time-out", workers=2).join()
    future = transport.call(0, Contribution("time-out", 0, 1, "barrier", "x"), 0.3)
    assert done_within(future, 10.0)
    with pytest.raises(CallTimeoutError):
        future.wait()


def test_an_idle_server_uses_no_processor_time(processes: Processes) -> None:
    # TensorPipe's default transport polls, and keeps a core busy on both sides of an idle connection.
    assert exchange_once(client_of(processes.connect(), "idle")) == [[1.0, 1.0]] * 2
    assert idle_cpu_s(*(server.process for server in processes.servers), psutil.Process()) < 0.2


def test_everybody_listens_on_loopback_only(processes: Processes) -> None:
    processes.connect()
    for process in (*(server.process for server in processes.servers), psutil.Process()):
        addresses = listening(process)
        assert addresses
        assert set(addresses) == {"127.0.0.1"}


def test_what_is_urgent_overtakes_weights(processes: Processes) -> None:
    transport = processes.connect()
    client_of(transport, "urgent").join()
    claim = LeaseRequest("urgent", 0, "no such epoch", 0, 0, 0, 0.0)
    order: list[str] = []
    done = threading.Event()

    def note(name: str) -> None:
        order.append(name)
        if len(order) == 2:
            done.set()

    transport.call(0, claim, 20.0).wait()  # both connections exist
    transport.call(0, Exchange("urgent", 0, 1, 0, True, False, (torch.ones(1),)), 20.0).wait()
    large = Exchange("urgent", 0, 2, 0, True, False, (torch.ones(64 << 20),))  # 256 MB, 0.1 s at the least
    transport.call(0, large, 20.0).add_done_callback(lambda _: note("weights"))
    transport.call(0, claim, 20.0).add_done_callback(lambda _: note("claim"))
    assert done.wait(20.0)
    assert order == ["claim", "weights"]


def listening(process: psutil.Process) -> list[str]:
    look: Any = getattr(process, "net_connections", None) or process.connections
    return [c.laddr.ip for c in look(kind="inet") if c.status == psutil.CONN_LISTEN]


def test_a_killed_server_is_lost_and_a_restarted_one_is_reached(processes: Processes) -> None:
    killed, restarted = processes.spares
    transport = connect(killed)
    client = client_of(transport, "killed", workers=2)
    shards = ShardClient(client)
    assert exchange_once(client) == [[1.0, 1.0]]
    waiting = transport.call(0, Contribution("killed", 0, 1, "barrier", "x"), 60.0)
    killed.popen.kill()
    killed.popen.wait(5)
    begun = time.monotonic()
    assert done_within(waiting, 20.0), "a worker that waits at a barrier must notice"
    with pytest.raises(RuntimeError, match=r"^ECONNREFUSED: connection refused$"):  # after "EOF: end of file"
        waiting.wait()
    with pytest.raises(ServerLostError, match="Server 0 is lost: worker 0 got"):
        shards.replies(shards.exchange(Exchange(*shards.connection.sender, 2, 0, False, True), [1], [None]))
    client.leave("nobody hears it")
    assert time.monotonic() - begun < 30.0  # before the call's own limit
    assert exchange_once(client_of(connect(restarted), "after the restart")) == [[1.0, 1.0]]


def test_a_server_ignores_the_terminal_and_ends_when_told_to(processes: Processes) -> None:
    server = processes.spares[1]
    transport = connect(server)
    server.popen.send_signal(signal.SIGINT)
    future = transport.call(0, "still there?", 20.0)
    assert done_within(future, 20.0)
    client = client_of(transport, "ends", workers=2)
    client.join()
    waiting = transport.call(0, Contribution("ends", 0, 1, "barrier", "x"), 60.0)
    server.popen.terminate()
    assert server.popen.wait(10) == 0
    assert done_within(waiting, 20.0)


def test_a_worker_finds_the_lasting_servers_again(processes: Processes) -> None:
    transport = processes.connect()
    answer = transport.call(0, "hello", 20.0)
    assert done_within(answer, 20.0)
    assert not isinstance(answer.wait(), Joined)
    assert exchange_once(client_of(transport, "again")) == [[1.0, 1.0]] * 2


def test_a_process_may_serve_and_stop_serving() -> None:
    server = RpcServer(lambda message: f"heard {message}", "server0")
    try:
        assert server.address
        assert set(listening(psutil.Process())) == {"127.0.0.1"}
    finally:
        server.close()
        server.close()
    answer = rpc_transport._answer("a worker", 0, [], "late")  # while its connections close
    assert not answer.done()


def break_connections(servers: Sequence[ServerProcess]) -> int:
    """Shut this process's connections to the servers down, as a router or a firewall would; how many there were."""
    look: Any = getattr(psutil.Process, "net_connections", None) or psutil.Process.connections
    ports = {c.laddr.port for s in servers for c in look(s.process, kind="tcp") if c.status == psutil.CONN_LISTEN}
    connections = (c for c in look(psutil.Process(), kind="tcp") if c.status == psutil.CONN_ESTABLISHED)
    held = []
    for found in connections:
        if found.raddr.port in ports:
            with contextlib.suppress(OSError):  # it is gone already
                held.append(socket.socket(fileno=os.dup(found.fd)))
    # Only now: a connection that is reopened gets the number of one that was shut.
    for connection in held:
        with contextlib.suppress(OSError):  # it is gone already
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    return len(held)


def test_a_broken_connection_is_made_again(processes: Processes, caplog: pytest.LogCaptureFixture) -> None:
    transport = processes.connect()
    first, second = (SessionClient(Connection(transport, "broken", worker, 2, timeout_s=20.0)) for worker in range(2))
    first.join()
    second.join()
    waiting = transport.call(0, Contribution("broken", 0, 1, "barrier", "x"), 20.0)
    assert not done_within(waiting, 0.2)
    assert break_connections(processes.servers) >= 2
    assert Collectives(second, 10.0).contribute("barrier", "x") == {0: None, 1: None}
    assert done_within(waiting, 10.0)
    assert waiting.wait() == {0: None, 1: None}
    assert "The connection to server 0 broke (EOF: end of file) and was reopened." in caplog.text


class Step:
    """A push of ones and a claim of data at once: neither may be lost or done twice when connections break."""

    def __init__(self, shards: ShardClient, number: int, granted: int) -> None:
        self.shards, self.number, self.granted = shards, number, granted
        self.connection = shards.connection
        n = len(self.connection.servers)
        updates = [(torch.ones(2),) for _ in range(n)]
        push = Exchange(*self.connection.sender, number, 0, True, True)
        self.futures = shards.exchange(push, [number - 1] * n, updates)
        request = LeaseRequest(*self.connection.sender, "storm/0", 0, granted, granted, 0.001, 0.0)
        self.request = self.connection.post(0, request)

    def end(self, collectives: Collectives) -> int:
        """The number of units granted by now."""
        grant = self.connection.result(0, self.request)
        ((first, last),) = grant.ranges
        assert first == self.granted, "units were granted that the worker does not know of"
        replies = self.shards.replies(self.futures)
        assert [r.version for r in replies] == [self.number] * len(self.connection.servers)
        assert all(r.weights is not None and r.weights[0].tolist() == [self.number] * 2 for r in replies)
        assert collectives.contribute("barrier", "x") == {0: None}
        return int(last)

    @staticmethod
    def begin(transport: Transport) -> ShardClient:
        client = client_of(transport, "storm")
        client.join()
        n = len(client.connection.servers)
        shards = ShardClient(client)
        shards.initialise(layout_of_floats(2 * n, n), ASGD("sum"), [None] * n, [(torch.zeros(2),)] * n)
        client.connection.ask(0, OpenEpoch(*client.connection.sender, Epoch("storm/0", 100_000, (100_000,))))
        return shards


def test_nothing_is_lost_or_done_twice_when_connections_break(processes: Processes) -> None:
    transport = processes.connect()
    shards = Step.begin(transport)
    collectives = Collectives(shards.client, 10.0)
    chance, granted = random.Random(0), 0
    for number in range(1, 101):
        step = Step(shards, number, granted)
        sign = transport.call(1, Heartbeat("storm", 0), 20.0)
        if number % 3 == 0:  # not while one is made: TensorPipe would accept none any more
            time.sleep(chance.uniform(0.0, 0.004))
            assert break_connections(processes.servers) >= 4
        granted = step.end(collectives)
        assert done_within(sign, 10.0)
