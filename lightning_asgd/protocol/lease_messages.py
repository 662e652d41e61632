"""An epoch's units, and which worker trains which."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from lightning_asgd.protocol.request import Request

__all__ = ["Epoch", "LeaseGrant", "LeaseHoldings", "LeaseRequest", "OpenEpoch"]


@dataclass(frozen=True)
class Epoch:
    """What workers share of an epoch. A unit is a sample; or a batch, where a sampler of the user's own makes them.

    Attributes:
        key: which epoch of which fit it is: the fit's name, a slash, and the epoch's number.
        units: number of units.
        ends: the numbers of units after which all workers meet, ascending; the last is ``units``.
        order: digest of the units in their order, to compare workers by.
        done: ranges of units that had been trained when the checkpoint was written that the fit resumes from.
        step: units of one optimizer step, in the batch size that all count in.
    """

    key: str
    units: int
    ends: tuple[int, ...]
    order: bytes = b""
    done: tuple[tuple[int, int], ...] = ()
    step: int = 1

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
    """A worker's part of the present epoch.

    Attributes:
        epoch: which one.
        granted: ranges of units, in the order in which they were granted.
        trained: number of these units that it has trained.
        served: the last segment of which it was granted something.
    """

    epoch: Epoch
    granted: tuple[tuple[int, int], ...]
    trained: int
    served: int


@dataclass(frozen=True)
class OpenEpoch(Request):
    """A worker begins an epoch, or wants to know how far it is; answered with the ranges of units that are done.

    Where workers meet, the first claim begins it: see :class:`LeaseRequest`.

    Attributes:
        epoch: the first worker's says what it is, the others' must be the same.
    """

    epoch: Epoch


@dataclass(frozen=True)
class LeaseRequest(Request):
    """A worker asks for units of the present epoch.

    Attributes:
        key: which epoch.
        segment: number of times that all have met in it.
        trained: units that the worker has trained in it since it began or rejoined.
        applied: those of them whose updates the servers have.
        unit_s: seconds that a unit takes it; 0 if it does not know yet.
        rtt_s: seconds in which it is answered.
        flush: seconds in which it pushes what is left when it has trained all that it was granted.
        wait: whether the answer is to be held back until there is a unit for it, or the segment is over.
        stop: whether it wants no more, and gives back what it has not trained.
        halt: whether the others are to be granted no more of the epoch either.
        size: units of one of its optimizer steps.
        opens: the epoch, with the first claim in it, where workers meet: see :class:`OpenEpoch`.
    """

    urgent: ClassVar[bool] = True  # training stops without the answer: it must not queue behind weights

    key: str
    segment: int
    trained: int
    applied: int
    unit_s: float
    rtt_s: float = 0.0
    flush: float = 0.0
    wait: bool = False
    stop: bool = False
    halt: bool = False
    size: int = 1
    opens: Epoch | None = None


@dataclass(frozen=True)
class LeaseGrant:
    """Answer to :class:`LeaseRequest`.

    Attributes:
        first: number of the first unit granted.
        last: one past the last; equal to ``first`` if there is none for this worker.
        over: whether all units of the segment that were granted are trained and applied, and no more will be.
        progress: units that all have trained so far, as far as is known.
        ratio: units that all train while this worker trains one.
        void: whether the units have been trained by others, and what the worker makes of them is not wanted: one that
            comes late needs a batch to notice that a segment is over.
        final: whether there is probably nothing more for this worker in the segment: when it has trained this it pushes
            the rest, and waits.
        halted: whether the segment is over since a worker has halted the epoch.
        incarnations: see :class:`Reply`.
        left: see :class:`Reply`.
    """

    first: int = 0
    last: int = 0
    over: bool = False
    progress: float = 0.0
    ratio: float = 1.0
    void: bool = False
    final: bool = False
    halted: bool = False
    incarnations: dict[int, int] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)
