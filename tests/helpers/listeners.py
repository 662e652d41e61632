"""Where the processes of a running job listen, beside the table in docs/howto/security.md."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

from tests.helpers.servers import FORKED

Socket = tuple[str, str, int]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "security.md"


def table() -> list[dict[str, str]]:
    """The rows of the page's table of sockets."""
    section = PAGE.read_text().partition("## What listens")[2].partition("\n## ")[0]
    names, *rows = re.findall(r"^\| (.*) \|$", section, re.M)
    return [dict(zip(names.split(" | "), row.split(" | "), strict=True)) for row in rows]


def expected(roles: Collection[str], transport: str) -> list[str]:
    """What the table says of a process with these roles."""
    kinds = []
    for row in table():
        if row["in"] in roles and row[f'`"{transport}"`'] != "nothing":
            kinds += ["udp" if "UDP" in row["what"] else "tcp"] * (4 if "four" in row["what"] else 1)
    return sorted(kinds)


def listening(pid: int) -> dict[int, Socket]:
    """What listens in the network namespace of a process, by inode. psutil sees this process's namespace only."""
    found = {}
    for name, state, width in (("tcp", "0A", 4), ("tcp6", "0A", 16), ("udp", "07", 4), ("udp6", "07", 16)):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, remote, its_state, *_, inode = line.split()[:10]
            if its_state == state and int(remote.replace(":", ""), 16) == 0:
                host, port = local.split(":")
                words = bytes.fromhex(host)  # of 32 bits, in the machine's order
                address = b"".join(words[i : i + 4][::-1] for i in range(0, width, 4))
                family = socket.AF_INET if width == 4 else socket.AF_INET6
                found[int(inode)] = (name[:3], socket.inet_ntop(family, address), int(port, 16))
    return found


def sockets(process: psutil.Process) -> set[Socket]:
    """What a process listens at."""
    files = []
    with contextlib.suppress(OSError):  # it has ended
        for each in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                files.append(os.readlink(each))
        inodes = {int(each[8:-1]) for each in files if each.startswith("socket:[")}
        return {found for inode, found in listening(process.pid).items() if inode in inodes}
    return set()


def check_listeners(processes: Mapping[int, Collection[str]], transport: str, *addresses: str) -> None:
    """Compare processes, given by their roles as the table has them, and those they start, with it.

    On one machine all listen on loopback; on several they may listen at these ``addresses``, too.
    """
    family = {each for pid in processes for root in [psutil.Process(pid)] for each in (root, *root.children(True))}
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen, roles = sockets(process), processes.get(process.pid) or roles_of(process)
            parent = process.parent()
            if roles or parent is None:
                check(seen, roles, transport, addresses)
            else:  # a gateway has the socket of the process that has started it
                assert seen <= sockets(parent), f"{process.cmdline()} listens at {seen}"


def roles_of(process: psutil.Process) -> list[str]:
    """Those of a process that a job has started beside its workers."""
    command = process.cmdline()
    if process.name() == FORKED or "lightning_asgd.core.server.process" in command:
        return ["each server"]
    return ["`lightning-asgd serve`"] if "serve" in command else []


def check(seen: set[Socket], roles: Collection[str], transport: str, addresses: Collection[str]) -> None:
    """Compare the sockets of a process with the table."""
    everywhere = {"::"} if any("all interfaces" in row["what"] for row in table() if row["in"] in roles) else set()
    found = {ip for _, ip, _ in seen}
    near = {*addresses, *everywhere, *(ip for ip in found if ipaddress.ip_address(ip).is_loopback)}
    assert everywhere <= found <= near, f"{roles}: {seen}"
    told = expected(roles, transport)
    assert sorted(kind for kind, *_ in seen) == told, f"{roles} with {transport}: {seen}, the page says {told}"
