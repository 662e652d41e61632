"""The transport ``"zmq"`` by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.foundation.environment import SECRET_ENV
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.job import secret as job_secret
from lightning_asgd.core.job.addresses import LOOPBACK, address_of, interface_of
from lightning_asgd.core.job.registry import Server, TransportKind
from lightning_asgd.core.job.rendezvous import Rendezvous


class _Zmq(TransportKind):
    """ZeroMQ, whose library may be missing."""

    encrypted = True

    def check_available(self) -> None:
        try:
            import zmq
        except ImportError as error:
            raise ConfigurationError(
                "transport='zmq' needs pyzmq, which is not installed. Install it: pip install pyzmq."
            ) from error
        if not zmq.has("curve"):
            raise ConfigurationError(
                f"libzmq {zmq.zmq_version()} was built without CURVE. Expected a build that encrypts, such as the one "
                f"in pip's wheels of pyzmq."
            )

    def provide_secret(self, *, one_machine: bool) -> None:
        super().provide_secret(one_machine=one_machine)
        self._secret()

    def host_rendezvous(self, host: str = LOOPBACK, port: int = 0) -> Rendezvous:
        from lightning_asgd.transports.zmq.store import HostedZmqStore

        return Rendezvous.host(host, port, HostedZmqStore)

    def open_to_others(self, rendezvous: Rendezvous, interface: str) -> str:
        return interface_of(LOOPBACK) if rendezvous.open_gateway() else interface

    def connect(self, addresses: Sequence[str], interface: str, refused_s: float = 0.0) -> Transport:
        from lightning_asgd.transports.zmq.transport import ZmqTransport

        return ZmqTransport(addresses, self._secret(), refused_s)

    def serve(self, handler: Callable[[Any], Any], name: str, interface: str, entry: str = "") -> Server:
        from lightning_asgd.transports.zmq.server import ZmqServer

        return ZmqServer(handler, address_of(interface), self._secret(), name=entry)

    def _secret(self) -> str:
        job_secret.check("transport='zmq', but the")
        return os.environ[SECRET_ENV]


ZMQ = _Zmq()
