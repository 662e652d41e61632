"""Everything of a job through one port: behind a firewall, behind NAT, through a tunnel that is restarted, over IPv6.

    python benchmarks/one_port.py                # all, as root on Linux, with iptables; about five minutes
    python benchmarks/one_port.py --only tunnel  # one way

Each way is taken by a job of two nodes and by a run of `lightning-asgd serve` with two workers, with two servers. One
server is killed in the middle, whose replacement is reached through the same port.

* firewall: two machines between which every packet is dropped that is not of a connection of the second machine to the
  port of the first one.
* NAT: the second machine is behind a router that hides it, and there is no route back to it.
* tunnel: the first machine's processes listen on loopback only. A tunnel leads there, both ends of which are cut in
  the middle of training, and made again three seconds later.
* IPv6: there is no IPv4 address, and the first machine has a name.

What counts: every process ends with exit code 0, every sample is trained once per epoch, no process listens elsewhere
than on loopback and at the port, and no process is left.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import prepared
from network import Network, behind_nat, run_in, two_machines
from strangers_jobs import Job, Place
from tunnel import Tunnel

from lightning_asgd.core.foundation.environment import joined

PORT, END = 29400, 29401  # of the job; of a tunnel's end
NAME = "first.asgd.test"
DOWN_S = 3.0  # for which a tunnel is cut
LEFT_S = 15.0  # for processes to end
_NEWNS, _PRIVATE, _BIND = 0x20000, (1 << 18) | (1 << 14), 1 << 12  # of unshare and mount


@dataclass(frozen=True)
class Way(Place):
    """Two nodes that reach each other only in one way.

    Attributes:
        hosts: a file that says which names there are, in place of the system's.
        named: the first node's address as nodes are told it; empty for its own.
    """

    hosts: Path | None = None
    named: str = ""

    def first(self, node: int) -> str:
        """See :class:`Place`."""
        return self.named or self.address()

    def enter(self, node: int) -> None:
        """See :class:`Place`."""
        super().enter(node)
        if self.hosts is not None:
            libc = ctypes.CDLL(None, use_errno=True)
            for code in (
                libc.unshare(_NEWNS),
                libc.mount(b"none", b"/", None, _PRIVATE, None),
                libc.mount(bytes(self.hosts), b"/etc/hosts", None, _BIND, None),
            ):
                if code != 0:
                    raise OSError(ctypes.get_errno(), "Cannot replace /etc/hosts")


def let_through(network: Network, index: int, rules: list[list[str]], tool: str = "iptables") -> None:
    """Drop all packets of a machine but these, and those on loopback."""
    for chain, interface in (("INPUT", "-i"), ("OUTPUT", "-o")):
        run_in(network, index, tool, "-P", chain, "DROP")
        run_in(network, index, tool, "-A", chain, interface, "lo", "-j", "ACCEPT")
    for rule in rules:
        run_in(network, index, tool, "-A", *rule, "-j", "ACCEPT")


def allow_port(network: Network, port: int, tool: str = "iptables", icmp: str = "") -> None:
    """Let the second machine connect to a port of the first one, and nothing else."""
    more = [[chain, "-p", icmp] for chain in ("INPUT", "OUTPUT") if icmp]
    to, of = ["-p", "tcp", "--dport", str(port)], ["-p", "tcp", "--sport", str(port)]
    let_through(network, 0, [["INPUT", *to], ["OUTPUT", *of, "!", "--syn"], *more], tool)
    let_through(network, 1, [["OUTPUT", *to], ["INPUT", *of, "!", "--syn"], *more], tool)


def dropped(network: Network, tool: str = "iptables") -> int:
    """Packets that the policies have dropped on both machines."""
    found = 0
    for index in range(2):
        for line in run_in(network, index, tool, "-L", "-n", "-v", "-x").splitlines():
            if line.startswith("Chain") and "policy DROP" in line:
                found += int(line.split("policy DROP ")[1].split()[0])
    return found


@contextlib.contextmanager
def firewall(folder: Path, *, serves: bool) -> Iterator[tuple[Way, Callable[[], None]]]:
    with two_machines() as network:
        allow_port(network, PORT)

        def check() -> None:
            assert dropped(network) == 0, f"{dropped(network)} packets were dropped: something needs another port"

        yield Way("zmq", network, serves), check


@contextlib.contextmanager
def nat(folder: Path, *, serves: bool) -> Iterator[tuple[Way, Callable[[], None]]]:
    with behind_nat() as network:
        yield Way("zmq", network, serves), lambda: None


@contextlib.contextmanager
def ipv6(folder: Path, *, serves: bool) -> Iterator[tuple[Way, Callable[[], None]]]:
    with two_machines(addresses=("fd00:a5::1", "fd00:a5::2")) as network:
        allow_port(network, PORT, "ip6tables", "icmpv6")  # who has which address is asked by ICMP
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{network.addresses[0]} {NAME}\n")
        named = NAME if serves else network.addresses[0]
        yield Way("zmq", network, serves, folder / "hosts", named), lambda: None


def keep_end(network: Network, node: int, entrance: tuple[str, int], end: tuple[str, int]) -> None:
    """One end of a tunnel, in a process on a machine: SIGUSR1 cuts it, and SIGUSR2 makes it again."""
    network.enter(node)
    made = Tunnel(entrance, end)
    signal.signal(signal.SIGUSR1, lambda *_: made.cut())
    signal.signal(signal.SIGUSR2, lambda *_: made.restart())
    while True:
        signal.pause()


@contextlib.contextmanager
def tunnel(folder: Path, *, serves: bool) -> Iterator[tuple[Way, Callable[[], None]]]:
    ends: list[Any] = []
    with two_machines() as network:
        allow_port(network, END)
        for about in (
            (network, 0, (network.addresses[0], END), ("127.0.0.1", PORT)),
            (network, 1, ("127.0.0.1", PORT), (network.addresses[0], END)),
        ):
            ends.append(multiprocessing.get_context("fork").Process(target=keep_end, args=about, daemon=True))
            ends[-1].start()

        def restart() -> None:
            for number, pause_s in ((signal.SIGUSR1, DOWN_S), (signal.SIGUSR2, 0.0)):
                for each in ends:
                    os.kill(each.pid, number)
                time.sleep(pause_s)

        try:
            yield Way("zmq", network, serves, named="127.0.0.1"), restart
        finally:
            for each in ends:
                each.terminate()
                each.join()


WAYS = {"firewall": firewall, "nat": nat, "tunnel": tunnel, "ipv6": ipv6}


def listening(pid: int) -> set[tuple[bool, int]]:
    """Where processes listen in the network namespace of a process: whether on loopback, and the ports."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                host, port = local.split(":")
                loopback = host.endswith("7F") or host == "00000000000000000000000001000000"
                found.add((loopback, int(port, 16)))
    return found


def take(name: str, folder: Path, *, serves: bool) -> str:
    """Train in one way; a line about it. Raises an ``AssertionError`` or a ``RuntimeError``."""
    with WAYS[name](folder, serves=serves) as (way, disturb):
        network = way.network
        assert network is not None
        ends = {pid for index in range(2) for pid in network.processes(index)}
        abort = {"on_worker_failure": "abort"} if name == "tunnel" else {}
        job = Job(way, folder, PORT, {"servers": 2, **abort})
        try:
            job.train()
            for index in range(2):
                pids = set(network.processes(index)) - ends
                others = {port for loopback, port in listening(min(pids)) if not loopback}
                allowed = {END} if name == "tunnel" else {PORT}
                assert others <= allowed, f"machine {index} listens at {others - allowed}, too"
            job.server.kill()
            job.train()
            disturb()
            job.train()
            codes, told = job.finish()
        finally:
            job.close()
        assert set(codes.values()) == {0}, f"exit codes {codes}"
        for each in told:
            assert each.get("ended"), "a worker has not ended its training"
            seen = {count for count, _ in each["seen"]}
            assert seen == {each["epochs"]}, f"samples were trained {each['seen']} times in {each['epochs']} epochs"
        said = [job.said(worker) for worker in job.members.values()]
        assert all("replaced: 1" in text for text in said), "the killed server was not replaced"
        there = {joined(way.first(1), PORT)} if name != "ipv6" else {f"[{network.addresses[0]}]:{PORT}"}
        reached = {address.removeprefix("tcp://").partition("/")[0] for address in told[1]["servers"]}
        assert reached == there, f"the second machine reached servers at {reached}"
        deadline = time.monotonic() + LEFT_S
        while left := {pid for index in range(2) for pid in network.processes(index)} - ends:
            assert time.monotonic() < deadline, f"processes {left} are left"
            time.sleep(0.1)
    return f"{told[0]['epochs']} epochs, every sample once in each of them; nothing is left"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(WAYS), help="one way only")
    args = parser.parse_args()
    if not shutil.which("iptables"):
        print("iptables is missing: install it.")
        return 2
    failed = 0
    with prepared(secret=True, machines=True):
        for name in [args.only] if args.only else WAYS:
            for serves in (False, True):
                begun = time.monotonic()
                with tempfile.TemporaryDirectory(prefix="asgd-port-") as folder:
                    try:
                        text = take(name, Path(folder), serves=serves)
                    except (AssertionError, RuntimeError, OSError) as error:
                        traceback.print_exc()
                        failed, text = failed + 1, f"FAILED: {str(error).splitlines()[0]}"
                print(f"{name:9} {'run' if serves else 'job'}: {text} ({time.monotonic() - begun:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
