"""What `lightning-asgd status` asks a server, and what that knows of its session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_asgd.core.protocol.request import publish_path
from lightning_asgd.core.protocol.session import WorkerMetrics

__all__ = ["Status", "StatusRequest", "WorkerStatus"]


@dataclass(frozen=True)
class StatusRequest:
    """A status request. The sender need not be a member of the session. Answered with :class:`Status`."""

    urgent: ClassVar[bool] = True


@dataclass(frozen=True)
class WorkerStatus:
    """What the coordinator knows of a worker."""

    worker: int  # its number
    about: str  # its machine, process and device, if it joined an elastic run
    away: str  # why no worker waits for it; empty if it takes part
    silent_s: float  # seconds since its last heartbeat
    pace_s: float  # seconds that it needs for an optimizer step; 0 if that is not known
    trained: int  # steps of the present epoch that it has trained
    figures: WorkerMetrics | None = None  # its latest metrics, if it is monitored


@dataclass(frozen=True)
class Status:
    """What a server knows of its session."""

    session: str = ""  # its name; empty if there is none
    version: int = 0  # updates that the shard has applied
    refused: int = 0  # updates that held NaN, infinity or values out of bounds
    chief: int | None = None  # the worker that logs and writes checkpoints; None if there is none
    epoch: int | None = None  # number of the latest epoch; None before the first
    done: int = 0  # its optimizer steps whose updates have been applied, in batches of the reference size
    steps: int = 0  # its steps, likewise
    workers: tuple[WorkerStatus, ...] = ()  # those that take part or may rejoin
    news: tuple[str, ...] = ()  # recent events of workers, as texts for users
    snapshot: str = ""  # how old its latest snapshot is, likewise; empty if it writes none


publish_path(globals())
