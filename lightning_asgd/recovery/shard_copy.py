"""A shard's vectors at one version, copied piece by piece while pushes continue. No network, no clock, no threads.

Copying the whole shard under the server's lock would make every exchange wait for it. Instead a piece that is about to
change is copied first, and all others are copied one at a time, with the lock released in between.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import mmap
import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from lightning_asgd.core.server.group_rules import CHUNK
from lightning_asgd.core.server.shard import Shard

_PAUSE_S = 0.001  # between two pieces, in which another thread gets the lock
_POPULATE_WRITE = 23  # for madvise, of Linux 5.14; Python has no name for it


class ShardCopy:
    """Copies of a shard's vectors; the memory is filled later. A *piece* is a range of a group's vectors."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        # By group and first scalar of a piece: copies, originals, and the originals' first scalars.
        self._pieces: dict[tuple[int, int], list[tuple[Tensor, Tensor, int]]] = {}
        self.left: dict[tuple[int, int], None] = {}
        """The pieces that are not copied yet: group and first scalar."""

    def of(self, group: int, value: Any, first: int = 0) -> Any:
        """The copy of something that a shard keeps for a group: its vectors piece by piece, the rest at once.

        ``first`` is the first of the group's scalars that the vectors are about.
        """
        if isinstance(value, Tensor) and value.dim() == 1:
            made = value.new_empty(value.shape)
            self._copies.append(made)
            for start in _pieces(first, first + value.numel()):
                self._pieces.setdefault((group, start), []).append((made, value, first))
                self.left[group, start] = None
            return made
        if isinstance(value, dict):
            return {key: self.of(group, each, first) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)([self.of(group, each, first) for each in value])
        return copy.deepcopy(value)

    def populate(self) -> None:
        """Have the kernel provide the copies' memory now. Pushes that arrive during a snapshot then take less time."""
        for made in self._copies:
            begin = -(-made.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            whole = (made.data_ptr() + made.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
            with contextlib.suppress(AttributeError, OSError):  # not Linux; an older kernel only reports an error
                if whole > 0:
                    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(whole), _POPULATE_WRITE)

    def before_change(self, group: int, part: slice) -> None:
        """Copy the pieces of a part of a group's vectors, unless they are copied already."""
        for start in _pieces(part.start, part.stop):
            self._copy(group, start)

    def step(self) -> None:
        """Copy one piece more."""
        if self.left:
            self._copy(*next(iter(self.left)))

    def finish(self) -> None:
        """Copy all that is left."""
        while self.left:
            self.step()

    def _copy(self, group: int, start: int) -> None:
        if (group, start) not in self.left:
            return
        del self.left[group, start]
        for made, value, first in self._pieces.pop((group, start)):
            where = slice(max(start - first, 0), start + CHUNK - first)
            made[where].copy_(value[where])


def copied(shard: Shard) -> tuple[dict[str, Any], ShardCopy]:
    """A shard's snapshot, and the copy whose progress fills it."""
    made = ShardCopy()
    return shard.snapshot(made), made


def _pieces(first: int, end: int) -> range:
    """The first scalars of the pieces that hold some of a range."""
    return range(first // CHUNK * CHUNK, end, CHUNK)


def complete(copies: Collection[ShardCopy], lock: AbstractContextManager[Any]) -> None:
    """Copy what is left, holding the lock for one piece at a time."""
    for each in copies:
        each.populate()
        while each.left:
            with lock:
                each.step()
            time.sleep(_PAUSE_S)
