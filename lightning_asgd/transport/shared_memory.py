"""Memory that a worker and a server of the same machine both see, so that weights need not be sent at all.

A block is an anonymous file (``memfd_create``): it has no name, so nothing is left behind whatever ends a process. The
server opens it through the worker's ``/proc`` entry, which the kernel allows to the same user only. A header with
random bytes tells a stale reference. Where any of this does not work, :func:`attach` says so and tensors are sent by
value.
"""

from __future__ import annotations

import mmap
import os
import secrets
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.layout import dtype_from_name
from lightning_asgd.messages import Role, SharedRef

__all__ = ["SharedBlock", "attach", "create", "host_identity"]

_HEADER = 64  # bytes: 16 of nonce, the rest keeps the tensors aligned to a cache line
_ALIGN = 64

Groups = Sequence[tuple[Role, str, int]]


class SharedBlock:
    """A mapped block and one tensor per group in it. Made by :func:`create` and :func:`attach`."""

    def __init__(self, fd: int, nbytes: int, groups: Groups, ref: SharedRef) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, nbytes)
        self.ref = ref
        self.tensors: tuple[Tensor, ...] = tuple(_views(self._map, groups))

    @property
    def nonce(self) -> bytes:
        """Random bytes at the block's start."""
        return self._map[:16]

    def write_nonce(self, nonce: bytes) -> None:
        """Put the bytes that :func:`attach` will compare."""
        self._map[:16] = nonce

    def close(self) -> None:
        """Give the block back. The memory goes once no tensor refers to it any more."""
        self.tensors = ()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def host_identity() -> str:
    """Equal for two processes exactly if they share kernel, process namespace and network namespace.

    Processes in different network namespaces count as different machines, as containers do: what passes between them
    belongs on the network.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    except OSError:
        return ""
    return f"{boot}/{spaces[0]}/{spaces[1]}"


def create(groups: Groups) -> SharedBlock | None:
    """Make a block for one shard.

    Args:
        groups: ``(role, dtype name, number of scalars)`` per group.

    Returns:
        the block, or None where the system cannot make one.
    """
    host = host_identity()
    if not host or not hasattr(os, "memfd_create"):
        return None
    nbytes = _size(groups)
    try:
        fd = os.memfd_create("lightning_asgd")
        os.ftruncate(fd, nbytes)
    except OSError:
        return None
    nonce = secrets.token_bytes(16)
    block = SharedBlock(fd, nbytes, groups, SharedRef(host, os.getpid(), fd, nonce, nbytes))
    block.write_nonce(nonce)
    return block


def attach(ref: SharedRef, groups: Groups) -> SharedBlock | None:
    """Map a block that another process made.

    Returns:
        the block, or None if it cannot be reached from here or is not the one that was meant.
    """
    if ref.host != host_identity() or ref.nbytes != _size(groups):
        return None
    try:
        fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", os.O_RDWR)
    except OSError:
        return None
    block: SharedBlock | None = None
    if os.fstat(fd).st_size == ref.nbytes:
        block = SharedBlock(fd, ref.nbytes, groups, ref)
        if block.nonce == ref.nonce:
            return block
    os.close(fd)
    return None


def _size(groups: Groups) -> int:
    return _HEADER + sum(_padded(n * dtype_from_name(dtype).itemsize) for _, dtype, n in groups)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _views(buffer: mmap.mmap, groups: Groups) -> list[Tensor]:
    views: list[Tensor] = []
    offset = _HEADER
    for _, name, n in groups:
        dtype = dtype_from_name(name)
        if n == 0:
            views.append(torch.empty(0, dtype=dtype))
            continue
        source: Any = buffer
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of read-only buffers for some Python versions
            views.append(torch.frombuffer(source, dtype=dtype, count=n, offset=offset))
        offset += _padded(n * dtype.itemsize)
    return views
