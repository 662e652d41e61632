"""Transports by name: ``"rpc"``, torch's own, or ``"zmq"``, authenticated and encrypted."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from lightning_asgd.config import SECRET_ENV
from lightning_asgd.errors import ConfigurationError
from lightning_asgd.transports import job_secret, tensorpipe
from lightning_asgd.transports.rendezvous import address_of
from lightning_asgd.transports.rpc_transport import RpcServer, RpcTransport
from lightning_asgd.transports.transport import Transport

__all__ = ["TRANSPORTS", "Server", "TransportKind", "kind_of", "release"]

_LEAST = 16  # characters of a secret


class Server(Protocol):
    """The server side of a transport in this process."""

    address: str

    def accepts(self) -> bool:
        """Whether workers can connect to it."""

    def close(self) -> None:
        """Stop answering."""


class TransportKind(ABC):
    """What the processes of a job do by the name of a transport."""

    encrypted: ClassVar[bool]

    @abstractmethod
    def check_available(self) -> None:
        """Raise a ``ConfigurationError`` if a library that it needs is missing here."""

    @abstractmethod
    def provide_secret(self, *, one_machine: bool) -> None:
        """Make the job's secret, if there is none, for processes that inherit this one's environment.

        Raises a ``ConfigurationError`` where not all do and none was set, or where it is too short.
        """

    @abstractmethod
    def connect(self, addresses: Sequence[str], interface: str) -> Transport:
        """Connect to servers, through a network interface."""

    @abstractmethod
    def serve(self, handler: Callable[[Any], Any], name: str, interface: str) -> Server:
        """Answer messages with a handler's result or future; several threads call the handler.

        Raises a ``NetworkDownError`` where only a new process can serve; ``name`` is this one's in error texts.
        """


class _Rpc(TransportKind):
    encrypted = False

    def check_available(self) -> None:
        tensorpipe.check_available()

    def provide_secret(self, *, one_machine: bool) -> None:
        if one_machine:
            job_secret.make_own()  # for the rendezvous: RPC itself has no authentication

    def connect(self, addresses: Sequence[str], interface: str) -> Transport:
        return RpcTransport(addresses, interface)

    def serve(self, handler: Callable[[Any], Any], name: str, interface: str) -> Server:
        return RpcServer(handler, name, interface)


class _Zmq(TransportKind):
    encrypted = True

    def check_available(self) -> None:
        try:
            import zmq
        except ImportError as error:
            raise ConfigurationError(
                "transport='zmq' needs pyzmq, which is not installed. Install it: pip install 'lightning-asgd[zmq]'."
            ) from error
        if not zmq.has("curve"):
            raise ConfigurationError(
                f"libzmq {zmq.zmq_version()} was built without CURVE. Expected a build that encrypts, such as the one "
                f"in pip's wheels of pyzmq."
            )

    def provide_secret(self, *, one_machine: bool) -> None:
        if one_machine:
            job_secret.make_own()
        self._secret()

    def connect(self, addresses: Sequence[str], interface: str) -> Transport:
        from lightning_asgd.transports.zmq_transport import ZmqTransport

        return ZmqTransport(addresses, self._secret())

    def serve(self, handler: Callable[[Any], Any], name: str, interface: str) -> Server:
        from lightning_asgd.transports.zmq_server import ZmqServer

        return ZmqServer(handler, address_of(interface), self._secret())

    def _secret(self) -> str:
        secret = os.environ.get(SECRET_ENV)
        if secret is None or len(secret) < _LEAST:
            given = "is not set" if secret is None else f"has {len(secret)} characters"
            raise ConfigurationError(
                f"transport='zmq', but the environment variable {SECRET_ENV} {given}. Expected the same secret of at "
                f"least {_LEAST} characters on all machines: create one with `openssl rand -hex 32`, and set it on "
                f"each."
            )
        return secret


TRANSPORTS: dict[str, TransportKind] = {"rpc": _Rpc(), "zmq": _Zmq()}


def kind_of(name: str) -> TransportKind:
    """A transport by its name."""
    if name not in TRANSPORTS:
        raise ConfigurationError(f"transport={name!r}. Expected {' or '.join(map(repr, TRANSPORTS))}.")
    return TRANSPORTS[name]


def release() -> None:
    """Stop the agent, which cannot be shared with children that are forked next, whichever job it belongs to."""
    tensorpipe.stop()
