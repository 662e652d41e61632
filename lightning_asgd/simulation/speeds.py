"""The machines of a simulation: how many seconds steps take, which workers are lost, and which join."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import at_least, whole


@dataclass(frozen=True)
class Crash:
    """A worker that ends at once. What it has sent before arrives.

    When worker 0 is gone the others get a WorkerLostError at the next sync point, as in a real run; an elastic run
    continues.

    Args:
        worker: its rank; in an elastic run its number in the order of joining, from 0.
        time_s: when.
        detection_s: seconds until the servers learn of it. None: they miss its heartbeats, which workers send if their
            data are leased.

    Raises:
        ConfigurationError: a value is out of range.
    """

    worker: int
    time_s: float
    detection_s: float | None = 0.1

    def __post_init__(self) -> None:
        whole("Crash(worker)", self.worker, 0)
        at_least("Crash(time_s)", self.time_s, 0, finite=True)
        if self.detection_s is not None:
            at_least("Crash(detection_s)", self.detection_s, 0, finite=True)


@dataclass(frozen=True)
class LateWorker:
    """A worker that joins an elastic run later. Joining takes no time, and its first fetch no bytes.

    Args:
        time_s: when.
        speed: how long its steps take; None: as worker 0's.

    Raises:
        ConfigurationError: a value is of the wrong type or out of range.
    """

    time_s: float
    speed: Speed | None = None

    def __post_init__(self) -> None:
        at_least("LateWorker(time_s)", self.time_s, 0, finite=True)
        if self.speed is not None and not isinstance(self.speed, Speed):
            raise ConfigurationError(f"LateWorker(speed)={self.speed!r}. Expected a Constant, a LogNormal or a Trace.")


class Speed(ABC):
    """A distribution of step times."""

    @abstractmethod
    def seconds(self, step: int, chance: random.Random) -> float:
        """How long a step takes.

        Args:
            step: steps that the worker has taken before.
            chance: the worker's own source of random numbers.

        Returns:
            seconds, at least 0.
        """


@dataclass(frozen=True)
class Constant(Speed):
    """Every step takes the same time.

    Args:
        step_s: seconds per step.

    Raises:
        ConfigurationError: this is no number of at least 0.
    """

    step_s: float

    def __post_init__(self) -> None:
        at_least("Constant(step_s)", self.step_s, 0, finite=True)

    def seconds(self, step: int, chance: random.Random) -> float:
        """See :class:`Speed`."""
        return self.step_s


@dataclass(frozen=True)
class LogNormal(Speed):
    """Most steps take about the median, some much longer.

    Args:
        median_s: seconds that half of the steps stay below.
        sigma: standard deviation of the seconds' logarithm; 0.1 is a quiet machine, 1 a busy one.

    Raises:
        ConfigurationError: one of them is no number of at least 0.
    """

    median_s: float
    sigma: float

    def __post_init__(self) -> None:
        at_least("LogNormal(median_s)", self.median_s, 0, finite=True)
        at_least("LogNormal(sigma)", self.sigma, 0, finite=True)

    def seconds(self, step: int, chance: random.Random) -> float:
        """See :class:`Speed`."""
        return self.median_s * chance.lognormvariate(0.0, self.sigma)


@dataclass(frozen=True)
class Trace(Speed):
    """Step times that were measured.

    Args:
        steps_s: seconds of one step after the other, again from the first when they are used up.
        shuffled: draw one of them at random for each step instead.

    Raises:
        ConfigurationError: there are none, or one is no number of at least 0.
    """

    steps_s: Sequence[float]
    shuffled: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps_s", tuple(self.steps_s))
        if not self.steps_s:
            raise ConfigurationError(
                "Trace(steps_s) is empty. Expected the seconds of at least one step: measure some."
            )
        for value in self.steps_s:
            at_least("Trace(steps_s)", value, 0, finite=True)

    def seconds(self, step: int, chance: random.Random) -> float:
        """See :class:`Speed`."""
        return self.steps_s[chance.randrange(len(self.steps_s)) if self.shuffled else step % len(self.steps_s)]
