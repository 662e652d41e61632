"""Memory that a worker and a server on the same machine both map, so that weights need not be sent.

A block is an anonymous file (``memfd_create``): it has no name, so nothing is left behind whatever ends a process. The
server opens it through the worker's ``/proc`` entry, which the kernel allows to the same user only. A header with
random bytes shows whether a reference is stale. Where any of this does not work, :func:`attach` returns None, and
tensors are sent by value.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.core.foundation.layout import Groups, dtype_from_name
from lightning_asgd.core.protocol import SharedRef

_NONCE = 16  # bytes
_HEADER = 64  # bytes: the nonce, and then up to the next cache line
_ALIGN = 64

_madvise = getattr(ctypes.CDLL(None), "madvise", lambda *_: -1)


class SharedBlock:
    """A mapped block with one tensor per group. Made by :func:`create` and :func:`attach`.

    The process that made the block gives its descriptor ``fd``, which is closed with it.
    """

    def __init__(self, ref: SharedRef, path: str, groups: Groups, fd: int | None = None) -> None:
        storage: Any = torch.UntypedStorage.from_file(path, shared=True, nbytes=ref.nbytes)
        self._fd = fd
        self._start = storage.data_ptr()
        self._nonce: Tensor | None = _view(storage, torch.uint8, 0, _NONCE)
        self.ref = ref
        self.tensors: tuple[Tensor, ...] = tuple(_views(storage, groups))

    @property
    def span(self) -> tuple[int, int]:
        """Address of its first byte in this process, and its number of bytes."""
        return self._start, self.ref.nbytes

    @property
    def nonce(self) -> bytes:
        """Random bytes at the block's start."""
        return b"" if self._nonce is None else bytes(self._nonce.tolist())

    def write_nonce(self, nonce: bytes) -> None:
        """Write the bytes that :func:`attach` compares."""
        if self._nonce is not None:
            self._nonce.copy_(torch.tensor(list(nonce), dtype=torch.uint8))

    def unmap(self) -> None:
        """Take the block's pages out of this process; they stay in the file, and the next access maps them again.

        A server keeps one worker's block mapped at a time: the blocks of all workers would count as its memory.
        """
        if self.tensors and hasattr(mmap, "MADV_DONTNEED"):
            _madvise(ctypes.c_void_p(self._start), ctypes.c_size_t(self.ref.nbytes), mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Release the block. Its memory is freed once no tensor refers to it any more."""
        self.tensors = ()
        self._nonce = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def host_identity() -> str:
    """Equal for two processes exactly if they share kernel, process namespace and network namespace.

    Processes in different network namespaces count as different machines, as containers do: what passes between them
    should go over the network.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    except OSError:
        return ""
    return f"{boot}/{spaces[0]}/{spaces[1]}"


def create(groups: Groups) -> SharedBlock | None:
    """Make a block for one shard; None where the system does not support it."""
    host = host_identity()
    if not host or not hasattr(os, "memfd_create"):
        return None
    nbytes = _size(groups)
    fd = -1
    try:
        fd = os.memfd_create("lightning_asgd")
        os.ftruncate(fd, nbytes)
        ref = SharedRef(host, os.getpid(), fd, secrets.token_bytes(_NONCE), nbytes)
        block = SharedBlock(ref, f"/proc/self/fd/{fd}", groups, fd)
    except (OSError, RuntimeError):
        if fd >= 0:
            os.close(fd)
        return None
    block.write_nonce(ref.nonce)
    return block


def attach(ref: SharedRef, groups: Groups) -> SharedBlock | None:
    """Map a block that another process made; None if this process cannot reach it, or the reference is stale."""
    if ref.host != host_identity() or ref.nbytes != _size(groups):
        return None
    if type(ref.pid) is not int or type(ref.fd) is not int:  # else they could name the path of any file
        return None
    path = f"/proc/{ref.pid}/fd/{ref.fd}"
    try:
        if os.stat(path).st_size != ref.nbytes:
            return None
        block = SharedBlock(ref, path, groups)
    except (OSError, RuntimeError):
        return None
    return block if block.nonce == ref.nonce else None


def _size(groups: Groups) -> int:
    return _HEADER + sum(_padded(n * dtype_from_name(dtype).itemsize) for _, dtype, n in groups)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _views(storage: Any, groups: Groups) -> list[Tensor]:
    views: list[Tensor] = []
    offset = _HEADER
    for _, name, n in groups:
        dtype = dtype_from_name(name)
        views.append(_view(storage, dtype, offset, n))
        offset += _padded(n * dtype.itemsize)
    return views


def _view(storage: Any, dtype: torch.dtype, offset: int, n: int) -> Tensor:
    tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(storage, offset // dtype.itemsize, (n,), (1,))
