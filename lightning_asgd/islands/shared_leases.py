"""The leases of an island's first process, which its other processes know a few batches ahead.

What is done with a batch that was granted already needs no decision: it is given to the loader, trained, and counted.
So every process of the island has leases, and does that by itself. Only those of the first process ask the coordinator;
whenever it has done something for all (:meth:`IslandGroup.share`), the others learn what is in hand.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import islice
from typing import Any

from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.leases.plan import Plan

_AHEAD_S = 0.5  # seconds of training that all know in advance; an error reaches the others at most that much later
_BATCHES, _SAMPLES = 16, 4096  # at most this many batches and samples, since their numbers go with every shared call

# What batches change, and grants; what a process needs to see the epoch as the first one does.
_KNOWN = (
    *("segment", "halted", "exhausted", "_loading", "_dry", "_trained"),
    *("_progress", "_ratio", "_since", "_reached"),
)


class SharedLeases(DataLeases):
    """See the module's docstring, and :class:`DataLeases`.

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
