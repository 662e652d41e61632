"""Thousands of unexpected connections and messages: the server keeps serving, and its memory stays constant.

    python benchmarks/strangers.py               # 10,000 foreign connections and 10,000 messages of a worker
    python benchmarks/strangers.py --number 500  # a quick look

Against a server process with transport="zmq". Foreign processes without the job's secret connect and send nothing,
random bytes, greetings of ZeroMQ without encryption, broken handshakes, and frames that promise a terabyte; half of
them reset the connection. Then a process with the secret sends random bytes, headers that do not match their content,
values that are not messages, and real messages with one byte changed (except messages that begin a session, which such
a process may do). Meanwhile a worker pushes ones. At the end the server must hold as many as were pushed and accept a
new worker, and the same number of messages again may not increase its memory.

Exits with 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
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
from pathlib import Path
from typing import Any

import psutil
import torch
import zmq
from memory import kilobytes
from ranks import clean_environment
from rich.console import Console

from lightning_asgd.algorithms import ASGD
from lightning_asgd.config import SECRET_ENV
from lightning_asgd.errors import ProtocolError
from lightning_asgd.layout import build_layout
from lightning_asgd.protocol import Exchange, Heartbeat, Join, codec
from lightning_asgd.server.server_process import ServerArguments, ServerSettings
from lightning_asgd.transports.rendezvous import LOOPBACK, Rendezvous
from lightning_asgd.transports.zmq_sockets import keys_of
from lightning_asgd.transports.zmq_transport import ZmqTransport
from lightning_asgd.worker.connection import Connection
from lightning_asgd.worker.session_client import SessionClient
from lightning_asgd.worker.shard_client import ShardClient

GROWTH_MB = 5.0
BURST = 500  # messages of up to 100,000 bytes
SESSION = "strangers"
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


class Pusher(threading.Thread):
    """A worker of the job, that pushes ones."""

    def __init__(self, transport: ZmqTransport) -> None:
        super().__init__(daemon=True)
        client = SessionClient(Connection(transport, SESSION, 0, 2, timeout_s=30.0))
        client.join()
        self.shards = ShardClient(client)
        layout = build_layout([("w", torch.zeros(1000))], [], 1)
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
            changed = bytearray(header)  # whoever knows the secret may begin another session
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


def memory_mb(process: psutil.Process) -> float:
    status = kilobytes(Path(f"/proc/{process.pid}/status"))
    return (status["RssAnon"] + status["RssShmem"]) / 1e3


def beat(number: int) -> list[bytes]:
    """A message that is answered when all before it have been read."""
    header, _ = codec.encode(Heartbeat(SESSION, 1))
    return [json.dumps(["somebody", number, [], [], header.decode()]).encode()]


def attack(server: psutil.Process, what: str, number: int, send: Any) -> bool:
    """Whether the server needs no more memory for twice as many than for so many: at most, looked at between bursts."""
    sizes = [memory_mb(server)]
    for turn in range(2):
        peak = 0.0
        for index in range(number):
            send(turn * number + index)
            if (index + 1) % BURST == 0:
                peak = max(peak, memory_mb(server))
        sizes.append(max(peak, memory_mb(server)))
    fine = sizes[2] <= sizes[1] + GROWTH_MB
    verdict = "[green]PASS[/]" if fine else "[red]FAIL[/]"
    about = f"{server.num_fds()} files open, {server.num_threads()} threads"
    before, first, then = (f"{size:.1f} MB" for size in sizes)
    CONSOLE.print(f"{verdict}  {number:,} {what}: {before} before, at most {first}, {then} for as many again; {about}")
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    clean_environment()
    torch.set_num_threads(1)
    chance = random.Random(args.seed)
    secret = os.environ[SECRET_ENV] = secrets.token_hex(32)
    rendezvous = Rendezvous.host(LOOPBACK)
    arguments = ServerArguments(ServerSettings(transport="zmq"), "server0", "key", *rendezvous.address, os.getpid())
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-m", "lightning_asgd.server.server_process", arguments.to_json()]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            address = str(rendezvous.get("key", "The server", 60.0)["address"])
            transport = ZmqTransport([address], secret)
            pusher = Pusher(transport)
            pusher.start()
            server = psutil.Process(process.pid)
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            good = attack(server, "foreign connections", args.number, lambda _: stranger((host, int(port)), chance))
            context = zmq.Context()
            peer = context.socket(zmq.DEALER)
            keys = keys_of(secret)
            peer.setsockopt(zmq.LINGER, 0)
            peer.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
            peer.setsockopt(zmq.CURVE_PUBLICKEY, keys.worker_public)
            peer.setsockopt(zmq.CURVE_SECRETKEY, keys.worker)
            peer.connect(address)

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

            good &= attack(server, "messages of a broken worker", args.number, send)
            peer.close()
            context.term()
            pusher.over.set()
            pusher.join(30)
            late = ZmqTransport([address], secret)
            SessionClient(Connection(late, SESSION, 1, 2, timeout_s=10.0)).join()
            late.close()
            transport.close()
            exact = not pusher.is_alive() and pusher.held == pusher.pushed
            verdict = "[green]PASS[/]" if exact else "[red]FAIL[/]"
            CONSOLE.print(f"{verdict}  {pusher.pushed:,} pushes meanwhile, the server holds {pusher.held:,.0f}")
            good &= exact
        finally:
            process.terminate()
            process.wait(10)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
