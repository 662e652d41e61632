"""Where the processes of a job find each other: a small key-value store that the main process hosts.

It holds addresses and start-up errors only; weights and messages never pass through it. It listens on one address:
loopback on one machine, ``MASTER_ADDR`` on several.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed

from lightning_asgd.config import SECRET_ENV
from lightning_asgd.errors import LaunchError
from lightning_asgd.transports.job_secret import given, seal, unseal

__all__ = ["LOOPBACK", "Rendezvous", "address_of", "interface_of", "local_address_towards", "successor_of"]

LOOPBACK = "127.0.0.1"
_dist: Any = torch.distributed  # a build without it lacks the names below; asked for only when used
_PREFIX = "lightning_asgd"
_POLL_S = 0.02
_GRACE_S = 1.0
_MOST_SUCCESSORS = 1000  # replacements of one server
_SAME_SECRET = (
    f"Expected the same {SECRET_ENV} on all machines, or none, and no foreign process that reaches this port. Set it "
    "on every machine, and choose another port."
)


class Rendezvous:
    """A connection to the store, and the store's address. Use :meth:`host` or :meth:`connect`."""

    def __init__(self, store: Any, address: tuple[str, int], *, elsewhere: bool = False) -> None:
        self._store = _dist.PrefixStore(_PREFIX, store)
        self._secret = given() if elsewhere else os.environ.get(SECRET_ENV)
        self._known: dict[str, Any] = {}  # the latest valid values: a stranger may write over the store's
        self.address = address

    @classmethod
    def host(cls, host: str = LOOPBACK, port: int = 0) -> Rendezvous:
        """Host a store on this address only; port 0 is any free one.

        It may be the store that this process hosts there already, for a process group.
        """
        try:
            listener = _listen(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and (store := _store_of_this_process(host, port)) is not None:
                return cls(store, (host, port))
            raise LaunchError(
                f"Cannot listen on {host}:{port}: {error}. Expected a free port on an address of this machine. "
                "Set MASTER_ADDR to this machine's address and MASTER_PORT to a free port, the same on all machines."
            ) from error
        port = listener.getsockname()[1]
        options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
        options["multi_tenant"] = True  # a process group may share it later
        try:
            store = _dist.TCPStore(host, port, **options)
        except NotImplementedError:  # of torch 2.6: its usual store cannot take a socket over
            store = _dist.TCPStore(host, port, use_libuv=False, **options)
        return cls(store, (host, port))

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        timeout_s: float,
        hint: str = "MASTER_ADDR and MASTER_PORT name it on every machine",
        *,
        elsewhere: bool = False,
    ) -> Rendezvous:
        """Connect to a store that another process hosts, waiting for it to appear. The hint is for the error.

        ``elsewhere``: it is not of a job that this process belongs to.
        """
        deadline = time.monotonic() + timeout_s
        found: list[Any] = []
        failed: list[str] = []
        while (cause := _unreachable(host, port)) is not None and time.monotonic() < deadline:
            time.sleep(_POLL_S)

        def connect() -> None:
            wait = timedelta(seconds=timeout_s)
            try:
                found.append(_dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait))
            except (RuntimeError, ValueError) as error:
                failed.append(str(error).splitlines()[0])

        # In a thread: a foreign process that accepts and stays silent would block forever.
        if cause is None:
            thread = threading.Thread(target=connect, name="lightning_asgd.connect", daemon=True)
            thread.start()
            thread.join(timeout_s + _GRACE_S)
        if not found:
            cause = cause or (failed[0] if failed else "another program listens there")
            raise LaunchError(
                f"Found no job at {host}:{port} within {timeout_s:g} s ({cause}). Expected the main process to host "
                f"it. Check that it runs, and that {hint}."
            )
        return cls(found[0], (host, port), elsewhere=elsewhere)

    @classmethod
    def find_run(cls, host: str, port: int, timeout_s: float) -> tuple[Rendezvous, dict[str, str], list[str]]:
        """Find an elastic run: the connection, the run's ``run_id`` and ``transport``, the keys of its servers."""
        hint = f"it was started with `lightning-asgd serve --host {host} --port {port}`"
        rendezvous = cls.connect(host, port, timeout_s, hint, elsewhere=True)
        run: dict[str, str] = rendezvous.get("run", "`lightning-asgd serve`", timeout_s, kind=dict)
        return rendezvous, run, rendezvous.get(f"session/{run['run_id']}", "The servers", timeout_s, kind=list)

    def announce_run(self, run_id: str, transport: str, keys: list[str]) -> None:
        """Let workers find a run with :meth:`find_run`."""
        self.put(f"session/{run_id}", keys)
        self.put("run", {"run_id": run_id, "transport": transport})

    def announce_job(self) -> str:
        """Make the job's random name, unless a process with the same secret has; for the main process."""
        name = unseal("job", self._store.get("job"), self._secret) if self._store.check(["job"]) else None
        if not isinstance(name, str):
            name = secrets.token_hex(4)
            self.put("job", name)
        return name

    def _foreign(self, key: str) -> str:
        host, port = self.address
        return f"The entry {key!r} at {host}:{port} was not written by a process of this job."

    def shared(self, prefix: str) -> Any:
        """The store itself, below a prefix, for other parts of torch."""
        return _dist.PrefixStore(prefix, self._store)

    def put(self, key: str, value: Any) -> None:
        """Publish a JSON value."""
        self._store.set(key, seal(key, value, self._secret))

    def peek(self, key: str, kind: type = object) -> Any:
        """A published value of this type, or None.

        Values that are not this job's are ignored: any process that reaches the store can write.
        """
        found = unseal(key, self._store.get(key), self._secret) if self._store.check([key]) else None
        if found is not None and isinstance(found, kind):
            self._known[key] = found
        return self._known.get(key)

    def _peek(self, key: str, kind: type) -> Any:
        try:
            return self.peek(key, kind)
        except RuntimeError as error:  # of torch's store
            raise LaunchError(
                f"The connection to the main process at {self.address[0]}:{self.address[1]} broke: {error}. Expected "
                f"it to run until its workers have ended. Look at its output."
            ) from error

    def get(
        self, key: str, what: str, timeout_s: float, check: Callable[[], None] = lambda: None, kind: type = object
    ) -> Any:
        """Wait for a value of a type that ``what`` publishes. ``check`` is called meanwhile, and may raise."""
        deadline = time.monotonic() + timeout_s
        while (value := self._peek(key, kind)) is None:
            check()
            if time.monotonic() > deadline and self._store.check([key]):
                raise LaunchError(f"{self._foreign(key)} {_SAME_SECRET}")
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{what} did not start within {timeout_s:g} s. Expected it to publish {key!r} at "
                    f"{self.address[0]}:{self.address[1]}. Look at its output, or raise timeouts.start_s."
                )
            time.sleep(_POLL_S)
        return value

    def server(self, index: int, key: str, timeout_s: float, other_than: str = "") -> str:
        """Wait for the address of a server or its replacement, other than that of a server that is lost."""
        deadline = time.monotonic() + timeout_s
        while (found := self.peek_server(key).get("address", other_than)) == other_than:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Server {index} did not start within {timeout_s:g} s. Expected it to publish {key!r} at "
                    f"{self.address[0]}:{self.address[1]}. Look at its output, or raise timeouts.start_s."
                )
            time.sleep(_POLL_S)
        return str(found)

    def peek_server(self, key: str) -> dict[str, Any]:
        """What a server or its replacement has published, if anything. Raises a ``LaunchError`` if it cannot serve."""
        seen = {key}
        while (successor := self.peek(successor_of(key), str)) is not None:
            if successor in seen or len(seen) > _MOST_SUCCESSORS:
                return {}  # no process of this job has written that
            key = successor
            seen.add(key)
        answer: dict[str, Any] = self.peek(key, dict) or {}
        if "error" in answer:
            raise LaunchError(f"{answer['error']}\nExpected it to start. Fix the cause shown in its output.")
        return answer


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((socket.gethostbyname(host), port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _store_of_this_process(host: str, port: int) -> Any:
    """The store that this process hosts on a port, for DDP for instance; None if it is another process's port."""
    if not _dist.is_initialized():
        return None
    try:
        return _dist.TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True)
    except RuntimeError:  # torch has no store there either, and cannot listen
        return None


def _unreachable(host: str, port: int) -> str | None:
    """Why an address cannot be reached now; None if a process listens there.

    The store itself would print its C++ stack.
    """
    try:
        socket.create_connection((host, port), timeout=_GRACE_S).close()
    except OSError as error:
        return str(error)
    return None


def successor_of(key: str) -> str:
    """The key that holds the key of a server's replacement."""
    return f"{key}/successor"


def local_address_towards(host: str) -> str:
    """This machine's address on the network through which it reaches ``host``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((socket.gethostbyname(host), 9))  # sends nothing; it only selects a route
        except OSError as error:
            raise LaunchError(
                f"Cannot reach {host}: {error}. Expected the name or address of the first machine. Set MASTER_ADDR to "
                "one that every machine can resolve and reach."
            ) from error
        return str(probe.getsockname()[0])


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface of this machine."""
    for address in psutil.net_if_addrs().get(interface, []):
        if address.family == socket.AF_INET:
            return str(address.address)
    raise LaunchError(
        f"The network interface {interface!r} has no IPv4 address. Expected one of {sorted(psutil.net_if_addrs())} "
        "that has. Set MASTER_ADDR to an address that every machine can reach."
    )


def interface_of(address: str) -> str:
    """Name of the network interface that holds an address of this machine."""
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(a.family == socket.AF_INET and a.address == address for a in addresses):
            return name
    if address.startswith("127."):
        return "lo" if "lo" in interfaces else "lo0"
    raise LaunchError(
        f"No network interface of this machine has the address {address}. Expected one of {sorted(interfaces)} to. "
        "Set MASTER_ADDR to an address that every machine can reach."
    )
