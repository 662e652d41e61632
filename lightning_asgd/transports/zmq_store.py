"""Entries in the main process, behind an authenticated socket: a stranger can neither read nor write one."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

from lightning_asgd.errors import ProtocolError
from lightning_asgd.protocol import Failure
from lightning_asgd.transports.entry_store import EntryStore
from lightning_asgd.transports.job_secret import LARGEST_ENTRY
from lightning_asgd.transports.transport import answer_within
from lightning_asgd.transports.zmq_server import ZmqServer
from lightning_asgd.transports.zmq_transport import ZmqTransport

__all__ = ["HostedZmqStore", "ZmqStore"]

_GRACE_S = 1.0
_LARGEST_SUM = 16 << 20  # bytes of all entries and their names


class HostedZmqStore(EntryStore):
    """The entries, and the socket at which the job's other processes read and write them.

    Raises an ``OSError`` if the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, secret: str) -> None:
        self._texts: dict[str, str] = {}
        self._bytes = 0
        self._lock = threading.Lock()
        # No threads of a pool: Python ends these before what this process does at exit, when workers may still write.
        where = socket.gethostbyname(host), secret, port
        self._server = ZmqServer(self._answer, *where, threads=0, decode=lambda header, _: json.loads(header))
        self.address = host, int(self._server.address.rpartition(":")[2])

    def put(self, key: str, value: Any) -> None:
        """See :class:`EntryStore`."""
        self._put(key, json.dumps(value))

    def peek(self, key: str, kind: type = object) -> Any:
        """See :class:`EntryStore`."""
        return _value(self._texts.get(key), kind)

    def close(self) -> None:
        """See :class:`EntryStore`."""
        self._server.close()

    def _put(self, key: str, text: str) -> None:
        size = len(key) + len(text)
        with self._lock:
            total = self._bytes + size - (len(key) + len(self._texts[key]) if key in self._texts else 0)
            if size > LARGEST_ENTRY or total > _LARGEST_SUM:
                raise ProtocolError(
                    f"An entry of the rendezvous has {size:,} bytes, and all of them {total:,}. Expected at most "
                    f"{LARGEST_ENTRY:,}, and {_LARGEST_SUM:,}."
                )
            self._texts[key], self._bytes = text, total

    def _answer(self, message: Any) -> str | None:
        match message:
            case ["L", ["peek", str(key)]]:  # as a list of texts is encoded; nothing else is decoded
                return self._texts.get(key)
            case ["L", ["put", str(key), str(text)]]:
                self._put(key, text)
                return None
        raise ProtocolError("A message to the rendezvous is neither a read nor a write of an entry.")


class ZmqStore(EntryStore):
    """A connection to a :class:`HostedZmqStore` of another process."""

    def __init__(self, host: str, port: int, secret: str, timeout_s: float) -> None:
        self.address = host, port
        self._timeout_s = timeout_s
        self._transport = ZmqTransport([f"tcp://{socket.gethostbyname(host)}:{port}"], secret)

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


def _value(text: str | None, kind: type) -> Any:
    found = None if text is None else json.loads(text)
    return found if isinstance(found, kind) else None
