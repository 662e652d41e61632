"""The transport over ``torch.distributed.rpc``: the only file that imports it, and the only module-level state.

Every process gets a *private* group: a server's holds itself alone, a worker's holds itself and the servers, whose
addresses it was told, and those that take a lost one's place. So joining is a matter between a worker and the servers
it connects to: there is no common roster that a dead process could spoil, no barrier, and a worker that reconnects
needs nobody's consent. (With ``init_rpc``'s own dynamic groups one dead name in the roster makes every later join
fail.)

TensorPipe's default transport between processes of one machine polls in a loop and keeps a core busy even when idle
(measured: 2.9 s of CPU time in 3 s), so it is switched off here: sockets carry the messages, and large tensors go
through the kernel's cross-memory attach or through :mod:`lightning_asgd.transport.shared_memory`.

TensorPipe unpickles what anybody who can connect sends. Processes listen on one interface only, loopback unless the
run spans machines; keep other users off that network.
"""

from __future__ import annotations

import atexit
import importlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed
from torch.futures import Future

from lightning_asgd.errors import ConfigurationError
from lightning_asgd.transport.base import Transport

__all__ = ["RpcTransport", "check_available", "serve", "stop"]

dist: Any = torch.distributed  # a build without it lacks most names; check_available says so
_lock = threading.RLock()
_handler: Callable[[Any], Any] | None = None
_owner: object | None = None  # whoever uses this process's agent now
_addresses: Any = None  # store that this process's agent looks its peers' addresses up in
_peers = 0  # number of them

_THREADS = 8  # a server's threads for incoming messages; they take turns at the shard
_INFINITE = 0.0


def check_available() -> None:
    """Raise if this build of torch cannot do RPC.

    Raises:
        ConfigurationError: torch was built without it.
    """
    if not (dist.is_available() and hasattr(dist, "rpc") and _rpc().is_available()):
        import torch

        raise ConfigurationError(
            f"torch {torch.__version__} was built without torch.distributed.rpc. Expected a build that has it: "
            "the wheels for Linux and macOS do, those for Windows do not. Install torch from its own wheels on Linux."
        )


def _rpc() -> Any:
    import torch.distributed.rpc as rpc

    return rpc


class RpcTransport(Transport):
    """A worker's connections to the servers. One per process at a time: a new one takes over from the old.

    Args:
        addresses: TensorPipe address of every server, as :func:`serve` returned it.
        interface: network interface to use, ``"lo"`` on one machine.
    """

    def __init__(self, addresses: Sequence[str], interface: str = "lo") -> None:
        self.addresses = tuple(addresses)
        self.interface = interface
        self._number = 0  # of processes that took others' places
        self._prepared: dict[int, tuple[tuple[str, str], str]] = {}
        self._names = [_names(i) for i in range(len(self.addresses))]
        with _lock:
            _start_agent("worker", interface, self)
            for names, address in zip(self._names, self.addresses, strict=True):
                _add_peer(names, address)

    @property
    def num_servers(self) -> int:
        """Number of servers connected to."""
        return len(self.addresses)

    @property
    def alive(self) -> bool:
        """Whether this process's agent still belongs to this transport."""
        return _owner is self

    @property
    def prepared(self) -> Collection[int]:  # type: ignore[override]
        """See :class:`Transport`."""
        return tuple(self._prepared)

    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        """Send a message; see :meth:`Transport.call`."""
        return _send(self._names[server], message, timeout_s)

    def call_prepared(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        """See :meth:`Transport.call_prepared`."""
        return _send(self._prepared[server][0], message, timeout_s)

    def prepare(self, server: int, address: str) -> None:
        """See :meth:`Transport.prepare`."""
        with _lock:
            self._number += 1
            names = _names(f"{server}:{self._number}")
            if _owner is self:
                _add_peer(names, address)
            self._prepared[server] = names, address

    def replace(self, server: int) -> None:
        """See :meth:`Transport.replace`. Connections to the others stay."""
        with _lock:
            self._names[server], address = self._prepared.pop(server)
            self.addresses = (*self.addresses[:server], address, *self.addresses[server + 1 :])

    def close(self) -> None:
        """Stop this process's agent if it still belongs to this transport."""
        with _lock:
            if _owner is self:
                _stop_agent()


def _names(server: int | str) -> tuple[str, str]:
    """Two names for one server, each of which gets a connection of its own.

    A connection carries one message after the other. What is small and urgent would wait there until all weights are
    through that were sent before: 0.4 s for 2.4 MB there and back at 100 Mbit/s.
    """
    return f"server{server}", f"server{server}-urgent"


def _send(names: tuple[str, str], message: Any, timeout_s: float) -> Future[Any]:
    name = names[getattr(message, "urgent", False)]
    future: Future[Any] = _rpc().rpc_async(name, _answer, args=(message,), timeout=timeout_s)
    return future


def serve(handler: Callable[[Any], Any], name: str, interface: str = "lo") -> str:
    """Answer messages in this process from now on.

    Args:
        handler: given a message, returns the answer or a future of it; called from several threads.
        name: this process's name in error texts.
        interface: network interface to listen on.

    Returns:
        the address for :class:`RpcTransport`.
    """
    global _handler
    with _lock:
        _handler = handler
        return _start_agent(name, interface, handler)


def stop() -> None:
    """Stop this process's agent, if there is one."""
    global _handler
    with _lock:
        _handler = None
        _stop_agent()


def _start_agent(name: str, interface: str, owner: object) -> str:
    """Start TensorPipe with a group of this process alone, told through a store of this process's own."""
    global _owner, _addresses, _peers
    check_available()
    rpc = _rpc()
    _stop_agent()
    store: Any = dist.HashStore()
    _addresses, _peers = dist.PrefixStore("addrs", store), 0
    # mpt_uv shares one message between several links, at the price of 16 listening ports per process.
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_THREADS,
        rpc_timeout=_INFINITE,
        _transports=["uv"],
        _channels=["cma", "basic"] if interface == "lo" else ["mpt_uv", "basic"],
    )
    # Every process is number 0 of its own group, also when it comes back.
    importlib.import_module("torch.distributed.autograd")._init(0)
    with _environment("TP_SOCKET_IFNAME", interface):
        agent = rpc.TensorPipeAgent(store, name, 0, None, options, {}, [])  # None: peers may come later
        rpc.api._init_rpc_states(agent)
    _owner = owner
    return str(_addresses.get(name).decode())


def _add_peer(names: Sequence[str], address: str) -> None:
    """Let this process's agent know another process under several names."""
    global _peers
    rpc = _rpc()
    for name in names:
        _peers += 1
        _addresses.set(name, address)
        rpc.api._get_current_rpc_agent()._update_group_membership(rpc.WorkerInfo(name, _peers), [], {}, True)


def _stop_agent() -> None:
    global _owner
    rpc = _rpc()
    _owner = None
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown(graceful=False)


def _answer(message: Any) -> Future[Any]:
    """Run on the server for every message."""
    handler = _handler
    if handler is None:
        raise RuntimeError("this process serves nothing any more")
    answer = handler(message)
    if isinstance(answer, Future):
        return answer
    future: Future[Any] = Future()
    future.set_result(answer)
    return future


if dist.is_available() and hasattr(dist, "rpc") and _rpc().is_available():
    _answer = _rpc().functions.async_execution(_answer)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@atexit.register
def _at_exit() -> None:
    if dist.is_available() and hasattr(dist, "rpc"):
        stop()
