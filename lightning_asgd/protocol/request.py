"""What every message of a worker to a server begins with."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_asgd.process_name import this_process

__all__ = ["Request"]


@dataclass(frozen=True)
class Request:
    """A message of a worker."""

    # The session, which is one call of `fit`, `validate`, `test` or `predict` on all its workers, or an elastic run.
    session: str
    worker: int  # global rank of the sender; in an elastic run its number
    # Name of the sender's process: a fencing token. Servers take a rank's messages from one process only.
    process: str = field(default_factory=this_process, kw_only=True)
