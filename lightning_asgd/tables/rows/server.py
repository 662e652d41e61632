"""A group of tables, whose pushes hold only the rows that a worker has changed. No network, no clock, no threads.

The server records when each row last changed, in a count of the messages that changed rows. A worker names the time of
its rows (``Rows.at``) and is sent those that changed since. A time of another server, or from before the weights were
replaced, is unknown here: that worker is sent all rows.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.core.algorithms.base import Algorithm, Push, Transform
from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.foundation.numerics import is_small_enough
from lightning_asgd.core.protocol import Exchange, Rows
from lightning_asgd.core.server.group_rules import CHUNK, Before, GroupRules

_DIGITS = 19  # of a time, which any worker may have sent


class Tables:
    """The groups of tables of a shard; ``first`` is the number of the first of them, ``widths`` their rows' scalars."""

    def __init__(self, algorithm: Algorithm, first: int, weights: Sequence[Tensor], widths: Sequence[int]) -> None:
        if len(weights) != len(widths):
            raise ProtocolError(f"A shard with {len(weights)} groups of tables was laid out with widths {widths}.")
        self._first = first
        self.rules = [RowRules(algorithm, *each) for each in zip(weights, widths, strict=True)]

    def check(self, message: Exchange) -> None:
        """Raise a ``ProtocolError`` unless a push holds an update of every group, and a fetch all or none."""
        if len(message.rows) != len(self.rules) and (message.push or message.rows):
            raise ProtocolError(
                f"Worker {message.worker} pushed rows of {len(message.rows)} groups of tables. Expected "
                f"{len(self.rules)}. All workers of a run must use the same module and version of this package."
            )
        for table, rows in zip(self.rules, message.rows, strict=False):
            table.check(rows, message.worker)

    def are_small(self, message: Exchange) -> bool:
        """Whether an update is finite and within bounds."""
        pairs = zip(self.rules, message.rows, strict=True)
        return all(rows.values is None or is_small_enough(rows.values, table.weights) for table, rows in pairs)

    def note(self, message: Exchange) -> None:
        """Have a push's rows sent to its worker, also if it was not applied: the worker expects that it was."""
        for table, rows in zip(self.rules, message.rows, strict=True):
            table.note(rows)

    def push(self, message: Exchange, push: Push, scale: float, before: Callable[[int], Before]) -> None:
        """Apply the rows of a push, or add them to the aggregate."""
        for index, (table, rows) in enumerate(zip(self.rules, message.rows, strict=True), self._first):
            table.push_rows(rows, push, scale, before(index))

    def lacking(self, message: Exchange) -> tuple[Rows, ...]:
        """The rows that a message's worker lacks."""
        held = [rows.at for rows in message.rows] or ["" for _ in self.rules]
        return tuple(table.lacking(at) for table, at in zip(self.rules, held, strict=True))


class RowRules(GroupRules):
    """One group of tables; ``width`` is the number of scalars of a row."""

    def __init__(self, algorithm: Algorithm, weights: Tensor, width: int) -> None:
        if width < 1 or weights.numel() % width:
            raise ProtocolError(f"A group of {weights.numel()} scalars was laid out as rows of {width} each.")
        self._table = weights.view(-1, width)
        super().__init__(algorithm, weights)
        self._exact_table = self.exact.view(-1, width)
        self._name = secrets.token_hex(8)
        self._now = 1
        self._changed = torch.ones(len(self._table), dtype=torch.int64)  # when each row did

    @property
    def at(self) -> str:
        """The name of the present weights."""
        return f"{self._name}/{self._now}"

    def check(self, rows: Rows, worker: int) -> None:
        """Raise a ``ProtocolError`` for what cannot be rows of this table."""
        values, numbers = rows.values, rows.numbers
        if values is None:
            return
        count = len(self._table) if numbers is None else numbers.numel()
        fits = values.dtype == self.weights.dtype and values.dim() == 1
        fits = fits and values.numel() == count * self._table.shape[1] and values.layout == torch.strided
        if fits and numbers is not None and count:
            fits = numbers.dtype == torch.int32 and numbers.dim() == 1 and int(numbers[0]) >= 0
            fits = fits and int(numbers[-1]) < len(self._table) and bool((numbers[1:] > numbers[:-1]).all())
        if not fits:
            raise ProtocolError(
                f"Worker {worker} pushed {tuple(values.shape)} scalars of {values.dtype} for {count} rows. Expected "
                f"{self._table.shape[1]} of {self.weights.dtype} for each, and ascending numbers of rows below "
                f"{len(self._table)}. Look for a broken worker, or one of another version."
            )

    def note(self, rows: Rows) -> None:
        """See :class:`Tables`."""
        if rows.values is not None:
            self._mark(self._numbers(rows))

    def push_rows(self, rows: Rows, push: Push, scale: float, before: Before) -> None:
        """See :meth:`GroupRules.push`."""
        if rows.values is None or not rows.values.numel():
            return
        numbers = self._numbers(rows)
        dtype = self.exact.dtype
        update = rows.values.to(dtype, copy=True).view(len(numbers), -1)  # the message may be sent again
        for transform in self._algorithm.transforms:
            transform.change(update.view(-1), self._table[numbers].to(dtype).view(-1), {}, push)
        if scale != 1.0:
            update.mul_(scale)
        self._before(numbers, before)
        if self.pending is not None:
            self.pending.view(self._table.shape).index_add_(0, numbers, update)
        else:
            self._apply_rows(numbers, update, push)

    def apply_gathered(self, weight: float, push: Push, before: Before) -> None:
        """See :class:`GroupRules`."""
        if self.pending is None:
            return
        pending = self.pending.view(self._table.shape)
        numbers = (pending != 0).any(1).nonzero().view(-1)
        self._before(numbers, before)
        self._apply_rows(numbers, pending[numbers].div_(weight), push)
        pending[numbers] = 0
        self._mark(numbers)

    def replaced(self) -> None:
        """See :class:`GroupRules`; workers need all rows."""
        super().replaced()
        self._name = secrets.token_hex(8)

    def lacking(self, at: str) -> Rows:
        """The rows that a worker lacks that has the weights of this name."""
        name, _, time = at.partition("/")
        if name != self._name or not (time.isdecimal() and len(time) < _DIGITS):
            return Rows(self.weights.clone(), None, self.at)
        numbers = (self._changed > int(time)).nonzero().view(-1)
        width, itemsize = self._table.shape[1], self.weights.itemsize
        if len(numbers) * (width * itemsize + 4) >= self.weights.nbytes:  # a number takes 4 bytes
            return Rows(self.weights.clone(), None, self.at)
        return Rows(self._table[numbers].view(-1), numbers.to(torch.int32), self.at)

    def _apply_rows(self, numbers: Tensor, update: Tensor, push: Push) -> None:
        """Have the algorithm change some rows."""
        exact = self._exact_table
        whole = exact[numbers] + update if self._rounds and self._is_alone(push) else None
        self._algorithm.apply_rows(exact, numbers, update, self._slots, push)
        if self._rounds:
            self._table[numbers] = exact[numbers].to(self._table.dtype)
        if whole is not None:
            exact[numbers] = torch.where(exact[numbers] == whole, self._table[numbers], exact[numbers])

    def _numbers(self, rows: Rows) -> Tensor:
        return torch.arange(len(self._table)) if rows.numbers is None else rows.numbers.to(torch.int64)

    def _mark(self, numbers: Tensor) -> None:
        self._now += 1
        self._changed[numbers] = self._now

    def _before(self, numbers: Tensor, before: Before) -> None:
        """Announce which rows will change."""
        width, step = self._table.shape[1], max(1, CHUNK // self._table.shape[1])
        for first in torch.unique(numbers // step * step).tolist():
            before(slice(first * width, min((first + step) * width, self.weights.numel())))

    def _start(self, rule: Algorithm | Transform) -> Any:
        return rule.start(self.exact.view(self._table.shape)) if isinstance(rule, Algorithm) else {}
