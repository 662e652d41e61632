"""The epochs whose units workers claim: the present one, and those before it. Pure: no network, no clock, no threads.

Some workers may have fallen behind, and train an epoch that the others have finished. What is known of the latest
few is kept for them; one that is older than the latest, and not known any more, or that a lost server had opened, is
over: the others have trained and applied all of it before they began the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from lightning_asgd.core.foundation.errors import ProtocolError, WorkerAwayError
from lightning_asgd.core.foundation.ranges import common
from lightning_asgd.core.leases.table import Leases, check_epoch
from lightning_asgd.core.protocol import Epoch, LeaseHoldings
from lightning_asgd.core.server.membership import Membership
from lightning_asgd.core.server.pending_replies import Completion
from lightning_asgd.features import FINDERS, load

Ranges = tuple[tuple[int, int], ...]
"""Units of an epoch, from the first of each range to one before its last."""

_KEPT = 4  # epochs of a fit: how far a worker may be behind and still see how much of its own was trained


class Epochs:
    """The epochs of one fit."""

    def __init__(self, *, all_train: bool) -> None:
        self._all_train = all_train
        self._known: dict[int, Leases] = {}  # by number
        self._fit = ""
        self._latest = -1  # number of the latest epoch that any worker has begun
        self._held: dict[str, Ranges] = {}  # by key, of epochs that restored weights hold units of
        self._fresh: set[int] = set()  # numbers of epochs that have not been told who takes part

    def __iter__(self) -> Iterator[Leases]:
        return iter(self._known.values())

    @property
    def latest(self) -> Leases | None:
        """The present epoch; None before the first, or if no worker has reported it since a server was lost."""
        return self._known.get(self._latest)

    @property
    def done(self) -> tuple[str, Ranges]:
        """Key of the present epoch, and what of it has been applied; an empty one before the first."""
        latest = self.latest
        if latest is not None:
            return latest.epoch.key, latest.finished
        key = f"{self._fit}/{self._latest}" if self._latest >= 0 else ""  # those who were in it are gone
        return key, self._held.get(key, ())

    @property
    def progress(self) -> tuple[Epoch, ...]:
        """What is known, with what has been applied."""
        return tuple(replace(leases.epoch, done=leases.finished) for leases in self)

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
        self._held.clear()
        self._fit, self._latest = "", -1

    def open(self, theirs: Epoch, worker: int, members: Membership, now: float) -> Leases:
        """The leases of an epoch that a worker begins, which is checked to be that of the others."""
        if theirs.fit != self._fit:
            self.clear()
            self._fit = theirs.fit
        number = theirs.number
        if number not in self._known:
            self._keep(theirs, self.latest, now)
            self._known[number].update_members(members.trusted, now, members.catching_up)  # no request yet
        check_epoch(self._known[number].epoch, theirs, worker)
        return self._known[number]

    def find(self, key: str, worker: int) -> Leases:
        """The leases of an epoch that was opened. One that is over and was forgotten makes its worker rejoin."""
        leases = next((leases for leases in self if leases.epoch.key == key), None)
        if leases is not None:
            return leases
        fit, _, number = key.rpartition("/")
        if fit == self._fit and number.isdecimal() and int(number) < self._latest:
            raise WorkerAwayError(f"Worker {worker} claims units of epoch {key}, which is over.")
        raise ProtocolError(f"Worker {worker} claims units of epoch {key}, which was not opened.")

    def applied(self, key: str, worker: int, units: int) -> None:
        """Note how many of a worker's units are applied; see :class:`Leases`."""
        for leases in self:
            if leases.epoch.key == key:
                leases.applied(worker, units)

    def update_members(
        self, living: Collection[int], now: float, behind: Collection[int], changed: Collection[int]
    ) -> list[Completion]:
        """Take note of who takes part; see :class:`Leases`, here and below."""
        fresh, self._fresh = self._fresh, set()
        told = [(leases, None if number in fresh else changed) for number, leases in self._known.items()]
        return [due for leases, each in told for due in leases.update_members(living, now, behind, each)]

    def retry(self, now: float) -> list[Completion]:
        """Look again at the requests that wait."""
        return [due for leases in self for due in leases.retry(now)]

    def forget(self, worker: int, now: float) -> list[Completion]:
        """Take back what a worker holds that rejoins."""
        return [due for leases in self for due in leases.forget(worker, now)]

    def stop_waiting_for(self, workers: Collection[int], now: float) -> list[Completion]:
        """Wait no longer for workers that know the end of an epoch already."""
        return [due for leases in self for due in leases.stop_waiting_for(workers, now)]

    def remember(self, epochs: tuple[Epoch, ...]) -> None:
        """Continue from a snapshot: see :attr:`progress`."""
        self.clear()
        for epoch in epochs:
            self._fit = epoch.fit
            self._keep(epoch, None, 0.0)

    def restore(self, parts: Mapping[int, LeaseHoldings], held: Mapping[str, Ranges]) -> None:
        """Restore from workers' reports: the ``parts`` that each has, and units that the weights hold (``held``)."""
        self.clear()
        self._held = dict(held)
        for key in [*held, *(part.epoch.key for part in parts.values())]:
            self._fit = key.rpartition("/")[0]  # the parts', if there are any: weights may be of the fit before
        for key in held:
            fit, _, number = key.rpartition("/")
            if fit == self._fit:
                self._latest = max(self._latest, int(number))
        for part in sorted(parts.values(), key=lambda part: -part.epoch.number):
            if part.epoch.fit == self._fit:
                if part.epoch.number not in self._known:
                    self._keep(part.epoch, None, 0.0)
                self._known[part.epoch.number].learn_ends(part.ended)
        for worker, part in sorted(parts.items()):
            leases = self._known.get(part.epoch.number)
            if leases is not None and part.epoch.fit == self._fit:
                leases.reinstate(worker, part)

    def _keep(self, epoch: Epoch, before: Leases | None, now: float) -> None:
        over = ((0, epoch.numbers),) if epoch.number < self._latest else epoch.done
        epoch = replace(epoch, done=tuple(common(self._held.pop(epoch.key, over), 0, epoch.numbers)))
        self._latest = max(self._latest, epoch.number)
        # Only what is older: workers may be in a later epoch, though this one's worker has fallen behind.
        older = sorted(number for number in self._known if number < epoch.number)
        for number in older[: max(0, len(self._known) + 1 - _KEPT)]:
            del self._known[number]
        self._fresh.add(epoch.number)
        kind: type[Leases] = load(FINDERS["leases of shards"]) if epoch.shards else Leases
        self._known[epoch.number] = kind(epoch, all_train=self._all_train, before=before, now=now)
