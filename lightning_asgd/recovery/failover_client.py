"""A worker's part in restoring lost servers: it reports to the replacement what the old server knew.

Training continues until the replacement is ready. Then every worker, at its next batch or wherever it waits,

1. joins the session there, and reports the weights it fetched last, with their version and the pushes they hold, its
   part of the epoch, and the number of its latest collective;
2. when all workers have reported, and the server has taken the newest weights, replays the pushes that these lack;
3. when all workers have replayed, resumes.

So no acknowledged update is lost, and none is applied twice.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from torch.futures import Future

from lightning_asgd.core.foundation.errors import ASGDError, ServerLostError, WorkerAwayError
from lightning_asgd.core.protocol import DisconnectWatch, Heartbeat, HeartbeatReply, LeaseHoldings
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.connection import COORDINATOR, AnotherLost
from lightning_asgd.core.worker.exchanger import Exchanger
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.synchronizer import run
from lightning_asgd.recovery.messages import ReplayDone, StateReport

_FOREVER_S = 0.0  # for a transport: no time-out


@dataclass
class _Successor:
    """A lost server whose replacement is awaited."""

    ready: Future[None] = field(default_factory=Future)
    replaced: bool = False  # whether the transport is connected to it
    error: ASGDError | None = None


def _in_a_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="lightning_asgd.recovery", daemon=True).start()


class FailoverClient:
    """See the module's docstring. Registers itself with the client's connection.

    ``find`` waits for the replacement of a lost server, and returns its address; ``background`` runs that.
    """

    def __init__(
        self,
        client: SessionClient,
        collectives: Collectives,
        exchanger: Exchanger,
        part: Callable[[], LeaseHoldings | None],
        find: Callable[[int], str],
        background: Callable[[Callable[[], None]], None] = _in_a_thread,
    ) -> None:
        self._client = client
        self._connection = client.connection
        self._collectives = collectives
        self._exchanger = exchanger
        self._part = part
        self._find = find
        self._background = background
        self._awaited: dict[int, _Successor] = {}
        self._lock = threading.RLock()
        self._closed = False
        self._connection.restorer = self
        for server in self._connection.servers:
            self.watch(server)

    def close(self) -> None:
        """Stop restoring servers."""
        self._closed = True
        self._connection.restorer = None

    def watch(self, server: int) -> None:
        """Watch a server: when it is lost, look for its replacement and interrupt the training thread."""
        me, replaced = weakref.ref(self), self._connection.replaced[server]  # the future outlives the session

        def ended(future: Future[None]) -> None:
            recovery = me()
            try:
                future.value()
            except RuntimeError:
                if recovery is not None and not recovery._closed:
                    recovery.lose(server, replaced)

        watched = self._connection.post(server, DisconnectWatch(*self._connection.sender), _FOREVER_S)
        watched.add_done_callback(ended)

    def lose_all(self, replaced: Sequence[int]) -> None:
        """All servers are lost, though no connection has broken: their machine has vanished. Any thread may call it.

        ``replaced`` is how often each had been replaced when that was noticed.
        """
        for server in self._connection.servers:
            self.lose(server, replaced[server])

    def lose(self, server: int, replaced: int) -> None:
        """Look for a lost server's replacement, unless the server was replaced since its loss was noticed.

        The living replacement has no successor: the search would never end. Any thread may call it.
        """
        with self._lock:
            if not self._closed and self._connection.replaced[server] == replaced:
                self._await(server)

    def _await(self, server: int) -> _Successor:
        with self._lock:
            if server in self._awaited:
                return self._awaited[server]
            awaited = self._awaited[server] = _Successor()
            self._connection.gone.add(server)

        def find() -> None:
            try:
                self._connection.transport.prepare(server, self._find(server))
            except ASGDError as error:
                awaited.error = error
            except Exception as error:
                awaited.error = self._connection.lost(
                    f"Server {server} is lost. No replacement was reached: {error!r}."
                )
            finally:
                self._connection.interrupt(server)
                awaited.ready.set_result(None)

        self._background(find)
        return awaited

    def restore(self, servers: Collection[int]) -> None:
        """Restore lost servers, together with all other workers.

        Raises a :class:`ServerLostError` if a server was not replaced, :class:`AnotherLost` if another server is lost.
        """
        for awaited in [self._await(server) for server in sorted(servers)]:
            self._connection.wait_interruptibly(awaited.ready, threading.TIMEOUT_MAX)
            if awaited.error is not None:
                raise awaited.error
        try:
            self._take_part(servers)
        except ServerLostError as error:
            if error.server is None or not self._connection.concerns_present(error):
                raise
            with self._lock:  # a search that has not ended is for the same process
                if error.server in self._awaited and self._awaited[error.server].replaced:
                    del self._awaited[error.server]
            self._connection.interrupt(error.server)
            raise AnotherLost from error
        with self._lock:
            for server in servers:
                self._awaited.pop(server, None)

    def _take_part(self, servers: Collection[int]) -> None:
        connection, logs = self._connection, [channel.log for channel in self._exchanger.channels]
        try:
            for server in servers:
                if not self._awaited[server].replaced:
                    connection.replace(server)
                    self._awaited[server].replaced = True
                self._join(server)
                for log in logs:
                    log.allocate(server)
            # All servers must be restored by the same workers, or one could hold a push that another lacks.
            for group in ({COORDINATOR} & set(servers), set(servers) - {COORDINATOR}):
                part = self._part()
                connection.ask_together({server: self._report(server, part) for server in group})
            # The replacements would accept what a living coordinator rejects.
            if COORDINATOR not in servers and self._beat(COORDINATOR).fenced:
                raise WorkerAwayError(f"Worker {connection.worker} was disconnected. Expected it to rejoin.")
            for server in sorted(servers):
                for log in logs:
                    log.replay(server)
        except WorkerAwayError:
            run(self._exchanger.come_back())
        if COORDINATOR in servers:
            self._collectives.repeat(connection)
        connection.ask_together({server: ReplayDone(*connection.sender) for server in servers})

    def _join(self, server: int) -> None:
        """Join the session on a replacement."""
        holding: Collection[int] = () if self._connection.world_size else self._holding()
        message = replace(
            self._client.join_message(server),
            restore=True,
            holding=tuple(sorted(holding)),
            admitted=self._client.heard.admitted,
        )
        self._connection.result(server, self._connection.post(server, message))

    def _holding(self) -> set[int]:
        """Workers that may have pushed: a server that was restored without one of them could lack half a push.

        Living servers know of workers that joined recently, since every worker fetches from all servers before its
        first push. If no server lives, the reported weights hold no push of a worker that this one does not know.
        """
        holding: set[int] = set()
        for server in set(self._connection.servers) - self._connection.being_restored:
            beaten = self._beat(server)
            holding.update(beaten.holding)
            if server == COORDINATOR:
                self._client.note_heartbeat(beaten)
        heard = self._client.heard
        holding.update(heard.holding, [self._connection.worker])
        pushers = set().union(*(each.pushers for each in self._client.members))
        return holding | {worker for worker in pushers if worker in heard.living or worker > heard.admitted}

    def _report(self, server: int, part: LeaseHoldings | None) -> StateReport:
        """This worker's report of a lost server, answered when all workers have reported."""
        members, coordinator = self._client.members[server], server == COORDINATOR
        return StateReport(
            *self._connection.sender,
            tuple(channel.log.state(server) for channel in self._exchanger.channels),
            self._collectives.answered,
            part if coordinator else None,
            members.incarnation,
            members.incarnations,
            members.left,
            self._client.metadata if coordinator else {},
        )

    def _beat(self, server: int) -> HeartbeatReply:
        beaten: HeartbeatReply = self._connection.result(
            server, self._connection.post(server, Heartbeat(*self._connection.sender))
        )
        return beaten
