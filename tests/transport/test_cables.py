"""Cables that are out just when somebody sets out: two network namespaces, where the system allows them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import network

REASON = network.available()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(60)]

OUT_S = 1.5
SERVER = """
from lightning_asgd.transport import rpc
print("ready", flush=True)
input()
print(rpc.serve(lambda message: message + 1, "server", "veth-a"), flush=True)
input()
rpc.stop()
"""
CLIENT = """
from lightning_asgd.transport import rpc
transport = rpc.RpcTransport([input()], "veth-b")
print("ready", flush=True)
input()
answer = transport.call(0, 1, 30.0)
print("called", flush=True)
print(answer.wait(), flush=True)
transport.close()
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
def programs() -> Iterator[tuple[Program, Program]]:
    with network.two_machines() as machines:
        both = Program(machines, 0, SERVER), Program(machines, 1, CLIENT)
        try:
            yield both
        finally:
            for program in both:
                program.process.kill()
                program.process.communicate()


def test_who_sets_out_without_a_cable_goes_on_when_it_is_back(programs: tuple[Program, Program]) -> None:
    """TensorPipe would have a server listen on loopback, and end the process of a worker that has no way to it."""
    server, client = programs
    assert server.says() == "ready"
    server.pull()
    server.tell()
    time.sleep(OUT_S)
    server.put_back()
    address = server.says()
    client.tell(address)
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
