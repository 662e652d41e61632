"""Messages about what a module keeps beside its trained parameters: see ``core/worker/untrained_state.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["JointState", "UntrainedState"]


@dataclass(frozen=True)
class UntrainedState:
    """What a worker reports at a sync point of its buffers and frozen parameters."""

    # Of the normalisation layers' statistics: how many batches they have seen since the last sync point, and values.
    statistics: dict[str, tuple[float, Tensor]] = field(default_factory=dict)
    digests: dict[str, bytes] = field(default_factory=dict)  # of what is long, and is sent only where workers differ
    short: Any = None  # the chief's other tensors by name, or `Pickled`; None from the others


@dataclass(frozen=True)
class JointState:
    """What these reports come to."""

    statistics: dict[str, Tensor]  # their means
    differing: frozenset[str]  # names of long tensors that are not the same on all workers
    short: Any  # the chief's; None if it did not report
