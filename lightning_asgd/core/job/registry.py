"""Transports by name: ``"rpc"``, torch's own, or ``"zmq"``, authenticated and encrypted; ``"auto"`` chooses."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.foundation.environment import RUN_ENV, SECRET_ENV, TRANSPORT_ENV
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.job import secret as job_secret
from lightning_asgd.core.job.addresses import LOOPBACK
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.features import TRANSPORTS, load

AUTO = "auto"


class Server(Protocol):
    """The server side of a transport in this process."""

    address: str

    def accepts(self) -> bool:
        """Whether workers can connect to it."""

    def answers(self) -> bool:
        """Whether messages of connected workers are answered."""

    def close(self) -> None:
        """Stop answering."""


class TransportKind(ABC):
    """What the processes of a job do by the name of a transport."""

    encrypted: ClassVar[bool]

    @abstractmethod
    def check_available(self) -> None:
        """Raise a ``ConfigurationError`` if a library that it needs is missing here."""

    def provide_secret(self, *, one_machine: bool) -> None:
        """Make the job's secret if there is none. Raises a ``ConfigurationError`` if it is too short or not for all."""
        job_secret.provide(one_machine=one_machine)

    @abstractmethod
    def host_rendezvous(self, host: str = LOOPBACK, port: int = 0) -> Rendezvous:
        """Host the rendezvous of a job or run; see :meth:`Rendezvous.host`."""

    def open_to_others(self, rendezvous: Rendezvous, interface: str) -> str:
        """Let other machines reach servers that are announced there: the network interface these have to listen on."""
        return interface

    @abstractmethod
    def connect(self, addresses: Sequence[str], interface: str, refused_s: float = 0.0) -> Transport:
        """Connect to servers through an interface. Their gateway may refuse connections for ``refused_s``."""

    @abstractmethod
    def serve(self, handler: Callable[[Any], Any], name: str, interface: str, entry: str = "") -> Server:
        """Answer messages with a handler's result or future; several threads call the handler.

        Raises a ``NetworkDownError`` where only a new process can serve; ``name`` is this one's in error texts, and
        ``entry`` its name at a gateway.
        """

    def release(self) -> None:  # noqa: B027
        """Stop what children that are forked next cannot share."""


_loaded: dict[str, TransportKind] = {}


def check_name(name: str, given: str = "transport") -> None:
    """Raise a ``ConfigurationError`` for what is neither a transport's name nor ``"auto"``."""
    if name != AUTO:
        kind_of(name, given)


def kind_of(name: str, given: str = "transport") -> TransportKind:
    """A transport by its name; ``given`` is where that is from, for the error."""
    if name not in TRANSPORTS:
        raise ConfigurationError(f"{given}={name!r}. Expected {', '.join(map(repr, TRANSPORTS))} or {AUTO!r}.")
    if name not in _loaded:
        _loaded[name] = load(TRANSPORTS[name])
    return _loaded[name]


def choose(asked: str, *, one_machine: bool) -> tuple[str, str, str]:
    """The name of a job's transport; why it is this one; and who could get in, as the rest of a sentence about it.

    ``"auto"`` follows from what all machines of a job share, their secret and their libraries; so all choose the same.
    Raises a ``ConfigurationError`` for a secret that is too short, with any transport.
    """
    job_secret.check()
    if asked != AUTO:
        found = RUN_ENV in os.environ and os.environ.get(TRANSPORT_ENV) == asked  # an engine has set both
        name, why = asked, f"{TRANSPORT_ENV} is set" if found else "as given"
    else:
        lacks = _lacking(one_machine=one_machine)
        has = "one machine" if one_machine else f"{SECRET_ENV} is set"
        name, why = ("zmq", has) if lacks is None else ("rpc", lacks)
    if kind_of(name).encrypted:
        key = "key generated for this job" if job_secret.given() is None else f"key from {SECRET_ENV}"
        return name, why, f"is encrypted and authenticated ({key})."
    if one_machine:
        who = "any user of this machine"
        instead = "ASGDStrategy(transport='zmq') keeps them out: pip install pyzmq."
    else:
        who = "any user of these machines, and any host that reaches their ports,"
        instead = f"pyzmq and a secret on all machines keep them out. {job_secret.HAND_OUT}"
    return name, why, f"has no authentication: {who} can run code as this user. {instead}"


def _lacking(*, one_machine: bool) -> str | None:
    """What keeps a job from encrypting its connections; None if nothing does. On one machine it makes a secret."""
    try:
        kind_of("zmq").check_available()
    except ConfigurationError:
        return "pyzmq is not installed"
    return None if one_machine or job_secret.given() is not None else f"{SECRET_ENV} is not set"


def release() -> None:
    """Stop the agent, which cannot be shared with children that are forked next, whichever job it belongs to."""
    for kind in _loaded.values():
        kind.release()
