"""An epoch's units, and which worker trains which."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from lightning_asgd.core.foundation.ranges import are_in_order
from lightning_asgd.core.protocol.request import Count, Positive, Request, Seconds

__all__ = ["UNKNOWN", "Epoch", "LeaseGrant", "LeaseHoldings", "LeaseRequest", "OpenEpoch"]

UNKNOWN = 1 << 32
"""Numbers that a shard of unknown length has; those beyond its last sample do not exist."""


def is_key(key: str) -> bool:
    """Whether a text can be the key of an epoch."""
    _, slash, number = key.rpartition("/")
    return bool(slash) and number.isdecimal()


@dataclass(frozen=True)
class Epoch:
    """What workers share of an epoch. A unit is a sample; or a batch, where a sampler of the user's own makes them.

    Units have numbers from 0 on. Where data are read shard by shard, each shard has a range of numbers. They are
    trained in any order of shards, and ``ends`` count how many have been trained.
    """

    expected: ClassVar[str] = (
        "a key with a slash and a number at its end, ascending ends, shards and ranges in order, a step from 1"
    )

    key: str  # which epoch of which fit it is: the fit's name, a slash, and the epoch's number
    units: int  # number of units
    ends: tuple[int, ...]  # the numbers of units after which all workers meet, ascending; the last is `units`
    order: bytes = b""  # digest of the units in their order, to compare workers by
    # Ranges of units that had been trained when the checkpoint was written that the fit resumes from.
    done: tuple[tuple[int, int], ...] = ()
    step: int = 1  # units of one optimizer step, in the batch size that all count in
    shards: tuple[int, ...] = ()  # where each shard's numbers end, ascending; empty where data have no shards

    @property
    def numbers(self) -> int:
        """One past the last number of a unit."""
        return self.shards[-1] if self.shards else self.units

    def shard(self, number: int) -> tuple[int, int]:
        """The numbers of a unit's shard: the first, and one past the last."""
        index = bisect_right(self.shards, number)
        return self.shards[index - 1] if index else 0, self.shards[index]

    @property
    def fit(self) -> str:
        """Name of the fit."""
        return self.key.rpartition("/")[0]

    @property
    def number(self) -> int:
        """The epoch's."""
        return int(self.key.rpartition("/")[2])

    @property
    def can_be(self) -> bool:
        """Whether there can be such an epoch."""
        ends = self.ends
        ascend = ends[-1:] == (self.units,) and (ends == (0,) or all(a < b for a, b in pairwise((0, *ends))))
        in_order = are_in_order(self.done, self.numbers) and all(a < b for a, b in pairwise((0, *self.shards)))
        return ascend and in_order and self.step >= 1 and is_key(self.key)


@dataclass(frozen=True)
class LeaseHoldings:
    """A worker's part of the present epoch."""

    expected: ClassVar[str] = "ranges of the epoch's units"

    epoch: Epoch  # which one
    granted: tuple[tuple[int, int], ...]  # ranges of units, in the order in which they were granted
    trained: Count  # number of these units that it has trained
    served: int  # the last sync interval in which it was granted units; -1 before it was
    ended: tuple[int, ...] = ()  # see `LeaseRequest`; all of the epoch that it has found
    applied: Count = 0  # number of these units whose updates, as far as it knows, every server has
    stopped: bool = False  # whether it requests no more

    @property
    def can_be(self) -> bool:
        """Whether the epoch has such units."""
        ends = 0 <= self.applied <= self.trained and all(0 <= number < self.epoch.numbers for number in self.ended)
        return ends and all(are_in_order([each], self.epoch.numbers) for each in self.granted)


@dataclass(frozen=True)
class OpenEpoch(Request):
    """A worker begins an epoch, or asks for its progress; answered with the ranges of units that are done.

    In a job the first lease request begins it: see :class:`LeaseRequest`.
    """

    epoch: Epoch  # defined by the first worker; the others' must be the same


@dataclass(frozen=True)
class LeaseRequest(Request):
    """A worker asks for units of the present epoch."""

    urgent: ClassVar[bool] = True  # training needs the reply: it must not queue behind weights

    key: str  # which epoch
    segment: int  # number of sync intervals of the epoch that are over
    trained: Count  # units that the worker has trained in it since it began or rejoined
    applied: Count  # those of them whose updates the servers have
    unit_s: Seconds  # seconds that the worker needs for a unit; 0 if not known yet
    rtt_s: Seconds = 0.0  # seconds from request to reply
    flush: Seconds = 0.0  # seconds that its last push takes, after it has trained all that it was granted
    wait: bool = False  # whether the reply is to be blocked until there is a unit for it, or the sync interval is over
    stop: bool = False  # whether it requests no more, and gives back the units that it has not trained
    halt: bool = False  # whether the others are to be granted no more of the epoch either
    size: Positive = 1  # units of one of its optimizer steps
    opens: Epoch | None = None  # in a job, the epoch that the first request opens: see `OpenEpoch`
    ended: tuple[int, ...] = ()  # numbers from which on shards that it reads turned out to have no more samples
    returned: tuple[tuple[int, int], ...] = ()  # ranges that it holds and gives back untrained
    begun: Count = 0  # units that it holds, beyond whole steps, where shards end within a step
    # For each process that reads shards for it, in the order of their turns: one past the last unit it was granted.
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class LeaseGrant:
    """Answer to :class:`LeaseRequest`."""

    ranges: tuple[tuple[int, int], ...] = ()  # of units, in the order of training; none if there is none for it
    # Whether all granted units of the sync interval are trained and applied, and no more will be granted.
    over: bool = False
    progress: float = 0.0  # units that all workers together have trained, by the latest reports
    ratio: float = 1.0  # units that all workers together train while this worker trains one
    # Whether it is a dummy batch, by which a late worker notices that the interval is over: its update is discarded.
    void: bool = False
    # Whether this is probably the worker's last grant of the sync interval. Then it pushes and waits.
    final: bool = False
    halted: bool = False  # whether the sync interval is over because a worker has halted the epoch
    exhausted: bool = False  # whether it is over because all shards are, whatever its end
    incarnations: dict[int, int] = field(default_factory=dict)  # see `Reply`
    left: dict[int, str] = field(default_factory=dict)  # see `Reply`
