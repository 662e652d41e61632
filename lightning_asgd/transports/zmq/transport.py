"""The workers' side of ZeroMQ connections."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq
from torch.futures import Future
from zmq.utils.monitor import recv_monitor_message

from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.calls.reliable_calls import REPLACED, Call, LinkedTransport, ServerLink
from lightning_asgd.core.job.addresses import ServerAddress
from lightning_asgd.core.protocol import Failure, codec
from lightning_asgd.one_port import gateway
from lightning_asgd.transports.zmq.sockets import Loop, assemble, frames_of, keys_of, secure

log = logging.getLogger(__name__)

_RECONNECT_MS, _RECONNECT_MOST_MS = 20, 1000
_PROBE_TIMEOUT_S = 0.2
_SETUP_MS = 10_000  # for a connection through a gateway, before another one is tried
_PROBE_EVERY_S = 0.3  # between two probes
_HANDSHAKES = 3  # consecutive failures before the secret is blamed
_CLOSED = "the connection is closed"
_REPLACED = "another process listens at its address now"


class SecretError(RuntimeError):
    """A server has another secret."""


class ZmqTransport(LinkedTransport["_Route"], Loop):
    """A worker's connections to the servers.

    ``addresses`` are texts of :class:`~lightning_asgd.core.job.addresses.ServerAddress`. A gateway may refuse
    connections for ``refused_s`` seconds: a tunnel that leads to it may be restarted.
    """

    def __init__(self, addresses: Sequence[str], secret: str, refused_s: float = 0.0) -> None:
        Loop.__init__(self, "lightning_asgd.zmq")
        self.keys = keys_of(secret)
        self.refused_s = refused_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._open: list[_Route] = []
        LinkedTransport.__init__(self, addresses)
        self.thread.start()

    @property
    def alive(self) -> bool:
        """Whether it is this process's, and not closed."""
        return not self.closed.is_set() and self._pid == os.getpid()

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        if self._pid == os.getpid():  # else it is the parent's, whose thread is not in this process
            Loop.close(self)

    def tick(self, ready: dict[Any, int]) -> None:
        """See :class:`Loop`."""
        for route in list(self._open):
            route.tick(ready)
            if route.link.lost is not None:
                route.close()
                with self._lock:
                    self._open.remove(route)

    def end(self) -> None:
        """See :class:`Loop`."""
        for route in self._open:
            route.link.fail_all(_CLOSED)
            route.close()

    def _route_to(self, server: int, address: str) -> _Route:
        route = _Route(self, server, address)
        with self._lock:
            self._open.append(route)
        return route


class _Route:
    """The way to one server's process. All but :meth:`call` happens in the transport's thread."""

    def __init__(self, transport: ZmqTransport, server: int, address: str) -> None:
        self.transport = transport
        self.address = address
        self.link = ServerLink(server, self._connection, frames_of)
        self._connections: dict[bool, _Connection] = {}
        self._probed_at = -math.inf
        self._refused_at = math.inf  # since when the gateway refuses connections
        self.way = ServerAddress.of(address)
        self.process = self.way.name
        """The server's process; empty until its first answer, which proves that it knows the secret."""

    def call(self, message: Any, timeout_s: float) -> Future[Any]:
        """See :meth:`Transport.call`."""
        if not self.transport.alive:
            raise RuntimeError(_CLOSED)
        call = self.link.prepare(message, timeout_s)
        self.transport.submit(lambda: self.link.post(call))
        if self.transport.closed.is_set():  # meanwhile
            call.fail(RuntimeError(_CLOSED))
        return call.future

    def drop(self) -> None:
        """See :meth:`Route.drop`. Any thread may call it."""
        self.transport.submit(lambda: self.link.fail_all(REPLACED))

    def tick(self, ready: dict[Any, int]) -> None:
        for connection in self._connections.values():
            connection.tick(ready)
        self.link.expire()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def probe(self) -> None:
        """Fail all calls if no process listens there. Rarely and briefly: this thread serves other connections too."""
        now = time.monotonic()
        if now < self._probed_at + _PROBE_EVERY_S:
            return
        self._probed_at = now
        try:
            with socket.create_connection(self.way[:2], timeout=_PROBE_TIMEOUT_S) as probe:
                self._refused_at = math.inf
                if not self.way.number or gateway.serves(probe, self.way.name, self.way.number):
                    return
        except ConnectionRefusedError:
            self._refused_at = min(self._refused_at, now)
            if self.way.number and now < self._refused_at + self.transport.refused_s:
                return
        except OSError:  # proves nothing
            return
        self.link.fail_all(f"ECONNREFUSED: no process listens at {self.address} any more")

    def is_from(self, process: str) -> bool:
        """Whether an answer comes from the process that is called. If not, that is gone, and all calls fail."""
        self.process = self.process or process
        if process != self.process:  # it was started again before a probe found that no process listens there
            self.link.fail_all(_REPLACED)
        return process == self.process

    def _connection(self, urgent: bool) -> _Connection:
        if urgent not in self._connections:
            self._connections[urgent] = _Connection(self, urgent)
        return self._connections[urgent]


class _Connection:
    """One connection, which ZeroMQ reconnects by itself."""

    def __init__(self, route: _Route, urgent: bool) -> None:
        self.urgent = urgent
        self._route, self._link = route, route.link
        loop, keys, way = route.transport, route.transport.keys, route.way
        self._poller = loop.poller
        self._backlog: dict[int, Call] = {}  # calls that ZeroMQ has not accepted yet
        self._failed = 0  # consecutive handshakes
        self._connected = False
        self._socket = loop.context.socket(zmq.DEALER)
        secure(self._socket, beats=True)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # unsent messages stay here
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
        self._socket.setsockopt(zmq.IPV6, ":" in way.host)
        if way.number:
            self._socket.setsockopt(zmq.ROUTING_ID, gateway.routing_id(way.name, way.number))
            self._socket.setsockopt(zmq.HANDSHAKE_IVL, _SETUP_MS)  # a tunnel may accept what it does not pass on
        self._socket.connect(str(ServerAddress(way.host, way.port)))

    def send(self, call: Call) -> None:
        """Send a call, or keep it until there is a connection."""
        self._backlog.setdefault(call.number, call)
        self._flush()

    def acknowledge(self, arrived: list[int]) -> None:
        """See :class:`LinkConnection`."""
        if not self._sent([json.dumps([self._link.caller, 0, arrived, [], None]).encode()]):
            self._link.acknowledgements.note(*arrived)

    def tick(self, ready: dict[Any, int]) -> None:
        if self._events in ready:
            self._read_events()
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

    def _sent(self, frames: list[Any]) -> bool:
        """Send a message. Whether there was a connection for it."""
        whole = True
        for index, frame in enumerate(frames):
            more = zmq.SNDMORE if index + 1 < len(frames) else 0
            try:
                self._socket.send(frame, zmq.NOBLOCK | more, copy=False)
            except zmq.Again:
                if index == 0:
                    return False
                whole = False  # it broke: ZeroMQ drops the rest up to the last frame, which must be sent
        return whole

    def _flush(self) -> None:
        for number, call in list(self._backlog.items()):
            if self._link.is_pending(number) and not self._sent(call.packet):
                break
            del self._backlog[number]
        self._poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._backlog else 0))

    def _receive(self) -> None:
        server = self._link.server
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                number, process, sizes, header = json.loads(bytes(frames[0].buffer))
                if not self._route.is_from(process):
                    return
                answer = codec.decode(header.encode(), assemble(sizes, frames[1:]))
            except Exception as error:
                log.warning("An answer of server %d could not be read: %r.", server, error)
                number = _number_in(frames)
                answer = Failure("ProtocolError", f"The answer of server {server} could not be read: {error!r}.")
            self._link.answered(self, number, answer)

    def _read_events(self) -> None:
        while self._events.poll(0) and self._link.lost is None:
            event = recv_monitor_message(self._events, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._failed = 0
                if self._connected:
                    self._link.reconnected(self, "it was disconnected")
                self._connected = True
            elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                self._route.probe()
            else:
                # Behind a gateway the secret is right, since the rendezvous was reached there; and a tunnel may break.
                self._failed += not self._route.way.number
                if self._failed >= _HANDSHAKES:
                    self._fail_all()

    def _fail_all(self) -> None:
        """Say why handshakes fail."""
        if self._route.process:
            self._link.fail_all(_REPLACED)
            return
        why = f"the server at {self._route.address} does not know this job's secret: expected the same {SECRET_ENV} on"
        self._link.fail_all(f"{why} all machines", SecretError)


def _number_in(frames: Sequence[Any]) -> int:
    """The number of the call that a message answers; 0 if it is unreadable."""
    try:
        return int(json.loads(bytes(frames[0].buffer))[0])
    except Exception:
        return 0
