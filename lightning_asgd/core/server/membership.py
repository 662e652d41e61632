"""Who takes part in a session. A pure state machine: no network, no threads, time as an argument.

A worker whose heartbeats do not arrive is *suspected*: the others continue without it. It is also *fenced*: its pushes
are rejected until it rejoins. A worker that rejoins may have missed collectives; until it has their results it is
*catching up*: it trains, but no worker waits for it. The chief, which logs and writes checkpoints, is the exception: at
sync points it is waited for even while suspected, as long as it has not left. A job's first chief is worker 0. When the
chief has left, the workers agree on another one with the results of their next collective: all of them get the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from lightning_asgd.core.foundation.errors import LaunchError, ProtocolError, WorkerAwayError, WorkerLostError
from lightning_asgd.core.foundation.process_name import for_users
from lightning_asgd.core.protocol import Join, Policy, WorkerMetrics, next_chief

_SUSPENDED_S = 2.0  # a longer time between two looks: this process was suspended


class SilenceDetector:
    """Remembers when the longest-silent worker was heard, and looks at all once that one could be overdue."""

    def __init__(self) -> None:
        self._first_heard = -math.inf  # when all had been heard, as they were looked at, or earlier
        self._looked: float | None = None
        self._put_off = False  # whether the latest look came late

    def recheck(self) -> None:
        """Look at every worker next time: one may have been added, or its last heartbeat moved back."""
        self._first_heard = -math.inf

    def silent(
        self, heard: dict[int, float], there: Callable[[], Collection[int]], timeout_s: float, now: float
    ) -> list[int]:
        """The workers that are ``there`` and have been silent for longer than a time, in order.

        ``heard`` says when each was heard last. If this process was suspended, that is put off by as long.
        """
        suspended_s = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        late = suspended_s > _SUSPENDED_S
        if late and not self._put_off:  # no heartbeat could be taken; one late look after the other is a busy server
            heard.update({worker: at + suspended_s for worker, at in heard.items()})
        self._put_off = late
        if not timeout_s or now - self._first_heard <= timeout_s:
            return []
        at = {worker: heard.get(worker, now) for worker in there()}
        self._first_heard = min([now, *at.values()])  # those that join later are heard later
        return sorted(worker for worker, when in at.items() if now - when > timeout_s)


_MOST_LOST_S = 15.0  # others look for another host after 20 s (`HeartbeatThread`)
_REPORT_S = 60.0  # in which all workers notice that a server was lost, report to its replacement and replay
_UNHEARD = 1000  # numbers that a lost server may have assigned without any other worker knowing
_STRANGERS = 10_000  # workers that are heard of without having joined
_EVENTS = 1000  # that are kept at least
_REMEMBERED = 100  # workers of an elastic run that have left, of which something is still known
_AWAY_S = 600.0  # after which a silent worker of an elastic run is forgotten
_REFUSALS = 20  # events about refused processes, of which there may be very many
_SOONER = 0.7  # the failure timeout of the other servers, as a part of server 0's


@dataclass
class Membership:
    """The workers of one session.

    Server 0 (``index``) is authoritative; the others use a shorter failure timeout, so that they never take a push
    which it would reject. ``world_size`` is 0 in an elastic run. The reason in ``left`` is empty for an orderly end.
    A worker is one process (``processes``), which joined first: another one that claims its rank while it is alive is a
    second start of it, or belongs to another job.
    """

    session: str
    world_size: int
    policy: Policy = field(default_factory=Policy)
    index: int = 0
    left: dict[int, str] = field(default_factory=dict)  # and why
    suspected: dict[int, str] = field(default_factory=dict)  # and why
    joined: set[int] = field(default_factory=set)
    processes: dict[int, str] = field(default_factory=dict)  # that the workers are, by name
    refused: set[str] = field(default_factory=set)  # processes that claimed another one's rank, the first few
    catching_up: set[int] = field(default_factory=set)
    fenced: set[int] = field(default_factory=set)
    incarnations: dict[int, int] = field(default_factory=dict)  # how often a worker was suspected
    events: list[str] = field(default_factory=list)  # for the workers' logs: the latest
    forgotten: int = 0  # earlier events
    admitted: int = 0  # the highest number that was given
    unheard: set[int] = field(default_factory=set)  # admitted, but perhaps not there any more
    descriptions: dict[int, str] = field(default_factory=dict)  # of workers that attached themselves
    agreed_chief: int = 0  # the chief of a job, as the workers' latest collective has it
    aborted: str = ""  # why the session is over
    follows: bool = False  # whether it continues the session before, with the same workers
    metrics: dict[int, WorkerMetrics] = field(default_factory=dict)  # the latest of each worker that takes any
    living: set[int] = field(init=False)  # that others wait for: neither gone nor suspected nor catching up
    trusted: set[int] = field(init=False)  # those of them that may train
    expected: set[int] = field(init=False)  # all that belong to the session, whatever became of them
    composition: int = 0  # how often who takes part has changed; compared before and after to notice a change
    changed: set[int] = field(default_factory=set)  # workers whose status may have: see :meth:`take_changes`
    _heard: dict[int, float] = field(default_factory=dict)  # when
    _silence: SilenceDetector = field(default_factory=SilenceDetector)
    _eldest: int | None = None  # the chief of an elastic run, unless it may have changed
    _reported: tuple[int, dict[int, int], dict[int, str]] | None = None  # see :meth:`_for_replies`

    def __post_init__(self) -> None:
        self.expected = set(range(self.world_size)) if self.world_size else self.joined
        self._place_all()

    @classmethod
    def following(cls, before: Membership | None, message: Join, exited: dict[int, str]) -> Membership:
        """The members of the session that a worker begins; workers that are gone or suspected are so from its start.

        ``before`` are those of the session before, ``exited`` workers whose processes have ended, and why.
        """
        if message.again or (message.restore and before is not None):
            raise WorkerLostError(
                f"Worker {message.worker} was disconnected until session {message.session!r} was over: the others have "
                f"finished without it. Raise timeouts.silence_s if workers often pause for that long."
            )
        if before is not None and _place(message.session) < _place(before.session):
            raise LaunchError(
                f"Worker {message.worker} wants to begin session {message.session!r}, but the job is in session "
                f"{before.session!r}. It was rejected: its process is a second start, or was started too late. Look "
                f"for a job that still runs."
            )
        left, suspected = exited, {}
        if before is not None:
            suspected = {**before.suspected, **dict.fromkeys(before.catching_up, "was behind")}
            if message.after == before.session:
                left = {**left, **{worker: why for worker, why in before.left.items() if why}}
        left = {worker: why for worker, why in left.items() if worker < message.world_size}
        suspected = {w: why for w, why in suspected.items() if w < message.world_size and w not in left}
        members = cls(message.session, message.world_size, message.policy, message.server, left, suspected)
        members.follows = before is not None and message.after == before.session
        members.agreed_chief = before.agreed_chief if before is not None and members.follows else message.policy.chief
        return members

    @property
    def elastic(self) -> bool:
        """Whether workers join and leave."""
        return not self.world_size

    @property
    def reported_left(self) -> dict[int, str]:
        """The workers that left, for replies: none of an elastic run, where there may be very many."""
        return self._for_replies()[1]

    @property
    def reported_incarnations(self) -> dict[int, int]:
        """How often each worker was suspected, for replies."""
        return self._for_replies()[0]

    def _for_replies(self) -> tuple[dict[int, int], dict[int, str]]:
        """Copies that are never changed: replies share them until a worker is suspected or leaves."""
        if self._reported is None or self._reported[0] != self.composition:
            self._reported = self.composition, dict(self.incarnations), {} if self.elastic else dict(self.left)
        return self._reported[1:]

    def _place(self, worker: int) -> None:
        """Note that a worker's status has changed."""
        away = worker in self.left or worker in self.suspected or worker in self.catching_up
        lives = worker in self.expected and not away
        (self.living.add if lives else self.living.discard)(worker)
        (self.trusted.add if lives and worker not in self.fenced else self.trusted.discard)(worker)
        self.composition += 1
        self.changed.add(worker)
        if self._eldest is None or worker <= self._eldest:
            self._eldest = None

    def _place_all(self) -> None:
        self.living, self.trusted, self._eldest = set(), set(), None
        for worker in self.expected:
            self._place(worker)

    def take_changes(self) -> set[int]:
        """The workers whose status may have changed since this was last called."""
        changed, self.changed = self.changed, set()
        return changed

    @property
    def awaited(self) -> set[int]:
        """Workers without which no collective is completed."""
        chief = self.agreed_chief
        absent = chief in self.expected and chief not in self.left and chief not in self.living
        return self.living | {chief} if absent else self.living

    @property
    def expected_back(self) -> set[int]:
        """Suspected workers, except those that may have gone before they knew that they were admitted."""
        return set(self.suspected) - self.unheard

    @property
    def chief(self) -> int:
        """The worker that logs and writes checkpoints; in an elastic run the one that has been there longest."""
        if self.world_size and self.agreed_chief not in self.left:
            return self.agreed_chief
        if self._eldest is None or self._eldest not in self.trusted or self._eldest in self.unheard:
            self._eldest = min(self.trusted - self.unheard or self.trusted or self.living, default=0)
        return self._eldest

    def refuse(self, process: str, why: str) -> None:
        """Have the workers' logs show once that a process was refused."""
        if process not in self.refused and len(self.refused) < _REFUSALS:
            self.refused.add(process)
            self.publish(why)

    def check_process(self, worker: int, process: str, session: str = "") -> None:
        """Raise a ``LaunchError`` if a worker is another process; a message of another ``session`` fails later."""
        holder = self.processes.get(worker, process)
        if holder == process or session not in ("", self.session):
            return
        newcomer, member = for_users(process), for_users(holder)
        why = (
            f"Process {newcomer} claimed rank {worker}, which process {member} has. It was rejected; training "
            "continues."
        )
        self.refuse(process, why)
        raise LaunchError(
            f"Process {newcomer} claimed rank {worker}, which process {member} has in session {self.session!r}. It was "
            f"rejected: it is a second start of that worker, or belongs to another job. Expected one process per rank, "
            "and a MASTER_PORT of its own for each job. Look for a job that still runs."
        )

    def check_sender(self, worker: int, process: str, session: str, *, early: bool) -> None:
        """Raise unless a message is of a worker that has joined, and of its process; of other sessions it fails later.

        One that is ``early`` may come before a worker has joined: heartbeats to a lost server's replacement do.
        """
        self.check_process(worker, process, session)
        early &= len(self._heard) < len(self.joined) + _STRANGERS or worker in self._heard
        early &= self.elastic or 0 <= worker < self.world_size
        if early or session != self.session or worker in self.joined or worker in self.left:
            return
        if self.elastic:
            self.check(worker)
        raise ProtocolError(f"Worker {worker} has not joined session {session!r}. Expected a join first.")

    def other_process(self, worker: int, process: str) -> str:
        """The name of the process that is a worker, if it is another one; else empty."""
        holder = self.processes.get(worker, process)
        return holder if holder != process else ""

    def can_replace(self, worker: int, process: str) -> bool:
        """Whether another process may replace a worker: it has died, or is silent."""
        if self.elastic or self.processes.get(worker) == process:
            return False
        return bool(self.left.get(worker)) or (worker in self.suspected and worker in self.joined)

    def replace(self, worker: int, process: str, now: float) -> None:
        """Have another process replace a worker that has left; until it trains, no worker waits for it."""
        if self.aborted:
            raise WorkerLostError(self.aborted)
        why, before = self.left.pop(worker), self.processes.get(worker, "")
        self.processes[worker] = process
        self.joined.add(worker)
        self.catching_up.add(worker)
        self._heard[worker] = now
        self._silence.recheck()
        self.incarnations[worker] = self.incarnations.get(worker, 0) + 1
        self._place(worker)
        self.metrics.pop(worker, None)
        whose = f"process {for_users(before)} as worker {worker}" if before else f"worker {worker}"
        self.publish(f"Process {for_users(process)} replaces {whose} ({why}).")

    def other_than(self, worker: int, process: str) -> bool:
        """Whether a worker is known to be another process than one whose name begins like this."""
        known = self.processes.get(worker, "")
        return bool(known) and not known.startswith(process)

    def is_process(self, worker: int, process: str) -> bool:
        """Whether a worker is a process whose name begins like this, as far as is known."""
        there = worker in self.joined if self.elastic else 0 <= worker < self.world_size
        return there and self.processes.get(worker, process).startswith(process)

    def check(self, worker: int) -> None:
        """Raise unless a worker may train."""
        if self.aborted:
            raise WorkerLostError(self.aborted)
        if worker in self.left or (self.elastic and worker not in self.joined):  # a late request of its own
            raise WorkerLostError(f"Worker {worker} was declared lost ({self.left.get(worker) or 'it had left'}).")
        if worker in self.fenced or worker in self.suspected:
            reason = self.suspected.get(worker, "was disconnected")
            raise WorkerAwayError(f"Worker {worker} {reason}. Expected it to rejoin.")

    def silent_s(self, worker: int, now: float) -> float:
        """Seconds since a worker's last heartbeat."""
        return now - self._heard.get(worker, now)

    def note_heartbeat(self, worker: int, now: float) -> None:
        """Count any message as a heartbeat."""
        self._hear(worker, now)
        if worker in self.unheard:
            self.unheard.discard(worker)
            self._eldest = None

    def _hear(self, worker: int, now: float) -> None:
        """Note a heartbeat, which never shortens the time that :meth:`restore` gives a worker."""
        self._heard[worker] = max(now, self._heard.get(worker, now))

    def admit(self, description: str, now: float, process: str = "") -> int:
        """Admit a worker to an elastic run; its number is new, counted from 1."""
        worker = self.admitted = self.admitted + 1
        self.descriptions[worker] = description
        self.join(worker, now, process)
        self.unheard.add(worker)
        self.publish(f"Worker {worker} ({description}) has joined.")
        return worker

    def join(self, worker: int, now: float, process: str = "") -> bool:
        """Let a worker join or rejoin; returns whether it was suspected, and is now catching up."""
        if self.world_size and not 0 <= worker < self.world_size:
            raise ProtocolError(
                f"Worker {worker} cannot join session {self.session!r}. Expected a rank below {self.world_size}. "
                "All workers must be started with the same number of devices and nodes."
            )
        if worker in self.left:
            why, watched = self.left[worker] or "it had left", self.policy.silence_s  # else none is replaced
            again = "its process again: it replaces the worker. Or start " if watched and self.left[worker] else ""
            raise WorkerLostError(
                f"Worker {worker} cannot join session {self.session!r} again: it was declared lost ({why}). Start "
                f"{again}the job again, with a checkpoint to resume from."
            )
        self.check_process(worker, process)
        self.joined.add(worker)
        self.processes[worker] = process
        self.fenced.discard(worker)
        self._hear(worker, now)
        suspected = self.suspected.pop(worker, None) is not None
        if suspected:
            self.catching_up.add(worker)
        self._place(worker)
        return suspected

    def agree_on_chief(self, values: Collection[int]) -> None:
        """Note whom the workers that get these values of a collective take for the chief from now on."""
        if self.policy.another_chief:
            self.agreed_chief = next_chief(self.agreed_chief, values)

    def welcome(self, worker: int) -> None:
        """End a worker's absence: it is waited for again."""
        self.suspected.pop(worker, None)
        self.catching_up.discard(worker)
        self._silence.recheck()  # of a suspected worker nothing was heard for long
        self._place(worker)
        self.publish(f"Worker {worker} has rejoined.")

    def restore(self, now: float, holding: Collection[int] = (), admitted: int = 0) -> None:
        """Expect reports of all workers that have not left, where this server replaces a lost one.

        ``holding`` names, in an elastic run, the workers that hold weights. ``admitted`` is the highest number that a
        worker knows to be given. Until :meth:`end_recovery` the workers are given more time than usual, also once they
        have joined: a worker that is busy or suspended for long may hold the newest state, or a push that this state
        lacks.
        """
        for worker in (set(range(self.world_size)) | set(holding)) - set(self.left) - self.joined:
            self.joined.add(worker)
            self._place(worker)
            self._heard[worker] = now + _REPORT_S
        self.admitted = max(self.admitted, admitted + _UNHEARD)

    def end_recovery(self, now: float) -> None:
        """Give no worker more time than usual any longer: all have reported, and have replayed their pushes."""
        self._heard = {worker: min(at, now) for worker, at in self._heard.items()}
        self._silence.recheck()

    def resume(self, incarnations: dict[int, int], fenced: set[int]) -> None:
        """Take over what the workers report; ``fenced`` are those that do not know yet that they were suspected."""
        # The next replacement must not trust workers that this one has suspected meanwhile and that do not know it.
        own = {worker: incarnation for worker, incarnation in self.incarnations.items() if worker in self.fenced}
        self.incarnations = {w: incarnations.get(w, 0) + own.get(w, 0) for w in {*incarnations, *own}}
        self.fenced |= fenced
        self._place_all()
        self.publish("A server was lost and restored from the workers' copies.")

    def leave(self, worker: int, reason: str, details: str = "") -> bool:
        """Take a worker out; returns False if it was not there. ``details`` are for the workers' logs."""
        if worker in self.left or worker not in self.expected:
            return False
        self.give_up(worker, reason)
        known = len(self.events)
        if not self.world_size:
            self.publish(f"Worker {worker} has left{f': {reason}' if reason else ''}.")
        elif reason and not self._lose(worker, f"is lost ({reason})"):
            self.publish(f"Worker {worker} is lost: {reason}; the others continue without it.")
        if details and len(self.events) != known:
            self.events[-1] += f" Its last output:\n{details}"
        return True

    def give_up(self, worker: int, reason: str) -> None:
        """Count a worker as gone, whatever it was."""
        self.left[worker] = reason
        if self.elastic:
            self.joined.discard(worker)
            if len(self.left) > _REMEMBERED:
                self._forget(next(iter(self.left)))
        self.suspected.pop(worker, None)
        self.catching_up.discard(worker)
        self.fenced.discard(worker)
        self.unheard.discard(worker)
        self._place(worker)

    def _forget(self, worker: int) -> None:
        """Keep nothing for a worker that left long ago: a run may have thousands, one after the other."""
        for kept in (self.left, self.incarnations, self.processes, self.descriptions, self.metrics, self._heard):
            kept.pop(worker, None)

    def away_for_good(self, now: float) -> list[int]:
        """Workers of an elastic run that have been silent for so long that they count as gone."""
        return [worker for worker in self.suspected if self.elastic and self.silent_s(worker, now) > _AWAY_S]

    def publish(self, event: str) -> None:
        """Have the workers' logs show an event."""
        self.events.append(event)
        if len(self.events) > 2 * _EVENTS:
            del self.events[:_EVENTS]
            self.forgotten += _EVENTS

    def events_after(self, heard: int) -> tuple[str, ...]:
        """The events that a worker lacks if it has the first ``heard``."""
        return tuple(self.events[max(0, heard - self.forgotten) :])

    def suspect_silent(self, now: float) -> bool:
        """Suspect the workers whose failure timeout is over; returns whether there are any."""
        timeout_s = self.policy.silence_s * (1 if self.index == 0 else _SOONER)
        there = lambda: self.joined - self.left.keys() - self.suspected.keys()  # noqa: E731
        silent = self._silence.silent(self._heard, there, timeout_s, now)
        if self.policy.elsewhere_s and self.index == 0:
            self._end_if_few(now)
        said = {worker: f"sent no heartbeat for {self.silent_s(worker, now):.0f} s" for worker in silent}
        for worker, reason in said.items():
            self.suspected[worker] = f"{reason}, so the others continued without it"
            self.fenced.add(worker)
            self.incarnations[worker] = self.incarnations.get(worker, 0) + 1
            self.catching_up.discard(worker)
            self._place(worker)
        heard = any(self.silent_s(each, now) < timeout_s / 2 for each in (*self.living, *self.catching_up))
        for worker, reason in said.items() if self.index == 0 else ():  # server 0 decides what follows
            if not self._lose(worker, reason, heard):
                self.publish(f"Worker {worker} {reason}; the others continue without it. It may rejoin.")
        return bool(silent)

    def _end_if_few(self, now: float) -> None:
        """End the session if most workers fell silent at once: on their side of the network others may continue."""
        # Before they can, so that a pause of all other machines ends nothing.
        least_s = max(_MOST_LOST_S, 1.5 * self.policy.silence_s)
        lost = {w for w in self.suspected if least_s <= self.silent_s(w, now) < self.policy.elsewhere_s}
        heard = len(self.living) + len(self.catching_up)
        if len(lost) > heard:
            self.end(
                f"Workers {sorted(lost)} are not responding: {heard} of {len(lost) + heard} are left. "
                "Expected at least half: if the network has split, the others train on without these servers. Look "
                "for a job that still runs; else start the job again from its last checkpoint."
            )

    def end(self, why: str) -> None:
        """End the session."""
        if not self.aborted:
            self.aborted = why
            self.publish(why)

    def _lose(self, worker: int, fate: str, heard: bool = True) -> bool:
        """End the session if it cannot or must not do without a worker; ``heard``: whether the others were of late."""
        left = len(self.living) + len(self.catching_up)
        why = ""
        if worker == self.agreed_chief and worker in self.left and not self.policy.another_chief:
            why = f"Worker {worker}, which logs and writes the checkpoints, {fate}."
        elif self.policy.abort:
            why = f"Worker {worker} {fate}, and on_worker_failure='abort'."
        elif 0 < left < self.policy.min_workers and heard:  # else it may be this process's network that is down
            why = f"Worker {worker} {fate}. {left} are left, but Advanced.min_workers={self.policy.min_workers}."
        if why:
            self.end(f"{why} Start the job again from its last checkpoint (trainer.fit(..., ckpt_path='last')).")
        return bool(why)


def _place(session: str) -> tuple[int, ...]:
    """Where a session is among those of its job, whose names end with numbers: see ``TrainingJob.session``."""
    return tuple(int(number) for number in session.split(".")[1:] if number.isdecimal())
