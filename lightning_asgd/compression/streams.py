"""The state of compressed exchanges: each end remembers what the other end has received.

A worker pushes ``code(update + residual)``, and ``residual`` becomes what the code lost (error feedback), so every part
of an update arrives eventually. Servers and optimizers keep weights in full precision. Servers send them rounded, or as
coded differences from what the worker has received so far, for which they keep one vector per worker. At sync points
all workers receive the same bits: the servers' weights, less what 16 bits lose of the change since the last sync point
(:class:`SyncPointCodec`).

References:
    Seide et al., "1-Bit Stochastic Gradient Descent" (2014), for error feedback; Karimireddy et al., "Error Feedback
    Fixes SignSGD" (2019).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_asgd.compression.codes import Int8
from lightning_asgd.core.algorithms.compression import Compression, is_coded
from lightning_asgd.core.foundation.layout import Groups
from lightning_asgd.core.foundation.numerics import MAX_UPDATE, is_finite, largest

Coded = Any
"""What is sent for one group: a tuple of tensors, or the tensor itself where nothing is compressed."""


@dataclass(frozen=True)
class _Int16(Int8):
    """As :class:`Int8`, with 16 bits: what is lost is below that of bfloat16 for all but a block's smallest values."""

    _type: ClassVar[torch.dtype] = torch.int16
    _limit: ClassVar[int] = 32767


class Updates:
    """A stream of updates. What the code loses of one is added to the next.

    ``kept`` is the part of a pushed update that stays in the worker's weights: its next update holds it again.
    """

    def __init__(self, compression: Compression, groups: Groups, kept: float = 0.0) -> None:
        self.compression, self._kept = compression, kept
        self._coded = [is_coded(role, dtype) for role, dtype, _ in groups]
        self._residual: dict[int, Tensor] = {}
        self._before: dict[int, Tensor] = {}  # the residuals before the latest update

    def encode(self, buffers: Sequence[Tensor]) -> tuple[Coded, ...]:
        """Code an update, one tensor per group; those that are coded are overwritten."""
        if not all(largest(b) <= MAX_UPDATE if c else is_finite(b) for b, c in zip(buffers, self._coded, strict=True)):
            self._before.clear()  # the servers judge it as it is: a code may clamp it
            return tuple(buffers)
        return tuple(self._encode(i, b) if self._coded[i] else b for i, b in enumerate(buffers))

    def decode(self, parts: Sequence[Coded], out: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Decode what :meth:`encode` returned, into the tensors of ``out``."""
        return tuple(_plain(self.compression, part, o) for part, o in zip(parts, out, strict=True))

    def take_back(self) -> None:
        """Restore the residuals from before the latest update, which was not applied."""
        self._residual.update(self._before)
        self._before.clear()

    def _encode(self, group: int, buffer: Tensor) -> Coded:
        before, after = (each.get(group) for each in (self._residual, self._before))
        before = torch.zeros_like(buffer) if before is None else before
        after = torch.empty_like(buffer) if after is None else after
        buffer.add_(before, alpha=self.compression.decay)
        coded = self.compression.encode(buffer)
        self.compression.decode(coded, after)
        torch.sub(buffer, after, out=after)
        if self._kept:
            after.mul_(1 - self._kept).add_(before, alpha=self._kept * self.compression.decay)
        self._residual[group], self._before[group] = after, before
        return coded


class Weights:
    """A stream of weights, at one of its ends."""

    def __init__(self, compression: Compression, groups: Groups) -> None:
        self.compression = compression
        self._coded = [is_coded(role, dtype) for role, dtype, _ in groups]
        self._known: dict[int, Tensor] = {}  # what both ends have, where differences are sent

    def encode(self, weights: Sequence[Tensor], *, full: bool = False) -> tuple[Coded, ...]:
        """Code weights, one tensor per group; with ``full`` as they are. They are not changed."""
        return tuple(self._encode(i, w, full) if self._coded[i] else w for i, w in enumerate(weights))

    def decode(self, parts: Sequence[Coded], out: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Decode what :meth:`encode` returned; ``out`` is scratch memory. The result must not be changed."""
        values = [_plain(self.compression, part, o) for part, o in zip(parts, out, strict=True)]
        return tuple(self._decode(i, part, value) for i, (part, value) in enumerate(zip(parts, values, strict=True)))

    def hold(self, weights: Sequence[Tensor]) -> None:
        """Continue from weights that both ends already have."""
        if self.compression.differences:
            self._known = {i: w.clone() for i, (w, coded) in enumerate(zip(weights, self._coded, strict=True)) if coded}

    def _encode(self, group: int, weights: Tensor, full: bool) -> Coded:
        if not self.compression.differences:
            return self.compression.encode(weights) if not full and self.compression.holds(weights) else weights
        known = self._known.get(group)
        if known is None or full:
            self._known[group] = weights.clone()
            return weights
        coded = self.compression.encode(weights - known)
        difference = torch.empty_like(weights)
        self.compression.decode(coded, difference)
        known.add_(difference)
        return coded

    def _decode(self, group: int, part: Coded, value: Tensor) -> Tensor:
        if not self._coded[group] or not self.compression.differences:
            return value
        if isinstance(part, Tensor):
            self._known[group] = value.clone()
        else:
            self._known[group].add_(value)
        return self._known[group]


class SyncPointCodec:
    """One end of the codec for sync points: it sends the change since the weights of the last sync point.

    Both ends hold the weights of the last sync point, named by a digest. Both then take the same new bits: the last
    weights plus the difference with 16 bits, an error of 1 / 65,534 of the largest change in a block, which does not
    accumulate. A worker that holds other weights is sent the new ones whole.
    """

    def __init__(self, groups: Groups) -> None:
        self.code = _Int16()
        self.coded = [is_coded(role, dtype) for role, dtype, _ in groups]
        """Per group, whether it is coded."""
        self.values: tuple[Tensor, ...] | None = None
        """The last weights, per group; groups that are not coded keep the weights as they were sent."""
        self.digest = ""
        """Their digest; empty if there are none."""
        self._before = ""  # the digest of the weights before
        self._served = ""  # digest of the weights that these encode
        self._difference: tuple[Coded, ...] = ()

    def hold(self, weights: Sequence[Tensor]) -> None:
        """Begin with some weights, which this end has of itself."""
        self.values = tuple(w.clone() for w in weights)
        self.digest = self._name(weights)

    def encode(self, weights: Sequence[Tensor], held: str) -> tuple[Coded, ...]:
        """Code the servers' weights for a worker that holds those named ``held``: nothing, a difference, or all."""
        values = self.take(weights)
        rest = self._difference if held == self._before else values
        return tuple(
            w if not coded else () if held == self.digest else part
            for part, w, coded in zip(rest, weights, self.coded, strict=True)
        )

    def take(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What all take for the servers' weights; not to be changed."""
        name = self._name(weights)
        if self.values is None or name != self._served:
            self._before, self._served = self.digest, name
            self._difference, self.values = self._moved(weights)
            self.digest = self._name(self.values)
        return self.values

    def decode(self, parts: Sequence[Coded], out: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Decode what :meth:`encode` returned; ``out`` is scratch memory. The result must not be changed."""
        held = self.values or tuple(out)
        values = tuple(self._plain(*each) for each in zip(parts, held, out, strict=True))
        self.values = tuple(v.clone() if isinstance(p, Tensor) else v for v, p in zip(values, parts, strict=True))
        self.digest = self._name(self.values)
        return self.values

    def _moved(self, weights: Sequence[Tensor]) -> tuple[tuple[Coded, ...], tuple[Tensor, ...]]:
        """The coded difference between the held weights and the given ones, and the decoded result."""
        if self.values is None:
            values = tuple(w.clone() for w in weights)
            return values, values
        difference = tuple(
            self.code.encode(w - held) if coded else w.clone()
            for w, held, coded in zip(weights, self.values, self.coded, strict=True)
        )
        out = [torch.empty_like(w) for w in weights]
        return difference, tuple(self._plain(*each) for each in zip(difference, self.values, out, strict=True))

    def _plain(self, part: Coded, held: Tensor, out: Tensor) -> Tensor:
        if isinstance(part, Tensor):
            return part
        if not part:
            return held
        self.code.decode(part, out)
        return held + out

    def _name(self, values: Sequence[Tensor]) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for value, coded in zip(values, self.coded, strict=True):
            if coded:
                digest.update(value.contiguous().numpy().data)
        return digest.hexdigest()


class CodecState(NamedTuple):
    """A worker's ends of what passes between it and a server."""

    updates: Updates
    weights: Weights
    common: SyncPointCodec

    @classmethod
    def of(cls, compression: Compression, groups: Groups, kept: float = 0.0) -> CodecState:
        """New ones; for ``kept`` see :class:`Updates`."""
        return cls(Updates(compression, groups, kept), Weights(compression.downward, groups), SyncPointCodec(groups))


def streams(
    compression: Compression | None, shards: Sequence[Groups], shared: Sequence[bool], kept: float = 0.0
) -> list[CodecState | None]:
    """A worker's codec state per server; None where nothing is compressed, or memory is shared."""
    return [
        None if compression is None or here else CodecState.of(compression, groups, kept)
        for groups, here in zip(shards, shared, strict=True)
    ]


def _plain(compression: Compression, part: Coded, out: Tensor) -> Tensor:
    if isinstance(part, Tensor):
        return part
    compression.decode(part, out)
    return out
