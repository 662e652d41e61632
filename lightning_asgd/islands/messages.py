"""What the processes of an island exchange with a server: each sends and receives a part of the shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_asgd.core.foundation.ranges import are_in_order
from lightning_asgd.core.protocol.request import Fragment, Request, publish_path

__all__ = ["ExchangePart", "InitPart", "Part"]

_MOST = 4096  # processes of an island


@dataclass(frozen=True)
class Part:
    """Which scalars of a shard a process of an island exchanges."""

    expected: ClassVar[str] = f"a number below that of the parts, at most {_MOST} parts, ranges in ascending order"

    number: int
    parts: int  # of the island
    # Per group of the shard, ranges of its scalars. A process sends and receives them one after the other.
    ranges: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def can_be(self) -> bool:
        """Whether there can be such a part."""
        ordered = all(are_in_order(each, each[-1][1]) for each in self.ranges if each)
        return ordered and 0 <= self.number < self.parts <= _MOST


@dataclass(frozen=True)
class InitPart(Request):
    """A process of an island says what it exchanges.

    It brings first values if the shard has none, and to a lost server's replacement its copy of the weights. Here and
    in the next message ``process`` is the name of the island's first process: servers know no other.
    """

    part: Part
    weights: tuple[Tensor, ...] | None = None  # per group, the values of its ranges
    fragment: Fragment = 0  # number of the part of the module that the shard holds its share of


@dataclass(frozen=True)
class ExchangePart(Request):
    """A part of an :class:`Exchange`; answered with the weights in its ranges, empty if they are not fetched."""

    part: int  # its number
    exchange: int  # number of the exchange, as in `Exchange.island`
    update: tuple[Tensor, ...] | None = None  # per group, the update in its ranges; None if nothing is pushed
    fragment: Fragment = 0  # see `InitPart`


publish_path(globals())
