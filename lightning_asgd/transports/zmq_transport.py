"""The workers' end of ZeroMQ connections."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from torch.futures import Future
from zmq.utils.monitor import recv_monitor_message

from lightning_asgd.config import SECRET_ENV
from lightning_asgd.protocol import Failure, codec
from lightning_asgd.transports.reliable_calls import Arrivals
from lightning_asgd.transports.transport import TIMED_OUT, Transport
from lightning_asgd.transports.zmq_sockets import Keys, Loop, assemble, frames_of, keys_of, secure

__all__ = ["ZmqTransport"]

log = logging.getLogger(__name__)

_RECONNECT_MS, _RECONNECT_MOST_MS = 20, 1000
_PROBE_S = 0.2
_LOOK_S = 0.3
_HANDSHAKES = 3  # that fail, one after the other, before the secret is to blame


class ZmqTransport(Transport, Loop):
    """A worker's connections to the servers.

    Args:
        addresses: of the servers, as :attr:`Server.address` has them.
        secret: the job's.
    """

    def __init__(self, addresses: Sequence[str], secret: str) -> None:
        super().__init__("lightning_asgd.zmq")
        self.addresses = tuple(addresses)
        self._keys = keys_of(secret)
        self._caller = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._links = [_Link(self, i, address) for i, address in enumerate(self.addresses)]
        self._all = list(self._links)
        self._prepared: dict[int, _Link] = {}
        self.thread.start()

    @property
    def num_servers(self) -> int:
        """Number of servers connected to."""
        return len(self.addresses)

    @property
    def alive(self) -> bool:
        """Whether it is this process's, and not closed."""
        return not self.closed.is_set() and self._pid == os.getpid()

    @property
    def prepared(self) -> Collection[int]:  # type: ignore[override]
        """See :class:`Transport`."""
        return tuple(self._prepared)

    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        """Send a message; see :meth:`Transport.call`."""
        return self._call(self._links[server], message, timeout_s)

    def call_prepared(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        """See :meth:`Transport.call_prepared`."""
        return self._call(self._prepared[server], message, timeout_s)

    def prepare(self, server: int, address: str) -> None:
        """See :meth:`Transport.prepare`."""
        link = _Link(self, server, address)
        with self._lock:
            self._all.append(link)
        self._prepared[server] = link

    def replace(self, server: int) -> None:
        """See :meth:`Transport.replace`."""
        link = self._prepared.pop(server)
        self._links[server], lost = link, self._links[server]
        self.submit(lambda: lost.fail("another server has taken its place"))
        self.addresses = (*self.addresses[:server], link.address, *self.addresses[server + 1 :])

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        if self._pid == os.getpid():  # else it is the parent's, whose thread is not here
            Loop.close(self)

    def _call(self, link: _Link, message: Any, timeout_s: float) -> Future[Any]:
        if not self.alive:
            raise RuntimeError("the connection is closed")
        with self._lock:
            number = next(self._numbers)
        arrived = link.arrivals.take()
        try:
            frames = frames_of([self._caller, number, arrived], message)
        except Exception:  # it cannot be sent
            link.arrivals.note(*arrived)
            raise
        deadline = time.monotonic() + timeout_s if timeout_s else math.inf
        call = _Call(number, frames, deadline, timeout_s, urgent=bool(getattr(message, "urgent", False)))
        self.submit(lambda: link.add(call))
        if self.closed.is_set():  # meanwhile
            call.fail("the connection is closed")
        return call.future

    def tick(self, ready: dict[Any, int]) -> None:
        """See :class:`Loop`."""
        now = time.monotonic()
        for link in list(self._all):
            link.tick(ready, now)
            if link.lost:
                link.close()
                with self._lock:
                    self._all.remove(link)

    def end(self) -> None:
        """See :class:`Loop`."""
        for link in self._all:
            link.fail("the connection is closed")
            link.close()

    @property
    def caller(self) -> str:
        """What servers know this transport by."""
        return self._caller

    @property
    def keys(self) -> Keys:
        """Of the job."""
        return self._keys


@dataclass(eq=False)
class _Call:
    """A message on its way, and its answer."""

    number: int
    frames: list[Any]
    deadline: float
    timeout_s: float
    urgent: bool
    future: Future[Any] = field(default_factory=Future)

    def fail(self, why: str) -> None:
        with contextlib.suppress(RuntimeError):  # it is done
            self.future.set_exception(RuntimeError(why))

    def answer(self, answer: Any) -> None:
        with contextlib.suppress(RuntimeError):
            self.future.set_result(answer)


class _Link:
    """The way to one server's process: two connections, so that what is urgent need not wait behind weights."""

    def __init__(self, transport: ZmqTransport, server: int, address: str) -> None:
        self.transport = transport
        self.server = server
        self.address = address
        self._calls: dict[int, _Call] = {}
        self._ways: dict[bool, _Way] = {}
        self._lost: str | None = None
        self.arrivals = Arrivals()
        self._looked = -math.inf
        self.served = False
        """Whether the server has proved that it knows the secret."""

    @property
    def lost(self) -> bool:
        """Whether nobody is there."""
        return self._lost is not None

    def add(self, call: _Call) -> None:
        """Send a call; from the thread, like all that follows."""
        if self._lost is not None:
            call.fail(self._lost)
            return
        self._calls[call.number] = call
        way = self._ways.get(call.urgent)
        if way is None:
            way = self._ways[call.urgent] = _Way(self, call.urgent)
        way.queue([call])

    def tick(self, ready: dict[Any, int], now: float) -> None:
        for way in self._ways.values():
            way.tick(ready)
        for call in [call for call in self._calls.values() if call.deadline < now]:
            del self._calls[call.number]
            call.fail(f"{TIMED_OUT} of {call.timeout_s:g} s")

    def waiting(self, urgent: bool) -> list[_Call]:
        """Calls that were not answered."""
        return [call for call in self._calls.values() if call.urgent == urgent]

    def waits(self, call: _Call) -> bool:
        return call.number in self._calls

    def answered(self, number: int, answer: Any) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        self.arrivals.note(number)
        if getattr(answer, "bulky", False) and False in self._ways:  # the server need not keep it until the next call
            arrived = self.arrivals.take()
            if not self._ways[False].send([json.dumps([self.transport.caller, 0, arrived, [], None]).encode()]):
                self.arrivals.note(*arrived)
        call.answer(answer)

    def fail(self, why: str) -> None:
        """Give up: nobody is there."""
        self._lost = self._lost or why
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(why)

    def close(self) -> None:
        for way in self._ways.values():
            way.close()
        self._ways.clear()

    def look(self) -> None:
        """Fail if nobody listens there, as far as can be told at once. Not often: others wait meanwhile."""
        now = time.monotonic()
        if now < self._looked + _LOOK_S:
            return
        self._looked = now
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=_PROBE_S):
                return
        except ConnectionRefusedError:
            self.fail(f"ECONNREFUSED: nobody listens at {self.address} any more")
        except OSError:  # no answer is no answer
            return


class _Way:
    """One connection."""

    def __init__(self, link: _Link, urgent: bool) -> None:
        self._link, self._urgent = link, urgent
        loop, keys = link.transport, link.transport.keys
        self._poller = loop.poller
        self._backlog: deque[_Call] = deque()
        self._failed = 0  # handshakes in a row
        self._broken = self._connected = False
        self._socket = loop.context.socket(zmq.DEALER)
        secure(self._socket)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # what is not sent stays here
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MOST_MS)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.worker_public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.worker)
        self._events = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        self._poller.register(self._events, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        self._socket.connect(link.address)

    def queue(self, calls: Sequence[_Call]) -> None:
        """Send calls, or keep them until there is a connection."""
        known = set(map(id, self._backlog))
        self._backlog.extend(call for call in calls if id(call) not in known)
        self._flush()

    def send(self, frames: list[Any]) -> bool:
        """Whether there was a connection to send it over."""
        whole = True
        for index, frame in enumerate(frames):
            more = zmq.SNDMORE if index + 1 < len(frames) else 0
            try:
                self._socket.send(frame, zmq.NOBLOCK | more, copy=False)
            except zmq.Again:
                if index == 0:
                    return False
                whole = False  # it broke: ZeroMQ drops the rest, up to the last frame, which must come
        return whole

    def tick(self, ready: dict[Any, int]) -> None:
        if self._events in ready:
            self._look()
        if self._socket in ready and ready[self._socket] & zmq.POLLIN:
            self._receive()
        if self._backlog:
            self._flush()

    def close(self) -> None:
        self._poller.unregister(self._events)
        self._poller.unregister(self._socket)
        self._socket.disable_monitor()
        self._events.close(0)
        self._socket.close(0)

    def _flush(self) -> None:
        while self._backlog:
            if self._link.waits(self._backlog[0]) and not self.send(self._backlog[0].frames):
                break
            self._backlog.popleft()
        self._poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._backlog else 0))

    def _receive(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                number, sizes, header = json.loads(bytes(frames[0].buffer))
                answer = codec.decode(header.encode(), assemble(sizes, frames[1:]))
            except Exception as error:
                log.warning("An answer of server %d could not be read: %r.", self._link.server, error)
                number = _number_in(frames)
                text = f"The answer of server {self._link.server} could not be read: {error!r}."
                answer = Failure("ProtocolError", text)
            if self._broken:
                self._broken = False
                log.warning("The connection to server %d broke and was made again.", self._link.server)
            self._link.answered(number, answer)

    def _look(self) -> None:
        while self._events.poll(0) and not self._link.lost:
            event = recv_monitor_message(self._events, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._failed, self._link.served = 0, True
                if self._connected:  # what was sent since the one before broke may be lost
                    self._broken = True
                    self.queue(self._link.waiting(self._urgent))
                self._connected = True
            elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                self._link.look()
            else:
                self._failed += 1
                if self._failed >= _HANDSHAKES:
                    known = f"another process listens at {self._link.address} now"
                    unknown = (
                        f"the server at {self._link.address} does not know this job's secret: expected the same "
                        f"{SECRET_ENV} on all machines"
                    )
                    self._link.fail(known if self._link.served else unknown)


def _number_in(frames: Sequence[Any]) -> int:
    """The number of the call that a message answers; 0 if it cannot be told."""
    try:
        return int(json.loads(bytes(frames[0].buffer))[0])
    except Exception:
        return 0
