"""What workers report of a server that was lost, for its replacement. Pure: no network, no clock, no threads.

An answer to a push and fetch is the shard right after that push, so the newest state of a shard is at the worker that
holds the highest version. All living workers report what they have; the newest is taken; then each
replays what that does not hold, and all go on together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_asgd.protocol import LeaseHoldings, ReplicaState, StateReport

__all__ = ["StateRecovery"]


@dataclass
class StateRecovery:
    """The way from the first report until all workers have replayed."""

    offers: dict[int, StateReport] = field(default_factory=dict)  # without the shards
    newest: dict[int, ReplicaState] = field(default_factory=dict)  # per fragment, of what was offered
    excused: set[int] = field(default_factory=set)  # workers with nothing to report: new ones, and those that rejoin
    settled: set[int] = field(default_factory=set)
    restored: bool = False
    """Whether the newest state was taken."""

    def expect(self, worker: int, *, tells: bool) -> None:
        """Note a worker that joins: it reports what it has, or waits for what the others have."""
        (self.excused.discard if tells else self.excused.add)(worker)

    def add(self, offer: StateReport) -> None:
        """Take a worker's report, and of its weights those that are newer than all others'."""
        for held in offer.shards:
            if held.fragment not in self.newest or held.version > self.newest[held.fragment].version:
                self.newest[held.fragment] = held
        self.offers[offer.worker] = replace(offer, shards=())

    def offered(self, living: Collection[int]) -> bool:
        """Whether all have offered what they have, and it is to be taken now."""
        return not self.restored and bool(self.offers) and self.awaited(living) <= set(self.offers)

    def awaited(self, living: Collection[int]) -> set[int]:
        """Those of the living who are to tell what they have."""
        return set(living) - self.excused

    def over(self, living: Collection[int]) -> bool:
        """Whether all go on together."""
        return self.restored and set(living) & set(self.offers) <= self.settled

    def take(self) -> list[ReplicaState]:
        """The newest state, per fragment. It is not kept any longer."""
        self.restored = True
        newest, self.newest = list(self.newest.values()), {}
        return newest

    @property
    def incarnations(self) -> dict[int, int]:
        """How often workers were declared away, as far as anybody knows."""
        known: dict[int, int] = {}
        for offer in self.offers.values():
            for worker, incarnation in offer.incarnations.items():
                known[worker] = max(incarnation, known.get(worker, 0))
        return known

    @property
    def notes(self) -> dict[str, Any]:
        """What the workers have told each other; the word of the one that is there longest counts."""
        return {
            name: value for _, offer in sorted(self.offers.items(), reverse=True) for name, value in offer.notes.items()
        }

    @property
    def stale(self) -> set[int]:
        """Those who were declared away and do not know it: what they have trained, others have or will."""
        incarnations = self.incarnations
        return {worker for worker, offer in self.offers.items() if offer.incarnation < incarnations.get(worker, 0)}

    @property
    def parts(self) -> dict[int, LeaseHoldings]:
        """What each worker was granted, except those that are stale."""
        stale = self.stale
        return {w: o.part for w, o in self.offers.items() if o.part is not None and w not in stale}

    def drop_stale(self) -> set[int]:
        """Ignore the offers of workers that are stale; returns these workers."""
        stale = self.stale
        for worker in stale:
            del self.offers[worker]
        return stale

    @property
    def answered(self) -> int:
        """Number of the latest collective that anybody was answered."""
        return max((offer.answered for offer in self.offers.values()), default=0)
