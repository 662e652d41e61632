"""What there is to train in an epoch, and how a worker divides what it is granted into steps and batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_asgd.core.protocol import Epoch


@dataclass(frozen=True)
class Ended:
    """A worker has found the end of a shard."""

    number: int  # the first without a sample
    end: int  # one past the shard's last number
    returned: tuple[tuple[int, int], ...] = ()  # units of steps that are no longer complete: to be granted again


@dataclass(frozen=True)
class LeasedBatch:
    """A batch of a worker, as it was granted."""

    samples: Any
    step: int  # the first unit of its step
    units: int  # of that step
    left: int  # batches of the step that follow
    void: bool = False  # whether it was granted to others


@dataclass(frozen=True)
class Plan:
    """One epoch on a worker."""

    epoch: Epoch  # units and segments
    items: Sequence[Any]  # the units of all workers, in order: samples, or batches
    batch: int | None = None  # units per batch of this worker, where they are samples; None where they are batches
    accumulate: int = 1  # batches per optimizer step

    @property
    def step(self) -> int:
        """Units per optimizer step of this worker."""
        return (self.batch or 1) * self.accumulate

    def batches(self, first: int, last: int) -> Iterator[LeasedBatch]:
        """A range of units as this worker trains it: in full steps, or in nearly equal ones."""
        for begin, end in even_parts(first, last, self.step):
            yield from self._cut(self.items[begin:end], begin)

    unread = 0
    """Units that were granted and have not become batches yet."""

    @property
    def wishes(self) -> dict[str, Any]:
        """What a :class:`~lightning_asgd.core.protocol.LeaseRequest` says of the units that suit this worker."""
        return {"size": self.step}

    @property
    def runs_low(self) -> bool:
        """Whether more units are needed soon, whatever the speed."""
        return False

    def drop(self) -> None:
        """Forget what was granted and has not become batches yet."""

    def close(self) -> None:
        """The epoch is over."""

    def _cut(self, items: Sequence[Any], first: int) -> Iterator[LeasedBatch]:
        """The batches of one step; ``first`` is the number of its first unit."""
        ranges = even_parts(0, len(items), self.batch or 1)
        for left, (a, b) in zip(range(len(ranges) - 1, -1, -1), ranges, strict=True):
            samples = items[a] if self.batch is None else list(items[a:b])
            yield LeasedBatch(samples, first, len(items), left)


@dataclass(frozen=True)
class ReadingPlan(Plan):
    """One epoch on a worker where samples are read shard by shard, and become batches once they have been read."""

    items: Sequence[Any] = ()
    reader: Any = field(kw_only=True)
    drop_last: bool = field(kw_only=True, default=False)  # whether samples that are too few for a batch are left out

    @property
    def has_step(self) -> bool:
        """Whether there are samples for a step."""
        raise NotImplementedError

    @property
    def wants_more(self) -> bool:
        """Whether more units are to be requested."""
        raise NotImplementedError

    def fill(self, *, last: bool) -> int | None:
        """Read the samples of a step, fewer if they are the ``last`` ones.

        Stops where a shard ends: returns the number that does not exist, which is then passed to :meth:`end`.
        """
        raise NotImplementedError

    def end(self, number: int) -> Ended:
        """Forget what was granted of a shard from a number on."""
        raise NotImplementedError

    def next_steps(self, first: int, *, last: bool, void: bool) -> tuple[list[LeasedBatch], int]:
        """The batches of a step, or of the ``last`` ones, and how many samples were left out as too few for a batch.

        ``void``: if there are none, a batch whose update is discarded is needed; see ``LeaseGrant.void``.
        """
        raise NotImplementedError

    @property
    def unread(self) -> int:  # type: ignore[override]
        """Units that were granted and have not become batches yet."""
        return int(self.reader.left)

    def drop(self) -> None:
        """Forget what was granted and has not become batches yet."""
        self.reader.drop()

    def close(self) -> None:
        """The epoch is over."""
        self.reader.close()


def even_parts(first: int, last: int, size: int) -> list[tuple[int, int]]:
    """Cut a range into as few nearly equal parts of at most a size as possible."""
    parts, length = math.ceil((last - first) / size), last - first
    return [(first + length * i // parts, first + length * (i + 1) // parts) for i in range(parts)]
