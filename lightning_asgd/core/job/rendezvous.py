"""Where the processes of a job find each other: named entries that the main process keeps.

They hold addresses and start-up errors only; weights and messages never pass through here. The store of the entries
depends on the transport of the first job that the main process hosts it for. It listens on one address: loopback on
one machine, ``MASTER_ADDR`` on several.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from lightning_asgd.core.foundation.environment import RUN_ENV, SECRET_ENV, joined, parted
from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.foundation.process_name import this_network
from lightning_asgd.core.job.addresses import LOOPBACK, ServerAddress, is_loopback, local_address_towards
from lightning_asgd.core.job.entry_store import EntryStore
from lightning_asgd.core.job.secret import given
from lightning_asgd.core.job.torch_store import TorchStore
from lightning_asgd.features import STORES, load

log = logging.getLogger(__name__)

_STRANGE_S, _PATIENT_S = 3.0, 20.0  # without an answer, until that is logged, and until it is an error
_T = TypeVar("_T")
_POLL_S, _POLL_MOST_S, _ATTEMPT_S = 0.02, 0.2, 0.002
_RETRY_S = 0.5  # after an attempt with torch's client, which prints its stack
_GRACE_S = 1.0
_GREETING_S = 0.1  # ZeroMQ sends a greeting within milliseconds; torch's store waits for the client
_EXPECTED_GREETING_S = 1.0  # where ZeroMQ is expected: a busy machine may be slow to greet
_silent: set[tuple[str, int]] = set()  # addresses of torch's stores
_FOREIGN_S = 3.0  # for which the first entry may be a stranger's, that the main process is about to write over
_TENDED = "tended"  # whether the host does not close while a server may be replaced
_MOST_SUCCESSORS = 1000  # replacements of one server
_SAME_SECRET = (
    f"Expected the same {SECRET_ENV} on all machines, or none, and no foreign process that reaches this port. Set it "
    "on every machine, and choose another port."
)


class _StrangerError(RuntimeError):
    """What listens there is no rendezvous."""


class _Patience:
    """With what listens and does not answer torch's client: without end, unless the job was not reached before."""

    def __init__(self, place: str, *, first: bool) -> None:
        self._place, self._warned = place, False
        self._since = None if first else math.inf  # when it was noticed

    def lose(self, why: str) -> None:
        """Raise a :class:`_StrangerError` in the end; log a warning long before."""
        self._since = self._since or time.monotonic()
        waited_s = time.monotonic() - self._since
        if waited_s > _PATIENT_S:
            raise _StrangerError(f"another program, or a suspended process, listens there ({why})")
        if waited_s > _STRANGE_S and not self._warned:
            self._warned = True
            log.warning("Another program, or a suspended process, listens at %s: %s.", self._place, why)


class Rendezvous(AbstractContextManager["Rendezvous"]):
    """The entries of a job or run, and their address. Use :meth:`host` or :meth:`connect`."""

    def __init__(self, store: EntryStore, secret: str | None = None) -> None:
        self._store = store
        self.secret = secret
        self.address = store.address
        self.longer = "raise timeouts.start_s"
        """What gives processes more time to start, for an error."""

    @classmethod
    def host(
        cls, host: str = LOOPBACK, port: int = 0, store: Callable[[str, int, Any], EntryStore] = TorchStore.host
    ) -> Rendezvous:
        """Host a store at this address only (port 0: any free one), or use torch's store in this process again."""
        local_address_towards(LOOPBACK)  # raises at once if there is no way: torch's store waits for minutes
        secret = os.environ.get(SECRET_ENV)
        try:
            made = cls(store(host, port, secret), secret)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and (mine := TorchStore.of_this_process(host, port, secret)) is not None:
                return cls(mine, secret)
            raise LaunchError(
                f"Cannot listen on {joined(host, port)}: {error}. Expected a free port on an address of this machine. "
                "Set MASTER_ADDR to this machine's address and MASTER_PORT to a free port, the same on all machines."
            ) from error
        _silent.discard(made.address)  # the port of an earlier store may be that of another kind now
        return made

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        timeout_s: float,
        hint: str = "MASTER_ADDR and MASTER_PORT name it on every machine",
        *,
        elsewhere: bool = False,
        transport: str = "",
        first: bool = False,
    ) -> Rendezvous:
        """Connect to a store that another process hosts, waiting for it to appear. The hint is for the error.

        ``elsewhere``: it is not of a job that this process belongs to. ``transport``: the job's, if known. ``first``:
        this process has not reached the job yet, so what listens and does not answer soon is another program.
        """
        secret = given() if elsewhere else os.environ.get(SECRET_ENV)
        expected = transport == "zmq" or (elsewhere and secret is not None)
        greeting_s = _EXPECTED_GREETING_S if expected else _GREETING_S
        try:
            patience = _Patience(joined(host, port), first=first)
            return cls(_reach(host, port, secret, timeout_s, greeting_s, patience), secret)
        except LaunchError:
            raise
        except (OSError, RuntimeError) as error:
            refusal = LaunchError(
                f"Found no job at {joined(host, port)}: {error}. Expected the main process to listen there. Check that "
                f"it runs, and that {hint}."
            )
            refusal.final = first and isinstance(error, _StrangerError)
            raise refusal from error

    @classmethod
    def find_run(cls, host: str, port: int, timeout_s: float) -> tuple[Rendezvous, dict[str, str], list[str]]:
        """Find an elastic run: the connection, the run's ``run_id`` and ``transport``, the keys of its servers."""
        place = joined(host, port)
        found = f", which {RUN_ENV} names" if place in os.environ.get(RUN_ENV, "").replace("/", ",").split(",") else ""
        hint = f"it was started with `lightning-asgd serve` for {place}{found}"
        rendezvous = cls.connect(host, port, timeout_s, hint, elsewhere=True)
        try:
            run_id = rendezvous.get("run", "`lightning-asgd serve`", timeout_s, kind=str)
            transport, keys = rendezvous._session(run_id, timeout_s)
        except BaseException:
            rendezvous.close()
            raise
        return rendezvous, {"run_id": run_id, "transport": transport}, keys

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection. The process that hosts the store stops serving it."""
        self._store.close()

    def announce_run(self, run_id: str, transport: str, keys: list[str], *, tended: bool = False) -> None:
        """Let workers find a run; if ``tended`` its host ends it where a lost server cannot be replaced."""
        self.announce_session(run_id, transport, keys)
        self.put(_TENDED, tended)
        self.put("run", run_id)

    def announce_session(self, session: str, transport: str, keys: list[str]) -> None:
        """Let workers find the servers of a session with :meth:`session`."""
        self.put(f"session/{session}", {"transport": transport, "servers": keys})

    def session(
        self, session: str, transport: str, timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> list[str]:
        """Wait for a session's keys. Raises a ``LaunchError`` if they have another transport; ``check`` may raise."""
        used, keys = self._session(session, timeout_s, check)
        if used != transport:
            raise final_error(
                f"The main process at {joined(*self.address)} has transport={used!r}, but this worker has "
                f"transport={transport!r}. Expected the same on all machines: the same argument of ASGDStrategy, the "
                f"same {SECRET_ENV}, and pyzmq on all or none."
            )
        return keys

    def _session(
        self, session: str, timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> tuple[str, list[str]]:
        key = f"session/{session}"
        match self.get(key, "The main process", timeout_s, check, kind=dict):
            case {"transport": str(transport), "servers": [*keys]} if keys and all(isinstance(k, str) for k in keys):
                return transport, keys
            case found:
                raise self._strange(key, found)

    def announce_job(self) -> str:
        """Make the job's random name, unless a process with the same secret has; for the main process."""
        name = self.peek("job", str)
        if name is None:
            name = secrets.token_hex(4)
            self.put("job", name)
        return str(name)

    @property
    def tended(self) -> bool:
        """Whether the host ends the run if a lost server cannot be replaced, so that workers wait without end."""
        return bool(self.peek(_TENDED, bool))

    @property
    def serves_torch(self) -> bool:
        """Whether torch's process groups can meet at the address, too."""
        return self._store.serves_torch

    def shared(self, prefix: str) -> Any:
        """The store itself, below a prefix, for other parts of torch."""
        return self._store.shared(prefix)

    def put(self, key: str, value: Any) -> None:
        """Publish a JSON value."""
        self._store.put(key, value)

    def peek(self, key: str, kind: type = object) -> Any:
        """A value of this type that a process of this job published, or None."""
        return self._store.peek(key, kind)

    def get(
        self, key: str, what: str, timeout_s: float, check: Callable[[], None] = lambda: None, kind: type = object
    ) -> Any:
        """Wait for a value of a type that ``what`` publishes. ``check`` is called meanwhile, and may raise."""

        def look() -> Any:
            value = self.peek(key, kind)
            if value is None:
                check()
            return value

        return self._wait(look, what, key, timeout_s, foreign_s=_FOREIGN_S if key in ("job", "run") else math.inf)

    def server(
        self, index: int, key: str, timeout_s: float, other_than: str = "", check: Callable[[], None] = lambda: None
    ) -> str:
        """Wait for the address of a server, or of a lost one's replacement, and call ``check``, which may raise."""

        def look() -> str | None:
            entry = self.peek_server(key)
            try:
                found = self._way_to(entry) if entry else other_than
            except ValueError as error:
                raise self._strange(key, entry) from error
            if found == other_than:
                check()
                return None
            return found

        wait_s = math.inf if other_than and self.tended else timeout_s
        return self._wait(look, f"Server {index}", key, wait_s)

    def _way_to(self, entry: dict[str, Any]) -> str:
        """How this process reaches a server that has published an entry. Raises a ``ValueError`` if none has."""
        address = str(entry.get("address"))
        host = (
            ServerAddress.of(address).host if address.startswith("tcp://") else parted(address.rpartition("//")[2])[0]
        )
        if entry.get("network") in (None, this_network()) or not is_loopback(host):
            return address
        if address.startswith("tcp://"):
            return str(self._store.way_to(str(entry.get("name")), int(entry.get("number", 0))))
        raise LaunchError(
            f"The servers listen on loopback of the machine at {self.address[0]}, which is another one than this, and "
            "have transport='rpc', which connects to ports of their own. Expected transport='zmq', of which all goes "
            "through one port, also in a tunnel; or else an address that this machine reaches, for "
            "`lightning-asgd serve` or as MASTER_ADDR."
        )

    def open_gateway(self) -> bool:
        """Have other machines reach servers of this one through this address; whether the store can."""
        return self._store.open_gateway()

    def _strange(self, key: str, found: Any) -> LaunchError:
        return LaunchError(
            f"The entry {key!r} at {joined(*self.address)} is {repr(found)[:80]}, but no process of this job writes "
            f"that. {_SAME_SECRET}"
        )

    def _wait(
        self, look: Callable[[], _T | None], what: str, key: str, timeout_s: float, *, foreign_s: float = math.inf
    ) -> _T:
        begun, pause_s = time.monotonic(), _POLL_S
        there = joined(*self.address)
        try:
            while (found := look()) is None:
                waited_s = time.monotonic() - begun
                if waited_s > min(foreign_s, timeout_s) and self._store.is_foreign(key):
                    raise final_error(
                        f"The entry {key!r} at {there} was not written by a process of this job. {_SAME_SECRET}"
                    )
                if waited_s > timeout_s:
                    raise LaunchError(
                        f"{what} did not start within {timeout_s:g} s. Expected it to publish {key!r} at "
                        f"{there}. Look at its output, or {self.longer}."
                    )
                time.sleep(pause_s)
                pause_s = min(1.2 * pause_s, _POLL_MOST_S)
        except LaunchError:
            raise
        except RuntimeError as error:  # of the store
            raise LaunchError(
                f"The connection to the main process at {there} broke: {error}. Expected it to live until its "
                "workers have ended. Look at its output."
            ) from error
        return found

    def way_to_server(self, key: str) -> dict[str, Any]:
        """What a server or its replacement has published, as processes of other networks can use it; else nothing."""
        entry = self.peek_server(key)
        if entry.get("number"):  # it listens on loopback, behind the gateway at this address
            return {"address": str(self._store.way_to(str(entry.get("name")), int(entry["number"])))}
        return entry

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


def _reach(
    host: str, port: int, secret: str | None, timeout_s: float, greeting_s: float, patience: _Patience
) -> EntryStore:
    """Connect to the store that listens there, of whichever kind it is, once one does."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with _listener(host, port, deadline) as probe:
                found = str(probe.getpeername()[0])
                if not _greets(probe, 0.0 if (host, port) in _silent else greeting_s):
                    store = _reach_torch(host, port, secret, timeout_s, deadline, patience, probe)
                    if store is not None:
                        _silent.add((host, port))
                        return store
            _silent.discard((host, port))
            return _reach_zmq(host, port, secret, timeout_s, found)
        except ConnectionError:  # a port forwarder closes it as long as nothing listens at the far end
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


def _reach_torch(
    host: str,
    port: int,
    secret: str | None,
    timeout_s: float,
    deadline: float,
    patience: _Patience,
    probe: socket.socket,
) -> EntryStore | None:
    """Connect to torch's store; None if ZeroMQ listens there. Raises a ``ConnectionError`` if that fails for now."""
    attempt = TorchStore.connect(host, port, secret, timeout_s)
    while not attempt.done() and not _greets(probe, 0.0):
        patience.lose("it does not answer")
        if time.monotonic() > deadline + _GRACE_S:
            raise RuntimeError("what listens there does not answer")
        time.sleep(_ATTEMPT_S)
    if _greets(probe, 0.0):
        return None
    try:
        return attempt.result()
    except RuntimeError as error:
        time.sleep(_RETRY_S)
        if _greets(probe, 0.0):  # raises another error if a port forwarder has closed the connection meanwhile
            return None
        patience.lose(str(error))
        raise ConnectionResetError(f"what listens there is no rendezvous: {error}") from error


def _reach_zmq(host: str, port: int, secret: str | None, timeout_s: float, found: str) -> EntryStore:
    there = f"The process at {joined(host, port)} has transport='zmq', but"
    try:
        reach = load(STORES["zmq"])
    except ImportError as error:
        raise final_error(f"{there} pyzmq is not installed for this one. Install it: pip install pyzmq.") from error
    store: EntryStore = reach(host, port, secret, timeout_s, found)
    return store


def final_error(text: str) -> LaunchError:
    """An error that another attempt would meet again."""
    error = LaunchError(text)
    error.final = True
    return error


def _listener(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to whatever listens there, once something does. torch's store would print its C++ stack first."""
    while True:
        try:
            return socket.create_connection((host, port), timeout=_GRACE_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


def _greets(connection: socket.socket, wait_s: float) -> bool:
    """Whether the other end has begun with ZeroMQ's greeting. Raises a ``ConnectionError`` if it has closed."""
    # It raises a :class:`_StrangerError` if that has begun with something else: torch's store waits for the client.
    connection.settimeout(wait_s)
    try:
        begun = connection.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, TimeoutError):
        return False
    if not begun:
        raise ConnectionResetError("the other end closed the connection")
    if begun != b"\xff":
        raise _StrangerError("another program listens there")
    return True


def successor_of(key: str) -> str:
    """The key that holds the key of a server's replacement."""
    return f"{key}/successor"
