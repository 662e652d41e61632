"""Every call is answered once, however often it comes: a connection that breaks takes calls and answers with it.

Whoever calls numbers its calls, sends those again that were not answered, and tells which were. So the other side knows
a call that it has seen before, and keeps an answer until it has arrived.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torch.futures import Future

__all__ = ["Arrivals", "ReplyCache"]

_FORGET_S = 600.0  # signs of life come every few seconds
_MOST = 1024  # answers that have not arrived, per caller: a worker has as many under way as a module has layers
_LATE = 4096  # calls that are known to be over, per caller: a copy of one may still come


@dataclass
class _Caller:
    heard: float
    calls: dict[int, Future[Any]] = field(default_factory=dict)
    over: dict[int, None] = field(default_factory=dict)  # in order


class Arrivals:
    """The caller's side: the calls whose answers have arrived, and the other side was not told so. From any thread.

    It takes no lock: whoever holds one may wait for the thread that brings an answer.
    """

    def __init__(self) -> None:
        self._numbers: deque[int] = deque()

    def note(self, *numbers: int) -> None:
        """Tell it with the next call."""
        self._numbers.extend(numbers)

    def take(self) -> list[int]:
        """What is to be told now. Noted again if that comes to nothing."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._numbers.popleft())
        return taken


class ReplyCache:
    """The calls that were answered, or are to be, until their callers have the answers.

    Args:
        clock: seconds, monotonic; given by tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._callers: dict[str, _Caller] = {}

    def answer(self, caller: str, number: int, arrived: Collection[int], handle: Callable[[], Any]) -> Future[Any]:
        """The answer to a call, which is handled if it is new. From any thread.

        Args:
            caller: who calls; unique.
            number: of the call; unique for the caller.
            arrived: numbers of calls whose answers have arrived.
            handle: answers the call, with a value or a future.
        """
        with self._lock:
            known = self._forget(caller, arrived)
            calls = known.calls
            if number in known.over:  # nobody waits for it
                nothing: Future[Any] = Future()
                nothing.set_result(None)
                return nothing
            before = calls.get(number)
            if before is not None:
                return before
            if len(calls) >= _MOST:
                for old in [n for n, call in calls.items() if call.done()][: len(calls) // 2]:
                    del calls[old]
            future = calls[number] = Future()
        try:
            answer = handle()
        except Exception as error:
            future.set_exception(error)
            return future
        if isinstance(answer, Future):
            answer.add_done_callback(lambda done: _copy(done, future))
        else:
            future.set_result(answer)
        return future

    def forget(self, caller: str, arrived: Collection[int]) -> None:
        """Keep answers no longer that have arrived."""
        with self._lock:
            self._forget(caller, arrived)

    def _forget(self, caller: str, arrived: Collection[int]) -> _Caller:
        now = self._clock()
        known = self._callers.setdefault(caller, _Caller(now))
        known.heard = now
        for name, other in list(self._callers.items()):
            if now - other.heard > _FORGET_S and all(call.done() for call in other.calls.values()):
                del self._callers[name]
        for number in arrived:
            if known.calls.pop(number, None) is not None:
                known.over[number] = None
        while len(known.over) > _LATE:
            del known.over[next(iter(known.over))]
        return known


def _copy(done: Future[Any], to: Future[Any]) -> None:
    try:
        to.set_result(done.value())
    except Exception as error:
        to.set_exception(error)
