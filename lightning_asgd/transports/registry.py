"""Which transport a job uses: ``"rpc"``, torch's own, or ``"zmq"``, authenticated and encrypted."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from lightning_asgd.config import SECRET_ENV
from lightning_asgd.errors import ConfigurationError
from lightning_asgd.transports import rpc_transport, tensorpipe
from lightning_asgd.transports.rendezvous import address_of
from lightning_asgd.transports.transport import Transport

__all__ = ["TRANSPORTS", "check_available", "connect", "provide_secret", "release", "serve"]

TRANSPORTS = ("rpc", "zmq")
_LEAST = 16  # characters of a secret


def check_available(transport: str) -> None:
    """Raise if a transport does not work here.

    Raises:
        ConfigurationError: what it needs is missing.
    """
    if transport == "zmq":
        _check_zmq()
    else:
        tensorpipe.check_available()


def provide_secret(*, one_machine: bool) -> None:
    """Make a job's secret, for the processes that this one starts, if there is none.

    Args:
        one_machine: whether all processes of the job inherit this one's environment.

    Raises:
        ConfigurationError: the machines of the job have to be told the same one, and were not; or it is too short.
    """
    secret = os.environ.get(SECRET_ENV)
    if secret is None and one_machine:
        os.environ[SECRET_ENV] = secrets.token_hex(32)
    else:
        _check(secret)


def connect(transport: str, addresses: Sequence[str], interface: str) -> Transport:
    """Connect to servers.

    Args:
        transport: one of :data:`TRANSPORTS`.
        addresses: of the servers, as :func:`serve` returned them.
        interface: network interface to use.
    """
    if transport == "zmq":
        from lightning_asgd.transports.zmq_transport import ZmqTransport

        return ZmqTransport(addresses, _check(os.environ.get(SECRET_ENV)))
    return rpc_transport.RpcTransport(addresses, interface)


def release() -> None:
    """End what this process cannot share with the children that it is about to fork."""
    rpc_transport.stop()


def serve(transport: str, handler: Callable[[Any], Any], name: str, interface: str) -> tuple[str, Callable[[], None]]:
    """Answer messages in this process from now on.

    Args:
        transport: one of :data:`TRANSPORTS`.
        handler: given a message, returns the answer or a future of it; called from several threads.
        name: this process's name in error texts.
        interface: network interface to listen on.

    Returns:
        the address for :func:`connect`, and what ends it.
    """
    if transport == "zmq":
        from lightning_asgd.transports.zmq_server import Server

        server = Server(handler, address_of(interface), _check(os.environ.get(SECRET_ENV)))
        return server.address, server.close
    return rpc_transport.serve(handler, name, interface), rpc_transport.stop


def accepts(transport: str) -> bool:
    """Whether others can connect to this process, which serves.

    Args:
        transport: how it does.
    """
    return transport != "rpc" or rpc_transport.accepts()


def _check(secret: str | None) -> str:
    if secret is None or len(secret) < _LEAST:
        given = "is not set" if secret is None else f"has {len(secret)} characters"
        raise ConfigurationError(
            f"transport='zmq', but the environment variable {SECRET_ENV} {given}. Expected the same secret of at least "
            f"{_LEAST} characters on all machines: make one with `openssl rand -hex 32`, and set it on each."
        )
    return secret


def _check_zmq() -> None:
    """Raise if pyzmq is missing, or was built without CURVE."""
    try:
        import zmq
    except ImportError as error:
        raise ConfigurationError(
            "transport='zmq' needs pyzmq, which is not installed. Install it: pip install 'lightning-asgd[zmq]'."
        ) from error
    if not zmq.has("curve"):
        raise ConfigurationError(
            f"libzmq {zmq.zmq_version()} was built without CURVE. Expected one that encrypts: pip's wheels of pyzmq do."
        )
