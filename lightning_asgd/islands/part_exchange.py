"""One process's part of its island's exchanges: what it sends to the servers, and what it does with the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lightning_asgd.core.protocol import Leave
from lightning_asgd.core.worker.connection import Connection, done_within
from lightning_asgd.core.worker.replica import Replica
from lightning_asgd.core.worker.replica_spans import Place
from lightning_asgd.islands.blocks import Block, PartLayout, holders_of
from lightning_asgd.islands.group import IslandGroup
from lightning_asgd.islands.messages import ExchangePart, InitPart, Part

_LEAVE_S = 5.0


class Copies:
    """The scalars that several processes of an island hold, each of which one of them exchanges."""

    def __init__(
        self, group: IslandGroup, layout: PartLayout, places: Sequence[Place], blocks: Mapping[str, Sequence[Block]]
    ) -> None:
        self._group, self._places = group, places
        self._sets: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[int, list[slice]]]] = {}
        for index, spec in enumerate(layout.whole.tensors):
            held = blocks[spec.name]
            for rank in range(group.size):
                same = tuple(holders_of(held, rank))
                if len(same) == 1 or same[0] != rank:
                    continue
                group.subgroup(same)  # all processes make it
                if group.rank not in same:
                    continue
                n, count = held[rank].numel, len(same)
                cuts = [slice(n * i // count, n * (i + 1) // count) for i in range(count)]
                dtype = places[index][0][places[index][1]].data.dtype
                self._sets.setdefault((same, dtype), []).append((index, cuts))

    def spread(self) -> None:
        """Give every scalar's value on the process that exchanges it to the others that hold it."""
        with torch.no_grad():
            for (same, _), tensors in self._sets.items():
                flat = [(place[key].data, cuts) for index, cuts in tensors for place, key in [self._places[index]]]
                for number, source in enumerate(same):
                    self._send(same, source, [(tensor, cuts[number]) for tensor, cuts in flat])

    def _send(self, same: tuple[int, ...], source: int, parts: list[tuple[Tensor, slice]]) -> None:
        parts = [(tensor, cut) for tensor, cut in parts if cut.start < cut.stop]
        if not parts:
            return
        mine = source == self._group.rank
        if mine:
            values = torch.cat([tensor.reshape(-1)[cut].cpu() for tensor, cut in parts])
        else:
            count = sum(cut.stop - cut.start for _, cut in parts)
            values = torch.empty(count, dtype=parts[0][0].dtype)
        self._group.broadcast(values, source, same)
        if mine:
            return
        for (tensor, cut), value in zip(parts, torch.split(values, [c.stop - c.start for _, c in parts]), strict=True):
            flat = tensor.reshape(-1)
            flat[cut] = value.to(tensor.device)
            if flat.data_ptr() != tensor.data_ptr():  # a strided one was copied
                tensor.copy_(flat.view(tensor.shape))


@dataclass(frozen=True)
class PartSender:
    """How a process of an island sends its parts: with the number and the name of the first process."""

    connection: Connection
    process: str

    def leave(self, reason: str, details: str) -> None:
        """Report to every server that the island ends."""
        for server in self.connection.servers:
            with suppress(RuntimeError):  # the server is gone too
                message = Leave(*self.connection.sender, reason, details=details, process=self.process)
                done_within(self.connection.post(server, message), _LEAVE_S)


class PartExchange:
    """A process's part of one fragment.

    ``copies``: of scalars that others exchange, or hold too. ``prepare`` comes before the module is read or changed.
    """

    def __init__(
        self,
        group: IslandGroup,
        sender: PartSender,
        fragment: int,
        layout: PartLayout,
        replica: Replica,
        copies: Copies,
        prepare: Callable[[], None],
    ) -> None:
        self.replica, self.fragment = replica, fragment
        self._group, self._connection, self._process = group, sender.connection, sender.process
        self._layout, self._copies, self._prepare = layout, copies, prepare
        self._sums_gradients = type(replica).accrue is not Replica.accrue
        # Per server, of the latest exchange and of the latest push, by the exchange's number.
        self._messages: dict[int, list[ExchangePart]] = {}
        self._futures: list[Future[Any]] = []  # of the latest exchange, until all processes have their answers
        self._answers: list[tuple[Tensor, ...]] = []  # until they are merged
        self._everywhere = False  # whether all processes have their answers, as they found last
        exchanges = self.pack, self.send, self.compare, self.receive, self.merge, self.adopt, self.resume, self.forget
        for obey in (self.init, self.restore, self.resend, *exchanges):
            group.on(f"{obey.__name__} fragment {fragment}", obey)

    def order(self, what: str, *arguments: Any) -> None:
        """Have every process do something with its part."""
        self._group.order(f"{what} fragment {self.fragment}", *arguments)

    def pack_together(self) -> None:
        """Have every process pack its part: the others before they obey what they are ordered next."""
        self._group.order_later(f"pack fragment {self.fragment}")
        self.pack()

    def init(self, fill: bool) -> None:
        """Say what this process exchanges; with ``fill``, bring the shards' first values."""
        self._prepare()
        weights = self.replica.weights() if fill else None

        def describe() -> None:
            for server in self._connection.servers:
                self._describe(server, None if weights is None else weights[server])

        self._together(describe)

    def _describe(self, server: int, weights: tuple[Tensor, ...] | None) -> None:
        connection, group = self._connection, self._group
        part = Part(group.rank, group.size, self._layout.ranges(server))
        message = InitPart(*connection.sender, part, weights, self.fragment, process=self._process)
        self._result(server, connection.post(server, message))

    def restore(self, server: int, address: str, replaced: int) -> None:
        """Bring the replacement of a lost server this process's part of the weights that were fetched last."""

        def bring() -> None:
            self._connection.follow(server, address, replaced)
            self._describe(server, self.replica.fetched(server))

        self._together(bring)

    def _together(self, act: Callable[[], None]) -> bool:
        """Do what may fail, and return whether all processes have; where any fails, the first one raises that error."""
        mine: Exception | None = None
        try:
            act()
        except Exception as error:  # of any kind: the other processes wait in `agree`
            mine = error
        met = self._group.agree(mine)
        if met is not None and self._group.leads:
            raise mine or met
        return met is None

    def pack(self) -> None:
        """Write this process's part of the update to the send buffers."""
        self._prepare()
        self.replica.pack()

    def accrue(self, skipped: bool | Tensor = False) -> None:
        """Note that a step was taken, or skipped; where gradients are pushed, add them up."""
        if self._sums_gradients:
            self._prepare()
        self.replica.accrue(skipped)

    def send(self, exchange: int, push: bool) -> None:
        """Send it, or ask for weights alone."""
        self.replica.await_arrival()
        connection, messages = self._connection, []
        updates: Sequence[Any] = self.replica.updates() if push else [None for _ in connection.servers]
        for update in updates:
            part = ExchangePart(*connection.sender, self._group.rank, exchange, update, self.fragment)
            messages.append(replace(part, process=self._process))
        pushes = {} if push else {n: parts for n, parts in self._messages.items() if parts[0].update is not None}
        self._messages = {**pushes, exchange: messages}
        self._futures = [connection.post(server, message) for server, message in enumerate(messages)]

    def resend(self, server: int, exchange: int) -> None:
        """Send a server this process's part of an exchange again, which it does not have."""
        future = self._connection.post(server, self._messages[exchange][server])
        if self._futures and exchange == max(self._messages):
            self._futures[server] = future

    @property
    def arrived(self) -> bool:
        """Whether this process has all answers."""
        return all(future.done() for future in self._futures)

    def compare(self) -> None:
        """Find out whether all processes have."""
        self._everywhere = self._group.all(self.arrived)

    def arrived_everywhere(self) -> bool:
        """Have all processes compare."""
        self.order("compare")
        return self._everywhere

    def receive(self) -> None:
        """Wait for this process's part of the answers."""

        def wait() -> None:
            self._answers = [self._result(server, future) for server, future in enumerate(self._futures)]

        if self._together(wait):
            self._futures = []

    def _result(self, server: int, future: Future[Any]) -> Any:
        """A server's answer. No server is restored meanwhile: the other processes would not obey."""
        return self._connection.result(server, future, attends=False)

    def _taken(self) -> list[tuple[Tensor, ...]]:
        answers, self._answers = self._answers, []
        return answers

    def merge(self, pushed: bool, fresh: bool, alone: bool) -> None:
        """See :meth:`Replica.merge`, here and below: with this process's part of the answer."""
        answers = self._taken()
        self._prepare()
        self.replica.merge(answers, pushed=pushed, fresh=fresh, alone=alone)
        self._copies.spread()

    def adopt(self, park: bool, alone: bool) -> None:
        """Take the servers' weights."""
        answers = self._taken()
        self._prepare()
        self.replica.adopt(answers, park=park, alone=alone)
        self._copies.spread()

    def resume(self) -> None:
        """Bring back what was parked."""
        self._prepare()
        self.replica.resume()
        self._copies.spread()

    def forget(self) -> None:
        """The latest exchange was given up: others have its data."""
        for future in self._futures:
            done_within(future, self._connection.timeout_s)  # its message may still lie in the buffers
        self._futures = []
