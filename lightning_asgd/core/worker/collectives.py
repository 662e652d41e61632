"""Barrier, broadcast, reduce and gather among the living workers, through the coordinator.

In the *asynchronous phase* workers take different numbers of steps, so calls could not pair up: there every collective
is local to its worker, and the chief's decisions are the ones that matter since it alone logs and writes. At *sync
points* they are real.

A collective whose result is one value of all workers is reduced by the coordinator: what a worker gets then does not
grow with their number. Only a gather gives each worker the values of all.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_asgd.core.foundation.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ServerLostError,
    WorkerLostError,
)
from lightning_asgd.core.protocol import Contribution, Reduced, next_chief, ranks_of
from lightning_asgd.core.protocol.reductions import TENSOR_REDUCTIONS, reduce
from lightning_asgd.core.worker.connection import COORDINATOR, GRACE_S, Connection
from lightning_asgd.core.worker.session_client import SessionClient, pickled, unpickled

T = TypeVar("T")


class Phase(Enum):
    """Where a worker is, which decides whether collectives are real."""

    OFFLINE = "offline"  # not connected: collectives are local
    SYNC = "sync"  # between training batches: collectives are real
    ASYNC = "async"  # training: collectives are local
    ENTERING = "entering"  # this worker sets up while the others train: collectives are local


GATHERED_ALONE = (
    "all_gather in the asynchronous phase, as in training_step, returns only this worker's values under A-SGD, "
    "with a first dimension of 1: workers take their steps at different times, so the others' values are not "
    "available within a batch. Call it at a sync point, such as the end of an epoch. For a loss over several workers' "
    "batches use a memory bank, or groups of devices with DDP inside: ASGDStrategy(island=...). "
    "See docs/compatibility.md."
)
"""The warning of strategies whose ``all_gather`` is local."""

REDUCED_ALONE = (
    "sync_dist=True on a value logged at step level has no effect under A-SGD: workers take their steps at different "
    "times. The value of worker 0 is logged. Log it with on_epoch=True to have it reduced."
)
"""The same for ``reduce``."""

_ENDLESS_S = 20 * 86400.0  # torch's RPC counts milliseconds, in 31 bits


class Collectives:
    """The collectives of one worker; ``client`` is None for a single worker."""

    def __init__(self, client: SessionClient | None = None, timeout_s: float = 1800.0) -> None:
        self.client = client
        self.timeout_s = timeout_s
        self.phase = Phase.OFFLINE if client is None else Phase.SYNC
        self.waited_s = 0.0  # of calls
        self.chief = 0
        """The worker that logs and writes checkpoints, the same one on all workers after each of their collectives."""
        self.on_chief: Callable[[], object] | None = None  # called when that changes
        self._seq = 0
        # Answered calls by number, with the answers: the latest, and those that other workers may still need.
        self._answers: dict[int, tuple[Contribution, dict[int, Any] | Reduced]] = {}

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

    def reduced(
        self, kind: str, name: str, payload: Any, how: str, *, stops: bool = False, endless: bool = False
    ) -> Reduced:
        """All workers' payloads, reduced by the coordinator; ``how`` is one of :func:`reduce`'s ways.

        The payload is a plain value, tensors on the CPU, or a message: servers open no other object. ``endless`` waits
        for living workers however long they take.
        """
        if not self.real or self.client is None:
            return reduce(how, {self.rank: payload})
        about = (*self.client.connection.sender, self._next_number(), kind, name)
        timeout_s = _ENDLESS_S if endless else self.timeout_s
        message = Contribution(*about, payload, None, None, timeout_s, stops, reduction=how)
        answer: Reduced = self._take_part(self.client, message)
        return answer

    @property
    def called(self) -> int:
        """Number of the latest collective that this worker has called."""
        return self._seq

    def enter(self, called: int) -> None:
        """Take part in the collectives that follow this one, and train meanwhile."""
        self._seq, self.phase = called, Phase.ASYNC

    def barrier(self, name: str = "") -> None:
        """Wait for all living workers."""
        self.reduced("barrier", name, None, "given")

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
        """Combine all workers' tensors, see :func:`reduce`; ``tensor`` itself where the collective is local."""
        if not self.real:
            return tensor
        (result,) = self.reduced("reduce", name or op, [tensor.detach().cpu()], op).value
        return result.to(tensor.device)  # type: ignore[no-any-return]

    def all_gather(self, tensor: Tensor, name: str = "") -> list[Tensor]:
        """All workers' tensors in the order of ranks; shapes may differ."""
        if not self.real:
            return [tensor]
        return [t.to(tensor.device) for t in self.gather("all_gather", name, tensor.detach().cpu()).values()]

    def stacked(self, tensor: Tensor) -> Tensor:
        """The same along a new first dimension; in the asynchronous phase the worker's own tensor alone.

        Raises a :class:`CollectiveMismatchError` on all workers if shapes differ.
        """
        if not self.real:
            return tensor.unsqueeze(0)
        found = self.gather("all_gather", "", tensor.detach().cpu())
        if len({each.shape for each in found.values()}) > 1:
            raise unequal("all_gather", found)
        return torch.stack([each.to(tensor.device) for each in found.values()])

    def decide(self, decision: bool, *, all: bool = True) -> bool:
        """Whether ``yes`` holds on all workers, or on any."""
        how = "all" if all else "any"
        return bool(self.reduced("decision", how, bool(decision), how).value)

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
        """Take part in a collective: values of the living by rank. ``source`` sends, ``target`` receives; None: all."""
        client = self.client
        if client is None:
            return {self.rank: payload}
        about = (*client.connection.sender, self._next_number(), kind, name)
        answer = self._take_part(client, Contribution(*about, pickled(payload), source, target, self.timeout_s, stops))
        return {rank: unpickled(f"worker {rank}", value) for rank, value in answer.items()}

    def _next_number(self) -> int:
        self._seq += 1
        return self._seq

    def _take_part(self, client: SessionClient, message: Contribution) -> Any:
        """Wait for the result, and follow the chief that all agree on with it."""
        begun = time.perf_counter()
        try:
            answer = self._answer(client.connection, message)
        finally:
            self.waited_s += time.perf_counter() - begun
        self._remember(client, message, answer)
        agrees = message.reaches_all and self._succeeds
        chief = next_chief(self.chief, ranks_of(answer)) if agrees else self.chief
        if chief != self.chief:
            self.chief = chief
            if self.on_chief is not None:
                self.on_chief()
        return answer

    def _answer(self, connection: Connection, message: Contribution) -> dict[int, Any] | Reduced:
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
                answer: dict[int, Any] | Reduced = connection.result(COORDINATOR, future)
                return answer
            except ServerLostError as error:
                connection.recover(error)

    # ------------------------------------------------------------------ what a replacement of the coordinator needs

    @property
    def answered(self) -> int:
        """Number of the latest collective that was answered."""
        return max(self._answers, default=0)

    def _remember(self, client: SessionClient, message: Contribution, answer: dict[int, Any] | Reduced) -> None:
        """Keep a collective's result for workers that may still need it if the coordinator is lost."""
        for seq, (earlier, _) in list(self._answers.items()):
            if client.connection.restorer is None or seq < client.heard.needed:
                del self._answers[seq]
            elif earlier.target is not None:  # the target has its answer, and the others get nothing
                self._answers[seq] = replace(earlier, payload=None), {}
        if message.target is None:
            message = replace(message, payload=None)  # the answer has it
        if client.connection.restorer is not None:  # it may be sent later, and the caller may change what it gets now
            answer = copy.deepcopy(answer)
        self._answers[message.seq] = message, answer

    def repeat(self, connection: Connection) -> None:
        """Resend contributions whose results other workers may lack."""
        for message, answer in self._answers.values():
            connection.post(COORDINATOR, replace(message, answer=answer), message.timeout_s + GRACE_S)


def unequal(call: str, tensors: Mapping[int, Tensor]) -> CollectiveMismatchError:
    """The error of a call that needs tensors of one shape, and was given these by rank."""
    shapes = ", ".join(f"{tuple(each.shape)} by worker {rank}" for rank, each in tensors.items())
    return CollectiveMismatchError(
        f"{call} was given tensors of different shapes: {shapes}. Expected the same shape from every worker. Workers "
        'that lease their data train different numbers of batches: train with data="split"; or log the values with '
        'sync_dist=True; or collect them in a torchmetrics metric whose state has dist_reduce_fx="cat".'
    )


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
    if name not in TENSOR_REDUCTIONS:
        raise ValueError(f"reduce_op={op!r} is unknown. Expected one of {', '.join(map(repr, TENSOR_REDUCTIONS))}.")
    return name
