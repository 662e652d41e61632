"""An island's leases, as one of its processes sees them: each trains a part of every batch.

What is done with a batch that was granted already needs no decision: it is given to the loader, trained, and counted.
So every process of the island has leases, and does that by itself. Only those of the first process ask the coordinator;
whenever it has done something for all (:meth:`IslandGroup.share`), the others learn what is in hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, TypeVar

from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.leases.plan import Plan
from lightning_asgd.islands.group import IslandGroup

_AHEAD_S = 0.5  # seconds of training that all know in advance; an error reaches the others at most that much later
_BATCHES, _SAMPLES = 16, 4096  # at most this many batches and samples, since their numbers go with every shared call

# What batches change, and grants; what a process needs to see the epoch as the first one does.
_KNOWN = (
    *("segment", "halted", "exhausted", "_loading", "_dry", "_trained"),
    *("_progress", "_ratio", "_since", "_reached"),
)


class SharedLeases(DataLeases):
    """The leases of one process, which all processes know a few batches ahead; see :class:`DataLeases`.

    ``leads``: whether these are the first process's. ``ahead``: batches that wait, and that all processes know of.
    """

    leads = True
    ahead = 0

    def reset(self, plan: Plan | None = None) -> None:
        """Forget the present epoch."""
        super().reset(plan)
        self.ahead = 0

    def follow(self, plan: Plan) -> None:
        """The first process opens an epoch, or continues it."""
        if self.opened != plan.epoch.key:
            self.reset(plan)

    @property
    def in_hand(self) -> bool:
        """Whether all processes know of another batch."""
        return bool(self._loading or self.ahead)

    def take(self) -> Any:
        """Samples of the next batch to load; None if there is none now."""
        samples = super().take()
        self.ahead = max(0, self.ahead - 1)
        return samples

    def known(self) -> dict[str, Any] | None:
        """What the other processes learn: where the epoch is, and the next batches; None before an epoch."""
        if not self.opened:
            return None
        self.ahead = min(len(self._waiting), self._most)
        return {name: getattr(self, name) for name in _KNOWN} | {"_waiting": deque(islice(self._waiting, self.ahead))}

    def learn(self, known: dict[str, Any] | None) -> None:
        """Be as the first process's."""
        if known is not None:
            vars(self).update(known)
            self.ahead = len(self._waiting)
            self._unapplied.clear()

    @property
    def _most(self) -> int:
        """Batches that the others are to know of."""
        size = self.plan.batch or 1
        return max(1, min(_BATCHES, _SAMPLES // size, int(_AHEAD_S / (size * self.unit_s)) if self.unit_s else 1))

    def _ask_early(self, rtt_s: float = 0.0) -> None:
        if self.leads:
            with suppress(Exception):  # asked again in a shared call: the other processes learn of an error only there
                super()._ask_early(rtt_s)


T = TypeVar("T")


class IslandLeases:
    """The leases of all processes together; see :class:`DataLeases`.

    Batches that all know of are taken and counted by each process. What may wait for the coordinator, or for other
    workers, the first process does for all. ``place`` is this one's among those that share a batch, and their number.
    """

    def __init__(self, group: IslandGroup, leases: SharedLeases, place: tuple[int, int]) -> None:
        self._group, self._leases, self._place = group, leases, place
        leases.leads = group.leads
        group.report("leases", leases.known, leases.learn)

    def _together(self, call: Callable[[SharedLeases], T]) -> T:
        return self._group.share(lambda: call(self._leases))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._leases, name)  # where the epoch is, which all know; seconds waited, which are its own

    @property
    def batch(self) -> int:
        """Samples of one of the island's batches."""
        return self._leases.batch

    @batch.setter
    def batch(self, batch: int) -> None:
        self._leases.batch = batch

    def open(self, plan: Plan) -> None:
        """Begin an epoch, or begin to load the rest of it again."""
        if not self._group.leads:
            self._leases.follow(plan)
        self._together(lambda leases: leases.open(plan))

    def take(self) -> Any:
        """This process's part of the next batch; None if there is none now."""
        take = SharedLeases.take
        samples = take(self._leases) if self._leases.ahead else self._together(take)
        return None if samples is None else part_of(samples, *self._place)

    def begin_batch(self, begun_s: float = 0.0) -> None:
        """A batch is about to be trained."""
        if self._group.leads:
            self._leases.begin_batch(begun_s)

    def more(self, acknowledged: int) -> bool:
        """Whether there is another batch."""
        if self._leases.in_hand:
            return self._leases.more(acknowledged)
        return self._together(lambda leases: leases.more(acknowledged))

    def ends(self, *, waits: bool) -> bool:
        """Whether the batch that is trained now is the island's last one of the epoch, as the first process knows."""
        return not self._leases.ahead and self._together(lambda leases: leases.ends(waits=waits))

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """Measure the final push."""
        if not self._group.leads:
            yield
            return
        with self._leases.flushing():
            yield

    def wait(self, acknowledged: int) -> bool:
        """Wait until all workers have trained the sync interval."""
        return self._together(lambda leases: leases.wait(acknowledged))

    def next_interval(self) -> None:
        """Continue with the next sync interval."""
        self._together(lambda leases: leases.next_interval())

    def stop(self, acknowledged: int, *, halt: bool = False) -> None:
        """Train no more of this epoch."""
        self._together(lambda leases: leases.stop(acknowledged, halt=halt))

    @property
    def own(self) -> list[tuple[int, int]]:
        """Ranges of the units that the island has trained in this epoch."""
        return self._together(lambda leases: leases.own)

    def done(self) -> tuple[tuple[int, int], ...]:
        """Ranges of units that are done, of all workers."""
        return self._together(lambda leases: leases.done())


def part_of(samples: list[Any], number: int, count: int) -> list[Any]:
    """The part that one of ``count`` processes trains. A batch of fewer samples is repeated: all take every step."""
    return [samples[number % len(samples)]] if len(samples) <= number else samples[number::count]
