"""Every order in which things can happen: depth-first, by running a world again and again from its beginning.

A world is run along a path of choices. Where the path ends it goes on with the first choice at every further state, and
the others are noted, to be run later. A state that was reached before is left: what follows it is known. Two states are
taken for the same if their fingerprints are; so orders that differ only in what cannot be told apart afterwards,
such as of messages to different servers, are followed once (partial-order reduction by state matching).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, Protocol

from torch import Tensor
from torch.futures import Future

from lightning_asgd.core.server.service import Service
from tests.helpers.turns import Turns

MOST_EVENTS = 500  # of an order

__all__ = ["Actors", "Explored", "explore", "fingerprint"]


class Run(Protocol):
    """One run of a world."""

    def run(self, choose: Callable[[list[Any], Callable[[], Hashable]], Any]) -> None:
        """Run, and ask which of the possible events comes next; the function gives the state's fingerprint.

        ``choose`` returns None where the run is to end.
        """


@dataclass
class Explored:
    """How much there was."""

    states: int = 0
    runs: int = 0  # from the beginning
    orders: int = 0  # of them, those that came to an end by themselves
    longest: int = 0  # events of an order
    complete: bool = True  # whether there is nothing else
    seen: set[Hashable] = field(default_factory=set)


def explore(world: Callable[[], Run], most_runs: int | None = None) -> Explored:
    """Run a world in every order.

    Args:
        world: makes one, always the same.
        most_runs: after which it ends incompletely.

    Raises:
        AssertionError: what a run raised, with the order of events.
    """
    found = Explored()
    todo: list[list[int]] = [[]]
    while todo:
        if found.runs == most_runs:
            found.complete = False
            break
        path = todo.pop()
        _follow(world(), path, todo, found)
        found.runs += 1
    return found


def _follow(run: Run, path: list[int], todo: list[list[int]], found: Explored) -> None:
    taken: list[int] = []
    names: list[Any] = []

    def choose(events: list[Any], state: Callable[[], Hashable]) -> Any:
        if len(taken) < len(path):
            index = path[len(taken)]
        else:
            key = state()
            if key in found.seen:
                return None
            found.seen.add(key)
            found.states += 1
            if not events:
                found.orders += 1
                found.longest = max(found.longest, len(taken))
                return None
            todo.extend([*taken, other] for other in range(len(events) - 1, 0, -1))
            index = 0
        assert len(taken) < MOST_EVENTS, "it does not come to an end"
        taken.append(index)
        names.append(events[index])
        return events[index]

    try:
        run.run(choose)
    except Exception as error:
        raise AssertionError(f"{error}\nafter {len(names)} events: " + "; ".join(map(str, names))) from error


class Actors(Turns):
    """Tasks that run whenever they can: what may come in another order is decided elsewhere."""

    def __init__(self) -> None:
        super().__init__(0)
        self.stopped: set[str] = set()

    def _take_turns(self, ends: Callable[[], bool]) -> None:
        while True:
            while ready := [t for t in self._tasks if not t.ended and t.name not in self.stopped and t.ready()]:
                self._give(ready[0])
            if ends():
                return


_LOCK = type(threading.Lock()) | type(threading.RLock())


def fingerprint(thing: Any) -> Hashable:
    """What a state is told from others by: all that is in it, without identities and the order of dictionaries."""
    if thing is None or isinstance(thing, bool | int | float | str | bytes | Enum):
        return thing
    if isinstance(thing, slice):
        return thing.start, thing.stop
    if isinstance(thing, Tensor):
        return thing.detach().numpy().tobytes()
    if isinstance(thing, Future):
        return ("future", fingerprint(_value(thing)) if thing.done() else None)
    if isinstance(thing, Mapping):
        return frozenset((fingerprint(key), fingerprint(value)) for key, value in thing.items())
    if isinstance(thing, set | frozenset):
        return frozenset(map(fingerprint, thing))
    if isinstance(thing, type | _LOCK | Service) or callable(thing):  # what refers to its service is in it
        return None
    if is_dataclass(thing):
        return (type(thing).__name__, *(fingerprint(getattr(thing, f.name)) for f in fields(thing)))
    if hasattr(thing, "__dict__"):
        return (type(thing).__name__, *(fingerprint(value) for value in vars(thing).values()))
    return tuple(map(fingerprint, thing))


def _value(future: Future[Any]) -> Any:
    try:
        return future.value()
    except RuntimeError as error:
        return str(error)
