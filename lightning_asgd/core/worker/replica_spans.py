"""Where scalars of a module lie in its tensors and on its servers, in runs that go through every pass together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_asgd.core.foundation.layout import Layout, Piece, Role

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


def spans_of(layout: Layout, device: torch.device, *, offload: bool) -> list[Span]:
    """A layout's spans, but for those of tables."""
    most, small = (_CHUNK, _SMALL) if device.type == "cpu" else (_DEVICE_CHUNK, _DEVICE_SMALL)
    most, small = (most // _STAGED, small // _STAGED) if offload else (most, small)
    gathered: list[list[Piece]] = []
    latest: dict[tuple[int, int], list[Piece]] = {}  # by server and group: small pieces, to which more may come
    for piece in layout.pieces(most):
        if layout.groups[piece.group].role is Role.ROWS:
            continue
        place = piece.server, piece.group
        row = latest.pop(place, [])
        if not row or piece.length > small or sum(p.length for p in row) + piece.length > most:
            row = []
            gathered.append(row)
        row.append(piece)
        if piece.length <= small:
            latest[place] = row
    return [Span(layout, row) for row in gathered]


def places_of(module: Module, layout: Layout) -> list[Place]:
    """Where a module keeps the tensors of a layout."""
    places: list[Place] = []
    for spec in layout.tensors:
        path, _, name = spec.name.rpartition(".")
        owner = module.get_submodule(path)
        places.append((owner._parameters, name))
    return places
