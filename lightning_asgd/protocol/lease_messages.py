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
        served: the last sync interval in which it was granted units.
    """

    epoch: Epoch
    granted: tuple[tuple[int, int], ...]
    trained: int
    served: int


@dataclass(frozen=True)
class OpenEpoch(Request):
    """A worker begins an epoch, or asks for its progress; answered with the ranges of units that are done.

    In a job the first lease request begins it: see :class:`LeaseRequest`.

    Attributes:
        epoch: defined by the first worker; the others' must be the same.
    """

    epoch: Epoch


@dataclass(frozen=True)
class LeaseRequest(Request):
    """A worker asks for units of the present epoch.

    Attributes:
        key: which epoch.
        segment: number of sync intervals of the epoch that are over.
        trained: units that the worker has trained in it since it began or rejoined.
        applied: those of them whose updates the servers have.
        unit_s: seconds that the worker needs for a unit; 0 if not known yet.
        rtt_s: seconds from request to reply.
        flush: seconds that its last push takes, after it has trained all that it was granted.
        wait: whether the reply is to be blocked until there is a unit for it, or the sync interval is over.
        stop: whether it requests no more, and gives back the units that it has not trained.
        halt: whether the others are to be granted no more of the epoch either.
        size: units of one of its optimizer steps.
        opens: in a job, the epoch that the first request opens: see :class:`OpenEpoch`.
    """

    urgent: ClassVar[bool] = True  # training needs the reply: it must not queue behind weights

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
        over: whether all granted units of the sync interval are trained and applied, and no more will be granted.
        progress: units that all workers together have trained so far, as far as is known.
        ratio: units that all workers together train while this worker trains one.
        void: whether the grant is a dummy batch: its units are trained by others and its update is discarded. A worker
            that arrives late needs a batch to notice that the sync interval is over.
        final: whether this is probably the worker's last grant of the sync interval. Then it pushes and waits.
        halted: whether the sync interval is over because a worker has halted the epoch.
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
