"""Addresses of machines: names, IPv4 and IPv6, and the network interfaces that have them."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from lightning_asgd.core.foundation.environment import joined, parted
from lightning_asgd.core.foundation.errors import LaunchError

LOOPBACK = "127.0.0.1"
_GRACE_S = 1.0
_BACKLOG = 128


class ServerAddress(NamedTuple):
    """How ZeroMQ reaches what listens somewhere, or a server behind a gateway there: its ``number``, else 0."""

    host: str
    port: int
    name: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"tcp://{joined(self.host, self.port)}" + (f"/{self.number}/{self.name}" if self.number else "")

    @classmethod
    def of(cls, address: str) -> ServerAddress:
        """From its text. Raises a ``ValueError`` if it is something else."""
        place, _, server = address.removeprefix("tcp://").partition("/")
        number, _, name = server.partition("/")
        return cls(*parted(place), name, int(number or 0))


def resolve(host: str) -> str:
    """The address of a name: IPv4 if it has one, else IPv6. Raises an ``OSError`` if it has none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    families = {family: str(address[0]) for family, _, _, _, address in reversed(found)}
    return families[socket.AF_INET if socket.AF_INET in families else socket.AF_INET6]


def family_of(address: str) -> socket.AddressFamily:
    """Of an address that is no name."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_loopback(address: str) -> bool:
    """Whether an address, which is not a name, is that of a machine for itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on this address only; port 0 is any free one. Raises an ``OSError`` if it cannot."""
    address = resolve(host)
    return socket.create_server((address, port), family=family_of(address), backlog=_BACKLOG)


def listens(host: str, port: int, within_s: float = _GRACE_S) -> bool | None:
    """Whether a process listens there; None if the machine does not answer, which proves nothing."""
    try:
        with socket.create_connection((host, port), timeout=within_s):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return None


def local_address_towards(host: str) -> str:
    """This machine's address on the network through which it reaches ``host``."""
    try:
        address = resolve(host)
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing; it only selects a route
            return str(probe.getsockname()[0])
    except OSError as error:
        if host in ("localhost", LOOPBACK):
            raise LaunchError(
                f"Cannot reach {host}: {error}. Expected the loopback interface to be up: run `ip link set lo up`."
            ) from error
        raise LaunchError(
            f"Cannot reach {host}: {error}. Expected the name or address of the first machine. Set MASTER_ADDR to "
            "one that every machine can resolve and reach."
        ) from error


def address_of(interface: str) -> str:
    """The address of a network interface of this machine: IPv4 if it has one, else IPv6."""
    import psutil  # here and below, since a health check does without it

    found = {address.family: str(address.address) for address in reversed(psutil.net_if_addrs().get(interface, []))}
    for family in (socket.AF_INET, socket.AF_INET6):
        if family in found:
            return found[family]
    raise LaunchError(
        f"The network interface {interface!r} has no address. Expected one of {sorted(psutil.net_if_addrs())} "
        "that has. Set MASTER_ADDR to an address that every machine can reach."
    )


def interface_of(address: str) -> str:
    """Name of the network interface that holds an address of this machine."""
    import psutil

    interfaces, bare = psutil.net_if_addrs(), address.partition("%")[0]
    for name, addresses in interfaces.items():
        if any(each.address.partition("%")[0] == bare for each in addresses):
            return name
    if is_loopback(address):
        return "lo" if "lo" in interfaces else "lo0"
    raise LaunchError(
        f"No network interface of this machine has the address {address}. Expected an address of one of "
        f"{sorted(interfaces)}. Set MASTER_ADDR to an address that every machine can reach."
    )
