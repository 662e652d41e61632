"""The exchanges of islands, whose processes each send and receive a part of the shard. Knows no network, no clock.

The island's first process sends the :class:`~lightning_asgd.protocol.Exchange` itself, without an update. The exchange
takes place once that and every part have arrived, so an update is applied as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lightning_asgd.core.foundation.errors import ASGDError, ProtocolError, WorkerAwayError
from lightning_asgd.core.foundation.layout import Groups, dtype_from_name
from lightning_asgd.core.foundation.ranges import merged
from lightning_asgd.core.protocol import Exchange, InitShard, Reply
from lightning_asgd.core.server.feature import Server, ServerFeature
from lightning_asgd.core.server.pending_replies import PendingReplies
from lightning_asgd.core.server.registry import Phase
from lightning_asgd.islands.messages import ExchangePart, InitPart, Part
from lightning_asgd.recovery.messages import StateReport
from lightning_asgd.recovery.server import recovery_of


@dataclass(frozen=True)
class _CompleteExchange:
    """An exchange of which everything has arrived; ``buffer`` holds the update, and then the answer."""

    message: Exchange
    parts: Sequence[ExchangePart]
    buffer: tuple[Tensor, ...]


@dataclass
class _Island:
    """One island's exchanges of one fragment."""

    worker: int
    process: str  # its first
    groups: Groups = ()  # of the shard
    parts: dict[int, Part] = field(default_factory=dict)  # by number
    brought: dict[int, Sequence[Tensor]] = field(default_factory=dict)  # values for a shard that has none
    buffer: tuple[Tensor, ...] = ()  # for updates and answers; none before the first exchange
    message: Exchange | None = None  # that has arrived and is not complete
    arrived: dict[int, ExchangePart] = field(default_factory=dict)  # parts of it, by number

    def prepare(self) -> None:
        """Allocate the buffer. Raises unless the parts are all of the shard, each scalar once."""
        if not self.groups or any(len(part.ranges) != len(self.groups) for part in self.parts.values()):
            raise ProtocolError(
                f"The processes of island {self.worker} described parts of "
                f"{[len(part.ranges) for part in self.parts.values()]} groups. Expected the {len(self.groups)} groups "
                "of a shard that was set up."
            )
        for index, (_, _, n) in enumerate(self.groups):
            ranges = sorted(r for part in self.parts.values() for r in part.ranges[index])
            held = sum(last - first for first, last in ranges)
            if held != n or merged(ranges) != ([(0, n)] if n else []):
                raise ProtocolError(
                    f"{len(self.parts)} processes of island {self.worker} exchange {held} scalars of group {index}, "
                    f"which has {n}. Expected all of them, each once."
                )
        self.buffer = tuple(torch.empty(n, dtype=dtype_from_name(dtype)) for _, dtype, n in self.groups)

    def join(self, values: Mapping[int, Sequence[Tensor]]) -> None:
        """Write the values of all parts into the buffer."""
        for number, part in self.parts.items():
            lengths = [[last - first for first, last in each] for each in part.ranges]
            expected = [(whole.dtype, sum(each)) for whole, each in zip(self.buffer, lengths, strict=True)]
            got = [(value.dtype, value.numel()) for value in values.get(number, ())]
            if got != expected or any(value.ndim != 1 for value in values[number]):
                raise ProtocolError(
                    f"Process {number} of island {self.worker} sent tensors of (dtype, scalars) {got}. "
                    f"Expected {expected}."
                )
            for whole, value, ranges, sizes in zip(self.buffer, values[number], part.ranges, lengths, strict=True):
                for (first, last), piece in zip(ranges, torch.split(value, sizes), strict=True):
                    whole[first:last] = piece

    def add(self, message: Exchange | ExchangePart) -> _CompleteExchange | None:
        """Take an exchange, or a part of one; returns it once everything has arrived."""
        if isinstance(message, Exchange):
            self.message = message
        else:
            self.arrived[message.part] = message
            if message.part not in self.parts:
                raise ProtocolError(
                    f"A process of island {self.worker} sent part {message.part}, which it has not described. Expected "
                    f"one of {sorted(self.parts)}."
                )
        whole, parts = self.message, dict(self.arrived)
        if whole is None or len(parts) < len(self.parts) or len(parts) < next(iter(self.parts.values())).parts:
            return None
        if any(part.exchange != whole.island for part in parts.values()):
            return None  # of an exchange that was given up: the process sends its part of this one later
        if not self.buffer:
            self.prepare()
            self.brought.clear()  # the shard has taken others
        if whole.push:
            self.join({number: part.update or () for number, part in parts.items()})
        return _CompleteExchange(whole, list(parts.values()), self.buffer)


class Islands(ServerFeature):
    """The islands of one session, by worker and fragment."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._islands: dict[tuple[int, int], _Island] = {}
        self._pending = PendingReplies()

    def handle(self, message: Any) -> Any:
        """See :class:`ServerFeature`."""
        server = self._server
        if isinstance(message, InitShard):
            self._find(message.worker, message.fragment).groups = message.groups
            return server.handlers[InitShard](replace(message, weights=self._weights(message.worker, message.fragment)))
        if isinstance(message, StateReport):
            recovery = recovery_of(server)
            return recovery.handle(self._filled(message) if recovery.phase is Phase.COLLECTING else message)
        session = server.heard(message.session, message.worker)
        if isinstance(message, InitPart):
            return self._open(message)
        if server.state.recovery.phase.lost:
            return server.state.recovery.defer(message)
        shard = session.shards.get(message.fragment)
        if shard is not None:
            self._find(message.worker, message.fragment).groups = shard.groups
        future = self._take(message)
        return future.value() if future.done() else future

    def _open(self, message: InitPart) -> None:
        """Note which part a process exchanges, and take the values that it brings."""
        key, part = (message.worker, message.fragment), message.part
        lengths = [sum(last - first for first, last in ranges) for ranges in part.ranges]
        brought = lengths if message.weights is None else [each.numel() for each in message.weights]
        if brought != lengths:
            raise ProtocolError(
                f"Process {part.number} of island {message.worker} brought {brought} scalars per group. Expected "
                f"{lengths}, as its ranges have."
            )
        island = self._islands.get(key)
        if island is None or island.process != message.process:
            island = self._islands[key] = _Island(message.worker, message.process)
        island.parts[part.number], island.buffer = part, ()
        if message.weights is not None:
            island.brought[part.number] = message.weights

    def _weights(self, worker: int, fragment: int) -> tuple[Tensor, ...]:
        """The shard's values, which all processes of an island have brought. They are not kept any longer."""
        island = self._find(worker, fragment)
        island.prepare()
        island.join(island.brought)
        island.brought.clear()
        weights, island.buffer = island.buffer, ()
        return weights

    def _filled(self, report: StateReport) -> StateReport:
        """A worker's report of a lost server, with the weights that the processes of an island have brought."""
        session, shards = self._server.current(report.session), []
        for held in report.shards:
            if held.weights is None:
                self._find(report.worker, held.fragment).groups = session.shards[held.fragment].groups
                held = replace(held, weights=self._weights(report.worker, held.fragment))
            shards.append(held)
        return replace(report, shards=tuple(shards))

    def _take(self, message: Exchange | ExchangePart) -> Future[Any]:
        """Take an exchange or a part. The exchange takes place once all is there."""
        island = self._find(message.worker, message.fragment)
        before = island.message if isinstance(message, Exchange) else island.arrived.get(message.part)
        if before is not None:
            self._pending.complete(
                before, WorkerAwayError(f"Island {message.worker} has sent this again, or given it up.")
            )
        future = self._pending.add(message)
        try:
            whole = island.add(message)
            if whole is None:
                return future
            answer = self._server.exchange(whole.message, whole.buffer)
        except ASGDError as error:
            self._fail(island, error)
            return future
        except Exception as error:
            self._fail(island, ASGDError(f"A server failed on the parts of island {message.worker}: {error!r}."))
            raise
        island.message, island.arrived = None, {}
        if isinstance(answer, Future):
            answer.add_done_callback(lambda done: self._answer(whole, done.value()))
        else:
            self._answer(whole, answer)
        return future

    def _answer(self, whole: _CompleteExchange, reply: Any) -> None:
        """Reply to the exchange, and to each part with the weights in its ranges."""
        weights = getattr(reply, "weights", None)
        for part in whole.parts:
            failed = not isinstance(reply, Reply)
            self._pending.complete(part, reply if failed else () if weights is None else self._cut(part, weights))
        self._pending.complete(whole.message, replace(reply, weights=None) if isinstance(reply, Reply) else reply)

    def _cut(self, part: ExchangePart, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ranges = self._find(part.worker, part.fragment).parts[part.part].ranges
        return tuple(
            torch.cat([whole[first:last] for first, last in each]) if each else whole[:0].clone()
            for whole, each in zip(weights, ranges, strict=True)
        )

    def _fail(self, island: _Island, error: ASGDError) -> None:
        """Fail all that waits for more of an exchange."""
        for message in [island.message, *island.arrived.values()]:
            self._pending.complete(message, error)
        island.message, island.arrived = None, {}

    def forget(self, worker: int) -> None:
        """See :class:`ServerFeature`."""
        for key in [key for key in self._islands if key[0] == worker]:
            self._fail(self._islands.pop(key), WorkerAwayError(f"Island {worker} was replaced, or has left."))

    def close(self) -> None:
        """See :class:`ServerFeature`."""
        for worker, _ in list(self._islands):
            self.forget(worker)

    def _find(self, worker: int, fragment: int) -> _Island:
        island = self._islands.get((worker, fragment))
        if island is None:
            raise ProtocolError(
                f"Worker {worker} exchanges as an island, whose processes have not said which parts they exchange. "
                "Expected an InitPart of each of them first."
            )
        return island
