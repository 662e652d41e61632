"""Starts a job's servers and watches over its processes. Lives in the main process; one per process at a time."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import psutil

from lightning_asgd.errors import ServerLostError
from lightning_asgd.processes import exit_code, reaper
from lightning_asgd.server.server_process import ServerArguments, ServerSettings
from lightning_asgd.transports.rendezvous import Rendezvous, successor_of

__all__ = ["Supervisor", "close_current", "current", "ensure", "ensure_watch", "excuse_of", "with_last_words"]

log = logging.getLogger(__name__)

_POLL_S = 0.2
_STOP_S = 5.0
_WRITE_S = 60.0  # for the last snapshot; if it is not through then, the one before is there
_LOG_LINES = 20
_SPARE_AFTER_S = 15.0  # without a server's end
_UNBORN = 3  # servers in a row that end before they serve: no more are started
_RESTARTS = 100  # of servers, in a process's life: if they keep dying it is their machine's fault


class _Server:
    def __init__(self, index: int, rendezvous: Rendezvous, settings: ServerSettings, *, succeeds: bool) -> None:
        self.index = index
        self.rendezvous = rendezvous
        self.key = f"server/{uuid.uuid4().hex}"
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # nameless: nothing is left behind
        host, port = rendezvous.address
        arguments = ServerArguments(
            settings, f"server{index}", self.key, host, port, os.getpid(), succeeds=succeeds, server=index
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lightning_asgd.server.server_process", arguments.to_json()],
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env=_server_environment(),
        )

    def bury(self, **obituary: Any) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # the server is gone too
                self.process.stdin.write(json.dumps(obituary).encode() + b"\n")
                self.process.stdin.flush()

    def close(self) -> None:
        self.output.close()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def last_lines(self) -> str:
        size = self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, size - 16384))
        lines = self.output.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:]) or "(no output)"

    def obituary(self) -> str:
        return (
            f"Server {self.index} (process {self.process.pid}) ended with exit code {self.process.returncode}. "
            f"Its last output was:\n{self.last_lines()}"
        )


class Supervisor:
    """The servers of a job, and the processes to end with it.

    Args:
        rendezvous: where they publish their addresses; None if there are none.
        settings: what they have in common. Where they are to write snapshots and no folder is named, they get one that
            goes with this.
    """

    def __init__(self, rendezvous: Rendezvous | None, settings: ServerSettings | None = None) -> None:
        self.rendezvous = rendezvous
        self.settings = settings or ServerSettings()
        self._private: str | None = None  # folder for snapshots that are for a lost server's place only
        self._servers: list[_Server] = []
        self._buried: list[dict[str, Any]] = []  # workers that are gone, for servers that are started later
        self._lock = threading.Lock()  # of these and the list of servers
        self._restarts = 0
        self._unborn = 0  # servers in a row that ended before they served
        self.spare = False
        """Whether one server more is to be kept ready."""
        self._spare: _Server | None = None
        self._quiet_since = time.monotonic()
        self._obituary: str | None = None  # of the latest server that another one was started for
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._excused: set[int] = set()  # workers whose end, however it comes, is no failure of the script
        self._reaper: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._on_worker_exit: Callable[[int, int], None] | None = None

    def start(self) -> None:
        """Start the reaper and the thread that watches."""
        self._reaper = reaper.start(_child_environment())
        if self.settings.snapshot_every_s and not self.settings.snapshots:
            self._private = tempfile.mkdtemp(prefix="lightning_asgd.")
            self._tell_reaper(f"remove {self._private}")
        self._thread = threading.Thread(target=self._watch, name="lightning_asgd.processes.supervisor", daemon=True)
        self._thread.start()

    def add_servers(self, total: int) -> None:
        """Start servers until there are ``total``. Returns at once; the addresses come through the rendezvous."""
        while self.rendezvous is not None and len(self._servers) < total:
            server = self._new_server(len(self._servers), self.rendezvous, succeeds=False)
            self._servers.append(server)
            self.register(server.process.pid)

    def keys(self, number: int) -> list[str]:
        """Rendezvous keys of the first servers' addresses."""
        return [server.key for server in self._servers[:number]]

    @property
    def healthy(self) -> bool:
        """Whether all servers run, as far as the operating system knows."""
        return not self._closing.is_set() and all(s.process.poll() is None for s in self._servers)

    @property
    def server_pids(self) -> list[int]:
        """Process numbers of the servers."""
        return [server.process.pid for server in self._servers]

    def add_worker(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Watch over a worker that the launcher started."""
        self._workers[rank] = process
        self.register(process.pid)

    def excuse(self, *ranks: int) -> None:
        """Let the exit codes of workers mean nothing: others go on without them, or this process has ended them."""
        self._excused.update(ranks or self._workers)

    def failures(self) -> dict[int, int]:
        """Wait for the workers to end. Returns the exit codes of those that have failed without an excuse, by rank."""
        failed = exit_code.failures(self._workers)
        return {rank: code for rank, code in failed.items() if rank not in self._excused and not self._is_excused(rank)}

    def _is_excused(self, rank: int) -> bool:
        """Whether a worker has noted that it failed within a fit that goes on without it."""
        with contextlib.suppress(RuntimeError):  # of the rendezvous
            return self.rendezvous is not None and self.rendezvous.peek(excuse_of(rank)) is not None
        return False

    def on_worker_exit(self, callback: Callable[[int, int], None] | None) -> None:
        """Have ``callback(rank, exit code)`` called, from another thread, when a worker ends."""
        self._on_worker_exit = callback

    def bury(self, session: str, worker: int, reason: str) -> None:
        """Tell the servers that a worker is gone, from a process that is not a worker itself."""
        with self._lock:
            self._buried.append({"session": session, "worker": worker, "reason": reason})
            for server in self._servers:
                server.bury(**self._buried[-1])

    def obituary(self) -> str | None:
        """What is known of the server that died last; None if none did."""
        for server in self._servers:
            if server.process.poll() is not None:
                return server.obituary()
        return self._obituary

    def rest(self) -> None:
        """A fit is over: keep no server ready, and speak no more of one that another has replaced."""
        self.spare, self._obituary = False, None

    def close(self) -> None:
        """Stop the servers and wait for them. May be called more than once."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)  # it may be starting a server
        servers = [*self._servers, *([self._spare] if self._spare is not None else [])]
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                server.process.terminate()
        for server in servers:
            try:
                server.process.wait(_WRITE_S if self.settings.snapshots else _STOP_S)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
            server.close()
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
        # Workers may still be finishing: the reaper stays for them and goes with this process.
        if self._reaper is not None and all(p.poll() is not None for p in self._workers.values()):
            if self._reaper.stdin is not None:
                self._reaper.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reaper.wait(_STOP_S)

    def register(self, pid: int) -> None:
        """Have a process ended when this one is gone."""
        with contextlib.suppress(psutil.Error):
            self._tell_reaper(f"add {pid} {psutil.Process(pid).create_time()}")

    def _tell_reaper(self, line: str) -> None:
        if self._reaper is not None and self._reaper.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._reaper.stdin.write(f"{line}\n".encode())
                self._reaper.stdin.flush()

    def _new_server(self, index: int, rendezvous: Rendezvous, *, succeeds: bool = True) -> _Server:
        settings = self.settings if self._private is None else replace(self.settings, snapshots=self._private)
        return _Server(index, rendezvous, settings, succeeds=succeeds)

    def _succeed(self, server: _Server) -> None:
        """Start another server in the place of one that has ended."""
        if self._closing.is_set():
            return
        with contextlib.suppress(RuntimeError):  # of the rendezvous: the main process ends
            unborn = server.rendezvous.peek(server.key) is None
            self._unborn = self._unborn + 1 if unborn else 0
            hopeless = unborn and (server.process.returncode >= 0 or self._unborn >= _UNBORN)
            if hopeless or self._restarts >= _RESTARTS:  # it could not start, and another one could not either
                server.rendezvous.put(server.key, {"error": server.obituary()})
                return
            self._restarts += 1
            self._obituary = server.obituary()
            log.warning("%s\nAnother one takes its place.", self._obituary)
            try:
                successor = self._spare or self._new_server(server.index, server.rendezvous)
            except OSError as error:
                server.rendezvous.put(
                    server.key, {"error": f"{self._obituary}\nAnother one cannot be started: {error}"}
                )
                return
            successor.index = server.index
            self._spare, self._quiet_since = None, -math.inf  # where one has died another one may
            self.register(successor.process.pid)
            with self._lock:
                for buried in self._buried:
                    successor.bury(**buried)
                self._servers[server.index] = successor
            server.close()
            server.rendezvous.put(successor_of(server.key), successor.key)

    def _look_after_spare(self) -> None:
        """Have a server that has started already, since that takes seconds. Not at once: most jobs never need one."""
        if self._spare is not None and not self.spare:
            self._spare.process.terminate()
        if self._spare is not None and self._spare.process.poll() is not None:
            self._spare.close()
            self._spare, self._quiet_since = None, time.monotonic()
            self._restarts += self.spare
        if self.rendezvous is None or not self._servers or not self.spare or self._spare is not None:
            return
        if time.monotonic() > self._quiet_since + _SPARE_AFTER_S and self._restarts < _RESTARTS:
            with contextlib.suppress(OSError):  # then there is none
                self._spare = self._new_server(len(self._servers), self.rendezvous)
                self.register(self._spare.process.pid)

    def _watch(self) -> None:
        ended: set[str | int] = set()
        while not self._closing.wait(_POLL_S):
            self._look_after_spare()
            for server in list(self._servers):
                if server.key not in ended and server.process.poll() is not None:
                    ended.add(server.key)
                    self._succeed(server)
            for rank, process in list(self._workers.items()):
                code = process.poll()
                callback = self._on_worker_exit
                if rank not in ended and code is not None and callback is not None:  # else somebody will want to know
                    ended.add(rank)
                    self.bury("", rank, f"its process ended with exit code {code}")
                    callback(rank, code)


_current: Supervisor | None = None


def excuse_of(rank: int) -> str:
    """The rendezvous key under which a worker notes that it failed within a fit that goes on without it."""
    return f"excuse/{rank}"


def ensure(num_servers: int, rendezvous: Rendezvous | None, settings: ServerSettings | None = None) -> Supervisor:
    """The process's supervisor with at least that many servers: the present one if it is healthy, else a new one.

    Servers are kept and reused, because starting one takes as long as importing torch.
    """
    global _current
    if _current is not None:
        same = (_current.rendezvous, _current.settings) == (rendezvous, settings or ServerSettings())
        if _current.healthy and same:
            _current.add_servers(num_servers)
            return _current
        _current.close()
    _current = Supervisor(rendezvous, settings)
    _current.start()
    _current.add_servers(num_servers)
    return _current


def current() -> Supervisor | None:
    """The process's supervisor, if it has started one."""
    return _current


def ensure_watch() -> Supervisor:
    """The process's supervisor, or a new one without servers: for a machine whose servers run elsewhere."""
    return _current or ensure(0, None)


@contextlib.contextmanager
def with_last_words() -> Iterator[None]:
    """Add a dead server's last words to the error, where this process knows them."""
    try:
        yield
    except ServerLostError as error:
        words = _current.obituary() if _current is not None else None
        if words is None or words in str(error):
            raise
        raise ServerLostError(f"{error}\n{words}") from error


@atexit.register
def _at_exit() -> None:
    """Let the script's exit code tell of workers that have failed, then stop the servers."""
    failed: dict[int, int] = {}
    try:
        if _current is not None and _current_pid == os.getpid() and not exit_code.is_failing():
            failed = _current.failures()  # before the servers are stopped: workers may still need them
    finally:
        close_current()
    if failed:
        exit_code.exit_with(failed)


def close_current() -> None:
    """Stop the process's servers, if it has any. A forked child leaves its parent's alone."""
    global _current
    if _current is not None and _current_pid == os.getpid():
        _current.close()
        _current = None


_current_pid = os.getpid()


def _after_fork() -> None:
    global _current, _current_pid
    _current = None
    _current_pid = os.getpid()


os.register_at_fork(after_in_child=_after_fork)


def _child_environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": root if not path else os.pathsep.join([root, path]),
        "PYTHONSAFEPATH": "1",
    }


def _server_environment() -> dict[str, Any]:
    # A server needs one core and no accelerator. Every message by value brings fresh memory: huge pages make that cheap
    # (100 MB there and back by RPC: 7.2 times two copies by one thread; 5.2 so, 3.0 with those of the worker too).
    return {
        "THP_MEM_ALLOC_ENABLE": "1",
        **_child_environment(),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
