"""The transport ``"rpc"`` by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.job.addresses import LOOPBACK
from lightning_asgd.core.job.registry import Server, TransportKind
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.transports.rpc import tensorpipe
from lightning_asgd.transports.rpc.transport import RpcServer, RpcTransport


class _Rpc(TransportKind):
    """TensorPipe behind ``torch.distributed.rpc``."""

    encrypted = False  # the secret is for the rendezvous: RPC itself has no authentication

    def check_available(self) -> None:
        tensorpipe.check_available()

    def host_rendezvous(self, host: str = LOOPBACK, port: int = 0) -> Rendezvous:
        return Rendezvous.host(host, port)

    def connect(self, addresses: Sequence[str], interface: str, refused_s: float = 0.0) -> Transport:
        return RpcTransport(addresses, interface)

    def serve(self, handler: Callable[[Any], Any], name: str, interface: str, entry: str = "") -> Server:
        return RpcServer(handler, name, interface)

    def release(self) -> None:
        tensorpipe.stop()


RPC = _Rpc()
