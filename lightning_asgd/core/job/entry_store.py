"""Where the entries of a rendezvous are kept: what both kinds of store have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.foundation.environment import joined
from lightning_asgd.core.foundation.errors import CollectiveUnavailableError, LaunchError
from lightning_asgd.core.job.addresses import ServerAddress

CLOCK_KEY = "clock"
"""An entry whose value is the time of the host's clock, in a store that can answer with it."""


class EntryStore(ABC):
    """JSON values by name, which any process of the job reads and writes. Calls that fail raise a ``RuntimeError``."""

    address: tuple[str, int]
    serves_torch = False
    """Whether torch's process groups can use the store that listens at the address, too."""

    @abstractmethod
    def put(self, key: str, value: Any) -> None:
        """Publish a JSON value."""

    @abstractmethod
    def peek(self, key: str, kind: type = object) -> Any:
        """The latest value of a type that a process of this job published; None if there is none."""

    def open_gateway(self) -> bool:
        """Have other machines reach servers of this one through the address; whether the store can."""
        return False

    def way_to(self, name: str, number: int) -> ServerAddress:
        """How to reach a server through the gateway at the address. Raises a ``LaunchError`` if the store has none."""
        raise LaunchError(
            "The servers listen on loopback of another machine than this, but the rendezvous is torch's store at "
            f"{joined(*self.address)}, which leads to no server. Expected transport='zmq' and a rendezvous of this "
            f"package's own. Set the same {SECRET_ENV} on all machines, and start the job without torchrun, or use an "
            "elastic run."
        )

    def is_foreign(self, key: str) -> bool:
        """Whether a process without the job's secret wrote the present value."""
        return False

    def shared(self, prefix: str) -> Any:
        """A store of torch's below a prefix, for other parts of torch."""
        raise CollectiveUnavailableError(
            "A process group with one of torch's own backends was requested, but the job's rendezvous at "
            f"{self.address[0]}:{self.address[1]} was hosted with transport='zmq': torch cannot use it. Expected "
            'ASGDStrategy(transport="rpc") for every Trainer of the script, from the first on.'
        )

    @abstractmethod
    def close(self) -> None:
        """Drop the connection. The process that hosts the store stops serving it."""
