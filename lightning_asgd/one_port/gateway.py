"""The process at the one port of a job: it passes connections on to the rendezvous, and to the servers beside it.

Each server behind it has a number, and ZeroMQ says the number at once: the first ten bytes of a connection hold the
length of the connecting socket's routing id, as they have since ZMTP 1.0, and a worker chooses a routing id of that
length. What begins otherwise, or says nothing, is passed on to the rendezvous. There is no other way through, and
behind it are sockets that are encrypted and authenticated from end to end. So a foreign process gets no further than
at any other port of a job.

ZeroMQ could ask for a server by name, as from a SOCKS 5 proxy. But libzmq 4.3.5 aborts a process that closes a socket
whose proxy has refused a connection.

:class:`Gateway` starts this file as a program. It needs no other file of this package: it starts in 50 ms and takes
10 MB. It lives as long as the process that has started it, and for a few seconds longer if that was killed: servers
then answer for so long.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_POLL_S, _POLL_LEAST_S = 0.2, 0.01
_SILENT_S = 0.02  # ZeroMQ begins at once. What was passed on too soon is closed, and ZeroMQ connects again
_SETUP_S = 5.0
_FAREWELL_S = 4.0  # for which the servers of a killed main process answer, and a little more
_END_S = 3.0
_CHUNK = 1 << 20
_SIGNATURE = 10  # bytes: 255, eight with the length of the routing id and 1, and 127
_ASKS = b"?"  # instead of ZeroMQ's 127: whether a server serves, whose name follows
_FIRST, _LAST = 24, 255  # numbers of servers, which are lengths of routing ids
_NAME = 12  # characters of a server's name
_YES, _NO = b"\1", b"\0"
_RETRY_S = 1.0
_MOST_CALLERS = 512  # whose connections are not passed on yet
_EARLY_S, _EARLY_ENDS = 1.0, 5  # a process that ends sooner, several times in a row, is not started again


class Gateway:
    """The process at a listening socket, and its end; restarted if killed. ``port``: of the rendezvous, on loopback."""

    def __init__(self, listener: socket.socket, port: int) -> None:
        self._listener, self._port = listener, port
        self._numbers: dict[str, int] = {}  # of servers, by their names
        self._lines: dict[str, str] = {}  # what was said of each
        self._lock = threading.Lock()
        self._closed = False
        self._process = self._start()
        self._thread = threading.Thread(target=self._keep, name="lightning_asgd.gateway", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def add(self, name: str, port: int) -> int:
        """Lead others to a server's port on loopback. Returns its number. Raises a ``ValueError`` if it gets none."""
        if not (len(name) == _NAME and name.isalnum() and name.isascii()):
            raise ValueError(f"{name!r} names no server. Expected {_NAME} letters and digits.")
        with self._lock:
            number = self._numbers.get(name, _FIRST + len(self._numbers))
            if number > _LAST:
                raise ValueError(
                    f"{len(self._numbers)} servers have been started at this port. Expected no more: start again."
                )
            self._numbers[name] = number
            self._lines[name] = f"{number} {name} {port}\n"
            _say(self._process, self._lines[name])
        return number

    def close(self) -> None:
        """End the process, and wait for it."""
        with self._lock:
            self._closed = True
            _say(self._process, "end\n")
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(_END_S)

    def _start(self) -> subprocess.Popen[bytes]:
        numbers = os.getpid(), self._listener.fileno(), self._port
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, numbers)],
            stdin=subprocess.PIPE,
            pass_fds=[self._listener.fileno()],
            start_new_session=True,  # a signal to the job's whole process group does not reach it
        )
        _say(process, "".join(self._lines.values()) + "open\n")
        return process

    def _keep(self) -> None:
        early = 0
        while True:
            begun = time.monotonic()
            code = self._process.wait()
            early = early + 1 if time.monotonic() < begun + _EARLY_S else 0
            with self._lock:
                if self._process.stdin is not None:
                    with contextlib.suppress(OSError):
                        self._process.stdin.close()
                if self._closed:
                    return
                if early >= _EARLY_ENDS:
                    log.error("The gateway ends with exit code %d at once. Other machines reach no server.", code)
                    self._listener.close()  # so that they learn it
                    return
                log.warning("The gateway ended with exit code %d. Another one is started.", code)
            if not self._restart():
                return

    def _restart(self) -> bool:
        """Start another process, once the system can; whether it has started, and this is not closed meanwhile."""
        while True:
            with self._lock:
                if self._closed:
                    return False
                try:
                    self._process = self._start()
                    return True
                except OSError as error:
                    log.warning("The gateway cannot be started now and is tried again: %s", error)
            time.sleep(_RETRY_S)


def _say(process: subprocess.Popen[bytes], text: str) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError, ValueError):  # it has ended: the next one learns everything
            process.stdin.write(text.encode())
            process.stdin.flush()


def routing_id(name: str, number: int) -> bytes:
    """One for a connection to a server behind a gateway, with the server's number as its length."""
    return (name + secrets.token_hex(_LAST))[:number].encode()


def serves(connection: socket.socket, name: str, number: int) -> bool:
    """Whether a server can be reached through a connected gateway. Raises an ``OSError`` if that does not say."""
    connection.sendall(b"\xff" + (number + 1).to_bytes(8, "big") + _ASKS + name.encode())
    answer = connection.recv(1)
    if answer not in (_YES, _NO):
        raise ConnectionResetError("the other end closed the connection")
    return answer == _YES


# ---------------------------------------------------------------------- the process


@dataclass(eq=False)
class _Caller:
    """A connection that has not been passed on yet."""

    sock: socket.socket
    since: float
    said: bytes = b""
    asks: bool = False  # whether a server serves, and no more
    ahead: socket.socket | None = None  # the connection that is being made for it

    @property
    def silent(self) -> bool:
        """Whether it has said nothing, and is passed on nowhere yet."""
        return not (self.said or self.ahead)


@dataclass(eq=False)
class _End:
    """One of two connections between which everything is passed on."""

    sock: socket.socket
    unsent: bytes  # to it
    other: _End = field(init=False)
    then: Callable[[int], None] = field(init=False)  # what is called when it is ready
    silent: bool = False  # so far, and passed on to the rendezvous


class _Relay:
    """Accepts connections and passes them on, in one thread."""

    def __init__(self, parent: int, listener: socket.socket, port: int) -> None:
        self._parent, self._listener, self._port = parent, listener, port
        self._servers: dict[int, tuple[str, int]] = {}  # names and ports
        self._lines = b""
        self._selector = selectors.DefaultSelector()
        self._callers: dict[_Caller, None] = {}  # in the order in which they came
        self._ends: set[_End] = set()
        self._buffer = memoryview(bytearray(_CHUNK))
        self._listens_at = 0.0  # when to accept again, after files have run out
        self._opened = self._ended = False
        self._poll_s = _POLL_S

    def run(self) -> None:
        """Pass connections on until the parent says that it is over, or is gone."""
        os.set_blocking(0, False)
        self._listener.setblocking(False)
        self._watch(0, selectors.EVENT_READ, lambda _: self._read_lines())
        deadline = None
        while not self._ended and (deadline is None or (self._ends and time.monotonic() < deadline)):
            silent = any(caller.silent for caller in self._callers)
            for key, events in self._selector.select(_POLL_LEAST_S if silent else self._poll_s):
                key.data(events)
            self._look_after_callers()
            if deadline is None and os.getppid() != self._parent:
                deadline, self._poll_s = time.monotonic() + _FAREWELL_S, _POLL_S
                self._watch(self._listener, 0)
                self._listener.close()  # at once: another process may listen there next

    def _watch(self, file: socket.socket | int, events: int, then: Callable[[int], None] | None = None) -> None:
        known = self._selector.get_map().get(file)
        if known is None:
            if events:
                self._selector.register(file, events, then)
        elif not events:
            self._selector.unregister(file)
        elif known.events != events:
            self._selector.modify(file, events, known.data)

    def _close(self, sock: socket.socket | None) -> None:
        if sock is not None and sock.fileno() >= 0:
            self._watch(sock, 0)
            sock.close()

    def _read_lines(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(0, 65536):
                *lines, self._lines = (self._lines + data).split(b"\n")
                for line in lines:
                    self._obey(line.decode())
            self._watch(0, 0)
            self._poll_s = _POLL_LEAST_S  # the parent is about to be gone

    def _obey(self, line: str) -> None:
        if line == "open":
            self._opened = True
        elif line == "end":
            self._ended = True
        else:
            number, name, port = line.split()
            self._servers[int(number)] = name, int(port)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # too many open files: the system keeps the connection until some are closed
                self._watch(self._listener, 0)
                self._listens_at = time.monotonic() + _POLL_S
                return
            sock.setblocking(False)
            caller = _Caller(sock, time.monotonic())
            if len(self._callers) >= _MOST_CALLERS:
                self._drop(next(iter(self._callers)))
            self._callers[caller] = None
            self._watch(sock, selectors.EVENT_READ, partial(self._hear, caller))

    def _look_after_callers(self) -> None:
        now = time.monotonic()
        for caller in list(self._callers):
            if now > caller.since + _SETUP_S:
                self._drop(caller)
            elif now > caller.since + _SILENT_S and caller.silent:
                self._connect(caller, self._port)
        if self._opened and self._listener.fileno() >= 0 and now >= self._listens_at:
            self._watch(self._listener, selectors.EVENT_READ, lambda _: self._accept())

    def _drop(self, caller: _Caller, answer: bytes = b"") -> None:
        if answer:
            with contextlib.suppress(OSError):
                caller.sock.send(answer)
        self._close(caller.sock)
        self._close(caller.ahead)
        self._callers.pop(caller, None)

    def _hear(self, caller: _Caller, _: int) -> None:
        try:
            caller.said += (said := caller.sock.recv(_SIGNATURE + _NAME - len(caller.said)))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        kind = caller.said[_SIGNATURE - 1 : _SIGNATURE]
        if not said:
            self._drop(caller)
        elif caller.said[:1] != b"\xff":
            self._connect(caller, self._port)
        elif kind == _ASKS and len(caller.said) == _SIGNATURE + _NAME:
            caller.asks, name = True, caller.said[_SIGNATURE:].decode(errors="replace")
            self._lead(caller, name)
        elif kind and kind != _ASKS:
            self._lead(caller)

    def _lead(self, caller: _Caller, name: str = "") -> None:
        """Pass a connection on to the server that it names."""
        number = _number(caller.said)
        if number not in self._servers:
            self._read_lines()  # it may have come just now
        known, port = self._servers.get(number, ("", self._port))
        if number >= _FIRST and (not known or name not in ("", known)):
            self._drop(caller, _NO if caller.asks else b"")
        else:
            self._connect(caller, port)

    def _connect(self, caller: _Caller, port: int) -> None:
        self._watch(caller.sock, 0)
        try:
            ahead = caller.ahead = socket.socket()
            ahead.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                ahead.connect((_LOOPBACK, port))
        except OSError as error:
            self._turn_away(caller, error.errno)
            return
        self._watch(ahead, selectors.EVENT_WRITE, lambda _: self._join(caller, ahead))

    def _turn_away(self, caller: _Caller, error: int | None) -> None:
        """Close a connection that leads nowhere. A server that refuses is forgotten: a stranger may get its port."""
        gone = error == errno.ECONNREFUSED
        if gone:
            self._servers.pop(_number(caller.said), None)
        self._drop(caller, _NO if caller.asks and gone else b"")

    def _join(self, caller: _Caller, ahead: socket.socket) -> None:
        if caller not in self._callers:  # dropped since the system said that it is ready
            return
        if error := ahead.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._turn_away(caller, error)
            return
        if caller.asks:
            self._drop(caller, _YES)
            return
        del self._callers[caller]
        near, far = _End(caller.sock, b"", silent=not caller.said), _End(ahead, caller.said)
        near.other, far.other = far, near
        for end in (near, far):
            end.then = partial(self._pass_on, end)
            with contextlib.suppress(OSError):  # macOS: the other end has reset the connection
                end.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends.add(end)
            self._watch(end.sock, 0)
        for end in (near, far):
            self._send(end, b"")

    def _pass_on(self, end: _End, events: int) -> None:
        if end not in self._ends:  # closed meanwhile
            return
        if events & selectors.EVENT_WRITE:
            self._send(end, b"")
        if events & selectors.EVENT_READ and end in self._ends:
            try:
                number = end.sock.recv_into(self._buffer)
            except BlockingIOError:
                return
            except OSError:
                number = 0
            said = bytes(self._buffer[: min(number, _SIGNATURE)])
            if end.silent and said[:1] == b"\xff" and (len(said) < _SIGNATURE or _number(said) >= _FIRST):
                number = 0  # it may be for a server, not for the rendezvous
            end.silent = False
            if number:
                self._send(end.other, self._buffer[:number])
            else:
                self._part(end)

    def _send(self, end: _End, data: bytes | memoryview) -> None:
        """Send what is left, and more if nothing is; while something is left, nothing more is read for it."""
        rest = end.unsent or data
        try:
            rest = rest[end.sock.send(rest) :] if len(rest) else b""
        except BlockingIOError:
            pass
        except OSError:
            self._part(end)
            return
        end.unsent = bytes(rest)
        for each in (end, end.other):
            reads = 0 if each.other.unsent else selectors.EVENT_READ
            self._watch(each.sock, reads | (selectors.EVENT_WRITE if each.unsent else 0), each.then)

    def _part(self, end: _End) -> None:
        for each in (end, end.other):
            self._ends.discard(each)
            self._close(each.sock)


def _number(said: bytes) -> int:
    """The number of the server that a connection is for, by what it begins with."""
    return int.from_bytes(said[1 : _SIGNATURE - 1], "big") - 1 if said[:1] == b"\xff" else 0


def _main() -> None:
    parent, number, port = map(int, sys.argv[1:])
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)  # it ends with its parent, whose last messages it passes on
    with contextlib.suppress(ImportError, ValueError, OSError):  # not Unix, or no limit
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _Relay(parent, socket.socket(fileno=number), port).run()


if __name__ == "__main__":
    _main()
