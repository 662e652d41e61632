"""Who takes part in a session, and the collectives of those who do. A pure state machine: no network, no threads.

A collective is completed by the *living*: the workers that were expected and have not left. Workers number their
collectives 1, 2, 3, ...; calls with the same number belong together and must agree in kind and name, so a worker that
skips, repeats or reorders one is told so at once instead of leaving everybody hanging.

Every method returns the answers that became due, as :class:`Delivery` objects for the service to send.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_asgd.errors import (
    ASGDError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ProtocolError,
    WorkerLostError,
)
from lightning_asgd.messages import Contribution

__all__ = ["Coordinator", "Delivery"]


@dataclass(frozen=True)
class Delivery:
    """An answer that is due: ``value`` (contributions by rank) or ``error`` for collective ``seq`` of ``worker``."""

    worker: int
    seq: int
    value: dict[int, Any] | None = None
    error: ASGDError | None = None


@dataclass
class _Operation:
    first: Contribution
    deadline: float
    contributions: dict[int, Any] = field(default_factory=dict)

    def signature(self) -> tuple[object, ...]:
        return _signature(self.first)


@dataclass
class Coordinator:
    """Membership and collectives of one session.

    Args:
        session: the session's name, for error texts.
        world_size: number of workers expected.
    """

    session: str
    world_size: int
    joined: set[int] = field(default_factory=set)
    left: dict[int, str] = field(default_factory=dict)  # worker -> reason, empty for an orderly end
    _operations: dict[int, _Operation] = field(default_factory=dict)
    _last_seq: dict[int, int] = field(default_factory=dict)

    @property
    def living(self) -> set[int]:
        """Workers that are expected and have not left."""
        return set(range(self.world_size)) - set(self.left)

    def join(self, worker: int) -> None:
        """Let a worker in; joining again (a new connection of the same worker) changes nothing.

        Raises:
            ProtocolError: the rank is not one of the session's.
            WorkerLostError: the worker was declared gone.
        """
        if not 0 <= worker < self.world_size:
            raise ProtocolError(
                f"Worker {worker} cannot join session {self.session!r}. Expected a rank below {self.world_size}. "
                "All workers must be started with the same number of devices and nodes."
            )
        if worker in self.left:
            raise WorkerLostError(
                f"Worker {worker} cannot join session {self.session!r} again: it was declared gone "
                f"({self.left[worker] or 'it had left'}). Start the job again, with a checkpoint to resume from."
            )
        self.joined.add(worker)

    def leave(self, worker: int, reason: str = "") -> list[Delivery]:
        """Take a worker out; collectives that waited for it alone are completed by the others.

        Returns:
            the answers that became due. A broadcast whose source left, and everything once worker 0 left for a
            reason (it alone logs and writes checkpoints), fails.
        """
        if worker in self.left:
            return []
        self.left[worker] = reason
        due: list[Delivery] = []
        for seq, operation in list(self._operations.items()):
            if operation.contributions.pop(worker, self) is not self:
                due.append(Delivery(worker, seq, error=self._gone(worker, operation.first)))
            due += self._settle(seq)
        return due

    def contribute(self, message: Contribution, now: float) -> list[Delivery]:
        """Take a worker's part in a collective.

        Args:
            message: the worker's part.
            now: time in seconds, on the clock that :meth:`expire` is called with.
        """
        worker, seq = message.worker, message.seq
        if worker in self.left:
            return [Delivery(worker, seq, error=self._gone(worker, message))]
        last = self._last_seq.get(worker, 0)
        operation = self._operations.get(seq)
        if seq <= last and not (operation is not None and worker in operation.contributions):
            error: ASGDError = ProtocolError(f"Worker {worker} called collective {seq} again after its answer.")
            return [Delivery(worker, seq, error=error)]
        self._last_seq[worker] = max(last, seq)
        if operation is None:
            operation = self._operations[seq] = _Operation(message, now + message.timeout_s)
        elif operation.signature() != _signature(message):
            error = CollectiveMismatchError(
                f"Workers disagree about collective {seq} of session {self.session!r}: worker {worker} called "
                f"{message.kind} {message.name!r} where {_workers(set(operation.contributions))} called "
                f"{operation.first.kind} {operation.first.name!r}. Expected every worker to make the same calls in "
                "the same order: look for a hook or callback that makes a collective call on some ranks only."
            )
            return [*self._fail(seq, error), Delivery(worker, seq, error=error)]
        operation.contributions[worker] = message.payload
        operation.deadline = max(operation.deadline, now + message.timeout_s)
        return self._settle(seq)

    def expire(self, now: float) -> list[Delivery]:
        """Fail the collectives whose time is up, naming the workers that are missing."""
        due: list[Delivery] = []
        for seq, operation in list(self._operations.items()):
            if now >= operation.deadline:
                missing = self.living - set(operation.contributions)
                never = missing - self.joined
                first = operation.first
                hint = f" {_workers(never)} never joined." if never else ""
                error = CollectiveTimeoutError(
                    f"{first.kind} {first.name!r} (collective {seq} of session {self.session!r}) was not completed "
                    f"within {first.timeout_s:g} s: {_workers(missing)} did not call it.{hint} Expected all of "
                    f"{sorted(self.living)}. Look at the missing workers' output, or raise timeouts.collective_s."
                )
                due += self._fail(seq, error)
        return due

    def _gone(self, worker: int, message: Contribution) -> ASGDError:
        return WorkerLostError(
            f"Worker {worker} called {message.kind} {message.name!r} after it was declared gone "
            f"({self.left[worker] or 'it had left'})."
        )

    def _hopeless(self, operation: _Operation) -> ASGDError | None:
        """Why an operation can never be completed, None if it can."""
        first = operation.first
        source = first.source
        if self.left.get(0):
            return WorkerLostError(
                f"Worker 0, which logs and writes the checkpoints, is gone ({self.left[0]}). "
                "Start the job again with trainer.fit(..., ckpt_path='last')."
            )
        if source is None or source in operation.contributions or source in self.living:
            return None
        fate = f"is gone ({self.left[source] or 'it left'})" if source in self.left else "does not exist"
        return WorkerLostError(
            f"{first.kind} {first.name!r} cannot be completed: worker {source}, whose value is needed, {fate}."
        )

    def _settle(self, seq: int) -> list[Delivery]:
        """Answer an operation if everybody is there or if it is hopeless."""
        operation = self._operations[seq]
        error = self._hopeless(operation)
        if error is not None:
            return self._fail(seq, error)
        if not self.living <= set(operation.contributions):
            return []
        del self._operations[seq]
        values = dict(sorted(operation.contributions.items()))
        source = operation.first.source
        if source is not None:
            values = {source: values[source]}
        target = operation.first.target
        return [
            Delivery(worker, seq, value=values if target in (None, worker) else {})
            for worker in sorted(operation.contributions)
        ]

    def _fail(self, seq: int, error: ASGDError) -> list[Delivery]:
        operation = self._operations.pop(seq)
        return [Delivery(worker, seq, error=error) for worker in sorted(operation.contributions)]


def _signature(message: Contribution) -> tuple[object, ...]:
    return message.kind, message.name, message.source, message.target


def _workers(ranks: set[int]) -> str:
    names = ", ".join(str(r) for r in sorted(ranks))
    return f"worker {names}" if len(ranks) == 1 else f"workers {names}"
