"""One fragment's shards on all servers: allocation, exchanges, and what servers keep beside the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.futures import Future

from lightning_asgd.compression.streams import CodecState, Coded, streams
from lightning_asgd.core.algorithms.base import Algorithm
from lightning_asgd.core.algorithms.compression import Compression
from lightning_asgd.core.foundation.errors import ServerLostError, WorkerAwayError
from lightning_asgd.core.foundation.layout import Layout, dense, nbytes_of
from lightning_asgd.core.foundation.stats import ExchangeRecord
from lightning_asgd.core.protocol import Exchange, InitShard, Reply, Rows, ShardState, SharedRef, nbytes
from lightning_asgd.core.worker.connection import COORDINATOR
from lightning_asgd.core.worker.session_client import SessionClient

log = logging.getLogger(__name__)


@dataclass
class InFlight:
    """An exchange that was begun and whose answer is not merged."""

    message: Exchange  # to every server, without what differs between them
    begun: float
    step: int
    step_s: float  # seconds per step before it; 0 if unknown
    cost_s: float = 0.0  # in which the training thread was busy with it
    nbytes: int = 0  # of the update
    held: bool = False  # whether other processes of an island have to wait for their parts of the answer
    futures: list[Future[Any]] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)  # when each server has
    replies: list[Reply] = field(default_factory=list)
    answers: list[tuple[Tensor, ...]] = field(default_factory=list)  # where a checkpoint needed them before the merge


class ShardClient:
    """See the module's docstring."""

    def __init__(self, client: SessionClient, fragment: int = 0, *, restorable: bool = True) -> None:
        self.client = client
        self.connection = client.connection
        self.fragment = fragment
        self._restorable = restorable
        self.latest: list[Exchange] = []  # the messages of the latest exchange, per server
        self._allocations: list[InitShard] = []
        self._shard_nbytes: list[int] = []  # but for tables
        self._tables = 0  # groups of tables, which are the last
        # Per server, how updates and weights are compressed; None where they are not.
        self._codes: list[CodecState | None] = [None for _ in self.connection.servers]

    def initialise(
        self,
        layout: Layout,
        algorithm: Algorithm,
        shared: Sequence[SharedRef | None],
        weights: Sequence[tuple[Tensor, ...]] | None = None,
        versions: Sequence[int] | None = None,
        compression: Compression | None = None,
        in_parts: bool = False,
    ) -> list[bool]:
        """Allocate the shards, and fill them if ``weights`` are given: per server, one tensor per group.

        With ``in_parts`` they are filled with what the processes of an island have brought. Returns, per server,
        whether it sees the block of memory that is ``shared`` with it.
        """
        connection = self.connection
        groups = [layout.shard(s) for s in connection.servers]
        wholes = [dense(each) for each in groups]
        self._shard_nbytes = [nbytes_of(each) for each in wholes]
        self._tables = len(layout.widths)
        messages = []
        for s in connection.servers:
            first = None if weights is None else weights[s]
            version = 0 if versions is None else versions[s]
            about = self.fragment, compression
            message = InitShard(*connection.sender, groups[s], algorithm, first, version, shared[s], *about)
            named = layout.named(s) if algorithm.knows_tensors else ()
            messages.append(replace(message, tensors=named, widths=layout.widths, restorable=self._restorable))
        self._allocations = [replace(message, weights=None, version=0) for message in messages]
        messages = [replace(message, in_parts=in_parts) for message in messages]
        # The coordinator knows whether these are to be a run's weights: no other server takes them before it has.
        first_seen = bool(connection.result(COORDINATOR, connection.post(COORDINATOR, messages[COORDINATOR])))
        futures = [connection.post(s, messages[s]) for s in connection.servers if s != COORDINATOR]
        others = [bool(connection.result(s, future)) for s, future in enumerate(futures, COORDINATOR + 1)]
        seen = [first_seen, *others]
        self._codes = streams(compression, wholes, seen, algorithm.mix or 0.0)
        return seen

    def allocate(self, server: int, shared: SharedRef | None) -> bool:
        """Allocate the shard on a lost server's replacement; whether it sees the block of memory."""
        message = replace(self._allocations[server], shared=shared)
        return bool(self.connection.result(server, self.connection.post(server, message)))

    def exchange(
        self,
        message: Exchange,
        base_versions: Sequence[int],
        updates: Sequence[tuple[Tensor, ...] | None],
        common: Sequence[str | None] | None = None,
        rows: Sequence[tuple[Rows, ...]] | None = None,
    ) -> list[Future[Any]]:
        """Send every server its message of an exchange; the futures are for :meth:`replies`.

        An update is None if it is in a shared block. ``common`` names the weights of the last sync point. ``rows`` are
        what is pushed of tables, and what the worker has of them; without, all their rows are wanted.
        """
        self.latest = [
            replace(
                message,
                base_version=base_versions[s],
                update=self._encoded(s, updates[s]) if message.push else None,
                shared=updates[s] is None,
                common=None if common is None else common[s],
                rows=tuple(Rows() for _ in range(self._tables)) if rows is None else rows[s],
                fragment=self.fragment,
            )
            for s in self.connection.servers
        ]
        return [self.connection.post(s, message) for s, message in enumerate(self.latest)]

    def replies(self, futures: list[Future[Any]]) -> list[Reply]:
        """Wait for an exchange's answers; the future of a message that is sent again takes its place in ``futures``.

        The coordinator is authoritative for whether a push is applied: where it took one that another server rejected
        since this worker was fenced there, the message is sent to that server again. The others use a shorter failure
        timeout, so that it is hardly ever the other way round.
        """
        client, connection = self.client, self.connection
        replies: list[Reply] = []
        all_restored = list(connection.restored)
        while len(replies) < len(futures):
            server = len(replies)
            future = futures[server]
            try:
                reply: Reply = connection.result(server, future)
                members = client.members[server]
                members.incarnations |= reply.incarnations
                if self.latest[server].fetch:  # else it does not say; a worker that left may have been replaced
                    members.left = dict(reply.left)
                members.pushers = set(reply.pushes) or members.pushers
                client.stopped = max(client.stopped, reply.stopped)
                replies.append(reply)
            except WorkerAwayError:
                if server == COORDINATOR:
                    raise
                client.join(again=True, server=server)
                client.must_rejoin = True
                futures[server] = self.repeat(server, self.latest[server])
            except ServerLostError as error:
                connection.recover(error)
                if futures[server] is future:
                    futures[server] = self.repeat(server, self.latest[server])
            if all_restored != connection.restored:  # the answer of a server that was lost is worth nothing
                replies, all_restored = [], list(connection.restored)
        return replies

    def repeat(self, server: int, message: Exchange) -> Future[Any]:
        """Send a server a message again that it lacks."""
        return self.connection.post(server, message)

    def answers(self, replies: Sequence[Reply], wire: Sequence[tuple[Tensor, ...]]) -> list[tuple[Any, ...]]:
        """The weights in the latest replies, per server and group, or ``wire`` itself if shared; tables come last."""
        whole: list[tuple[Any, ...]] = [
            out if reply.weights is None else self._decoded(server, reply.weights, out)
            for server, (reply, out) in enumerate(zip(replies, wire, strict=True))
        ]
        return [(*parts, *reply.rows) for parts, reply in zip(whole, replies, strict=True)]

    @property
    def pushed_nbytes(self) -> int:
        """Bytes of the latest update."""
        return self.nbytes([(message.update, message.rows) for message in self.latest])

    def nbytes(self, shards: Sequence[tuple[Any, Sequence[Rows]]]) -> int:
        """Bytes of updates or weights, per server; None where they went through shared memory. And of rows."""
        return sum(
            (whole if parts is None else nbytes(parts)) + sum(each.nbytes for each in rows)
            for (parts, rows), whole in zip(shards, self._shard_nbytes, strict=True)
        )

    def record(self, exchange: InFlight, *, round_trip_s: float, wait_s: float) -> ExchangeRecord:
        """The record of an answered exchange for users."""
        replies = exchange.replies
        return ExchangeRecord(
            step=exchange.step,
            versions=tuple(r.version for r in replies),
            staleness=tuple(r.staleness for r in replies),
            verdicts=tuple(r.verdict for r in replies),
            round_trip_s=round_trip_s,
            wait_s=wait_s,
            bytes_pushed=exchange.nbytes,
            bytes_fetched=self.nbytes([(r.weights, r.rows) for r in replies]) if exchange.message.fetch else 0,
            local_steps=exchange.message.steps,
            shared=any(message.shared for message in self.latest),
        )

    def common_names(self, weights: Callable[[], list[tuple[Tensor, ...]]]) -> list[str]:
        """Per server, the name of the weights of the last sync point; before the first one of those that are here."""
        codes = [code.common for code in self._codes if code is not None]
        if any(not common.digest for common in codes):
            for code, each in zip(self._codes, weights(), strict=True):
                if code is not None:
                    code.common.hold(each[: len(each) - self._tables])
        return ["" if code is None else code.common.digest for code in self._codes]

    def give_up(self, servers: Collection[int]) -> None:
        """Restore the residuals for servers that did not apply the latest update."""
        for server in servers:
            if (code := self._codes[server]) is not None:
                code.updates.take_back()

    def _encoded(self, server: int, update: tuple[Tensor, ...] | None) -> tuple[Coded, ...] | None:
        code = self._codes[server]
        return update if code is None or update is None else code.updates.encode(update)

    def _decoded(self, server: int, parts: Any, wire: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        code = self._codes[server]
        if code is None:
            weights: tuple[Tensor, ...] = parts
        elif self.latest[server].common is None:
            weights = code.weights.decode(parts, wire)
        else:
            weights = code.common.decode(parts, wire)
            code.weights.hold(weights)
        return weights

    def state(self, states: Sequence[Any] | None = None) -> list[Any]:
        """Per server, what it keeps beside the weights; or, given what was returned before, put it back."""
        return [
            self.connection.ask(
                s, ShardState(*self.connection.sender, self.fragment, None if states is None else states[s])
            )
            for s in self.connection.servers
        ]

    def replace(self, weights: Sequence[tuple[Tensor, ...]]) -> None:
        """Have the servers take these weights, per server one tensor per group. No worker trains meanwhile."""
        for s in self.connection.servers:
            self.connection.ask(s, ShardState(*self.connection.sender, self.fragment, weights=weights[s]))


def restore_shards(fragments: Sequence[ShardClient], states: Sequence[Sequence[Any]]) -> None:
    """Put back what the servers kept beside the weights of each fragment, unless it is of other fragments."""
    present = [each.state() for each in fragments] if len(fragments) == len(states) else []
    if present and all(_is_alike(_slots(a), _slots(b)) for a, b in zip(states, present, strict=True)):
        for each, kept in zip(fragments, states, strict=True):
            each.state(kept)
    else:
        log.warning(
            "The checkpoint was written with other fragments of the module: other state of the servers, such as "
            "momentum, starts from zero."
        )


def _slots(servers: Sequence[Any]) -> list[Any]:
    """What the algorithm keeps of each group, without its transforms."""
    return [[group.get("slots") for group in server] for server in servers]


def _is_alike(one: Any, other: Any) -> bool:
    """Whether two states have tensors of the same shapes, where both have some."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_is_alike(one[key], other[key]) for key in one.keys() & other.keys())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_alike, one, other))
    return True
