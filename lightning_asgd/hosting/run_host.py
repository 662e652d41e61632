"""Which of several ``serve`` processes hosts the servers of an elastic run: one host's part in that decision.

Pure: no network, no threads, time as an argument. The *present host* serves, the others stand by. When the workers lose
the present host, they vote for a standby host, which takes over once it has the votes of more than half of them.

Two hosts must not serve at once. So the present host has a *lease*, which is not one of data: it may serve for
``lease_s`` after the last moment at which it knew that no other host had taken over. It knows that if every standby
host has answered that it does not campaign, or if it has heard more than half of the workers: when these were heard,
they had not voted for another host. When the lease is over, the present host kills its servers. A candidate that
cannot reach the present host waits until then. It takes over at once if the present host's process has ended, or has
killed its servers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from lightning_asgd.hosting.host_entry import HostEntry

# Parts of the lease.
_MARGIN = 0.2  # for killing servers, and for clocks of different speeds
_FRESH = 0.6  # for which an answer says that a host is reachable
_PAUSED = 0.8  # a longer time between two steps: this process was suspended

_VOTE_S = 5.0  # that a vote counts if it is not renewed
_UNLIST_S = 10.0  # without an answer, after which a host is not named any more
_FORGET_S = 60.0  # without the present host, after which a standby host may not take over any more
_ARRIVE_S = 30.0  # for workers to come to a host that has taken over
_MOST = 4096  # workers that elect hosts; an entry of the rendezvous has a limit


class Action(Enum):
    """What a host has to do now."""

    NOTHING = "nothing"
    SERVE = "announce its servers"
    STOP = "kill its servers and stand by"
    ASK_TO_STOP = "ask the host that serves to stop"


@dataclass
class _Sight:
    """What another host has answered."""

    entry: HostEntry | None = None
    asked_at: float = -math.inf  # when the question was sent whose answer this is
    confirmed_at: float = -math.inf  # the same of the latest answer that it does not campaign
    ended: bool = False  # whether its process has ended


@dataclass
class _Vote:
    """A worker's latest vote: its term and number, since when it is renewed, and when that was last seen."""

    term: int
    number: int
    since: float
    at: float


class RunHost:
    """One host, and the entry that it publishes. It begins as the present host, or stands by.

    ``rival`` is the host that is to be asked to stop, ``rival_term`` its term. ``silent_s`` are the seconds since a
    standby host last knew the present one to serve.
    """

    def __init__(self, entry: HostEntry, now: float) -> None:
        self.entry = entry
        self.silent_s = 0.0
        self.rival, self.rival_term = "", 0
        self._sights: dict[str, _Sight] = {}
        self._votes: dict[int, _Vote] = {}
        self._present_at = now  # when the present host was last known to serve
        self._campaigns_at = math.inf  # since when others can see that this one may take over
        self._sure_until = now + entry.lease_s
        self._awaits_workers = False  # after a takeover
        self._stepped_at = now
        for address in entry.hosts:
            self.add(address, now)

    def be_ready(self) -> None:
        """Its servers have started: it can take over."""
        self.entry = replace(self.entry, ready=not self.entry.serves)

    @property
    def others(self) -> Collection[str]:
        """The addresses of all other hosts that are known."""
        return self._sights.keys()

    def add(self, address: str, known_at: float = -math.inf) -> None:
        """Add another host. ``known_at`` is when a host last listed it, so that it may take over; -inf if none has."""
        if address != self.entry.address:
            self._sights.setdefault(address, _Sight(confirmed_at=known_at))

    def see(self, address: str, entry: HostEntry | None, asked_at: float, *, ended: bool = False) -> None:
        """Note what another host has answered to a question sent at that time, or that its process has ended."""
        sight = self._sights.get(address)
        if sight is None or (entry is not None and entry.run != self.entry.run):
            return
        sight.ended |= ended
        if entry is not None:
            sight.entry, sight.asked_at, sight.ended = entry, asked_at, False
            if not entry.campaigns and not entry.serves:
                sight.confirmed_at = asked_at

    def note_vote(self, worker: int, term: int, number: int, now: float) -> None:
        """Note a worker's vote as it is in the rendezvous now; one that has not changed is not renewed."""
        known = self._votes.get(worker)
        if known is not None and (known.term, known.number) == (term, number):
            return
        renewed = known is not None and known.term == term and now <= known.at + _VOTE_S
        seen_late = now > self._stepped_at + _PAUSED * self.entry.lease_s  # it may be an old one
        at = -math.inf if seen_late else now
        self._votes[worker] = _Vote(term, number, known.since if renewed and known is not None else at, at)

    @property
    def may_take_over(self) -> bool:
        """As a standby host: whether it may take over if the workers elect it, apart from its servers' readiness."""
        return self.entry.address in self.entry.hosts and self.silent_s <= _FORGET_S

    @property
    def ready(self) -> list[str]:
        """The addresses of the other hosts that could take over, as they say themselves."""
        sights = ((a, self._sights[a]) for a in self.entry.hosts if a in self._sights)
        return [a for a, sight in sights if not sight.ended and sight.entry is not None and sight.entry.ready]

    @property
    def present_reached_at(self) -> float:
        """When the latest question was sent to which the present host has answered that it serves; -inf if none."""
        sight = self._sights.get(self.entry.present)
        if sight is None or sight.entry is None or sight.ended:
            return -math.inf
        return sight.asked_at if sight.entry.serves and sight.entry.term == self.entry.term else -math.inf

    @property
    def successor(self) -> str:
        """The address of another host that the workers can elect; empty if there is none, or no worker."""
        alive = (a for a in self.entry.hosts if a in self._sights and not self._sights[a].ended)
        return next(alive, "") if self.entry.workers else ""

    def step(self, now: float, heard: Mapping[int, float], *, left: Collection[int] = (), stop: int = 0) -> Action:
        """What to do now.

        The present host has ``heard`` its workers at these times. Those that have ``left`` elect no host, for their
        numbers are not given again. ``stop`` is the term that another host has asked this one to end.
        """
        action = self._serve_on(now, heard, left, stop) if self.entry.serves else self._stand_by(now)
        if action is Action.STOP:
            self._present_at = now
            self.entry = replace(self.entry, present="", ready=False, campaigns=True)
        self._stepped_at = now
        return action

    # ------------------------------------------------------------------ the present host

    def _serve_on(self, now: float, heard: Mapping[int, float], left: Collection[int], stop: int) -> Action:
        mine = self.entry.term
        sights = {address: sight.entry for address, sight in self._sights.items() if not sight.ended}
        serving = {address: entry for address, entry in sights.items() if entry is not None and entry.serves}
        if stop >= mine or any(entry.term > mine for entry in serving.values()):
            return Action.STOP
        self._list(now)
        standing_by = [s for s in self._sights.values() if not s.ended and s.confirmed_at > -math.inf]
        electors = [self.entry.workers]
        electors += [s.entry.workers for s in standing_by if s.entry is not None and s.entry.term == mine]
        sure = {**heard, **dict.fromkeys(left, now)}
        by_workers = min(_heard_by_most(workers, sure, now) for workers in electors)
        if self._awaits_workers and by_workers > -math.inf:
            self._awaits_workers, self._sure_until = False, now
        confirmed = min((sight.confirmed_at for sight in standing_by), default=now)
        self._sure_until = max(self._sure_until, max(confirmed, by_workers) + self.entry.lease_s)
        if now > self._sure_until:
            return Action.STOP
        if not self._awaits_workers and all(workers == self.entry.workers for workers in electors):
            # Only once all know the latest list: two majorities of one list have a worker in common.
            self.entry = replace(self.entry, workers=tuple(sorted(heard)[:_MOST]))
        rivals = ((address, entry.term) for address, entry in serving.items() if entry.term < mine)
        self.rival, self.rival_term = next(rivals, ("", 0))
        return Action.ASK_TO_STOP if self.rival else Action.NOTHING

    def _list(self, now: float) -> None:
        """Name the hosts that answer, which may take over; forget those that may not any more."""
        for address, sight in list(self._sights.items()):
            if not sight.ended and -math.inf < sight.confirmed_at < now - _UNLIST_S - _FORGET_S - self.entry.lease_s:
                del self._sights[address]
        present = {a for a, s in self._sights.items() if not s.ended and now <= s.confirmed_at + _UNLIST_S}
        present.add(self.entry.address)
        known = self.entry.hosts
        listed = *(a for a in known if a in present), *(a for a in self._sights if a in present and a not in known)
        self.entry = replace(self.entry, hosts=listed)

    # ------------------------------------------------------------------ a standby host

    def _stand_by(self, now: float) -> Action:
        self._adopt(now)
        present = self._sights.get(self.entry.present)
        reachable = present is not None and not present.ended and now <= present.asked_at + _FRESH * self.entry.lease_s
        serves = reachable and present is not None and present.entry is not None and present.entry.serves
        over = present is None or present.ended or (reachable and not serves)
        was_known = self.entry.campaigns
        self.entry = replace(self.entry, campaigns=not serves and self.entry.term > 0)
        if serves:
            self._campaigns_at = math.inf
        elif was_known:
            self._campaigns_at = min(self._campaigns_at, now)
        elected_at, self.silent_s = self._elected_at(now), now - self._present_at
        if elected_at is None or not self.entry.ready or not self.may_take_over:
            return Action.NOTHING
        if serves:
            self.rival, self.rival_term = self.entry.present, self.entry.term
            return Action.ASK_TO_STOP
        if not over and now < max(self._campaigns_at, elected_at) + (1 + _MARGIN) * self.entry.lease_s:
            return Action.NOTHING
        self._take_over(now)
        return Action.SERVE

    def _adopt(self, now: float) -> None:
        """Follow the host of the highest term that serves."""
        serving = [s for s in self._sights.values() if s.entry is not None and s.entry.serves and not s.ended]
        newest = max(serving, key=lambda sight: (sight.entry.term if sight.entry else 0, sight.asked_at), default=None)
        if newest is None or newest.entry is None or newest.entry.term < self.entry.term:
            return
        entry = newest.entry
        self._present_at = max(self._present_at, newest.asked_at)
        self.entry = replace(
            self.entry,
            term=entry.term,
            present=entry.present,
            hosts=entry.hosts,
            workers=entry.workers,
            lease_s=entry.lease_s,
        )
        for address in (*entry.hosts, entry.address):
            self.add(address, now)

    def _elected_at(self, now: float) -> float | None:
        """When the votes became more than half of the workers'; None if they are not."""
        term = max((vote.term for vote in self._votes.values()), default=0)
        electors = set(self.entry.workers)
        since = sorted(
            vote.since
            for worker, vote in self._votes.items()
            if worker in electors and vote.term == term >= self.entry.term and now <= vote.at + _VOTE_S
        )
        most = len(electors) // 2
        return since[most] if len(since) > most else None

    def _take_over(self, now: float) -> None:
        term = max([self.entry.term, *(vote.term for vote in self._votes.values())]) + 1
        self.entry = replace(self.entry, term=term, present=self.entry.address, campaigns=False, ready=False)
        self._awaits_workers, self._sure_until, self._campaigns_at = True, now + _ARRIVE_S, math.inf
        for sight in self._sights.values():
            sight.confirmed_at = now  # that of the host before may take over again


def _heard_by_most(workers: Collection[int], heard: Mapping[int, float], now: float) -> float:
    """The latest time since which more than half of the workers were heard; now if there is none to elect a host."""
    times = sorted((heard.get(worker, -math.inf) for worker in workers), reverse=True)
    return times[len(times) // 2] if times else now
