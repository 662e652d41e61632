"""Which program makes which batch, and where a batch is: numbers that all programs share.

Batches are numbered through all epochs. A program's *cursor* is the next batch that it takes. Programs make at most a
*window* of batches, from the smallest cursor on. Batches below all cursors are over.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_asgd.caches.named_memory import open_of
from lightning_asgd.core.foundation.errors import ASGDError

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


_PROGRAMS = 64
_WINDOW = 16  # batches
_PROGRAM = 5  # numbers: key, process, its start, cursor, since when it is between two epochs
_CURSOR, _SINCE = 3, 4
_BATCH = 6  # numbers: batch + 1, its maker's key, process and start, descriptor + 1 once it is made, bytes
_MAKER, _DESCRIPTOR, _NBYTES = 1, 4, 5
_SLOTS = 1 + _PROGRAMS * _PROGRAM
NUMBERS = _SLOTS + _WINDOW * _BATCH
"""How many numbers there are; all 0 at first."""


@dataclass(frozen=True)
class Found:
    """A batch that is made: a file that a process has open."""

    process: int
    descriptor: int
    nbytes: int
    key: int  # of the program that has made it


@dataclass(frozen=True)
class Program:
    """A program that takes part. ``key`` is not 0, and no other has it."""

    key: int
    process: int
    started: int


class BatchBoard:
    """All methods are called by one program at a time. The ``numbers`` are shared by the programs.

    ``now_ms`` is a clock that all share, never 0; others wait ``patience_ms`` for a program between two epochs.
    """

    def __init__(
        self,
        numbers: memoryview[int] | list[int],
        per_epoch: int,
        is_alive: Callable[[int, int], bool],
        now_ms: Callable[[], int],
        patience_ms: int,
    ) -> None:
        self._numbers = numbers
        self._per_epoch = per_epoch
        self._is_alive, self._now_ms, self._patience_ms = is_alive, now_ms, patience_ms

    # ------------------------------------------------------------------ programs

    @property
    def programs(self) -> int:
        """How many take part."""
        return sum(1 for _ in self._programs())

    @property
    def has_begun(self) -> bool:
        """Whether a batch was claimed by those that take part."""
        return self.programs > 1 and self._numbers[0] > 0

    def cursor(self, program: Program) -> int:
        """The next batch that the program takes; 0 if it does not take part."""
        at = self._at(program.key)
        return 0 if at is None else self._numbers[at + _CURSOR]

    def join(self, program: Program) -> int:
        """Begin an epoch, with the others if they wait for it. Returns the number of its first batch."""
        at = self._at(program.key)
        if at is None:
            at = self._at(0)
            if at is None:
                raise ASGDError(f"{_PROGRAMS} programs share a SharedLoader. Expected at most as many.")
            self._numbers[at + _CURSOR] = math.ceil(self._numbers[0] / self._per_epoch) * self._per_epoch
            self._write(at, program.key, program.process, program.started)
        self._numbers[at + _SINCE] = 0
        return self._numbers[at + _CURSOR]

    def take(self, program: Program) -> None:
        """The program has a copy of the batch at its cursor. At the end of an epoch it is between two epochs."""
        at = self._at(program.key)
        if at is None:
            return
        self._numbers[at + _CURSOR] += 1
        if self._numbers[at + _CURSOR] % self._per_epoch == 0:
            self._numbers[at + _SINCE] = self._now_ms()

    def skip(self, program: Program, end: int) -> None:
        """The program takes no more batches before ``end``, where its epoch ends: it is between two epochs."""
        at = self._at(program.key)
        if at is not None and self._numbers[at + _CURSOR] < end:
            self._numbers[at + _CURSOR], self._numbers[at + _SINCE] = end, self._now_ms()

    def leave(self, program: Program) -> None:
        """The others wait for it no longer. What it has made is gone, and they make it again."""
        at = self._at(program.key)
        if at is not None:
            self._numbers[at] = 0
        for at in self._batches():
            if self._numbers[at + _MAKER] == program.key:
                self._numbers[at] = 0

    @property
    def slowest(self) -> int:
        """The process of a program whose cursor is the smallest; 0 if there is none."""
        return min(((self._numbers[at + _CURSOR], self._numbers[at + 1]) for at in self._programs()), default=(0, 0))[1]

    def forget(self) -> list[int]:
        """Drop programs that have ended, and await no more those that pause too long. Returns the latter."""
        late = []
        for at in list(self._programs()):
            _, process, started, _, since = self._numbers[at : at + _PROGRAM]
            alive = self._is_alive(process, started)
            pauses = alive and since and self._now_ms() - since > self._patience_ms
            if pauses:
                late.append(process)
            if pauses or not alive:
                self._numbers[at] = 0
        for at in self._batches():
            number, _, process, started = self._numbers[at : at + _DESCRIPTOR]
            if number and not self._is_alive(process, started):
                self._numbers[at] = 0
        return late

    # ------------------------------------------------------------------ batches

    @property
    def first(self) -> int:
        """The batch that the last of the programs takes next."""
        return min((self._numbers[at + _CURSOR] for at in self._programs()), default=self._numbers[0])

    def claim(self, program: Program, end: int) -> int | None:
        """A batch before ``end`` that the program is to make; None if there is none at present."""
        first = self.first
        self._numbers[0] = max(self._numbers[0], first)
        for number in range(first, min(first + _WINDOW, end)):
            at = self._slot(number)
            if self._numbers[at] != number + 1:
                self._numbers[at + _DESCRIPTOR] = 0
                self._write(at, number + 1, program.key, program.process, program.started)
                self._numbers[0] = max(self._numbers[0], number + 1)
                return number
        return None

    def give_back(self, program: Program) -> None:
        """The program does not make what it has claimed."""
        for at in self._batches():
            if self._numbers[at + _MAKER] == program.key and not self._numbers[at + _DESCRIPTOR]:
                self._numbers[at] = 0

    def publish(self, program: Program, number: int, descriptor: int, nbytes: int) -> bool:
        """The program has made a batch that it had claimed. Returns whether it is still wanted."""
        at = self._slot(number)
        if (self._numbers[at], self._numbers[at + _MAKER]) != (number + 1, program.key):
            return False
        self._numbers[at + _NBYTES] = nbytes
        self._numbers[at + _DESCRIPTOR] = descriptor + 1
        return True

    def find(self, number: int) -> Found | None:
        """Where a batch is; None if it is not made yet."""
        at = self._slot(number)
        mine, key, process, _, descriptor, nbytes = self._numbers[at : at + _BATCH]
        return Found(process, descriptor - 1, nbytes, key) if mine == number + 1 and descriptor else None

    def lost(self, number: int, found: Found) -> None:
        """A batch is not where it was found: another program is to make it."""
        if self.find(number) == found:
            self._numbers[self._slot(number)] = 0

    # ------------------------------------------------------------------ places

    def _programs(self) -> Iterator[int]:
        return (at for at in range(1, _SLOTS, _PROGRAM) if self._numbers[at])

    def _batches(self) -> range:
        return range(_SLOTS, NUMBERS, _BATCH)

    def _at(self, key: int) -> int | None:
        return next((at for at in range(1, _SLOTS, _PROGRAM) if self._numbers[at] == key), None)

    def _slot(self, number: int) -> int:
        return _SLOTS + number % _WINDOW * _BATCH

    def _write(self, at: int, first: int, *rest: int) -> None:
        """The first number comes last: a program that ends before has written nothing."""
        for place, number in enumerate(rest, at + 1):
            self._numbers[place] = number
        self._numbers[at] = first
