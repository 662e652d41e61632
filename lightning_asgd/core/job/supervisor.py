"""Starts a job's servers and watches over its processes. Lives in the main process; one per process at a time."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil

from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.foundation.process_name import machine_and_pid
from lightning_asgd.core.job import exit_code, reaper
from lightning_asgd.core.job.facts import refused_in
from lightning_asgd.core.job.rendezvous import Rendezvous, successor_of
from lightning_asgd.core.job.secret import LARGEST_ENTRY
from lightning_asgd.core.job.server_handle import ServerHandle, child_environment
from lightning_asgd.core.server.process import UNWRITTEN, ServerSettings

log = logging.getLogger(__name__)

_POLL_S = 0.2
_TURNS = 3  # looks between two questions to the rendezvous, which may be on another machine
_STOP_S = 3.0
_WRITE_S = 60.0  # for the last snapshot; if it is not through then, the one before is there
_STANDBY_AFTER_S = 15.0  # without a server's end
_FAILED_STARTS = 3  # servers in a row that end before they serve: no more are started
_RESTARTS = 100  # of servers, in a process's life: if they keep dying it is their machine's fault


class Supervisor:
    """The servers of a job, from number ``first`` on, and the processes to end with it.

    If servers write snapshots and no folder is named, they get a temporary folder, which is removed at the end.
    """

    def __init__(
        self, rendezvous: Rendezvous | None, settings: ServerSettings | None = None, *, first: int = 0
    ) -> None:
        self.rendezvous, self.settings, self._first = rendezvous, settings or ServerSettings(), first
        self._private: str | None = None  # folder for snapshots that are for a lost server's place only
        self._folders: list[str] = []
        self._servers: list[ServerHandle] = []
        self._exits: list[dict[str, Any]] = []  # workers that are gone, for servers that are started later
        self._lock = threading.Lock()  # of these and the servers
        self._restarts = self._failed_starts = 0  # the latter are servers in a row that ended before they served
        self.hot_standby = False  # whether one server more is to be kept ready
        # Whether another process has replaced a worker whose end was reported here.
        self.has_returned: Callable[[int], bool] = lambda rank: False
        self.on_close: Callable[[], None] = lambda: None  # called before the servers are stopped
        self._lease_until, self._quiet_since = math.inf, time.monotonic()  # the former is that of all servers
        self._standby: ServerHandle | None = None
        self._irreplaceable: str | None = None  # why a server is not replaced
        self._exit_report: str | None = None  # of the latest server that another one was started for
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: set[str | int] = set()  # keys of servers, and ranks, whose end was noticed
        self._refusal: tuple[int | None, str] = None, ""  # of the latest worker that could not join
        self._excused: set[int] = set()  # workers whose end, however it comes, is no failure of the script
        self.refused: dict[int, int] = {}  # exit codes of workers that were refused, watched over by another launcher
        self.unwritten: dict[int, str] = {}  # what servers have said last that could not write a snapshot, by number
        self._reaper: subprocess.Popen[bytes] | None = None
        self._former: Supervisor | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._on_worker_exit: Callable[[int, int, int], None] | None = None

    def start(self) -> None:
        """Start the reaper and the thread that watches."""
        self._reaper = reaper.start(child_environment())
        self._make_folder()
        self._thread = threading.Thread(target=self._watch, name="lightning_asgd.supervisor", daemon=True)
        self._thread.start()

    def serve_at(self, rendezvous: Rendezvous, settings: ServerSettings) -> None:
        """Serve from now on: until now there were workers to watch over, and no servers."""
        self.rendezvous, self.settings = rendezvous, settings
        self._make_folder()

    def _make_folder(self) -> None:
        if self.settings.snapshot_every_s and not self.settings.snapshots:
            self._private = tempfile.mkdtemp(prefix="lightning_asgd.")
            self.remove_if_killed(self._private)

    def add_servers(self, total: int, *, succeed: bool = False) -> None:
        """Start servers until there are ``total``, and return at once. They may ``succeed`` those of a lost process."""
        while self.rendezvous is not None and len(self._servers) < total:
            server = self._new_server(self._first + len(self._servers), self.rendezvous, succeeds=succeed)
            self._servers.append(server)
            self.register(server.process.pid)
            for exited in self._exits:
                server.report_exit(**exited)

    def follow(self, former: Supervisor) -> None:
        """Watch over the workers of a supervisor that is closed, and know which of them have ended."""
        self._exits = [each for each in former._exits if not former.has_returned(each["worker"])]
        self._ended = {*former._ended} & former._workers.keys()
        self._excused |= former._excused
        self.refused |= former.refused
        for rank, process in former._workers.items():
            self.add_worker(rank, process)
        for folder in former._folders:
            self.remove_if_killed(folder)
        self._former = former  # whose reaper would end the workers if it was gone

    def keys(self, number: int) -> list[str]:
        """Rendezvous keys of the first servers' addresses."""
        return [server.key for server in self._servers[:number]]

    def check_servers(self) -> None:
        """Raise a ``LaunchError`` if a server was lost that could not be replaced."""
        if self._irreplaceable is not None:
            raise LaunchError(f"{self._irreplaceable}\nExpected it to start. Fix the cause shown in its output.")

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
        """Ignore the exit codes of workers: the others continue without them, or this process has ended them."""
        self._excused.update(ranks or self._workers)

    def terminate(self, *ranks: int) -> None:
        """End workers that this process has started."""
        for rank in ranks:
            if rank in self._workers:
                self._workers[rank].terminate()

    def failures(self) -> dict[int, int]:
        """Wait for the workers to end. Returns the exit codes of those that have failed without an excuse, by rank."""
        failed = exit_code.failures(self._workers)
        return {**self.refused, **{rank: code for rank, code in failed.items() if not self._is_excused(rank)}}

    def _is_excused(self, rank: int) -> bool:
        noted = self.noted_excuse(self._workers[rank].pid)
        return rank in self._excused if noted is None else noted

    def noted_excuse(self, pid: int) -> bool | None:
        """Whether a worker has noted that its failure is none of the script; None if it has noted nothing."""
        with contextlib.suppress(RuntimeError):  # of the rendezvous
            return None if self.rendezvous is None else self.rendezvous.peek(exit_code.excuse_of(pid))
        return None

    def on_worker_exit(self, callback: Callable[[int, int, int], None] | None) -> None:
        """Have ``callback(rank, process number, exit code)`` called, from another thread, when a worker ends."""
        self._on_worker_exit = callback

    def report_exit(self, session: str, worker: int, reason: str, process: str = "") -> None:
        """Tell the servers that a worker is gone, from a process that is not a worker itself."""
        with self._lock:
            self._exits.append({"session": session, "worker": worker, "reason": reason, "process": process})
            for server in self._servers:
                server.report_exit(**self._exits[-1])

    def _report_refused(self) -> None:
        """Log that a worker could not join, and let the servers know as long as that stands: a session may begin."""
        worker, why = found = refused_in(self.rendezvous) or (None, "")
        if why and found != self._refusal:
            log.warning("%s", why)
        self._refusal = found
        if worker is not None:
            with self._lock:
                for server in self._servers:
                    server.report_refused(worker, why)

    def extend_lease(self, until: float) -> None:
        """Have all servers end at this time of ``time.monotonic()``, also if this process is suspended then."""
        with self._lock:
            self._lease_until = until
            for server in (*self._servers, *([] if self._standby is None else [self._standby])):
                server.extend_lease(until)

    def exit_report(self) -> str | None:
        """What is known of the server that died last; None if none did. Any thread may ask."""
        with self._lock:  # a server that is in the list is closed under it only
            for server in self._servers:
                if server.process.poll() is not None and not server.output.closed:
                    return server.exit_report()
        return self._exit_report

    def rest(self) -> None:
        """A fit is over: keep no server ready, and speak no more of one that another has replaced."""
        self.hot_standby, self._exit_report = False, None

    def close(self) -> None:
        """Stop the servers and wait for them. May be called more than once."""
        self._closing.set()
        self.on_close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)  # it may be starting a server
        self._end([*self._servers, *([self._standby] if self._standby is not None else [])])
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
        self._end_reaper()

    def _end_reaper(self) -> None:
        """Unless workers are still finishing: then the reaper stays for them and goes with this process."""
        if self._reaper is not None and all(p.poll() is not None for p in self._workers.values()):
            unneeded, self._reaper = self._reaper, None
            with contextlib.suppress(subprocess.TimeoutExpired):
                unneeded.communicate(b"keep\n", _STOP_S)
        if self._former is not None:
            self._former._end_reaper()

    def end_servers(self) -> None:
        """Stop the servers, which no worker uses, and watch over the workers only."""
        servers, self._servers, self.rendezvous = self._servers, [], None
        self._end(servers)

    def kill_servers(self) -> None:
        """Kill all servers at once: another host's succeed them."""
        with self._lock:
            servers, self._servers = self._servers, []
        for server in servers:
            server.process.kill()
        for server in servers:
            server.process.wait()
            server.close()

    def _end(self, servers: list[ServerHandle]) -> None:
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                server.process.terminate()
        # One deadline for all: on a loaded machine each of several would be used up.
        deadline = time.monotonic() + (_WRITE_S if self.settings.snapshots else _STOP_S)
        for server in servers:
            try:
                server.process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
            self._show(server)
            if self.settings.snapshots and server.process.returncode in (UNWRITTEN, -signal.SIGKILL):
                self.unwritten[server.index] = server.last_output().rpartition("\n")[2]
            with self._lock:
                server.close()

    def _show(self, server: ServerHandle) -> None:
        """Show what a server of a run has logged."""
        if self.settings.run and not server.output.closed and (text := server.new_output()):
            log.warning(text.rstrip())

    def register(self, pid: int) -> None:
        """Have a process ended when this one is gone."""
        with contextlib.suppress(psutil.Error):
            self._tell_reaper(f"add {pid} {reaper.started(pid)}")

    def remove_if_killed(self, folder: str) -> None:
        """Have a folder removed if this process is killed: else that is up to the caller."""
        self._folders.append(folder)
        self._tell_reaper(f"remove {folder}")

    def _tell_reaper(self, line: str) -> None:
        if self._reaper is not None and self._reaper.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._reaper.stdin.write(os.fsencode(f"{line}\n"))
                self._reaper.stdin.flush()

    def _new_server(self, index: int, rendezvous: Rendezvous, *, succeeds: bool = True) -> ServerHandle:
        settings = replace(self.settings, snapshots=self._private, keeps=False) if self._private else self.settings
        return ServerHandle(index, rendezvous, settings, succeeds=succeeds)

    def _replace(self, server: ServerHandle) -> None:
        """Start another server in the place of one that has ended."""
        if self._closing.is_set() or server not in self._servers:
            return
        with contextlib.suppress(RuntimeError):  # of the rendezvous: the main process ends
            if server.process.returncode == UNWRITTEN:
                self.unwritten[server.index] = server.last_output().rpartition("\n")[2]
                return
            failed_start = server.rendezvous.peek(server.key) is None
            self._failed_starts = self._failed_starts + 1 if failed_start else 0
            not_restartable = failed_start and (server.process.returncode >= 0 or self._failed_starts >= _FAILED_STARTS)
            if not_restartable or self._restarts >= _RESTARTS:  # it could not start, and another one could not either
                self._give_up(server, server.exit_report())
                return
            self._restarts += 1
            self._exit_report = server.exit_report()
            log.warning("%s\nA replacement is being started.", self._exit_report)
            try:
                replacement = self._standby or self._new_server(server.index, server.rendezvous)
            except OSError as error:
                self._give_up(server, f"{self._exit_report}\nA replacement cannot be started: {error}")
                return
            replacement.index = server.index
            self._standby, self._quiet_since = None, -math.inf  # where one has died another one may
            self.register(replacement.process.pid)
            with self._lock:
                if server not in self._servers:  # killed meanwhile: another host's succeeds it
                    replacement.process.kill()
                    replacement.process.wait()
                    replacement.close()
                    return
                self._exits = [each for each in self._exits if not self.has_returned(each["worker"])]
                for exited in self._exits:
                    replacement.report_exit(**exited)
                if self._lease_until < math.inf:
                    replacement.extend_lease(self._lease_until)
                self._servers[server.index - self._first] = replacement
                server.close()
            server.rendezvous.put(successor_of(server.key), replacement.key)

    def _give_up(self, server: ServerHandle, why: str) -> None:
        """Tell the workers that a server is not replaced."""
        self._irreplaceable = why
        first, _, output = why.partition("\n")
        room = LARGEST_ENTRY // 16 - len(first)  # a character takes up to 14 bytes there
        server.rendezvous.put(server.key, {"error": f"{first}\n{output[-room:]}"})  # its end says what happened

    def _keep_standby(self) -> None:
        """Have a server that has started already, since that takes seconds. Not at once: most jobs never need one."""
        if self._standby is not None and not self.hot_standby:
            self._standby.process.terminate()
        if self._standby is not None and self._standby.process.poll() is not None:
            self._standby.close()
            self._standby, self._quiet_since = None, time.monotonic()
            self._restarts += self.hot_standby
        if self.rendezvous is None or not self._servers or not self.hot_standby or self._standby is not None:
            return
        if time.monotonic() > self._quiet_since + _STANDBY_AFTER_S and self._restarts < _RESTARTS:
            with contextlib.suppress(OSError):  # then there is none
                self._standby = self._new_server(self._first + len(self._servers), self.rendezvous)
                self.register(self._standby.process.pid)

    def _watch(self) -> None:
        turn = 0
        while not self._closing.wait(_POLL_S):
            self._keep_standby()
            self._look()
            turn += 1
            if turn % _TURNS == 0:
                self._report_refused()

    def _look(self) -> None:
        """Look once which processes have ended, but those that are known to have."""
        ended = self._ended
        for server in list(self._servers):
            self._show(server)
            # After the end of a lease servers end by themselves. They are replaced if it is extended once more.
            in_time = time.monotonic() <= self._lease_until
            if server.key not in ended and server.process.poll() is not None and in_time:
                ended.add(server.key)
                self._replace(server)
        for rank, process in list(self._workers.items()):
            code = process.poll()
            callback = self._on_worker_exit
            if rank not in ended and code is not None and callback is not None:  # else a caller will ask for it
                ended.add(rank)
                why, process_name = f"its process ended with exit code {code}", machine_and_pid(process.pid)
                self.report_exit("", rank, why, process_name)
                callback(rank, process.pid, code)


_current: Supervisor | None = None


def ensure(
    num_servers: int, rendezvous: Rendezvous | None, settings: ServerSettings | None = None, *, succeed: bool = False
) -> Supervisor:
    """The process's supervisor with at least that many servers: the present one if it is healthy, else a new one."""
    # Servers are kept and reused, because starting one takes as long as importing torch.
    global _current
    if _current is not None and _current.rendezvous is None and rendezvous is not None:
        _current.serve_at(rendezvous, settings or ServerSettings())
    if _current is not None:
        same = (_current.rendezvous, _current.settings) == (rendezvous, settings or ServerSettings())
        if _current.healthy and same:
            _current.add_servers(num_servers, succeed=succeed)
            return _current
        _current.close()
    former, _current = _current, Supervisor(rendezvous, settings)
    _current.start()
    if former is not None:
        _current.follow(former)
    _current.add_servers(num_servers, succeed=succeed)
    return _current


def current() -> Supervisor | None:
    """The process's supervisor, if it has started one."""
    return _current


def ensure_watch() -> Supervisor:
    """The process's supervisor, or a new one without servers: for a machine whose servers run elsewhere."""
    return _current or ensure(0, None)


def with_last_output(text: str) -> str:
    """An error's text, with how a dead server ended and its last output, where this process knows them."""
    report = _current.exit_report() if _current is not None else None
    return text if report is None or report in text else f"{text}\n{report}"


@atexit.register
def _at_exit() -> None:
    """Set the script's exit code if workers have failed, then stop the servers."""
    failed: dict[int, int] = {}
    rendezvous = None if _current is None else _current.rendezvous
    try:
        if _current is not None and not exit_code.is_failing():
            failed = _current.failures()  # before the servers are stopped: workers may still need them
    finally:
        close_current()
        if rendezvous is not None:
            rendezvous.close()
    if failed:
        exit_code.exit_with(failed)


def close_current() -> None:
    """Stop the process's servers, if it has any. A forked child leaves its parent's alone."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


def _after_fork() -> None:
    global _current
    _current = None


os.register_at_fork(after_in_child=_after_fork)
