"""100,000 mutated messages each to a server, to the rendezvous that a worker hosts, and to a gateway.

    python -m benchmarks.fuzz                    # three minutes on two cores
    python -m benchmarks.fuzz --number 5000      # a quick look

The first two know the secret: messages of every kind with one or two other fields, and calls that are none. The gateway
gets what strangers send. Afterwards everything must work on in the same processes, the server must hold what was pushed
meanwhile and nothing else, and memory may have grown by 30 MB at most. An island's processes meet at a server and a
gateway of this kind. Exits with 1 unless all of this holds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))

import zmq
from common import verdict
from jobs import megabytes
from strangers_server import SESSION, Pusher, dealer, greeting, server_process

from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.calls.transport import answer_within
from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.job import registry
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.protocol import Failure, Join
from lightning_asgd.elastic.messages import StatusRequest
from lightning_asgd.transports.zmq.transport import ZmqTransport
from tests.component.test_fuzzed import VALUES, changed, every_message

GROWTH_MB = 30.0
WINDOW = 50


def to_a_server(number: int, chance: random.Random) -> bool:
    """Messages of a process that is no worker, or says that it is one, while a worker pushes ones."""
    messages = [dataclasses.replace(each, session=SESSION) for each in every_message()]
    with server_process() as (server, address):
        transport = ZmqTransport([address], os.environ[SECRET_ENV])
        pusher = Pusher(transport)
        answer_within(transport.call(0, Join(SESSION, 1, 2, process="there/2/bb"), 10.0), 11.0)
        pusher.start()
        before, sent, refused, waiting = megabytes(server), 0, 0, list[Any]()
        while sent < number:
            message = changed(chance.choice(messages), chance)
            if message is None or isinstance(message, StatusRequest):
                continue
            with contextlib.suppress(ProtocolError, TypeError, ValueError):  # it cannot be sent
                waiting.append(transport.call(0, dataclasses.replace(message, process="elsewhere/7/cc"), 30.0))
                sent += 1
            if len(waiting) == WINDOW:
                refused += sum(isinstance(answer_within(each, 31.0), Failure) for each in waiting)
                waiting.clear()
        pusher.over.set()
        pusher.join(30)
        grown = megabytes(server) - before
        exact = not pusher.is_alive() and pusher.held == pusher.pushed
        transport.close()
        text = f"{sent:,} messages to a server, {refused:,} rejected with an error that names it; "
        text += f"{pusher.pushed:,} pushes meanwhile, it holds "
        return verdict(exact and grown < GROWTH_MB, f"{text}{pusher.held:,.0f}; {grown:+.1f} MB")


def call(chance: random.Random) -> Any:
    """What a process that knows the secret may send to a rendezvous: hardly ever a call."""
    words: list[Any] = [chance.choice(["put", "peek", "clock", "job", 1, None, [], {}, "x" * 50]) for _ in range(4)]
    text = [each for each in VALUES if isinstance(each, str | int | float | list | dict | None)]
    return chance.choice([["L", words[: chance.randrange(5)]], ["L", ["put", f"k{chance.randrange(20)}", "1"]], *text])


def to_a_rendezvous(number: int, chance: random.Random) -> bool:
    """Calls to the entries that a process hosts, with the secret."""
    process = psutil.Process()
    with registry.kind_of("zmq").host_rendezvous("127.0.0.1", 0) as hosted:
        hosted.put("job", "mine")
        context = zmq.Context()
        peer = dealer(context, "tcp://{}:{}".format(*hosted.address))
        before, answered = megabytes(process), 0
        for index in range(number):
            body = chance.choice([json.dumps(call(chance)), chance.randbytes(40).hex(), "[" * 500])
            peer.send_multipart([json.dumps(["somebody", index + 1, [], [], body]).encode()])
            while peer.poll(0 if (index + 1) % WINDOW else 5000):
                peer.recv_multipart()
                answered += 1
                if (index + 1) % WINDOW == 0 and answered > index:
                    break
        peer.close()
        context.term()
        with Rendezvous.connect(*hosted.address, 10.0) as guest:
            guest.put("after", 1)
            works = guest.peek("job") is not None and hosted.peek("after") == 1
        grown = megabytes(process) - before
    fine = works and grown < GROWTH_MB
    return verdict(fine, f"{number:,} calls to a rendezvous, {answered:,} answered; {grown:+.1f} MB")


def to_a_gateway(number: int, chance: random.Random) -> bool:
    """What strangers send to the one port of a job; ten pieces by each connection."""
    with registry.kind_of("zmq").host_rendezvous("127.0.0.1", 0) as hosted:
        hosted.put("job", "mine")
        hosted.open_gateway()
        gateway = next(each for each in psutil.Process().children() if "gateway" in " ".join(each.cmdline()))
        with Rendezvous.connect(*hosted.address, 10.0) as guest:
            guest.peek("job")
        before = megabytes(gateway)
        for _ in range(number // 10):
            with contextlib.suppress(OSError), socket.create_connection(hosted.address, timeout=10) as connection:
                connection.sendall(
                    chance.choice([b"", greeting(b"CURVE"), greeting(b"CURVE")[: chance.randint(1, 63)]])
                )
                for _ in range(10):
                    connection.sendall(chance.randbytes(chance.randint(1, 400)))
        time.sleep(1.0)
        with Rendezvous.connect(*hosted.address, 10.0) as guest:
            works = guest.peek("job") == "mine" and gateway.is_running()
        grown, files = megabytes(gateway) - before, gateway.num_fds()
    fine = works and grown < GROWTH_MB and files < 100
    return verdict(fine, f"{number:,} pieces to a gateway; {grown:+.1f} MB, {files} open files")


def main() -> int:
    """Send everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ[SECRET_ENV] = secrets.token_hex(32)
    good = True
    for trial in (to_a_server, to_a_rendezvous, to_a_gateway):
        good &= trial(args.number, random.Random(args.seed))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
