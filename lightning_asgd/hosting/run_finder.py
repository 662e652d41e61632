"""Where a worker finds the servers of an elastic run, and how it votes for another host when they are lost."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from lightning_asgd.core.foundation.environment import joined, parted
from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.hosting.host_entry import HOST_KEY, LEASE_S, VOTED_KEY, HostEntry, ask_host, reach_host, vote_of

log = logging.getLogger(__name__)

Way = tuple[str, int]
Answer = HostEntry | LaunchError | bool | None

_PAUSE_S = 0.2
_LAPSE_S = 6.0  # after which no host counts a vote: five seconds after it has seen it


def _cast(way: Way, worker: int, vote: list[int], lease_s: float) -> bool:
    """Publish a vote at a host. Returns whether the host has it."""
    with contextlib.suppress(RuntimeError), reach_host(*way, lease_s) as there:
        there.put(vote_of(worker), vote)
        there.put(VOTED_KEY, [worker, *vote])  # the host reads the votes when this changes
        return True
    return False


class RunFinder:
    """The hosts of one run, as one worker knows them. Any thread may use it.

    One of the ``given`` hosts has to live when the worker joins. ``cast`` publishes a vote at a host; returns whether
    it is there. ``term`` and ``lease_s`` are of the host whose servers are used; the term is 0 before one is known.
    """

    def __init__(
        self,
        given: Sequence[Way],
        *,
        ask: Callable[[str, int, float], Answer] = ask_host,
        cast: Callable[[Way, int, list[int], float], bool] = _cast,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = self.term = 0
        self.lease_s = LEASE_S
        self._given = tuple(given)
        self._ways = {joined(*way): way for way in given}  # by the address that a host has for itself, once it is known
        self._hosts: tuple[str, ...] = ()  # in the order in which they are candidates
        self._present = ""
        self._refused: set[str] = set()  # hosts with another secret, for instance
        self._ask, self._cast, self._clock = ask, cast, clock
        self._voted_for, self._voted_at, self._votes = "", 0.0, 0
        self._lock = threading.Lock()

    @property
    def several(self) -> bool:
        """Whether another host may take over."""
        return len(self._ways) > 1

    def find(self, timeout_s: float) -> Way:
        """The address of the host that serves. If only one is known, and it says nothing of others, that one."""
        self.term, self._present = 0, ""
        return self.locate(timeout_s, may_be_alone=True)

    def locate(self, timeout_s: float, *, may_be_alone: bool = False) -> Way:
        """The address of the host that serves; votes for another one meanwhile. Raises a :class:`LaunchError`."""
        deadline = self._clock() + timeout_s
        while (found := self.look()) is None:
            if may_be_alone and not self.several:
                return self._given[0]
            if self._clock() > deadline:
                raise LaunchError(
                    f"None of the hosts {', '.join(self._ways)} serves the run. Expected one of them to serve it "
                    f"within {timeout_s:g} s, or to take it over once more than half of the workers have lost "
                    "the host that served it. Look at the output of `lightning-asgd serve` there, and check the "
                    "network."
                )
            time.sleep(_PAUSE_S)
        return found

    def look(self) -> Way | None:
        """Look once for the host that serves. If there is none, vote for the first that could."""
        with self._lock:
            seen: dict[str, HostEntry] = {}
            gone: set[str] = set()
            refused: dict[str, LaunchError] = {}
            for name, answer in self._answers():
                if isinstance(answer, HostEntry):
                    name = self._note(name, answer)
                    seen[name] = answer
                    if self.term and self._is_next(answer) and self._withdraws(answer):
                        return self._use(answer)
                elif answer is False:
                    gone.add(name)
                elif isinstance(answer, LaunchError):
                    refused[name] = answer
            if refused and not seen and not self.term:  # else the run continues without that host
                raise next(iter(refused.values()))
            for name in refused.keys() - self._refused:
                log.warning("This worker cannot use the host %s of its run: %s", name, refused[name])
            self._refused |= refused.keys()
            serving = [entry for entry in seen.values() if self._is_next(entry) and self._withdraws(entry)]
            # A host may have been started once more after all of them had ended.
            serving = serving or [e for e in seen.values() if e.serves and self._ways.keys() <= gone | {e.address}]
            if serving:
                return self._use(max(serving, key=lambda entry: entry.term))
            self._vote(list(seen.values()), gone)
            return None

    def follows(self, rendezvous: Rendezvous) -> bool:
        """Whether a host still serves, as it says itself; True for one that publishes nothing of the kind."""
        entry = HostEntry.of(rendezvous.peek(HOST_KEY, dict))
        return entry is None or self._is_next(entry)

    @property
    def is_lost(self) -> bool:
        """Whether the present host does not serve any more, as far as this worker sees."""
        way = self._ways.get(self._present)
        answer = None if way is None else self._ask(*way, self.lease_s)
        return not (isinstance(answer, HostEntry) and self._is_next(answer))

    def _is_next(self, entry: HostEntry) -> bool:
        return entry.serves and (entry.term > self.term or (entry.term == self.term and entry.address == self._present))

    def _answers(self) -> Iterator[tuple[str, Answer]]:
        """What all hosts answer, as they do."""
        asks = ThreadPoolExecutor(len(self._ways))
        try:
            names = {asks.submit(self._ask, *way, self.lease_s): name for name, way in self._ways.items()}
            for each in as_completed(names):
                yield names[each], each.result()
        finally:
            asks.shutdown(wait=False)

    def _note(self, name: str, entry: HostEntry) -> str:
        """Learn from a host's entry how it and others are called."""
        if name != entry.address:
            self._ways[entry.address] = self._ways.pop(name)
        for host in entry.hosts:
            self._ways.setdefault(host, parted(host))
        return entry.address

    def _use(self, entry: HostEntry) -> Way:
        self.term, self._present, self._hosts, self.lease_s = entry.term, entry.address, entry.hosts, entry.lease_s
        return self._ways[entry.address]

    def _withdraws(self, entry: HostEntry) -> bool:
        """Whether no vote for another host counts any more, before this worker uses a host that it had lost again."""
        if entry.term > self.term or not self._voted_for or self._clock() > self._voted_at + _LAPSE_S:
            return True
        self._votes += 1
        if not self._cast(self._ways[self._voted_for], self.worker, [0, self._votes], self.lease_s):
            return False
        self._voted_for = ""
        return True

    def _vote(self, seen: list[HostEntry], gone: set[str]) -> None:
        """Vote for the first host that could take over, unless an earlier vote may still count for another one."""
        if not self.worker or not self.term:
            return
        able = {entry.address for entry in seen if entry.ready and not entry.serves}
        order = (*self._hosts, *sorted(able))
        candidate = next((host for host in order if host in able), "")
        recent = self._clock() <= self._voted_at + _LAPSE_S and self._voted_for not in gone
        if not candidate or (self._votes and candidate != self._voted_for and recent):
            return
        self._voted_for, self._voted_at, self._votes = candidate, self._clock(), self._votes + 1
        self._cast(self._ways[candidate], self.worker, [self.term, self._votes], self.lease_s)
        self._voted_at = self._clock()  # the host counts from its arrival
