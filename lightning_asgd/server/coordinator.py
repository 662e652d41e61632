"""Who takes part in a session, and the collectives of those who do. A pure state machine: no network, no threads.

A collective is completed by the *living*: the workers that were expected and are neither gone nor away. Workers number
their collectives 1, 2, 3, ...; calls with the same number belong together and must agree in kind and name, so a worker
that skips, repeats or reorders one is told so at once instead of leaving everybody hanging.

A worker that gives no sign of life is *away*. Nobody waits for it; what the others' collectives came to is kept for it,
so that it can catch up when it wakes: it gets the answers that they got, and takes part again from the first one that
is still open. Only worker 0, which logs and writes checkpoints, is waited for at sync points as long as it is not gone.

Every method returns the replies that became due.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from lightning_asgd.errors import (
    ASGDError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ProtocolError,
    WorkerAwayError,
    WorkerLostError,
)
from lightning_asgd.protocol import Contribution, Policy, WorkerMetrics
from lightning_asgd.server.pending_replies import Completion

__all__ = ["Coordinator"]

_SLEPT_S = 2.0  # between two calls of expire(): longer, and it was this process that slept
_TOLD_S = 60.0  # in which all workers notice that a server was lost and restored
_UNHEARD = 1000  # numbers that may have been given without its having heard of them
_SOONER = 0.7  # part of the patience that is the other servers'
_MISSED_AT_MOST = 1000  # collectives that are kept for workers that are away


@dataclass
class _Operation:
    first: Contribution
    deadline: float
    contributions: dict[int, Contribution] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)  # those who have not been answered by a predecessor
    stops: bool = False  # whether one of those who have come trains no more

    def signature(self) -> tuple[object, ...]:
        return _signature(self.first)


@dataclass
class _Missed:
    """A collective that was completed without workers that are away."""

    first: Contribution
    values: dict[int, Any]
    absent: set[int]


@dataclass
class Coordinator:
    """Membership and collectives of one session.

    Args:
        session: the session's name, for error texts.
        world_size: number of workers expected; 0 in a run whose workers come and go.
        policy: what is done about workers that are silent or gone.
        index: number of the server that this belongs to. The first one's word counts; the others lose patience sooner,
            so that they never take a push which it would refuse.
        left: workers that are gone, and why; empty for an orderly end.
        away: workers that are away, and why.
    """

    session: str
    world_size: int
    policy: Policy = field(default_factory=Policy)
    index: int = 0
    left: dict[int, str] = field(default_factory=dict)
    away: dict[int, str] = field(default_factory=dict)  # silent, and why nobody waits for them
    joined: set[int] = field(default_factory=set)
    behind: set[int] = field(default_factory=set)  # back, but with collectives to catch up on
    fenced: set[int] = field(default_factory=set)  # were away, and must not train before they have joined again
    incarnations: dict[int, int] = field(default_factory=dict)  # how often a worker was declared away
    news: list[str] = field(default_factory=list)  # for people
    admitted: int = 0  # the highest number that was given
    unheard: set[int] = field(default_factory=set)  # admitted, but perhaps not there any more
    about: dict[int, str] = field(default_factory=dict)  # what workers that came by themselves are, for people
    aborted: str = ""  # why the session is over
    figures: dict[int, WorkerMetrics] = field(default_factory=dict)  # the latest of each worker that takes any
    _heard: dict[int, float] = field(default_factory=dict)  # when
    _looked: float | None = None
    _operations: dict[int, _Operation] = field(default_factory=dict)
    _missed: dict[int, _Missed] = field(default_factory=dict)
    _last_seq: dict[int, int] = field(default_factory=dict)
    _forgotten: int = 0  # collectives that a predecessor has completed
    _completed: int = 0  # number of the latest that this one has

    @property
    def living(self) -> set[int]:
        """Workers that are expected, and neither gone nor away."""
        return self._expected - set(self.left) - set(self.away) - self.behind

    @property
    def _expected(self) -> set[int]:
        return set(range(self.world_size)) if self.world_size else self.joined

    @property
    def chief(self) -> int:
        """The worker that logs and writes checkpoints; where workers come and go, the one that is there longest."""
        return 0 if self.world_size else min(self.trusted - self.unheard or self.trusted or self.living, default=0)

    @property
    def trusted(self) -> set[int]:
        """Those of the living who may train."""
        return self.living - self.fenced

    @property
    def stopped(self) -> int:
        """Number of the collective in which a worker waits that trains no more; 0 if there is none."""
        return max((seq for seq, operation in self._operations.items() if operation.stops), default=0)

    @property
    def expected_back(self) -> set[int]:
        """Workers that are away, but for those that may have gone before they were let in."""
        return set(self.away) - self.unheard

    @property
    def needed(self) -> int:
        """Number of the first collective that somebody may still ask for: one before those that it has missed.

        It took part in that, and may not have been answered.
        """
        return max(0, min(self._missed, default=self._completed) - 1)

    @property
    def membership(self) -> tuple[frozenset[int], ...]:
        """To find out by whether anything has changed about it."""
        return frozenset(self.living), frozenset(self.behind), frozenset(self.fenced)

    @property
    def _awaited(self) -> set[int]:
        """Workers without which no collective is completed."""
        return self.living | ({0} & self._expected - set(self.left))

    def check(self, worker: int) -> None:
        """Whether a worker may train.

        Raises:
            WorkerLostError: the session was ended, or the worker was declared gone.
            WorkerAwayError: the others go on without it, until it joins again.
        """
        if self.aborted:
            raise WorkerLostError(self.aborted)
        if worker in self.left:  # what it asked for before may come after that
            raise WorkerLostError(f"Worker {worker} was declared gone ({self.left[worker] or 'it had left'}).")
        if worker in self.fenced or worker in self.away:
            reason = self.away.get(worker, "was away")
            raise WorkerAwayError(f"Worker {worker} {reason}. Expected it to join again.")

    def silent_s(self, worker: int, now: float) -> float:
        """Seconds since a worker's last sign of life."""
        return now - self._heard.get(worker, now)

    def hear(self, worker: int, now: float) -> None:
        """Take any message as a sign of life."""
        self._heard[worker] = now
        self.unheard.discard(worker)

    def admit(self, about: str, now: float) -> int:
        """Let a worker into a run whose workers come and go.

        Returns:
            its number, which nobody else has had: counted from 1.
        """
        worker = self.admitted = self.admitted + 1
        self.about[worker] = about
        self.join(worker, now)
        self.unheard.add(worker)
        self.news.append(f"Worker {worker} ({about}) has come.")
        return worker

    def join(self, worker: int, now: float = 0.0) -> None:
        """Let a worker in; joining again (a new connection, or one that was away) does no harm.

        Raises:
            ProtocolError: the rank is not one of the session's.
            WorkerLostError: the worker was declared gone.
        """
        if self.world_size and not 0 <= worker < self.world_size:
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
        self.fenced.discard(worker)
        self._heard[worker] = now
        if self.away.pop(worker, None) is not None:
            if any(worker in missed.absent for missed in self._missed.values()):
                self.behind.add(worker)
            else:
                self._welcome(worker)

    def restore(self, now: float, holding: Collection[int] = (), admitted: int = 0) -> None:
        """Take the place of a coordinator that was lost: all that are not gone are expected to tell of themselves.

        They are given longer for it: one that is busy for long may hold the newest state, and nobody else would.

        Args:
            now: time in seconds.
            holding: where workers come and go, those that hold the weights as far as a worker knows.
            admitted: the highest number that it knows to be given.
        """
        for worker in (set(range(self.world_size)) | set(holding)) - set(self.left) - self.joined:
            self.joined.add(worker)
            self._heard[worker] = now + _TOLD_S
        self.admitted = max(self.admitted, admitted + _UNHEARD)

    def resume(self, answered: int, incarnations: dict[int, int], fenced: set[int]) -> None:
        """Go on where this one's predecessor was lost.

        Args:
            answered: number of the latest collective that anybody was answered. Some may not have been: all make it
                again. What earlier ones came to workers tell, as far as somebody who was not there needs it.
            incarnations: how often workers were declared away.
            fenced: those who do not know it yet.
        """
        # Whom this one has declared away meanwhile, and who does not know, the next one must not take for one that was
        # there.
        own = {worker: incarnation for worker, incarnation in self.incarnations.items() if worker in self.fenced}
        self.incarnations = {
            worker: incarnations.get(worker, 0) + own.get(worker, 0) for worker in {*incarnations, *own}
        }
        self.fenced |= fenced
        self._forgotten = max(0, answered - 1)
        self.news.append("A server was lost, and restored from what the workers hold.")

    def leave(self, worker: int, reason: str = "") -> list[Completion]:
        """Take a worker out; collectives that waited for it alone are completed by the others.

        Args:
            worker: which one.
            reason: why; empty for an orderly end.

        Returns:
            the answers that became due. A broadcast whose source left, and everything once worker 0 left for a
            reason (it alone logs and writes checkpoints), fails.
        """
        if worker in self.left or worker not in self._expected:
            return []
        self._give_up(worker, reason)
        due: list[Completion] = []
        for operation in self._operations.values():
            contribution = operation.contributions.pop(worker, None)
            if contribution is not None:
                due.append(Completion(contribution, self._gone(worker, operation.first)))
        if not self.world_size:
            self.news.append(f"Worker {worker} has left{f': {reason}' if reason else ''}.")
        elif reason:
            self._lose(worker, f"is gone ({reason})")
        return due + self._settle_all()

    def abort(self, why: str) -> list[Completion]:
        """End the session for all workers.

        Returns:
            the answers that became due.
        """
        self._end(why)
        return self._settle_all()

    def contribute(self, message: Contribution, now: float) -> list[Completion]:
        """Take a worker's part in a collective.

        Args:
            message: the worker's part.
            now: time in seconds, on the clock that :meth:`expire` is called with.
        """
        worker, seq = message.worker, message.seq
        if worker in self.left:
            return [Completion(message, self._gone(worker, message))]
        for earlier in [earlier for earlier in self._missed if earlier < seq]:
            self._caught_up(worker, earlier)  # it was answered, perhaps by a predecessor
        if self.aborted:
            return [Completion(message, WorkerLostError(self.aborted))]
        if seq in self._missed and worker in self._missed[seq].absent:
            return [self._tell(message)]
        if seq <= self._forgotten and message.answer is not None:
            return self._take_over(message, message.answer)
        if seq <= self._forgotten:
            error: ASGDError = WorkerLostError(
                f"Worker {worker} calls {message.kind} {message.name!r}, which the others have gone on from without "
                "it, and what it came to was lost with a server."
            )
            return [Completion(message, error)]
        last = self._last_seq.get(worker, 0)
        operation = self._operations.get(seq)
        if seq <= last and not (operation is not None and worker in operation.contributions):
            error = ProtocolError(f"Worker {worker} called collective {seq} again after its answer.")
            return [Completion(message, error)]
        self._last_seq[worker] = max(last, seq)
        if worker in self.behind or worker in self.away:
            self._welcome(worker)
        if operation is None:
            operation = self._operations[seq] = _Operation(message, now + message.timeout_s)
        elif operation.signature() != _signature(message):
            error = self._disagree(message, operation.first, set(operation.contributions))
            return [*self._fail(seq, error), Completion(message, error)]
        operation.contributions[worker] = message
        operation.stops |= message.stops
        if message.answer is not None and message.target in (None, worker):
            # A predecessor had completed it: the rest is answered likewise, now or when it comes.
            return self._complete(seq, message.answer, self._expected - set(self.left))
        if message.answer is None:
            operation.waiting.add(worker)
        operation.deadline = max(operation.deadline, now + message.timeout_s)
        return self._settle(seq)

    def at_odds(self, claiming: Collection[int]) -> set[int]:
        """Those who wait in a collective while all the others wait for data; nobody if it is not so."""
        if self.behind - set(claiming):
            return set()  # one that nobody waits for in collectives may train what others wait for
        others = self.living - set(claiming)
        waits = any(others <= operation.waiting for operation in self._operations.values())
        return others if waits and self.living & set(claiming) else set()

    def separate(self, claiming: dict[int, str]) -> list[Completion]:
        """Fail a collective that some wait in while all the others wait for data: neither would ever end.

        Args:
            claiming: workers that wait for data, and of which epoch. They are to be told the same.
        """
        training, others = self.living & set(claiming), self.at_odds(claiming)
        due: list[Completion] = []
        for seq, operation in list(self._operations.items()):
            if others and others <= operation.waiting:
                first = operation.first
                error = CollectiveMismatchError(
                    f"Workers disagree about what follows in session {self.session!r}: {_workers(others)} called "
                    f"{first.kind} {first.name!r}, where data of epoch {claiming[min(training)]} were expected by "
                    f"{_workers(training)}. Expected every worker to train the same epochs: look for Trainer "
                    "arguments, hooks or callbacks that end training on some ranks only."
                )
                due += self._fail(seq, error)
        return due

    def expire(self, now: float) -> list[Completion]:
        """Go on without workers that are silent; fail the collectives whose time is up, naming who is missing.

        To be called a few times a second.
        """
        due = self._go_without_the_silent(now)
        for seq, operation in list(self._operations.items()):
            if now >= operation.deadline:
                missing = self._awaited - set(operation.contributions)
                never = missing - self.joined
                first = operation.first
                hint = f" {_workers(never)} never joined." if never else ""
                error = CollectiveTimeoutError(
                    f"{first.kind} {first.name!r} (collective {seq} of session {self.session!r}) was not completed "
                    f"within {first.timeout_s:g} s: {_workers(missing)} did not call it.{hint} Expected all of "
                    f"{sorted(self._awaited)}. Look at the missing workers' output, or raise timeouts.collective_s."
                )
                due += self._fail(seq, error)
        return due

    def _go_without_the_silent(self, now: float) -> list[Completion]:
        slept = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if slept > _SLEPT_S:  # nobody could have been heard
            self._heard = {worker: at + slept for worker, at in self._heard.items()}
        patience = self.policy.silence_s * (1 if self.index == 0 else _SOONER)
        silent = {w for w in self.joined - set(self.left) - set(self.away) if now - self._heard.get(w, now) > patience}
        if not patience or not silent:
            return []
        for worker in sorted(silent):
            reason = f"gave no sign of life for {now - self._heard[worker]:.0f} s"
            self.away[worker] = f"{reason}, so the others went on without it"
            self.fenced.add(worker)
            self.incarnations[worker] = self.incarnations.get(worker, 0) + 1
            self.behind.discard(worker)
            if self.index > 0:
                continue  # the first server says what follows
            if not self._lose(worker, reason):
                self.news.append(f"Worker {worker} {reason}; the others go on without it. It may come back.")
        return self._settle_all()

    def _give_up(self, worker: int, reason: str) -> None:
        """Keep nothing for a worker any more."""
        self.left[worker] = reason
        self.away.pop(worker, None)
        self.behind.discard(worker)
        self.fenced.discard(worker)
        self.unheard.discard(worker)
        for seq in list(self._missed):
            self._caught_up(worker, seq)

    def _lose(self, worker: int, fate: str) -> bool:
        """End the session if it cannot or must not do without a worker."""
        left = len(self.living | self.behind)
        why = ""
        if worker == 0 and 0 in self.left:
            why = f"Worker 0, which logs and writes the checkpoints, {fate}."
        elif self.policy.abort:
            why = f"Worker {worker} {fate}, and on_worker_failure='abort'."
        elif 0 < left < self.policy.min_workers:  # with none left, it may be this process's network that is away
            why = f"Worker {worker} {fate}. {left} are left, and min_workers={self.policy.min_workers}."
        if why:
            self._end(f"{why} Start the job again with trainer.fit(..., ckpt_path='last').")
        return bool(why)

    def _end(self, why: str) -> None:
        if not self.aborted:
            self.aborted = why
            self.news.append(why)

    def _welcome(self, worker: int) -> None:
        self.away.pop(worker, None)
        self.behind.discard(worker)
        self.news.append(f"Worker {worker} is back.")

    def _tell(self, message: Contribution) -> Completion:
        """Answer one that is late as the others were answered."""
        worker, seq = message.worker, message.seq
        missed = self._missed[seq]
        self._last_seq[worker] = max(seq, self._last_seq.get(worker, 0))
        self._caught_up(worker, seq)
        if _signature(message) != _signature(missed.first):
            return Completion(message, self._disagree(message, missed.first, set(missed.values)))
        return Completion(message, missed.values)

    def _caught_up(self, worker: int, seq: int) -> None:
        self._missed[seq].absent.discard(worker)
        if not self._missed[seq].absent:
            del self._missed[seq]

    def _take_over(self, message: Contribution, answer: dict[int, Any]) -> list[Completion]:
        """Take a worker's word for what a collective came to that a predecessor had completed without others."""
        if message.seq not in self._missed:
            self._keep(message, answer, self._expected - set(self.left) - {message.worker, message.target})
        return [Completion(message, answer)]

    def _keep(self, first: Contribution, values: dict[int, Any], absent: set[int]) -> None:
        """Keep what a collective came to for workers that have yet to call it."""
        if not absent:
            return
        self._missed[first.seq] = _Missed(first, values if first.target is None else {}, absent)
        if len(self._missed) > _MISSED_AT_MOST:
            for worker in list(self._missed[min(self._missed)].absent):
                self._give_up(worker, f"it missed more than {_MISSED_AT_MOST} collectives")

    def _disagree(self, message: Contribution, first: Contribution, others: set[int]) -> ASGDError:
        return CollectiveMismatchError(
            f"Workers disagree about collective {message.seq} of session {self.session!r}: worker {message.worker} "
            f"called {message.kind} {message.name!r} where {_workers(others)} called {first.kind} {first.name!r}. "
            "Expected every worker to make the same calls in the same order: look for a hook or callback that makes a "
            "collective call on some ranks only."
        )

    def _gone(self, worker: int, message: Contribution) -> ASGDError:
        return WorkerLostError(
            f"Worker {worker} called {message.kind} {message.name!r} after it was declared gone "
            f"({self.left[worker] or 'it had left'})."
        )

    def _hopeless(self, operation: _Operation) -> ASGDError | None:
        """Why an operation can never be completed, None if it can."""
        first = operation.first
        source = first.source
        if self.aborted:
            return WorkerLostError(self.aborted)
        if source is None or source in operation.contributions or source in self._awaited:
            return None
        fate = "does not exist"
        if source in self.left:
            fate = f"is gone ({self.left[source] or 'it left'})"
        elif source < self.world_size:
            fate = self.away.get(source, "is behind")
        return WorkerLostError(
            f"{first.kind} {first.name!r} cannot be completed: worker {source}, whose value is needed, {fate}."
        )

    def _settle_all(self) -> list[Completion]:
        return [delivery for seq in list(self._operations) for delivery in self._settle(seq)]

    def _settle(self, seq: int) -> list[Completion]:
        """Answer an operation if everybody is there or if it is hopeless."""
        operation = self._operations[seq]
        error = self._hopeless(operation)
        if error is not None:
            return self._fail(seq, error)
        if not self._awaited <= set(operation.contributions):
            return []
        values = {worker: message.payload for worker, message in sorted(operation.contributions.items())}
        source = operation.first.source
        if source is not None:
            values = {source: values[source]}
        return self._complete(seq, values, set(self.away) | self.behind)

    def _complete(self, seq: int, values: dict[int, Any], others: set[int]) -> list[Completion]:
        """Answer those who have called a collective, and keep it for others."""
        operation = self._operations.pop(seq)
        self._completed = max(self._completed, seq)
        self._keep(operation.first, values, others - set(operation.contributions))
        target = operation.first.target
        return [
            Completion(message, values if target in (None, worker) else {})
            for worker, message in sorted(operation.contributions.items())
        ]

    def _fail(self, seq: int, error: ASGDError) -> list[Completion]:
        operation = self._operations.pop(seq)
        return [Completion(message, error) for _, message in sorted(operation.contributions.items())]


def _signature(message: Contribution) -> tuple[object, ...]:
    return message.kind, message.name, message.source, message.target


def _workers(ranks: set[int]) -> str:
    names = ", ".join(str(r) for r in sorted(ranks))
    return f"worker {names}" if len(ranks) == 1 else f"workers {names}"
