"""Which scalars of a module each process of an island exchanges with the servers. Pure: no network, no process group.

A process holds a *block* of every tensor: all of it under DDP, a part of it where the tensor is sharded. Processes that
hold the same block exchange equal parts of it. So each scalar travels once, whatever the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.layout import Groups, Layout, Piece, TensorSpec, nbytes_of
from lightning_asgd.core.worker.replica_spans import Place, places_of


def is_sharded(tensor: Tensor) -> bool:
    """Whether a process holds a part of it only."""
    return hasattr(tensor, "placements")


def block_of(name: str, tensor: Tensor) -> Block:
    """The block of a tensor that this process holds. Raises a :class:`ConfigurationError` if it is in no one place."""
    if not is_sharded(tensor):
        return Block((0,) * tensor.ndim, tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    shape, begin = compute_local_shape_and_global_offset(tensor.shape, sharded.device_mesh, sharded.placements)
    local = tuple(sharded.to_local().shape)
    if local != tuple(shape) and 0 not in local:
        raise ConfigurationError(
            f"Parameter {name!r} is placed as {sharded.placements}: this process holds a block of shape {local}. "
            f"Expected {tuple(shape)}, as with Shard and Replicate placements that cut each dimension once. "
            "Shard it with fully_shard or parallelize_module, or leave it whole."
        )
    return Block(tuple(begin), local)


class _Local:
    """A module's tensors as this process holds them, by key."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = tensors

    def __getitem__(self, key: str) -> Any:
        tensor = self._tensors[key]
        return _LocalTensor(tensor) if is_sharded(tensor) else tensor


class _LocalTensor:
    """A sharded parameter's values and gradient on this process."""

    def __init__(self, tensor: Any) -> None:
        with torch.no_grad():
            self.data = tensor.to_local()
        self.device = self.data.device
        self._tensor = tensor

    @property
    def grad(self) -> Tensor | None:
        """This process's part of the gradient."""
        gradient: Any = self._tensor.grad
        local: Tensor | None = gradient.to_local() if gradient is not None and is_sharded(gradient) else gradient
        return local


def local_places(module: Module, layout: Layout) -> list[Place]:
    """Where this process keeps its blocks of a layout's tensors."""
    return [(_Local(container), key) for container, key in places_of(module, layout)]


def reshard(modules: Iterable[Module]) -> None:
    """Have FSDP free the whole parameters that it keeps between two forwards: they would hide changes to the blocks."""
    for module in modules:
        sharded: Any = module
        if hasattr(module, "set_requires_gradient_sync") and hasattr(module, "reshard"):
            sharded.reshard()


@dataclass(frozen=True)
class Block:
    """A part of a tensor that one process holds: where it begins in each dimension, and its shape."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Scalars in it."""
        return math.prod(self.shape)

    def runs(self, whole: tuple[int, ...], first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Scalars ``first`` to ``last`` of the flattened block, as runs that are contiguous in the ``whole`` tensor.

        Each is its beginning in the block, its beginning in the whole tensor, and its length.
        """
        if first >= last:
            return
        partial = [d for d, n in enumerate(whole) if self.shape[d] != n]
        cut = max(partial, default=0)  # all dimensions after it are whole
        length = math.prod(self.shape[cut:])
        for number in range(first // length, -(-last // length)):
            rest, place, stride = number, 0, math.prod(whole[cut:])
            for d in reversed(range(cut)):
                rest, index = divmod(rest, self.shape[d])
                place += (self.begin[d] + index) * stride
                stride *= whole[d]
            if whole:
                place += self.begin[cut] * math.prod(whole[cut + 1 :])
            a, b = max(first, number * length), min(last, (number + 1) * length)
            yield a, place + a - number * length, b - a


@dataclass(frozen=True)
class HeldRun:
    """Scalars that are contiguous in a process's block of a tensor, and in the tensor."""

    tensor: int  # its index in the layout
    start: int  # first scalar in the flattened block
    place: int  # first scalar in the flattened tensor
    length: int


@dataclass(frozen=True)
class PartLayout:
    """What one process exchanges, in the form of a :class:`~lightning_asgd.core.foundation.layout.Layout` of its own.

    A shard is here what the process exchanges with that server: its runs, one after the other.
    """

    whole: Layout
    blocks: tuple[tuple[int, ...], ...]  # the shape of the process's block of each tensor
    runs: tuple[HeldRun, ...]  # in the order of the whole layout

    @property
    def groups(self) -> tuple[object, ...]:
        """Those of the whole layout; the numbers of their scalars too."""
        return self.whole.groups

    @property
    def num_servers(self) -> int:
        """How many there are."""
        return self.whole.num_servers

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors with the shapes that this process holds."""
        return tuple(
            TensorSpec(spec.name, shape, spec.group, spec.offset, math.prod(shape))
            for spec, shape in zip(self.whole.tensors, self.blocks, strict=True)
        )

    def shard(self, server: int) -> Groups:
        """``(role, dtype name, number of scalars)`` per group."""
        sizes = (sum(last - first for first, last in each) for each in self.ranges(server))
        return tuple((g.role, g.dtype, n) for g, n in zip(self.whole.groups, sizes, strict=True))

    @property
    def widths(self) -> tuple[int, ...]:
        """None: islands exchange tables as any other parameters."""
        return ()

    def shard_nbytes(self, server: int) -> int:
        """Bytes that the process exchanges with a server, each way."""
        return nbytes_of(self.shard(server))

    def ranges(self, server: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per group, the ranges of the server's shard that this process exchanges."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.whole.groups]
        for piece, place in self._placed(None):
            if piece.server == server:
                ranges = found[piece.group]
                if ranges and ranges[-1][1] == place:
                    ranges[-1] = (ranges[-1][0], place + piece.length)
                else:
                    ranges.append((place, place + piece.length))
        return tuple(map(tuple, found))

    def pieces(self, chunk: int | None = None) -> Iterator[Piece]:
        """The runs, cut at the servers' boundaries and into at most ``chunk`` scalars; offsets are in :meth:`shard`."""
        return (piece for piece, _ in self._placed(chunk))

    def _placed(self, chunk: int | None) -> Iterator[tuple[Piece, int]]:
        """The pieces, and where each begins in the server's own shard."""
        filled: dict[tuple[int, int], int] = {}
        for run in self.runs:
            spec = self.whole.tensors[run.tensor]
            place, start, left = spec.offset + run.place, run.start, run.length
            while left:
                server = self.whole.server_of(spec.group, place)
                first, last = self.whole.bounds(server, spec.group)
                length = min(left, last - place, chunk or left)
                offset = filled.get((server, spec.group), 0)
                yield Piece(run.tensor, start, length, server, spec.group, offset), place - first
                filled[server, spec.group] = offset + length
                place, start, left = place + length, start + length, left - length


def holders_of(blocks: Sequence[Block], rank: int) -> list[int]:
    """The processes that hold the same block of a tensor as one of them."""
    return [other for other, block in enumerate(blocks) if block == blocks[rank]]


def part_layout(layout: Layout, blocks: Mapping[str, Sequence[Block]], rank: int) -> PartLayout:
    """What process ``rank`` of an island exchanges; ``blocks`` are those of all its processes, by tensor.

    Raises a :class:`ConfigurationError` if the blocks of a tensor are not all of it.
    """
    runs: list[HeldRun] = []
    for index, spec in enumerate(layout.tensors):
        held = blocks[spec.name]
        distinct = {block for block in held if block.numel}
        if sum(block.numel for block in distinct) != spec.numel:
            raise ConfigurationError(
                f"The processes of this island hold {sum(block.numel for block in distinct)} scalars of {spec.name!r}, "
                f"which has {spec.numel}. Expected every scalar in one block: shard parameters along whole dimensions, "
                "with fully_shard or parallelize_module."
            )
        same, block = holders_of(held, rank), held[rank]
        place, n = same.index(rank), block.numel
        first, last = n * place // len(same), n * (place + 1) // len(same)
        runs += [HeldRun(index, *run) for run in block.runs(spec.shape, first, last)]
    return PartLayout(layout, tuple(blocks[spec.name][rank].shape for spec in layout.tensors), tuple(runs))
