"""A worker's copies of tables, of which only rows are exchanged.

The worker holds the table *x* and ``base``, the values agreed with the servers. A push holds the rows in which the two
differ. An answer holds the rows that the servers changed since this worker's latest answer. A hook notes which rows
have sparse gradients, and these are compared with their base. Rows may also move without a gradient, by the momentum of
an optimizer or ``max_norm``: each push compares a part of the table, and the last one before a sync point all of it.
From the first such row on, every push compares the whole table.

The servers' answer includes every row of the push. If a pushed row is missing from it, the push did not arrive, and the
worker restores the row's earlier base.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.core.foundation.layout import Layout, Piece, Role
from lightning_asgd.core.protocol import Rows
from lightning_asgd.core.worker.replica_spans import Place

log = logging.getLogger(__name__)

_WINDOWS = 64  # pushes after which all of a table has been compared
_LEAST = 1024  # rows that a push compares
_AT_ONCE = 1 << 18  # scalars that are compared at a time


class WatchedTable:
    """A module's table, and which of its rows may differ from their base."""

    def __init__(self, name: str, place: Place) -> None:
        self.name = name
        self._place = place
        self._watched: Tensor | None = None
        self._hook: Any = None
        self.moves = False  # whether rows move without gradients
        self.touched = torch.ones(len(self.x), dtype=torch.bool, device=self.x.device)
        self.watch()

    @property
    def x(self) -> Tensor:
        """The module's values, shape ``(n, width)``."""
        container, key = self._place
        values: Tensor = container[key].data
        return values

    def watch(self) -> bool:
        """Note the rows of gradients from now on; whether they were noted since the last call."""
        container, key = self._place
        parameter = container[key]
        if self._watched is not None and parameter is self._watched and parameter.requires_grad:
            return True
        self.close()
        self.touched.fill_(True)  # another object may have trained meanwhile
        if parameter.is_leaf and parameter.requires_grad:
            self._watched, self._hook = parameter, parameter.register_post_accumulate_grad_hook(self._note)
        return False

    def close(self) -> None:
        """Note no gradients any more."""
        if self._hook is not None:
            self._hook.remove()
        self._watched = self._hook = None

    def gradient(self) -> Tensor | None:
        """The gradient, sparse."""
        container, key = self._place
        gradient: Tensor | None = container[key].grad
        if gradient is None or gradient.is_sparse:
            return gradient
        return gradient.detach().to_sparse(1)

    def note_again(self) -> None:
        """Note the rows of the present gradient, with which a step may not have been taken yet."""
        if self._watched is not None and self._watched.grad is not None:
            self._note(self._watched)

    def _note(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse and gradient.sparse_dim() == 1:
            self.touched[gradient._indices()[0]] = True  # not coalesced: that would sum up the values
        else:
            self.touched.fill_(True)


@dataclass
class RowSpan:
    """A part of a table that is stored on one server."""

    piece: Piece
    table: WatchedTable
    first: int  # its first row within the group on its server
    base: Tensor  # shape `(n, width)`
    packed: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # rows since the latest answer, with their bases
    window: int = 0  # the first row that the next push compares

    @property
    def x(self) -> Tensor:
        """The module's values."""
        return self.table.x[self._rows]

    @property
    def touched(self) -> Tensor:
        """Which rows may differ from their base."""
        return self.table.touched[self._rows]

    @property
    def _rows(self) -> slice:
        width = self.base.shape[1]
        return slice(self.piece.start // width, (self.piece.start + self.piece.length) // width)

    def values_of(self, rows: Tensor) -> Tensor:
        """The module's values of some rows, where the base is."""
        return self.x[rows.to(self.table.x.device)].to(self.base.device)

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Set the module's values of some rows."""
        x = self.x
        x[rows.to(x.device)] = values.to(x.device)

    def touch(self, rows: Tensor) -> None:
        """Have the next push compare some rows."""
        touched = self.touched
        touched[rows.to(touched.device)] = True

    def changed(self, *, thorough: bool) -> Tensor:
        """The rows in which the module differs from the base."""
        watched, count = self.table.watch(), len(self.base)
        if watched and not thorough and not self.table.moves:
            size = max(_LEAST, count // _WINDOWS)
            found = self._differing(self.window, min(self.window + size, count))
            self.window = 0 if self.window + size >= count else self.window + size
            touched = self.touched.to(self.base.device)
            if bool(touched[found].all()):
                rows, step = touched.nonzero().view(-1), self._at_once
                parts = [rows[start : start + step] for start in range(0, max(len(rows), 1), step)]
                return torch.cat([part[(self.values_of(part) != self.base[part]).any(1)] for part in parts])
            self.table.moves = True
            log.info("Rows of %s change without a gradient: the whole table is compared from now on.", self.table.name)
        return self._differing(0, count)

    def remember(self, rows: Tensor, before: Tensor) -> None:
        """Keep the base of rows that are pushed, unless they were pushed before since the latest answer."""
        if self.packed:
            known = torch.zeros(len(self.base), dtype=torch.bool, device=rows.device)
            for earlier, _ in self.packed:
                known[earlier] = True
            rows, before = rows[~known[rows]], before[~known[rows]]
        self.packed.append((rows, before))

    def before(self) -> Tensor:
        """The base as it was at the latest answer, as a vector on the CPU."""
        base = self.base.to("cpu", copy=True)
        for rows, values in reversed(self.packed):
            base[rows.cpu()] = values.cpu()
        return base

    @property
    def _at_once(self) -> int:
        """Rows that are compared at a time."""
        return max(1, _AT_ONCE // self.base.shape[1])

    def _differing(self, begin: int, end: int) -> Tensor:
        """The rows of a range in which the module differs from the base."""
        x, found = self.x, [torch.empty(0, dtype=torch.int64, device=self.base.device)]
        for start in range(begin, end, self._at_once):
            part = slice(start, min(start + self._at_once, end))
            differs = (x[part].to(self.base.device) != self.base[part]).any(1)
            found.append(differs.nonzero().view(-1) + start)
        return torch.cat(found)


class RowReplica:
    """The tables of a layout; see the module's docstring.

    ``layout``: its groups with the role ``ROWS``. ``places``: of the module's tensors, in its order. ``base``: per
    server and group a vector. ``gradients``: whether the sum of gradients is pushed, not the difference.
    """

    def __init__(
        self, layout: Layout, places: Sequence[Place], base: Sequence[Sequence[Tensor]], *, gradients: bool = False
    ) -> None:
        self._widths = {g: group.width for g, group in enumerate(layout.groups) if group.role is Role.ROWS}
        self._servers = range(layout.num_servers)
        self._tables = {
            index: WatchedTable(spec.name, places[index])
            for index, spec in enumerate(layout.tensors)
            if spec.group in self._widths
        }
        self._spans: dict[tuple[int, int], list[RowSpan]] = {(s, g): [] for s in self._servers for g in self._widths}
        for piece in layout.pieces() if self._widths else ():
            width = self._widths.get(piece.group)
            if width is not None:
                part = base[piece.server][piece.group][piece.offset : piece.offset + piece.length].view(-1, width)
                span = RowSpan(piece, self._tables[piece.tensor], piece.offset // width, part)
                self._spans[piece.server, piece.group].append(span)
        self._sizes = {key: sum(len(span.base) for span in spans) for key, spans in self._spans.items()}
        self._empty = {g: base[0][g].new_empty(0, device="cpu") for g in self._widths}
        self._at = dict.fromkeys(self._spans, "")
        self._updates: dict[tuple[int, int], Rows] = {}
        self._sums: dict[WatchedTable, Tensor] | None = {} if gradients else None

    def weights(self, shards: Sequence[Sequence[Tensor]]) -> None:
        """Write the module's values to vectors, per server and group."""
        for span in self._each():
            self._part(span, shards[span.piece.server][span.piece.group]).copy_(span.x)

    def accrue(self, skipped: bool | Tensor = False) -> None:
        """Add this step's gradients, if these are pushed."""
        if self._sums is None or skipped is True:
            return
        for table in self._tables.values():
            gradient = table.gradient()
            if gradient is None:
                continue
            gradient = gradient.detach().coalesce()
            values = gradient.values()
            if isinstance(skipped, Tensor):
                values = torch.where(skipped.to(values.device) != 0, 0, values)
            mine = torch.sparse_coo_tensor(gradient.indices(), values.clone(), gradient.shape, is_coalesced=True)
            before = self._sums.get(table)
            self._sums[table] = mine if before is None else before + mine

    def differ(self) -> bool:
        """Whether there are differences to push, after comparing whole tables."""
        return self._sums is None and any(span.changed(thorough=True).numel() for span in self._each())

    def changed(self) -> list[str]:
        """Names of the tables in which the module differs from the base."""
        return list({span.table.name: None for span in self._each() if span.changed(thorough=True).numel()})

    def pack(self, *, thorough: bool) -> None:
        """Make the update since the last one: of the rows that may have changed, or ``thorough`` of all."""
        for (server, group), spans in self._spans.items():
            parts = [self._packed(span, thorough=thorough) for span in spans]
            self._updates[server, group] = self._form(server, group, spans, parts)
        for table in self._tables.values():
            table.note_again()
        if self._sums is not None:
            self._sums.clear()

    def updates(self, *, push: bool) -> list[tuple[Rows, ...]]:
        """What a message to each server holds of each group."""
        return [tuple(self._update(server, group, push=push) for group in self._widths) for server in self._servers]

    def merge(self, answers: Sequence[Sequence[Any]], *, fresh: bool, alone: bool) -> None:
        """Take the servers' rows, and keep the steps since the push; see :meth:`Replica.merge`."""
        self._take(answers, fresh=fresh, alone=alone and self._sums is None)

    def adopt(self, answers: Sequence[Sequence[Any]], *, alone: bool) -> None:
        """Take the servers' rows as they are; see :meth:`Replica.adopt`."""
        alone = alone and self._sums is None
        self._take(answers, fresh=True, alone=alone)
        for span in self._each() if not alone else ():
            span.x.copy_(span.base)
        for table in self._tables.values() if not alone else ():
            table.touched.fill_(False)
            table.note_again()
        if self._sums is not None:
            self._sums.clear()

    def whole(self, answers: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Answers with all rows of their tables, as vectors on the CPU; nothing is taken."""
        found = [list(shard) for shard in answers]
        for server, group in self._spans:
            rows = answers[server][group]
            if isinstance(rows, Tensor):
                continue
            values = rows.values
            if rows.numbers is not None or values is None:
                width, values = self._widths[group], self._fetched(server, group)
                if rows.numbers is not None:
                    values.view(-1, width)[rows.numbers.long()] = rows.values.view(-1, width)
            found[server][group] = values
        return [tuple(shard) for shard in found]

    def fetched(self, server: int) -> list[Tensor]:
        """A server's rows as they were fetched last, per group a vector."""
        return [self._fetched(server, group) for group in self._widths]

    def go_ahead(self, shards: Sequence[Sequence[Tensor]], answers: Sequence[Sequence[Any]]) -> None:
        """Merge answers into copies of the module's values, per server and group."""
        known = self.whole(answers)
        for span in self._each():
            server, group = span.piece.server, span.piece.group
            x, answer = self._part(span, shards[server][group]), self._part(span, known[server][group])
            base = span.base.cpu()
            x.copy_(torch.where(x == base, answer, x - (base - answer)))

    def differences(self, answers: Sequence[Sequence[Any]]) -> Iterator[Tensor]:
        """The module's rows minus the servers'."""
        known = self.whole(answers)
        for span in self._each():
            yield span.x.cpu() - self._part(span, known[span.piece.server][span.piece.group])

    def close(self) -> None:
        """Note no gradients any more."""
        for table in self._tables.values():
            table.close()

    # ------------------------------------------------------------------ helpers

    def _update(self, server: int, group: int, *, push: bool) -> Rows:
        rows = self._updates.get((server, group), Rows()) if push else Rows()
        return Rows(rows.values, rows.numbers, self._at[server, group])

    def _fetched(self, server: int, group: int) -> Tensor:
        parts = [span.before().view(-1) for span in self._spans[server, group]]
        return torch.cat(parts) if parts else self._empty[group]

    def _each(self) -> Iterator[RowSpan]:
        for spans in self._spans.values():
            yield from spans

    def _part(self, span: RowSpan, vector: Tensor) -> Tensor:
        width = span.base.shape[1]
        return vector.view(-1, width)[span.first : span.first + len(span.base)]

    def _packed(self, span: RowSpan, *, thorough: bool) -> tuple[Tensor, Tensor]:
        """The rows of a push, and what is pushed of each."""
        rows = span.changed(thorough=thorough)
        if self._sums is not None:
            return self._packed_gradient(span, rows, self._sums.get(span.table))
        before, x = span.base[rows], span.values_of(rows)
        update = x - before
        after = before + update
        span.remember(rows, before)
        span.base[rows] = after
        span.touched.fill_(False)
        span.touch(rows[(after != x).any(1)])  # what is rounded away is a part of the next push
        return rows, update

    def _packed_gradient(self, span: RowSpan, rows: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same, of gradients. Of rows that moved without one a zero is pushed, so that the servers answer them."""
        values = span.base[:0]
        pushed = rows[:0]
        if total is not None:
            pushed = total.coalesce().indices()[0].to(span.base.device) - span.piece.start // span.base.shape[1]
            inside = (pushed >= 0) & (pushed < len(span.base))
            pushed, values = pushed[inside], total.coalesce().values().to(span.base.device)[inside]
        rows = torch.unique(torch.cat([rows, pushed]))
        update = torch.zeros(len(rows), span.base.shape[1], dtype=span.base.dtype, device=span.base.device)
        update[torch.searchsorted(rows, pushed)] = values
        span.remember(rows, span.base[rows])
        span.base[rows] = span.values_of(rows)
        span.touched.fill_(False)
        return rows, update

    def _form(self, server: int, group: int, spans: Sequence[RowSpan], parts: Sequence[tuple[Tensor, Tensor]]) -> Rows:
        """An update as it is sent: all rows, if the numbers of some would take as much."""
        if not parts:
            return Rows()
        width, count = self._widths[group], self._sizes[server, group]
        numbers = torch.cat([rows.cpu() + span.first for span, (rows, _) in zip(spans, parts, strict=True)])
        values = torch.cat([update.cpu() for _, update in parts])
        if len(numbers) * (width * values.itemsize + 4) < count * width * values.itemsize:
            return Rows(values.view(-1), numbers.to(torch.int32))
        whole = torch.zeros(count, width, dtype=values.dtype)
        whole[numbers] = values
        return Rows(whole.view(-1))

    def _take(self, answers: Sequence[Sequence[Any]], *, fresh: bool, alone: bool) -> None:
        for (server, group), spans in self._spans.items():
            rows: Rows = answers[server][group]
            for span in spans:
                self._take_span(span, *self._of(span, rows), fresh=fresh and not alone)
            self._at[server, group] = rows.at
        for table in self._tables.values():
            table.note_again()
        self._updates.clear()

    def _of(self, span: RowSpan, rows: Rows) -> tuple[Tensor, Tensor]:
        """A span's rows of an answer, and their values."""
        width, count, device = span.base.shape[1], len(span.base), span.base.device
        if rows.values is None:
            return torch.empty(0, dtype=torch.int64, device=device), span.base[:0]
        values = rows.values.view(-1, width)
        if rows.numbers is None:
            return torch.arange(count, device=device), values[span.first : span.first + count].to(device)
        numbers = rows.numbers.long()
        low, high = torch.searchsorted(numbers, torch.tensor([span.first, span.first + count])).tolist()
        return (numbers[low:high] - span.first).to(device), values[low:high].to(device)

    def _take_span(self, span: RowSpan, rows: Tensor, answer: Tensor, *, fresh: bool) -> None:
        seen = torch.zeros(len(span.base), dtype=torch.bool, device=span.base.device)
        seen[rows] = True
        for pushed, values in span.packed:  # from the oldest on
            lost = ~seen[pushed]
            rows, answer = torch.cat([rows, pushed[lost]]), torch.cat([answer, values[lost]])
            seen[pushed] = True
        span.packed.clear()
        if fresh:
            span.base[rows] = answer
            left = torch.cat([rows, span.touched.nonzero().view(-1).to(rows.device)])
            span.write(left, span.base[left])
            span.touched.fill_(False)
            return
        before, x = span.base[rows], span.values_of(rows)
        kept = (x != before).any(1)
        span.write(rows, torch.where(x == before, answer, x - (before - answer)))
        span.base[rows] = answer
        span.touch(rows[kept])
