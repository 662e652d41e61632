"""What outlives the sessions of a server: what workers have noted, which have ended, and whether its state is whole."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from torch.futures import Future

from lightning_asgd.core.foundation.errors import LaunchError, ProtocolError
from lightning_asgd.core.protocol import PROTOCOL, InitShard, Join, Request, RunMetadata, forget_old_orders
from lightning_asgd.core.server.membership import Membership

if TYPE_CHECKING:
    from lightning_asgd.core.server.session_state import SessionState

_MOST_NAMES = 1000  # of metadata


class Registry:
    """Who may join, and what workers note. ``job``: the one that the servers belong to; empty for any.

    An elastic run has one of its own: :class:`~lightning_asgd.elastic.server.RunRegistry`.
    """

    def __init__(self, job: str = "") -> None:
        self.job = job
        self.metadata: dict[str, Any] = {}
        self.exits: dict[tuple[str, int], str] = {}  # of processes, and why: by session (empty for all) and worker

    def check_can_join(self, session: str, worker: int | str, protocol: int, *, elastic: bool) -> None:
        """Raise unless a worker speaks this protocol, and means this job."""
        if protocol != PROTOCOL:
            raise ProtocolError(
                f"Worker {worker} speaks protocol {protocol}. Expected {PROTOCOL}. "
                "Install the same version of lightning-asgd on every machine."
            )
        if self.job and not goes_on_from(session, self.job):
            raise LaunchError(
                f"Worker {worker} wants to join session {session!r}, but these servers belong to job {self.job!r}. It "
                f"was rejected: its own job has ended, or uses the same address. Expected a MASTER_PORT of its own for "
                "each job."
            )
        if elastic:
            raise ProtocolError(
                f"Worker {worker} wants to join the elastic run {session!r}, but these servers belong to a job with a "
                "fixed number of workers. Expected servers started with `lightning-asgd serve`."
            )

    def check_same_start(self, worker: int, members: Membership, *, again: bool) -> None:
        """Raise if a worker that waited here knows another run; ``again``: others may have begun the run again."""

    def bootstraps(self, message: InitShard, members: Membership, *, new: bool) -> bool:
        """Whether a worker brings the first weights of a run; raises if it is not for this worker to do."""
        return False

    def exited(self, session: str) -> dict[int, str]:
        """Workers whose processes have ended, as far as a session is concerned, and why."""
        return {worker: why for (first, worker), why in self.exits.items() if goes_on_from(session, first)}

    def note(self, message: RunMetadata, *, trusted: bool) -> bool:
        """Take a worker's metadata, unless others speak for it; returns whether they were taken."""
        known = message.first and message.name in self.metadata
        if message.value is None or known or not (message.first or trusted):
            return False
        if len(self.metadata) >= _MOST_NAMES and message.name not in self.metadata:
            raise ProtocolError(f"Worker {message.worker} publishes more than {_MOST_NAMES} names. Expected fewer.")
        self.metadata[message.name] = message.value
        forget_old_orders(self.metadata)
        return True


def goes_on_from(session: str, first: str) -> bool:
    """Whether a session is one that a launcher began, or a later generation of it, with a new layout."""
    return not first or session == first or session.startswith(f"{first}.")


class Phase(Enum):
    """Where a server is on its way back: whether its state is ``lost``, and whether reports have ``begun``."""

    INTACT = "intact", False, False  # nothing was lost: it is new, or serves what it was given
    LOST = "lost", True, False  # workers, or a snapshot, hold its state; no worker has joined to report
    COLLECTING = "collecting", True, True  # a worker has joined to report; pushes are deferred
    RESTORED = "restored", False, True  # it serves the newest state; workers replay what that lacks

    def __init__(self, name: str, lost: bool, begun: bool) -> None:
        self.lost = lost
        self.begun = begun


class Continuity:
    """A server that has lost nothing. The feature ``recovery`` puts its own in this one's place where it may have."""

    phase = Phase.INTACT

    def replaceable(self, session: SessionState | None) -> bool:
        """Whether another server could continue from what workers hold, or from a snapshot."""
        return session is not None and session.held_by_workers

    def reset(self) -> None:
        """Forget all reports: something else replaces what was lost."""

    def begin_session(self, *, elastic: bool) -> None:
        """Note that another session begins."""

    def must_wait(self, message: Join, now: float) -> bool:
        """Whether a process must wait a little for workers that know the lost state, which join at their next batch."""
        return False

    def joins(self, session: SessionState, message: Join, now: float, *, begun: bool) -> None:
        """Note a worker that is about to join, and has ``begun`` the session itself, or not."""

    def note_heartbeat(self, worker: int, *, waited: bool, now: float) -> None:
        """Note a heartbeat; ``waited``: the worker knows an elastic run of which this server knows no workers."""

    def defer(self, message: Request) -> Future[object]:
        """Keep a message until the lost state is restored."""
        raise NotImplementedError

    def advance(self, session: SessionState) -> None:
        """Continue to restore the state, as far as the workers that take part now allow."""
