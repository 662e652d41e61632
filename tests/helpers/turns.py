"""Functions that take turns: each in a thread of its own, one running at a time, in an order that the test chooses."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.futures import Future

MOST_TURNS = 50_000


class _Over(BaseException):
    """The turns have ended."""


@dataclass
class _Task:
    name: str
    function: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ended: bool = False
    error: BaseException | None = None


class Turns:
    """See the module's docstring.

    Args:
        seed: of the order.
        asleep: whether a task is not to be chosen now.
    """

    def __init__(self, seed: int, asleep: Callable[[str], bool] = lambda name: False) -> None:
        self.random = random.Random(seed)
        self._asleep = asleep
        self._tasks: list[_Task] = []
        self._back = threading.Semaphore(0)
        self._current: _Task | None = None
        self._over = False
        self.before_turn: Callable[[], None] = lambda: None
        """Called before every turn."""

    def add(self, name: str, function: Callable[[], None]) -> None:
        self._tasks.append(_Task(name, function))

    def run(self, ends: Callable[[], bool]) -> None:
        """Give turns until ``ends()``. What a task raises is raised here.

        Raises:
            AssertionError: it does not come to an end.
        """
        threads = [threading.Thread(target=self._live, args=(task,), name=task.name) for task in self._tasks]
        for thread in threads:
            thread.start()
        try:
            self._take_turns(ends)
        finally:
            self._over = True
            for task in self._tasks:
                task.go.release()
            for thread in threads:
                thread.join()

    def _take_turns(self, ends: Callable[[], bool]) -> None:
        for _ in range(MOST_TURNS):
            if ends():
                return
            self.before_turn()
            ready = [t for t in self._tasks if not t.ended and not self._asleep(t.name) and t.ready()]
            if not ready:
                continue
            self._give(self.random.choice(ready))
        waiting = [t.name for t in self._tasks if not t.ended]
        raise AssertionError(f"after {MOST_TURNS} turns {waiting} still wait for each other")

    def _give(self, task: _Task) -> None:
        """Let a task have its turn."""
        self._current = task
        task.go.release()
        self._back.acquire()
        if task.error is not None:
            raise task.error

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Let others have their turns, at least one, until a condition holds. Called by tasks."""
        task = self._current
        assert task is not None
        task.ready = condition
        self._back.release()
        task.go.acquire()
        if self._over:
            raise _Over

    def done_within(self, future: Future[Any], seconds: float) -> bool:
        """Stands in for :func:`lightning_asgd.core.worker.connection.done_within`; here nothing takes too long."""
        if not future.done():
            self.wait_until(future.done)
        return True

    def _live(self, task: _Task) -> None:
        task.go.acquire()
        try:
            if not self._over:
                task.function()
        except _Over:
            pass
        except BaseException as error:
            task.error = error
        task.ended = True
        self._back.release()
