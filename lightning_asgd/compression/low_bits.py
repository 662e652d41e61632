"""Codes of 4, 2 and 1 bits for updates: the next update carries what rounding has lost.

A code's value is a small whole number times the scale of its block. Vectors are coded a few blocks at a time, so that
intermediate results stay in a core's cache.

References:
    A. Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, section 2.3: E3M0.
    J. Max, "Quantizing for Minimum Distortion", 1960, table II: the best step of two bits, 0.9957 standard deviations.
    J. Bernstein et al., "signSGD", ICML 2018; S. P. Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019: one
    bit times the mean magnitude.

Departures:
    A scale belongs to a block of values, whereas the papers have one for a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy
import torch
from torch import Tensor

from lightning_asgd.compression.codes import Int8
from lightning_asgd.core.algorithms.compression import Compression, check_lengths
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import whole

_CHUNK = 1 << 17  # values that are coded at a time: half a MB
_DEVIATION = 1.25  # in mean magnitudes
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class _LowBits(Compression):
    """A few bits per value, and a scale per block."""

    block: int = 256

    bits: ClassVar[int]
    values: ClassVar[tuple[int, ...]]  # what each code stands for, in units of the block's scale

    def __post_init__(self) -> None:
        if whole(f"{type(self).__name__}(block)", self.block, 8) % 8:
            raise ConfigurationError(
                f"{type(self).__name__}(block={self.block}). Expected a multiple of 8: bytes hold values of one block."
            )

    @property
    def factor(self) -> float:
        """See :class:`Compression`."""
        return 32 / (self.bits + 32 / self.block)

    @property
    def downward(self) -> Compression:
        """See :class:`Compression`."""
        return Int8()

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Compression`."""
        blocks = -(-len(values) // self.block)
        scales = torch.empty(blocks, dtype=torch.float32)
        packed = torch.empty(blocks * self.block * self.bits // 8, dtype=torch.uint8)
        for chunk, scale, codes in self._chunks(values, scales, packed):
            whole_blocks = chunk.float()
            if rest := -len(chunk) % self.block:
                last = whole_blocks[rest - self.block :]
                whole_blocks = torch.nn.functional.pad(whole_blocks, (0, rest), value=float(last.abs().mean()))
            self._pack(self._encode(whole_blocks.view(-1, self.block), scale[:, None]), codes)
        return packed[: -(-len(values) * self.bits // 8)], scales

    def decode(self, coded: tuple[Tensor, ...], out: Tensor) -> None:
        """See :class:`Compression`."""
        packed, scales = coded
        check_lengths(self, coded, [-(-len(out) * self.bits // 8), -(-len(out) // self.block)])
        table = _TABLES[self.bits]
        for chunk, scale, codes in self._chunks(out, scales, packed):
            numbers = torch.index_select(table, 0, codes.int()).view(torch.int8)
            end = len(chunk) // self.block * self.block
            whole_blocks = numbers[:end].view(-1, self.block), scale[: end // self.block, None]
            torch.mul(*whole_blocks, out=chunk[:end].view(-1, self.block))
            if end < len(chunk):
                torch.mul(numbers[end : len(chunk)], scale[-1], out=chunk[end:])

    def _chunks(self, values: Tensor, scales: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Pieces of a vector with their scales and codes."""
        blocks = max(_CHUNK // self.block, 1)
        for first in range(0, len(scales), blocks):
            start, end = first * self.block, (first + blocks) * self.block
            yield (
                values[start:end],
                scales[first : first + blocks],
                packed[start * self.bits // 8 : end * self.bits // 8],
            )

    def _encode(self, x: Tensor, scale: Tensor) -> Tensor:
        """The codes of some blocks, one per byte. Writes their scales, shape ``(m, 1)``."""
        raise NotImplementedError

    def _pack(self, codes: Tensor, out: Tensor) -> None:
        """Put several codes into each byte, the first into the lowest bits."""
        raise NotImplementedError


@dataclass(frozen=True)
class Float4(_LowBits):
    """An eighth of the bytes: a sign and three bits of exponent, so 0 or a power of two from 1 / 64 to 1 times a scale.

    The scale is a block's largest magnitude. Values are rounded in proportion, to the nearest power of two.

    Args:
        block: values that share a scale, a multiple of 8.

    Raises:
        ConfigurationError: it is no such number.
    """

    bits: ClassVar[int] = 4
    values: ClassVar[tuple[int, ...]] = (0, 1, 2, 4, 8, 16, 32, 64, 0, -1, -2, -4, -8, -16, -32, -64)

    def _encode(self, x: Tensor, scale: Tensor) -> Tensor:
        torch.amax(x.abs(), 1, keepdim=True, out=scale)
        # In bfloat16 seven bits of mantissa follow the exponent. 0x4B lifts what is above the square root of 2 to the
        # next power of two. An exponent of 127 stands for 1.
        bits = (x * (1 / scale.clamp(min=_TINY))).bfloat16().view(torch.int16)
        codes = (bits & 0x7FFF).add_(0x4B).bitwise_right_shift_(7).sub_(120).clamp_(0, 7)
        codes |= bits.bitwise_right_shift_(12).bitwise_and_(8)
        scale /= 64
        return codes.to(torch.uint8)

    def _pack(self, codes: Tensor, out: Tensor) -> None:
        pairs = codes.view(-1).view(torch.int16)
        out.copy_(pairs | pairs >> 4)


@dataclass(frozen=True)
class Int2(_LowBits):
    """A fifteenth of the bytes: -3, -1, 1 or 3 times a scale, five eighths of the mean magnitude of a block.

    For normally distributed values the step, twice the scale, is one standard deviation, which is nearly the best.

    Args:
        block: values that share a scale, a multiple of 8.

    Raises:
        ConfigurationError: it is no such number.
    """

    bits: ClassVar[int] = 2
    values: ClassVar[tuple[int, ...]] = (-3, -1, 1, 3)

    def _encode(self, x: Tensor, scale: Tensor) -> Tensor:
        torch.sum(x.abs(), 1, keepdim=True, out=scale)  # squares would overflow
        scale *= _DEVIATION / self.block
        codes = (x * (1 / scale.clamp(min=_TINY))).floor_().add_(2).clamp_(0, 3).to(torch.int16)
        scale /= 2
        return codes.to(torch.uint8)  # in two steps: torch is slow from float32 to uint8

    def _pack(self, codes: Tensor, out: Tensor) -> None:
        fours = codes.view(-1).view(torch.int32)
        out.copy_(fours | fours >> 6 | fours >> 12 | fours >> 18)


@dataclass(frozen=True)
class Sign(_LowBits):
    """A twenty-eighth of the bytes: plus or minus the mean magnitude of a block.

    Args:
        block: values that share a scale, a multiple of 8.

    Raises:
        ConfigurationError: it is no such number.
    """

    bits: ClassVar[int] = 1
    values: ClassVar[tuple[int, ...]] = (-1, 1)

    def _encode(self, x: Tensor, scale: Tensor) -> Tensor:
        torch.sum(x.abs(), 1, keepdim=True, out=scale)
        scale /= self.block
        return torch.from_numpy(x.numpy() >= 0)

    def _pack(self, codes: Tensor, out: Tensor) -> None:
        numpy.copyto(out.numpy(), numpy.packbits(codes.view(-1).numpy(), bitorder="little"))


def _table(code: type[_LowBits]) -> Tensor:
    """What every byte stands for: 8 / bits numbers of 8 bits, as one number."""
    each = 8 // code.bits
    byte = torch.arange(256)
    numbers = [torch.tensor(code.values)[byte >> code.bits * place & len(code.values) - 1] for place in range(each)]
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[each]
    return torch.stack(numbers, dim=1).to(torch.int8).contiguous().view(kind).flatten()


_TABLES = {code.bits: _table(code) for code in (Float4, Int2, Sign)}
