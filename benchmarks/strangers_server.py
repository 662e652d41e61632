"""Connections and messages that no server expects, thousands of them: parts of :mod:`strangers`.

:func:`attack_a_server` is against a lone server process with transport="zmq". Strangers, who do not know the job's
secret, connect and send nothing, random bytes, greetings of ZeroMQ without encryption, broken handshakes, and frames
that promise a terabyte; half of them reset the connection. Then somebody who knows the secret sends random bytes,
headers that lie about what follows, values that are no messages, and real messages with one byte changed (none that
begins another session: that is allowed with the secret). Meanwhile a worker pushes ones: in the end the server must
hold as many as were pushed, let a new worker in, and as many messages again may not make it larger.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import zmq
from common import verdict
from jobs import megabytes

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.foundation.layout import Role, build_layout
from lightning_asgd.core.job import registry
from lightning_asgd.core.job.addresses import LOOPBACK, interface_of, local_address_towards
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.protocol import (
    BOOTSTRAPPED,
    Attach,
    Contribution,
    Epoch,
    Exchange,
    Failure,
    Heartbeat,
    HeartbeatReply,
    InitShard,
    Join,
    LeaseRequest,
    Leave,
    OpenEpoch,
    Policy,
    RunMetadata,
    codec,
)
from lightning_asgd.core.server.process import ServerArguments, ServerSettings
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.shard_client import ShardClient
from lightning_asgd.transports.zmq.sockets import keys_of
from lightning_asgd.transports.zmq.transport import ZmqTransport

GROUPS = ((Role.PARAMETER, "float32", 1000),)
GROWTH_MB = 5.0
BURST = 500  # messages of up to 100,000 bytes
SESSION = "strangers"


class Pusher(threading.Thread):
    """A worker of the job, that pushes ones."""

    def __init__(self, transport: ZmqTransport) -> None:
        super().__init__(daemon=True)
        client = SessionClient(Connection(transport, SESSION, 0, 2, timeout_s=30.0))
        client.join()
        self.shards = ShardClient(client)
        layout = build_layout([("w", torch.zeros(1000))], 1)
        self.shards.initialise(layout, ASGD("sum"), [None], [(torch.zeros(1000),)])
        self.over = threading.Event()
        self.pushed = 0
        self.held = 0.0

    def run(self) -> None:
        while not self.over.wait(0.01):
            number = self.pushed + 1
            updates = [(torch.ones(1000),)]
            (reply,) = self.shards.replies(
                self.shards.exchange(
                    Exchange(*self.shards.connection.sender, number, 0, True, True), [self.pushed], updates
                )
            )
            self.pushed, self.held = number, float(reply.weights[0].mean()) if reply.weights else 0.0


def greeting(mechanism: bytes) -> bytes:
    """How a ZeroMQ connection begins."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def stranger(address: tuple[str, int], chance: random.Random) -> None:
    data = chance.choice(
        [
            b"",
            chance.randbytes(chance.randint(1, 3000)),
            greeting(b"NULL") + b"\x04\x05READY",
            greeting(b"CURVE") + chance.randbytes(chance.randint(1, 400)),
            greeting(b"CURVE") + b"\x04\xc8\x05HELLO" + chance.randbytes(194),
            greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 1 << 40),
            greeting(b"CURVE")[: chance.randint(1, 63)],
        ]
    )
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(data)
        if chance.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def insider(chance: random.Random, number: int) -> list[bytes]:
    """A message of somebody who knows the secret and means no good, or is broken."""
    real = chance.choice(
        [Join(SESSION, 1, 2), Heartbeat(SESSION, 1), Exchange(SESSION, 1, 1, 0, False, True), {"no": "message"}, [[]]]
    )
    header, _ = codec.encode(real)
    changed = bytearray(header)
    changed[chance.randrange(len(changed))] = chance.randrange(32, 127)
    with contextlib.suppress(ProtocolError):
        if isinstance(codec.decode(bytes(changed), []), Join):
            changed = bytearray(header)  # a process that knows the secret may begin another session
    about: list[Any] = ["somebody", number, [number - 1]]
    return chance.choice(
        [
            [chance.randbytes(chance.randint(0, 500))],
            [json.dumps([*about, [chance.randint(-9, 1 << 40)], header.decode()]).encode()],
            [json.dumps([*about, [], changed.decode()]).encode()],
            [json.dumps([*about, [], "[" * chance.randint(1, 100_000)]).encode()],
            [json.dumps([*about, [3], '["T",0,"float32",[1]]']).encode(), b"abc"],
            [json.dumps([*about, [], header.decode()]).encode(), *[b"more"] * chance.randint(1, 20)],
        ]
    )


def beat(number: int) -> list[bytes]:
    """A message that is answered when all before it have been read."""
    header, _ = codec.encode(Heartbeat(SESSION, 1))
    return [json.dumps(["somebody", number, [], [], header.decode()]).encode()]


def attack(server: psutil.Process, what: str, number: int, send: Any) -> bool:
    """Whether the server needs no more memory for twice the number than for the number, as seen between bursts."""
    sizes = [megabytes(server)]
    for turn in range(2):
        peak = 0.0
        for index in range(number):
            send(turn * number + index)
            if (index + 1) % BURST == 0:
                peak = max(peak, megabytes(server))
        sizes.append(max(peak, megabytes(server)))
    fine = sizes[2] <= sizes[1] + GROWTH_MB
    about = f"{server.num_fds()} files open, {server.num_threads()} threads"
    before, first, then = (f"{size:.1f} MB" for size in sizes)
    return verdict(fine, f"{number:,} {what}: {before} before, at most {first}, {then} for as many again; {about}")


@contextlib.contextmanager
def server_process(run: str = "") -> Iterator[tuple[psutil.Process, str]]:
    """A server process with transport="zmq", and its address."""
    os.environ.setdefault(SECRET_ENV, secrets.token_hex(32))
    rendezvous = Rendezvous.host(LOOPBACK)
    settings = ServerSettings(transport="zmq", run=run)
    arguments = ServerArguments(settings, "server0", "key", *rendezvous.address, os.getpid())
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-m", "lightning_asgd.core.server.process", arguments.to_json()]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            yield psutil.Process(process.pid), str(rendezvous.get("key", "The server", 60.0)["address"])
        finally:
            process.terminate()
            process.wait(10)


def dealer(context: zmq.Context[Any], address: str) -> zmq.Socket[Any]:
    """A socket of somebody who knows the secret."""
    peer, keys = context.socket(zmq.DEALER), keys_of(os.environ[SECRET_ENV])
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    peer.setsockopt(zmq.CURVE_PUBLICKEY, keys.worker_public)
    peer.setsockopt(zmq.CURVE_SECRETKEY, keys.worker)
    peer.connect(address)
    return peer


def attack_a_server(number: int, seed: int) -> bool:
    """Whether a server serves on while thousands of strangers and a broken worker talk to it."""
    chance = random.Random(seed)
    with server_process() as (server, address):
        transport = ZmqTransport([address], os.environ[SECRET_ENV])
        pusher = Pusher(transport)
        pusher.start()
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        strangers = "connections of strangers to a server alone"
        good = attack(server, strangers, number, lambda _: stranger((host, int(port)), chance))
        context = zmq.Context()
        peer = dealer(context, address)

        def send(index: int) -> None:
            peer.send_multipart(insider(chance, index + 1))
            while peer.poll(0):
                peer.recv_multipart()
            if (index + 1) % BURST == 0:
                settle(index)

        def settle(index: int) -> None:
            """Wait until none waits for its turn on the way: how many do there depends on the machine's load."""
            peer.send_multipart(beat(-index))
            while json.loads(peer.recv_multipart()[0])[0] != -index:
                pass

        good &= attack(server, "messages of a broken worker to it", number, send)
        peer.close()
        context.term()
        pusher.over.set()
        pusher.join(30)
        late = ZmqTransport([address], os.environ[SECRET_ENV])
        SessionClient(Connection(late, SESSION, 1, 2, timeout_s=10.0)).join()
        late.close()
        transport.close()
        exact = not pusher.is_alive() and pusher.held == pusher.pushed
        good &= verdict(exact, f"{pusher.pushed:,} pushes meanwhile, the server holds {pusher.held:,.0f}")
    return good


# ---------------------------------------------------------------------- against the servers of a job


def write_keys(host: str, port: int, number: int) -> str:
    """Write random keys and values where there is a store, and garbage where there is none."""
    chance = random.Random(1)
    known = ["job", "run", "session/", "server/0", "server/", "excuse/", ""]
    try:
        store = torch.distributed.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
        for _ in range(number):
            key = chance.choice(known) + chance.randbytes(chance.randrange(8)).hex()
            store.set(key, chance.randbytes(chance.randrange(200)))  # type: ignore[arg-type]
        return f"{number:,} keys written to the store"
    except (RuntimeError, OSError):  # it is no store of torch's
        done = sum(garbage((host, port), chance) for _ in range(number))
        return f"no store of torch's: {number:,} times garbage, {done:,} connections were accepted"


def garbage(address: tuple[str, int], chance: random.Random) -> bool:
    """Send random bytes, or what looks like the beginning of a message; returns whether there was a connection."""
    try:
        stranger(address, chance)
    except OSError:
        return False
    return True


def fuzz(kind: str, address: str, place: tuple[str, int], session: str, number: int, seed: int) -> str:
    """Send random bytes, and through a real connection messages of which something was changed."""
    chance = random.Random(seed)
    changed = rejected = 0
    transport = registry.kind_of(kind).connect([address], interface_of(local_address_towards(place[0])))
    try:
        waiting = []
        for _ in range(number // 2):
            waiting.append(transport.call(0, changed_message(session, chance), 20.0))
            changed += 1
            if len(waiting) == BURST // 10:
                rejected += sum(is_rejected(future) for future in waiting)
                waiting.clear()
        rejected += sum(is_rejected(future) for future in waiting)
    finally:
        transport.close()
    accepted = sum(garbage(place, chance) for _ in range(number - changed))
    what = f"{changed:,} messages with the secret, {rejected:,} rejected with an error that names it"
    if rejected < changed:
        raise AssertionError(f"{what}: the others were taken for a worker's")
    return f"{what}; {number - changed:,} random ones, {accepted:,} connections were accepted"


def is_rejected(future: Any) -> bool:
    """Whether a message was answered with an error, or with what changes nothing."""
    answer = future.wait()
    return answer is False or isinstance(answer, Failure | HeartbeatReply)


def changed_message(session: str, chance: random.Random) -> Any:
    """A message of a worker of which fields were changed at random, by a process that is no worker."""
    weights = (torch.ones(2),)
    message = chance.choice(
        [
            Heartbeat(session, 1),
            Exchange(session, 1, 10**6, 0, True, True, weights, epoch=f"{session}/0", units=10**6),
            InitShard(session, 1, ((Role.PARAMETER, "float32", 2),), ASGD("sum"), weights),
            Contribution(session, 1, 10**6, "barrier", "x", None),
            LeaseRequest(session, 1, f"{session}/0", 0, 10**6, 10**6, 0.0),
            Leave(session, 1, "fuzzed"),
            RunMetadata(session, 1, "entry", b"x"),
        ]
    )
    values: list[Any] = [None, -1, 10**30, "x" * 1000, b"y", 0.5, float("nan"), [], (), {}, weights, True, [[1]] * 9]
    names = [each.name for each in dataclasses.fields(message) if each.name not in ("worker", "session", "process")]
    changes = {name: chance.choice(values) for name in names if chance.random() < 0.3}
    where = chance.choice(
        [{}, {"worker": chance.choice([0, 1, 2, 10**9, -1])}, {"session": chance.choice(["", "j.0.1"])}]
    )
    return dataclasses.replace(message, **changes, **where)


# ---------------------------------------------------------------------- workers that come and go


def workers_that_come_and_go(number: int) -> tuple[bool, str]:
    """Whether a message costs what it did, and the server has grown little, after this number of workers."""
    with server_process(run="r") as (server, address):
        transport = ZmqTransport([address], os.environ[SECRET_ENV])

        def say(message: Any) -> Any:
            answer = transport.call(0, message, 30.0).wait()
            if isinstance(answer, Failure):
                raise AssertionError(answer.message)
            return answer

        def comes() -> int:
            attached = say(Attach("r", "host a, process 1, cpu", Policy(60.0)))
            worker: int = attached.worker
            say(InitShard("r", worker, GROUPS, ASGD(), (torch.zeros(1000),) if attached.bootstraps else None))
            if attached.bootstraps:
                say(RunMetadata("r", worker, BOOTSTRAPPED, True))
            say(OpenEpoch("r", worker, Epoch("r/0", 10**6, (10**6,))))
            say(LeaseRequest("r", worker, "r/0", 0, 0, 0, 0.01, size=8))
            say(Exchange("r", worker, 1, 0, True, True, (torch.ones(1000),), epoch="r/0", units=8))
            return worker

        def used_ns() -> int:
            """Nanoseconds of the server's threads: the usual clock of a process has ticks of 10 ms."""
            files = Path(f"/proc/{server.pid}/task").glob("*/schedstat")
            return sum(int(file.read_text().split()[0]) for file in files)

        def cost() -> tuple[float, float]:
            """Milliseconds of the server's CPU time per message, at best, and megabytes."""
            best = []
            for _ in range(20):
                begun = used_ns()
                for _ in range(500):
                    say(Heartbeat("r", first, 10**9))
                best.append((used_ns() - begun) / 500 / 1e6)
            return min(best), megabytes(server)

        first = comes()
        for _ in range(50):  # what the first ones cost only once
            say(Leave("r", comes()))
        before, small = cost()
        begun = time.monotonic()
        for index in range(number):
            say(Leave("r", comes(), "killed" if index % 2 else "", final=bool(index % 2)))
        took = time.monotonic() - begun
        after, large = cost()
        transport.close()
    text = f"{number:,} workers came and went in {took:.0f} s; a message {before:.3f} -> {after:.3f} ms of CPU time"
    return after <= 1.1 * before and large <= 1.05 * small, f"{text}, memory {small:.1f} -> {large:.1f} MB"
