"""Which scalar of which tensor lives on which server, and what a flat vector of them looks like.

A layout is computed from a module's tensors alone, so every worker computes the same one. Tensors of the same dtype
and :class:`Role` form a *group*: one flat vector. Each group is cut into as many contiguous ranges as there are
servers, so every server holds an equal share of the bytes whatever the dtypes are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from lightning_asgd.core.foundation.errors import ConfigurationError, LayoutMismatchError, ProtocolError


class Role(str, Enum):
    """How a server combines what the workers send for a group of tensors."""

    PARAMETER = "parameter"
    """The algorithm says."""
    ROWS = "rows"
    """As a parameter, and an update holds only the rows that a worker has changed (tables of embeddings)."""


Groups = tuple[tuple[Role, str, int], ...]
"""What a vector consists of: per group of tensors its role, dtype name and number of scalars."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the module and its place: scalars ``offset : offset + numel`` of group ``group``."""

    name: str
    shape: tuple[int, ...]
    group: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Group:
    """All tensors of one dtype and role, and of tables of one width; ``numel`` scalars in all."""

    role: Role
    dtype: str
    numel: int
    width: int = 1  # scalars that stay together on a server: of a table those of a row


@dataclass(frozen=True)
class Piece:
    """A run of scalars that is contiguous in its tensor and on its server."""

    tensor: int  # index of the tensor in the layout
    start: int  # first scalar within the flattened tensor
    length: int  # number of scalars
    server: int  # server that holds them
    group: int  # group they belong to
    offset: int  # first scalar within the server's range of that group


@dataclass(frozen=True)
class Layout:
    """The place of every tensor; see the module's docstring."""

    groups: tuple[Group, ...]
    tensors: tuple[TensorSpec, ...]
    num_servers: int

    def bounds(self, server: int, group: int) -> tuple[int, int]:
        """First and one-past-last scalar of ``group`` on ``server``."""
        width = self.groups[group].width
        n = self.groups[group].numel // width
        return width * (server * n // self.num_servers), width * ((server + 1) * n // self.num_servers)

    @property
    def widths(self) -> tuple[int, ...]:
        """Scalars of a row, of each group of tables."""
        return tuple(g.width for g in self.groups if g.role is Role.ROWS)

    def shard(self, server: int) -> Groups:
        """``(role, dtype name, number of scalars)`` per group of the shard on ``server``."""
        sizes = (self.bounds(server, g) for g in range(len(self.groups)))
        return tuple((g.role, g.dtype, stop - start) for g, (start, stop) in zip(self.groups, sizes, strict=True))

    def named(self, server: int) -> tuple[tuple[tuple[str, int], ...], ...]:
        """``(name, number of scalars)`` of every tensor that the shard on ``server`` holds a part of, per group."""
        named: list[list[tuple[str, int]]] = [[] for _ in self.groups]
        for piece in self.pieces():
            if piece.server == server:
                named[piece.group].append((self.tensors[piece.tensor].name, piece.length))
        return tuple(map(tuple, named))

    def shard_nbytes(self, server: int) -> int:
        """Bytes of the shard on ``server``."""
        return nbytes_of(self.shard(server))

    @property
    def nbytes(self) -> int:
        """Bytes of all shards together."""
        return sum(self.shard_nbytes(s) for s in range(self.num_servers))

    def pieces(self, chunk: int | None = None) -> Iterator[Piece]:
        """Cut every tensor at the servers' boundaries, and into runs of at most ``chunk`` scalars."""
        for index, spec in enumerate(self.tensors):
            position = spec.offset
            end = spec.offset + spec.numel
            while position < end:
                server = self.server_of(spec.group, position)
                start, stop = self.bounds(server, spec.group)
                length = min(end, stop) - position
                if chunk is not None:
                    length = min(length, chunk)
                yield Piece(index, position - spec.offset, length, server, spec.group, position - start)
                position += length

    def server_of(self, group: int, position: int) -> int:
        """The server that holds a scalar of ``group``."""
        n = self.groups[group].numel
        server = position * self.num_servers // n
        # Integer division may land one off; the ranges decide.
        while position >= self.bounds(server, group)[1]:
            server += 1
        while position < self.bounds(server, group)[0]:
            server -= 1
        return server

    def describe(self) -> tuple[tuple[str, tuple[int, ...], str, str], ...]:
        """``(name, shape, dtype, role)`` of every tensor, to compare workers by."""
        return tuple((t.name, t.shape, (g := self.groups[t.group]).dtype, g.role.value) for t in self.tensors)

    def check_same(self, other: tuple[tuple[str, tuple[int, ...], str, str], ...], mine: str, theirs: str) -> None:
        """Compare with another worker's :meth:`describe`."""
        ours = self.describe()
        if ours == other:
            return
        remedy = "Build the same module on every worker: check code that depends on the rank, the seed or the data."
        for a, b in zip(ours, other, strict=False):
            if a != b:
                raise LayoutMismatchError(
                    f"The modules of {mine} and {theirs} differ: {mine} has {_show(a)} where {theirs} has {_show(b)}. "
                    f"Expected the same tensors in the same order. {remedy}"
                )
        longer, name, other_name = (ours, mine, theirs) if len(ours) > len(other) else (other, theirs, mine)
        raise LayoutMismatchError(
            f"The modules of {mine} and {theirs} differ: {name} has {_show(longer[min(len(ours), len(other))])}, "
            f"which {other_name} lacks. Expected the same tensors in the same order. {remedy}"
        )


def _show(entry: tuple[str, tuple[int, ...], str, str]) -> str:
    name, shape, dtype, _ = entry
    return f"{name!r} of shape {shape} and dtype {dtype}"


def build_layout(parameters: Iterable[tuple[str, Tensor]], num_servers: int, tables: Collection[str] = ()) -> Layout:
    """Lay out trainable parameters over servers. ``tables`` are matrices exchanged by rows, whose groups come last."""
    trained = [(name, t, Role.ROWS if name in tables else Role.PARAMETER) for name, t in parameters if t.numel()]
    named = [each for each in trained if each[2] is Role.PARAMETER]
    if not trained:
        raise ConfigurationError(
            "The module has no trainable parameter: 0 parameters with requires_grad=True. Expected at least one. "
            "Define layers in the LightningModule's __init__ or configure_model, or unfreeze some."
        )
    named += [each for each in trained if each[2] is Role.ROWS]
    index: dict[tuple[Role, torch.dtype, int], int] = {}
    sizes: list[int] = []
    specs: list[TensorSpec] = []
    for name, t, role in named:
        if t.layout != torch.strided:
            raise ConfigurationError(
                f"Tensor {name!r} has layout {t.layout}. Expected a dense tensor. Convert it with .to_dense()."
            )
        group = index.setdefault((role, t.dtype, t.shape[1] if role is Role.ROWS else 1), len(index))
        if group == len(sizes):
            sizes.append(0)
        specs.append(TensorSpec(name, tuple(t.shape), group, sizes[group], t.numel()))
        sizes[group] += t.numel()
    trainable = sum(t.numel() for _, t, _ in trained)
    if num_servers > trainable:
        raise ConfigurationError(
            f"num_servers={num_servers} is more than the module's {trainable} trainable scalars. "
            f"Expected at most one server per scalar. Lower num_servers."
        )
    groups = tuple(Group(role, dtype_name(dtype), n, k) for (role, dtype, k), n in zip(index, sizes, strict=True))
    return Layout(groups, tuple(specs), num_servers)


def nbytes_of(groups: Groups) -> int:
    """Bytes of a vector."""
    return sum(n * dtype_from_name(dtype).itemsize for _, dtype, n in groups)


def dense(groups: Groups) -> Groups:
    """The groups that are exchanged whole: all but those of tables, which come last."""
    return tuple(group for group in groups if group[0] is not Role.ROWS)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"Unknown dtype {name!r}. Expected a torch dtype such as 'float32'.")
    return dtype


def check_form(tensors: Sequence[Tensor], groups: Groups) -> None:
    """Raise unless tensors that a worker sent are those of a shard's groups."""
    got = tuple((str(t.dtype).removeprefix("torch."), t.numel()) for t in tensors)
    expected = tuple((dtype, n) for _, dtype, n in groups)
    if got != expected:
        raise ProtocolError(
            f"A shard was sent tensors of (dtype, scalars) {got}. Expected {expected}. "
            "All workers and servers of a run must use the same module and version of this package."
        )
