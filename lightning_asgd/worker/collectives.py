"""Barrier, broadcast, reduce and gather among the living workers, through the coordinator.

In the *asynchronous phase* workers take different numbers of steps, so calls could not pair up: there every collective
is local to its worker, and worker 0's decisions are the ones that matter since it alone logs and writes. At *sync
points* they are real.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_asgd.worker.client import Client

__all__ = ["Collectives", "Phase", "combine", "reduce_op_name"]

T = TypeVar("T")


class Phase(Enum):
    """Where a worker is."""

    OFFLINE = "offline"  # not connected: collectives are local
    SYNC = "sync"  # between training batches: collectives are real
    ASYNC = "async"  # training: collectives are local


class Collectives:
    """The collectives of one worker.

    Args:
        client: connection to the coordinator; None where there is nobody else.
        timeout_s: how long to wait for the others.

    Attributes:
        waited_s: seconds that calls have taken.
    """

    def __init__(self, client: Client | None = None, timeout_s: float = 1800.0) -> None:
        self.client = client
        self.timeout_s = timeout_s
        self.phase = Phase.OFFLINE if client is None else Phase.SYNC
        self.waited_s = 0.0

    @property
    def real(self) -> bool:
        """Whether a call reaches other workers now."""
        return self.phase is Phase.SYNC and self.client is not None and self.client.connection.world_size > 1

    @property
    def rank(self) -> int:
        """This worker's."""
        return self.client.connection.worker if self.client is not None else 0

    def gather(
        self, kind: str, name: str, payload: Any, *, target: int | None = None, stops: bool = False
    ) -> dict[int, Any]:
        """Everybody's payload by rank.

        Args:
            kind: what for, in error texts.
            name: which one, in error texts.
            payload: any picklable value; tensors must be on the CPU.
            target: the only worker that gets it (the others get nothing); None: everybody.
            stops: whether this worker trains no more: the others are to come soon.
        """
        if not self.real or self.client is None:
            return {self.rank: payload}
        return self._call(self.client, kind, name, payload, target=target, stops=stops)

    def barrier(self, name: str = "") -> None:
        """Wait for everybody."""
        self.gather("barrier", name, None)

    def broadcast(self, value: T, source: int = 0, name: str = "") -> T:
        """Worker ``source``'s value."""
        if not self.real or self.client is None:
            return value
        mine = value if self.client.connection.worker == source else None
        answer: T = self._call(self.client, "broadcast", name, mine, source=source)[source]
        return answer

    def reduce(self, tensor: Tensor, op: str = "mean", name: str = "") -> Tensor:
        """Combine everybody's tensor.

        Args:
            tensor: equal in shape on all workers.
            op: one of :func:`reduce_op_name`'s results.
            name: in error texts.

        Returns:
            a new tensor on ``tensor``'s device, see :func:`combine`; ``tensor`` itself where nobody else is reached.
        """
        if not self.real:
            return tensor
        parts = self.gather("reduce", name or op, tensor.detach().cpu()).values()
        return combine(op, list(parts)).to(tensor.device)

    def all_gather(self, tensor: Tensor, name: str = "") -> list[Tensor]:
        """Everybody's tensor in the order of ranks; shapes may differ."""
        if not self.real:
            return [tensor]
        return [t.to(tensor.device) for t in self.gather("all_gather", name, tensor.detach().cpu()).values()]

    def decide(self, decision: bool, *, all: bool = True) -> bool:
        """Whether all workers (or any of them) say yes."""
        answers = self.gather("decision", "all" if all else "any", bool(decision)).values()
        return bool(min(answers) if all else max(answers))

    def _call(self, client: Client, kind: str, name: str, payload: Any, **about: Any) -> dict[int, Any]:
        begun = time.perf_counter()
        try:
            return client.collective(kind, name, payload, timeout_s=self.timeout_s, **about)
        finally:
            self.waited_s += time.perf_counter() - begun


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda parts: parts.sum(0) / len(parts),
    "sum": lambda parts: parts.sum(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
    "product": lambda parts: parts.prod(0),
    "band": lambda parts: functools.reduce(torch.bitwise_and, parts),
    "bor": lambda parts: functools.reduce(torch.bitwise_or, parts),
    "bxor": lambda parts: functools.reduce(torch.bitwise_xor, parts),
}


def combine(op: str, parts: Sequence[Tensor]) -> Tensor:
    """Reduce tensors of equal shape to one.

    Args:
        op: one of :func:`reduce_op_name`'s results.
        parts: at least one.

    Returns:
        a tensor of the same dtype; but the mean of integers is a floating-point tensor: that of 27 and 10 is 18.5.
    """
    result = _REDUCTIONS[op](torch.stack(list(parts)))
    if parts[0].dtype is torch.bool:
        return result.floor().bool() if op == "mean" else result.bool()  # whether all are set
    return result if op == "mean" else result.to(parts[0].dtype)


def reduce_op_name(op: Any) -> str:
    """Lightning's and torch's names of a reduction as one of ``mean``, ``sum``, ``max``, ``min``, ``product``, ...

    Args:
        op: a string, a ``torch.distributed.ReduceOp``, or None for the mean.

    Raises:
        ValueError: the reduction is not one of these.
    """
    if op is None:
        return "mean"
    kinds = getattr(torch.distributed, "ReduceOp", None)
    if kinds is not None and isinstance(op, kinds):  # it does not print its name, but equals a member that does
        op = next((name for name, member in kinds.RedOpType.__members__.items() if op == member), op)
    name = str(op).rsplit(".", 1)[-1].lower()
    name = {"avg": "mean", "prod": "product"}.get(name, name)
    if name not in _REDUCTIONS:
        raise ValueError(f"reduce_op={op!r} is unknown. Expected one of {', '.join(map(repr, _REDUCTIONS))}.")
    return name
