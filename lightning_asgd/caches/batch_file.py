"""A batch as an anonymous file, which other processes of this user read."""

from __future__ import annotations

import io
import mmap
import os
import pickle
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_asgd.caches.named_memory import open_of

_NUMBER = 8  # bytes


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Tensors lie beside the pickle instead of in it, where NumPy knows their type."""
        if type(value) is Tensor and value.layout is torch.strided and value.device.type == "cpu":
            try:
                return torch.from_numpy, (value.detach().contiguous().numpy(),)
            except (TypeError, RuntimeError):  # such as of bfloat16, or a view that is conjugate
                return NotImplemented
        return NotImplemented


def write_batch(batch: Any, tag: tuple[int, int]) -> tuple[int, int]:
    """A descriptor of a new file, and its bytes: the tag, the number of parts, their sizes, the pickle, the tensors."""
    pickled, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(pickled, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(batch)
    parts = [memoryview(pickled.getbuffer()), *(buffer.raw() for buffer in buffers)]
    head = [*tag, len(parts), *(part.nbytes for part in parts)]
    descriptor = os.memfd_create("lightning-asgd batch")
    with open(descriptor, "wb", closefd=False, buffering=0) as file:
        for part in [numpy.array(head, numpy.int64).data, *parts]:
            left = part.cast("B") if part.nbytes else memoryview(b"")
            while left.nbytes:
                left = left[file.write(left) :]
        return descriptor, file.tell()


def read_batch(process: int, descriptor: int, nbytes: int, tag: tuple[int, int]) -> Any:
    """A copy of the batch in another process's file. Raises a ``LookupError`` if it is not there any more."""
    file = open_of(process, descriptor, nbytes)
    if file is None:
        raise LookupError(f"process {process} has no such batch")
    try:
        with mmap.mmap(file, nbytes, prot=mmap.PROT_READ) as memory, memoryview(memory) as whole:
            *found, count = whole[: 3 * _NUMBER].cast("q").tolist()
            if tuple(found) != tag:
                raise LookupError(f"process {process} has another batch there")
            first, start = 3 * _NUMBER, (3 + count) * _NUMBER
            parts = []
            for size in whole[first:start].cast("q").tolist():
                parts.append(bytearray(whole[start : start + size]))
                start += size
            return pickle.loads(parts[0], buffers=parts[1:])
    finally:
        os.close(file)
