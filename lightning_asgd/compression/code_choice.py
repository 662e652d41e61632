"""``compression="auto"``: which codec makes exchanges the shortest. Pure; ``compression/link_probe.py`` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_asgd.core.algorithms.compression import Compression
from lightning_asgd.core.foundation.layout import Layout
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
