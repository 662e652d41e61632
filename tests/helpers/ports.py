"""A port for a process that is started later: none of those that the system gives to connections meanwhile."""

from __future__ import annotations

import contextlib
import secrets
import socket

__all__ = ["free_port"]

_FIRST, _LAST = 15_000, 32_000  # below those of Linux and of macOS


def free_port() -> int:
    while True:
        port = _FIRST + secrets.randbelow(_LAST - _FIRST)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
