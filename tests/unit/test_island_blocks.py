"""Which scalars each process of an island exchanges: every scalar once, in its place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.layout import Layout, build_layout
from lightning_asgd.islands.blocks import Block, PartLayout, part_layout

SHAPES = ((), (1,), (7,), (4, 6), (5, 3), (2, 3, 5))


def cut(n: int, parts: int) -> list[tuple[int, int]]:
    """As torch.chunk cuts: the last ones may be shorter, or empty."""
    each = math.ceil(n / parts)
    return [(min(n, each * i), min(n, each * (i + 1))) for i in range(parts)]


def blocks_of(shape: tuple[int, ...], mesh: Sequence[int], dims: Sequence[int | None]) -> list[Block]:
    """Per process of a mesh the block that it holds, where each mesh dimension cuts a dimension, or copies (None)."""
    found = []
    for rank in range(math.prod(mesh)):
        begin, held, rest = [0] * len(shape), list(shape), rank
        for size, dim in reversed(list(zip(mesh, dims, strict=True))):
            rest, place = divmod(rest, size)
            if dim is not None:
                first, last = cut(held[dim], size)[place]
                begin[dim], held[dim] = begin[dim] + first, last - first
        found.append(Block(tuple(begin), tuple(held)))
    return found


@st.composite
def islands(draw: st.DrawFn) -> tuple[Layout, dict[str, list[Block]], int]:
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (2, 2), (2, 3)]))
    parameters, blocks = {}, {}
    for index in range(draw(st.integers(1, 4))):
        shape = draw(st.sampled_from(SHAPES))
        dims: list[int | None] = []
        for _ in mesh:
            free: list[int | None] = [None, *(d for d in range(len(shape)) if d not in dims)]
            dims.append(draw(st.sampled_from(free)))
        name = f"p{index}"
        parameters[name] = torch.zeros(shape, requires_grad=True)
        blocks[name] = blocks_of(shape, mesh, dims)
    servers = draw(st.integers(1, sum(p.numel() for p in parameters.values())))
    return build_layout(parameters.items(), min(servers, 3)), blocks, math.prod(mesh)


def vectors(layout: Layout) -> list[list[torch.Tensor]]:
    """Per server and group, the numbers that the scalars have in their group."""
    return [
        [torch.arange(*layout.bounds(server, group)) for group in range(len(layout.groups))]
        for server in range(layout.num_servers)
    ]


def local(layout: Layout, held: PartLayout, block: Block, index: int) -> torch.Tensor:
    """A process's block of a tensor, whose scalars have the numbers that they have in their group."""
    spec = layout.tensors[index]
    whole = torch.arange(spec.offset, spec.offset + spec.numel).view(spec.shape)
    for dim, (begin, size) in enumerate(zip(block.begin, block.shape, strict=True)):
        whole = whole.narrow(dim, begin, size)
    assert tuple(whole.shape) == held.tensors[index].shape
    return whole.reshape(-1)


@given(islands())
def test_every_scalar_is_exchanged_once_and_in_its_place(island: tuple[Layout, dict[str, list[Block]], int]) -> None:
    layout, blocks, processes = island
    servers, times = vectors(layout), [[torch.zeros_like(g) for g in each] for each in vectors(layout)]
    for rank in range(processes):
        held = part_layout(layout, blocks, rank)
        sent = [[torch.full((n,), -1) for _, _, n in held.shard(server)] for server in range(layout.num_servers)]
        for piece in held.pieces(chunk=4):
            assert piece.length <= 4
            values = local(layout, held, blocks[layout.tensors[piece.tensor].name][rank], piece.tensor)
            place = slice(piece.offset, piece.offset + piece.length)
            sent[piece.server][piece.group][place] = values[piece.start : piece.start + piece.length]
        for server, groups in enumerate(sent):
            for group, (numbers, ranges) in enumerate(zip(groups, held.ranges(server), strict=True)):
                whole = servers[server][group]
                assert all(a < b for a, b in ranges)
                assert numbers.tolist() == [n for a, b in ranges for n in whole[a:b].tolist()]
                for a, b in ranges:
                    times[server][group][a:b] += 1
    assert all((group == 1).all() for each in times for group in each)


def test_processes_with_the_same_block_share_it_equally() -> None:
    layout = build_layout({"w": torch.zeros(4, 6, requires_grad=True)}.items(), 1)
    blocks = {"w": [Block((0, 0), (4, 6))] * 4}
    parts = [part_layout(layout, blocks, rank) for rank in range(4)]
    assert [part.ranges(0) for part in parts] == [(((0, 6),),), (((6, 12),),), (((12, 18),),), (((18, 24),),)]
    assert [part.shard_nbytes(0) for part in parts] == [24] * 4


def test_blocks_that_are_not_all_of_a_tensor_are_refused() -> None:
    layout = build_layout({"w": torch.zeros(4, 6, requires_grad=True)}.items(), 1)
    with pytest.raises(ConfigurationError, match="hold 12 scalars of 'w', which has 24"):
        part_layout(layout, {"w": [Block((0, 0), (2, 6)), Block((0, 0), (2, 6))]}, 0)
