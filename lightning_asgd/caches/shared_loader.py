"""Batches that are prepared once for several programs which train on the same data at the same time.

Coordinated preparation (Mohan et al. 2021, section 4.3): the trials of a search for hyper-parameters each need all
batches of an epoch, but one preparation of a batch serves them all. Each program prepares a part of the batches, and
takes the others from shared memory.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, MethodType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_asgd.caches.batch_board import NUMBERS, BatchBoard, Program, read_batch, write_batch
from lightning_asgd.caches.named_memory import name_of, named_memory
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError
from lightning_asgd.core.foundation.process_name import living_stat
from lightning_asgd.core.foundation.validation import whole

log = logging.getLogger(__name__)

_NOTHING = -1  # instead of a batch's number
_POLL_S = 0.002
_PAUSE_S = 0.01
_LOOK_S = 0.5  # between two looks at whether the others live
_OPTIONS = ("num_workers", "prefetch_factor", "worker_init_fn", "multiprocessing_context", "timeout")


class SharedLoader:
    """A dataloader that several programs on one machine have in common. They train on the same batches.

    Each of the programs makes the same loader: the same data set, batch size, order and seed. A batch is made by one of
    them, with its own loader processes, and taken by all. So random augmentation is new in every epoch, and the same
    for all programs. They begin together and stay within 16 batches of each other: the slowest program sets the pace.
    The others do not wait for a program that has ended. For a program that pauses between two epochs, to validate for
    instance, they wait up to ``patience_s``; :meth:`close` says that it trains no more. A program that starts later
    begins with a later epoch. Every program is a single worker, and has one loader of the same data at a time.

    Args:
        dataset: map-style.
        programs: how many are to begin together.
        batch_size: samples per batch.
        shuffle: whether every epoch has a random order, from ``seed``.
        drop_last: whether a last batch that is not full is left out.
        seed: of the order.
        collate_fn: makes a batch of a list of samples; torch's own by default.
        patience_s: seconds for which programs wait for others.
        name: programs of this user find each other by it, together with the numbers above. By default they do so by
            the pickled data set, and by the working directory if the data set holds a relative path that exists.
        options: of the :class:`torch.utils.data.DataLoader` that makes this program's batches: ``num_workers``,
            ``prefetch_factor``, ``worker_init_fn``, ``multiprocessing_context``, ``timeout``.

    Raises:
        ConfigurationError: the data set has no length, or neither can be pickled nor has a name; or a number or an
            option is wrong.

    Example:
        >>> loader = SharedLoader([1, 2, 3, 4, 5], programs=1, batch_size=2)
        >>> [batch.tolist() for batch in loader], len(loader)
        ([[1, 2], [3, 4], [5]], 3)
    """

    def __init__(
        self,
        dataset: Any,
        programs: int,
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        patience_s: float = 60.0,
        name: str = "",
        **options: Any,
    ) -> None:
        whole("programs", programs)
        whole("batch_size", batch_size)
        if unknown := [name for name in options if name not in _OPTIONS]:
            raise ConfigurationError(f"SharedLoader was given {', '.join(unknown)}. Expected {', '.join(_OPTIONS)}.")
        self.dataset, self.batch_size = dataset, batch_size
        self._programs, self._patience_s, self._options = programs, patience_s, options
        if not hasattr(os, "memfd_create"):
            raise ConfigurationError("SharedLoader needs Linux. Expected a DataLoader on this system.")
        found_by = _name_of(dataset, collate_fn, name, (batch_size, shuffle, drop_last, seed))
        self._batches = _Batches(dataset, batch_size, seed if shuffle else None, collate_fn, drop_last=drop_last)
        self._memory = named_memory(f"batches {found_by}", NUMBERS)
        patience_ms = int(1000 * patience_s)
        self._board = BatchBoard(self._memory.numbers, len(self), _is_alive, _now_ms, patience_ms)
        self._looked_at = 0.0
        self._met: bool  # whether it has found the others, or has begun without them
        self._making: _Making | None = None  # in an epoch
        self._made: dict[int, int] = {}  # descriptors of batches that others may still take
        self._begin_process()

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """An epoch of all programs."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            workers = torch.distributed.get_world_size()
            if workers > 1:
                raise ConfigurationError(
                    f"SharedLoader is used by one of {workers} workers, but would give all of them the same batches. "
                    "Expected programs with a single worker each."
                )
        if self._me.process != os.getpid():
            self._begin_process()
        self._end_epoch(self._making)  # the program may have left the loop over it
        with self._memory.locked():
            begun = self._board.join(self._me)
        end = begun + len(self)
        making = self._making = _Making(self, end)
        try:
            if not self._met:
                self._await_programs()
                self._met = True
            making.start()
            for number in range(begun, end):
                batch = self._take(number, making)
                with self._memory.locked():
                    self._board.take(self._me)
                if number + 1 == end:  # a program need not ask for a batch after the last one
                    self._making = None
                    making.stop()
                yield batch
        finally:
            self._end_epoch(making)

    def close(self) -> None:
        """The other programs do not wait for this one any more. It may begin another epoch nevertheless.

        Waits up to ``patience_s`` until they have taken what this program has made: a batch that another one makes is
        augmented in another way.
        """
        if self._me.process != os.getpid():  # a forked process, which has not begun an epoch
            return
        self._end_epoch(self._making)
        self._await_takers()
        self._leave(wait=True)

    def _begin_process(self) -> None:
        """Begin as a program of its own: this process was forked, or has made the loader."""
        self._me = Program(secrets.randbits(62) + 1, os.getpid(), _started(os.getpid()))
        self._making = None
        self._met = False
        for descriptor in self._made.values():  # of the parent process
            os.close(descriptor)
        self._made = {}

    def _end_epoch(self, making: _Making | None) -> None:
        """Leave an epoch before its end, if this program is in it."""
        if making is None or making is not self._making or self._me.process != os.getpid():
            return
        self._making = None
        making.stop()
        with self._memory.locked():
            self._board.skip(self._me, making.end)

    def _leave(self, *, wait: bool) -> None:
        with self._memory.locked(wait=wait):
            self._board.leave(self._me)
        self._close(list(self._made))

    def __getstate__(self) -> Any:
        raise TypeError("A SharedLoader cannot be pickled. Expected it to be made in the process that trains.")

    def __del__(self) -> None:
        if hasattr(self, "_made") and self._me.process == os.getpid():
            with suppress(BlockingIOError):  # this thread may have the lock; the others stop waiting after a while
                self._leave(wait=False)

    def _await_programs(self) -> None:
        """Wait for the others before the first batch of all."""
        until = time.monotonic() + self._patience_s
        while True:
            with self._memory.locked():
                present, begun = self._board.programs, self._board.has_begun
            if begun or present >= self._programs:
                return
            if time.monotonic() > until:
                log.warning(
                    "%d of %d programs have found each other after %g s. They begin; others join in a later epoch. If "
                    "all are there, give them the same name: SharedLoader(..., name=...).",
                    present,
                    self._programs,
                    self._patience_s,
                )
                return
            self._look()
            time.sleep(_POLL_S)

    def _await_takers(self) -> None:
        until = time.monotonic() + self._patience_s
        while time.monotonic() < until:
            with self._memory.locked():
                first = self._board.first
            self._close([made for made in self._made if made < first])
            if not self._made:
                return
            self._look()
            time.sleep(_POLL_S)

    def _take(self, number: int, making: _Making) -> Any:
        """A copy of a batch, as soon as a program has made it."""
        warned = time.monotonic()
        while True:
            with self._memory.locked():
                found, slowest = self._board.find(number), self._board.slowest
                taking = self._board.cursor(self._me)
            if making is not self._making or taking != number:
                raise ASGDError(
                    f"Batch {number} of a SharedLoader was asked for, but this program's next one is {taking}. "
                    "Expected one iterator at a time, and a process that the others can see."
                )
            if found is not None:
                try:
                    return read_batch(found.process, found.descriptor, found.nbytes, (found.key, number))
                except LookupError:  # its maker has ended, or has closed its loader
                    with self._memory.locked():
                        self._board.lost(number, found)
            if making.error is not None:
                raise making.error
            if time.monotonic() > warned + self._patience_s:
                warned = time.monotonic()
                log.warning(
                    "This process has waited %g s for a batch. Process %d is the slowest%s.",
                    self._patience_s,
                    slowest,
                    ", this one: it has another SharedLoader of the same data" if slowest == os.getpid() else "",
                )
            self._look()
            time.sleep(_POLL_S)

    def _look(self) -> None:
        """Find out, now and then, which programs live."""
        if time.monotonic() < self._looked_at + _LOOK_S:
            return
        self._looked_at = time.monotonic()
        with self._memory.locked():
            late = self._board.forget()
        for process in late:
            log.warning(
                "Process %d has paused for more than %g s between two epochs. The other programs do not wait for it; "
                "it joins them in a later epoch.",
                process,
                self._patience_s,
            )

    def _publish(self, number: int, batch: Any) -> None:
        descriptor, nbytes = write_batch(batch, (self._me.key, number))
        with self._memory.locked():
            wanted = self._board.publish(self._me, number, descriptor, nbytes)
            first = self._board.first
        self._made[number] = descriptor
        self._close([made for made in self._made if made < first or (made == number and not wanted)])

    def _close(self, numbers: list[int]) -> None:
        for number in numbers:
            os.close(self._made.pop(number))


class _Making:
    """This program's part of an epoch: a thread that claims batches, has its dataloader make them, and publishes them.

    The thread runs until this program's epoch ends: another program may end before it has made a batch it has claimed.
    """

    def __init__(self, loader: SharedLoader, end: int) -> None:
        self.end = end
        self.error: Exception | None = None
        self._loader = loader
        self._claimed = 0  # batches that are being made
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_asgd.batches", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def __iter__(self) -> Iterator[int]:
        """The batches to make, as a sampler. There may be none now, and one later."""
        loader = self._loader
        while not self._stopped.is_set():
            with loader._memory.locked():
                number = loader._board.claim(loader._me, self.end)
            if number is None and not self._claimed:  # else one that is made would wait for the next number
                self._stopped.wait(_PAUSE_S)
            self._claimed += number is not None
            yield _NOTHING if number is None else number

    def _run(self) -> None:
        loader = self._loader
        try:
            # Its seed is drawn from this generator: the program's own random numbers stay as they are.
            generator = torch.Generator().manual_seed((loader._me.key + self.end) % (1 << 62))
            options: Any = {"num_workers": 1, "generator": generator, "collate_fn": _same, **loader._options}
            options["worker_init_fn"] = partial(_begin, os.getpid(), options.get("worker_init_fn"))
            for number, batch in DataLoader(loader._batches, batch_size=None, sampler=self, **options):
                if self._stopped.is_set():
                    break
                if number != _NOTHING:
                    self._claimed -= 1
                    loader._publish(number, batch)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # which hold the loader processes
            self.error = error
            log.warning("This program cannot prepare its batches for a SharedLoader.", exc_info=error)
        finally:
            with loader._memory.locked():
                loader._board.give_back(loader._me)


def _begin(parent: int, initialize: Callable[[int], None] | None, number: int) -> None:
    """Begin a loader process; end it if its program was killed meanwhile, which torch would not notice."""
    if initialize is not None:
        initialize(number)
    if living_stat(parent) is None:
        os._exit(1)


class _Batches(Dataset[Any]):
    """A data set of batches, by their numbers through all epochs."""

    def __init__(
        self, dataset: Any, size: int, seed: int | None, collate: Callable[[list[Any]], Any], *, drop_last: bool
    ) -> None:
        self._dataset, self._size, self._seed, self._collate = dataset, size, seed, collate
        samples = len(dataset)
        self._count = samples // size if drop_last else math.ceil(samples / size)
        if not self._count:
            raise ConfigurationError(f"The data set has {samples} samples. Expected at least a batch of {size}.")
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[int, Any]:
        if number == _NOTHING:
            return number, None
        epoch, place = divmod(number, self._count)
        indices = self._order_of(epoch)[place * self._size : (place + 1) * self._size]
        many = getattr(self._dataset, "__getitems__", None)
        return number, self._collate(many(indices) if many else [self._dataset[index] for index in indices])

    def _order_of(self, epoch: int) -> list[int]:
        if self._seed is None:
            return list(range(len(self._dataset)))
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._order = epoch, torch.randperm(len(self._dataset), generator=generator).tolist()
        return self._order[1]


def _same(made: Any) -> Any:
    return made


def _name_of(dataset: Any, collate_fn: Any, name: str, settings: tuple[Any, ...]) -> str:
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigurationError(
            f"SharedLoader was given {type(dataset).__name__}. Expected a map-style dataset, with a length."
        )
    try:
        return name_of(name or dataset, len(dataset), *settings, _identity(collate_fn), anywhere=bool(name))
    except Exception as error:  # whatever a class raises
        if name:
            return name_of(name, len(dataset), *settings, getattr(collate_fn, "__qualname__", ""), anywhere=True)
        raise ConfigurationError(
            f"{type(dataset).__name__} or its collate_fn cannot be pickled: {error}. Expected that both can, or a "
            "name: programs find each other by it."
        ) from error


def _identity(collate_fn: Any) -> Any:
    """What tells it from others: a function's name, and of a local one its code and variables; else the object."""
    if isinstance(collate_fn, MethodType):
        return collate_fn.__qualname__, collate_fn.__self__
    if not hasattr(collate_fn, "__qualname__"):
        return collate_fn
    code = getattr(collate_fn, "__code__", None)
    if code is None or "<" not in collate_fn.__qualname__:
        return collate_fn.__module__, collate_fn.__qualname__
    given = [cell.cell_contents for cell in collate_fn.__closure__ or ()], collate_fn.__defaults__
    return collate_fn.__module__, collate_fn.__qualname__, _of_code(code), given, collate_fn.__kwdefaults__


def _of_code(code: CodeType) -> Any:
    constants = [_of_code(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    return code.co_code, code.co_names, constants


def _started(process: int) -> int:
    """When a process began, in ticks since the machine did; 0 if it has ended. A change of the clock does not count."""
    fields = living_stat(process)
    return 0 if fields is None else int(fields[19])


def _is_alive(process: int, started: int) -> bool:
    try:
        return _started(process) == started
    except OSError:  # the system does not say
        return True


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
