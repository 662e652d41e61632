"""A log of what a channel exchanged, from which lost shards are restored and fenced workers rejoin."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.futures import Future

from lightning_asgd.core.foundation.errors import ASGDError, ProtocolError, WorkerAwayError
from lightning_asgd.core.foundation.stats import UNAPPLIED, Verdict
from lightning_asgd.core.protocol import Exchange, Reply
from lightning_asgd.core.worker.connection import COORDINATOR, done_within
from lightning_asgd.core.worker.replica import Replica
from lightning_asgd.core.worker.shard_client import InFlight, ShardClient
from lightning_asgd.core.worker.synchronizer import Waits, WorkFeed
from lightning_asgd.recovery.messages import ReplicaState


class ExchangeLog:
    """What a channel has sent, and what the weights that it fetched last hold."""

    def __init__(self, shards: ShardClient, replica: Replica, data: WorkFeed, *, waits: bool) -> None:
        self._shards = shards
        self._client = shards.client
        self._connection = shards.connection
        self._replica = replica
        self._data = data
        self._waits = waits  # whether servers hold answers back until other workers have pushed
        self.seq = shards.client.pushed  # number of the latest push: of a process before this one, at first
        self.in_flight: InFlight | None = None  # the exchange whose answer is not merged yet
        self._unapplied: Sequence[int] = ()  # servers that had not applied the latest push when this worker rejoined
        self.pushed: list[Exchange] = []  # acknowledged pushes since the latest fetch
        # Of the weights fetched last: versions, the latest push of each worker in them, the epoch, ranges of its units.
        self.versions = [0 for _ in self._connection.servers]
        self.pushes: list[dict[int, int]] = [{} for _ in self.versions]
        self.epoch = ""
        self.done: tuple[tuple[int, int], ...] = ()

    def allocate(self, server: int) -> None:
        """Allocate the shard on the replacement of a lost server."""
        block = self._replica.blocks[server]
        ref = None if block is None else block.ref
        sees = self._shards.allocate(server, ref)
        if not sees and ref is not None:
            raise ProtocolError(
                f"Server {server}, a replacement, cannot map the memory that worker "
                f"{self._connection.worker} shares with the servers. Expected a server on the same machine."
            )

    def state(self, server: int) -> ReplicaState:
        """What this worker can report of a server's shard."""
        fetched, pushes = self._replica.fetched(server), self.pushes[server]
        return ReplicaState(self._shards.fragment, self.versions[server], fetched, pushes, self.epoch, self.done)

    def replay(self, server: int) -> None:
        """Send a replacement what the reported weights may lack; it treats a push that they hold as a duplicate."""
        if self.pushed:
            self._replica.pack_again(server)
            self._connection.result(server, self._shards.repeat(server, self.pushed[server]))
        if self.in_flight is not None:
            if self.in_flight.message.push:
                if server != COORDINATOR and not self._waits:
                    # If it has excluded this worker, no other server may have this push.
                    self._connection.result(COORDINATOR, self.in_flight.futures[COORDINATOR])
                self._replica.pack_again(server)
            self.in_flight.answers = []
            self.in_flight.futures[server] = self._shards.repeat(server, self._shards.latest[server])
            if not self._waits:  # else the answer may be held back until workers have pushed that replay now
                self._connection.result(server, self.in_flight.futures[server])

    def rejoin(self) -> Waits:
        """Rejoin. Updates that were not applied are lost: other workers train those data."""
        lost = self.in_flight
        restoring = bool(self._connection.being_restored)
        if not restoring:  # else it may have to start again with one more lost server
            self.in_flight = None
        if lost is not None:
            if not all(f.done() for f in lost.futures):
                yield lost.futures
            if not restoring:  # else the exchange in flight is not sent again: other workers train those data
                with suppress(WorkerAwayError):
                    self._shards.replies(lost.futures)  # if server 0 took the push, all must
            for future in lost.futures:  # another server may still read the wire buffers
                done_within(future, self._connection.timeout_s)
            self._note_unapplied(lost)  # here too: what follows fails if another server is lost
        owed = self._owed(lost)
        self._client.must_rejoin, self.in_flight, self.pushed = False, None, []
        self._data.revoke()
        self._client.join(again=True)
        for messages, futures in owed:
            for server in self._connection.may_lack:
                if messages[server].push:
                    self._replica.pack_again(server)
                futures[server] = self._shards.repeat(server, messages[server])
                self._connection.result(server, futures[server])
        if lost is not None:
            self._note_unapplied(lost)

    def take_unapplied(self) -> Sequence[int]:
        """Servers that had not applied the latest push when this worker rejoined; once."""
        unapplied, self._unapplied = self._unapplied, ()
        return unapplied

    def _note_unapplied(self, lost: InFlight) -> None:
        if lost.message.push:
            self._unapplied = [s for s, future in enumerate(lost.futures) if self._has_not_applied(s, future)]

    def _has_not_applied(self, server: int, future: Future[Any]) -> bool:
        """Whether a server has not taken a push: it had excluded this worker, or refused or dropped the push."""
        try:
            return self._connection.result(server, future, 0.0).verdict in UNAPPLIED
        except WorkerAwayError:
            return True
        except ASGDError:
            return False

    def _owed(self, lost: InFlight | None) -> list[tuple[list[Exchange], list[Future[Any]]]]:
        """Messages, with futures, that the coordinator has answered and servers under recovery may lack."""
        owed = []
        if self._connection.may_lack and self.pushed:
            owed.append((self.pushed, list[Future[Any]](Future() for _ in self.pushed)))
        if self._connection.may_lack and lost is not None:
            with suppress(WorkerAwayError):
                self._connection.result(COORDINATOR, lost.futures[COORDINATOR])
                owed.append((self._shards.latest, lost.futures))
        return owed

    def keep_answers(self, pending: InFlight) -> bool:
        """Wait for the weights in an exchange's answer, and keep them for a later merge.

        Returns False if there are none: the update was rejected, or this worker was fenced.
        """
        if not pending.answers:
            try:
                replies = self._shards.replies(pending.futures)
            except WorkerAwayError:
                return False
            must_rejoin = self.in_flight is not pending or self._client.must_rejoin
            if must_rejoin or any(r.verdict is Verdict.REFUSED for r in replies):
                return False
            pending.replies = replies
            pending.answers = self._shards.answers(replies, self._replica.wire)
        return True

    def peek(self) -> tuple[list[Reply], list[tuple[Tensor, ...]]]:
        """Fetch the servers' present weights; no exchange may be in flight, since it would use the same buffers."""
        self._replica.await_arrival()
        message = Exchange(*self._connection.sender, self.seq, 0, push=False, fetch=True, full=True)
        futures = self._shards.exchange(message, self.versions, self._replica.updates())
        replies = self._shards.replies(futures)  # never rejected: only pushes are
        return replies, self._shards.answers(replies, self._replica.wire)
