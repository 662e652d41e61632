"""Servers that a process runs for a host on another machine, and what that host knows of them.

The host *borrows*: it orders others to start servers, and has their addresses published beside those of its own. A
lender has a lease: its lent servers live for ``lease_s`` after it last reached the host, and only while that host
serves. So when the host has not heard a lender for longer than that, the lent servers are gone, and it starts others
in their place, which are restored from the workers' copies. A host that takes over uses servers of its own only.

In an elastic run, standby hosts lend servers to the host that serves. Jobs use this through ``placed_servers.py``.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_asgd.core.job.rendezvous import Rendezvous, successor_of
from lightning_asgd.core.job.supervisor import Supervisor
from lightning_asgd.core.server.process import ServerSettings
from lightning_asgd.hosting.host_entry import HostEntry

log = logging.getLogger(__name__)

_ORDER_KEY = "servers to lend"  # at the lender
_LENT_KEY = "lent servers"  # there, too
_MARGIN_S = 1.0  # for ending servers, and for clocks of different speeds
_START_S = 60.0  # for a lender's servers to start, before another host is asked


def renewal_of(lender: str) -> str:
    """The key, at the present host, that a lender changes all the time."""
    return f"lender/{lender}"


def _replaced_of(lender: str) -> str:
    """The key, there, of when the order was given whose servers others have replaced."""
    return f"lender/{lender}/replaced"


def servers_of_machine(servers: int, machines: int, machine: int) -> range:
    """The servers that one of several machines has."""
    return range(servers * machine // machines, servers * (machine + 1) // machines)


class LentServers:
    """Runs servers for a host elsewhere, which names it ``lender``; they live ``lease_s`` since it was reached last."""

    _here = "This host"
    _level = logging.WARNING  # of what is logged as servers start, and when their order was withdrawn

    def __init__(self, rendezvous: Rendezvous, settings: ServerSettings, lender: str, lease_s: float) -> None:
        self.rendezvous, self._lender, self._lease_s = rendezvous, lender, lease_s
        self._settings = replace(settings, snapshots="")  # a folder holds those of a whole run
        self._servers: Supervisor | None = None
        self._keys: list[str] = []  # of their addresses, in this process's rendezvous
        self._order: dict[str, Any] = {}  # the latest order that was carried out
        self._replaced = False  # whether others have taken these servers' place

    def keep(self, order: dict[str, Any], now: float, reached_at: float) -> None:
        """Start the servers that an order names, keep them, or end them; an empty order names none.

        ``reached_at``: when the latest question was sent to which the host has answered that the order holds.
        """
        in_time = now <= reached_at + self._lease_s
        due = bool(order) and in_time
        why = "others have replaced them" if self._replaced else "their order no longer holds"
        why = why if in_time else "their lease is over"
        if self._servers is not None and (not due or order != self._order or self._replaced):
            level = self._level if in_time and not self._replaced else logging.WARNING
            log.log(level, "%s has ended the servers that it ran for %s: %s.", self._here, self._order["by"], why)
            self.close()
        if self._servers is None and due and order != self._order:
            self._lend(order)
        if self._servers is not None:
            self._servers.extend_lease(reached_at + self._lease_s)
            self._servers.check_servers()

    def _lend(self, order: dict[str, Any]) -> None:
        match order:
            case {"first": int(first), "number": int(number)} if first > 0 and 0 < number <= 4096:
                self._order, self._replaced = order, False
                servers = Supervisor(self.rendezvous, self._settings, first=first)
                try:
                    servers.start()
                    servers.add_servers(number)
                except OSError:
                    servers.close()
                    raise
                self._servers, self._keys = servers, servers.keys(number)
                numbers = ", ".join(map(str, range(first, first + number)))
                log.log(self._level, "%s starts servers %s for %s.", self._here, numbers, order["by"])

    def renew(self, there: Rendezvous, now: float) -> None:
        """Have the host know that the servers live, and ask whether it has replaced them.

        Called before that host is asked whether its order still holds: a host that was paused finds out.
        """
        if self._servers is not None:
            there.put(renewal_of(self._lender), {"at": self._order["at"], "now": now})
            at = self._order["at"]
            if there.peek(_replaced_of(self._lender)) == at == self._order["at"]:
                self._replaced = True

    def close(self) -> None:
        """End the servers at once."""
        servers, self._servers = self._servers, None
        if servers is not None:
            servers.kill_servers()
            servers.close()


class ServerLender(LentServers):
    """The servers that this host of an elastic run lends, if it is ordered to."""

    def step(self, now: float, entry: HostEntry, reached_at: float) -> None:
        """Start and end lent servers. ``reached_at``: when the latest question that the host has answered was sent."""
        order = self.rendezvous.peek(_ORDER_KEY, dict) or {}
        given = not entry.serves and (order.get("by"), order.get("term")) == (entry.present, entry.term)
        self._lease_s = entry.lease_s
        self.keep(order if given else {}, now, reached_at)

    def _lend(self, order: dict[str, Any]) -> None:
        super()._lend(order)
        self.rendezvous.put(_LENT_KEY, {"order": self._order, "keys": self._keys})


@dataclass
class BorrowedShare:
    """Servers that another host is to lend."""

    servers: range
    keys: list[str]  # of their addresses, at the present host
    lender: str = ""
    asked_at: float = -math.inf
    renewal: dict[str, Any] = field(default_factory=dict)  # what the lender wrote last
    renewed_at: float = math.inf
    addresses: dict[int, dict[str, Any]] = field(default_factory=dict)  # entries of the servers that have started
    replaced: Supervisor | None = None  # servers of this host in the place of lost ones


class BorrowedServers:
    """Servers that other processes run for this host, and those that it starts in the place of lost ones.

    ``lease_s``: seconds for which borrowed servers live since their lender reached this host last.
    """

    _lost = "Host %s, which lends servers %s, is lost. Others are started here."

    def __init__(self, rendezvous: Rendezvous, settings: ServerSettings, lease_s: float) -> None:
        self._rendezvous, self._settings, self._lease_s = rendezvous, settings, lease_s
        self._blocks: list[BorrowedShare] = []

    @property
    def _needed(self) -> bool:
        """Whether others are started in the place of lost servers."""
        return True

    @property
    def keys(self) -> list[str]:
        """Of the borrowed servers' addresses, in the rendezvous."""
        return [key for block in self._blocks for key in block.keys]

    def step(self, now: float) -> None:
        """Replace the servers of lenders that are lost. Called once all have started."""
        for block in self._blocks:
            if block.replaced is not None:
                continue
            renewal = self._rendezvous.peek(renewal_of(block.lender), dict) or {}
            if renewal.get("at") == block.asked_at and renewal != block.renewal:
                block.renewal, ended = renewal, bool(renewal.get("ended"))
                block.renewed_at = now - self._lease_s if ended else now
            elif self._needed and now > block.renewed_at + self._lease_s + _MARGIN_S:
                self._replace(block)
        for block in self._blocks:
            if block.replaced is not None:
                block.replaced.check_servers()

    def _replace(self, block: BorrowedShare) -> None:
        log.warning(self._lost, block.lender, ", ".join(map(str, block.servers)))
        self._rendezvous.put(_replaced_of(block.lender), block.asked_at)
        servers = Supervisor(self._rendezvous, self._settings, first=block.servers[0])
        try:
            servers.start()
            servers.add_servers(len(block.servers), succeed=True)
            for key, successor in zip(block.keys, servers.keys(len(block.servers)), strict=True):
                self._rendezvous.put(successor_of(key), successor)
        except Exception:
            servers.close()  # it is tried again
            raise
        block.replaced = servers

    def kill(self) -> None:
        """End the servers that run here in the place of lost ones: another host may have taken over."""
        for block in self._blocks:
            if block.replaced is not None:
                block.replaced.kill_servers()

    def close(self) -> None:
        """End them, as this host ends."""
        for block in self._blocks:
            if block.replaced is not None:
                block.replaced.close()


class ServerBorrower(BorrowedServers):
    """The servers that other hosts of an elastic run lend to this one, which counts among the ``machines``."""

    def __init__(self, entry: HostEntry, rendezvous: Rendezvous, settings: ServerSettings, machines: int) -> None:
        super().__init__(rendezvous, settings, entry.lease_s)
        self._lock = threading.Lock()  # of the blocks: each lender is read in a thread
        for machine in range(1, machines):
            numbers = servers_of_machine(entry.servers, machines, machine)
            self._blocks.append(BorrowedShare(numbers, [f"server/lent/{number}" for number in numbers]))

    @property
    def complete(self) -> bool:
        """Whether all of them have started."""
        return all(len(block.addresses) == len(block.servers) for block in self._blocks)

    def orders(self, hosts: Sequence[str], term: int, by: str, now: float) -> dict[str, tuple[str, dict[str, Any]]]:
        """What to publish at which host, as a key and a value, so that it lends servers; ``hosts`` could."""
        found: dict[str, tuple[str, dict[str, Any]]] = {}
        with self._lock:
            for block in self._blocks:
                before, order = block.lender, self._order(block, hosts, now)
                if before and order is not None:
                    found[before] = _ORDER_KEY, {}
                if order:
                    found[block.lender] = _ORDER_KEY, {"by": by, "term": term, **order}
        return found

    def _order(self, block: BorrowedShare, hosts: Sequence[str], now: float) -> dict[str, Any] | None:
        """The order for a block's next lender, empty if there is none; None if the present one may still obey."""
        waits = block.lender and (block.lender in hosts or block.addresses) and now <= block.asked_at + _START_S
        if len(block.addresses) == len(block.servers) or waits:
            return None
        if block.lender:
            log.warning("Host %s has not started the servers that were requested.", block.lender)
        taken = {each.lender for each in self._blocks if each is not block}
        block.lender = next((host for host in hosts if host not in taken), "")
        block.asked_at, block.addresses, block.renewed_at = now, {}, math.inf
        return {"first": block.servers[0], "number": len(block.servers), "at": now} if block.lender else {}

    def read(self, lender: str, there: Rendezvous, now: float) -> None:
        """Read at a lender where its servers are, and publish it here. Called in any thread."""
        block = next((each for each in self._blocks if each.lender == lender and each.replaced is None), None)
        match there.peek(_LENT_KEY, dict) if block is not None else None:
            case {"order": {"first": first, "at": asked_at}, "keys": [*keys]} if block is not None:
                entries = [there.way_to_server(str(key)) for key in keys]
                with self._lock:
                    if (first, asked_at, len(keys)) == (block.servers[0], block.asked_at, len(block.keys)):
                        self._publish(block, entries, now)

    def _publish(self, block: BorrowedShare, entries: list[dict[str, Any]], now: float) -> None:
        if block.renewed_at == math.inf:
            block.renewed_at = now
        for index, entry in enumerate(entries):
            if entry.get("address") and entry != block.addresses.get(index):
                block.addresses[index] = entry
                self._rendezvous.put(block.keys[index], entry)
