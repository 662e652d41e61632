"""Names of processes, by which servers tell two starts of one worker apart."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import uuid
from collections.abc import Iterable
from functools import partial

_DIGITS = 10  # of a process's number, at most


def machine_and_pid(pid: int) -> str:
    """What the name of a process of this machine begins with."""
    return f"{socket.gethostname()}/{pid}/"


def pid_of(process: str) -> int:
    """The number in a process's name; 0 if there is none."""
    _, pid, *_ = [*process.split("/"), "", ""]
    return int(pid) if pid.isdecimal() and len(pid) <= _DIGITS else 0  # any worker may have sent it


def for_users(process: str) -> str:
    """A process as users know it."""
    machine, pid, *_ = [*process.split("/"), "", ""]
    return f"{pid} on {machine}"


def is_gone(process: str) -> bool:
    """Whether a process has ended. False if it may run where this one cannot see it: elsewhere, or in a container."""
    return bool(gone_among([process]))


def gone_among(processes: Iterable[str]) -> list[str]:
    """Those of them that have ended; see :func:`is_gone`."""
    place = _place()
    return [process for process in processes if place and _has_ended(process, place)]


def living_stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/PID/stat`` from a process's state on; None if the process has ended.

    Raises an ``OSError`` if the system does not say, for instance when too many files are open.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:  # no Path: it interns the number, and Python's table of these grows
            fields = file.read().rpartition(")")[2].split()  # the name may hold anything
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields  # its parent has not asked for its exit code


def _has_ended(process: str, place: str) -> bool:
    pid = pid_of(process)
    if not pid or not process.startswith(f"{machine_and_pid(pid)}{place}-"):
        return False
    try:
        return living_stat(pid) is None
    except OSError:
        return False


def _place() -> str:
    """This start of this machine, and the numbering of its processes; empty if the system does not tell."""
    return _start_and_space("pid")


def this_network() -> str:
    """Equal for processes that reach each other on loopback: of one machine, and of one container if it has its own."""
    return _start_and_space("net") or f"{socket.gethostname()} {uuid.getnode():x}"


def _start_and_space(kind: str) -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read()
        return hashlib.sha256(f"{boot} {os.readlink(f'/proc/self/ns/{kind}')}".encode()).hexdigest()[:8]
    except OSError:
        return ""


def _new() -> str:
    return f"{machine_and_pid(os.getpid())}{_place()}-{secrets.token_hex(8)}"


_names = [_new()]
this_process = partial(_names.__getitem__, 0)  # called for every message
"""The name of this start of this process, as no other has it: machine, process number, place, and random digits."""

os.register_at_fork(after_in_child=lambda: _names.__setitem__(0, _new()))
