"""The servers' side of ZeroMQ connections."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import zmq
from torch.futures import Future
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from lightning_asgd.core.calls.reliable_calls import EncodedOnce, ReplyCache
from lightning_asgd.core.foundation.errors import ASGDError
from lightning_asgd.core.job.addresses import LOOPBACK, ServerAddress
from lightning_asgd.core.protocol import Failure, codec
from lightning_asgd.transports.zmq.sockets import Loop, addressed, assemble, encoded, frames_of, keys_of, secure

log = logging.getLogger(__name__)

_THREADS = 8
_MOVE_S = 10.0
_HANDSHAKE_MS = 5000  # after which a connection that is not set up is closed
_UNREADABLE = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: the other end has another key


class ZmqServer(Loop):
    """Answers messages in this process until it is closed.

    ``threads`` threads call ``handler``; with 0 the socket's own thread does. ``name`` is the server's at its gateway.
    ``decode`` makes what the handler gets of header and buffers. Raises an ``OSError`` if it cannot listen at
    ``address``.
    """

    def __init__(
        self,
        handler: Callable[[Any], Any],
        address: str,
        secret: str,
        *,
        listener: socket.socket | None = None,
        name: str = "",
        threads: int = _THREADS,
        decode: Callable[[bytes, Sequence[Any]], Any] = codec.decode,
    ) -> None:
        super().__init__("lightning_asgd.zmq")
        self._handler = handler
        self._decode = decode
        self._name = name.encode()
        self._process = name or uuid.uuid4().hex  # in every answer: another server may have this address after this one
        self._once = ReplyCache()
        self._encoded = EncodedOnce(encoded)
        keys = keys_of(secret)
        only_theirs = SimpleNamespace(callback=lambda domain, key: key == keys.worker_public)
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=only_theirs)
        self._socket = self.context.socket(zmq.ROUTER)
        secure(self._socket, beats=False)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker behind a gateway has the same routing id again
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.server_public)
        self._failures = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        try:
            self._bind(address, listener)
        except zmq.ZMQError as error:
            self._authenticator.stop()
            self.context.destroy(linger=0)
            self._wake.close()
            self._bell.close()
            raise OSError(error.errno, error.strerror) from error
        self._place = self.address.removeprefix("tcp://")  # also if a gateway listens there instead, later
        self.poller.register(self._socket, zmq.POLLIN)
        self.poller.register(self._failures, zmq.POLLIN)
        self._threads: list[bool] = []  # one for each of the pool that runs
        started = partial(self._threads.append, True)
        self._pool = ThreadPoolExecutor(threads, "lightning_asgd.answer", started) if threads else None
        self.refused = 0
        """Messages that could not be read."""
        self.thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return ServerAddress.of(self.address).port

    def _bind(self, address: str, listener: socket.socket | None = None) -> None:
        self._socket.setsockopt(zmq.IPV6, ":" in address)
        self._socket.setsockopt(zmq.USE_FD, -1 if listener is None else os.dup(listener.fileno()))
        port = 0 if listener is None else listener.getsockname()[1]
        self._socket.bind(str(ServerAddress(address, port)))
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where it listens."""

    def move_to_loopback(self) -> None:
        """Leave the listener to another process, and listen at a free port of loopback. Connections stay."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def move() -> None:
            try:
                self._socket.unbind(self.address)
                self._bind(LOOPBACK)
                done.set_result(None)
            except zmq.ZMQError as error:
                done.set_exception(OSError(error.errno, error.strerror))

        self.submit(move)
        done.result(_MOVE_S)

    def tick(self, ready: dict[Any, int]) -> None:
        """See :class:`Loop`."""
        if self._failures in ready and recv_monitor_message(self._failures)["value"] == _UNREADABLE:
            log.warning("A process was refused at %s: it has another LIGHTNING_ASGD_SECRET, or none.", self._place)
            self._stop_monitor()  # one line is enough
        if self._socket not in ready:
            return
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if self._pool is None:
                self._take(frames)
            else:
                try:
                    self._pool.submit(self._take, frames)
                except RuntimeError:  # the system allows no new thread; a running thread of the pool takes the message
                    if not self._threads:
                        self._take(frames)

    def accepts(self) -> bool:
        """Whether workers can connect: ZeroMQ keeps listening whatever happens to a connection."""
        return self.answers()

    def answers(self) -> bool:
        """Whether the thread that answers still runs."""
        return not self.closed.is_set()

    def end(self) -> None:
        """See :class:`Loop`."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._authenticator.stop()
        self._stop_monitor()
        self._socket.close(0)

    def _stop_monitor(self) -> None:
        if not self._failures.closed:
            self.poller.unregister(self._failures)
            self._socket.disable_monitor()
            self._failures.close(0)

    def _take(self, frames: Sequence[Any]) -> None:
        try:
            who = bytes(frames[0].buffer)
            # Else it is for a server that had this one's number at the gateway; who answers says that it is gone.
            mine = who[:1] == b"\0" or who.startswith(self._name)
            caller, number, arrived, sizes, header = json.loads(bytes(frames[1].buffer))
            if not isinstance(caller, str) or type(number) is not int:
                raise TypeError("no caller or no number")
            if header is None:
                self._once.forget(caller, arrived)
                return

            def handle() -> Any:
                try:
                    return mine and self._handler(self._decode(header.encode(), assemble(sizes, frames[2:])))
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
            frames = addressed([number, self._process], self._encoded(done.value()))
        except Exception as error:
            frames = frames_of(
                [number, self._process], Failure("ASGDError", f"A server's answer could not be sent: {error!r}.")
            )
        self.submit(lambda: self._send([who, *frames]))

    def _send(self, frames: list[Any]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the worker is gone; it repeats the call
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
