"""Memory that processes of one user on one machine find by its name, and that is freed with the last of them."""

from __future__ import annotations

import contextlib
import errno
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
from pathlib import PosixPath
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.core.calls.shared_memory import host_identity
from lightning_asgd.core.foundation.errors import ASGDError

_ENTRY = 8  # bytes of a number
_PREFIX = "lightning-asgd "
_PATIENCE_S = 10.0  # making or finding memory takes milliseconds
_LOOKS = 1000  # at different texts that may be paths: each may be a question to a file server


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

    def __init__(self, name: str, numbers: int, nbytes: int, *, shared: bool) -> None:
        self._made_as = name, numbers, nbytes
        self.start = _ENTRY * numbers
        size = self.start + nbytes
        file = _find(name, size) if shared else None
        self.found = file is not None
        if file is None:
            with _alone(name) if shared else contextlib.nullcontext():
                file = _find(name, size) if shared else None  # once more: another process may have made it
                self.found = file is not None
                file = _make(name, size) if file is None else file
        self.file: int = file
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
    def locked(self, *, wait: bool = True) -> Iterator[None]:
        """Keep all other threads and processes out of the block.

        Raises a ``BlockingIOError`` if another thread, or this one, has it already and there is to be no waiting.
        """
        if not self._lock.acquire(blocking=wait):  # among threads; the other is among processes
            raise BlockingIOError(errno.EAGAIN, "a thread of this process has the lock")
        try:
            self._lock_file()
            try:
                yield
            finally:
                fcntl.lockf(self.file, fcntl.LOCK_UN)
        finally:
            self._lock.release()

    def _lock_file(self) -> None:
        while True:
            try:
                fcntl.lockf(self.file, fcntl.LOCK_EX)
                return
            except OSError as error:
                # Processes whose threads wait for each other's memories look like a deadlock to the system.
                if error.errno != errno.EDEADLK:
                    raise
                time.sleep(0.001)

    def renew_lock(self) -> None:
        """In a forked process, whose parent's threads are not there to release it."""
        self._lock = threading.Lock()


_opened: weakref.WeakValueDictionary[tuple[str, int, int], NamedMemory] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def _after_fork() -> None:
    global _opening
    _opening = threading.Lock()
    for memory in list(_opened.values()):
        memory.renew_lock()


os.register_at_fork(after_in_child=_after_fork)


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
            memory = _opened[key] = NamedMemory(*key, shared=bool(name))
        return memory


class _NamePickler(pickle.Pickler):
    """Also notes whether the values depend on the working directory: whether they hold a relative path that exists."""

    def __init__(self, file: Any, looks: int) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.relative = False
        self._looks = looks  # at most
        self._seen: set[str | bytes] = set()

    def persistent_id(self, value: Any) -> None:
        """Look at a value that may be a path, and have it pickled as usual."""
        if self.relative or len(self._seen) >= self._looks:
            return
        if isinstance(value, str) or hasattr(type(value), "__fspath__"):
            try:
                path = os.fspath(value)
            except Exception:  # whatever a class raises
                return
            if path and path not in self._seen:
                self._seen.add(path)
                self.relative = not os.path.isabs(path) and os.path.exists(path)

    def reducer_override(self, value: Any) -> Any:
        """Of a tensor, what it holds: torch's pickles of equal tensors differ. A path as a whole, not its parts."""
        if type(value) is PosixPath:
            return PosixPath, (str(value),)
        if isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu":
            flat = value.detach().contiguous().reshape(-1)
            return tuple, ((str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()),)
        return NotImplemented


class _Digest:
    """A file of which only a digest is kept."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return memoryview(data).nbytes


def name_of(*values: Any, anywhere: bool = False) -> str:
    """A name that processes of this machine have in common exactly if these values pickle to the same bytes.

    If the values hold a relative path of something that exists, the processes must have the same working directory
    too, unless ``anywhere``. Raises what pickle raises.
    """
    digest = _Digest()
    pickler = _NamePickler(digest, 0 if anywhere else _LOOKS)
    # Processes in other network namespaces are on other machines.
    pickler.dump((host_identity(), *values))
    if pickler.relative:
        digest.write(os.fsencode(os.getcwd()))
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
    # Not in this process: to close a descriptor of a file that it has open already would end its locks.
    for pid in {each for each in _entries("/proc") if each.isdecimal()} - {str(os.getpid())}:
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
