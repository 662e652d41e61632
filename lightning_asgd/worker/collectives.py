"""Barrier, broadcast, reduce and gather among the living workers, through the coordinator.

In the *asynchronous phase* workers take different numbers of steps, so calls could not pair up: there every collective
is local to its worker, and the chief's decisions are the ones that matter since it alone logs and writes. At *sync
points* they are real.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_asgd.errors import CollectiveTimeoutError, ServerLostError, WorkerLostError
from lightning_asgd.protocol import Contribution, next_chief
from lightning_asgd.worker.connection import COORDINATOR, GRACE_S, Connection
from lightning_asgd.worker.session_client import SessionClient, pickled, unpickled

__all__ = ["Collectives", "Phase", "combine", "reduce_op_name"]

T = TypeVar("T")


class Phase(Enum):
    """Where a worker is, which decides whether collectives are real."""

    OFFLINE = "offline"  # not connected: collectives are local
    SYNC = "sync"  # between training batches: collectives are real
    ASYNC = "async"  # training: collectives are local
    ENTERING = "entering"  # this worker sets up while the others train: collectives are local


class Collectives:
    """The collectives of one worker; ``client`` is None for a single worker."""

    def __init__(self, client: SessionClient | None = None, timeout_s: float = 1800.0) -> None:
        self.client = client
        self.timeout_s = timeout_s
        self.phase = Phase.OFFLINE if client is None else Phase.SYNC
        self.waited_s = 0.0  # of calls
        self.chief = 0
        """The worker that logs and writes checkpoints, the same one on all workers after each of their collectives."""
        self.on_chief: Callable[[], None] | None = None  # called when that changes
        self._seq = 0
        # Answered calls by number, with the answers: the latest, and those that other workers may still need.
        self._answers: dict[int, tuple[Contribution, dict[int, Any]]] = {}

    @property
    def real(self) -> bool:
        """Whether a call reaches other workers now."""
        return self.phase is Phase.SYNC and self.client is not None and self.client.connection.world_size > 1

    @property
    def rank(self) -> int:
        """This worker's."""
        return self.client.connection.worker if self.client is not None else 0

    @property
    def _succeeds(self) -> bool:
        """Whether another worker becomes chief when the chief is gone."""
        return self.client is not None and self.client.policy.another_chief

    @property
    def others_stopped(self) -> bool:
        """Whether another worker has stopped training and waits in this worker's next collective."""
        return self.client is not None and self.client.stopped > self._seq

    def gather(
        self, kind: str, name: str, payload: Any, *, target: int | None = None, stops: bool = False
    ) -> dict[int, Any]:
        """All workers' payloads by rank: any picklable value; tensors must be on the CPU.

        ``kind`` and ``name`` are for error texts; ``target`` is the only worker that gets the payloads (others get
        nothing), None for all; ``stops`` says that this worker has stopped training, so the others should call soon.
        """
        if not self.real:
            return {self.rank: payload}
        return self.contribute(kind, name, payload, target=target, stops=stops)

    @property
    def called(self) -> int:
        """Number of the latest collective that this worker has called."""
        return self._seq

    def enter(self, called: int) -> None:
        """Take part in the collectives that follow this one, and train meanwhile."""
        self._seq, self.phase = called, Phase.ASYNC

    def barrier(self, name: str = "") -> None:
        """Wait for all living workers."""
        self.gather("barrier", name, None)

    def broadcast(self, value: T, source: int = 0, name: str = "") -> T:
        """Worker ``source``'s value."""
        if not self.real:
            return value
        answer: T = self.contribute("broadcast", name, value if self.rank == source else None, source=source)[source]
        return answer

    def broadcast_of_chief(self, value: T, name: str = "") -> T:
        """The chief's value, or that of the next chief if the chief is gone. All workers must give one."""
        while True:
            chief = self.chief
            try:
                return self.broadcast(value, chief, name)
            except WorkerLostError:
                if not self._succeeds:
                    raise
                self.barrier("another chief")  # raises too if the session has ended
                if self.chief == chief:
                    raise

    def reduce(self, tensor: Tensor, op: str = "mean", name: str = "") -> Tensor:
        """Combine all workers' tensors, see :func:`combine`; ``tensor`` itself where the collective is local."""
        if not self.real:
            return tensor
        parts = self.gather("reduce", name or op, tensor.detach().cpu()).values()
        return combine(op, list(parts)).to(tensor.device)

    def all_gather(self, tensor: Tensor, name: str = "") -> list[Tensor]:
        """All workers' tensors in the order of ranks; shapes may differ."""
        if not self.real:
            return [tensor]
        return [t.to(tensor.device) for t in self.gather("all_gather", name, tensor.detach().cpu()).values()]

    def decide(self, decision: bool, *, all: bool = True) -> bool:
        """Whether ``yes`` holds on all workers, or on any."""
        answers = self.gather("decision", "all" if all else "any", bool(decision)).values()
        return bool(min(answers) if all else max(answers))

    def contribute(
        self,
        kind: str,
        name: str,
        payload: Any = None,
        *,
        source: int | None = None,
        target: int | None = None,
        stops: bool = False,
    ) -> dict[int, Any]:
        """Take part in a collective, and wait for the living workers' values by rank.

        ``source`` is the only worker that sends a value, ``target`` the only one that receives them; None: all.
        """
        client = self.client
        if client is None:
            return {self.rank: payload}
        begun = time.perf_counter()
        self._seq += 1
        about = (*client.connection.sender, self._seq, kind, name)
        message = Contribution(*about, pickled(payload), source, target, self.timeout_s, stops)
        try:
            answer = self._answer(client.connection, message)
            self._remember(client, message, answer)
            chief = next_chief(self.chief, answer) if message.reaches_all and self._succeeds else self.chief
            if chief != self.chief:
                self.chief = chief
                if self.on_chief is not None:
                    self.on_chief()
            return {rank: unpickled(f"worker {rank}", value) for rank, value in answer.items()}
        finally:
            self.waited_s += time.perf_counter() - begun

    def _answer(self, connection: Connection, message: Contribution) -> dict[int, Any]:
        limit = message.timeout_s + GRACE_S
        while True:
            try:
                future = connection.post(COORDINATOR, message, limit)
                if not connection.wait(future, limit):
                    raise CollectiveTimeoutError(
                        f"{message.kind} {message.name!r} of worker {message.worker} was not answered within {limit:g} "
                        f"s by server {COORDINATOR}. Expected an answer or an error in time: the server hangs. Stop "
                        f"the job and check the server's machine."
                    )
                answer: dict[int, Any] = connection.result(COORDINATOR, future)
                return answer
            except ServerLostError as error:
                connection.recover(error)

    # ------------------------------------------------------------------ what a replacement of the coordinator needs

    @property
    def answered(self) -> int:
        """Number of the latest collective that was answered."""
        return max(self._answers, default=0)

    def _remember(self, client: SessionClient, message: Contribution, answer: dict[int, Any]) -> None:
        """Keep a collective's result for workers that may still need it if the coordinator is lost."""
        for seq, (earlier, _) in list(self._answers.items()):
            if client.connection.restorer is None or seq < client.heard.needed:
                del self._answers[seq]
            elif earlier.target is not None:  # the target has its answer, and the others get nothing
                self._answers[seq] = replace(earlier, payload=None), {}
        if message.target is None:
            message = replace(message, payload=None)  # the answer has it
        self._answers[message.seq] = message, answer

    def repeat(self, connection: Connection) -> None:
        """Resend contributions whose results other workers may lack."""
        for message, answer in self._answers.values():
            connection.post(COORDINATOR, replace(message, answer=answer), message.timeout_s + GRACE_S)


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
    """Reduce tensors of equal shape to one of the same dtype; ``op`` is one of :func:`reduce_op_name`'s results.

    But the mean of integers is a floating-point tensor: that of 27 and 10 is 18.5.
    """
    result = _REDUCTIONS[op](torch.stack(list(parts)))
    if parts[0].dtype is torch.bool:
        return result.floor().bool() if op == "mean" else result.bool()  # whether all are set
    return result if op == "mean" else result.to(parts[0].dtype)


def reduce_op_name(op: Any) -> str:
    """Lightning's and torch's names of a reduction as one of ``mean``, ``sum``, ``max``, ``min``, ``product``, ...

    ``op`` is a string, a ``torch.distributed.ReduceOp``, or None for the mean. Raises a :class:`ValueError`.
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
