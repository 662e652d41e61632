"""The served tables of a server process.

Reading and writing rows takes long, so it happens outside of the server's lock, in a thread for each table.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.futures import Future

from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError, ProtocolError, SnapshotError
from lightning_asgd.core.protocol import Failure
from lightning_asgd.core.server.feature import Server, ServerFeature
from lightning_asgd.core.server.pending_replies import failure
from lightning_asgd.tables.served.messages import FetchRows, LoadTable, PushRows, SaveTable
from lightning_asgd.tables.served.row_store import RowStore

log = logging.getLogger(__name__)


class ServedTables(ServerFeature):
    """Opens its part of a table at the first message about it."""

    observes = True  # snapshots do not hold tables

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._parts: dict[str, _Part] = {}  # by folder
        self._folders: dict[str, str] = {}  # of a module's tables, by their names

    def handle(self, message: Any) -> Any:
        """See :class:`ServerFeature`."""
        if isinstance(message, PushRows):
            self._server.member(message)
        else:
            self._server.heard(message.session, message.worker)
        table = message.table
        folder = self._folders.setdefault(table.name, table.folder)
        part = self._parts.get(table.folder)
        if part is None:
            part = self._parts[table.folder] = _Part()
        if folder != table.folder:
            return failure(
                ConfigurationError(
                    f"Worker {message.worker} has the served table {table.name!r} in {table.folder}, another has it "
                    f"in {folder}. Expected one folder for all workers: name it in the script, which each of them "
                    "runs."
                )
            )
        future: Future[Any] = Future()
        part.thread.submit(lambda: future.set_result(part.answer(message)))
        return future

    def forget(self, worker: int) -> None:
        """Let other processes have the files: a job may be over. The next message about a table opens it again."""
        self._folders.clear()
        for part in self._parts.values():
            part.thread.submit(part.close)

    def close(self) -> None:
        """Let other processes have the files, once the messages that have arrived are answered."""
        for part in self._parts.values():
            part.thread.submit(part.close)
            part.thread.shutdown(wait=False)
        self._parts.clear()


class _Part:
    """This server's part of one table; only its thread calls :meth:`answer` and :meth:`close`."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="lightning_asgd.table")
        self._store: RowStore | None = None

    def answer(self, message: Any) -> Any:
        try:
            return _ACTIONS[type(message)](self._open(message), message)
        except ASGDError as error:
            return failure(error)
        except OSError as error:  # of the disk
            where = f"a folder of this user's on server {message.server}'s machine, and room on its disk"
            return failure(SnapshotError(f"The files of {message.table} cannot be used: {error}. Expected {where}."))
        except Exception as error:
            log.exception("A message failed: %s", type(message).__name__)
            return Failure("ASGDError", f"A server failed on {type(message).__name__}: {error!r}.")

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _open(self, message: Any) -> RowStore:
        table, server, servers = message.table, message.server, message.servers
        if self._store is not None and self._store.is_gone:
            self.close()
        store = self._store = self._store or RowStore(table, server, servers)
        if (store.table, store.server, store.servers) != (table, server, servers):
            raise ConfigurationError(
                f"Worker {message.worker} expects {table} as part {server} of {servers}. In that folder the server has "
                f"{store.table} as part {store.server} of {store.servers}. Expected the same settings on all workers, "
                "and a folder for each table."
            )
        return store


def _absolute(folder: str) -> str:
    if not os.path.isabs(folder):
        raise ProtocolError(f"A worker named the folder {folder!r} for a copy of a table. Expected an absolute path.")
    return folder


_ACTIONS: dict[type, Callable[[RowStore, Any], Any]] = {
    FetchRows: lambda store, message: store.read(message.numbers),
    PushRows: lambda store, m: store.push(m.numbers, m.gradients, m.lr, m.client, m.seq),
    SaveTable: lambda store, message: store.save(_absolute(message.to)),
    LoadTable: lambda store, message: store.load(_absolute(message.source)),
}
