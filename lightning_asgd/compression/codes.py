"""Codes of 16 and 8 bits, and the largest values only; and the choice of the code that makes exchanges the shortest.

References:
    Dettmers, "8-Bit Approximations for Parallelism" (2016), for scales of blocks; Aji and Heafield, "Sparse
    Communication for Distributed Gradient Descent" (2017), for top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_asgd.core.algorithms.compression import Compression, check_lengths
from lightning_asgd.core.foundation.errors import ConfigurationError, ProtocolError
from lightning_asgd.core.foundation.layout import Layout
from lightning_asgd.core.foundation.numerics import largest
from lightning_asgd.core.foundation.validation import between, whole
from lightning_asgd.features import FINDERS, load

_MOST = 0.9  # a lossier codec is chosen only if it takes at most this share of the time of the one before


@dataclass(frozen=True, repr=False)
class Auto(Compression):
    """Stands for the codec that each worker chooses when it sets up."""

    def __repr__(self) -> str:
        return "auto"  # as users write it

    def chosen(self, connection: Any, layout: Layout) -> Compression | None:
        """See :class:`Compression`: what link and codecs take is measured."""
        chosen: Compression | None = load(FINDERS["measured code"])(connection, layout)
        return chosen


class LinkSpeed(NamedTuple):
    """The link between a worker and a server."""

    latency_s: float  # of a small message and its answer
    up: float  # bytes per second to the server
    down: float  # and back


class CodeCost(NamedTuple):
    """What a codec costs per value that is exchanged."""

    name: str  # of the codec
    seconds: float  # of coding and decoding at both ends
    up: float  # bytes to the server
    down: float  # and back


NO_CODE = CodeCost("no codec", 0.0, 4.0, 4.0)
"""Values of 32 bits as they are."""


def expected_s(cost: CodeCost, link: LinkSpeed, values: int) -> float:
    """Seconds of an exchange of this number of values."""
    return link.latency_s + values * (cost.seconds + cost.up / link.up + cost.down / link.down)


def choose_code(costs: Sequence[CodeCost], link: LinkSpeed, values: int) -> CodeCost:
    """Choose from ``costs``, the least lossy first. A lossier one is chosen only if it is at least 10 % faster."""
    best = costs[0]
    for cost in costs[1:]:
        if expected_s(cost, link, values) < _MOST * expected_s(best, link, values):
            best = cost
    return best


_CHUNK = 1 << 17  # values that are coded at a time: half a MB
_SAMPLE = 1 << 14  # values looked at to guess which are among the largest


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

    def holds(self, values: Tensor) -> bool:
        """See :class:`Compression`."""
        return self.dtype != "float16" or largest(values) <= torch.finfo(torch.float16).max

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Compression`."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        limit = torch.finfo(dtype).max
        return (values.clamp(-limit, limit).to(dtype) if self.dtype == "float16" else values.to(dtype),)

    def decode(self, coded: tuple[Tensor, ...], out: Tensor) -> None:
        """See :class:`Compression`."""
        check_lengths(self, coded, [len(out)])
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
        rounded = torch.empty(len(values), dtype=self._type)
        scales = torch.empty(-(-len(values) // self.block), dtype=torch.float32)
        for x, out, scale in self._chunks(values, rounded, scales):
            scale.copy_(x.abs().amax(1)).div_(self._limit)
            # Where all are zero so is the scale.
            whole_numbers = x.div(scale[:, None].clamp(min=torch.finfo(torch.float32).tiny)).round_()
            out.copy_(whole_numbers.clamp_(-self._limit, self._limit))
        return rounded, scales

    def decode(self, coded: tuple[Tensor, ...], out: Tensor) -> None:
        """See :class:`Compression`."""
        check_lengths(self, coded, [len(out), -(-len(out) // self.block)])
        for x, values, scale in self._chunks(coded[0], out, coded[1]):
            torch.mul(x, scale[:, None], out=values)

    def _chunks(self, first: Tensor, second: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Blocks of two vectors, shape ``(m, block)``, and their scales: some at a time, that stay in the cache."""
        blocks, whole_blocks = max(_CHUNK // self.block, 1), len(first) // self.block
        for begin in range(0, whole_blocks, blocks):
            end = min(begin + blocks, whole_blocks)
            part = slice(begin * self.block, end * self.block)
            yield first[part].view(-1, self.block), second[part].view(-1, self.block), scales[begin:end]
        if rest := len(first) % self.block:
            yield first[-rest:].view(1, -1), second[-rest:].view(1, -1), scales[-1:]


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
        if not len(values):  # a server holds none of a group that has fewer scalars than there are servers
            return torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.bfloat16)
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
        sent = min(len(coded[0]), len(out)) if coded else 0
        check_lengths(self, coded, [sent, sent])
        places, values = coded
        if places.dtype is not torch.int32:
            raise ProtocolError(f"{self} was received with places of {places.dtype}. Expected torch.int32.")
        if places.numel() and not (int(places.min()) >= 0 and int(places.max()) < len(out)):
            raise ProtocolError(f"{self} was received with places outside of a vector of {len(out)} values.")
        out.zero_()
        out[places.long()] = values.to(out.dtype)
