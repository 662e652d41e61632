"""Memory that processes of one user on one machine find by its name, and that is freed with the last of them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import pickle
import secrets
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_asgd.errors import ASGDError
from lightning_asgd.transports.shared_memory import host_identity

__all__ = ["NamedMemory", "name_of", "named_memory", "open_of"]

_ENTRY = 8  # bytes of a number
_PREFIX = "lightning-asgd "
_PATIENCE_S = 10.0  # making or finding memory takes milliseconds


class NamedMemory:
    """Numbers and, behind them, bytes in an anonymous file. Only pages that were written take memory.

    The file has no path. Other processes find it through the ``/proc`` entry of any process that has it, which the
    kernel allows to the same user only. Made by :func:`named_memory`.

    Attributes:
        found: whether another process had made it.
        file: descriptor of the file.
        bytes: of the whole file.
        numbers: the 64-bit integers at its beginning, all 0 at first.
        start: offset of the bytes behind them.
    """

    def __init__(self, name: str, numbers: int, nbytes: int) -> None:
        self._made_as = name, numbers, nbytes
        self.start = _ENTRY * numbers
        size = self.start + nbytes
        with _alone(name):
            file = _find(name, size)
            self.found = file is not None
            self.file = _make(name, size) if file is None else file
        self.bytes = mmap.mmap(self.file, size)
        self.numbers = memoryview(self.bytes)[: self.start].cast("q")
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return named_memory, self._made_as

    def __del__(self) -> None:
        if hasattr(self, "numbers"):
            self.numbers.release()
            self.bytes.close()
            os.close(self.file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other threads and processes out of the block."""
        with self._lock:  # among threads; the other is among processes
            fcntl.lockf(self.file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.file, fcntl.LOCK_UN)


_opened: weakref.WeakValueDictionary[tuple[str, int, int], NamedMemory] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def named_memory(name: str = "", numbers: int = 0, nbytes: int = 0) -> NamedMemory:
    """The memory of that name and size, which is made if no process has it.

    Without a name it is new. A process opens each memory once: its locks end when it closes any descriptor of the file.

    Raises:
        ASGDError: a process of another user keeps this user from looking for the name.
    """
    key = name or secrets.token_hex(16), numbers, nbytes
    with _opening:
        memory = _opened.get(key)
        if memory is None:
            memory = _opened[key] = NamedMemory(*key)
        return memory


class _Digest:
    """A file of which only a digest is kept."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return memoryview(data).nbytes


def name_of(*values: Any) -> str:
    """A name that processes of this machine have in common exactly if these values pickle to the same bytes.

    Raises what pickle raises.
    """
    digest = _Digest()
    # Processes in other network namespaces are on other machines.
    pickle.Pickler(digest, protocol=pickle.HIGHEST_PROTOCOL).dump((host_identity(), *values))
    return digest.hash.hexdigest()


def open_of(pid: int, descriptor: int, size: int) -> int | None:
    """A descriptor of a file that another process has open; None unless it is this user's and has this size."""
    try:
        file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(file)
    if found.st_uid == os.geteuid() and found.st_size == size:
        return file
    os.close(file)
    return None


def _make(name: str, size: int) -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create(_PREFIX + name)
    else:  # only processes that are forked share it
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file


def _find(name: str, size: int) -> int | None:
    link = f"/memfd:{_PREFIX}{name} (deleted)"
    for pid in filter(str.isdecimal, _entries("/proc")):
        for descriptor in _entries(f"/proc/{pid}/fd"):  # none of other users' processes, unless this user is root
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}") != link:
                    continue
                file = open_of(int(pid), int(descriptor), size)
                if file is not None:
                    return file
    return None


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Keep all other processes from making memory of that name; the system ends this with the process."""
    if not hasattr(os, "memfd_create"):
        yield
        return
    address, until = f"\0{_PREFIX}{os.geteuid()} {name}", time.monotonic() + _PATIENCE_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as turn:
        while True:
            try:
                turn.bind(address)
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise ASGDError(
                        f"Another process holds the name {address[1:]!r} of this machine for {_PATIENCE_S:g} s. "
                        "Expected milliseconds. Look for it in /proc/net/unix: it may be another user's."
                    ) from error
                time.sleep(0.002)
        yield
