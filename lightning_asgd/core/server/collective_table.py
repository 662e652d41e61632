"""The collectives of a session's workers. A pure state machine: no network, no threads, time as an argument.

Workers number their collectives 1, 2, 3, ...; calls with the same number belong together and must agree in kind and
name, so a worker that skips, repeats or reorders one gets an error at once, and no worker hangs. A collective is
completed by the workers that the membership awaits, and reduced then if they want one value of all. The results of
collectives that a suspected worker missed are kept for it: when it rejoins it gets the results that the others got, and
takes part again from the first collective that is still open.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_asgd.core.foundation.errors import (
    ASGDError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ProtocolError,
    WorkerLostError,
)
from lightning_asgd.core.protocol import Contribution, JointReport, Reduced, ranks_of
from lightning_asgd.core.protocol.reductions import metrics_in, reduce
from lightning_asgd.core.server.membership import Membership
from lightning_asgd.core.server.pending_replies import Completion

_MISSED_AT_MOST = 1000  # collectives whose results are kept for suspected workers
_LATE_S = 30.0  # after which the logs name workers that have not joined


@dataclass
class _Operation:
    first: Contribution
    deadline: float
    contributions: dict[int, Contribution] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)  # workers without the result of a server that was lost
    missing: list[int] = field(default_factory=list)  # that were awaited when it was last filled; some may have called
    stops: bool = False  # whether a worker that called it has stopped training

    def signature(self) -> tuple[object, ...]:
        return _signature(self.first)


@dataclass
class _Missed:
    """The result of a collective, for the workers that it was completed without."""

    first: Contribution
    result: dict[int, Any] | Reduced
    absent: set[int]


@dataclass
class CollectiveTable:
    """Collectives in progress, and results that are kept for members that missed them."""

    members: Membership
    stopped: int = 0
    """Number of the collective in which a worker waits that has stopped training; 0 if there is none."""
    _operations: dict[int, _Operation] = field(default_factory=dict)
    _missed: dict[int, _Missed] = field(default_factory=dict)
    _last_seq: dict[int, int] = field(default_factory=dict)
    _forgotten: int = 0  # collectives that a predecessor has completed
    _completed: int = 0  # number of the latest that this one has
    _late: set[int] = field(default_factory=set)  # workers whose absence was published

    @property
    def needed(self) -> int:
        """The first collective that a worker may still call: the last that it took part in may be unanswered."""
        return max(0, min(self._missed, default=self._completed) - 1)

    def join(self, worker: int, now: float = 0.0, process: str = "", since: int | None = None) -> None:
        """Let a worker join or rejoin. If it was replaced, it takes part in collectives after number ``since``."""
        returns = self.members.join(worker, now, process) or (since is not None and worker in self.members.catching_up)
        for seq in [seq for seq in self._missed if since is not None and seq <= since]:
            self._caught_up(worker, seq)
        if returns and not any(worker in missed.absent for missed in self._missed.values()):
            self.members.welcome(worker)

    def replace(self, worker: int, process: str, now: float) -> list[Completion]:
        """Have another process take a worker's place; what is completed from now on is kept for it."""
        due = self.leave(worker, "it did not respond, and another process was started")
        self._last_seq.pop(worker, None)
        self.members.replace(worker, process, now)
        return due

    @property
    def completed(self) -> int:
        """Number of the latest collective that was completed."""
        return max(self._completed, self._forgotten)

    def resume(self, answered: int) -> None:
        """Continue for a lost server; ``answered`` is the latest collective that it answered any worker.

        Some workers may lack its result: all make that call again. Workers report the results of earlier collectives if
        a worker that missed them needs them.
        """
        self._forgotten = max(0, answered - 1)

    def leave(self, worker: int, reason: str = "", details: str = "") -> list[Completion]:
        """Take a worker out; the others complete the collectives that waited for it alone.

        A broadcast whose source left fails; so does everything once the chief left for a reason, where no other worker
        may become chief.
        """
        if not self.members.leave(worker, reason, details):
            return []
        self._caught_up_on_all(worker)
        due: list[Completion] = []
        for operation in self._operations.values():
            contribution = operation.contributions.pop(worker, None)
            if contribution is not None:
                due.append(Completion(contribution, self._gone(worker, operation.first)))
        return due + self._complete_all_ready()

    def abort(self, why: str) -> list[Completion]:
        """End the session for all workers."""
        self.members.end(why)
        return self._complete_all_ready()

    def contribute(self, message: Contribution, now: float) -> list[Completion]:
        """Take a worker's part in a collective."""
        worker, seq = message.worker, message.seq
        if worker in self.members.left:
            return [Completion(message, self._gone(worker, message))]
        for earlier in [earlier for earlier in self._missed if earlier < seq]:
            self._caught_up(worker, earlier)  # it was answered, perhaps by a predecessor
        if self.members.aborted:
            return [Completion(message, WorkerLostError(self.members.aborted))]
        if seq in self._missed and worker in self._missed[seq].absent:
            return [self._late_result(message)]
        if seq <= self._forgotten and message.answer is not None:
            return self._take_over(message, message.answer)
        if seq <= self._forgotten:
            error: ASGDError = WorkerLostError(
                f"Worker {worker} calls {message.kind} {message.name!r}, which the others completed without it, and "
                f"its result was lost with a server."
            )
            return [Completion(message, error)]
        last = self._last_seq.get(worker, 0)
        operation = self._operations.get(seq)
        if seq <= last and not (operation is not None and worker in operation.contributions):
            error = ProtocolError(f"Worker {worker} called collective {seq} again after its answer.")
            return [Completion(message, error)]
        self._last_seq[worker] = max(last, seq)
        if worker in self.members.catching_up or worker in self.members.suspected:
            self.members.welcome(worker)
        if operation is None:
            operation = self._operations[seq] = _Operation(message, now + message.timeout_s)
        elif operation.signature() != _signature(message):
            error = self._disagree(message, operation.first, set(operation.contributions))
            return [*self._fail(seq, error), Completion(message, error)]
        operation.contributions[worker] = message
        operation.stops |= message.stops
        self._note_stopped()
        if message.answer is not None and message.target in (None, worker):
            # A server that was lost had completed it: the others get the same result, now or when they call.
            return self._complete(seq, message.answer, self.members.expected - set(self.members.left))
        if message.answer is None:
            operation.waiting.add(worker)
        operation.deadline = max(operation.deadline, now + message.timeout_s)
        return self._complete_if_ready(seq)

    def called(self, worker: int, seq: int) -> Contribution | None:
        """A worker's part in a collective that is in progress."""
        operation = self._operations.get(seq)
        return None if operation is None else operation.contributions.get(worker)

    @property
    def member_counts(self) -> tuple[int, ...]:
        """Sizes of four sets of members. One of them differs after :meth:`contribute` if that changed the members."""
        members = self.members
        return len(members.suspected), len(members.catching_up), len(members.fenced), len(members.left)

    def may_be_at_odds(self, claiming: int) -> bool:
        """Whether all may wait in one collective but those that wait for data, whose number is given."""
        others = len(self.members.living) - claiming
        return claiming > 0 and any(len(each.waiting) >= others for each in self._operations.values())

    def at_odds(self, claiming: Collection[int]) -> set[int]:
        """The workers that wait in a collective while all the others wait for data, if that is so."""
        if self.members.catching_up - set(claiming):
            return set()  # a worker that is catching up may train what others wait for
        others = self.members.living - set(claiming)
        waits = any(others <= operation.waiting for operation in self._operations.values())
        return others if waits and self.members.living & set(claiming) else set()

    def separate(self, claiming: dict[int, str]) -> list[Completion]:
        """Fail a collective that some wait for while all others (``claiming``) wait for data. They get the error."""
        training, others = self.members.living & set(claiming), self.at_odds(claiming)
        due: list[Completion] = []
        for seq, operation in list(self._operations.items()):
            if others and others <= operation.waiting:
                first = operation.first
                error = CollectiveMismatchError(
                    f"Workers disagree about what follows in session {self.members.session!r}: {_workers(others)} "
                    f"called {first.kind} {first.name!r}, where data of epoch {claiming[min(training)]} were expected "
                    f"by {_workers(training)}. Expected every worker to train the same epochs: look for Trainer "
                    "arguments, hooks or callbacks that end training on some ranks only."
                )
                due += self._fail(seq, error)
        return due

    def expire(self, now: float) -> list[Completion]:
        """Suspect silent workers; fail the collectives whose time is up, and name the missing workers."""
        due = self._complete_all_ready() if self.members.suspect_silent(now) else []
        for seq, operation in list(self._operations.items()):
            first = operation.first
            missing = self.members.awaited - set(operation.contributions)
            never = missing - self.members.joined
            if never - self._late and now >= operation.deadline - first.timeout_s + _LATE_S:
                self._late |= never
                self.members.publish(f"{_workers(never).capitalize()} did not join within {_LATE_S:g} s. Others wait.")
            if now >= operation.deadline:
                hint = f" {_workers(never).capitalize()} never joined." if never else ""
                error = CollectiveTimeoutError(
                    f"{first.kind} {first.name!r} (collective {seq} of session {self.members.session!r}) was not "
                    f"completed within {first.timeout_s:g} s: {_workers(missing)} did not call it.{hint} Expected all "
                    f"of {sorted(self.members.awaited)}. Look at the missing workers' output, or raise "
                    "timeouts.collective_s."
                )
                due += self._fail(seq, error)
        return due

    def _late_result(self, message: Contribution) -> Completion:
        """Give a late caller the result that the others got."""
        worker, seq = message.worker, message.seq
        missed = self._missed[seq]
        self._last_seq[worker] = max(seq, self._last_seq.get(worker, 0))
        self._caught_up(worker, seq)
        if _signature(message) != _signature(missed.first):
            return Completion(message, self._disagree(message, missed.first, set(ranks_of(missed.result))))
        return Completion(message, missed.result)

    def _caught_up(self, worker: int, seq: int) -> None:
        self._missed[seq].absent.discard(worker)
        if not self._missed[seq].absent:
            del self._missed[seq]

    def _caught_up_on_all(self, worker: int) -> None:
        for seq in list(self._missed):
            self._caught_up(worker, seq)

    def _take_over(self, message: Contribution, answer: dict[int, Any] | Reduced) -> list[Completion]:
        """Take the result of a collective from a worker that a lost server had given it to."""
        if message.seq not in self._missed:
            self._keep(
                message, answer, self.members.expected - set(self.members.left) - {message.worker, message.target}
            )
        return [Completion(message, answer)]

    def _keep(self, first: Contribution, result: dict[int, Any] | Reduced, absent: set[int]) -> None:
        """Keep the result of a collective for workers that have yet to call it."""
        if not absent:
            return
        self._missed[first.seq] = _Missed(first, result if first.target is None else {}, absent)
        if len(self._missed) > _MISSED_AT_MOST:
            for worker in list(self._missed[min(self._missed)].absent):
                self.members.give_up(worker, f"it missed more than {_MISSED_AT_MOST} collectives")
                self._caught_up_on_all(worker)

    def _disagree(self, message: Contribution, first: Contribution, others: set[int]) -> ASGDError:
        mine, theirs = f"{message.kind} {message.name!r}", f"{first.kind} {first.name!r}"
        if mine == theirs and message.reduction != first.reduction:
            mine, theirs = f"{mine} by {message.reduction!r}", f"{theirs} by {first.reduction!r}"
        return CollectiveMismatchError(
            f"Workers disagree about collective {message.seq} of session {self.members.session!r}: worker "
            f"{message.worker} called {mine} where {_workers(others)} called {theirs}. Expected every "
            "worker to make the same calls in the same order: look for a hook or callback that makes a collective call "
            "on some ranks only."
        )

    def _not_reducible(self, first: Contribution, cause: Exception) -> ASGDError:
        return CollectiveMismatchError(
            f"{first.kind} {first.name!r} (collective {first.seq} of session {self.members.session!r}) could not be "
            f"reduced by {first.reduction!r}: {str(cause) or repr(cause)}. Expected every worker to give values of the "
            "same kind and shape."
        )

    def _gone(self, worker: int, message: Contribution) -> ASGDError:
        return WorkerLostError(
            f"Worker {worker} called {message.kind} {message.name!r} after it was declared lost "
            f"({self.members.left[worker] or 'it had left'})."
        )

    def _why_impossible(self, operation: _Operation) -> ASGDError | None:
        """Why an operation can never be completed; None if it can."""
        first = operation.first
        source = first.source
        if self.members.aborted:
            return WorkerLostError(self.members.aborted)
        if source is None or source in operation.contributions or self._is_awaited(source):
            return None
        fate = "does not exist"
        if source in self.members.left:
            fate = f"is lost ({self.members.left[source] or 'it left'})"
        elif source < self.members.world_size:
            fate = self.members.suspected.get(source, "is behind")
        return WorkerLostError(
            f"{first.kind} {first.name!r} cannot be completed: worker {source}, whose value is needed, {fate}."
        )

    def _complete_all_ready(self) -> list[Completion]:
        return [completion for seq in list(self._operations) for completion in self._complete_if_ready(seq)]

    def _complete_if_ready(self, seq: int) -> list[Completion]:
        """Complete a collective if all awaited workers have called it; fail it if it can never be completed."""
        operation = self._operations[seq]
        error = self._why_impossible(operation)
        if error is not None:
            return self._fail(seq, error)
        if self._waits(operation):
            return []
        first = operation.first
        result: dict[int, Any] | Reduced
        result = {worker: message.payload for worker, message in sorted(operation.contributions.items())}
        if first.source is not None:
            result = {first.source: result[first.source]}
        if first.reduction:
            try:
                result = reduce(first.reduction, result)
            except Exception as cause:  # a worker may send anything
                return self._fail(seq, self._not_reducible(first, cause))
        return self._complete(seq, result, set(self.members.suspected) | self.members.catching_up)

    def _waits(self, operation: _Operation) -> bool:
        """Whether an awaited worker has not called it."""
        # Each of thousands of contributions asks this. So it looks for one such worker, and for all only where it must.
        missing = operation.missing
        while missing:
            if missing[-1] not in operation.contributions and self._is_awaited(missing[-1]):
                return True
            missing.pop()
        missing += sorted(self.members.awaited - operation.contributions.keys())
        return bool(missing)

    def _is_awaited(self, worker: int) -> bool:
        """Whether no collective is completed without a worker: see :attr:`Membership.awaited`."""
        members = self.members
        there = 0 <= worker < members.world_size if members.world_size else worker in members.joined
        away = worker in members.suspected or worker in members.catching_up
        return there and worker not in members.left and (not away or worker == members.agreed_chief)

    def _complete(self, seq: int, result: dict[int, Any] | Reduced, others: set[int]) -> list[Completion]:
        """Give the result to the workers that have called, and keep it for the others."""
        operation = self._operations.pop(seq)
        self._note_stopped()
        self._completed = max(self._completed, seq)
        if operation.first.reaches_all:
            self.members.agree_on_chief(ranks_of(result))
        self._keep(operation.first, result, others - set(operation.contributions))
        target, contributions = operation.first.target, operation.contributions
        replies = {worker: result if target in (None, worker) else {} for worker in sorted(contributions)}
        if isinstance(result, Reduced) and isinstance(result.value, JointReport):  # its chief logs all metrics
            payloads = {worker: message.payload for worker, message in contributions.items()}
            whole = replace(result, value=replace(result.value, figures=metrics_in(payloads)))
            replies |= {worker: whole for worker in replies if worker == self.members.agreed_chief}
        return [Completion(contributions[worker], reply) for worker, reply in replies.items()]

    def _fail(self, seq: int, error: ASGDError) -> list[Completion]:
        operation = self._operations.pop(seq)
        self._note_stopped()
        return [Completion(message, error) for _, message in sorted(operation.contributions.items())]

    def _note_stopped(self) -> None:
        self.stopped = max((seq for seq, operation in self._operations.items() if operation.stops), default=0)


def _signature(message: Contribution) -> tuple[object, ...]:
    return message.kind, message.name, message.source, message.target, message.reduction


def _workers(ranks: set[int]) -> str:
    names = ", ".join(str(r) for r in sorted(ranks))
    return f"worker {names}" if len(ranks) == 1 else f"workers {names}"
