"""Calls over connections that break: each is handled once, and is answered unless its time is up or nobody listens.

A worker's end numbers its calls, repeats over a new connection those that were not answered, and acknowledges the
answers. So a server recognises a call that it has seen before, and keeps an answer until it has arrived. There is no
network here: a transport brings the connections, and reports what becomes of them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
import uuid
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torch.futures import Future

from lightning_asgd.transports.transport import TIMED_OUT, Transport

__all__ = ["Arrivals", "Call", "LinkedTransport", "ReplyCache", "Route", "ServerLink", "Wire"]

log = logging.getLogger(__name__)

_FORGET_S = 600.0  # heartbeats come every few seconds
_MOST = 1024  # unacknowledged answers per caller: a worker has as many calls in flight as a module has layers
_LATE = 4096  # finished calls that are remembered per caller: a copy of one may still arrive


# ---------------------------------------------------------------------- a worker's end


class Arrivals:
    """Numbers of calls whose answers have arrived, and are yet to be acknowledged. From any thread.

    It takes no lock: a lock holder may be waiting for the thread that brings an answer.
    """

    def __init__(self) -> None:
        self._numbers: deque[int] = deque()

    def note(self, *numbers: int) -> None:
        """Acknowledge them with the next call."""
        self._numbers.extend(numbers)

    def take(self) -> list[int]:
        """What to acknowledge now; to be noted again if the message is lost."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._numbers.popleft())
        return taken


@dataclass(eq=False)
class Call:
    """A message that waits for its answer."""

    number: int
    arrived: list[int]  # the answers that it acknowledges
    urgent: bool
    timeout_s: float  # 0 for no limit
    deadline: float
    packet: Any = None  # what its transport sends
    future: Future[Any] = field(default_factory=Future)

    def fail(self, error: Exception) -> None:
        """Fail, unless the call is over."""
        with contextlib.suppress(RuntimeError):
            self.future.set_exception(error)


class Wire(Protocol):
    """One of a link's two connections, which its transport makes again when it breaks."""

    urgent: bool

    def send(self, call: Call) -> None:
        """Send a call, or leave that to :meth:`ServerLink.renewed` while there is no connection."""

    def acknowledge(self, arrived: list[int]) -> None:
        """Tell the server which answers have arrived, or note them again in :attr:`ServerLink.arrivals`."""


class ServerLink:
    """The calls to one server's process. Any thread may use it, and no method waits.

    Two connections lead there. Each carries one message after the other, so a small and urgent one would wait behind
    weights that were sent before: 0.4 s for 2.4 MB there and back at 100 Mbit/s.
    """

    def __init__(
        self,
        server: int,
        connection: Callable[[bool], Wire],
        pack: Callable[[list[Any], Any], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.server = server
        self.caller = uuid.uuid4().hex
        self.arrivals = Arrivals()
        self.lost: str | None = None
        self._connection = connection
        self._pack = pack
        self._clock = clock
        self._numbers = itertools.count(1)
        # Changed by single operations that are atomic, so without a lock; by number.
        self._waiting: dict[int, Call] = {}
        self._renewed: dict[bool, str] = {}  # connections that were made again, and why; until an answer arrives

    def prepare(self, message: Any, timeout_s: float) -> Call:
        """A call that is numbered and packed, for :meth:`post`. Raises what packing raises."""
        deadline = self._clock() + timeout_s if timeout_s else math.inf
        urgent = bool(getattr(message, "urgent", False))
        call = Call(next(self._numbers), self.arrivals.take(), urgent, timeout_s, deadline)
        try:
            call.packet = self._pack([self.caller, call.number, call.arrived], message)
        except Exception:
            self.arrivals.note(*call.arrived)
            raise
        return call

    def post(self, call: Call) -> None:
        """Send a call."""
        self._waiting[call.number] = call
        if self.lost is None:
            self._connection(call.urgent).send(call)
        else:
            self.failed(call.number, RuntimeError(self.lost))

    def waits(self, number: int) -> bool:
        """Whether a call is not over."""
        return number in self._waiting

    def left_s(self, call: Call) -> float:
        """Seconds until a call's time is up."""
        return call.deadline - self._clock()

    def answered(self, connection: Wire, number: int, answer: Any) -> None:
        """Complete a call. Large answers are acknowledged at once: a server need not keep them until the next call."""
        why = self._renewed.pop(connection.urgent, None) if self._renewed else None
        if why is not None:
            log.warning("The connection to server %d broke (%s) and was made again.", self.server, why)
        call = self._waiting.pop(number, None)
        if call is None:
            return
        self.arrivals.note(number)
        if getattr(answer, "bulky", False):
            connection.acknowledge(self.arrivals.take())
        with contextlib.suppress(RuntimeError):  # it failed as the transport was closed
            call.future.set_result(answer)

    def failed(self, number: int, error: Exception) -> None:
        """Fail a call."""
        call = self._waiting.pop(number, None)
        if call is not None:
            self.arrivals.note(*call.arrived)
            call.fail(error)

    def renewed(self, connection: Wire, why: str) -> None:
        """Repeat over a connection that was made again what may have been lost with the one before."""
        self._renewed[connection.urgent] = why
        for call in self._calls(connection.urgent):
            connection.send(call)

    def refused(self, connection: Wire, why: str) -> None:
        """Fail what waits for a connection that cannot be made."""
        for call in self._calls(connection.urgent):
            self.failed(call.number, RuntimeError(why))

    def lose(self, why: str) -> None:
        """Fail all calls, now and from now on: no server is there."""
        self.lost = self.lost or why
        for number in self._waiting.copy():
            self.failed(number, RuntimeError(self.lost))

    def expire(self, why: str = "") -> None:
        """Fail the calls whose time is up."""
        now = self._clock()
        for call in self._waiting.copy().values():
            if call.deadline < now:
                self.failed(call.number, RuntimeError(f"{TIMED_OUT} of {call.timeout_s:g} s{why}"))

    def _calls(self, urgent: bool) -> list[Call]:
        return [call for call in self._waiting.copy().values() if call.urgent == urgent]


class Route(Protocol):
    """The way to one server's process, by a transport's own means."""

    address: str

    def call(self, message: Any, timeout_s: float) -> Future[Any]:
        """Send a message; see :meth:`Transport.call`."""


_Route = TypeVar("_Route", bound=Route)


class LinkedTransport(Transport, Generic[_Route]):
    """A transport with a route to each server."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._routes = [self._route_to(server, address) for server, address in enumerate(addresses)]
        self._prepared: dict[int, _Route] = {}

    @abstractmethod
    def _route_to(self, server: int, address: str) -> _Route:
        """A route to a process that serves, or soon will."""

    @property
    def num_servers(self) -> int:
        """Number of servers connected to."""
        return len(self._routes)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the servers."""
        return tuple(route.address for route in self._routes)

    @property
    def prepared(self) -> Collection[int]:
        """See :class:`Transport`."""
        return tuple(self._prepared)

    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        """See :meth:`Transport.call`."""
        return self._routes[server].call(message, timeout_s)

    def call_prepared(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        """See :meth:`Transport.call_prepared`."""
        return self._prepared[server].call(message, timeout_s)

    def prepare(self, server: int, address: str) -> None:
        """See :meth:`Transport.prepare`."""
        self._prepared[server] = self._route_to(server, address)

    def replace(self, server: int) -> None:
        """See :meth:`Transport.replace`. The routes to the other servers stay."""
        self._routes[server] = self._prepared.pop(server)


# ---------------------------------------------------------------------- a server's end


@dataclass
class _Caller:
    heard: float
    calls: dict[int, Future[Any]] = field(default_factory=dict)
    over: dict[int, None] = field(default_factory=dict)  # in order


class ReplyCache:
    """The calls that were answered, or are to be, until their callers have the answers. From any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._callers: dict[str, _Caller] = {}

    def answer(self, caller: str, number: int, arrived: Collection[int], handle: Callable[[], Any]) -> Future[Any]:
        """The answer to a call, which is handled if it is new. ``handle`` returns a value or a future."""
        with self._lock:
            known = self._forget(caller, arrived)
            calls = known.calls
            if number in known.over:  # its caller has the answer
                nothing: Future[Any] = Future()
                nothing.set_result(None)
                return nothing
            before = calls.get(number)
            if before is not None:
                return before
            if len(calls) >= _MOST:
                for old in [n for n, call in calls.items() if call.done()][: len(calls) // 2]:
                    del calls[old]
            future = calls[number] = Future()
        try:
            answer = handle()
        except Exception as error:
            future.set_exception(error)
            return future
        if isinstance(answer, Future):
            answer.add_done_callback(lambda done: _copy(done, future))
        else:
            future.set_result(answer)
        return future

    def forget(self, caller: str, arrived: Collection[int]) -> None:
        """Drop answers that have arrived."""
        with self._lock:
            self._forget(caller, arrived)

    def _forget(self, caller: str, arrived: Collection[int]) -> _Caller:
        now = self._clock()
        known = self._callers.setdefault(caller, _Caller(now))
        known.heard = now
        for name, other in list(self._callers.items()):
            if now - other.heard > _FORGET_S and all(call.done() for call in other.calls.values()):
                del self._callers[name]
        for number in arrived:
            if known.calls.pop(number, None) is not None:
                known.over[number] = None
        while len(known.over) > _LATE:
            del known.over[next(iter(known.over))]
        return known


def _copy(done: Future[Any], to: Future[Any]) -> None:
    try:
        to.set_result(done.value())
    except Exception as error:
        to.set_exception(error)
