"""What every message of a worker to a server begins with, and what its numbers can be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from lightning_asgd.core.foundation.process_name import this_process

__all__ = [
    "PUBLIC_PATH",
    "Count",
    "Fragment",
    "LearningRate",
    "PerSecond",
    "Positive",
    "Request",
    "Seconds",
    "publish_path",
]

PUBLIC_PATH = "lightning_asgd.protocol"
"""The module of all messages as pickles name it."""


def publish_path(names: dict[str, Any]) -> None:
    """Let pickles name a module's messages by one path for all; ``names`` are the module's.

    RPC unpickles a message before any code compares PROTOCOL. So no class that was moved may hide it.
    """
    for name in names["__all__"]:
        if isinstance(names[name], type):
            names[name].__module__ = PUBLIC_PATH


# The least and the largest value, for `checked`; neither NaN nor infinity lies between them.
Count = Annotated[int, (0, 1 << 62)]
Positive = Annotated[int, (1, 1 << 62)]
Seconds = Annotated[float, (0, 1e12)]
PerSecond = Annotated[float, (0, 1e12)]
Fragment = Annotated[int, (0, 1023)]  # servers hold a shard of each; as many as rules allow
LearningRate = Annotated[float, (-1e6, 1e6)]  # servers multiply with it


@dataclass(frozen=True)
class Request:
    """A message of a worker."""

    # The session, which is one call of `fit`, `validate`, `test` or `predict` on all its workers, or an elastic run.
    session: str
    worker: int  # global rank of the sender; in an elastic run its number
    # Name of the sender's process: a fencing token. Servers take a rank's messages from one process only.
    process: str = field(default_factory=this_process, kw_only=True)
