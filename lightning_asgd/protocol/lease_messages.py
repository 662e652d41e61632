"""An epoch's units, and which worker trains which."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from lightning_asgd.protocol.request import Request

__all__ = ["Epoch", "LeaseGrant", "LeaseHoldings", "LeaseRequest", "OpenEpoch"]


@dataclass(frozen=True)
class Epoch:
    """What workers share of an epoch. A unit is a sample; or a batch, where a sampler of the user's own makes them."""

    key: str  # which epoch of which fit it is: the fit's name, a slash, and the epoch's number
    units: int  # number of units
    ends: tuple[int, ...]  # the numbers of units after which all workers meet, ascending; the last is `units`
    order: bytes = b""  # digest of the units in their order, to compare workers by
    # Ranges of units that had been trained when the checkpoint was written that the fit resumes from.
    done: tuple[tuple[int, int], ...] = ()
    step: int = 1  # units of one optimizer step, in the batch size that all count in

    @property
    def fit(self) -> str:
        """Name of the fit."""
        return self.key.rpartition("/")[0]

    @property
    def number(self) -> int:
        """The epoch's."""
        return int(self.key.rpartition("/")[2])


@dataclass(frozen=True)
class LeaseHoldings:
    """A worker's part of the present epoch."""

    epoch: Epoch  # which one
    granted: tuple[tuple[int, int], ...]  # ranges of units, in the order in which they were granted
    trained: int  # number of these units that it has trained
    served: int  # the last segment of which it was granted something


@dataclass(frozen=True)
class OpenEpoch(Request):
    """A worker begins an epoch, or wants to know how far it is; answered with the ranges of units that are done.

    Where workers meet, the first claim begins it: see :class:`LeaseRequest`.
    """

    epoch: Epoch  # the first worker's says what it is, the others' must be the same


@dataclass(frozen=True)
class LeaseRequest(Request):
    """A worker asks for units of the present epoch."""

    urgent: ClassVar[bool] = True  # training stops without the answer: it must not queue behind weights

    key: str  # which epoch
    segment: int  # number of times that all have met in it
    trained: int  # units that the worker has trained in it since it began or rejoined
    applied: int  # those of them whose updates the servers have
    unit_s: float  # seconds that a unit takes it; 0 if it does not know yet
    rtt_s: float = 0.0  # seconds in which it is answered
    flush: float = 0.0  # seconds in which it pushes what is left when it has trained all that it was granted
    wait: bool = False  # whether the answer is to be held back until there is a unit for it, or the segment is over
    stop: bool = False  # whether it wants no more, and gives back what it has not trained
    halt: bool = False  # whether the others are to be granted no more of the epoch either
    size: int = 1  # units of one of its optimizer steps
    opens: Epoch | None = None  # the epoch, with the first claim in it, where workers meet: see `OpenEpoch`


@dataclass(frozen=True)
class LeaseGrant:
    """Answer to :class:`LeaseRequest`."""

    first: int = 0  # number of the first unit granted
    last: int = 0  # one past the last; equal to `first` if there is none for this worker
    # Whether all units of the segment that were granted are trained and applied, and no more will be.
    over: bool = False
    progress: float = 0.0  # units that all have trained so far, as far as is known
    ratio: float = 1.0  # units that all train while this worker trains one
    # Whether the units have been trained by others, and what the worker makes of them is not wanted: one that comes
    # late needs a batch to notice that a segment is over.
    void: bool = False
    # Whether there is probably nothing more for this worker in the segment: when it has trained this it pushes the
    # rest, and waits.
    final: bool = False
    halted: bool = False  # whether the segment is over since a worker has halted the epoch
    incarnations: dict[int, int] = field(default_factory=dict)  # see `Reply`
    left: dict[int, str] = field(default_factory=dict)  # see `Reply`
