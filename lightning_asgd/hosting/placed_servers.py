"""Servers of a job on several nodes (``server_machines``): each of the first nodes runs its share of them.

The process that hosts a job's servers publishes an order. The first process of every other node carries out its part of
the order: it starts servers, and publishes their addresses at the host. A node has a lease, as a host has that lends
servers to an elastic run: its servers live for ``lease_s`` after the node last reached the host. When the host has not
heard of the node for longer, it starts others, which are restored from the workers' copies. A worker that takes over as
host publishes no order, and runs all servers itself.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from lightning_asgd.core.foundation.errors import ConfigurationError, LaunchError
from lightning_asgd.core.job import registry, supervisor
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.job.supervisor import Supervisor
from lightning_asgd.core.server.process import ServerSettings
from lightning_asgd.hosting.lent_servers import (
    BorrowedServers,
    BorrowedShare,
    LentServers,
    renewal_of,
    servers_of_machine,
)
from lightning_asgd.hosting.server_hosts import ServerHosts

log = logging.getLogger(__name__)

LEASE_S = 10.0
"""The shortest lease of a node."""
_ORDER_KEY = "servers to run"  # at the host
_STEP_S = 0.3
_CALL_S = 2.0
_END_S = 5.0


def _lender(node: int) -> str:
    return f"node {node}"


def _key(node: int, at: int, server: int) -> str:
    """Where a node publishes a server's address, at the host. Another order has others: a store may be used again."""
    return f"server/node {node}/{at:x}/{server}"


def lease_of(silence_s: float, start_s: float) -> float:
    """For how long a node's servers live without reaching the host, in a job with these time-outs.

    That is how long a worker may be silent, since the process that renews the lease also trains; but workers wait for
    replacements for ``start_s`` only.
    """
    return float(max(min(silence_s, start_s / 2), LEASE_S))


def node_of(key: str) -> int:
    """The node on which the server with such a key runs; 0 for those where the job's servers are hosted."""
    found = re.match(r"server/node (\d+)/", key)
    return 0 if found is None else int(found[1])


def checked_node(machines: int, nodes: int, rank: int, node_of_process: Callable[[], int]) -> int:
    """The node of this process; 0 where servers are not divided.

    Raises a ``ConfigurationError`` if there are fewer nodes than ``machines``, or worker 0 is not on the first.
    """
    if machines > nodes:
        raise ConfigurationError(
            f"Advanced.server_machines={machines} was given in a job with num_nodes={nodes}. Expected at most as "
            "many as nodes."
        )
    node = node_of_process() if machines > 1 else 0
    if rank == 0 and node != 0:
        raise ConfigurationError(
            f"Advanced.server_machines={machines} was given, but worker 0 is on node {node}. Expected it on node 0. "
            "Have the launcher number nodes and ranks in the same order."
        )
    return node


@contextlib.contextmanager
def node_named(server: int, key: str) -> Iterator[None]:
    """While a server's address is awaited, add to a time-out which node should run that server."""
    try:
        yield
    except LaunchError as error:
        if not node_of(key) or "did not start within" not in str(error):
            raise
        raise LaunchError(
            f"{error}\nServer {server} belongs to node {node_of(key)}, whose process with local rank 0 starts it. "
            "Expected that process to run with the same Advanced.server_machines, and to reach the first machine."
        ) from error


class PlacedServers(BorrowedServers):
    """What the process that hosts a job's servers knows of those on other nodes.

    ``machines`` includes this one. ``hosts`` tells which worker hosts the servers, where that can change. ``lease_s``:
    for which a node's servers live without reaching this process.
    """

    _lost = "The first process of %s, which runs servers %s, is lost. Others are started here."

    def __init__(
        self, overseer: Supervisor, servers: int, machines: int, hosts: ServerHosts | None, lease_s: float = LEASE_S
    ) -> None:
        if overseer.rendezvous is None:
            raise ValueError("a supervisor without a rendezvous has no servers")
        super().__init__(overseer.rendezvous, overseer.settings, lease_s)
        self.overseer, self._hosts = overseer, hosts
        self._division = servers, machines
        at = secrets.randbits(48)
        for node in range(1, machines):
            numbers = servers_of_machine(servers, machines, node)
            keys = [_key(node, at, number) for number in numbers]
            self._blocks.append(BorrowedShare(numbers, keys, lender=_lender(node), asked_at=at))
        settings = {**asdict(overseer.settings), "moves": True}  # if they end, their workers find others
        self._order = {
            "at": at,
            "by": f"worker {0 if hosts is None else hosts.rank}",
            "servers": servers,
            "machines": machines,
            "standby": overseer.hot_standby,
            "lease_s": lease_s,
            "settings": settings,
        }

    def announce(self) -> None:
        """Let the nodes start their servers, or keep them."""
        self._rendezvous.put(_ORDER_KEY, self._order)

    @property
    def _needed(self) -> bool:
        """Whether a fit needs them, whose workers can restore them."""
        return self.overseer.hot_standby

    def serves(self, servers: int, machines: int, now: float, lease_s: float = LEASE_S) -> bool:
        """Whether these are a job's servers, and none was lost without others in its place."""
        return (servers, machines, lease_s) == (*self._division, self._lease_s) and all(
            now <= block.renewed_at + self._lease_s if block.replaced is None else block.replaced.healthy
            for block in self._blocks
        )

    def _replace(self, block: BorrowedShare) -> None:
        super()._replace(block)
        if block.replaced is not None and self._hosts is not None:
            block.replaced.has_returned = self._hosts.has_returned
            for rank, why in self._hosts.ended().items():
                block.replaced.report_exit("", rank, why)

    def close(self) -> None:
        """Have the nodes end their servers, and end those that run here in the place of lost ones."""
        with contextlib.suppress(RuntimeError):  # the rendezvous is lost
            self._rendezvous.put(_ORDER_KEY, {})
        super().close()


class NodeServers(LentServers):
    """The servers that this node (number ``node``) runs for the host. ``interface`` leads to the other machines."""

    _here = "This node"
    _level = logging.INFO  # each job starts and ends them

    def __init__(self, node: int, rendezvous: Rendezvous, interface: str) -> None:
        super().__init__(rendezvous, ServerSettings(), _lender(node), LEASE_S)
        self._node, self._interface = node, interface
        self._claimed: int | None = None  # the order that this process has said it carries out
        self._failure = ""  # why it cannot
        self._asked: dict[str, Any] = {}  # this node's part of the host's latest order
        self._reached_at = -math.inf
        self._standby = False
        self._published: dict[int, dict[str, Any]] = {}  # entries of the servers, by their numbers

    def ask(self, there: Rendezvous, now: float) -> None:
        """Renew the lease, learn the host's order, and publish at the host where the servers are."""
        self.renew(there, now)
        self._asked = self._part(there)
        self._reached_at = now
        if self._asked and self._asked != self._order:  # the host knows whose order it is before servers start
            self._claimed = self._asked["at"]
            there.put(renewal_of(self._lender), {"at": self._claimed, "now": now})
        if self._asked and self._failure:
            self._report(there, self._asked, self._failure)
        if self._servers is not None and self._asked == self._order and not self._replaced:
            self._publish(there)

    def _part(self, there: Rendezvous) -> dict[str, Any]:
        """This node's part of the host's order; none if a process before this one has carried that out."""
        order = there.peek(_ORDER_KEY, dict)
        match order:
            case {
                "at": int(at),
                "by": str(by),
                "servers": int(servers),
                "machines": int(machines),
                "standby": bool(standby),
                "lease_s": float(lease_s),
                "settings": dict(settings),
            }:
                numbers = servers_of_machine(servers, machines, self._node) if self._node < machines else ()
                renewed = (there.peek(renewal_of(self._lender), dict) or {}).get("at")
                if not numbers or (renewed == at and at not in (self._order.get("at"), self._claimed)):
                    return {}
                part = {"at": at, "by": by, "first": numbers[0], "number": len(numbers)}
                if at not in (self._order.get("at"), self._claimed):
                    try:
                        self._set(settings)
                    except LaunchError as error:
                        self._report(there, part, str(error))
                        return {}
                    self._standby, self._failure, self._lease_s = standby, "", lease_s
                return part
        return {}

    def _report(self, there: Rendezvous, part: dict[str, Any], why: str) -> None:
        """Let the workers know that this node cannot start its servers."""
        for number in range(part["first"], part["first"] + part["number"]):
            there.put(_key(self._node, part["at"], number), {"error": f"Node {self._node}: {why}"})

    def _set(self, settings: dict[str, Any]) -> None:
        interface = registry.kind_of(settings["transport"]).open_to_others(self.rendezvous, self._interface)
        self._settings = ServerSettings(**{**settings, "interface": interface, "snapshots": ""})

    def _lend(self, order: dict[str, Any]) -> None:
        super()._lend(order)
        self._published = {}
        if self._servers is not None:
            self._servers.hot_standby = self._standby

    def _publish(self, there: Rendezvous) -> None:
        for number, key in enumerate(self._keys, self._order["first"]):
            try:
                entry = self.rendezvous.way_to_server(key)
            except LaunchError as error:  # it could not be started
                entry = {"error": str(error).partition("\nExpected it to start.")[0]}
            if entry and entry != self._published.get(number):
                there.put(_key(self._node, self._order["at"], number), entry)
                self._published[number] = entry

    def step(self, now: float) -> None:
        """Start, keep or end the servers."""
        try:
            self.keep(self._asked, now, self._reached_at)
        except LaunchError:
            pass  # the workers learn that a server cannot be started
        except OSError as error:
            self._failure = f"a server's process cannot be started: {error}"

    def forget(self) -> None:
        """The host that has given the order is the host no longer."""
        self._asked = {}

    def say_ended(self, there: Rendezvous) -> None:
        """Let the host know that this node's servers have ended: it need not wait for the end of their lease."""
        if self._order:
            there.put(renewal_of(self._lender), {"at": self._order["at"], "ended": True})


class _Share:
    """Runs a node's servers, in a thread. ``where`` is the address of the host's rendezvous."""

    def __init__(self, servers: NodeServers, transport: str, where: Callable[[], tuple[str, int]]) -> None:
        self._transport, self.where = transport, where
        self.servers, self._lock = servers, threading.Lock()
        self._there: Rendezvous | None = None
        self._address: tuple[str, int] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_asgd.node", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(_STEP_S):
            now = time.monotonic()
            self._reach(lambda there, now=now: self.servers.ask(there, now))  # type: ignore[misc]
            with self._lock:
                if not self._closed.is_set():
                    self.servers.step(time.monotonic())
        with self._lock:
            self.servers.close()
        self._reach(self.servers.say_ended)
        self._drop()

    def _reach(self, call: Callable[[Rendezvous], None]) -> None:
        """Call with a connection to the host's rendezvous, if that can be reached."""
        address = self.where()
        if address != self._address:
            self._drop()
            self.servers.forget()
            self._address = address
        try:
            self._there = self._there or Rendezvous.connect(*address, _CALL_S, transport=self._transport)
            call(self._there)
        except Exception as error:  # of any kind: else the lease would end, and no message would say why
            if not isinstance(error, RuntimeError):
                log.exception("The host of the servers could not be queried.")
            self._drop()

    def _drop(self) -> None:
        there, self._there = self._there, None
        if there is not None:
            there.close()

    def close(self, *, wait: bool) -> None:
        """End the servers at once; ``wait`` until the host knows it."""
        self._closed.set()
        with self._lock:
            self.servers.close()
        if wait:
            self._thread.join(_END_S)


class _Watch:
    """Watches over the servers of other nodes, in a thread."""

    def __init__(self, placed: PlacedServers) -> None:
        self.placed, self._closed = placed, threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_asgd.nodes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(_STEP_S):
            try:
                self.placed.step(time.monotonic())
            except Exception as error:  # of any kind: else no lost node would be noticed any more
                if not isinstance(error, RuntimeError):  # else the workers learn it from the rendezvous
                    log.exception("The servers on other nodes could not be checked.")

    def close(self) -> None:
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S)
        self.placed.close()


_share: _Share | None = None  # of this process's node
_watch: _Watch | None = None  # in the process that hosts the servers
_inherited: list[Any] = []  # the parent's, of a forked process, which must not close it


def run_share(servers: NodeServers, transport: str, where: Callable[[], tuple[str, int]]) -> None:
    """As a node's first process, run its servers as ordered at ``where`` until it ends; those of earlier calls stay."""
    global _share
    if _share is not None and _share.servers.rendezvous is servers.rendezvous:
        _share.where = where
        return
    end_share()
    _share = _Share(servers, transport, where)
    supervisor.ensure_watch().on_close = end_share  # at exit, once this node's workers have ended


def announce_servers(
    overseer: Supervisor, servers: int, machines: int, hosts: ServerHosts | None, lease_s: float
) -> list[str]:
    """Have the servers of a job run on several nodes. Returns the keys of all servers' addresses."""
    global _watch
    keys = overseer.keys(len(servers_of_machine(servers, machines, 0)))
    if machines == 1:
        if _watch is not None:
            _watch.close()
            _watch = None
        return keys
    kept = _watch is not None and _watch.placed.overseer is overseer
    if _watch is None or not kept or not _watch.placed.serves(servers, machines, time.monotonic(), lease_s):
        if _watch is not None:
            _watch.close()
        _watch = _Watch(PlacedServers(overseer, servers, machines, hosts, lease_s))
        overseer.on_close = _watch.close
    _watch.placed.announce()
    return [*keys, *_watch.placed.keys]


def end_share(*, wait: bool = True) -> None:
    """End this node's share of the servers: the process ends, or is to host all servers itself."""
    global _share
    share, _share = _share, None
    if share is not None:
        share.close(wait=wait)


def _after_fork() -> None:
    global _share, _watch
    _inherited.append((_share, _watch))
    _share = _watch = None


os.register_at_fork(after_in_child=_after_fork)
