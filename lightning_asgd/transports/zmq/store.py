"""Entries in the main process, behind an authenticated socket: a stranger can neither read nor write one."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from lightning_asgd.core.calls.transport import answer_within
from lightning_asgd.core.foundation.environment import SECRET_ENV, joined
from lightning_asgd.core.foundation.errors import LaunchError, ProtocolError
from lightning_asgd.core.job.addresses import LOOPBACK, ServerAddress, listen, resolve
from lightning_asgd.core.job.entry_store import CLOCK_KEY, EntryStore
from lightning_asgd.core.job.rendezvous import final_error
from lightning_asgd.core.job.secret import LARGEST_ENTRY
from lightning_asgd.core.protocol import Failure
from lightning_asgd.one_port.gateway import Gateway
from lightning_asgd.transports.zmq.server import ZmqServer
from lightning_asgd.transports.zmq.transport import SecretError, ZmqTransport

_GRACE_S = 1.0
_LARGEST_SUM = 16 << 20  # bytes of all entries and their names


class HostedZmqStore(EntryStore):
    """The entries, and the socket at which others read and write them. Raises an ``OSError`` if it cannot listen."""

    def __init__(self, host: str, port: int, secret: str) -> None:
        self._texts: dict[str, str] = {}
        self._bytes, self._sizes = 0, dict[str, int]()  # as they were given
        self._lock, self._opening = threading.Lock(), threading.Lock()
        # No threads of a pool: Python ends these before what this process does at exit, when workers may still write.
        self._listener = listen(host, port)
        self._listener.setblocking(False)
        about: Any = {"threads": 0, "decode": lambda header, _: json.loads(header), "listener": self._listener}
        self._server = ZmqServer(self._answer, resolve(host), secret, **about)
        self._gateway: Gateway | None = None
        self.address = host, self._server.port

    def put(self, key: str, value: Any) -> None:
        """See :class:`EntryStore`."""
        self._put(key, json.dumps(value))

    def peek(self, key: str, kind: type = object) -> Any:
        """See :class:`EntryStore`."""
        return _value(self._texts.get(key), kind)

    def open_gateway(self) -> bool:
        """See :class:`EntryStore`."""
        with self._opening:
            if self._gateway is None:
                self._server.move_to_loopback()
                with self._lock:  # not before: the server's thread may be waiting for it
                    try:
                        self._gateway = Gateway(self._listener, self._server.port)
                    except OSError as error:
                        raise LaunchError(
                            f"The gateway of {joined(*self.address)} cannot be started: {error}. Expected one more "
                            "process to be possible on this machine."
                        ) from error
                    for key, text in self._texts.items():
                        self._texts[key] = _let_in(self._gateway, text)
        return True

    def way_to(self, name: str, number: int) -> ServerAddress:
        """See :class:`EntryStore`."""
        return ServerAddress(resolve(self.address[0]), self.address[1], name, number)

    def close(self) -> None:
        """See :class:`EntryStore`."""
        with self._lock:
            gateway, self._gateway = self._gateway, None
        if gateway is not None:
            gateway.close()
        self._listener.close()
        self._server.close()

    def _put(self, key: str, text: str) -> None:
        size = len(key) + len(text)
        with self._lock:
            total = self._bytes + size - self._sizes.get(key, 0)
            if size > LARGEST_ENTRY or total > _LARGEST_SUM:
                raise ProtocolError(
                    f"An entry of the rendezvous has {size:,} bytes, and all of them {total:,}. Expected at most "
                    f"{LARGEST_ENTRY:,}, and {_LARGEST_SUM:,}."
                )
            self._texts[key] = text if self._gateway is None else _let_in(self._gateway, text)
            self._bytes, self._sizes[key] = total, size

    def _answer(self, message: Any) -> str | None:
        match message:
            case ["L", ["peek", str(key)]] if key == CLOCK_KEY:
                return json.dumps(time.time())
            case ["L", ["peek", str(key)]]:  # as a list of texts is encoded; nothing else is decoded
                return self._texts.get(key)
            case ["L", ["put", str(key), str(text)]] if _is_json(text):
                self._put(key, text)
                return None
        raise ProtocolError("A message to the rendezvous is neither a read nor a write of an entry.")


class ZmqStore(EntryStore):
    """A connection to a :class:`HostedZmqStore`; ``found`` is the address at which it was found, if not its name's."""

    def __init__(self, host: str, port: int, secret: str, timeout_s: float, found: str = "") -> None:
        self.address = host, port
        self._timeout_s = timeout_s
        self._found = found or resolve(host)
        self._transport = ZmqTransport([str(ServerAddress(self._found, port))], secret)

    def way_to(self, name: str, number: int) -> ServerAddress:
        """See :class:`EntryStore`."""
        return ServerAddress(self._found, self.address[1], name, number)

    def put(self, key: str, value: Any) -> None:
        """See :class:`EntryStore`."""
        self._call(["put", key, json.dumps(value)])

    def peek(self, key: str, kind: type = object) -> Any:
        """See :class:`EntryStore`."""
        return _value(self._call(["peek", key]), kind)

    def close(self) -> None:
        """See :class:`EntryStore`."""
        self._transport.close()

    def _call(self, message: list[str]) -> Any:
        future = self._transport.call(0, message, self._timeout_s)
        answer = answer_within(future, self._timeout_s + _GRACE_S)
        if isinstance(answer, Failure):
            raise ProtocolError(answer.message)
        return answer


def _let_in(gateway: Gateway, text: str) -> str:
    """Let other machines reach the server of an entry, if it is of one that listens on loopback: with its number."""
    match entry := json.loads(text):
        case {"address": str(address), "name": str(name)} if address.startswith(f"tcp://{LOOPBACK}:"):
            return json.dumps({**entry, "number": gateway.add(name, ServerAddress.of(address).port)})
    return text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _value(text: str | None, kind: type) -> Any:
    found = None if text is None else json.loads(text)
    return found if isinstance(found, kind) else None


def reach(host: str, port: int, secret: str | None, timeout_s: float, found: str) -> EntryStore:
    """Connect to the store of a process that listens there."""
    there = f"The process at {joined(host, port)} has transport='zmq', but"
    store = ZmqStore(host, port, secret or "", timeout_s, found)  # without one, too: so the process there learns of it
    try:
        store.peek("job")  # waits for the handshake, which fails with another secret
    except BaseException as error:
        store.close()
        if not isinstance(error, RuntimeError):
            raise
        if secret is None:
            text = f"{there} {SECRET_ENV} is not set for this one. Expected the same secret on all machines."
            raise final_error(text) from error
        text = f"{there} no connection to it could be made: {error}."
        raise (final_error(text) if isinstance(error, SecretError) else LaunchError(text)) from error
    return store
