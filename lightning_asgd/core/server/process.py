"""The server process: start the transport, publish the address, serve until it is stopped. Never imports Lightning.

Run by the supervisor as ``python -m lightning_asgd.core.server.process '{"key": ..., ...}'``.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # importing torch makes nearly 200,000 objects, and all of them stay

import contextlib
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from lightning_asgd.core.calls.transport import NetworkDownError
from lightning_asgd.core.foundation.process_name import gone_among, this_network
from lightning_asgd.core.job import registry
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.protocol import Leave
from lightning_asgd.core.protocol.field_types import checked
from lightning_asgd.core.server.service import Service
from lightning_asgd.features import FINDERS, load

log = logging.getLogger(__name__)

QUIET_ENV = "LIGHTNING_ASGD_QUIET_SERVERS"  # set where a worker logs the run's events in the same terminal
UNWRITTEN = 3  # exit code of a server that could not write its snapshot, where it had to
_TICK_S = 0.25
_START_S = 60.0
_LOOK_S = 2.0  # interval of the listen-socket check
_GONE_S = 0.5  # interval of the look for workers' processes that have ended
_LATE_S = 0.5  # for what was written to this process to be read, before its lease is over
_FAREWELL_S = 3.5  # at most, in which workers learn that the main process is gone, and fetch the weights

_SHUT = (
    "No process can connect to this server any more: a connection to it ended before it was set up, after which "
    "torch's RPC accepts no more. A port scan can cause this. ASGDStrategy(transport='zmq') is not affected.\n"
)
_MUTE = "The thread that answers this server's messages has failed; see above.\n"


@dataclass(frozen=True)
class ServerSettings:
    """What all servers of a job have in common."""

    interface: str = "lo"  # network interface they listen on
    transport: str = "rpc"  # how messages reach them
    job: str = ""  # the job's name; empty for an elastic run
    run: str = ""  # name of the only run that they serve, if it is elastic; see `Service`
    snapshots: str = ""  # folder that they write snapshots to, and continue from; empty for none
    keeps: bool = True  # whether that folder outlives the process that has started them
    snapshot_every_s: float = 0.0  # seconds between two; 0 for none
    snapshot_or_end: bool = False  # whether they end if one cannot be written
    moves: bool = False  # whether other servers are started elsewhere if these end
    watches: bool = False  # whether no process that has started the workers reports their ends


@dataclass(frozen=True)
class ServerArguments:
    """What a server process needs to know."""

    settings: ServerSettings  # those of all
    name: str  # the server's name in error texts
    key: str  # rendezvous key under which it publishes its address
    host: str  # where the rendezvous is
    port: int  # where the rendezvous is
    parent: int  # process to stop with
    succeeds: bool = False  # see `Service`
    server: int = 0  # the server's number, of one that does not succeed another
    path: tuple[str, ...] = ()  # where its starter finds modules: an algorithm may be a user's own

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServerArguments:
        """What :meth:`to_json` wrote."""
        told = json.loads(text)
        return cls(**{**told, "settings": ServerSettings(**told["settings"]), "path": tuple(told["path"])})


def run_server(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or until the parent is gone; returns the exit code. Exits if no process can connect."""
    gc.freeze()  # what was imported: to look through it takes 0.09 s, in which no worker is answered
    gc.enable()
    arguments = ServerArguments.from_json((argv or sys.argv[1:])[0])
    settings = arguments.settings
    sys.path += [folder for folder in arguments.path if folder not in sys.path]  # last: none hides a library's module
    stopped: list[int] = []  # not an event: its lock is not for a handler that may interrupt itself
    for each in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # meant for workers, who still need their servers
        signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    torch.set_num_threads(1)  # the cores belong to the workers
    allow_many_connections()
    service = Service(run=settings.run, job=settings.job, succeeds=arguments.succeeds)
    snapshots = load(FINDERS["snapshots"])(service, arguments) if settings.snapshots else contextlib.nullcontext()
    try:
        kind = registry.kind_of(settings.transport)
        name = arguments.key.rpartition("/")[2][:12]
        server = kind.serve(checked(service.handle), arguments.name, settings.interface, name)
    except NetworkDownError:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # start over
    with Rendezvous.connect(arguments.host, arguments.port, _START_S, transport=settings.transport) as rendezvous:
        reach = {"address": server.address, "network": this_network(), "name": name}
        rendezvous.put(arguments.key, {**reach, "pid": os.getpid()})
    lease = _Lease()
    threading.Thread(target=_listen, args=(service, lease), name="lightning_asgd.exits", daemon=True).start()
    with snapshots as writer:
        looked = looked_for_gone = time.monotonic()
        shut, heard = False, 0
        while not stopped and not shut and not lease.over and os.getppid() == arguments.parent:
            time.sleep(_TICK_S)
            _guarded(service.tick)
            heard = _log_events(service, heard)
            if writer is not None and writer.error and settings.snapshot_or_end:
                _log_events(service, heard)
                os._exit(UNWRITTEN)
            if (settings.run or settings.watches) and time.monotonic() > looked_for_gone + _GONE_S:
                looked_for_gone = time.monotonic()
                _guarded(lambda: _report_gone(service))
            if time.monotonic() > looked + _LOOK_S:
                looked = time.monotonic()
                shut = not server.answers() or (not server.accepts() and service.replaceable)
        if (settings.moves and not shut) or lease.over:  # as if it was killed: others may serve in its place
            time.sleep(_TICK_S if stopped else 0.0)  # the last answers of a job that ends
            os._exit(0 if stopped else 1)
        if not stopped and not shut and not settings.run:  # the workers of a run wait for `serve` to be started again
            _end_job(service, arguments.parent, stopped)
    _log_events(service, heard)  # the last snapshot's
    if shut:
        os.write(sys.stderr.fileno(), (_SHUT if server.answers() else _MUTE).encode())
    if shut or (settings.run and not stopped):  # as if it was killed: workers get their replies from a replacement
        os._exit(1)
    server.close()  # without an answer to those that wait: they wait for a replacement, and an error would end them
    return UNWRITTEN if writer is not None and writer.error and settings.run else 0


def _guarded(due: Callable[[], None]) -> None:
    """Do what is due; a fault in it ends no server, as a fault in a message does not."""
    try:
        due()
    except Exception:
        log.exception("A server failed in its regular work. This is a bug.")


def _report_gone(service: Service) -> None:
    """Take out workers of this machine whose processes have ended: no process that has started them says so."""
    session = service.session
    if session is None:
        return
    members = session.members
    workers = {
        process: worker
        for worker, process in list(members.processes.items())
        if worker in members.joined - members.left.keys()
    }
    for process in gone_among(workers):
        machine, pid, _ = process.split("/", 2)
        reason = f"its process has ended ({pid} on {machine})"
        final = not members.elastic  # a number of an elastic run is never given again
        service.handle(Leave(members.session, workers[process], reason, final=final, process=process))


def _log_events(service: Service, heard: int) -> int:
    """Log what has happened in a run since ``heard`` events, on its first server; returns their number now."""
    session = service.session
    if session is None or session.members.index or not service.state.run or QUIET_ENV in os.environ:
        return heard
    events = session.members.events_after(heard)
    for event in events:
        log.warning(event)
    return heard + len(events)


def _end_job(service: Service, parent: int, stopped: list[int]) -> None:
    """End a job whose main process is gone; wait a little for its workers, which fetch the weights."""
    service.abort(
        f"The main process ({parent}), which is or started worker 0, has ended unexpectedly. Look at its machine, and "
        "start the job again with trainer.fit(..., ckpt_path=...): the path that a worker there has printed of "
        "main-process-lost-*.ckpt, or else 'last'."
    )
    deadline = time.monotonic() + _FAREWELL_S
    while not stopped and time.monotonic() < deadline:
        members = None if service.session is None else service.session.members
        if members is None or not (members.living | members.expected_back | members.catching_up):
            return
        time.sleep(_TICK_S)


def allow_many_connections() -> None:
    """Raise the limit of open files to what the system allows: idle connections of strangers take one each."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not Unix, or a limit that is none
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Lease:
    """Until when this server may serve: without end, unless the process that has started it says otherwise."""

    def __init__(self) -> None:
        self._until = self._read_at = math.inf

    def extend(self, until: float) -> None:
        """It may serve until then, by ``time.monotonic()``."""
        self._until, self._read_at = until, time.monotonic()

    @property
    def over(self) -> bool:
        """Whether another server may serve in this one's place."""
        return time.monotonic() > max(self._until, self._read_at + _LATE_S)


def _listen(service: Service, lease: _Lease) -> None:
    """Read on stdin what the main process knows of workers: which have ended, and which could not join."""
    for line in sys.stdin:
        match json.loads(line):
            case {"lease_until": until}:
                lease.extend(until)
            case {"refused": worker, "why": why}:
                service.report_refused(worker, why)
            case report:
                service.report_exit(**report)


if __name__ == "__main__":
    sys.exit(run_server())
