"""What a ``serve`` process publishes of an elastic run that several of them may host, and how others ask it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lightning_asgd.core.foundation.environment import parted
from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.job.addresses import listens
from lightning_asgd.core.job.rendezvous import Rendezvous

HOST_KEY = "host"
"""The rendezvous key of a host's entry."""
JOIN_KEY = "host that joins"
STOP_KEY = "host to stop"
VOTED_KEY = "latest vote"
LEASE_S = 2.5
"""For which the present host serves without hearing from others, unless ``serve`` is given another time."""
SHORTEST_S, LONGEST_S = 0.5, 4.0
"""Of leases: votes and the list of hosts have times of their own, which a longer one would outlast."""
CALL = 0.4
"""The part of that time for a connection to a host, and for a call."""


def vote_of(worker: int) -> str:
    """The rendezvous key of a worker's vote: the term whose host it has lost, and how often it has voted."""
    return f"vote/{worker}"


@dataclass(frozen=True)
class HostEntry:
    """A run host, and what it knows of the run. Addresses are texts, as each host names itself."""

    run: str
    transport: str
    servers: int  # of the run
    address: str  # its own
    term: int = 0  # raised whenever another host takes over; 0 until it knows of any
    present: str = ""  # the host whose servers the workers use; empty if there is none
    hosts: tuple[str, ...] = ()  # all, in the order in which they joined
    workers: tuple[int, ...] = ()  # those that elect the next host
    ready: bool = False  # whether it could take over
    campaigns: bool = False  # whether it may be about to take over
    lease_s: float = LEASE_S  # for which the present host serves without hearing from others

    @property
    def serves(self) -> bool:
        """Whether it is the present host itself."""
        return self.present == self.address

    def to_dict(self) -> dict[str, Any]:
        """For the rendezvous."""
        return asdict(self)

    @classmethod
    def of(cls, found: Any) -> HostEntry | None:
        """What :meth:`to_dict` made; None if it is something else."""
        try:
            entry = cls(**{field.name: found[field.name] for field in fields(cls)})
            entry = replace(entry, hosts=tuple(entry.hosts), workers=tuple(entry.workers))
        except (KeyError, TypeError):
            return None
        good = (
            all(isinstance(each, str) for each in (entry.run, entry.transport, entry.present))
            and all(isinstance(each, int) for each in (entry.servers, entry.term, *entry.workers))
            and all(isinstance(each, bool) for each in (entry.ready, entry.campaigns))
            and all(is_address(each) for each in (entry.address, *entry.hosts))
            and (isinstance(entry.lease_s, float) and SHORTEST_S <= entry.lease_s <= LONGEST_S)
        )
        return entry if good else None


def is_address(found: Any) -> bool:
    """Whether a value is a text that names a host and a port."""
    try:
        return isinstance(found, str) and bool(parted(found))
    except ValueError:
        return False


@contextlib.contextmanager
def reach_host(host: str, port: int, lease_s: float = LEASE_S) -> Iterator[Rendezvous]:
    """A short connection to a host's rendezvous. Raises a ``RuntimeError`` if the host does not answer soon."""
    with Rendezvous.connect(host, port, CALL * lease_s, elsewhere=True) as there:
        yield there


def ask_host(host: str, port: int, lease_s: float = LEASE_S) -> HostEntry | LaunchError | bool | None:
    """A host's entry, or a final error; False if its process has ended, None without answer, True without entry."""
    listening = listens(host, port, CALL * lease_s)
    if not listening:
        return listening
    try:
        with reach_host(host, port, lease_s) as there:
            return HostEntry.of(there.peek(HOST_KEY, dict)) or True
    except RuntimeError as error:
        return error if isinstance(error, LaunchError) and error.final else None
