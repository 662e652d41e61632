"""A worker's copy of the weights, seen as the servers' flat shards.

Per server and group there are two flat buffers beside the module's own tensors: ``base``, what this worker has agreed
with the servers so far, and ``wire``, what is sent and what comes back; on the servers' own machine ``wire`` lies in
memory they share. That makes two times the parameters' bytes; an answer by value adds a third while it is merged.

In terms of the module's weights *x* (all sums element-wise):

* :meth:`Replica.pack`: ``wire = x - base; base = x``.
* :meth:`Replica.merge` of an answer *r*: ``x += r - base; base = r``: steps taken since the push stay in *x* and are
  part of the next push (the *rebase* of asynchronous updates).
* :meth:`Replica.adopt`: ``x = base = r``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_asgd.errors import LayoutMismatchError
from lightning_asgd.layout import Layout, dtype_from_name
from lightning_asgd.messages import Role
from lightning_asgd.transport.shared_memory import SharedBlock

__all__ = ["Replica"]

_CHUNK = 1 << 18  # scalars per pass on a CPU: 1 MiB of float32, so that a temporary stays in the cache


@dataclass(frozen=True)
class _Run:
    tensor: int
    start: int
    stop: int
    server: int
    group: int
    offset: int
    role: Role
    base: Tensor


class Replica:
    """See the module's docstring.

    Args:
        layout: where each scalar lives.
        source: gives the module's tensors, in the layout's order. It is asked every time, since a program may put other
            tensors in their place. They are changed in place and may be strided.
        blocks: per server, a shared block, or None to send by value.
    """

    def __init__(
        self, layout: Layout, source: Callable[[], Sequence[Tensor]], blocks: Sequence[SharedBlock | None]
    ) -> None:
        self.layout = layout
        self._source = source
        self.device = source()[0].device
        self.blocks = list(blocks)
        self.wire: list[tuple[Tensor, ...]] = []
        base: list[tuple[Tensor, ...]] = []
        for server in range(layout.num_servers):
            shard = layout.shard(server)
            block = self.blocks[server]
            self.wire.append(
                block.tensors
                if block is not None
                else tuple(torch.empty(n, dtype=dtype_from_name(dtype)) for _, dtype, n in shard)
            )
            base.append(tuple(torch.empty(n, dtype=dtype_from_name(d), device=self.device) for _, d, n in shard))
        self._scratch: dict[torch.dtype, Tensor] = {}
        chunk = _CHUNK if self.device.type == "cpu" else None
        self._runs = [
            _Run(
                p.tensor,
                p.start,
                p.start + p.length,
                p.server,
                p.group,
                p.offset,
                layout.groups[p.group].role,
                base[p.server][p.group][p.offset : p.offset + p.length],
            )
            for p in layout.pieces(chunk)
        ]

    def drop_block(self, server: int) -> None:
        """Send by value to a server that cannot see the shared block."""
        block = self.blocks[server]
        if block is not None:
            self.wire[server] = tuple(torch.empty_like(t) for t in block.tensors)
            block.close()
            self.blocks[server] = None

    def updates(self) -> list[tuple[Tensor, ...] | None]:
        """Per server, what to put into the message: the wire buffers, or None where they are shared."""
        return [None if block is not None else wire for block, wire in zip(self.blocks, self.wire, strict=True)]

    def weights(self) -> list[tuple[Tensor, ...]]:
        """Per server, fresh tensors with the module's present values, to initialise the shards with."""
        shards = [
            tuple(torch.empty(n, dtype=dtype_from_name(d)) for _, d, n in self.layout.shard(s))
            for s in range(self.layout.num_servers)
        ]
        with torch.no_grad(), self._flat(write=False) as flat:
            for r in self._runs:
                x = flat[r.tensor][r.start : r.stop]
                shards[r.server][r.group][r.offset : r.offset + x.numel()].copy_(x)
        return shards

    def pack(self) -> None:
        """Put the update since the last :meth:`pack`, :meth:`merge` or :meth:`adopt` on the wire."""
        with torch.no_grad(), self._flat(write=False) as flat:
            for r in self._runs:
                x = flat[r.tensor][r.start : r.stop]
                wire = self.wire[r.server][r.group][r.offset : r.offset + x.numel()]
                if r.role is Role.LARGEST:
                    wire.copy_(x)
                elif x.device == wire.device:
                    torch.sub(x, r.base, out=wire)
                else:
                    wire.copy_(x - r.base)
                r.base.copy_(x)

    def merge(self, answers: Sequence[tuple[Tensor, ...]]) -> None:
        """Take the servers' weights and keep what was trained since the push.

        Args:
            answers: per server, one tensor per group; :attr:`wire` itself where it is shared.
        """
        with torch.no_grad(), self._flat(write=True) as flat:
            for r in self._runs:
                x = flat[r.tensor][r.start : r.stop]
                answer = answers[r.server][r.group][r.offset : r.offset + x.numel()].to(x.device)
                if r.role is Role.LARGEST:
                    torch.maximum(x, answer, out=x)
                else:
                    x.add_(torch.sub(answer, r.base, out=self._scratch_for(x)))
                r.base.copy_(answer)

    def _scratch_for(self, x: Tensor) -> Tensor:
        scratch = self._scratch.get(x.dtype)
        if scratch is None or scratch.numel() < x.numel():
            scratch = self._scratch[x.dtype] = torch.empty_like(x)
        return scratch[: x.numel()]

    def adopt(self, answers: Sequence[tuple[Tensor, ...]]) -> None:
        """Take the servers' weights as they are; see :meth:`merge` for the argument."""
        with torch.no_grad(), self._flat(write=True) as flat:
            for r in self._runs:
                x = flat[r.tensor][r.start : r.stop]
                x.copy_(answers[r.server][r.group][r.offset : r.offset + x.numel()])
                r.base.copy_(x)

    def read(self, answers: Sequence[tuple[Tensor, ...]]) -> dict[str, Tensor]:
        """The servers' weights as named tensors, without touching the module.

        Args:
            answers: see :meth:`merge`.

        Returns:
            fresh CPU tensors by name.
        """
        values = [
            torch.empty(spec.shape, dtype=dtype_from_name(self.layout.groups[spec.group].dtype))
            for spec in self.layout.tensors
        ]
        for r in self._runs:
            n = r.stop - r.start
            values[r.tensor].view(-1)[r.start : r.stop].copy_(answers[r.server][r.group][r.offset : r.offset + n])
        return {spec.name: value for spec, value in zip(self.layout.tensors, values, strict=True)}

    def close(self) -> None:
        """Give the shared memory back."""
        self.wire = []
        for block in self.blocks:
            if block is not None:
                block.close()

    @contextmanager
    def _flat(self, *, write: bool) -> Iterator[list[Tensor]]:
        """The module's tensors as flat ones; strided tensors are copied, and written back if ``write``."""
        tensors = self._source()
        for tensor, spec in zip(tensors, self.layout.tensors, strict=True):
            if tensor.shape != spec.shape:
                raise LayoutMismatchError(
                    f"{spec.name!r} was replaced by a tensor of shape {tuple(tensor.shape)}. Expected {spec.shape}, as "
                    "when fit began: change shapes before fit, or in configure_model()."
                )
        flat = [t.detach().reshape(-1) for t in tensors]
        yield flat
        if write:
            for tensor, values in zip(tensors, flat, strict=True):
                if not tensor.is_contiguous():
                    tensor.detach().copy_(values.view(tensor.shape))
