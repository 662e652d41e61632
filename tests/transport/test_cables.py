"""Cables that are out just when somebody sets out: two network namespaces, where the system allows them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import network
from lightning_asgd.transports.rpc import tensorpipe

REASON = network.available()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.skipif(not tensorpipe.is_available(), reason="this torch has no RPC"),
    pytest.mark.timeout(240),
]

OUT_S = 1.5
SERVER = """
from lightning_asgd.transports.rpc import transport as rpc_transport
print("ready", flush=True)
input()
server = rpc_transport.RpcServer(lambda message: message + 1, "server", "veth-a")
print(server.address, flush=True)
input()
server.close()
"""
CLIENT = """
from lightning_asgd.transports.rpc import transport as rpc_transport
transport = rpc_transport.RpcTransport([input()], "veth-b")
print("ready", flush=True)
input()
answer = transport.call(0, 1, 30.0)
print("called", flush=True)
print(answer.wait(), flush=True)
transport.close()
"""


PULLED = """
import contextlib
import os
from lightning_asgd.core.server import process as server_process
from lightning_asgd.transports.rpc import tensorpipe
class Told:
    connect = classmethod(lambda cls, *about, **more: contextlib.nullcontext(cls()))
    def put(self, key, about):
        print(about["address"], flush=True)
server_process.Rendezvous = Told
if "BEGUN" not in os.environ:
    os.environ["BEGUN"] = "1"
    tensorpipe._await_network = lambda interface: None  # it was up when it was looked at
    print("ready", flush=True)
    input()
settings = server_process.ServerSettings("veth-a")
server_process.run_server([server_process.ServerArguments(settings, "server", "key", "", 0, os.getppid()).to_json()])
"""


class Program:
    """A program on one of the machines, that is told and says a line at a time."""

    def __init__(self, machines: network.Network, node: int, text: str) -> None:
        self.cable = ["ip", "-n", machines.names[node], "link", "set", "dev", machines.interfaces[node]]
        command: list[Any] = [*machines.prefix(node), sys.executable, "-c", text]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def pull(self) -> None:
        subprocess.run([*self.cable, "down"], check=True)

    def put_back(self) -> None:
        subprocess.run([*self.cable, "up"], check=True)


@pytest.fixture
def machines() -> Iterator[network.Network]:
    with network.two_machines() as pair:
        yield pair


@contextlib.contextmanager
def running(machines: network.Network, *texts: str) -> Iterator[list[Program]]:
    programs = [Program(machines, node, text) for node, text in enumerate(texts)]
    try:
        yield programs
    finally:
        for program in programs:
            program.process.kill()
            program.process.communicate()


def test_who_sets_out_without_a_cable_goes_on_when_it_is_back(machines: network.Network) -> None:
    """TensorPipe would have a server listen on loopback, and end the process of a worker that has no way to it."""
    with running(machines, SERVER, CLIENT) as (server, client):
        assert server.says() == "ready"
        server.pull()
        server.tell()
        time.sleep(OUT_S)
        server.put_back()
        client.tell(server.says())
        assert client.says() == "ready"
        client.pull()
        client.tell()
        assert client.says() == "called"
        time.sleep(OUT_S)
        client.put_back()
        assert client.says() == "2"
        assert client.process.wait(20) == 0
        server.tell()
        assert server.process.wait(20) == 0


def test_a_server_whose_cable_is_pulled_just_when_it_begins_to_serve_begins_anew(machines: network.Network) -> None:
    with running(machines, PULLED) as (server,):
        assert server.says() == "ready"
        server.pull()
        server.tell()
        time.sleep(OUT_S)
        server.put_back()
        assert server.says().startswith(f"uv://{machines.addresses[0]}:")
        server.process.terminate()
        assert server.process.wait(20) == 0
