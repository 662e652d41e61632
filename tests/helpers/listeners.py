"""Where the processes of a running job listen, beside the table in docs/howto/security.md."""

from __future__ import annotations

import contextlib
import ipaddress
import re
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


def sockets(process: psutil.Process) -> set[Socket]:
    """What a process listens at."""
    seen = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in process.net_connections("inet"):
            if each.status == psutil.CONN_LISTEN or (each.status == psutil.CONN_NONE and not each.raddr):
                seen.add(("tcp" if each.status == psutil.CONN_LISTEN else "udp", each.laddr.ip, each.laddr.port))
    return seen


def check_listeners(processes: Mapping[int, Collection[str]], transport: str) -> None:
    """Compare processes of one machine, given by their roles as the table has them, and those they start, with it."""
    family = {each for pid in processes for root in [psutil.Process(pid)] for each in (root, *root.children(True))}
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen, roles = sockets(process), processes.get(process.pid) or roles_of(process)
            parent = process.parent()
            if roles or parent is None:
                check(seen, roles, transport)
            else:  # a gateway has the socket of the process that has started it
                assert seen <= sockets(parent), f"{process.cmdline()} listens at {seen}"


def roles_of(process: psutil.Process) -> list[str]:
    """Those of a process that a job has started beside its workers."""
    command = process.cmdline()
    if process.name() == FORKED or "lightning_asgd.server.server_process" in command:
        return ["each server"]
    return ["`lightning-asgd serve`"] if "serve" in command else []


def check(seen: set[Socket], roles: Collection[str], transport: str) -> None:
    """Compare the sockets of a process with the table."""
    assert all(ipaddress.ip_address(ip).is_loopback for _, ip, _ in seen), f"{roles} listen at {seen}"
    told = expected(roles, transport)
    assert sorted(kind for kind, *_ in seen) == told, f"{roles} with {transport}: {seen}, the page says {told}"
