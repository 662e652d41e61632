"""Which worker's process hosts a job's servers, and how another takes over when that process or its machine is lost.

Where workers' processes do not depend on each other, under torchrun, SLURM or Kubernetes for instance, each keeps a
rendezvous of its own ready, whose address all learn when they join. Worker 0 hosts the servers first. When it is lost,
every worker votes at the rendezvous of the lowest rank that answers. That worker starts servers once the votes are more
than half of those of all workers that may live. On the side of a split network where the servers are, the coordinator
ends the session if it hears too few (``Membership``), so that two workers do not host servers at once.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.job.addresses import listens, resolve
from lightning_asgd.core.job.rendezvous import Rendezvous

_PAUSE_S = 0.2
_CONNECT_S = 5.0
_VOTE_S = 5.0  # that a vote counts if it is not renewed
_CHECK_S = 1.0
_DEAF_S = 30.0  # for which a candidate is passed over that did not answer, or hosts nothing
_LOOKS = 32  # at once: a machine that does not answer takes a second
_AWAY_S = 300.0  # after which a worker that the coordinator does not hear is taken for lost

TakeOver = Callable[[Rendezvous, Mapping[int, str]], None]


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

    ``first`` is the address of the job's first rendezvous, where worker 0 announces the servers. ``may_host`` says
    whether this worker's process may host servers, ``look`` whether another's lives; None if that is unknown.
    """

    def __init__(
        self,
        rank: int,
        own: Rendezvous,
        first: tuple[str, int],
        *,
        may_host: bool = True,
        look: Callable[[HostAddress], bool | None] = lambda place: place.listens,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.may_host = may_host
        self.mine = HostAddress(resolve(own.address[0]), own.address[1], may_host)
        self.present = 0
        """The worker that hosts the servers."""
        self.first = self.address = first
        """Where that worker announces them; before that, where worker 0 does."""
        self.places: dict[int, HostAddress] = {}
        self.chief = 0
        """The worker that logs and writes checkpoints, from one session to the next."""
        self.min_workers = 1
        """With fewer workers than that the job ends."""
        self.gave_up = False
        """Whether no worker could host them any more."""
        self.lost: dict[int, str] = {}
        """Workers that hosted the servers before, and why they are gone."""
        self._returned: set[int] = set()  # lost workers that another process has replaced
        self._own = own
        self._look = look
        self._clock = clock
        self._failed: set[int] = set()  # workers that have said that they host nothing
        self._heard: dict[int, float] = {}  # when the coordinator counted a worker as living
        self._last = clock()  # when this worker last heard the coordinator
        self._gone: set[int] = set()  # workers that have left the session
        self.moved_at = -math.inf
        """When another worker began to host them."""
        self._votes: dict[int, tuple[int, float]] = {}  # the latest of each worker, and since when this one knows it
        self._voted = 0
        self._votes_for: tuple[int, float, float] = -1, 0.0, 0.0  # a candidate, since when, and the time of the latest
        self._checked = -_CHECK_S  # when this worker last asked whether the host has resigned
        self._passed: dict[int, float] = {}  # candidates that are passed over, and until when
        self._lock = threading.Lock()

    def begin_session(self) -> None:
        """Another session begins, in which workers that failed in the one before take part again."""
        if self.rank in self._failed and self.present == self.rank:
            self._find_present()
        self._forget_returned()
        self._own.put("resigned", False)
        self._failed.clear()

    def joined(self, places: Mapping[int, HostAddress]) -> None:
        """All workers have joined a session."""
        self.places, self._last = dict(places), self._clock()
        self._heard, self._gone = dict.fromkeys(places, self._last), set()
        self.mine = replace(self.mine, may_host=self.may_host)
        for rank in places:
            self._own.put(f"place/{rank}", [])

    def enter(self, places: Mapping[int, HostAddress], chief: int) -> None:
        """This process replaces a worker while the others train: tell them where it is. It hosts nothing."""
        self.places, self.chief = dict(places), chief
        self.mine = replace(self.mine, may_host=False)
        for rank, place in self.places.items():
            if rank != self.rank and self._look(place):
                with contextlib.suppress(RuntimeError), Rendezvous.connect(place.host, place.port, _CONNECT_S) as there:
                    there.put(f"place/{self.rank}", [self.mine.host, self.mine.port])

    def _place(self, rank: int) -> HostAddress:
        """Where a worker is, or the process that has replaced it."""
        entered = self._own.peek(f"place/{rank}", list)
        return HostAddress(entered[0], entered[-1], may_host=False) if entered else self.places[rank]

    def follow(self, rank: int, address: tuple[str, int], chief: int) -> None:
        """This process has been started again, after the servers' host was lost: begin where they are now."""
        self.present, self.address, self.chief, self.moved_at = rank, address, chief, self._clock()

    def hear(self, living: Collection[int], left: Collection[int]) -> None:
        """Note which workers the coordinator counts as living, and which have left the session."""
        self._last, self._gone = self._clock(), set(left) - set(living)
        self._heard.update(dict.fromkeys(living, self._last))
        self._forget_returned()

    def has_returned(self, rank: int) -> bool:
        """Whether another process has replaced a worker in this session, and trains."""
        return bool(self._own.peek(f"place/{rank}", list))

    def _forget_returned(self) -> None:
        """Count no lost worker as lost that has returned: it votes, as the others do."""
        for rank in tuple(self.lost):
            if self.has_returned(rank):
                self._returned.add(rank)
                self.lost.pop(rank, None)

    def resign(self) -> None:
        """Let the other workers know that this one fails: it hosts nothing, even if its process lives on."""
        self._failed.add(self.rank)
        self._own.put("resigned", True)

    @property
    def hosting(self) -> bool:
        """Whether this worker hosts the servers."""
        return self.present == self.rank and self.rank not in self._failed

    @property
    def moved(self) -> bool:
        """Whether worker 0 hosts them no longer."""
        return self.present != 0 or bool(self.lost)

    def _find_present(self) -> None:
        """Ask the others which of them hosts the servers since this worker has failed."""
        for rank, place in sorted(self.places.items()):
            if rank != self.rank and self._look(place):
                with contextlib.suppress(RuntimeError), Rendezvous.connect(place.host, place.port, _CONNECT_S) as there:
                    if there.peek(f"lost host {self.present}", bool):
                        self.lost[self.present] = "it has failed"
                        self.present, self.address = rank, (place.host, place.port)

    def check_host(self, job: str) -> None:
        """Raise a :class:`LaunchError` if the present host has resigned or is lost; called while it is waited for.

        It is lost, too, if its process was started again, and now announces another ``job``.
        """
        rank = self.present
        if rank not in self.places or rank == self.rank or self._clock() < self._checked + _CHECK_S:
            return
        self._checked, place = self._clock(), self._place(rank)
        try:
            with Rendezvous.connect(place.host, place.port, _CONNECT_S) as there:
                resigned = there.peek("resigned", bool) or there.peek("job", str) not in (None, job)
        except RuntimeError:
            resigned = False
        if resigned:
            self._failed.add(rank)  # and not the worker that another thread may have found meanwhile
        if resigned or self._look(place) is False:
            raise LaunchError(f"Worker {rank} no longer hosts the servers.")

    @property
    def is_lost(self) -> bool:
        """Whether the worker that hosts the servers is lost, as far as this one can see."""
        return self.present in self.places and (self.present in self._failed or not self._sees(self.present))

    def _sees(self, rank: int) -> bool | None:
        """Whether a worker's process lives; None if that is unknown."""
        return self._look(self._place(rank))

    def _sights(self, ranks: Iterable[int]) -> Iterator[tuple[int, bool | None]]:
        """The same of several workers, in this order; as many at once as are needed to be quick."""
        left = list(ranks)
        with ThreadPoolExecutor(_LOOKS) as looks:
            while left:
                some, left = left[:_LOOKS], left[_LOOKS:]
                yield from zip(some, looks.map(self._sees, some), strict=True)

    def locate(self, take_over: TakeOver, timeout_s: float) -> tuple[str, int]:
        """The address where the servers are announced. If their host is lost, waits until another worker hosts them.

        If this worker is to host the servers, ``take_over`` gets its rendezvous, and why workers are gone. Raises a
        :class:`LaunchError` if no worker can host them.
        """
        deadline = self._clock() + timeout_s
        while True:
            with self._lock:  # two threads look, one for each of two servers
                if not self.is_lost:
                    return self.address
                left = self._may_live() - {self.present}
                if (
                    self.gave_up
                    or len(left) < self.min_workers
                    or self._clock() > deadline
                    or self.rank in self._failed
                ):
                    self.gave_up = True
                    raise LaunchError(self._why(left))
                if self._move(take_over):
                    return self.address
            time.sleep(_PAUSE_S)

    def move(self, take_over: TakeOver) -> bool:
        """Look once for another worker that hosts the servers, or begin to; see :meth:`locate`."""
        if self.gave_up or self.rank in self._failed or not self._lock.acquire(blocking=False):
            return False  # or another thread looks
        try:
            return self.is_lost and self._move(take_over)
        finally:
            self._lock.release()

    def _move(self, take_over: TakeOver) -> bool:
        self._forget_returned()
        candidate = self.candidate()
        if candidate is None or self._counts_for_another(candidate):
            return False
        if not (self._host(take_over) if candidate == self.rank else self._follow(candidate)):
            return False
        self.lost[self.present] = self._fate
        self.present, place = candidate, self.places[candidate]
        self.address, self.moved_at = (place.host, place.port), self._clock()
        return True

    def candidate(self) -> int | None:
        """The lowest rank that may host the servers and answers."""
        now, excluded = self._clock(), {*self.lost, *self._failed, self.present}
        possible = [
            rank
            for rank in sorted(self.places.keys() - excluded)
            if (self.mine if rank == self.rank else self._place(rank)).may_host and now > self._passed.get(rank, -1.0)
        ]
        before = [rank for rank in possible if self.rank not in possible or rank < self.rank]
        living = (rank for rank, sight in self._sights(before) if sight)
        return next(living, self.rank if self.rank in possible else None)

    def _counts_for_another(self, candidate: int) -> bool:
        """Whether this worker's latest vote may still count for another candidate: it must not count for two."""
        voted_for, _, at = self._votes_for
        if voted_for in {-1, candidate, *self.lost, *self._failed} or self._clock() > at + _VOTE_S:
            return False
        return self._sees(voted_for) is not False

    def _follow(self, candidate: int) -> bool:
        """Vote for a candidate; whether it hosts the servers now."""
        place, now, (voted_for, since, _) = self.places[candidate], self._clock(), self._votes_for
        since = since if voted_for == candidate else now
        self._voted, self._votes_for = self._voted + 1, (candidate, since, now)
        try:
            with Rendezvous.connect(place.host, place.port, _CONNECT_S) as there:
                if there.peek("resigned", bool):
                    self._failed.add(candidate)
                    return False
                there.put(f"vote/{self.rank}", self._voted)
                hosts = bool(there.peek(f"lost host {self.present}", bool))
        except RuntimeError:  # it ended just now, or hangs
            hosts, since = False, -math.inf
        if not hosts and self._clock() > since + _DEAF_S:  # its store may answer while it hangs itself
            self._passed[candidate] = self._clock() + _DEAF_S
        return hosts

    def _host(self, take_over: TakeOver) -> bool:
        """Host the servers, if more than half of the workers that may live vote for this one."""
        votes = self._present_votes()
        if len(votes) <= len(self._may_live() - votes):
            return False
        if not self.is_lost:  # to look at the others has taken its time
            return False
        ended = self.ended(self._place(self.present).host)
        take_over(self._own, {**ended, **self.lost, self.present: self._fate})
        for lost in (*self.lost, *self._returned, self.present):
            self._own.put(f"lost host {lost}", True)
        return True

    def _present_votes(self) -> set[int]:
        """This worker's, and those that were renewed a moment ago: who sees the host again, or ends, renews none."""
        now = self._clock()
        for rank in set(self.places) - {self.rank}:
            vote = self._own.peek(f"vote/{rank}", int)
            before = self._votes.get(rank)
            if vote is not None and (before is None or vote != before[0]):
                self._votes[rank] = vote, now if before is not None else -_VOTE_S  # the first may be an old one
        return {self.rank} | {rank for rank, (_, at) in self._votes.items() if now <= at + _VOTE_S}

    def _may_live(self) -> set[int]:
        """All workers but those that have ended, and those that the coordinator has not heard for long."""
        since = self._last - _AWAY_S
        heard = {rank for rank in self.places if self._heard.get(rank, self._last) >= since}
        heard -= {*self.lost, *self._failed, *self._gone}
        return {self.rank} | {rank for rank, sight in self._sights(heard - {self.rank}) if sight is not False}

    def ended(self, where: str = "") -> dict[int, str]:
        """Other workers that have ended, or that were lost with a machine: new servers await no report of them."""
        ended: dict[int, str] = {}
        for rank, sight in self._sights(set(self.places) - {self.rank, self.present, *self.lost}):
            if rank in self._failed or sight is False:
                ended[rank] = "it has failed" if rank in self._failed else "its process has ended"
            elif sight is None and self._place(rank).host == where:
                ended[rank] = "its machine cannot be reached"
        return ended

    @property
    def _fate(self) -> str:
        if self.present in self._failed:
            return "it has failed"
        return "its process has ended" if self._sees(self.present) is False else "its machine cannot be reached"

    def _why(self, left: Collection[int]) -> str:
        lost = f"Worker {self.present}, which hosts the servers, is lost: {self._fate}"
        if len(left) < self.min_workers:
            return f"{lost}. {len(left)} are left, but Advanced.min_workers={self.min_workers}."
        candidate = self.candidate()
        if candidate is None:
            return f"{lost}. No other worker that may host them answers. Start the job again."
        if candidate == self.rank:
            return (
                f"{lost}. At most half of the workers that may live have come to worker {self.rank} to continue "
                "without it. Expected more than half: the others may train on. Check the network between the "
                "machines, and whether they are up."
            )
        return f"{lost}. Expected worker {candidate} to host them instead. Look at its output."
