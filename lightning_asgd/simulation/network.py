"""Links of limited speed between workers and servers, and the transport that sends over them in virtual time.

Every worker and every server has a link of its own, whose two directions do not disturb each other. A message goes out
over its sender's link and comes in over its receiver's. A link sends one message after the other, in the order in which
they arrive; the two links of a message work at the same time, so that the slower one sets its pace. Only tensors have
bytes: what a small message costs is latency. Lease requests and heartbeats do not wait behind tensors, since real ones
have a connection of their own.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.futures import Future

from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.layout import nbytes_of as shard_nbytes
from lightning_asgd.core.foundation.validation import at_least
from lightning_asgd.core.protocol import nbytes as nbytes_of
from lightning_asgd.core.protocol.collective import Contribution
from lightning_asgd.core.protocol.lease import LeaseRequest, OpenEpoch
from lightning_asgd.core.protocol.session import Heartbeat, Join
from lightning_asgd.core.protocol.update import Exchange, InitShard, Reply
from lightning_asgd.plan.sizing import ServerCosts


class VirtualClock:
    """Scheduled events; time jumps from one to the next, in the order of their scheduling. Returns the time in s."""

    def __init__(self) -> None:
        self.now = 0.0
        self._count = 0
        self._coming: list[tuple[float, int, Callable[[], object]]] = []

    def __call__(self) -> float:
        """Seconds since the beginning."""
        return self.now

    def at(self, time_s: float, action: Callable[[], object]) -> None:
        """Schedule a function; a time in the past means now."""
        self._count += 1
        heapq.heappush(self._coming, (max(time_s, self.now), self._count, action))

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        """Call something after a number of seconds; 0 means after everything that is due now."""
        self.at(self.now + delay_s, action)

    def run(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Let time pass until there is nothing more to happen, or nothing more is wanted."""
        while self._coming and wanted():
            self.now, _, action = heapq.heappop(self._coming)
            action()


_AT_ONCE = Join, InitShard, OpenEpoch


@dataclass(frozen=True)
class Link:
    """What joins a worker or a server to the network.

    Args:
        bandwidth: bytes per second, in each direction.
        latency_s: seconds from one end to the other.

    Raises:
        ConfigurationError: a value is out of range.
    """

    bandwidth: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        at_least("Link(bandwidth)", self.bandwidth, 0, above=True)
        at_least("Link(latency_s)", self.latency_s, 0, finite=True)


@dataclass(frozen=True, kw_only=True)
class Network:
    """All links. By default messages take no time.

    Args:
        workers: the link of every worker, or one per worker.
        servers: the link of every server, or one per server.
        service_s: seconds that a server works on a message, or what each kind costs; it works on one at a time.

    Raises:
        ConfigurationError: a value is of the wrong type or out of range.
    """

    workers: Link | Sequence[Link] = field(default_factory=Link)
    servers: Link | Sequence[Link] = field(default_factory=Link)
    service_s: float | ServerCosts = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.service_s, ServerCosts):
            at_least("Network(service_s)", self.service_s, 0, finite=True)
        for name in ("workers", "servers"):
            links = getattr(self, name)
            if not all(isinstance(link, Link) for link in ([links] if isinstance(links, Link) else links)):
                raise ConfigurationError(f"Network({name})={links!r}. Expected a Link(...), or a list of them.")

    def links(self, which: str, count: int) -> list[Link]:
        """One link per worker or server.

        Args:
            which: ``"workers"`` or ``"servers"``.
            count: how many there are.

        Raises:
            ConfigurationError: as many links were not given.
        """
        links = getattr(self, which)
        if isinstance(links, Link):
            return [links] * count
        if len(links) != count:
            raise ConfigurationError(
                f"Network({which}) has {len(links)} links for {count} {which}. Expected one per {which[:-1]}, or a "
                "single Link(...) for all."
            )
        return list(links)


class _Direction:
    """One direction of a link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.nbytes = 0
        self._free_at = 0.0

    def send(self, nbytes: int, first: float, last: float, *, urgent: bool = False) -> tuple[float, float]:
        """Send a message whose first and last byte are ready at these times. Returns when they arrive."""
        if urgent:
            return first + self.link.latency_s, last + self.link.latency_s
        begun = max(first, self._free_at)
        self._free_at = begun + nbytes / self.link.bandwidth
        self.nbytes += nbytes
        return begun + self.link.latency_s, max(self._free_at, last) + self.link.latency_s


@dataclass(frozen=True)
class _Sent:
    """A message on its way."""

    worker: int
    server: int
    message: Any
    nbytes: int
    future: Future[Any]

    @property
    def urgent(self) -> bool:
        return getattr(self.message, "urgent", False)


class Wires:
    """A network at work.

    Until :meth:`begin` is called messages take no time and count no bytes: the start of a session is not simulated.
    Nor is the beginning of an epoch.

    Args:
        clock: virtual time.
        network: the links.
        workers: number of workers.
        handlers: what answers a message, one per server.

    Raises:
        ConfigurationError: the network has another number of links.
    """

    def __init__(
        self, clock: VirtualClock, network: Network, workers: int, handlers: Sequence[Callable[[Any], Any]]
    ) -> None:
        self.clock = clock
        self.handlers = list(handlers)
        self.begun = False
        ends, hubs = network.links("workers", workers), network.links("servers", len(self.handlers))
        self.to_network, self.to_worker = [_Direction(e) for e in ends], [_Direction(e) for e in ends]
        self.to_server, self.from_server = [_Direction(h) for h in hubs], [_Direction(h) for h in hubs]
        self.worked_s = [0.0] * len(self.handlers)  # by each server
        self._service_s = network.service_s
        self._idle_at = [0.0] * len(self.handlers)
        self._whole_nbytes: dict[tuple[int, int], int] = {}  # of a server's shard of a fragment, without compression

    def begin(self) -> None:
        """From now on messages take time."""
        self.begun = True

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Meanwhile messages take no time: a worker joins."""
        begun, self.begun = self.begun, False
        yield
        self.begun = begun

    def transport(self, worker: int) -> Transport:
        """A worker's connection to the servers."""
        return _VirtualTransport(self, worker)

    def send(self, worker: int, server: int, message: Any) -> Future[Any]:
        """Send a message to a server. Its tensors are copied now, as a wire would."""
        future: Future[Any] = Future()
        nbytes = 0
        if isinstance(message, Exchange) and message.update is not None:
            message = replace(message, update=tuple(map(_copied, message.update)))
            nbytes = nbytes_of(message.update)
        elif isinstance(message, InitShard):
            self._whole_nbytes[server, message.fragment] = shard_nbytes(message.groups)
        if not self.begun or isinstance(message, _AT_ONCE):
            self._when_answered(self.handlers[server](message), future.set_result)
            return future
        sent = _Sent(worker, server, message, nbytes, future)
        now = self.clock.now
        first, last = self.to_network[worker].send(nbytes, now, now, urgent=sent.urgent)
        self.clock.at(first, lambda: self._come_in(sent, last))
        return future

    def _come_in(self, sent: _Sent, last: float) -> None:
        """The first byte has reached the server's link."""
        _, there = self.to_server[sent.server].send(sent.nbytes, self.clock.now, last, urgent=sent.urgent)
        self.clock.at(there, lambda: self._arrive(sent))

    def _arrive(self, sent: _Sent) -> None:
        """The message has arrived: the server handles it after the earlier ones."""
        work_s = self._work_s(sent)
        done = max(self.clock.now, self._idle_at[sent.server]) + work_s
        self._idle_at[sent.server] = done
        self.worked_s[sent.server] += work_s
        if done > self.clock.now:
            self.clock.at(done, lambda: self._handle(sent))
        else:
            self._handle(sent)

    def _work_s(self, sent: _Sent) -> float:
        costs = self._service_s
        if not isinstance(costs, ServerCosts):
            return costs
        if isinstance(sent.message, Exchange):
            pushed = sent.message.update is not None
            # However short its code is, the server decodes and applies a whole update, and encodes all weights.
            return costs.exchange_of(self._whole_nbytes[sent.server, sent.message.fragment] if pushed else 0)
        by_kind = {LeaseRequest: costs.claim_s, Heartbeat: costs.beat_s, Contribution: costs.contribution_s}
        return by_kind.get(type(sent.message), 0.0)

    def _handle(self, sent: _Sent) -> None:
        # A blocked reply is released while the server handles another message, so it is sent in an event of its own.
        self._when_answered(
            self.handlers[sent.server](sent.message),
            lambda value: self.clock.after(0.0, lambda: self._leave(sent, value)),
        )

    def _leave(self, sent: _Sent, value: Any) -> None:
        """An answer leaves the server."""
        weights = value.weights if isinstance(value, Reply) else None
        nbytes = nbytes_of(weights) if weights is not None else 0
        now = self.clock.now
        first, last = self.from_server[sent.server].send(nbytes, now, now, urgent=sent.urgent)
        self.clock.at(first, lambda: self._come_back(sent, nbytes, last, value))

    def _come_back(self, sent: _Sent, nbytes: int, last: float, value: Any) -> None:
        _, there = self.to_worker[sent.worker].send(nbytes, self.clock.now, last, urgent=sent.urgent)
        self.clock.at(there, lambda: sent.future.set_result(value))

    def _when_answered(self, answer: Any, use: Callable[[Any], None]) -> None:
        if isinstance(answer, Future):
            answer.add_done_callback(lambda done: use(done.value()))
        else:
            use(answer)


class _VirtualTransport(Transport):
    def __init__(self, wires: Wires, worker: int) -> None:
        self._wires = wires
        self._worker = worker

    @property
    def num_servers(self) -> int:
        return len(self._wires.handlers)

    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        return self._wires.send(self._worker, server, message)

    def close(self) -> None:
        pass


def _copied(part: Any) -> Any:
    """A copy of one group's update, a tensor or a code of several."""
    return part.clone() if isinstance(part, Tensor) else tuple(each.clone() for each in part)
