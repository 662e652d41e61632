"""The transport over ``torch.distributed.rpc``: the only file that imports it, and the only module-level state.

Every process gets a *private* group: a server's holds itself alone, a worker's holds itself and the servers, whose
addresses it was told, and those that take a lost one's place. So joining is a matter between a worker and the servers
it connects to: there is no common roster that a dead process could spoil, no barrier, and a worker that reconnects
needs nobody's consent. (With ``init_rpc``'s own dynamic groups one dead name in the roster makes every later join
fail.)

TensorPipe's default transport between processes of one machine polls in a loop and keeps a core busy even when idle
(measured: 2.9 s of CPU time in 3 s), so it is switched off here: sockets carry the messages, and large tensors go
through the kernel's cross-memory attach or through :mod:`lightning_asgd.transports.shared_memory`.

A connection that breaks is made again, and the calls that it took with it are repeated there and answered once (see
:mod:`lightning_asgd.transports.reliable_calls`): until their time is up, or nobody listens there any more, which is how
the end of a server's process shows.

TensorPipe unpickles what anybody who can connect sends. Processes listen on one interface only, loopback unless the
run spans machines; keep other users off that network.
"""

from __future__ import annotations

import atexit
import importlib
import itertools
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch.distributed
from torch.futures import Future

from lightning_asgd.errors import ConfigurationError, LaunchError
from lightning_asgd.transports.reliable_calls import Arrivals, ReplyCache
from lightning_asgd.transports.transport import TIMED_OUT, NetworkDownError, Transport

__all__ = ["RpcTransport", "accepts", "check_available", "is_available", "serve", "stop"]

log = logging.getLogger(__name__)

dist: Any = torch.distributed  # a build without it lacks most names; check_available says so
_lock = threading.RLock()
_handler: Callable[[Any], Any] | None = None
_once = ReplyCache()
_owner: object | None = None  # whoever uses this process's agent now
_addresses: Any = None  # store that this process's agent looks its peers' addresses up in
_peers = 0  # number of them
_doors = 0  # sockets that this process listened on at first

_THREADS = 8  # a server's threads for incoming messages; they take turns at the shard
_INFINITE = 0.0
_ORIGIN = " (this error"  # in TensorPipe's words, like the next two
_BROKEN, _REFUSED = f"{_ORIGIN} originated at tensorpipe", "ECONNREFUSED"
_NO_WAY = f"the network is unreachable{_BROKEN}"  # in the words that it would have, if it did not end the process
_FORGET_S = 10.0  # for a message that may as well be lost
_REFUSALS = 2  # after which nobody listens there any more
_AGAIN_S = (0.0, 0.05, 0.2, 0.5, 1.0)  # between the attempts to connect; the last one from then on
_LOOPBACKS = ("lo", "lo0")
_DOWN_S, _LOOK_S = 600.0, 0.5  # in which a network interface must be up, and between two looks at it


def is_available() -> bool:
    """Whether this build of torch can do RPC."""
    return bool(dist.is_available() and hasattr(dist, "rpc") and _rpc().is_available())


def check_available() -> None:
    """Raise if this build of torch cannot do RPC.

    Raises:
        ConfigurationError: torch was built without it.
    """
    if not is_available():
        import torch

        raise ConfigurationError(
            f"torch {torch.__version__} was built without torch.distributed.rpc. Expected a build that has it: "
            "the wheels for Linux and macOS do, those for Windows do not. Install torch from its own wheels on Linux."
        )


def _rpc() -> Any:
    import torch.distributed.rpc as rpc

    return rpc


class RpcTransport(Transport):
    """A worker's connections to the servers. One per process at a time: a new one takes over from the old."""

    def __init__(self, addresses: Sequence[str], interface: str = "lo") -> None:
        self.interface = interface
        self._caller = uuid.uuid4().hex
        self._numbers = itertools.count(1)  # of calls
        self._prepared: dict[int, _Link] = {}
        with _lock:
            _start_agent("worker", interface, self)
            self._links = [_Link(self, i, address) for i, address in enumerate(addresses)]

    @property
    def num_servers(self) -> int:
        """Number of servers connected to."""
        return len(self._links)

    @property
    def addresses(self) -> tuple[str, ...]:
        """See :class:`Transport`."""
        return tuple(link.address for link in self._links)

    @property
    def alive(self) -> bool:
        """Whether this process's agent still belongs to this transport."""
        return _owner is self

    @property
    def prepared(self) -> Collection[int]:
        """See :class:`Transport`."""
        return tuple(self._prepared)

    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        """Send a message; see :meth:`Transport.call`."""
        return self._links[server].call(message, timeout_s)

    def call_prepared(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        """See :meth:`Transport.call_prepared`."""
        return self._prepared[server].call(message, timeout_s)

    def prepare(self, server: int, address: str) -> None:
        """See :meth:`Transport.prepare`."""
        self._prepared[server] = _Link(self, server, address)

    def replace(self, server: int) -> None:
        """See :meth:`Transport.replace`. Connections to the others stay."""
        with _lock:
            self._links[server] = self._prepared.pop(server)

    def close(self) -> None:
        """Stop this process's agent if it still belongs to this transport."""
        with _lock:
            if _owner is self:
                _stop_agent()

    def number(self) -> int:
        """A number for a call."""
        return next(self._numbers)

    @property
    def caller(self) -> str:
        """What servers know this transport by."""
        return self._caller


class _Link:
    """The way to one server's process: two connections, made when they are needed, and again when they break.

    A connection carries one message after the other. What is small and urgent would wait there until all weights are
    through that were sent before: 0.4 s for 2.4 MB there and back at 100 Mbit/s.
    """

    def __init__(self, transport: RpcTransport, server: int, address: str) -> None:
        self.transport = transport
        self.server = server
        self.address = address
        self._names = {urgent: self._connect(urgent) for urgent in (False, True)}
        self.arrivals = Arrivals()
        self._mended: dict[str, str] = {}  # names of connections in another's place, and why; until they have served
        self._served: set[str] = set()  # names of connections that have, of the two in use

    def call(self, message: Any, timeout_s: float) -> Future[Any]:
        """Send a message; see :meth:`Transport.call`."""
        call = _Call(self, message, timeout_s)
        call.send()
        return call.future

    def name(self, urgent: bool) -> str:
        """The name that leads through a connection which is not known to be broken."""
        return self._names[urgent]

    def leads_there(self, name: str) -> bool:
        """Whether a message may be sent: where a connection is yet to be made, whether there is a way to the server."""
        return name in self._served or _reachable(self.address)

    def mend(self, urgent: bool, broken: str, why: str) -> None:
        """Use another connection from now on, if that has not happened."""
        with _lock:
            if self._names[urgent] == broken and self.transport.alive:
                self._served.discard(broken)
                self._names[urgent] = self._connect(urgent)
                self._mended[self._names[urgent]] = why

    def free(self, name: str, urgent: bool) -> None:
        """Tell the server what has arrived, so that it need not keep that until the next call.

        That goes over the connection that the answer came through. To make another one would be dangerous: if this
        process ended meanwhile, TensorPipe would let nobody connect to the server any more.
        """
        arrived = self.arrivals.take()

        def failed(why: Exception) -> None:
            self.arrivals.note(*arrived)
            if self.transport.alive:  # in another thread: this one may be waited for by who holds the lock
                arguments = (urgent, name, str(why).partition(_ORIGIN)[0])
                threading.Thread(target=self.mend, args=arguments, name="lightning_asgd.mend", daemon=True).start()

        try:
            sent = _rpc().rpc_async(name, _forget, args=(self.transport.caller, arrived), timeout=_FORGET_S)
        except RuntimeError as error:
            failed(error)
        else:
            sent.add_done_callback(lambda done: _unless_done(done, failed))

    def note_answer(self, name: str) -> None:
        """A connection has served."""
        self._served.add(name)
        why = self._mended.pop(name, None) if self._mended else None
        if why is not None:
            log.warning("The connection to server %d broke (%s) and was made again.", self.server, why)

    def _connect(self, urgent: bool) -> str:
        with _lock:
            name = f"server{self.server}{'-urgent' * urgent}:{_peers + 1}"
            if self.transport.alive:
                _add_peer(name, self.address)
            return name


class _Call:
    """A message on its way, and its answer."""

    def __init__(self, link: _Link, message: Any, timeout_s: float) -> None:
        self.link = link
        self.message = message
        self.urgent = bool(getattr(message, "urgent", False))
        self.future: Future[Any] = Future()
        self.number, self.arrived = link.transport.number(), link.arrivals.take()
        self._timeout_s = timeout_s
        self._begun = time.monotonic()
        self._attempts = self._refusals = 0

    def send(self) -> None:
        """Send it, over the connection of the moment."""
        name, left_s = self.link.name(self.urgent), _INFINITE
        if not self.link.leads_there(name):
            self._failed(name, RuntimeError(_NO_WAY))
            return
        if self._timeout_s != _INFINITE:
            left_s = max(0.001, self._begun + self._timeout_s - time.monotonic())
        arguments = (self.link.transport.caller, self.number, self.arrived, self.message)
        try:
            attempt = _rpc().rpc_async(name, _answer, args=arguments, timeout=left_s)
        except RuntimeError as error:
            self._failed(name, error)
        else:
            attempt.add_done_callback(lambda done: self._answered(name, done))

    def _answered(self, name: str, attempt: Future[Any]) -> None:
        try:
            answer = attempt.value()
        except RuntimeError as error:
            self._failed(name, error)
            return
        self.link.note_answer(name)
        self.link.arrivals.note(self.number)
        if getattr(answer, "bulky", False):
            self.link.free(name, self.urgent)
        self.future.set_result(answer)

    def _failed(self, name: str, error: RuntimeError) -> None:
        text = str(error).splitlines()[0] if str(error) else ""
        self._refusals = self._refusals + 1 if _REFUSED in text else 0
        if _BROKEN not in text or self._refusals > _REFUSALS or not self.link.transport.alive:
            self.link.arrivals.note(*self.arrived)
            self.future.set_exception(error)
            return
        # Not in the thread that brings answers.
        arguments = (name, text.partition(_ORIGIN)[0])
        threading.Thread(target=self._repeat, args=arguments, name="lightning_asgd.repeat", daemon=True).start()

    def _repeat(self, name: str, why: str) -> None:
        pause_s = _AGAIN_S[min(self._attempts, len(_AGAIN_S) - 1)]
        self._attempts += 1
        time.sleep(pause_s)
        if self._timeout_s != _INFINITE and time.monotonic() > self._begun + self._timeout_s:
            self.link.arrivals.note(*self.arrived)
            self.future.set_exception(
                RuntimeError(f"{TIMED_OUT} of {self._timeout_s:g} s, without a connection: {why}")
            )
            return
        self.link.mend(self.urgent, name, why)
        self.send()


def _unless_done(future: Future[Any], failed: Callable[[Exception], None]) -> None:
    try:
        future.value()
    except RuntimeError as error:
        failed(error)


def serve(handler: Callable[[Any], Any], name: str, interface: str = "lo") -> str:
    """Answer messages in this process from now on.

    Args:
        handler: given a message, returns the answer or a future of it; called from several threads.
        name: this process's name in error texts.
        interface: network interface to listen on.

    Returns:
        the address for :class:`RpcTransport`.

    Raises:
        LaunchError: the interface is down, and stays so.
        NetworkDownError: it went down just now.
    """
    global _handler, _doors
    with _lock:
        _handler = handler
        _await_network(interface)
        address = _start_agent(name, interface, handler)
        if interface not in _LOOPBACKS and _host_and_port(address)[0].startswith("127."):
            raise NetworkDownError(f"The network interface {interface!r} went down.")
        _doors = _listening()
        return address


def accepts() -> bool:
    """Whether others can connect to this process, which serves.

    TensorPipe closes a listening socket for good when one connection to it ends before it is set up: that of a port
    scanner, or of a worker that was killed as it came.
    """
    return _listening() >= _doors


def _listening() -> int:
    return sum(c.status == psutil.CONN_LISTEN for c in psutil.Process().net_connections("tcp"))


def stop() -> None:
    """Stop this process's agent, if there is one."""
    global _handler
    with _lock:
        _handler = None
        _stop_agent()


def _await_network(interface: str) -> None:
    """Wait while a network interface is down: TensorPipe would listen on loopback for the rest of this process."""
    deadline = time.monotonic() + _DOWN_S
    while interface in (about := psutil.net_if_stats()) and not about[interface].isup:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"The network interface {interface!r} of this machine has been down for {_DOWN_S:g} s. Expected it to "
                "be up. Look at its cable, or set MASTER_ADDR to an address of another one."
            )
        time.sleep(_LOOK_S)


def _start_agent(name: str, interface: str, owner: object) -> str:
    """Start TensorPipe with a group of this process alone, told through a store of this process's own."""
    global _owner, _addresses, _peers
    check_available()
    rpc = _rpc()
    _stop_agent()
    store: Any = dist.HashStore()
    _addresses, _peers = dist.PrefixStore("addrs", store), 0
    # Not mpt_uv, which shares a message between many links: a fifth faster at several Gbit/s, but behind a cable of
    # 100 Mbit/s the links take packets from each other, and each waits for TCP's timers.
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_THREADS,
        rpc_timeout=_INFINITE,
        _transports=["uv"],
        _channels=["cma", "basic"] if interface == "lo" else ["basic"],
    )
    # Every process is number 0 of its own group, also when it comes back.
    importlib.import_module("torch.distributed.autograd")._init(0)
    with _environment("TP_SOCKET_IFNAME", interface):
        agent = rpc.TensorPipeAgent(store, name, 0, None, options, {}, [])  # None: peers may come later
        rpc.api._init_rpc_states(agent)
    _owner = owner
    return str(_addresses.get(name).decode())


def _add_peer(name: str, address: str) -> None:
    """Let this process's agent know another process under a name, which gets a connection of its own."""
    global _peers
    rpc = _rpc()
    _peers += 1
    _addresses.set(name, address)
    rpc.api._get_current_rpc_agent()._update_group_membership(rpc.WorkerInfo(name, _peers), [], {}, True)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition("//")[2].rpartition(":")
    return host.strip("[]"), int(port)


def _reachable(address: str) -> bool:
    """Whether there is a way to an address. TensorPipe ends the process that connects where there is none."""
    host, port = _host_and_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing: it only chooses a route
        except OSError:
            return False
    return True


def _stop_agent() -> None:
    global _owner
    rpc = _rpc()
    _owner = None
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown(graceful=False)


def _answer(caller: str, number: int, arrived: list[int], message: Any) -> Future[Any]:
    """Run on the server for every message."""
    handler = _handler
    if handler is None:
        raise RuntimeError("this process serves nothing any more")
    return _once.answer(caller, number, arrived, lambda: handler(message))


def _forget(caller: str, arrived: list[int]) -> None:
    """Run on the server when a large answer has arrived."""
    _once.forget(caller, arrived)


if is_available():
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
