"""Calls over connections that break: each is handled once, and answered unless it times out or the server has ended.

The worker's side numbers its calls, repeats unanswered calls over a new connection, and acknowledges replies. So a
server recognises a call that it has seen before, and keeps a reply until it is acknowledged. There is no network here:
a transport makes the connections and reports their events.
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

from lightning_asgd.core.calls.transport import CallTimeoutError, Transport
from lightning_asgd.core.foundation.ranges import RangeSet
from lightning_asgd.core.protocol import Reduced

log = logging.getLogger(__name__)

REPLACED = "another server has taken its place"
_FORGET_S = 600.0  # heartbeats come every few seconds
_SILENT_S = 60.0  # after which a caller's weights are not kept
_MOST = 1024  # unacknowledged replies per caller: a worker has as many calls in flight as a module has layers
# Bytes of the largest encoded reply that is kept; to encode a larger one again takes little beside sending it.
_KEPT = 64 << 20
_GAPS = 1024  # in the numbers of finished calls that are remembered per caller: a copy of one may still arrive


# ---------------------------------------------------------------------- the worker's side


class Acknowledgements:
    """Calls whose replies have arrived, and must be acknowledged. Takes no lock: a holder may wait for replies."""

    def __init__(self) -> None:
        self._numbers: deque[int] = deque()

    def note(self, *numbers: int) -> None:
        """Acknowledge them with the next call."""
        self._numbers.extend(numbers)

    def take(self) -> list[int]:
        """Take the numbers to acknowledge now; they must be noted again if the message is lost."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._numbers.popleft())
        return taken


@dataclass(eq=False)
class Call:
    """A message that waits for its reply."""

    number: int
    arrived: list[int]  # calls whose replies it acknowledges
    urgent: bool
    timeout_s: float  # 0 for no limit
    deadline: float
    packet: Any = None  # the message, packed by the transport
    future: Future[Any] = field(default_factory=Future)

    def fail(self, error: Exception) -> None:
        """Fail, unless the call has completed."""
        with contextlib.suppress(RuntimeError):
            self.future.set_exception(error)


class LinkConnection(Protocol):
    """One of a link's two connections, which its transport makes again when it breaks."""

    urgent: bool

    def send(self, call: Call) -> None:
        """Send a call; while there is no connection, :meth:`ServerLink.reconnected` sends it later."""

    def acknowledge(self, arrived: list[int]) -> None:
        """Acknowledge replies to the server, or note them again in :attr:`ServerLink.acknowledgements`."""


class ServerLink:
    """The calls to one server's process. Any thread may use it, and no method waits.

    Two connections lead there. Each carries one message after the other, so a small and urgent one would wait behind
    weights that were sent before: 0.4 s for 2.4 MB there and back at 100 Mbit/s.
    """

    def __init__(
        self,
        server: int,
        connection: Callable[[bool], LinkConnection],
        pack: Callable[[list[Any], Any], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.server = server
        self.caller = uuid.uuid4().hex
        self.acknowledgements = Acknowledgements()
        self.lost: str | None = None
        self._connection = connection
        self._pack = pack
        self._clock = clock
        self._numbers = itertools.count(1)
        # Changed by single operations that are atomic, so without a lock; by number.
        self._pending: dict[int, Call] = {}
        self._reconnected: dict[bool, str] = {}  # why a connection was reopened; until a reply arrives on it

    def prepare(self, message: Any, timeout_s: float) -> Call:
        """Number and pack a call for :meth:`post`. Raises what packing raises."""
        deadline = self._clock() + timeout_s if timeout_s else math.inf
        urgent = bool(getattr(message, "urgent", False))
        call = Call(next(self._numbers), self.acknowledgements.take(), urgent, timeout_s, deadline)
        try:
            call.packet = self._pack([self.caller, call.number, call.arrived], message)
        except Exception:
            self.acknowledgements.note(*call.arrived)
            raise
        return call

    def post(self, call: Call) -> None:
        """Send a call."""
        self._pending[call.number] = call
        if self.lost is None:
            self._connection(call.urgent).send(call)
        else:
            self.failed(call.number, RuntimeError(self.lost))

    def is_pending(self, number: int) -> bool:
        """Whether a call has not completed."""
        return number in self._pending

    def remaining_s(self, call: Call) -> float:
        """Seconds until a call times out."""
        return call.deadline - self._clock()

    def answered(self, connection: LinkConnection, number: int, answer: Any) -> None:
        """Complete a call. Large replies are acknowledged at once: a server need not keep them until the next call."""
        why = self._reconnected.pop(connection.urgent, None) if self._reconnected else None
        if why is not None:
            log.warning("The connection to server %d broke (%s) and was reopened.", self.server, why)
        call = self._pending.pop(number, None)
        if call is None:
            return
        self.acknowledgements.note(number)
        if getattr(answer, "bulky", isinstance(answer, list)):  # a list is one of samples
            connection.acknowledge(self.acknowledgements.take())
        with contextlib.suppress(RuntimeError):  # it failed when the transport was closed
            call.future.set_result(answer)

    def failed(self, number: int, error: Exception) -> None:
        """Fail a call."""
        call = self._pending.pop(number, None)
        if call is not None:
            self.acknowledgements.note(*call.arrived)
            call.fail(error)

    def reconnected(self, connection: LinkConnection, why: str) -> None:
        """Repeat over a new connection the calls that may have been lost with the previous one."""
        self._reconnected[connection.urgent] = why
        for call in self._calls(connection.urgent):
            connection.send(call)

    def connection_refused(self, connection: LinkConnection, why: str) -> None:
        """Fail the calls that wait for a connection that cannot be made."""
        for call in self._calls(connection.urgent):
            self.failed(call.number, RuntimeError(why))

    def fail_all(self, why: str, error: type[RuntimeError] = RuntimeError) -> None:
        """Fail all pending and future calls: the server is gone."""
        self.lost = self.lost or why
        for number in self._pending.copy():
            self.failed(number, error(self.lost))

    def expire(self, why: str = "") -> None:
        """Fail the calls that have timed out."""
        now = self._clock()
        for call in self._pending.copy().values():
            if call.deadline < now:
                self.failed(call.number, CallTimeoutError(f"no answer within {call.timeout_s:g} s{why}"))

    def _calls(self, urgent: bool) -> list[Call]:
        return [call for call in self._pending.copy().values() if call.urgent == urgent]


class Route(Protocol):
    """The way to one server's process, by a transport's own means."""

    address: str

    def call(self, message: Any, timeout_s: float) -> Future[Any]:
        """Send a message; see :meth:`Transport.call`."""

    def drop(self) -> None:
        """Fail all calls: another process is called from now on."""


_Route = TypeVar("_Route", bound=Route)


class LinkedTransport(Transport, Generic[_Route]):
    """A transport with a route to each server."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._routes = [self._route_to(server, address) for server, address in enumerate(addresses)]
        self._prepared: dict[int, _Route] = {}

    @abstractmethod
    def _route_to(self, server: int, address: str) -> _Route:
        """A route to a process that serves or is about to."""

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
        lost, self._routes[server] = self._routes[server], self._prepared.pop(server)
        lost.drop()


# ---------------------------------------------------------------------- the server's side


@dataclass
class _Caller:
    heard: float
    calls: dict[int, Future[Any]] = field(default_factory=dict)
    over: RangeSet = field(default_factory=RangeSet)  # numbers of finished calls: but for a few they follow each other


class ReplyCache:
    """Calls in progress, and replies until they are acknowledged. Any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._callers: dict[str, _Caller] = {}  # the one heard last is the last
        self._silent: dict[str, _Caller] = {}  # those that have not been heard for a minute, likewise

    def answer(self, caller: str, number: int, arrived: Collection[int], handle: Callable[[], Any]) -> Future[Any]:
        """The reply to a call; only a new call is handled. ``handle`` returns a value or a future."""
        with self._lock:
            known = self._forget(caller, arrived)
            calls = known.calls
            if number in known.over:  # its caller has the reply
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
        """Drop replies that were acknowledged."""
        with self._lock:
            self._forget(caller, arrived)

    def _forget(self, caller: str, arrived: Collection[int]) -> _Caller:
        now = self._clock()
        known = self._callers.pop(caller, None) or self._silent.pop(caller, None) or _Caller(now)
        known.heard = now
        self._callers[caller] = known
        for name, other in _older(self._callers, now - _SILENT_S):
            self._silent[name] = self._callers.pop(name)
            # A killed worker never acknowledges them. A push that is repeated is recognised by its own number.
            other.calls = {number: call for number, call in other.calls.items() if not _holds_weights(call)}
        for name, other in _older(self._silent, now - _FORGET_S):
            if all(call.done() for call in other.calls.values()):
                del self._silent[name]
        for number in arrived:
            if known.calls.pop(number, None) is not None:
                known.over.add(number, number + 1)
        while len(known.over.ranges) > _GAPS:
            known.over.remove(*known.over.ranges[0])
        return known


def _older(callers: dict[str, _Caller], moment: float) -> list[tuple[str, _Caller]]:
    """Those that were heard last before a moment."""
    return list(itertools.takewhile(lambda each: each[1].heard < moment, callers.items()))


def _holds_weights(call: Future[Any]) -> bool:
    """Whether a call was answered with weights, or with a probe's bytes."""
    try:
        return bool(call.done() and getattr(call.value(), "has_data", False))
    except Exception:  # it failed
        return False


class EncodedOnce:
    """Encodes replies; that to a collective only once, since all its workers get the same object, one after another.

    Any thread may use it. ``encode`` returns what is sent, and how many bytes of memory it refers to.
    """

    def __init__(self, encode: Callable[[Any], tuple[Any, int]]) -> None:
        self._encode = encode
        self._latest: tuple[Any, Any] = (None, None)  # the object too, so that no other can have its identity

    def __call__(self, reply: Any) -> Any:
        """What is sent."""
        latest, encoded = self._latest
        if reply is not latest or reply is None:
            encoded, nbytes = self._encode(reply)
            if isinstance(reply, dict | Reduced):
                self._latest = (reply, encoded) if nbytes <= _KEPT else (None, None)
        return encoded


def _copy(done: Future[Any], to: Future[Any]) -> None:
    try:
        to.set_result(done.value())
    except Exception as error:
        to.set_exception(error)
