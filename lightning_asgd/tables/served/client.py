"""A worker's view of one served table: it fetches the rows that a batch needs, and pushes their gradients.

Each step of the worker's optimizer pushes once. The reply holds the rows' new values, so a worker that trains alone
never reads rows without its own updates. If a server is lost, its replacement is sent every unanswered message again;
each push is applied once.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lightning_asgd.core.foundation.errors import ASGDError, ServerLostError, WorkerAwayError
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.tables.served.messages import (
    FetchRows,
    LoadTable,
    PushRows,
    SaveTable,
    ServedRows,
    TableRequest,
    TableSpec,
)

_AT_ONCE = 8  # this part of the capacity is freed together


class RowCache:
    """Holds up to ``capacity`` rows of ``width`` scalars. Row numbers are given as int64, distinct and ascending.

    A row counts as missing ``max_age`` steps after it was fetched, since other workers may have changed it.
    """

    def __init__(self, capacity: int, width: int, max_age: int) -> None:
        self._max_age = max_age
        self._numbers = torch.empty(0, dtype=torch.int64)  # of the rows, ascending
        self._slots = torch.empty(0, dtype=torch.int64)  # where each of these rows is
        self._values = torch.empty(capacity, width, dtype=torch.float32)
        self._fetched = torch.zeros(capacity, dtype=torch.int64)  # the step at which each slot's row was
        self._used = torch.zeros(capacity, dtype=torch.int64)  # the step at which each slot's row was last used
        self._free = torch.arange(capacity)

    def __len__(self) -> int:
        return len(self._numbers)

    def missing(self, numbers: Tensor, step: int) -> Tensor:
        """Which of these rows have to be fetched."""
        found, slots = self._find(numbers)
        return self._missing(numbers, found, step - self._fetched[slots])

    def read(self, numbers: Tensor, step: int, out: Tensor) -> tuple[Tensor, int]:
        """Copy the rows that are cached to ``out``, shape ``(k, width)``.

        Returns which rows have to be fetched, and the sum over the others of the steps since each was fetched.
        """
        found, slots = self._find(numbers)
        self._used[slots] = step
        out[found] = self._values[slots]
        ages = step - self._fetched[slots]
        return self._missing(numbers, found, ages), int(ages[ages < self._max_age].sum())

    def put(self, numbers: Tensor, values: Tensor, step: int) -> None:
        """Cache fetched rows; if there are too many, they replace those that were used least recently."""
        found, slots = self._find(numbers)
        self._set(slots, values[found], step)
        new, values = numbers[~found], values[~found]
        new, values = new[-len(self._values) :], values[-len(self._values) :]
        self._make_room(len(new))
        slots, self._free = self._free[: len(new)], self._free[len(new) :]
        self._set(slots, values, step)
        self._add(new, slots)

    def refresh(self, numbers: Tensor, values: Tensor, step: int) -> None:
        """Update the values of those rows that are cached."""
        found, slots = self._find(numbers)
        self._values[slots] = values[found]
        self._fetched[slots] = step

    def clear(self) -> None:
        """Forget all rows."""
        self._free = torch.arange(len(self._values))
        self._numbers, self._slots = self._numbers[:0], self._slots[:0]

    def _missing(self, numbers: Tensor, found: Tensor, ages: Tensor) -> Tensor:
        """Which rows are not cached, or too old; ``ages`` are those of the cached ones."""
        fresh = found.clone()
        fresh[found] = ages < self._max_age
        return numbers[~fresh]

    def _find(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Which of some rows are cached, and the slots of these."""
        if not len(self._numbers):
            return torch.zeros(len(numbers), dtype=torch.bool), self._slots
        places = torch.searchsorted(self._numbers, numbers).clamp_(max=len(self._numbers) - 1)
        found = self._numbers[places] == numbers
        return found, self._slots[places[found]]

    def _add(self, numbers: Tensor, slots: Tensor) -> None:
        """Merge new rows into the ascending ones, which takes less than sorting all of them again."""
        places = torch.searchsorted(self._numbers, numbers).add_(torch.arange(len(numbers)))
        there = torch.ones(len(self._numbers) + len(numbers), dtype=torch.bool)
        there[places] = False
        before = there.nonzero().flatten()

        def merged(present: Tensor, added: Tensor) -> Tensor:
            both = torch.empty(len(there), dtype=torch.int64)
            both[places], both[before] = added, present
            return both

        self._numbers, self._slots = merged(self._numbers, numbers), merged(self._slots, slots)

    def _set(self, slots: Tensor, values: Tensor, step: int) -> None:
        self._values[slots] = values
        self._fetched[slots] = self._used[slots] = step

    def _make_room(self, count: int) -> None:
        surplus = count - len(self._free)
        if surplus <= 0:
            return
        surplus = min(max(surplus, len(self._values) // _AT_ONCE), len(self._slots))  # finding the oldest takes long
        oldest = self._used[self._slots].topk(surplus, largest=False).indices
        kept = torch.ones(len(self._slots), dtype=torch.bool)
        kept[oldest] = False
        self._free = torch.cat([self._free, self._slots[oldest]])
        self._numbers, self._slots = self._numbers[kept], self._slots[kept]


log = logging.getLogger(__name__)

_About = tuple[str, int, TableSpec, int, int]
"""The first fields of every message about a table."""


@dataclass
class TableStats:
    """What a worker has done with a table."""

    read: int = 0  # rows of batches, each once per batch
    ages: int = 0  # sum over these rows of the steps since each was fetched
    fetched: int = 0  # rows
    rejected: int = 0  # pushes that a server rejected, because they held or caused NaN or infinity


@dataclass
class _Call:
    """A message that was sent, and is sent again if its server is lost."""

    server: int
    numbers: Tensor  # of its rows in the whole table
    message: TableRequest
    future: Future[Any]
    known: int  # pushes that the server's part was known to hold when it was sent


class TableClient:
    """See the module's docstring. Row numbers are given as int64, distinct and ascending.

    ``connection`` gives the present session's, ``share`` the factor for gradients. Rows are cached for ``max_age``
    steps.
    """

    def __init__(
        self,
        table: TableSpec,
        connection: Callable[[], Connection],
        cache_rows: int,
        max_age: int,
        share: Callable[[], float],
    ) -> None:
        self.table = table
        self.stats = TableStats()
        self._connection = connection
        self._share = share
        self._cache = RowCache(min(cache_rows, table.rows), table.width, max_age)
        self._client = secrets.randbelow((1 << 62) - 1) + 1
        self._seq = self._step = 0
        self._fetches: list[_Call] = []
        self._pushes: list[_Call] = []
        self._updates: dict[int, int] = {}  # the most pushes that each server's part was known to hold

    # ------------------------------------------------------------------ rows

    def prefetch(self, numbers: Tensor) -> None:
        """Begin to fetch rows for a later :meth:`read`."""
        for call in self._fetches:
            numbers = numbers[~torch.isin(numbers, call.numbers)]
        self._fetch(self._cache.missing(numbers, self._step))

    def read(self, numbers: Tensor) -> Tensor:
        """Rows as they are for this worker's next step, shape ``(k, width)``."""
        values = torch.empty(len(numbers), self.table.width, dtype=torch.float32)
        missing, ages = self._cache.read(numbers, self._step, values)
        for call in self._fetches:
            missing = missing[~torch.isin(missing, call.numbers)]
        self._fetch(missing)
        for rows, got in self.settle():  # the answer to the latest push, too: it is newer than what was cached
            _copy(rows, got, numbers, values)
        self.stats.read += len(numbers)
        self.stats.ages += ages
        return values

    def step(self, numbers: Tensor, gradients: Tensor, lr: float) -> None:
        """Push the gradients of rows, shape ``(k, width)``, after an optimizer has taken a step."""
        self._step += 1
        if not len(numbers):
            return
        self.settle()
        self._seq += 1
        seq, gradients = self._seq, gradients * self._share()
        self._pushes = self._send(
            numbers, lambda about, rows, mine: PushRows(*about, rows, gradients[mine], lr, self._client, seq)
        )

    def settle(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Wait until all messages are answered; returns the rows in the answers, and their values, in order."""
        fetches, self._fetches = self._fetches, []
        answers = []
        for call in fetches:
            got = self._rows(call)
            self._cache.put(call.numbers, got.values, self._step)
            self.stats.fetched += len(call.numbers)
            answers.append((call.numbers, got.values))
        pushes, self._pushes = self._pushes, []
        for call in pushes:  # after fetches, which may have been answered before the servers had these pushes
            try:
                answer = self._rows(call)
            except WorkerAwayError:  # others train this batch; this worker rejoins at its next exchange
                self._cache.clear()
                continue
            self._cache.refresh(call.numbers, answer.values, self._step)
            answers.append((call.numbers, answer.values))
            if answer.rejected:
                self._report_rejected(call.server)
        return answers

    def forget(self) -> None:
        """Wait until all messages are answered, and empty the cache: other workers have changed rows."""
        self.settle()
        self._cache.clear()

    # ------------------------------------------------------------------ files

    def save(self, folder: str) -> None:
        """Have all servers copy their parts to a folder. Raises an :class:`ASGDError` if one has lost its part."""
        self.settle()
        self._ask_all(lambda about: SaveTable(*about, folder))
        first = torch.zeros(1, dtype=torch.int64)
        for server in self._connection().servers:
            if server < self.table.rows:  # else it has none
                self._rows(self._posted(server, first + server, FetchRows(*self._about(server), first)))

    def load(self, folder: str) -> None:
        """Have all servers replace their parts with the copies in a folder."""
        self.note_replaced()
        self._ask_all(lambda about: LoadTable(*about, folder))

    def note_replaced(self) -> None:
        """A worker has the servers replace their parts."""
        self.forget()
        self._updates.clear()

    # ------------------------------------------------------------------ helpers

    def _fetch(self, numbers: Tensor) -> None:
        self._fetches += self._send(numbers, lambda about, rows, _: FetchRows(*about, rows))

    def _report_rejected(self, server: int) -> None:
        self.stats.rejected += 1
        log.warning(
            "Server %d rejected a push to the served table in %s (%d so far): its gradients, or the rows after the "
            "step, held NaN or infinity. Lower the learning rate if this repeats.",
            server,
            self.table.folder,
            self.stats.rejected,
        )

    def _about(self, server: int) -> _About:
        connection = self._connection()
        return (*connection.sender, self.table, server, len(connection.servers))

    def _send(self, numbers: Tensor, message: Callable[[_About, Tensor, Tensor], TableRequest]) -> list[_Call]:
        """Send each server a message about its own rows of these; servers without any get none."""
        calls, servers = [], self._connection().servers
        for server in servers if len(numbers) else ():
            mine = numbers % len(servers) == server
            rows = numbers[mine]
            if len(rows):
                calls.append(self._posted(server, rows, message(self._about(server), rows // len(servers), mine)))
        return calls

    def _ask_all(self, message: Callable[[_About], TableRequest]) -> None:
        none = torch.empty(0, dtype=torch.int64)
        calls = [self._posted(s, none, message(self._about(s))) for s in self._connection().servers]
        for call in calls:
            self._result(call)

    def _posted(self, server: int, rows: Tensor, message: TableRequest) -> _Call:
        while True:  # any of them may wait until another worker's table is saved
            connection = self._connection()
            try:
                future = connection.post(server, message, connection.patience_s)
                return _Call(server, rows, message, future, self._updates.get(server, 0))
            except ServerLostError as error:
                connection.recover(error)

    def _rows(self, call: _Call) -> ServedRows:
        rows: ServedRows = self._result(call)
        if rows.updates < call.known:
            raise ASGDError(
                f"Server {call.server}'s part of the served table in {self.table.folder} holds {rows.updates} pushes. "
                f"Expected at least {call.known}. Its files were removed, or the server was replaced on a machine "
                "without them. Resume from a checkpoint."
            )
        self._updates[call.server] = max(rows.updates, self._updates.get(call.server, 0))
        return rows

    def _result(self, call: _Call) -> Any:
        while True:
            connection = self._connection()
            try:
                return connection.result(call.server, call.future, connection.patience_s)
            except ServerLostError as error:
                connection.recover(error)
                call.future = self._posted(call.server, call.numbers, call.message).future


def _copy(rows: Tensor, values: Tensor, wanted: Tensor, out: Tensor) -> None:
    """Copy the values of those rows that are wanted."""
    if len(rows):
        places = torch.searchsorted(rows, wanted).clamp_(max=len(rows) - 1)
        here = rows[places] == wanted
        out[here] = values[places[here]]
