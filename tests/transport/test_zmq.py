"""What only ZeroMQ's connections can show: strangers, broken connections, servers that end."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import zmq

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.calls.transport import CallTimeoutError
from lightning_asgd.core.foundation.errors import ConfigurationError, ProtocolError, ServerLostError
from lightning_asgd.core.job import registry
from lightning_asgd.core.job.addresses import LOOPBACK
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.protocol import Attach, Contribution, Exchange, Heartbeat, codec
from lightning_asgd.core.server.service import Service
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.connection import Connection, done_within
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.shard_client import ShardClient
from lightning_asgd.elastic.messages import StatusRequest
from lightning_asgd.transports.zmq.server import ZmqServer
from lightning_asgd.transports.zmq.sockets import keys_of
from lightning_asgd.transports.zmq.transport import ZmqTransport
from tests.helpers.cluster import layout_of_floats
from tests.helpers.idle import idle_cpu_s
from tests.helpers.servers import SECRET, ServerProcess
from tests.transport.conftest import Processes
from tests.transport.test_rpc import Step, break_connections, client_of, listening

STRANGERS = 300  # per kind; benchmarks/strangers.py sends more


@pytest.fixture
def server() -> Iterator[ZmqServer]:
    service = Service()
    server = ZmqServer(service.handle, LOOPBACK, SECRET)
    yield server
    server.close()
    service.close()


@pytest.fixture
def transport(server: ZmqServer) -> Iterator[ZmqTransport]:
    transport = ZmqTransport([server.address], SECRET)
    yield transport
    transport.close()


def push(shards: ShardClient, number: int) -> Any:
    n = len(shards.connection.servers)
    updates = [(torch.ones(2),) for _ in range(n)]
    message = Exchange(*shards.connection.sender, number, 0, True, True)
    return shards.exchange(message, [number - 1] * n, updates)


def begin(transport: Any, session: str) -> ShardClient:
    client = client_of(transport, session)
    client.join()
    n = len(client.connection.servers)
    shards = ShardClient(client)
    shards.initialise(layout_of_floats(2 * n, n), ASGD("sum"), [None] * n, [(torch.zeros(2),)] * n)
    return shards


def test_a_wrong_secret_is_refused_by_name_and_the_right_one_served(server: ZmqServer, transport: ZmqTransport) -> None:
    stranger = ZmqTransport([server.address], SECRET + "?")
    try:
        with pytest.raises(ServerLostError, match="does not know this job's secret: expected the same LIGHTNING_ASGD"):
            client_of(stranger, "wrong").join()
    finally:
        stranger.close()
    shards = begin(transport, "right")
    assert shards.replies(push(shards, 1))[0].version == 1


def test_a_server_that_is_started_again_at_once_is_not_taken_for_the_one_before() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:  # stays open, so that a probe always finds it
        listener.setblocking(False)
        first, second = Service(), Service()
        before = ZmqServer(first.handle, LOOPBACK, SECRET, listener=listener)
        transport = ZmqTransport([before.address], SECRET)
        shards = begin(transport, "again")
        before.close()
        pushed = push(shards, 1)
        after = ZmqServer(second.handle, LOOPBACK, SECRET, listener=listener)
        try:
            with pytest.raises(ServerLostError, match="another process listens at its address") as lost:
                shards.connection.result(0, pushed[0])
            assert lost.value.server == 0  # so it can be restored
        finally:
            transport.close()
            after.close()
            first.close()
            second.close()


def test_strangers_change_nothing(server: ZmqServer, transport: ZmqTransport) -> None:
    shards = begin(transport, "strangers")
    host, port = LOOPBACK, int(server.address.rpartition(":")[2])
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    plain = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    chance = random.Random(0)
    for number in range(STRANGERS):
        for data in (
            b"",
            chance.randbytes(chance.randint(1, 2000)),
            plain + b"\x04\x05READY",
            greeting + chance.randbytes(chance.randint(1, 300)),  # a broken handshake
            greeting + b"\x06" + struct.pack(">Q", 1 << 40),  # a terabyte is promised
            greeting[: chance.randint(1, 64)],
        ):
            with socket.create_connection((host, port), timeout=5) as stranger:
                stranger.sendall(data)
                if number % 2:  # reset instead of an orderly end
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert shards.replies(push(shards, 1))[0].version == 1
    late = ZmqTransport([server.address], SECRET)
    try:
        client_of(late, "strangers").join()
    finally:
        late.close()
    assert server.refused == 0, "a stranger's bytes were taken for a message"


def test_a_worker_that_sends_rubbish_harms_nobody(server: ZmqServer, transport: ZmqTransport) -> None:
    shards = begin(transport, "rubbish")
    keys = keys_of(SECRET)
    context = zmq.Context()
    worker = context.socket(zmq.DEALER)
    worker.setsockopt(zmq.LINGER, 0)
    worker.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    worker.setsockopt(zmq.CURVE_PUBLICKEY, keys.worker_public)
    worker.setsockopt(zmq.CURVE_SECRETKEY, keys.worker)
    worker.connect(server.address)
    chance = random.Random(0)
    sent = 0
    for _ in range(200):
        header = json.dumps(["O", "Join", {"session": 3}])
        for frames in (
            [chance.randbytes(chance.randint(0, 200))],
            [b"[]"],
            [b"[1, 2, 3, 4, 5]"],
            [json.dumps(["me", 1, [], [10], header]).encode()],  # promises a buffer
            [json.dumps(["me", 1, [], [-1], header]).encode()],
            [json.dumps(["me", 1, [], [], "[" * 100_000]).encode()],
        ):
            worker.send_multipart(frames)
            sent += 1
    for number, text in enumerate(('["O","Join",{"nobody":1}]', '["O","os.system",{}]', "[", '["T",0,"float32",[2]]')):
        worker.send_multipart([json.dumps(["me", 100 + number, [], [], text]).encode()])
    answers = []
    while worker.poll(2000):
        frames = worker.recv_multipart()
        answers.append(json.loads(frames[0]))
        if len(answers) == 4 and not worker.poll(300):
            break
    worker.close()
    context.term()
    assert all("ProtocolError" in header for number, *_, header in answers if number >= 100)
    assert sum(number >= 100 for number, *_ in answers) == 4
    assert shards.replies(push(shards, 1))[0].version == 1


def test_a_broken_connection_is_made_again(processes: Processes, encrypted: ZmqTransport) -> None:
    transport = encrypted
    first, second = (SessionClient(Connection(transport, "broken", worker, 2, timeout_s=20.0)) for worker in range(2))
    first.join()
    second.join()
    waiting = transport.call(0, Contribution("broken", 0, 1, "barrier", "x"), 20.0)
    assert not done_within(waiting, 0.2)
    assert break_connections(processes.encrypted) >= 1
    assert Collectives(second, 10.0).contribute("barrier", "x") == {0: None, 1: None}
    assert done_within(waiting, 10.0)


def test_nothing_is_lost_or_done_twice_while_connections_break(processes: Processes, encrypted: ZmqTransport) -> None:
    shards = Step.begin(encrypted)
    collectives = Collectives(shards.client, 10.0)
    over, broken = threading.Event(), 0

    def storm() -> None:
        nonlocal broken
        while not over.wait(0.1):
            broken += break_connections(processes.encrypted)

    thread = threading.Thread(target=storm)
    thread.start()
    granted = 0
    try:
        for number in range(1, 101):
            granted = Step(shards, number, granted).end(collectives)
    finally:
        over.set()
        thread.join()
    assert broken > 5


def test_everybody_listens_on_loopback_only(processes: Processes, encrypted: ZmqTransport) -> None:
    for server in processes.encrypted:
        assert set(listening(server.process)) == {"127.0.0.1"}


def test_a_killed_server_is_lost_at_once() -> None:
    server = ServerProcess(Rendezvous.host(), "server0", "zmq")
    try:
        transport = ZmqTransport([server.address()], SECRET)
        client = SessionClient(Connection(transport, "killed", 0, 2, timeout_s=20.0))
        client.join()
        waiting = transport.call(0, Contribution("killed", 0, 1, "barrier", "x"), 60.0)
        server.popen.kill()
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="no process listens at"):
            waiting.wait()
        with pytest.raises(ServerLostError, match="Server 0 is lost: worker 0 got"):
            client.join()
        assert time.monotonic() - begun < 5.0
        transport.close()
        transport.close()
        with pytest.raises(ServerLostError, match="Server 0 is lost"):
            client.join()
    finally:
        server.close()


def test_a_run_s_server_that_is_stopped_answers_nothing_more() -> None:
    server = ServerProcess(Rendezvous.host(), "server0", "zmq", run="r")
    transport = ZmqTransport([server.address()], SECRET)
    try:
        assert transport.call(0, Attach("r", "brings the weights"), 20.0).wait().bootstraps
        waiting = [transport.call(0, Attach("r", f"waits for them, {n}"), 60.0) for n in range(20)]
        transport.call(0, StatusRequest(), 20.0).wait()
        server.popen.terminate()
        for call in waiting:
            with pytest.raises(RuntimeError, match="no process listens at"):
                call.wait()
        assert server.popen.wait(20) == 0
    finally:
        transport.close()
        server.close()


def test_a_call_that_is_not_answered_in_time_fails(transport: ZmqTransport) -> None:
    SessionClient(Connection(transport, "time-out", 0, 2, timeout_s=20.0)).join()
    future = transport.call(0, Contribution("time-out", 0, 1, "barrier", "x"), 0.3)
    with pytest.raises(CallTimeoutError, match=r"no answer within 0\.3 s"):
        future.wait()
    sign = transport.call(0, Heartbeat("time-out", 0), 5.0)  # the connection is as good as before
    assert done_within(sign, 5.0)


def test_what_a_server_cannot_be_sent_is_named(transport: ZmqTransport) -> None:
    client = client_of(transport, "unknown")
    client.join()

    class Mine(ASGD):
        pass

    with pytest.raises(ProtocolError, match=r"Mine cannot be sent without pickle.*transport='rpc'"):
        ShardClient(client).initialise(layout_of_floats(2, 1), Mine("sum"), [None], [(torch.zeros(2),)])


def test_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_ENV, raising=False)
    with pytest.raises(ConfigurationError, match=r"LIGHTNING_ASGD_SECRET is not set.*openssl rand -hex 32"):
        registry.kind_of("zmq").provide_secret(one_machine=False)
    monkeypatch.setenv(SECRET_ENV, "short")
    with pytest.raises(ConfigurationError, match="has 5 characters"):
        registry.kind_of("zmq").provide_secret(one_machine=True)


def test_an_idle_connection_uses_no_processor_time(processes: Processes, encrypted: ZmqTransport) -> None:
    begin(encrypted, "idle")
    assert idle_cpu_s(*(server.process for server in processes.encrypted), psutil.Process()) < 0.2


def test_an_answer_that_cannot_be_read_is_an_error(transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(transport, "unreadable")
    client.join()
    collectives = Collectives(client, 10.0)
    with monkeypatch.context() as patch:
        patch.setattr(codec, "decode", lambda header, buffers: int("no number"))
        with pytest.raises(ProtocolError, match=r"answer of server 0 could not be read: ValueError.*invalid literal"):
            collectives.contribute("broadcast", "x", 1)
    assert collectives.contribute("barrier", "y") == {0: None}


def test_large_objects_are_broadcast(transport: ZmqTransport) -> None:
    client = client_of(transport, "large")
    client.join()
    value = {"texts": ["x" * 1000] * 5000, "deep": [[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]}
    assert Collectives(client, 10.0).contribute("broadcast", "x", value) == {0: value}
