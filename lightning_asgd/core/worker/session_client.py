"""A worker's membership in a session: joining, or attaching to an elastic run, heartbeats, metadata, leaving."""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.futures import Future

from lightning_asgd.core.foundation.errors import ASGDError, ProtocolError, WorkerLostError
from lightning_asgd.core.foundation.process_name import machine_and_pid, this_process
from lightning_asgd.core.protocol.collective import Pickled
from lightning_asgd.core.protocol.session import (
    Attach,
    Attached,
    Failure,
    Heartbeat,
    HeartbeatReply,
    Join,
    Joined,
    Leave,
    Policy,
    RunMetadata,
    WorkerMetrics,
    forget_old_orders,
)
from lightning_asgd.core.worker.connection import COORDINATOR, GRACE_S, Connection, done_within
from lightning_asgd.core.worker.metrics_board import MetricsBoard

_PER_PATIENCE = 5  # heartbeats per failure timeout
_EPOCHS = 4  # whose orders are kept: as many as the coordinator knows


@dataclass
class Members:
    """What a server has said about the workers, for its replacement."""

    incarnation: int = 0  # how often it had excluded this worker when it joined last
    incarnations: dict[int, int] = field(default_factory=dict)  # and others, as far as is known
    left: dict[int, str] = field(default_factory=dict)  # who is gone, and why
    pushers: set[int] = field(default_factory=set)  # in an elastic run: whose pushes its weights hold


class SessionClient:
    """A worker's membership in one session, which continues the session ``after``, if that is given."""

    def __init__(self, connection: Connection, *, policy: Policy | None = None, after: str = "") -> None:
        self.connection = connection
        self.policy = policy or Policy()
        self._after = after
        self.members = [Members() for _ in connection.servers]  # per server, what it has said about the workers
        self.heard = HeartbeatReply()  # the coordinator's latest answer to a heartbeat
        self.answered_at: dict[int, float] = {}  # when another server has answered one last, by server
        self.metadata: dict[str, Any] = {}  # of an elastic run, as far as this worker knows it
        self.stopped = 0  # number of the latest collective in which a worker that trains no more is known to wait
        self.pushed = 0  # number of this worker's latest push that servers had seen when it joined
        self.must_rejoin = False  # whether a server lacked a part of a push that the coordinator took

    # ------------------------------------------------------------------ joining and leaving

    def join(self, *, again: bool = False, server: int | None = None, since: int | None = None) -> None:
        """Enter the session on one server or all; ``again``: it knows that it is fenced; ``since``: as in ``Join``."""
        for s in self.connection.servers if server is None else [server]:
            self.note_joined(s, self.connection.ask(s, replace(self.join_message(s), again=again, since=since)))

    def note_joined(self, server: int, joined: Joined) -> None:
        """Note what a server answers a worker that joins."""
        self.members[server].incarnation = joined.incarnation
        self.pushed = max(self.pushed, joined.pushed)

    def join_message(self, server: int) -> Join:
        """What this worker joins a server with."""
        about = (*self.connection.sender, self.connection.world_size, self.policy)
        return Join(*about, after=self._after, server=server)

    def attach(self, about: str) -> Attached:
        """Enter an elastic run, described to people as ``about``; waits while another worker brings its weights."""
        connection = self.connection
        message = Attach(connection.session, about, self.policy)
        future = connection.post(COORDINATOR, message, connection.patience_s + GRACE_S)
        attached: Attached = connection.result(COORDINATOR, future, connection.patience_s)
        connection.worker, self.metadata = attached.worker, dict(attached.notes)
        self.note_heartbeat(connection.ask(COORDINATOR, Heartbeat(*connection.sender)))
        for server in connection.servers:
            if server != COORDINATOR:
                self.join(server=server)
        return replace(attached, notes={name: _read(value) for name, value in attached.notes.items()})

    def leave(self, reason: str = "", worker: int | None = None, pid: int | None = None, *, details: str = "") -> None:
        """Leave the session on all living servers, or report that another worker's process on this machine is gone."""
        message = Leave(*self.connection.sender, reason, details=details)
        if worker is not None:
            process = this_process() if pid is None else machine_and_pid(pid)
            message = replace(message, worker=worker, final=True, process=process)
        for server in set(self.connection.servers) - self.connection.gone:
            try:
                done_within(self.connection.post(server, message), 5.0)
            except RuntimeError:  # the server is gone too: nothing to leave
                continue

    # ------------------------------------------------------------------ metadata and heartbeats

    def note(self, name: str, value: Any = None, *, first: bool = False) -> Any:
        """Set, or with None read, a value of the run's metadata, which workers that attach later get too.

        With ``first`` a value that is there stays. Returns the one that is there now.
        """
        message = RunMetadata(*self.connection.sender, name, None if value is None else pickled(value), first)
        noted = self.connection.ask(COORDINATOR, message)
        if noted is not None:
            self.metadata[name] = noted
            forget_old_orders(self.metadata)
        return _read(noted)

    def publish_order(self, epoch: str, order: Any) -> None:
        """Publish the order of an epoch's samples, in the place of an older epoch's."""
        self.note(_order_of(epoch), (epoch, order))

    def published_order(self, epoch: str) -> Any:
        """The order that was published for an epoch; None if none was, or it is too old."""
        found = self.note(_order_of(epoch))
        return found[1] if found and found[0] == epoch else None

    def beat(self, heard: int, timeout_s: float, figures: WorkerMetrics | None = None) -> HeartbeatReply | None:
        """Send every server a heartbeat; unreachable ones are ignored.

        Returns what the coordinator answers, None if it does not in time. Raises a :class:`WorkerLostError` if the
        session was ended for want of a worker.
        """
        connection, transport = self.connection, self.connection.transport
        beaten: HeartbeatReply | None = None
        for server in connection.servers:
            try:
                sign = Heartbeat(*connection.sender, heard, figures if server == COORDINATOR else None)
                if server in transport.prepared:  # this worker may be busy for long before it joins there
                    transport.call_prepared(server, Heartbeat(*connection.sender), connection.timeout_s)
                if server in connection.gone:
                    continue
                future = connection.post(server, sign)
                if server != COORDINATOR:
                    future.add_done_callback(partial(self._note_answer, server))
                answer = future.wait() if server == COORDINATOR and done_within(future, timeout_s) else None
            except (RuntimeError, KeyError):  # replaced just now
                continue
            if isinstance(answer, Failure) and answer.error == WorkerLostError.__name__:
                raise WorkerLostError(answer.message)
            if isinstance(answer, HeartbeatReply):
                beaten = answer
                self.note_heartbeat(answer)
        return beaten

    def _note_answer(self, server: int, future: Future[Any]) -> None:
        with suppress(RuntimeError):
            future.value()
            self.answered_at[server] = time.monotonic()

    def note_heartbeat(self, beaten: HeartbeatReply) -> None:
        """Remember who takes part, for the replacement of a lost server."""
        self.heard = replace(beaten, living=frozenset(beaten.living), holding=frozenset(beaten.holding))
        for members in self.members:  # another process may have replaced a worker since it was lost
            members.left = {worker: why for worker, why in members.left.items() if worker not in beaten.living}


class HeartbeatThread:
    """Sends the heartbeats of one worker until it is stopped, each with the worker's latest figures.

    It has its own thread, since the training thread may be in a long step, in a validation, or waiting. A worker that
    sends none for ``silence_s`` is suspected. ``on_news`` gets events of other workers, from number ``told`` on;
    ``on_chief`` gets, with every reply, the worker that logs and writes checkpoints.
    """

    on_silence: Callable[[float], None] = staticmethod(lambda seconds: None)
    """Called after each heartbeat that the coordinator has not answered, with the seconds since it last did."""
    on_silent_servers: Callable[[list[int]], None] = staticmethod(lambda servers: None)
    """Called with the numbers of the other servers that have not answered for two periods."""

    def __init__(
        self,
        client: SessionClient,
        silence_s: float,
        on_news: Callable[[str], None] | None = None,
        board: MetricsBoard | None = None,
        on_chief: Callable[[int], None] = lambda _: None,
        told: int = 0,
        at_least_every_s: float = math.inf,
    ) -> None:
        self._client = client
        self._board = board or MetricsBoard()
        self._period_s = min(silence_s / _PER_PATIENCE, at_least_every_s)
        self._on_news = on_news
        self._on_chief = on_chief
        self._told = told
        self._stopped = threading.Event()
        self.error: ASGDError | None = None
        """Why the session was ended, once it was."""
        self._thread = threading.Thread(target=self._run, name="lightning_asgd.heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait for its end."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        restored, answered = 0, time.monotonic()
        while not self._stopped.wait(self._period_s):
            if self._client.connection.restored[COORDINATOR] != restored:  # a replacement counts its events from 0
                restored, self._told = self._client.connection.restored[COORDINATOR], 0
            try:
                beaten = self._client.beat(self._told, self._period_s, self._board.mine)
            except ASGDError as error:
                self.error = self.error or error
                return
            if beaten is None:
                self.on_silence(time.monotonic() - answered)
                continue
            answered = time.monotonic()
            self._look_at_others(answered)
            self._on_chief(beaten.chief)
            self._board.update(beaten.figures, beaten.living)
            self._told += len(beaten.news)
            for line in beaten.news:
                if self._on_news is not None:
                    self._on_news(line)

    def _look_at_others(self, now: float) -> None:
        connection, answered_at = self._client.connection, self._client.answered_at
        answered_at.update(dict.fromkeys(connection.gone, now))  # a server that is restored begins to be heard
        others = set(connection.servers) - {COORDINATOR}
        silent = [s for s in sorted(others) if now > answered_at.setdefault(s, now) + 2 * self._period_s]
        if silent:
            self.on_silent_servers(silent)


def _order_of(epoch: str) -> str:
    return f"order {int(epoch.rpartition('/')[2]) % _EPOCHS}"


def pickled(value: Any) -> Any:
    """What a worker sends to the other workers: servers open no objects, since they may lack the classes."""
    plain = value is None or isinstance(value, bool | int | float | str | bytes | Tensor)
    return value if plain else Pickled(pickle.dumps(value))


def unpickled(maker: str, value: Any) -> Any:
    """The same for the other workers, who trust each other."""
    if not isinstance(value, Pickled):
        return value
    try:
        return pickle.loads(value.data)
    except Exception as error:
        raise ProtocolError(
            f"An object of {maker} could not be read: {error!r}. Expected its class and module to be the same "
            "on every worker."
        ) from error


def _read(value: Any) -> Any:
    return unpickled("another worker", value)
