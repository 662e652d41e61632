"""A worker's copy of the weights, seen as the servers' flat shards.

Per server and group there are two flat buffers beside the module's own tensors: ``base``, what this worker has agreed
with the servers so far, and ``wire``, the update or the answer; on the servers' own machine ``wire`` lies in
memory they share. That makes two times the parameters' bytes; an answer by value adds a third while it is merged. Where
lost servers can be restored a worker remembers the weights that it fetched last: where memory is shared, and the answer
overwrites the update, that is one more.

Of a module on a device with streams ``base`` lies there, and ``wire`` in this machine's pinned memory, as does an
answer by value on its way to the device, where it takes one vector more, from the first merge on (see
:mod:`lightning_asgd.devices.device_staging`). With ``offload`` both vectors are in pinned memory, and pass through the
device in short pieces.

Written with the module's weights *x* (all sums element-wise):

* :meth:`Replica.pack`: ``wire = x - base; base += wire``. That is what the servers hold next if no other worker pushes:
  the same floating-point addition, and so the same bits. What it rounds away stays in *x* and is part of the next push.
* :meth:`Replica.merge` of an answer *r*: ``x -= base - r; base = r``: steps taken since the push stay in *x* and are
  part of the next push (the *rebase* of asynchronous updates). The answer to a worker that trains alone is ``base``, so
  its weights do not move, down to the sign of a zero.
* :meth:`Replica.adopt`: ``x = base = r``.

Other ways are in :mod:`lightning_asgd.core.worker.replica_kinds`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_asgd.core.calls.shared_memory import SharedBlock
from lightning_asgd.core.foundation.errors import LayoutMismatchError
from lightning_asgd.core.foundation.layout import Layout, dense, dtype_from_name
from lightning_asgd.core.foundation.numerics import as_bytes, is_within_bounds
from lightning_asgd.core.protocol import Rows
from lightning_asgd.core.worker.replica_spans import Place, Span, spans_of
from lightning_asgd.devices.device_staging import lane_for
from lightning_asgd.tables.rows.worker import RowReplica


class Replica:
    """See the module's docstring.

    ``places`` are of the module's tensors, in the layout's order; these are changed in place, and may be strided.
    ``blocks``: per server a shared block, or None to send by value. ``remembers``: :meth:`fetched` is wanted, which
    takes another vector where memory is shared. ``offload``: on a device with streams, keep ``base`` in host memory.
    """

    _pushes_gradients = False
    _derives = True
    """Whether the weights that were fetched last are those on the wire apart from the worker's own."""

    def __init__(
        self,
        layout: Layout,
        places: Sequence[Place],
        blocks: Sequence[SharedBlock | None],
        *,
        remembers: bool = False,
        offload: bool = False,
    ) -> None:
        self.layout = layout
        self.remembers = remembers
        self._places = places
        self.device = places[0][0][places[0][1]].device
        lane = self._lane = lane_for(self.device)
        self._turn: Callable[[], AbstractContextManager[None]] = nullcontext if lane is None else lane.turn
        self._buffer: Callable[..., Tensor] = torch.empty if lane is None else lane.buffer
        self._non_blocking = lane is not None  # else no event would tell when a device has copied
        self._offloads = offload and lane is not None
        self._near: Callable[..., AbstractContextManager[tuple[Span, Tensor]]]
        self._near = self._staged if self._offloads else nullcontext
        self._staging: dict[torch.dtype, Tensor] = {}  # where a piece of the base is while it is on the device
        self.blocks, self.wire = list(blocks), list[tuple[Tensor, ...]]()
        self._base: list[tuple[Tensor, ...]] = []
        self._previous: list[tuple[Tensor, ...] | None] = []  # where the answer overwrites the update
        for server in range(layout.num_servers):
            shard = dense(layout.shard(server))
            block = self.blocks[server]
            if block is not None:
                if self._lane is not None:
                    self._lane.pin(block)
                self.wire.append(block.tensors)
            else:
                self.wire.append(tuple(self._buffer(n, dtype=dtype_from_name(dtype)) for _, dtype, n in shard))
            self._base.append(tuple(self._vector(n, dtype_from_name(d)) for _, d, n in layout.shard(server)))
            keeps = remembers and (block is not None or not self._derives)
            self._previous.append(tuple(self._vector(n, dtype_from_name(d)) for _, d, n in shard) if keeps else None)
        self._spans = spans_of(layout, self.device, offload=self._offloads)
        rows: dict[int, Tensor] = {}  # per group; one span's values are in it at a time
        for span in sorted((span for span in self._spans if len(span.sizes) > 1), key=lambda span: -span.length):
            like = span.of(self._base)
            rows.setdefault(span.group, torch.empty(span.length, dtype=like.dtype, device=self.device))
        for span in self._spans:
            span.wire, span.base = span.of(self.wire), span.of(self._base)
            span.row = rows[span.group][: span.length] if len(span.sizes) > 1 else span.row
            vectors = self._previous[span.server]
            span.previous = None if vectors is None else vectors[span.group][span.place]
        self.within_bounds = False
        """Whether all of the latest update that lies in shared memory was found to be, while it was in the cache."""
        self._packed = False  # whether an update was packed since the latest fetch
        self._alone = False  # whether no other worker pushed when weights were adopted last
        self.rows = RowReplica(layout, places, self._base, gradients=self._pushes_gradients) if layout.widths else None

    def drop_block(self, server: int) -> None:
        """Send by value to a server that cannot see the shared block."""
        block = self.blocks[server]
        if block is not None:
            self.wire[server] = tuple(self._buffer(t.numel(), dtype=t.dtype) for t in block.tensors)
            self._previous[server] = None if self._derives else self._previous[server]
            for span in (span for span in self._spans if span.server == server):
                span.wire = span.of(self.wire)
                span.previous = None if self._derives else span.previous
            self._close(block)
            self.blocks[server] = None

    @property
    def shares_memory(self) -> bool:
        """Whether servers run on this machine, and see its wire buffers."""
        return any(block is not None for block in self.blocks)

    def updates(self) -> list[tuple[Tensor, ...] | None]:
        """Per server, what to put into the message: the wire buffers, or None where they are shared."""
        return [None if block is not None else wire for block, wire in zip(self.blocks, self.wire, strict=True)]

    def row_updates(self, *, push: bool) -> list[tuple[Rows, ...]] | None:
        """Per server, what a message holds of each group of tables."""
        return None if self.rows is None else self.rows.updates(push=push)

    @property
    def lags(self) -> bool:
        """Whether rows of tables differ from the servers' that no gradient has told of, after a look at all."""
        return self.rows is not None and self.rows.differ()

    def weights(self) -> list[tuple[Tensor, ...]]:
        """Per server, fresh tensors with the module's present values, to initialise the shards with."""
        shards = [
            tuple(torch.empty(n, dtype=dtype_from_name(d)) for _, d, n in self.layout.shard(s))
            for s in range(self.layout.num_servers)
        ]
        with torch.no_grad():
            for r, x in self._values(write=False):
                r.of(shards).copy_(x)
            if self.rows is not None:
                self.rows.weights(shards)
        return shards

    def pack(self, *, thorough: bool = False) -> None:
        """Write the update since the last pack, merge or adopt to the wire; it is there once it has :attr:`arrived`.

        With ``thorough`` all rows of tables are compared.
        """
        keeps = self.remembers and not self._packed  # the first update since the latest fetch
        self.within_bounds = self.device.type == "cpu"  # else the training thread would have to wait for the device
        with torch.no_grad(), self._turn():
            for r, x in self._values(write=False):
                before = r.base
                if keeps and r.previous is not None:
                    r.base, r.previous = r.previous, r.base
                with self._near((r, before)) as (_, before):
                    self._pack(r, x, before)
                self.within_bounds = self.within_bounds and (self.blocks[r.server] is None or is_within_bounds(r.wire))
        for server, previous in enumerate(self._previous):
            if keeps and previous is not None:
                whole = len(previous)
                tables = self._base[server][whole:]
                self._base[server], self._previous[server] = (*previous, *tables), self._base[server][:whole]
        if self.rows is not None:
            with torch.no_grad(), self._turn():
                self.rows.pack(thorough=thorough)
        self._packed = True

    @property
    def arrived(self) -> bool:
        """Whether the latest update is on the wire, and the last merged answer off it; nothing may be sent earlier."""
        return self._lane is None or self._lane.arrived

    def await_arrival(self) -> None:
        """Wait until it has."""
        if self._lane is not None:
            self._lane.wait()

    def took_s(self) -> float:
        """Device seconds of packing and merging that finished since the last call."""
        return 0.0 if self._lane is None else self._lane.took_s()

    def pack_again(self, server: int) -> None:
        """Write the latest update to the wire again, where a lost server has written into the shared block."""
        if self.blocks[server] is None:
            return
        self.await_arrival()
        with torch.no_grad():
            for r in self._spans:
                if r.server == server and r.previous is not None:
                    self._pack_again(r)

    def fetched(self, server: int) -> tuple[Tensor, ...]:
        """A server's weights as they were fetched last, one tensor per group, to be read only.

        Where updates go by value, these are the base minus the update, exact up to rounding.
        """
        self.await_arrival()
        wire, previous = self.wire[server], self._previous[server]
        tables = [] if self.rows is None else self.rows.fetched(server)
        base = self._base[server][: len(wire)]
        if not self._packed:
            return *(b.cpu() for b in base), *tables
        if previous is not None:
            return *(s.cpu() for s in previous), *tables
        return *(b.cpu() - w for b, w in zip(base, wire, strict=True)), *tables

    def merge(
        self, answers: Sequence[tuple[Tensor, ...]], *, pushed: bool = True, fresh: bool = False, alone: bool = False
    ) -> None:
        """Take the servers' weights and keep the steps since the push, if they answer one (``pushed``).

        If there are none (``fresh``) the answer is taken as it is. If no other worker pushes (``alone``) this one
        keeps its own rounding.
        """
        self._packed = False
        near = answers
        if self._lane is not None:
            alike = [shard[: len(wire)] for shard, wire in zip(answers, self.wire, strict=True)]
            near = self._lane.bring(alike, whole=not self._offloads)
        with torch.no_grad(), self._turn():
            for r, x in self._values(write=True):
                answer = near[r.server][r.group][r.place]
                with self._near((r, r.base)):
                    answer = answer.to(x.device, non_blocking=True) if self._offloads else answer
                    self._merge(r, x, answer, pushed, fresh, alone)
            if self.rows is not None:
                self.rows.merge(answers, fresh=fresh, alone=alone)

    def distance(self, answers: Sequence[tuple[Tensor, ...]]) -> float:
        """Norm of the module's parameters minus the servers', from the answers to a push."""
        norms = []
        with torch.no_grad():
            for r, x in self._values(write=False):
                answer = r.of(answers).to(x.device)
                norms.append(torch.linalg.vector_norm(self._difference(x, answer)))
            if self.rows is not None:
                norms += map(torch.linalg.vector_norm, self.rows.differences(answers))
        return math.hypot(*map(float, norms))  # on the CPU: MPS has no double precision

    def changed(self) -> list[str]:
        """Names of the tensors in which the module differs from the weights that it adopted last.

        None where the worker was alone: what differs may be what it keeps of its own rounding.
        """
        if self._alone:
            return []
        found: dict[int, None] = {}
        with torch.no_grad():
            for r, x in self._values(write=False):
                pairs = zip(torch.split(x, r.sizes), torch.split(self._agreed(r).to(x.device), r.sizes), strict=True)
                changed = (i for i, pair in enumerate(pairs) if not torch.equal(*map(as_bytes, pair)))  # NaN, too
                found |= {r.places[i][0]: None for i in changed}
        names = [self.layout.tensors[index].name for index in found]
        return names if self.rows is None else [*names, *self.rows.changed()]

    def _agreed(self, r: Span) -> Tensor:
        return r.base

    def accrue(self, skipped: bool | Tensor = False) -> None:
        """Note that an optimizer step was taken, or skipped."""

    def resume(self) -> None:
        """Bring back the worker's own weights, if a sync point has parked them."""

    def forget_parked(self) -> None:
        """Continue from the servers' weights instead."""

    def _pack_again(self, r: Span) -> None:
        if r.previous is not None:
            r.wire.copy_(r.base - r.previous)

    def _difference(self, x: Tensor, answer: Tensor) -> Tensor:
        return x - answer

    def _pack(self, r: Span, x: Tensor, before: Tensor) -> None:
        if x.device == r.wire.device:
            update = torch.sub(x, before, out=r.wire)
        else:
            update = x - before
            r.wire.copy_(update, non_blocking=self._non_blocking)
        torch.add(before, update, out=r.base)

    def _merge(self, r: Span, x: Tensor, answer: Tensor, pushed: bool, fresh: bool, alone: bool) -> None:
        if fresh and not alone:
            x.copy_(answer)
            r.base.copy_(x)
            return
        base, answer = r.base, answer.to(x.device)
        if x.is_complex():  # torch's complex x - 0 is not always x, where a part of it is -0
            x, base, answer = map(torch.view_as_real, (x, base, answer))
        x.sub_(base.sub_(answer))  # x + 0 would turn -0 into 0
        base.copy_(answer)

    def adopt(self, answers: Sequence[tuple[Tensor, ...]], *, park: bool = False, alone: bool = False) -> None:
        """Take the servers' weights as they are; if ``alone``, all of the worker's steps must be in them.

        With ``park``, :meth:`resume` brings back what the algorithm has each worker keep for itself.
        """
        self._packed, self._alone = False, alone
        with torch.no_grad(), self._turn() if self._offloads else nullcontext():
            for r, x in self._values(write=True):
                answer = r.of(answers)
                with self._near((r, r.base)):
                    self._adopt(r, x, answer, park, alone)
            if self.rows is not None:
                self.rows.adopt(answers, alone=alone)
        if self._offloads:
            self.await_arrival()

    def _adopt(self, r: Span, x: Tensor, answer: Tensor, park: bool, alone: bool) -> None:
        Replica._merge(self, r, x, answer, pushed=False, fresh=True, alone=alone)

    def ahead(self, answers: Sequence[tuple[Tensor, ...]]) -> dict[str, Tensor]:
        """What :meth:`merge` of a fetch would make of the weights, as named CPU tensors; the module is not touched."""
        shards = self.weights()
        self.await_arrival()
        with torch.no_grad():
            for r in self._spans:
                x, answer = r.of(shards), r.of(answers)
                self._go_ahead(r, x, answer)
            if self.rows is not None:
                self.rows.go_ahead(shards, answers)
        return self.read(shards)

    def _go_ahead(self, r: Span, x: Tensor, answer: Tensor) -> None:
        base = r.base.cpu()
        if x.is_complex():  # as in a rebase
            x, base, answer = map(torch.view_as_real, (x, base, answer))
        x.sub_(base - answer)

    def read(self, answers: Sequence[tuple[Tensor, ...]]) -> dict[str, Tensor]:
        """The servers' weights as fresh, named CPU tensors; the module stays as it is."""
        values = [
            torch.empty(spec.shape, dtype=dtype_from_name(self.layout.groups[spec.group].dtype))
            for spec in self.layout.tensors
        ]
        answers = answers if self.rows is None else self.rows.whole(answers)
        for p in self.layout.pieces():
            answer = answers[p.server][p.group][p.offset : p.offset + p.length]
            values[p.tensor].view(-1)[p.start : p.start + p.length].copy_(answer)
        return {spec.name: value for spec, value in zip(self.layout.tensors, values, strict=True)}

    def close(self) -> None:
        """Release the shared memory, and the module's gradients."""
        self.wire = []
        if self.rows is not None:
            self.rows.close()
        for span in self._spans:
            span.wire = span.row
        for block in self.blocks:
            if block is not None:
                self._close(block)

    def _close(self, block: SharedBlock) -> None:
        if self._lane is not None:
            self._lane.unpin(block)
        block.close()

    def _vector(self, length: int, dtype: torch.dtype) -> Tensor:
        """Memory beside the module's."""
        return (
            self._buffer(length, dtype=dtype)
            if self._offloads
            else torch.empty(length, dtype=dtype, device=self.device)
        )

    @contextlib.contextmanager
    def _staged(self, about: tuple[Span, Tensor]) -> Iterator[tuple[Span, Tensor]]:
        """A span with its base on the device, at first another vector's values; they become its base in host memory."""
        r, before = about
        far, dtype = r.base, r.base.dtype
        if dtype not in self._staging:
            longest = max(span.length for span in self._spans if span.base.dtype == dtype)
            self._staging[dtype] = torch.empty(longest, dtype=dtype, device=self.device)
        r.base = near = self._staging[dtype][: r.length]
        near.copy_(before, non_blocking=True)
        try:
            yield r, near
            far.copy_(near, non_blocking=True)
        finally:  # the device may have run out of memory inside
            r.base = far

    def _values(self, *, write: bool) -> Iterator[tuple[Span, Tensor]]:
        """Every span with the module's values in it, which are written back after each turn if ``write``."""
        tensors = [place[key].data for place, key in self._places]
        for tensor, spec in zip(tensors, self.layout.tensors, strict=True):
            if tensor.shape != spec.shape:
                raise LayoutMismatchError(
                    f"{spec.name!r} was replaced by a tensor of shape {tuple(tensor.shape)}. Expected {spec.shape}, as "
                    "when fit began: change shapes before fit, or in configure_model()."
                )
        flat = [t.reshape(-1) for t in tensors]  # strided ones are copied
        for r in self._spans:
            parts = [flat[tensor][where] for tensor, where in r.places]
            row = parts[0] if len(parts) == 1 else torch.cat(parts, out=r.row)
            yield r, row
            if write and len(parts) > 1:
                for part, values in zip(parts, torch.split(row, r.sizes), strict=True):
                    part.copy_(values)
        if write:
            for tensor, values in zip(tensors, flat, strict=True):
                if not tensor.is_contiguous():
                    tensor.copy_(values.view(tensor.shape))
