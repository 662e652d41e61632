"""The TensorPipe agent of ``torch.distributed.rpc``: the only file that imports it, and that uses its private names.

Every process gets a *private* group: a server's holds itself alone, a worker's holds itself and the servers, whose
addresses it was given, and replacements of lost servers. So joining involves only a worker and the servers that it
connects to: there is no common roster that a dead process could invalidate and no barrier, and reconnecting involves no
other worker. (With ``init_rpc``'s own dynamic groups one dead name in the roster makes every later join fail.)

TensorPipe's default transport between processes of one machine polls in a loop and keeps a core busy even when idle
(measured: 2.9 s of CPU time in 3 s), so it is switched off here: sockets carry the messages, and large tensors go
through the kernel's cross-memory attach or through :mod:`lightning_asgd.core.calls.shared_memory`.

TensorPipe unpickles what any connected process sends. Processes listen on one interface only, loopback unless the
run spans machines; keep other users off that network.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import importlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed
from torch.futures import Future

from lightning_asgd.core.calls.transport import CallTimeoutError, NetworkDownError
from lightning_asgd.core.foundation.errors import ConfigurationError, LaunchError

INFINITE_S = 0.0
# Torch's texts, by which alone its errors differ: tests/transport/test_rpc.py fails if a release changes them.
_REFUSED = "ECONNREFUSED"
_ORIGIN = " (this error"
_BROKEN = f"{_ORIGIN} originated at tensorpipe"
_TIMED_OUT = "RPC ran for more than set timeout"

_dist: Any = torch.distributed  # a build without it lacks most names; check_available says so
_lock = threading.RLock()
_current: Agent | None = None  # torch has one agent per process

_THREADS = 8  # a server's threads for incoming messages; they take turns at the shard
_LOOPBACKS = ("lo", "lo0")
_DOWN_S, _LOOK_S = 600.0, 0.5  # how long to wait for a network interface that is down; how often to check it


def _rpc() -> Any:
    import torch.distributed.rpc as rpc

    return rpc


def is_available() -> bool:
    """Whether this build of torch can do RPC."""
    try:
        return bool(_dist.is_available() and _rpc().is_available())
    except ImportError:
        return False


def check_available() -> None:
    """Raise a ``ConfigurationError`` if this build of torch cannot do RPC."""
    if not is_available():
        raise ConfigurationError(
            f"transport='rpc' does not work here: torch {torch.__version__} was built without torch.distributed.rpc. "
            "Expected a build that has it: the wheels for Linux and macOS do, those for Windows do not. Install one of "
            "these, or use transport='zmq', which does not need it."
        )


def asynchronous(function: Any) -> Any:
    """Mark a function that peers call and that returns a future of its result."""
    return _rpc().functions.async_execution(function) if is_available() else function


class Agent:
    """This process's agent, in a group of this process alone. A new one takes over from the old.

    Raises a :class:`LaunchError` if its interface stays down, a :class:`NetworkDownError` if it goes down at the start.
    """

    def __init__(self, name: str, interface: str, *, listens: bool = False) -> None:
        global _current
        check_available()
        rpc = _rpc()
        with _lock:
            if listens:
                _await_network(interface)
            stop()
            store: Any = _dist.HashStore()
            self._addresses = _dist.PrefixStore("addrs", store)
            self._peers = 0
            # Not mpt_uv, which shares a message between links: on a cable of 100 Mbit/s these wait for TCP's timers.
            options = rpc.TensorPipeRpcBackendOptions(
                num_worker_threads=_THREADS,
                rpc_timeout=INFINITE_S,
                _transports=["uv"],
                _channels=["cma", "basic"] if interface == "lo" else ["basic"],
            )
            # Every process is number 0 of its own group, also after it reconnects.
            importlib.import_module("torch.distributed.autograd")._init(0)
            with _environment("TP_SOCKET_IFNAME", interface):
                agent = rpc.TensorPipeAgent(store, name, 0, None, options, {}, [])  # None: peers may be added later
                rpc.api._init_rpc_states(agent)
            _current = self
            _log_errors_only(True)
            self.address = str(self._addresses.get(name).decode())
        if listens and interface not in _LOOPBACKS and _host_and_port(self.address)[0].startswith("127."):
            raise NetworkDownError(f"The network interface {interface!r} went down.")

    @property
    def alive(self) -> bool:
        """Whether no other agent has taken over."""
        return _current is self

    def add_peer(self, name: str, address: str) -> str | None:
        """Add a name for a process, which gets its own connection; None if this agent was stopped."""
        rpc = _rpc()
        with _lock:
            if not self.alive:
                return None
            self._peers += 1
            name = f"{name}:{self._peers}"
            self._addresses.set(name, address)
            rpc.api._get_current_rpc_agent()._update_group_membership(rpc.WorkerInfo(name, self._peers), [], {}, True)
            return name

    def send(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Future[Any]:
        """Have a peer call a function. The connection is made with the first message."""
        if not self.alive:
            raise RuntimeError("the connection is closed")
        future: Future[Any] = _rpc().rpc_async(name, function, args=args, timeout=timeout_s)
        return future

    def stop(self) -> None:
        """Stop it, unless it has stopped already."""
        with _lock:
            if self.alive:
                stop()


@atexit.register
def stop() -> None:
    """Stop this process's agent, if there is one."""
    global _current
    with _lock:
        _current = None
        if is_available() and _rpc()._is_current_rpc_agent_set():
            _rpc().shutdown(graceful=False)
            _log_errors_only(False)


def _after_fork() -> None:
    """Forget the parent's agent. Its threads are not in this process: stopping or destroying it would wait for them."""
    global _current, _lock
    inherited, _current, _lock = _current, None, threading.RLock()
    if inherited is not None and _rpc()._is_current_rpc_agent_set():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_rpc().api._get_current_rpc_agent()))
        _rpc()._reset_current_rpc_agent()
        _log_errors_only(False)


os.register_at_fork(after_in_child=_after_fork)


class ConnectionBrokenError(RuntimeError):
    """A connection broke, or could not be made; ``refused`` if no process listens at the address."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


def _log_errors_only(only: bool) -> None:
    """Have torch log errors only, unless the user has chosen: it warns of each message to a lost peer."""
    with suppress(OSError, ValueError):  # another platform, or a build that logs otherwise
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
        if "TORCH_CPP_LOG_LEVEL" not in os.environ:  # which torch reads when it is imported
            ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = 2 if only else 1


def typed(error: Exception) -> Exception:
    """A call's error by its kind: a broken connection, a time-out, or what it is."""
    text = str(error).splitlines()[0] if str(error) else ""
    if _BROKEN in text:
        return ConnectionBrokenError(text.partition(_ORIGIN)[0], refused=_REFUSED in text)
    return CallTimeoutError(text) if _TIMED_OUT in text else error


def reachable(address: str) -> bool:
    """Whether there is a way to an address. TensorPipe terminates a process that connects where there is none."""
    host, port = _host_and_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing; it only selects a route
        except OSError:
            return False
    return True


def listening_sockets() -> int:
    """Number of sockets that this process listens on. Raises an ``OSError`` if too many files are open to find out.

    TensorPipe closes one permanently if a connection to it ends before its set-up: a port scanner's, a killed worker's.
    """
    return sum(map(_listens, map(int, os.listdir("/proc/self/fd"))))


def _listens(number: int) -> bool:
    """Whether a file descriptor is a listening TCP socket. To ask psutil takes a hundred times as long."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
        with socket.socket(fileno=os.dup(number)) as found:
            return found.family != socket.AF_UNIX and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return False  # closed meanwhile


def _await_network(interface: str) -> None:
    """Wait while a network interface is down: TensorPipe would listen on loopback until this process ends."""
    deadline = time.monotonic() + _DOWN_S
    while interface in (about := psutil.net_if_stats()) and not about[interface].isup:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"The network interface {interface!r} of this machine has been down for {_DOWN_S:g} s. Expected it to "
                "be up. Look at its cable, or set MASTER_ADDR to an address of another interface."
            )
        time.sleep(_LOOK_S)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition("//")[2].rpartition(":")
    return host.strip("[]"), int(port)


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
