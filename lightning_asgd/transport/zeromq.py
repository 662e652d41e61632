"""The transport over ZeroMQ: every connection is encrypted and authenticated with CURVE, and nothing is unpickled.

The only file that imports ``zmq`` (``pip install lightning-asgd[zmq]``). All processes of a job share a secret, from
which the key pairs of its servers and of its workers follow. So a server answers nobody, not even with an error, who
does not know the secret, and a worker sends nothing to who does not know it: the handshake fails before a message is
read or memory is taken for one. Messages are those of :mod:`lightning_asgd.transport.wire`, cut in frames of a few
megabytes, so that no peer can have more than a frame allocated before its handshake is through.

A connection that breaks is made again by ZeroMQ; calls that were not answered are sent again there, and answered once
(see :mod:`lightning_asgd.transport.once`). Where nobody listens at a server's address any more its process has ended,
and calls fail.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy
from torch.futures import Future

from lightning_asgd.errors import ASGDError, ConfigurationError
from lightning_asgd.messages import Failure
from lightning_asgd.transport import wire
from lightning_asgd.transport.base import Transport
from lightning_asgd.transport.once import Once

__all__ = ["SECRET_ENV", "Keys", "Server", "ZmqTransport", "check_available", "keys_of"]

log = logging.getLogger(__name__)

SECRET_ENV = "LIGHTNING_ASGD_SECRET"
"""Environment variable with the job's secret."""

_FRAME = 4 << 20  # bytes
_LARGEST = _FRAME + (1 << 16)  # a frame with what CURVE adds
_HEADER = 4 << 20
_THREADS = 8
_BEAT_MS, _SILENT_MS = 2000, 20_000  # of ZeroMQ's own signs of life, which notice machines that are gone
_RECONNECT_MS, _RECONNECT_MOST_MS = 20, 1000
_TICK_MS = 100
_PROBE_S = 0.2
_LOOK_S = 0.3
_HANDSHAKES = 3  # that fail, one after the other, before the secret is to blame
_LATE = "RPC ran for more than set timeout"  # the words of torch's RPC, by which it is known that a server may live


def check_available() -> None:
    """Raise if pyzmq is missing, or was built without CURVE.

    Raises:
        ConfigurationError: it is.
    """
    try:
        import zmq
    except ImportError as error:
        raise ConfigurationError(
            "transport='zmq' needs pyzmq, which is not installed. Install it: pip install 'lightning-asgd[zmq]'."
        ) from error
    if not zmq.has("curve"):
        raise ConfigurationError(
            f"libzmq {zmq.zmq_version()} was built without CURVE. Expected one that encrypts: pip's wheels of pyzmq do."
        )


@dataclass(frozen=True)
class Keys:
    """What follows from a job's secret; all in Z85."""

    server_public: bytes
    server: bytes
    worker_public: bytes
    worker: bytes


def keys_of(secret: str) -> Keys:
    """The key pairs of a job.

    Args:
        secret: the job's.
    """
    import zmq
    from zmq.utils import z85

    def pair(role: bytes) -> tuple[bytes, bytes]:
        digest = hashlib.blake2b(secret.encode(), digest_size=32, person=role).digest()
        private: bytes = z85.encode(digest)
        return zmq.curve_public(private), private

    return Keys(*pair(b"asgd server"), *pair(b"asgd worker"))


def _secure(sock: Any) -> None:
    """Settings of both ends."""
    import zmq

    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
    sock.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)


class _Loop:
    """A thread that owns sockets, since no two threads may use one. Others hand it work and wake it."""

    def __init__(self, name: str) -> None:
        import zmq

        self.context = zmq.Context(io_threads=1)
        self.poller = zmq.Poller()
        self._wake, self._bell = socket.socketpair()
        self._wake.setblocking(False)
        self._bell.setblocking(False)
        self.poller.register(self._wake.fileno(), zmq.POLLIN)
        self._work: deque[Callable[[], None]] = deque()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, work: Callable[[], None]) -> None:
        """Have the thread do something soon."""
        self._work.append(work)
        with contextlib.suppress(OSError):  # full: it is awake; closed: nobody is
            self._bell.send(b".")

    def tick(self, ready: dict[Any, int]) -> None:
        """Look at sockets, and at the time; from the thread."""
        raise NotImplementedError

    def end(self) -> None:
        """Close the sockets; from the thread."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            while not self.closed.is_set():
                ready = dict(self.poller.poll(_TICK_MS))
                with contextlib.suppress(BlockingIOError):
                    while self._wake.recv(4096):
                        pass
                while self._work:
                    self._work.popleft()()
                self.tick(ready)
        except Exception:
            log.exception("The thread %s failed. This is a bug.", self.thread.name)
        finally:
            self.closed.set()
            self.end()
            while self._work:
                self._work.popleft()()
            self.context.destroy(linger=0)
            self._wake.close()
            self._bell.close()

    def close(self) -> None:
        """End the thread, and wait for it. May be called more than once."""
        self.closed.set()
        self.submit(lambda: None)
        if self.thread is not threading.current_thread() and self.thread.ident is not None:
            self.thread.join()


# ---------------------------------------------------------------------- frames


def _frames(about: list[Any], value: Any) -> list[Any]:
    """A message's frames: the header, and buffers that are cut where they are large."""
    header, buffers = wire.encode(value)
    views = [memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"") for buffer in buffers]
    first = json.dumps([*about, [view.nbytes for view in views], header.decode()]).encode()
    if len(first) > _HEADER:
        raise ConfigurationError(
            f"A message's header has {len(first):,} bytes. Expected at most {_HEADER:,}: broadcast less, or tensors."
        )
    return [first, *(view[i : i + _FRAME] for view in views for i in range(0, view.nbytes, _FRAME))]


def _assemble(sizes: Sequence[int], frames: Sequence[Any]) -> list[Any]:
    """The buffers of a message, writable."""
    buffers, rest = [], iter(frames)
    if sum(-(-size // _FRAME) for size in sizes) != len(frames):
        raise ValueError("wrong number of frames")
    for size in sizes:
        buffer = numpy.empty(size, numpy.uint8)
        for start in range(0, size, _FRAME):
            part = numpy.frombuffer(next(rest).buffer, numpy.uint8)
            if len(part) != min(_FRAME, size - start):
                raise ValueError("a frame of another size")
            buffer[start : start + _FRAME] = part
        buffers.append(buffer)
    return buffers


# ---------------------------------------------------------------------- a server


class Server(_Loop):
    """Answers messages in this process until it is closed.

    Args:
        handler: given a message, returns the answer or a future of it; called from several threads.
        address: IP address of the interface to listen on.
        secret: the job's.
    """

    def __init__(self, handler: Callable[[Any], Any], address: str, secret: str) -> None:
        check_available()
        import zmq
        from zmq.auth.thread import ThreadAuthenticator

        super().__init__("lightning_asgd.zmq")
        self._handler = handler
        self._once = Once()
        keys = keys_of(secret)
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=_Only(keys.worker_public))
        self._socket = self.context.socket(zmq.ROUTER)
        _secure(self._socket)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.server_public)
        port = self._socket.bind_to_random_port(f"tcp://{address}")
        self.address = f"tcp://{address}:{port}"
        """Where it listens."""
        self.poller.register(self._socket, zmq.POLLIN)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="lightning_asgd.answer")
        self.refused = 0
        """Messages that could not be read."""
        self.thread.start()

    def tick(self, ready: dict[Any, int]) -> None:
        """See :class:`_Loop`."""
        import zmq

        if self._socket not in ready:
            return
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._pool.submit(self._take, frames)

    def end(self) -> None:
        """See :class:`_Loop`."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._authenticator.stop()
        self._socket.close(0)

    def _take(self, frames: Sequence[Any]) -> None:
        try:
            who = bytes(frames[0].buffer)
            caller, number, arrived, sizes, header = json.loads(bytes(frames[1].buffer))
            if not isinstance(caller, str) or type(number) is not int:
                raise TypeError("no caller or no number")
            if header is None:
                self._once.forget(caller, arrived)
                return

            def handle() -> Any:
                try:
                    return self._handler(wire.decode(header.encode(), _assemble(sizes, frames[2:])))
                except ASGDError as error:
                    return Failure(type(error).__name__, str(error))
                except Exception as error:  # as a text: the exception would keep the message
                    return Failure("ProtocolError", f"A message could not be read: {error!r}.")

            answer = self._once.answer(caller, number, arrived, handle)
        except Exception as error:
            self.refused += 1
            log.warning("A message could not be read: %r. It is not answered.", error)
            return
        answer.add_done_callback(lambda done: self._reply(who, number, done))

    def _reply(self, who: bytes, number: int, done: Future[Any]) -> None:
        try:
            frames = _frames([number], done.value())
        except Exception as error:
            frames = _frames([number], Failure("ASGDError", f"A server's answer could not be sent: {error!r}."))
        self.submit(lambda: self._send([who, *frames]))

    def _send(self, frames: list[Any]) -> None:
        import zmq

        with contextlib.suppress(zmq.ZMQError):  # it is gone; it will ask again
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)


class _Only:
    """Lets in who has one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client's public key, in Z85, is the workers'."""
        return key == self._key


# ---------------------------------------------------------------------- a worker


class ZmqTransport(Transport, _Loop):
    """A worker's connections to the servers.

    Args:
        addresses: of the servers, as :attr:`Server.address` has them.
        secret: the job's.
    """

    def __init__(self, addresses: Sequence[str], secret: str) -> None:
        check_available()
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
            _Loop.close(self)

    def _call(self, link: _Link, message: Any, timeout_s: float) -> Future[Any]:
        if not self.alive:
            raise RuntimeError("the connection is closed")
        with self._lock:
            number = next(self._numbers)
        frames = _frames([self._caller, number, link.take_arrived()], message)
        deadline = time.monotonic() + timeout_s if timeout_s else math.inf
        call = _Call(number, frames, deadline, timeout_s, urgent=bool(getattr(message, "urgent", False)))
        self.submit(lambda: link.add(call))
        if self.closed.is_set():  # meanwhile
            call.fail("the connection is closed")
        return call.future

    def tick(self, ready: dict[Any, int]) -> None:
        """See :class:`_Loop`."""
        now = time.monotonic()
        for link in list(self._all):
            link.tick(ready, now)
            if link.lost:
                link.close()
                with self._lock:
                    self._all.remove(link)

    def end(self) -> None:
        """See :class:`_Loop`."""
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
        self._arrived: deque[int] = deque()  # calls whose answers have, and the server was not told so
        self._looked = -math.inf
        self.served = False
        """Whether the server has proved that it knows the secret."""

    @property
    def lost(self) -> bool:
        """Whether nobody is there."""
        return self._lost is not None

    def take_arrived(self) -> list[int]:
        """Calls whose answers have arrived, to tell the server."""
        arrived = []
        with contextlib.suppress(IndexError):
            while True:
                arrived.append(self._arrived.popleft())
        return arrived

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
            call.fail(f"{_LATE} of {call.timeout_s:g} s")

    def waiting(self, urgent: bool) -> list[_Call]:
        """Calls that were not answered."""
        return [call for call in self._calls.values() if call.urgent == urgent]

    def waits(self, call: _Call) -> bool:
        return call.number in self._calls

    def answered(self, number: int, answer: Any) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        self._arrived.append(number)
        if getattr(answer, "bulky", False) and False in self._ways:  # the server need not keep it until the next call
            arrived = self.take_arrived()
            if not self._ways[False].send([json.dumps([self.transport.caller, 0, arrived, [], None]).encode()]):
                self._arrived.extend(arrived)
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
        import zmq

        self._link, self._urgent = link, urgent
        loop, keys = link.transport, link.transport.keys
        self._poller = loop.poller
        self._backlog: deque[_Call] = deque()
        self._failed = 0  # handshakes in a row
        self._broken = self._connected = False
        self._socket = loop.context.socket(zmq.DEALER)
        _secure(self._socket)
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
        import zmq

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
        import zmq

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
        import zmq

        while self._backlog:
            if self._link.waits(self._backlog[0]) and not self.send(self._backlog[0].frames):
                break
            self._backlog.popleft()
        self._poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._backlog else 0))

    def _receive(self) -> None:
        import zmq

        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                number, sizes, header = json.loads(bytes(frames[0].buffer))
                answer = wire.decode(header.encode(), _assemble(sizes, frames[1:]), open_pickled=True)
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
        import zmq
        from zmq.utils.monitor import recv_monitor_message

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
