"""A worker's copy of the weights, seen as the servers' flat shards.

Per server and group there are two flat buffers beside the module's own tensors: ``base``, what this worker has agreed
with the servers so far, and ``wire``, the update or the answer; on the servers' own machine ``wire`` lies in
memory they share. That makes two times the parameters' bytes; an answer by value adds a third while it is merged. Where
lost servers can be restored a worker remembers the weights that it fetched last: where memory is shared, and the answer
overwrites the update, that is one more.

Of a module on a device with streams ``base`` lies there, and ``wire`` in this machine's pinned memory, as does an
answer by value on its way to the device, where it takes one vector more, from the first merge on (see
:mod:`lightning_asgd.worker.device_staging`). With ``offload`` both vectors are in pinned memory, and pass through the
device in short pieces.

Written with the module's weights *x* (all sums element-wise):

* :meth:`Replica.pack`: ``wire = x - base; base += wire``. That is what the servers hold next if no other worker pushes:
  the same floating-point addition, and so the same bits. What it rounds away stays in *x* and is part of the next push.
* :meth:`Replica.merge` of an answer *r*: ``x -= base - r; base = r``: steps taken since the push stay in *x* and are
  part of the next push (the *rebase* of asynchronous updates). The answer to a worker that trains alone is ``base``, so
  its weights do not move, down to the sign of a zero.
* :meth:`Replica.adopt`: ``x = base = r``.

Other ways for parameters are in :mod:`lightning_asgd.worker.replica_kinds`; buffers go this way in all of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_asgd.errors import LayoutMismatchError
from lightning_asgd.layout import Layout, Piece, Role, dtype_from_name
from lightning_asgd.numerics import is_within_bounds
from lightning_asgd.transports.shared_memory import SharedBlock
from lightning_asgd.worker.device_staging import lane_for

__all__ = ["Place", "Replica", "Span", "places_of"]

Place = tuple[Any, Any]
"""Where a program keeps a tensor, which it may replace by another one: a container and its key."""

# Scalars per pass: 1 MiB of float32 on a CPU, so that a temporary stays in the cache. A piece of a tensor that is not
# larger than the second figure is put together with its neighbours first, since each pass costs some microseconds.
_CHUNK, _SMALL = 1 << 18, 1 << 14
_DEVICE_CHUNK, _DEVICE_SMALL = 1 << 24, 1 << 20
_STAGED = 8  # parts of a chunk: with `offload` a span has its base, update, reply and gathered pieces on the device


class Span:
    """Pieces that follow each other on a server, and go through every pass together."""

    def __init__(self, layout: Layout, pieces: Sequence[Piece]) -> None:
        first = pieces[0]
        self.server, self.group, self.offset = first.server, first.group, first.offset
        self.role = layout.groups[first.group].role
        self.sizes = [p.length for p in pieces]
        self.length = sum(self.sizes)
        self.place = slice(self.offset, self.offset + self.length)  # in its group on its server
        self.places = [(p.tensor, slice(p.start, p.start + p.length)) for p in pieces]  # in the module's tensors
        self.row = torch.empty(0)  # where several pieces are put together
        self.wire = torch.empty(0)  # their part of what is sent
        self.base = torch.empty(0)  # their part of the base
        self.previous: Tensor | None = None  # where the previous base is kept

    def of(self, shards: Sequence[Sequence[Tensor]]) -> Tensor:
        """Its part of one tensor per server and group."""
        return shards[self.server][self.group][self.place]


def _spans(layout: Layout, device: torch.device, *, offload: bool) -> list[Span]:
    most, small = (_CHUNK, _SMALL) if device.type == "cpu" else (_DEVICE_CHUNK, _DEVICE_SMALL)
    most, small = (most // _STAGED, small // _STAGED) if offload else (most, small)
    gathered: list[list[Piece]] = []
    latest: dict[tuple[int, int], list[Piece]] = {}  # by server and group: small pieces, to which more may come
    for piece in layout.pieces(most):
        place = piece.server, piece.group
        row = latest.pop(place, [])
        if not row or piece.length > small or sum(p.length for p in row) + piece.length > most:
            row = []
            gathered.append(row)
        row.append(piece)
        if piece.length <= small:
            latest[place] = row
    return [Span(layout, row) for row in gathered]


class Replica:
    """See the module's docstring.

    Args:
        layout: where each scalar lives.
        places: of the module's tensors, in the layout's order. The tensors are changed in place and may be strided.
        blocks: per server, a shared block, or None to send by value.
        remembers: whether :meth:`fetched` is wanted. It takes another vector where memory is shared.
        offload: keep ``base`` in host memory, where the module is on a device with streams.
    """

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
            shard = layout.shard(server)
            block = self.blocks[server]
            if block is not None:
                if self._lane is not None:
                    self._lane.pin(block)
                self.wire.append(block.tensors)
            else:
                self.wire.append(tuple(self._buffer(n, dtype=dtype_from_name(dtype)) for _, dtype, n in shard))
            self._base.append(tuple(self._vector(n, dtype_from_name(d)) for _, d, n in shard))
            keeps = remembers and (block is not None or not self._derives)
            self._previous.append(tuple(self._vector(n, dtype_from_name(d)) for _, d, n in shard) if keeps else None)
        self._spans = _spans(layout, self.device, offload=self._offloads)
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

    def weights(self) -> list[tuple[Tensor, ...]]:
        """Per server, fresh tensors with the module's present values, to initialise the shards with."""
        shards = [
            tuple(torch.empty(n, dtype=dtype_from_name(d)) for _, d, n in self.layout.shard(s))
            for s in range(self.layout.num_servers)
        ]
        with torch.no_grad():
            for r, x in self._values(write=False):
                r.of(shards).copy_(x)
        return shards

    def pack(self) -> None:
        """Write the update since the last pack, merge or adopt to the wire; it is there once it has :attr:`arrived`."""
        keeps = self.remembers and not self._packed  # the first update since the latest fetch
        self.within_bounds = self.device.type == "cpu"  # else the training thread would have to wait for the device
        with torch.no_grad(), self._turn():
            for r, x in self._values(write=False):
                before = r.base
                if keeps and r.previous is not None:
                    r.base, r.previous = r.previous, r.base
                with self._near((r, before)) as (_, before):
                    if r.role is Role.PARAMETER:
                        self._pack(r, x, before)
                    elif r.role is Role.LARGEST:
                        r.wire.copy_(x, non_blocking=self._non_blocking)
                    else:
                        Replica._pack(self, r, x, before)  # a difference, whatever is pushed of parameters
                self.within_bounds = self.within_bounds and (self.blocks[r.server] is None or is_within_bounds(r.wire))
        for server, previous in enumerate(self._previous):
            if keeps and previous is not None:
                self._base[server], self._previous[server] = previous, self._base[server]
        self._packed = True

    @property
    def arrived(self) -> bool:
        """Whether the latest update is on the wire, and the latest merged answer is no longer needed there.

        A device takes a while for that, and nothing may be sent earlier.
        """
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
            for r, x in self._values(write=False):
                if r.server == server and r.previous is not None:
                    if r.role is Role.LARGEST:
                        r.wire.copy_(x)
                    elif r.role is Role.PARAMETER:
                        self._pack_again(r)
                    else:
                        r.wire.copy_(r.base - r.previous)

    def fetched(self, server: int) -> tuple[Tensor, ...]:
        """A server's weights as they were fetched last, one tensor per group, to be read only.

        Where updates go by value, these are the base minus the update, exact up to rounding.
        """
        self.await_arrival()
        base, previous = self._base[server], self._previous[server]
        if not self._packed:
            return tuple(b.cpu() for b in base)
        if previous is not None:
            return tuple(s.cpu() for s in previous)
        roles = [role for role, _, _ in self.layout.shard(server)]
        pairs = zip(roles, base, self.wire[server], strict=True)
        return tuple(b.cpu() if role is Role.LARGEST else b.cpu() - w for role, b, w in pairs)

    def merge(
        self, answers: Sequence[tuple[Tensor, ...]], *, pushed: bool = True, fresh: bool = False, alone: bool = False
    ) -> None:
        """Take the servers' weights and keep the steps since the push, if they answer one (``pushed``).

        If there are none (``fresh``) the answer is taken as it is. If no other worker pushes (``alone``) this one
        keeps its own rounding, and its own integer buffers.
        """
        self._packed = False
        near = answers if self._lane is None else self._lane.bring(answers, whole=not self._offloads)
        with torch.no_grad(), self._turn():
            for r, x in self._values(write=True):
                answer = near[r.server][r.group][r.place]
                with self._near((r, r.base)):
                    answer = answer.to(x.device, non_blocking=True) if self._offloads else answer
                    if r.role is Role.PARAMETER:
                        self._merge(r, x, answer, pushed, fresh, alone)
                    elif r.role is Role.LARGEST and (alone or not fresh):
                        self._merge_largest(r, x, answer, alone)
                    else:
                        Replica._merge(self, r, x, answer, pushed, fresh, alone)

    def distance(self, answers: Sequence[tuple[Tensor, ...]]) -> float:
        """Norm of the module's parameters minus the servers', from the answers to a push."""
        norms = []
        with torch.no_grad():
            for r, x in self._values(write=False):
                if r.role is Role.PARAMETER:
                    answer = r.of(answers).to(x.device)
                    norms.append(torch.linalg.vector_norm(self._difference(x, answer)))
        return math.hypot(*map(float, norms))  # on the CPU: MPS has no double precision

    def accrue(self, skipped: bool | Tensor = False) -> None:
        """Note that an optimizer step was taken, or skipped."""

    def resume(self) -> None:
        """Bring back the worker's own weights, if a sync point has parked them."""

    def _pack_again(self, r: Span) -> None:
        if r.previous is not None:
            r.wire.copy_(r.base - r.previous)

    def _merge_largest(self, r: Span, x: Tensor, answer: Tensor, alone: bool) -> None:
        if not alone:  # else a program may have set its counter back
            torch.maximum(x, answer.to(x.device), out=x)
        r.base.copy_(answer)

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
        self._packed = False
        with torch.no_grad(), self._turn() if self._offloads else nullcontext():
            for r, x in self._values(write=True):
                answer = r.of(answers)
                with self._near((r, r.base)):
                    if r.role is Role.PARAMETER:
                        self._adopt(r, x, answer, park, alone)
                    elif r.role is Role.LARGEST and alone:
                        self._merge_largest(r, x, answer, alone)
                    else:
                        Replica._adopt(self, r, x, answer, park, alone)
        if self._offloads:
            self.await_arrival()

    def _adopt(self, r: Span, x: Tensor, answer: Tensor, park: bool, alone: bool) -> None:
        Replica._merge(self, r, x, answer, pushed=False, fresh=True, alone=alone)

    def ahead(self, answers: Sequence[tuple[Tensor, ...]], *, alone: bool = False) -> dict[str, Tensor]:
        """What :meth:`merge` of a fetch would make of the weights, as named CPU tensors; the module is not touched."""
        shards = self.weights()
        self.await_arrival()
        with torch.no_grad():
            for r in self._spans:
                x, answer = r.of(shards), r.of(answers)
                if r.role is Role.PARAMETER:
                    self._go_ahead(r, x, answer)
                elif r.role is not Role.LARGEST:
                    Replica._go_ahead(self, r, x, answer)
                elif not alone:
                    torch.maximum(x, answer, out=x)
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
        for p in self.layout.pieces():
            answer = answers[p.server][p.group][p.offset : p.offset + p.length]
            values[p.tensor].view(-1)[p.start : p.start + p.length].copy_(answer)
        return {spec.name: value for spec, value in zip(self.layout.tensors, values, strict=True)}

    def close(self) -> None:
        """Release the shared memory."""
        self.wire = []
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


def places_of(module: Module, layout: Layout) -> list[Place]:
    """Where a module keeps the tensors of a layout."""
    places: list[Place] = []
    for spec in layout.tensors:
        path, _, name = spec.name.rpartition(".")
        owner = module.get_submodule(path)
        places.append((owner._parameters if name in owner._parameters else owner._buffers, name))
    return places
