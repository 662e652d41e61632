"""Which worker's process hosts a job's servers, and how another takes over when that process or its machine is lost.

Where workers' processes do not depend on each other, under torchrun, SLURM or Kubernetes for instance, each keeps a
rendezvous of its own ready, whose address all learn when they join. Worker 0 hosts the servers first. When it is lost,
every worker goes to the rendezvous of the lowest rank that answers. That worker starts servers once more than half of
the workers have come that may live: so in a network that has split two workers never host servers at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from lightning_asgd.errors import LaunchError
from lightning_asgd.transports.rendezvous import Rendezvous, listens

__all__ = ["HostAddress", "ServerHosts"]

_PAUSE_S = 0.2
_CONNECT_S = 5.0


@dataclass(frozen=True)
class HostAddress:
    """Where a worker's own rendezvous is, and whether the worker ``may_host`` the servers."""

    host: str
    port: int
    may_host: bool = True

    @property
    def listens(self) -> bool | None:
        """Whether the worker's process lives; None if its machine does not answer."""
        return listens(self.host, self.port)


class ServerHosts:
    """What one worker knows of the others' rendezvous, and which worker hosts the servers. Any thread may use it.

    Args:
        rank: this worker's.
        own: its rendezvous.
        first: the address of the job's first rendezvous, where worker 0 announces the servers.
        may_host: whether this worker's process may host servers.
        look: whether a worker's process lives; None if that is unknown.
    """

    def __init__(
        self,
        rank: int,
        own: Rendezvous,
        first: tuple[str, int],
        *,
        may_host: bool = True,
        look: Callable[[HostAddress], bool | None] = lambda place: place.listens,
    ) -> None:
        self.rank = rank
        self.mine = HostAddress(*own.address, may_host)
        self.present = 0
        """The worker that hosts the servers."""
        self.address = first
        """Where that worker announces them."""
        self.chief = 0
        """The worker that logs and writes checkpoints, from one session to the next."""
        self.min_workers = 1
        """With fewer workers than that the job ends."""
        self.gave_up = False
        """Whether no worker could host them any more."""
        self.places: dict[int, HostAddress] = {}
        self._own = own
        self._look = look
        self._lost: dict[int, str] = {}  # workers that hosted the servers before, and why they are gone
        self._lock = threading.Lock()

    @property
    def is_lost(self) -> bool:
        """Whether the worker that hosts the servers is lost, as far as this one can see."""
        return self.present in self.places and not self._look(self.places[self.present])

    def locate(
        self, living: Collection[int], take_over: Callable[[Rendezvous, Mapping[int, str]], None], timeout_s: float
    ) -> tuple[str, int]:
        """Where the servers are announced; waits for another worker to host them if the one that did is lost.

        ``living`` are the workers that were heard of last. If this worker is to host the servers, ``take_over`` gets
        its rendezvous, and why workers are gone. Raises a :class:`LaunchError` if no worker can host them.
        """
        with self._lock:
            deadline = time.monotonic() + timeout_s
            while self.is_lost:
                left = set(living or self.places) - {self.present}
                if len(left) < self.min_workers or time.monotonic() > deadline:
                    self.gave_up = True
                    raise LaunchError(self._why(left, timeout_s))
                if self.move(living, take_over):
                    break
                time.sleep(_PAUSE_S)
            return self.address

    def move(self, living: Collection[int], take_over: Callable[[Rendezvous, Mapping[int, str]], None]) -> bool:
        """Look once for another worker that hosts the servers, or begin to; see :meth:`locate`."""
        candidate = self.candidate()
        if candidate is None:
            return False
        if not (self._host(living, take_over) if candidate == self.rank else self._follow(candidate)):
            return False
        self._lost[self.present] = self._fate
        self.present, place = candidate, self.places[candidate]
        self.address = place.host, place.port
        return True

    def candidate(self) -> int | None:
        """The lowest rank that may host the servers and answers."""
        for rank, place in sorted(self.places.items()):
            if rank in self._lost or rank == self.present or not (self.mine if rank == self.rank else place).may_host:
                continue
            if rank == self.rank or self._look(place):
                return rank
        return None

    def _follow(self, candidate: int) -> bool:
        """Tell a candidate that this worker has lost the host, too; whether the candidate hosts the servers now."""
        place = self.places[candidate]
        try:
            with Rendezvous.connect(place.host, place.port, _CONNECT_S) as there:
                there.put(f"{self._loss}/{self.rank}", True)
                return bool(there.peek(self._loss, bool))
        except RuntimeError:  # it ended just now
            return False

    def _host(self, living: Collection[int], take_over: Callable[[Rendezvous, Mapping[int, str]], None]) -> bool:
        """Host the servers, if more than half of the workers that may live have come here."""
        came = {rank for rank in self.places if self._own.peek(f"{self._loss}/{rank}", bool)} | {self.rank}
        others = (set(living) or set(self.places)) - came
        may_live = {rank for rank in others if rank not in self.places or self._look(self.places[rank]) is not False}
        if len(came) <= len(may_live):
            return False
        take_over(self._own, {**self._lost, self.present: self._fate})
        self._own.put(self._loss, True)
        return True

    @property
    def _fate(self) -> str:
        ended = self._look(self.places[self.present]) is False
        return "its process has ended" if ended else "its machine cannot be reached"

    @property
    def _loss(self) -> str:
        return f"lost host {self.present}"

    def _why(self, left: Collection[int], timeout_s: float) -> str:
        if len(left) < self.min_workers:
            gone = f"Worker {self.present}, which hosts the servers, is gone: {self._fate}"
            return f"{gone}. {len(left)} are left, and min_workers={self.min_workers}."
        candidate = self.candidate()
        lost = f"Worker {self.present}, which hosts the servers, cannot be reached for {timeout_s:g} s"
        if candidate is None:
            return f"{lost}, and no other worker that may host them answers. Start the job again."
        if candidate == self.rank:
            return (
                f"{lost}, and at most half of the workers that may live have come to worker {self.rank} to continue "
                "without it. Expected more than half: the others may train on. Check the network between the "
                "machines, and whether they are up."
            )
        return f"{lost}. Expected worker {candidate} to host them instead. Look at its output."
