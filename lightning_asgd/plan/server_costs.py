"""What messages cost a server, as it was measured: what plans and simulations count with. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import at_least, whole


@dataclass(frozen=True, kw_only=True)
class ServerCosts:
    """Seconds of a core that a server works on a message.

    Args:
        claim_s: on a lease request.
        exchange_s: on an exchange, whatever its size.
        beat_s: on a heartbeat.
        contribution_s: on a worker's part in a collective.
        gbyte_s: GB of parameters that it receives, applies and sends back in a second.

    Raises:
        ConfigurationError: a value is out of range.
    """

    claim_s: float = 0.0
    exchange_s: float = 0.0
    beat_s: float = 0.0
    contribution_s: float = 0.0
    gbyte_s: float = math.inf

    def __post_init__(self) -> None:
        for field in fields(self):
            ends = field.name != "gbyte_s"
            at_least(f"ServerCosts({field.name})", getattr(self, field.name), 0, above=not ends, finite=ends)

    def exchange_of(self, nbytes: float) -> float:
        """Seconds of an exchange of some bytes of parameters."""
        return self.exchange_s + nbytes / (self.gbyte_s * 1e9)


@dataclass(frozen=True)
class Calibration:
    """What messages cost the servers of a machine, by the number of workers with which that was measured.

    Args:
        by_workers: the costs by number of workers.
        machine: which machine that was, for people.

    Raises:
        ConfigurationError: there are none, or a number of workers is no whole number of at least 1.
    """

    by_workers: Mapping[int, ServerCosts]
    machine: str

    def __post_init__(self) -> None:
        if not self.by_workers:
            raise ConfigurationError("Calibration(by_workers={}) is empty. Expected costs of a number of workers.")
        for workers in self.by_workers:
            whole("Calibration(by_workers)", workers)

    @property
    def most(self) -> int:
        """The largest number of workers that was measured."""
        return max(self.by_workers)

    def at(self, workers: int) -> ServerCosts | None:
        """What was measured with that many workers, or with the next larger number; None if neither was."""
        measured = min((n for n in self.by_workers if n >= workers), default=None)
        return None if measured is None else self.by_workers[measured]


# `lightning-asgd plan --measure` makes these figures; here with ZeroMQ, encrypted.
RECORDED = Calibration(
    {
        16: ServerCosts(claim_s=508e-6, exchange_s=635e-6, beat_s=322e-6, contribution_s=336e-6, gbyte_s=0.61),
        64: ServerCosts(claim_s=459e-6, exchange_s=650e-6, beat_s=322e-6, contribution_s=329e-6, gbyte_s=0.61),
        256: ServerCosts(claim_s=466e-6, exchange_s=647e-6, beat_s=322e-6, contribution_s=330e-6, gbyte_s=0.61),
        1024: ServerCosts(claim_s=480e-6, exchange_s=648e-6, beat_s=322e-6, contribution_s=333e-6, gbyte_s=0.61),
    },
    "a machine with two AMD EPYC cores",
)
"""What was measured once on one machine: another one may need half as long, or twice."""
