"""Entries in torch's ``TCPStore``, to which any process that reaches it can write: so each carries a code."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed

from lightning_asgd.transports.entry_store import EntryStore
from lightning_asgd.transports.job_secret import seal, unseal

__all__ = ["TorchStore"]

_dist: Any = torch.distributed  # a build without it lacks the names below; asked for only when used
_PREFIX = "lightning_asgd"


class TorchStore(EntryStore):
    """A connection to the store. With a secret, entries without a valid code are as if they were not there."""

    serves_torch = True

    def __init__(self, store: Any, address: tuple[str, int], secret: str | None) -> None:
        self._store = _dist.PrefixStore(_PREFIX, store)
        self._secret = secret
        self._known: dict[str, Any] = {}  # the latest valid values: a stranger may write over the store's
        self.address = address

    @classmethod
    def host(cls, host: str, port: int, secret: str | None) -> TorchStore:
        """Host a store. Raises an ``OSError`` if the address cannot be listened on."""
        listener = _listen(host, port)
        port = listener.getsockname()[1]
        options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
        options["multi_tenant"] = True  # a process group may share it later
        try:
            store = _dist.TCPStore(host, port, **options)
        except NotImplementedError:  # of torch 2.6: its usual store cannot take a socket over
            store = _dist.TCPStore(host, port, use_libuv=False, **options)
        return cls(store, (host, port), secret)

    @classmethod
    def of_this_process(cls, host: str, port: int, secret: str | None) -> TorchStore | None:
        """The store that this process hosts on a port, for DDP for instance; None if it is another process's port."""
        if not _dist.is_initialized():
            return None
        try:
            store = _dist.TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True)
        except RuntimeError:  # torch has no store there either, and cannot listen
            return None
        return cls(store, (host, port), secret)

    @classmethod
    def connect(cls, host: str, port: int, secret: str | None, timeout_s: float) -> Future[TorchStore]:
        """Connect in a thread: a foreign process that accepts and stays silent would block forever."""
        made: Future[TorchStore] = Future()

        def connect() -> None:
            wait = timedelta(seconds=timeout_s)
            try:
                store = _dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
                made.set_result(cls(store, (host, port), secret))
            except (RuntimeError, ValueError) as error:
                made.set_exception(RuntimeError(str(error).splitlines()[0]))

        threading.Thread(target=connect, name="lightning_asgd.connect", daemon=True).start()
        return made

    def put(self, key: str, value: Any) -> None:
        """See :class:`EntryStore`."""
        self._store.set(key, seal(key, value, self._secret))

    def peek(self, key: str, kind: type = object) -> Any:
        """See :class:`EntryStore`."""
        found = unseal(key, self._store.get(key), self._secret) if self._store.check([key]) else None
        if found is not None and isinstance(found, kind):
            self._known[key] = found
        return self._known.get(key)

    def is_foreign(self, key: str) -> bool:
        """See :class:`EntryStore`."""
        return self.peek(key) is None and bool(self._store.check([key]))

    def shared(self, prefix: str) -> Any:
        """See :class:`EntryStore`."""
        return _dist.PrefixStore(prefix, self._store)

    def close(self) -> None:
        """Nothing: torch closes the connection, or the store, with its last user."""


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((socket.gethostbyname(host), port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
