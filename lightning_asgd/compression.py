"""Fewer bytes per exchange: lossy codes for vectors, with what is lost kept for the next time (error feedback).

What a worker pushes is ``code(update + residual)``, and ``residual`` becomes what the code has lost of that. So all
that is learnt arrives in the end, only later. Weights come back rounded (:class:`Cast`), while the servers and
optimizers keep theirs in full, or as coded differences to what the worker has been sent so far (:class:`Int8`,
:class:`TopK`), for which servers keep one vector per worker. At sync points all workers take the same bits: the
servers' weights but for what 16 bits lose of the change since the last one (``Common``).

References:
    Seide et al., "1-Bit Stochastic Gradient Descent" (2014), for error feedback; Karimireddy et al., "Error Feedback
    Fixes SignSGD" (2019); Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (2017), for top-k;
    Dettmers, "8-Bit Approximations for Parallelism" (2016), for scales of blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_asgd.algorithms.base import Configurable
from lightning_asgd.algorithms.settings import between, whole
from lightning_asgd.errors import ConfigurationError
from lightning_asgd.finite import is_finite
from lightning_asgd.messages import Groups, Role

__all__ = [
    "Cast",
    "Coded",
    "Common",
    "Compression",
    "Int8",
    "Streams",
    "TopK",
    "Updates",
    "Weights",
    "find",
    "nbytes",
    "streams",
]

Coded = Any
"""What is sent for one group: a tuple of tensors, or the tensor itself where nothing is compressed."""

_SAMPLE = 1 << 14  # values looked at to guess which are among the largest


class Compression(Configurable):
    """A code for vectors of floats."""

    differences: ClassVar[bool] = True
    """Whether weights come back as differences."""

    @property
    def factor(self) -> float:
        """Bytes of float32 values divided by those of the code."""
        raise NotImplementedError

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Code a vector.

        Args:
            values: shape ``(n,)``, finite; not changed.
        """
        raise NotImplementedError

    def decode(self, coded: tuple[Tensor, ...], out: Tensor) -> None:
        """Write what a code stands for.

        Args:
            coded: what :meth:`encode` returned.
            out: shape ``(n,)``.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Cast(Compression):
    """Half the bytes: values rounded to ``"bfloat16"`` or ``"float16"``.

    Args:
        dtype: one of the two.

    Raises:
        ConfigurationError: it is another.
    """

    dtype: str = "bfloat16"
    differences: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16"):
            raise ConfigurationError(f"Cast(dtype)={self.dtype!r}. Expected 'bfloat16' or 'float16'.")

    @property
    def factor(self) -> float:
        """See :class:`Compression`."""
        return 2.0

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Compression`."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        limit = torch.finfo(dtype).max
        return (values.clamp(-limit, limit).to(dtype) if self.dtype == "float16" else values.to(dtype),)

    def decode(self, coded: tuple[Tensor, ...], out: Tensor) -> None:
        """See :class:`Compression`."""
        out.copy_(coded[0])


@dataclass(frozen=True)
class Int8(Compression):
    """A quarter of the bytes: values as whole numbers from -127 to 127 times a scale of their block.

    Args:
        block: values that share a scale.

    Raises:
        ConfigurationError: it is below 1.
    """

    block: int = 256

    _type: ClassVar[torch.dtype] = torch.int8
    _limit: ClassVar[int] = 127

    def __post_init__(self) -> None:
        whole("Int8(block)", self.block, 1)

    @property
    def factor(self) -> float:
        """See :class:`Compression`."""
        return 4 / (1 + 4 / self.block)

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Compression`."""
        parts = [b for b in self._blocks(values) if b.numel()]
        scales = torch.cat([b.abs().amax(1, keepdim=True).float() / self._limit for b in parts])
        rounded = torch.empty(values.numel(), dtype=self._type)
        outs = [b for b in self._blocks(rounded) if b.numel()]
        for b, out, scale in zip(parts, outs, self._of(parts, scales), strict=True):
            # Where all are zero so is the scale.
            whole_numbers = (b / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_()
            out.copy_(whole_numbers.clamp_(-self._limit, self._limit))
        return rounded, scales.flatten()

    def decode(self, coded: tuple[Tensor, ...], out: Tensor) -> None:
        """See :class:`Compression`."""
        rounded, scales = coded
        parts = [b for b in self._blocks(rounded) if b.numel()]
        outs = [b for b in self._blocks(out) if b.numel()]
        for b, o, scale in zip(parts, outs, self._of(parts, scales[:, None]), strict=True):
            torch.mul(b, scale, out=o)

    def _blocks(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Whole blocks, shape ``(m, block)``, and the rest, shape ``(1, r)``."""
        end = values.numel() // self.block * self.block
        return values[:end].view(-1, self.block), values[end:].view(1, -1)

    @staticmethod
    def _of(parts: Sequence[Tensor], scales: Tensor) -> list[Tensor]:
        return list(torch.split(scales, [len(b) for b in parts]))


@dataclass(frozen=True)
class _Int16(Int8):
    """As :class:`Int8`, with 16 bits: what is lost is below that of bfloat16 for all but a block's smallest values."""

    _type: ClassVar[torch.dtype] = torch.int16
    _limit: ClassVar[int] = 32767


@dataclass(frozen=True)
class TopK(Compression):
    """The largest values only, with their places; about as many as asked for.

    Args:
        fraction: part of the values that is sent, above 0 and at most 0.5.

    Raises:
        ConfigurationError: it is out of range.
    """

    fraction: float = 0.05

    def __post_init__(self) -> None:
        between("TopK(fraction)", self.fraction, 0, 0.5, above=True)

    @property
    def factor(self) -> float:
        """See :class:`Compression`."""
        return 4 / (6 * self.fraction)  # four bytes for the place, two for the value

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Compression`."""
        size = values.abs()
        wanted = max(1, int(self.fraction * len(values)))
        step = max(1, len(values) // _SAMPLE)
        sample = size[::step]
        guess = sample.topk(max(1, min(len(sample), int(self.fraction * len(sample))))).values[-1]
        places = (size >= guess).nonzero().flatten()
        if not wanted / 2 <= len(places) <= wanted:
            # Also where most values are equal, such as zero.
            among = places if len(places) > wanted else torch.arange(len(values))
            places = among[size[among].topk(wanted).indices]
        return places.to(torch.int32), values[places].to(torch.bfloat16)

    def decode(self, coded: tuple[Tensor, ...], out: Tensor) -> None:
        """See :class:`Compression`."""
        places, values = coded
        out.zero_()
        out[places.long()] = values.to(out.dtype)


_NAMED = {"bf16": Cast("bfloat16"), "fp16": Cast("float16"), "int8": Int8(), "topk": TopK()}


def find(compression: Any) -> Compression | None:
    """The compression that a user means.

    Args:
        compression: an object, the name of one, or None.

    Raises:
        ConfigurationError: there is no such compression.
    """
    if compression is None or isinstance(compression, Compression):
        return compression
    if isinstance(compression, str) and compression in _NAMED:
        return _NAMED[compression]
    raise ConfigurationError(
        f"compression={compression!r} is unknown. Expected None, an object such as TopK(0.01), or one of the names "
        f"{', '.join(sorted(_NAMED))}."
    )


class Updates:
    """A stream of updates. What the code loses of one is added to the next.

    Args:
        compression: the code.
        groups: ``(role, dtype name, number of scalars)`` per group.
    """

    def __init__(self, compression: Compression, groups: Groups) -> None:
        self.compression = compression
        self._coded = [_is_coded(role, dtype) for role, dtype, _ in groups]
        self._residual: dict[int, Tensor] = {}

    def encode(self, buffers: Sequence[Tensor]) -> tuple[Coded, ...]:
        """Code an update.

        Args:
            buffers: one tensor per group; those that are coded are overwritten.
        """
        if not all(is_finite(buffer) for buffer in buffers):
            self.forget()  # the servers will refuse it
            return tuple(buffers)
        return tuple(self._encode(i, b) if self._coded[i] else b for i, b in enumerate(buffers))

    def decode(self, parts: Sequence[Coded], out: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What was coded, at the other end.

        Args:
            parts: per group.
            out: per group, memory for the result.
        """
        return tuple(_plain(self.compression, part, o) for part, o in zip(parts, out, strict=True))

    def forget(self) -> None:
        """Drop what was lost so far."""
        self._residual.clear()

    def _encode(self, group: int, buffer: Tensor) -> Coded:
        residual = self._residual.get(group)
        if residual is None:
            residual = self._residual[group] = torch.zeros_like(buffer)
        buffer.add_(residual)
        coded = self.compression.encode(buffer)
        self.compression.decode(coded, residual)
        torch.sub(buffer, residual, out=residual)
        return coded


class Weights:
    """A stream of weights, at one of its ends.

    Args:
        compression: the code.
        groups: see :class:`Updates`.
    """

    def __init__(self, compression: Compression, groups: Groups) -> None:
        self.compression = compression
        self._coded = [_is_coded(role, dtype) for role, dtype, _ in groups]
        self._known: dict[int, Tensor] = {}  # what both ends have, where differences are sent

    def encode(self, weights: Sequence[Tensor], *, full: bool = False) -> tuple[Coded, ...]:
        """Code weights.

        Args:
            weights: one tensor per group; not changed.
            full: send them as they are.
        """
        return tuple(self._encode(i, w, full) if self._coded[i] else w for i, w in enumerate(weights))

    def decode(self, parts: Sequence[Coded], out: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What was coded, at the other end; not to be changed.

        Args:
            parts: per group.
            out: per group, memory to work in.
        """
        values = [_plain(self.compression, part, o) for part, o in zip(parts, out, strict=True)]
        return tuple(self._decode(i, part, value) for i, (part, value) in enumerate(zip(parts, values, strict=True)))

    def hold(self, weights: Sequence[Tensor]) -> None:
        """Go on from weights that both ends have got in another way."""
        if self.compression.differences:
            self._known = {i: w.clone() for i, (w, coded) in enumerate(zip(weights, self._coded, strict=True)) if coded}

    def _encode(self, group: int, weights: Tensor, full: bool) -> Coded:
        if not self.compression.differences:
            return weights if full else self.compression.encode(weights)
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


class Common:
    """The weights that all workers take at sync points, at one end: what has changed since the last ones is sent.

    Both ends hold the last ones, and name them by a digest. They move on to the same bits at both: the last ones and
    the difference with 16 bits, an error of 1 / 65,534 of the largest change in a block, which does not add up. Whoever
    holds others is sent the new ones whole.

    Args:
        groups: see :class:`Updates`.
    """

    def __init__(self, groups: Groups) -> None:
        self.code = _Int16()
        self.coded = [_is_coded(role, dtype) for role, dtype, _ in groups]
        """Per group, whether it is."""
        self.values: tuple[Tensor, ...] | None = None
        """The last ones, per group; of those that are not coded what they were."""
        self.digest = ""
        """Name of them; empty where there are none."""
        self._before = ""  # the name of those before
        self._served = ""  # of the weights that these stand for
        self._difference: tuple[Coded, ...] = ()

    def hold(self, weights: Sequence[Tensor]) -> None:
        """Begin with some weights, which this end has of itself."""
        self.values = tuple(w.clone() for w in weights)
        self.digest = self._name(weights)

    def encode(self, weights: Sequence[Tensor], held: str) -> tuple[Coded, ...]:
        """Code the servers' weights for one who holds those of a name; per group nothing, a difference, or all.

        Args:
            weights: one tensor per group; not changed. As long as they stay the same, so does what they become.
            held: the name.
        """
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
        """The weights to take, at the other end; not to be changed.

        Args:
            parts: what :meth:`encode` returned.
            out: per group, memory to work in.
        """
        held = self.values or tuple(out)
        values = tuple(self._plain(*each) for each in zip(parts, held, out, strict=True))
        self.values = tuple(v.clone() if isinstance(p, Tensor) else v for v, p in zip(values, parts, strict=True))
        self.digest = self._name(self.values)
        return self.values

    def _moved(self, weights: Sequence[Tensor]) -> tuple[tuple[Coded, ...], tuple[Tensor, ...]]:
        """The difference, coded, from what is held to some weights, and what it leads to."""
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


class Streams(NamedTuple):
    """A worker's ends of what passes between it and a server."""

    updates: Updates
    weights: Weights
    common: Common

    @classmethod
    def of(cls, compression: Compression, groups: Groups) -> Streams:
        """New ones."""
        return cls(Updates(compression, groups), Weights(compression, groups), Common(groups))


def streams(compression: Compression | None, shards: Sequence[Groups], shared: Sequence[bool]) -> list[Streams | None]:
    """Per server, a worker's ends of the streams; None where nothing is compressed.

    Args:
        compression: the code, if any.
        shards: per server, its groups.
        shared: per server, whether what is exchanged with it lies in memory that both see.
    """
    return [
        None if compression is None or here else Streams.of(compression, groups)
        for groups, here in zip(shards, shared, strict=True)
    ]


def nbytes(parts: Sequence[Coded]) -> int:
    """Bytes that are sent."""
    return sum(part.nbytes if isinstance(part, Tensor) else sum(tensor.nbytes for tensor in part) for part in parts)


def _is_coded(role: Role, dtype: str) -> bool:
    return role is Role.PARAMETER and dtype in ("float32", "float64")


def _plain(compression: Compression, part: Coded, out: Tensor) -> Tensor:
    if isinstance(part, Tensor):
        return part
    compression.decode(part, out)
    return out
