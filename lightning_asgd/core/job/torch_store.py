"""Entries in torch's ``TCPStore``, to which any process that reaches it can write: so each carries a code."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed

from lightning_asgd.core.calls.transport import CallTimeoutError
from lightning_asgd.core.job.addresses import listen
from lightning_asgd.core.job.entry_store import EntryStore
from lightning_asgd.core.job.secret import seal, unseal

_dist: Any = torch.distributed  # a build without it lacks the names below; asked for only when used
_PREFIX = "lightning_asgd"
_ATTEMPT_S = 1.0  # per attempt to connect: torch's thread lives that long, and a process that exits meanwhile aborts
_T = TypeVar("_T")


class TorchStore(EntryStore):
    """A connection to the store. With a secret, entries without a valid code are as if they were not there.

    Calls to another process's store fail after ``timeout_s``; one of this process has none.
    """

    serves_torch = True

    def __init__(
        self, store: Any, address: tuple[str, int], secret: str | None, timeout_s: float | None = None
    ) -> None:
        self._store = _dist.PrefixStore(_PREFIX, store)
        self._timeout_s = timeout_s
        self._secret = secret
        self._known: dict[str, Any] = {}  # the latest valid values: a stranger may write over the store's
        self.address = address

    @classmethod
    def host(cls, host: str, port: int, secret: str | None) -> TorchStore:
        """Host a store. Raises an ``OSError`` if the address cannot be listened on."""
        listener = listen(host, port)
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
        """Connect to the store of another process. Where something else listens, the attempt ends soon."""

        def connect() -> TorchStore:
            wait = timedelta(seconds=min(timeout_s, _ATTEMPT_S))
            store = _dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
            store.set_timeout(timedelta(seconds=timeout_s))
            return cls(store, (host, port), secret, timeout_s)

        return _in_thread(connect)

    def put(self, key: str, value: Any) -> None:
        """See :class:`EntryStore`."""
        sealed = seal(key, value, self._secret)
        self._ask(lambda: self._store.set(key, sealed))

    def peek(self, key: str, kind: type = object) -> Any:
        """See :class:`EntryStore`."""
        data = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        found = None if data is None else unseal(key, data, self._secret)
        if found is not None and isinstance(found, kind):
            self._known[key] = found
        return self._known.get(key)

    def is_foreign(self, key: str) -> bool:
        """See :class:`EntryStore`."""
        return self.peek(key) is None and bool(self._ask(lambda: self._store.check([key])))

    def shared(self, prefix: str) -> Any:
        """See :class:`EntryStore`."""
        return _dist.PrefixStore(prefix, self._store)

    def close(self) -> None:
        """Nothing: torch closes the connection, or the store, with its last user."""

    def _ask(self, call: Callable[[], _T]) -> _T:
        if self._timeout_s is None:
            return call()
        try:
            return _in_thread(call).result(self._timeout_s)
        except concurrent.futures.TimeoutError as error:
            raise CallTimeoutError(f"The rendezvous did not answer within {self._timeout_s:g} s.") from error


def _in_thread(call: Callable[[], _T]) -> Future[_T]:
    """Call torch in a thread: where a foreign process accepts and stays silent, it waits forever, whatever time-out."""
    made: Future[_T] = Future()

    def work() -> None:
        try:
            made.set_result(call())
        except (RuntimeError, ValueError) as error:
            made.set_exception(RuntimeError((str(error) or repr(error)).splitlines()[0]))

    thread = threading.Thread(target=work, name="lightning_asgd.store", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python ends, and starts no thread any more
        work()
    return made
