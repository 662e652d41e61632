"""Where the processes of an island on one machine meet: an open file without a name, which other users cannot open.

torch's ``TCPStore`` listens on all interfaces and asks for no secret; what is written to it can run code in them.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.job.addresses import LOOPBACK, interface_of

_MEETING_ENV = "LIGHTNING_ASGD_MEETING"
_met: Counter[str] = Counter()  # how often this process has met others in a file
_GLOO_ENV = "GLOO_SOCKET_IFNAME"
_PATIENCE = datetime.timedelta(minutes=30)  # as torch's for a group; a file's own is five minutes


def offer() -> str:
    """Make the file of one meeting, for as long as this process lives: its path for the others."""
    with tempfile.TemporaryFile() as file:
        return f"/proc/{os.getpid()}/fd/{os.dup(file.fileno())}"


@contextlib.contextmanager
def offered() -> Iterator[str]:
    """Make a file for the meetings of processes that are started within the block: its path."""
    with tempfile.TemporaryFile() as file:
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def place_of_script(*, starts: bool) -> str:
    """The file where the main script, which ``starts`` the others, meets them; empty if Lightning starts no scripts."""
    path, places = os.environ.get(_MEETING_ENV, ""), (f"/proc/{os.getpid()}/", f"/proc/{os.getppid()}/")
    if starts and not path.startswith(places[0]):
        os.environ[_MEETING_ENV] = path = offer()
    return path if path.startswith(places) else ""


@contextlib.contextmanager
def meet_in(path: str, size: int) -> Iterator[None]:
    """Have torch's default group meet in a file, if one is given. Raises a ``LaunchError`` if it cannot be opened."""
    if not path or dist.is_initialized():
        yield
        return
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # stays open: torch opens the store's path whenever it reads
    except OSError as error:
        raise LaunchError(
            f"The file in which an island's processes meet cannot be opened: {error}. Expected its first process to "
            "run, as the same user and in the same container."
        ) from error
    files: Any = dist.FileStore(f"/proc/self/fd/{file}", size)  # type: ignore[attr-defined]
    store: Any = dist.PrefixStore(str(_met[path]), files)  # type: ignore[attr-defined]
    _met[path] += 1  # another group of this process finds nothing of the one before
    store.set_timeout(_PATIENCE)
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
