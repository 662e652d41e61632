"""What a ``serve`` process does beside its servers: it hosts the run, or stands by to take over."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.foundation.environment import parted
from lightning_asgd.core.job import registry
from lightning_asgd.core.job.addresses import listens
from lightning_asgd.core.job.facts import publish_facts
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.job.supervisor import Supervisor
from lightning_asgd.elastic.messages import Status, StatusRequest
from lightning_asgd.hosting.host_entry import (
    CALL,
    HOST_KEY,
    JOIN_KEY,
    STOP_KEY,
    VOTED_KEY,
    HostEntry,
    is_address,
    vote_of,
)
from lightning_asgd.hosting.lent_servers import ServerBorrower, ServerLender
from lightning_asgd.hosting.run_host import Action, RunHost

log = logging.getLogger(__name__)

# Parts of the lease.
_ASK = 0.12  # between two questions to another host
_STATUS = 0.2  # between two questions to the coordinator

_ANSWER_S = 5.0


class _OtherHost:
    """Asks another host again and again, in a thread: a host that has vanished takes a second each time."""

    def __init__(
        self,
        address: str,
        lease_s: Callable[[], float],
        note: Callable[[str, HostEntry | None, float, bool], None],
        look: Callable[[str, Rendezvous, float], None],
    ) -> None:
        self._address, self._lease_s, self._note, self._look = address, lease_s, note, look
        self._unsent: dict[str, Any] = {}
        self._closed = threading.Event()
        self._there: Rendezvous | None = None
        threading.Thread(target=self._run, name="lightning_asgd.host", daemon=True).start()

    def send(self, key: str, value: Any) -> None:
        """Publish a value in its rendezvous, as soon as it can be reached."""
        self._unsent[key] = value

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_ASK * self._lease_s()):
            asked_at, host = time.monotonic(), parted(self._address)
            try:
                if self._there is None:
                    self._there = Rendezvous.connect(*host, CALL * self._lease_s(), elsewhere=True)
                for key, value in list(self._unsent.items()):
                    self._there.put(key, value)
                    if self._unsent.get(key) is value:
                        del self._unsent[key]
                self._look(self._address, self._there, asked_at)
                entry = HostEntry.of(self._there.peek(HOST_KEY, dict))
                self._note(self._address, entry, asked_at, False)
            except Exception as error:  # of any kind: else this host would never be asked again
                if not isinstance(error, RuntimeError):
                    log.exception("Host %s could not be queried.", self._address)
                self._drop()
                self._note(self._address, None, asked_at, listens(*host) is False)
        self._drop()

    def _drop(self) -> None:
        there, self._there = self._there, None
        if there is not None:
            there.close()


class _Heard:
    """When this host's coordinator has heard each worker. It is asked without waiting for its answer."""

    def __init__(self, rendezvous: Rendezvous, transport: str, interface: str, lease_s: Callable[[], float]) -> None:
        self._rendezvous, self._kind, self._interface = rendezvous, registry.kind_of(transport), interface
        self._lease_s = lease_s
        self._connection: Transport | None = None
        self._call: Any = None
        self._asked_at = 0.0
        self._near: set[int] = set()  # workers that had just been heard
        self.at: Mapping[int, float] = {}
        self.left: set[int] = set()
        """Workers that have left. One that was silent before it was excluded may be alive, and is not among them."""

    def look(self, key: str, now: float) -> None:
        """Take an answer that has arrived; ask again now and then."""
        if self._call is not None and self._call.done():
            call, self._call = self._call, None
            with contextlib.suppress(RuntimeError):
                self._take(call.wait())
        elif self._call is None and now > self._asked_at + _STATUS * self._lease_s():
            self._asked_at = now
            address = str(self._rendezvous.peek_server(key).get("address", ""))
            if address:
                with contextlib.suppress(RuntimeError):
                    self._call = self._connected(address).call(0, StatusRequest(), _ANSWER_S)

    def _take(self, answer: Any) -> None:
        if isinstance(answer, Status):
            asked = self._asked_at
            self.at = {w.worker: min(asked - w.silent_s, asked) for w in answer.workers if not w.away}
            self.left |= self._near - {w.worker for w in answer.workers}
            self._near = {w.worker for w in answer.workers if not w.away and w.silent_s < self._lease_s()}

    def _connected(self, address: str) -> Transport:
        connection = self._connection
        if connection is None or not connection.alive or connection.addresses != (address,):
            self.close()
            self._connection = connection = self._kind.connect([address], self._interface)
        return connection

    def close(self) -> None:
        """Close the connection, and forget what was heard over it."""
        if self._connection is not None:
            self._connection.close()
        self._connection, self._call, self.at, self._near = None, None, {}, set()


class RunHosting(contextlib.AbstractContextManager["RunHosting"]):
    """Keeps this process's :class:`RunHost` informed, and does what it decides; ``borrower`` has lent servers."""

    def __init__(
        self,
        entry: HostEntry,
        rendezvous: Rendezvous,
        overseer: Supervisor,
        interface: str,
        borrower: ServerBorrower | None = None,
    ) -> None:
        self._host, self._lock = RunHost(entry, time.monotonic()), threading.Lock()
        self._rendezvous, self._overseer = rendezvous, overseer
        self._others: dict[str, _OtherHost] = {}
        self._heard = _Heard(rendezvous, entry.transport, interface, self._lease_s)
        self._published: HostEntry | None = None
        self._voted: Any = None
        self._could_take_over = False
        self._lender = ServerLender(rendezvous, overseer.settings, entry.address, entry.lease_s)
        self._borrower = borrower
        self.keys = [*overseer.keys(entry.servers), *(borrower.keys if borrower else ())]
        """Of this host's servers, and of those that others lend, in its rendezvous."""
        self.announced = False
        """Whether workers can find the run here."""
        publish_facts(rendezvous)
        self._publish()
        if entry.serves and borrower is None:
            self._announce()

    def _add(self, address: str | None) -> None:
        """Another host is there, if that is an address."""
        if is_address(address):
            with self._lock:
                self._host.add(str(address))

    def _lease_s(self) -> float:
        """The lease of a host of this run: of the host that serves, if it is another one."""
        return self.entry.lease_s

    @property
    def entry(self) -> HostEntry:
        """What this host publishes now."""
        return self._host.entry

    @property
    def takes_part(self) -> bool:
        """Whether it serves, or could take over as far as the present host knows."""
        return self.entry.serves or (self.entry.ready and self.entry.address in self.entry.hosts)

    def step(self) -> None:
        """Decide what to do now, and do it. Called several times a second."""
        now = time.monotonic()
        stop = 0
        match self._rendezvous.peek(STOP_KEY, dict):
            case {"term": int(stop), "by": str(rival)}:
                self._add(rival)
        self._add(self._rendezvous.peek(JOIN_KEY, str))
        self._ask_others()
        if self.entry.serves and self._others:
            self._heard.look(self.keys[0], now)
        elif not self.entry.serves:
            self._look_for_votes(now)
            if not self.entry.ready and all(self._rendezvous.peek_server(key).get("address") for key in self.keys):
                self._host.be_ready()
        with self._lock:
            heard, left = self._heard.at, self._heard.left
            action = self._host.step(now, heard, left=left, stop=stop)
        self._do(action)
        self._publish()
        self._report_readiness()
        if self.entry.serves:
            self._borrow(now)
        else:
            self._lender.step(now, self.entry, self._host.present_reached_at)

    def leave(self) -> None:
        """Kill the servers if workers can elect another host; else these write their last snapshots and end."""
        successor = self._host.successor if self.entry.serves else ""
        if successor:
            log.warning("Host %s can take over: the servers of this one are killed.", successor)
            self._overseer.kill_servers()
            if self._borrower is not None:
                self._borrower.kill()

    def __exit__(self, *_: object) -> None:
        self._lender.close()
        if self._borrower is not None:
            self._borrower.close()
        for other in self._others.values():
            other.close()
        self._heard.close()

    def _ask_others(self) -> None:
        for address in set(self._host.others) - self._others.keys():
            self._others[address] = _OtherHost(address, self._lease_s, self._note, self._look)
        for address in self._others.keys() - set(self._host.others):
            self._others.pop(address).close()
        entry = self.entry
        if not entry.serves and entry.address not in entry.hosts:
            for address in (entry.present,) if entry.present in self._others else self._others:
                self._others[address].send(JOIN_KEY, entry.address)

    def _note(self, address: str, entry: HostEntry | None, asked_at: float, ended: bool) -> None:
        with self._lock:
            self._host.see(address, entry, asked_at, ended=ended)

    def _look(self, address: str, there: Rendezvous, now: float) -> None:
        """Tell another host, or read there, what concerns lent servers; in the thread that asks it."""
        if not self.entry.serves:
            if address == self.entry.present:
                self._lender.renew(there, now)
        elif self._borrower is not None:
            self._borrower.read(address, there, now)

    def _borrow(self, now: float) -> None:
        """Have other hosts lend servers; let workers in once all have started."""
        borrower, entry = self._borrower, self.entry
        if borrower is None:
            return
        if self.announced:
            borrower.step(now)
            return
        for address, (key, order) in borrower.orders(self._host.ready, entry.term, entry.address, now).items():
            if address in self._others:
                self._others[address].send(key, order)
        if borrower.complete:
            log.warning("All servers of run %r have started.", entry.run)
            self._announce()

    def _look_for_votes(self, now: float) -> None:
        """Read the workers' votes, if there are others than at the last time."""
        voted = self._rendezvous.peek(VOTED_KEY, list)
        if voted == self._voted:
            return
        self._voted = voted
        for worker in self.entry.workers:
            match self._rendezvous.peek(vote_of(worker), list):
                case [int(term), int(number)]:
                    self._host.note_vote(worker, term, number, now)

    def _do(self, action: Action) -> None:
        entry = self.entry
        if action is Action.SERVE:
            log.warning(
                "The workers have lost the host of run %r. This host takes over (term %d).", entry.run, entry.term
            )
            self._lender.close()
            self._announce()
        elif action is Action.STOP:
            self._overseer.hot_standby = self.announced = False
            self._overseer.kill_servers()
            borrower, self._borrower = self._borrower, None
            if borrower is not None:
                borrower.kill()
                borrower.close()
            log.warning(
                "Another host may have taken over run %r: this host has killed its servers and stands by. If no other "
                "host serves the run, check the network between the hosts and the workers.",
                entry.run,
            )
            self._heard.close()
            self._overseer.add_servers(entry.servers, succeed=True)
            self.keys = self._overseer.keys(entry.servers)
        elif action is Action.ASK_TO_STOP and self._host.rival in self._others:
            self._others[self._host.rival].send(STOP_KEY, {"term": self._host.rival_term, "by": entry.address})

    def _report_readiness(self) -> None:
        """Log it if this standby host cannot take over any more."""
        entry, host = self.entry, self._host
        could, self._could_take_over = self._could_take_over, entry.ready and host.may_take_over
        if could and not self._could_take_over and not entry.serves and entry.present:
            log.warning(
                "This host cannot take over run %r any more: host %s, which serves it, %s. Check the network between "
                "them: once they reach each other, it can again.",
                entry.run,
                entry.present,
                f"has not answered for {host.silent_s:.0f} s"
                if entry.address in entry.hosts
                else f"does not count {entry.address} among the run's hosts",
            )

    def _announce(self) -> None:
        self._overseer.hot_standby = self.announced = True
        self._rendezvous.announce_run(self.entry.run, self.entry.transport, self.keys)

    def _publish(self) -> None:
        if self.entry != self._published:
            self._published = self.entry
            self._rendezvous.put(HOST_KEY, self.entry.to_dict())
