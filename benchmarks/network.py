"""Network namespaces joined by cables: several machines on one, for benchmarks and tests. Needs Linux and root.

Two namespaces are joined by one cable, which may be slow; more than two by a switch, which is a namespace too.

Each namespace has its own loopback and one end of a veth pair whose both directions are limited by ``tc ... tbf``::

    with two_machines(mbit=100) as network:
        subprocess.run([*network.prefix(1), "ping", "-c1", network.addresses[0]])
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Network",
    "available",
    "behind_nat",
    "cut",
    "machines",
    "move",
    "name_hosts",
    "plug",
    "pull",
    "run_in",
    "two_machines",
]

_PREFIX = "asgd"
_NAMESPACES = Path("/run/netns")
_FILES = Path("/etc/netns")  # what `ip netns exec` shows as files of /etc in a namespace
_CLONE_NEWNET = 0x40000000
_LEAVE_S = 5.0  # for processes to leave a namespace before they are killed
_counter = itertools.count()


@dataclass(frozen=True)
class Network:
    """Joined namespaces; every field holds one entry per namespace."""

    names: tuple[str, ...]
    interfaces: tuple[str, ...]
    addresses: tuple[str, ...]

    def prefix(self, index: int) -> list[str]:
        """What to put before a command so that it runs in a namespace."""
        return ["ip", "netns", "exec", self.names[index]]

    def processes(self, index: int) -> list[int]:
        """Numbers of the processes that run in a namespace."""
        return [int(pid) for pid in _ip("netns", "pids", self.names[index]).split()]

    def enter(self, index: int) -> None:
        """Move this thread, and all threads and processes it starts, into a namespace. For a forked child."""
        with open(_NAMESPACES / self.names[index]) as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"Cannot enter network namespace {self.names[index]}")


def available() -> str | None:
    """Why this machine cannot do it, as a sentence; None if it can. Tries it for real."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"The command {missing[0]!r} is missing: install iproute2."
    if os.geteuid() != 0:
        return "Network namespaces need root: run this as root."
    try:
        with two_machines(mbit=100):
            return None
    except (RuntimeError, OSError) as error:
        return f"This machine forbids network namespaces or traffic control: {error}"


@contextlib.contextmanager
def two_machines(
    mbit: float | None = None, queue_s: float = 0.1, addresses: tuple[str, str] = ("10.213.77.1", "10.213.77.2")
) -> Iterator[Network]:
    """Make the two namespaces, and remove them and every process left in them at the end.

    Args:
        mbit: speed of the cable in Mbit/s per direction; None for as fast as the machine can.
        queue_s: seconds that a packet waits for the cable at most; what would wait longer is dropped.
        addresses: of the two; nobody but them sees these.

    Raises:
        RuntimeError: a command failed; the text holds its output.
    """
    _remove_stale()
    number = f"{os.getpid()}-{next(_counter)}"
    network = Network((f"{_PREFIX}-{number}-a", f"{_PREFIX}-{number}-b"), ("veth-a", "veth-b"), addresses)
    try:
        for name in network.names:
            _ip("netns", "add", name)
        (a, b), (left, right) = network.names, network.interfaces
        _ip("link", "add", left, "netns", a, "type", "veth", "peer", "name", right, "netns", b)
        for name, interface in zip(network.names, network.interfaces, strict=True):
            _shape(name, interface, mbit, queue_s)
        _set_up(network)
        yield network
    finally:
        with _uninterrupted():
            for name in network.names:
                _remove(name)


@contextlib.contextmanager
def machines(number: int, mbit: float | None = None, queue_s: float = 0.1) -> Iterator[Network]:
    """Make so many namespaces, each with a cable to a switch, and remove them and their processes at the end.

    Args:
        number: of the namespaces, without that of the switch.
        mbit: speed of every cable; see :func:`two_machines`.
        queue_s: see there.

    Raises:
        RuntimeError: a command failed; the text holds its output.
    """
    _remove_stale()
    owner = f"{_PREFIX}-{os.getpid()}-{next(_counter)}"
    letters = "abcdefghijklmnopqrstuvwxyz"[:number]
    addresses = tuple(f"10.213.78.{index + 1}" for index in range(number))
    network = Network(tuple(f"{owner}-{letter}" for letter in letters), ("eth0",) * number, addresses)
    switch = f"{owner}-0"
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for index, (name, interface) in enumerate(zip(network.names, network.interfaces, strict=True)):
            port = f"port{index}"
            _ip("netns", "add", name)
            _ip("link", "add", interface, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            for place, end in ((name, interface), (switch, port)):
                _shape(place, end, mbit, queue_s)
        _set_up(network)
        yield network
    finally:
        with _uninterrupted():
            for name in (*network.names, switch):
                _remove(name)


@contextlib.contextmanager
def behind_nat() -> Iterator[Network]:
    """Make two namespaces, the second one behind a router that hides it (a third one). Needs iptables.

    The first one has no route to the second one.

    Raises:
        RuntimeError: a command failed; the text holds its output.
    """
    _remove_stale()
    owner = f"{_PREFIX}-{os.getpid()}-{next(_counter)}"
    router = f"{owner}-r"
    network = Network((f"{owner}-a", f"{owner}-b"), ("eth0", "eth0"), ("10.213.79.1", "192.168.79.2"))
    try:
        for name in (*network.names, router):
            _ip("netns", "add", name)
        for name, interface, port in zip(network.names, network.interfaces, ("outside", "inside"), strict=True):
            _ip("link", "add", interface, "netns", name, "type", "veth", "peer", "name", port, "netns", router)
        _set_up(network)
        for port, address in (("outside", "10.213.79.2"), ("inside", "192.168.79.1")):
            _ip("-n", router, "address", "add", f"{address}/24", "dev", port)
            _ip("-n", router, "link", "set", port, "up")
        _ip("-n", network.names[1], "route", "add", "default", "via", "192.168.79.1")
        inside = ["ip", "netns", "exec", router]
        _command(*inside, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        _command(*inside, "iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "outside", "-j", "MASQUERADE")
        yield network
    finally:
        with _uninterrupted():
            for name in (*network.names, router):
                _remove(name)


def run_in(network: Network, index: int, *command: str) -> str:
    """Run a command in a namespace; what it prints. Raises a ``RuntimeError`` with its output if it fails."""
    return _command(*network.prefix(index), *command)


def _set_up(network: Network) -> None:
    """Give every machine its address, and put the cables in."""
    for name, interface, address in zip(network.names, network.interfaces, network.addresses, strict=True):
        # Without a check for another machine that has the address, which takes two seconds under IPv6.
        about = [f"{address}/64", "dev", interface, "nodad"] if ":" in address else [f"{address}/24", "dev", interface]
        _ip("-n", name, "address", "add", *about)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", interface, "up")


def _shape(name: str, interface: str, mbit: float | None, queue_s: float) -> None:
    """Limit what an end of a cable sends."""
    if mbit is None:
        return
    burst = max(32_000, int(mbit * 1e6 / 8 / 100))  # bytes of 10 ms
    shape = ("tbf", "rate", f"{mbit}mbit", "burst", f"{burst}", "latency", f"{queue_s * 1000:g}ms")
    _command("tc", "-n", name, "qdisc", "add", "dev", interface, "root", *shape)


def cut(network: Network, index: int) -> None:
    """Unplug the cable of a machine permanently."""
    _ip("-n", network.names[index], "link", "set", network.interfaces[index], "down")


def plug(network: Network, index: int) -> None:
    """Put the cable of a machine in again."""
    _ip("-n", network.names[index], "link", "set", network.interfaces[index], "up")


def pull(network: Network, index: int, seconds: float) -> None:
    """Pull the cable out of a machine, and put it back."""
    cut(network, index)
    try:
        time.sleep(seconds)
    finally:
        plug(network, index)


def name_hosts(network: Network, hosts: Mapping[str, str]) -> None:
    """Have names mean these addresses in all namespaces, from now on; for commands that are started with a prefix.

    As in a container, a machine knows no other names than these and its own.
    """
    for name, own in zip(network.names, network.addresses, strict=True):
        known = {"localhost": "127.0.0.1", socket.gethostname(): own, **hosts}
        text = "".join(f"{address} {host}\n" for host, address in known.items())
        (_FILES / name).mkdir(parents=True, exist_ok=True)
        (_FILES / name / "hosts").write_text(text)  # the same file: processes that run see the change


def move(network: Network, index: int, address: str) -> None:
    """Change a machine's address, as if another machine had replaced it."""
    name, interface = network.names[index], network.interfaces[index]
    _ip("-n", name, "address", "flush", "dev", interface)
    _ip("-n", name, "address", "add", f"{address}/24", "dev", interface)


def _ip(*arguments: str) -> str:
    return _command("ip", *arguments)


def _command(*command: str) -> str:
    # In a session of its own: Ctrl-C must not end the command that cleans up.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _remove(name: str) -> None:
    if not (_NAMESPACES / name).exists():
        return
    deadline = time.monotonic() + _LEAVE_S
    while pids := [int(pid) for pid in _ip("netns", "pids", name).split()]:
        if time.monotonic() > deadline:
            for pid in set(pids) - {os.getpid()}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(_FILES / name, ignore_errors=True)
    _ip("netns", "delete", name)  # takes its end of the cable, and so the cable, with it


def _remove_stale() -> None:
    """Remove what a killed program left: namespaces carry the number of the process that made them."""
    for path in _NAMESPACES.glob(f"{_PREFIX}-*-*-?"):
        owner = path.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(RuntimeError):
                _remove(path.name)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
