"""What every message of a worker to a server begins with."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Request"]


@dataclass(frozen=True)
class Request:
    """A message of a worker.

    Attributes:
        session: the session, which is one call of ``fit``, ``validate``, ``test`` or ``predict`` on all its workers, or
            an elastic run.
        worker: global rank of the sender; in an elastic run its number.
    """

    session: str
    worker: int
