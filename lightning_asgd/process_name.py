"""Names of processes, by which servers tell two starts of one worker apart."""

from __future__ import annotations

import os
import secrets
import socket
from functools import partial

__all__ = ["machine_and_pid", "this_process"]


def machine_and_pid(pid: int) -> str:
    """What the name of a process of this machine begins with."""
    return f"{socket.gethostname()}/{pid}/"


def _new() -> str:
    return machine_and_pid(os.getpid()) + secrets.token_hex(8)


_names = [_new()]
this_process = partial(_names.__getitem__, 0)  # called for every message
"""The name of this start of this process, as no other has it: machine, process number, and random digits."""


def _after_fork() -> None:
    _names[0] = _new()


os.register_at_fork(after_in_child=_after_fork)
