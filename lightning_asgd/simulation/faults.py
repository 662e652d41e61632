"""Workers of a simulation that are lost, and workers that join."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import at_least, whole
from lightning_asgd.simulation.speeds import Speed


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
