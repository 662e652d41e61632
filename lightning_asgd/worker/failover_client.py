"""A worker's part in restoring servers that were lost: it tells the new one what the old one knew.

Training goes on until the new server is there. Then every worker, at its next batch or wherever it waits,

1. enters the session on it, and offers the weights it fetched last, with their version and the pushes they hold, its
   part of the epoch, and the number of its latest collective;
2. when all have, and the newest were taken, sends again what these do not hold;
3. when all have, goes on.

So no acknowledged update is lost, and none is applied twice.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch.futures import Future

from lightning_asgd.errors import ASGDError, ServerLostError, WorkerAwayError
from lightning_asgd.protocol import LeaseHoldings
from lightning_asgd.worker.client import Client
from lightning_asgd.worker.connection import COORDINATOR, AnotherLost
from lightning_asgd.worker.synchronizer import Synchronizer

__all__ = ["FailoverClient"]


@dataclass
class _Successor:
    """A server that is awaited."""

    ready: threading.Event = field(default_factory=threading.Event)
    replaced: bool = False  # whether the transport leads there
    error: ASGDError | None = None


def _in_a_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="lightning_asgd.recovery", daemon=True).start()


class FailoverClient:
    """See the module's docstring.

    Args:
        client: connection to the servers, in a session that has begun. Restores servers by this object from now on.
        synchronizer: what the worker shares through.
        part: of the present epoch, if there is one.
        find: waits for the server in a lost one's place, and returns its address.
        background: runs that.
    """

    def __init__(
        self,
        client: Client,
        synchronizer: Synchronizer,
        part: Callable[[], LeaseHoldings | None],
        find: Callable[[int], str],
        background: Callable[[Callable[[], None]], None] = _in_a_thread,
    ) -> None:
        self._client = client
        self._synchronizer = synchronizer
        self._part = part
        self._find = find
        self._background = background
        self._awaited: dict[int, _Successor] = {}
        self._replaced = [0] * len(client.connection.servers)  # how often each server was
        self._lock = threading.Lock()
        self._closed = False
        client.connection.restorer = self
        for server in client.connection.servers:
            self.watch(server)

    def close(self) -> None:
        """Restore servers no more."""
        self._closed = True
        self._client.connection.restorer = None

    def watch(self, server: int) -> None:
        """Look for another server as soon as this one is lost, and have the training thread interrupted then."""
        me, replaced = weakref.ref(self), self._replaced[server]  # the future outlives the session

        def ended(future: Future[None]) -> None:
            recovery = me()
            try:
                future.value()
            except RuntimeError:
                # It may be late: what was watched has been replaced then, and no other one will come for what lives.
                if recovery is not None and not recovery._closed and recovery._replaced[server] == replaced:
                    recovery._await(server)

        self._client.watch(server).add_done_callback(ended)

    def _await(self, server: int) -> _Successor:
        with self._lock:
            if server in self._awaited:
                return self._awaited[server]
            awaited = self._awaited[server] = _Successor()
            self._client.connection.gone.add(server)

        def find() -> None:
            try:
                self._client.connection.transport.prepare(server, self._find(server))
            except ASGDError as error:
                awaited.error = error
            except Exception as error:
                awaited.error = ServerLostError(f"Server {server} is gone. Another one was not reached: {error!r}.")
            finally:
                self._client.connection.interrupt(server)
                awaited.ready.set()

        self._background(find)
        return awaited

    def restore(self, servers: Collection[int]) -> None:
        """Restore servers that are lost, together with all other workers.

        Raises:
            ServerLostError: none took a server's place.
            AnotherLost: begin again, with more of them.
        """
        for awaited in [self._await(server) for server in sorted(servers)]:
            awaited.ready.wait()
            if awaited.error is not None:
                raise awaited.error
        client = self._client
        try:
            self._take_part(servers)
        except ServerLostError as error:
            if error.server is None:
                raise
            with self._lock:
                self._awaited.pop(error.server, None)
            client.connection.interrupt(error.server)
            raise AnotherLost from error
        with self._lock:
            for server in servers:
                self._awaited.pop(server, None)

    def _take_part(self, servers: Collection[int]) -> None:
        client, synchronizer = self._client, self._synchronizer
        try:
            for server in servers:
                if not self._awaited[server].replaced:
                    client.connection.transport.replace(server)
                    client.connection.gone.discard(server)
                    self._awaited[server].replaced = True
                    self._replaced[server] += 1
                client.join_restored(server)
                synchronizer.allocate(server)
            # All servers must be restored by the same workers, or one could hold a push that another lacks.
            for group in ({COORDINATOR} & set(servers), set(servers) - {COORDINATOR}):
                client.offer({s: synchronizer.held(s) for s in group}, self._part())
            if COORDINATOR not in servers:  # the new ones would take what that one refuses
                client.check_trusted()
            for server in sorted(servers):
                synchronizer.replay(server)
        except WorkerAwayError:
            synchronizer.come_back()
        if COORDINATOR in servers:
            client.repeat()
        client.settle(servers)
