"""What a feature adds to a server, and what it may ask of it. ``features.py`` says which messages are whose."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

from torch import Tensor

from lightning_asgd.core.protocol import Exchange, Request
from lightning_asgd.core.server.pending_replies import Completion, PendingReplies
from lightning_asgd.core.server.server_state import ServerState
from lightning_asgd.core.server.session_state import SessionState
from lightning_asgd.features import SERVER, load


class Server(Protocol):
    """The server that a feature is part of."""

    state: ServerState
    pending: PendingReplies
    clock: Callable[[], float]
    lock: AbstractContextManager[Any]
    changed: bool
    """Whether a message has changed what a snapshot holds, since the latest one was taken."""
    handlers: dict[type, Callable[[Any], Any]]
    """What answers the core's messages, by their types; for those that a feature has completed."""

    def current(self, name: str) -> SessionState:
        """The session of that name. Raises a ``ProtocolError`` if it is not the present one."""

    def heard(self, name: str, worker: int) -> SessionState:
        """The session of that name, in which a message counts as its worker's heartbeat."""

    def member(self, message: Request) -> SessionState:
        """The session of a message that only a worker that may train can send."""

    def exchange(self, message: Exchange, update: tuple[Tensor, ...] | None = None) -> object:
        """Exchange with the shard; returns the reply or a future of it. ``update`` replaces that of the message."""

    def handle(self, message: object) -> object:
        """Return a reply, a :class:`~lightning_asgd.protocol.Failure`, or a future of either."""

    def feature(self, kind: str) -> ServerFeature:
        """The feature that handles messages of this kind; it is made if there is none."""

    def members_changed(self, session: SessionState) -> None:
        """Tell every state machine who takes part now, and complete what that makes due."""

    def complete(self, due: list[Completion], received: Request | None = None) -> object:
        """Complete requests whose replies are due. Of the one just received, return the reply or a future of it."""


class ServerFeature:
    """Made when the first message of the feature arrives. Called under the server's lock."""

    observes: ClassVar[bool] = False
    """Whether its messages change nothing that a snapshot holds."""
    lasting: ClassVar[bool] = False
    """Whether it outlives the session."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def handle(self, message: object) -> object:
        """Return a reply, or a future of one."""
        raise NotImplementedError

    def members_changed(self) -> list[Completion]:
        """Note that other workers take part."""
        return []

    def tick(self, now: float) -> None:
        """Do what has become due as time has passed. Called a few times a second, also without a session."""

    def forget(self, worker: int) -> None:
        """Keep nothing of a worker that has left or was replaced."""

    def close(self) -> None:
        """Release everything: the session is over."""


class ServerFeatures:
    """The features that messages have asked for."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._made: dict[str, ServerFeature] = {}  # by their paths

    def of(self, kind: str) -> ServerFeature:
        """The feature that handles messages of this kind."""
        path = SERVER[kind]
        if path not in self._made:
            self._made[path] = load(path)(self._server)
        return self._made[path]

    def members_changed(self) -> list[Completion]:
        """Tell all that other workers take part."""
        return [completion for each in list(self._made.values()) for completion in each.members_changed()]

    def tick(self, now: float) -> None:
        """Have all do what is due."""
        for each in list(self._made.values()):
            each.tick(now)

    def forget(self, worker: int) -> None:
        """Have all keep nothing of a worker."""
        for each in self._made.values():
            each.forget(worker)

    def close(self) -> None:
        """End those that belong to the session, which is over."""
        for path, each in list(self._made.items()):
            if not each.lasting:
                self._made.pop(path).close()
