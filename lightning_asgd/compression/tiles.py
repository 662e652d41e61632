"""SparseLoCo's code: the largest values of every tile, with two bits each.

References:
    A. Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706.

Departures:
    A tile is 4,096 consecutive values of a shard, and not 64 x 64 values of a matrix: servers know no matrices.
    Magnitudes are compared by their first twelve binary digits. The two bits are the sign, and whether the magnitude is
    above the mean of the tile's sent magnitudes; each of these two classes is decoded as its own mean. The paper has
    one table of values for a parameter. If a tile has fewer nonzero values than are sent, its largest value is
    repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy
import torch
from torch import Tensor

from lightning_asgd.compression.codes import Cast
from lightning_asgd.core.algorithms.compression import Compression, check_lengths
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import between, whole

_TILE = 4096  # a place in it has 12 bits
_MAGNITUDE = 0x7FFFF000  # the bits of a float that are compared; a place takes the other 12
_AT_ONCE = 32  # tiles that are coded at a time: half a MB


@dataclass(frozen=True)
class TopTiles(Compression):
    """The largest values of every 4,096, with 14 bits each: 0.44 bit per parameter.

    Args:
        largest: number of values of a tile that are sent, even: 128 are 3.1 %.
        residual_decay: the fraction of a push's residual that is added to the next push.

    Raises:
        ConfigurationError: a value is out of range.
    """

    largest: int = 128
    residual_decay: float = 0.95

    differences: ClassVar[bool] = False

    def __post_init__(self) -> None:
        between("TopTiles(residual_decay)", self.residual_decay, 0, 1)
        if not 2 <= whole("TopTiles(largest)", self.largest, 2) <= _TILE or self.largest % 2:
            raise ConfigurationError(f"TopTiles(largest={self.largest}). Expected an even number from 2 to {_TILE}.")

    @property
    def factor(self) -> float:
        """See :class:`Compression`."""
        return 32 * _TILE / (14 * self.largest + 32)

    @property
    def decay(self) -> float:
        """See :class:`Compression`."""
        return self.residual_decay

    @property
    def downward(self) -> Compression:
        """See :class:`Compression`. Servers keep nothing for it."""
        return Cast("bfloat16")

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Compression`. The values are finite."""
        tiles = -(-len(values) // _TILE)
        places = torch.empty(tiles, self.largest, dtype=torch.int16)
        sent = torch.empty(tiles, self.largest, dtype=torch.float32)
        keys = torch.empty(_AT_ONCE, _TILE, dtype=torch.int32)
        columns = torch.arange(_TILE, dtype=torch.int32)
        for first in range(0, tiles, _AT_ONCE):
            some = values[first * _TILE : (first + _AT_ONCE) * _TILE].float()
            if rest := -len(some) % _TILE:
                some = torch.nn.functional.pad(some, (0, rest))
            some = some.view(-1, _TILE)
            key = torch.bitwise_and(some.view(torch.int32), _MAGNITUDE, out=keys[: len(some)]).bitwise_or_(columns)
            found = _places_of_largest(key, self.largest)
            places[first : first + _AT_ONCE] = found
            torch.gather(some, 1, found, out=sent[first : first + _AT_ONCE])
        size = sent.abs()
        found, total = (size > 0).float().sum(1), size.sum(1)
        large = (size > (total / found)[:, None]).float()
        above, number = (size * large).sum(1), large.sum(1)
        below = (total - above) / (found - number).clamp(min=1)
        means = torch.stack([below, above / number.clamp(min=1)], dim=1).bfloat16()
        if tiles and found.min() < self.largest:
            top = torch.where(size > 0, torch.arange(self.largest), size.argmax(1, keepdim=True))
            places, sent, large = (each.gather(1, top) for each in (places, sent, large))
        return _pack_places(places), _pack_bits(sent < 0), _pack_bits(large > 0), means

    def decode(self, coded: tuple[Tensor, ...], out: Tensor) -> None:
        """See :class:`Compression`."""
        packed, signs, large, means = coded
        shape = -(-len(out) // _TILE), self.largest
        sent = shape[0] * shape[1]
        nbytes = -(-sent // 8)
        check_lengths(self, (packed, signs, large, means.flatten()), [sent * 3 // 2, nbytes, nbytes, 2 * shape[0]])
        places = _unpack_places(packed).view(shape).long()
        size = means.view(-1, 2).to(out.dtype).gather(1, _unpack_bits(large, shape).long())
        size = torch.where(_unpack_bits(signs, shape).bool(), -size, size)
        whole = len(out) // _TILE
        out.zero_()
        out[: whole * _TILE].view(-1, _TILE).scatter_(1, places[:whole], size[:whole])
        if whole < shape[0]:  # the last tile's places may lie beyond the end
            last = out.new_zeros(_TILE).scatter_(0, places[-1], size[-1])
            out[whole * _TILE :] = last[: len(out) % _TILE]


def _places_of_largest(keys: Tensor, number: int) -> Tensor:
    """The columns of the largest ``number`` keys of each row. They lie in the groups with the largest maxima."""
    groups = min(_TILE, 4 << (number - 1).bit_length())
    grouped = keys.view(len(keys), -1, groups)
    some = _largest(grouped.amax(1), number, groups - 1)
    among = grouped.gather(2, some[:, None].expand(-1, grouped.shape[1], -1))
    return _largest(among.view(len(keys), -1), number, _TILE - 1)


def _largest(rows: Tensor, number: int, bits: int) -> Tensor:
    """Some bits of the largest values of each row. NumPy finds these several times faster than torch."""
    values = rows.numpy()
    values.partition(-number, axis=1)
    return torch.from_numpy(values[:, -number:] & bits).long()


def _pack_places(places: Tensor) -> Tensor:
    """Numbers of 12 bits, two in three bytes."""
    first, second = places.view(-1, 2).unbind(1)
    three = torch.stack([first, first >> 8 | (second & 15) << 4, second >> 4], dim=1)
    return three.to(torch.uint8).flatten()


def _unpack_places(packed: Tensor) -> Tensor:
    low, middle, high = packed.view(-1, 3).to(torch.int16).unbind(1)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], dim=1)


def _pack_bits(bits: Tensor) -> Tensor:
    return torch.from_numpy(numpy.packbits(bits.numpy(), axis=None))


def _unpack_bits(packed: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.from_numpy(numpy.unpackbits(packed.numpy(), count=shape[0] * shape[1])).view(shape)
