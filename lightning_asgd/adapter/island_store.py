"""Where the processes of an island on one machine meet: an anonymous file, which other users cannot open.

torch's ``TCPStore`` listens on all addresses and asks for no secret, and who writes to it can run code in them.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

import torch.distributed as dist

from lightning_asgd.transports.addresses import LOOPBACK, interface_of

__all__ = ["meet_in", "offer", "offered", "stay_on_this_machine"]

_ENV = "LIGHTNING_ASGD_ISLAND_STORE"
_GLOO_ENV = "GLOO_SOCKET_IFNAME"


def _name(port: int) -> str:
    return f"lightning-asgd island {port}"


def offer(port: int = 0) -> str:
    """Make an island's file, for as long as this process lives: its path. For :func:`offered` it needs a ``port``."""
    path = f"/proc/{os.getpid()}/fd/{os.memfd_create(_name(port))}"
    if port:
        os.environ[_ENV] = path
    return path


def offered(port: int) -> str:
    """The path that the process has offered that started this one and meets it at ``port``; empty if none has."""
    path = os.environ.get(_ENV, "")
    with contextlib.suppress(OSError):
        return path if os.readlink(path) == f"/memfd:{_name(port)} (deleted)" else ""
    return ""


@contextlib.contextmanager
def meet_in(path: str, size: int) -> Iterator[None]:
    """Have torch make the default process group, of ``size`` processes, with a file, if given, for its store."""
    if dist.is_initialized() or not path:
        yield
        return
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # stays open: torch opens the store's path whenever it reads
    store = dist.FileStore(f"/proc/self/fd/{file}", size)  # type: ignore[attr-defined]
    make = dist.init_process_group
    dist.init_process_group = functools.partial(make, store=store)
    try:
        yield
    finally:
        dist.init_process_group = make


def stay_on_this_machine() -> Callable[[], object]:
    """Have gloo listen on loopback only, unless an interface was chosen. Returns a function that ends this."""
    if _GLOO_ENV in os.environ:
        return lambda: None
    os.environ[_GLOO_ENV] = interface_of(LOOPBACK)
    return functools.partial(os.environ.pop, _GLOO_ENV, None)
