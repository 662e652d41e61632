"""A server's way back after its state was lost, as a state machine. Pure: no network, no threads, time as an argument.

The reply to a push with a fetch is the shard right after that push, so the newest state of a shard is at the worker
that holds the highest version. All living workers report what they hold, and the newest of each shard is taken. Then
each worker replays the pushes that this state lacks, and all continue together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from lightning_asgd.core.protocol import LeaseHoldings
from lightning_asgd.core.server.registry import Continuity, Phase
from lightning_asgd.recovery.messages import ReplicaState, StateReport

_REPORT_S = 20.0  # in which workers notice that a server was lost, and begin to report to its replacement


class StateRecovery(Continuity):
    """The phase of one server, and what workers have reported to it.

    ============ ================================================= ==========
    from         when                                              to
    ============ ================================================= ==========
    (start)      in the place of a lost server                     LOST
    (start)      otherwise                                         INTACT
    INTACT       a worker that has a state waited for this server  LOST
    INTACT, LOST such a worker joins                               COLLECTING
    COLLECTING   all living workers have reported                  RESTORED
    any          a snapshot, or a worker's first weights, replace  INTACT
                 what was lost; no worker can report; a job's next
                 session begins
    ============ ================================================= ==========
    """

    def __init__(self, *, replaces: bool = False) -> None:
        self.replaces = replaces
        self.phase = Phase.LOST if replaces else Phase.INTACT
        self._asked: float | None = None  # when a worker last asked for what a report must restore first
        self.reset(self.phase)

    def reset(self, phase: Phase = Phase.INTACT) -> None:
        """Forget all reports: something else replaces what was lost."""
        self.phase = phase
        self.offers: dict[int, StateReport] = {}  # without the shards
        self.newest: dict[int, ReplicaState] = {}  # per fragment, of what was reported
        self.excused: set[int] = set()  # workers with nothing to report: new ones, and those that rejoin
        self.settled: set[int] = set()  # workers that have replayed

    def begin_session(self, *, elastic: bool) -> None:
        """Forget all reports to the session before. Only an elastic run has a state from before its session."""
        self.reset(Phase.LOST if self.phase.lost and elastic else Phase.INTACT)

    def note_heartbeat(self, worker: int, *, waited: bool, now: float) -> None:
        """Note a heartbeat; ``waited``: the worker knows an elastic run of which this server knows no workers."""
        if waited and not self.phase.begun:
            self.phase = Phase.LOST
        if self.phase.lost and worker not in self.excused:
            self._asked = now  # there is a worker that will report

    def join(self, worker: int, *, reports: bool) -> bool:
        """Note a worker that joins while the state is lost, and whether it ``reports``. Returns whether it is first."""
        first = self.phase is not Phase.COLLECTING
        if first:
            self.reset(Phase.COLLECTING)
        (self.excused.discard if reports else self.excused.add)(worker)
        return first

    def add(self, offer: StateReport) -> None:
        """Take a worker's report, and of its weights those that are newer than all others'."""
        for held in offer.shards:
            if held.fragment not in self.newest or held.version > self.newest[held.fragment].version:
                self.newest[held.fragment] = held
        self.offers[offer.worker] = replace(offer, shards=())

    @property
    def waiting(self) -> Collection[int]:
        """The workers that have reported and wait for the others' reports."""
        return self.offers.keys() if self.phase is Phase.COLLECTING else ()

    def awaited(self, living: Collection[int]) -> set[int]:
        """The living workers that have to report."""
        return set(living) - self.excused

    def complete(self, living: Collection[int]) -> bool:
        """Whether all have reported, and the newest state is to be taken now."""
        return self.phase is Phase.COLLECTING and bool(self.offers) and self.awaited(living) <= set(self.offers)

    def nobody_reports(self, living: Collection[int], silence_s: float, now: float) -> bool:
        """Whether no worker is left to report, and each would have by now; ``silence_s``: the failure timeout."""
        if self._asked is None:
            self._asked = now
        if self.phase is Phase.COLLECTING and self.awaited(living):
            return False
        return now > self._asked + _REPORT_S + silence_s

    def take(self) -> list[ReplicaState]:
        """The newest state, per fragment. It is not kept any longer."""
        self.phase = Phase.RESTORED
        newest, self.newest = list(self.newest.values()), {}
        return newest

    def over(self, living: Collection[int]) -> bool:
        """Whether all workers that reported have replayed."""
        return self.phase is Phase.RESTORED and set(living) & set(self.offers) <= self.settled

    @property
    def incarnations(self) -> dict[int, int]:
        """How often each worker was suspected, as far as any worker knows."""
        known: dict[int, int] = {}
        for offer in self.offers.values():
            for worker, incarnation in offer.incarnations.items():
                known[worker] = max(incarnation, known.get(worker, 0))
        return known

    @property
    def notes(self) -> dict[str, Any]:
        """The run's metadata as the workers know them; the worker that has been there longest is authoritative."""
        return {
            name: value for _, offer in sorted(self.offers.items(), reverse=True) for name, value in offer.notes.items()
        }

    @property
    def stale(self) -> set[int]:
        """Workers that were suspected and do not know it: others have trained, or will train, what they have."""
        incarnations = self.incarnations
        return {worker for worker, offer in self.offers.items() if offer.incarnation < incarnations.get(worker, 0)}

    @property
    def parts(self) -> dict[int, LeaseHoldings]:
        """What each worker was granted, except those that are stale."""
        stale = self.stale
        return {w: o.part for w, o in self.offers.items() if o.part is not None and w not in stale}

    def drop_stale(self) -> set[int]:
        """Ignore the reports of workers that are stale; returns these workers."""
        stale = self.stale
        for worker in stale:
            del self.offers[worker]
        return stale

    @property
    def answered(self) -> int:
        """Number of the latest collective that any worker has the result of."""
        return max((offer.answered for offer in self.offers.values()), default=0)
