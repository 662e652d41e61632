"""What runs on a cluster's nodes: servers, workers, and the board where workers post their reports."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray

from lightning_asgd.core.foundation.environment import RUN_ENV, SECRET_ENV, TRANSPORT_ENV, joined
from lightning_asgd.core.job import reaper
from lightning_asgd.core.job.addresses import interface_of
from lightning_asgd.core.job.rendezvous import Rendezvous, successor_of
from lightning_asgd.core.job.supervisor import Supervisor
from lightning_asgd.core.server.process import ServerSettings
from lightning_asgd.ray import reports
from lightning_asgd.ray.reports import Storage

log = logging.getLogger(__name__)

FINISHED, STOPPED = "finished", "stopped"
_START_S = 120.0
_EXIT_S = 5  # for a worker's exit hooks


@dataclass(frozen=True)
class RunAddress:
    """Where processes find a run, and what lets them in."""

    host: str
    port: int
    run_id: str
    transport: str
    secret: str = field(repr=False)

    def enter(self) -> None:
        """Let this process, and strategies that are made in it, find the run."""
        os.environ[SECRET_ENV] = self.secret
        os.environ[RUN_ENV] = f"{joined(self.host, self.port)}/{self.run_id}"
        os.environ[TRANSPORT_ENV] = self.transport


def first_key(index: int) -> str:
    """Where the key of a server's first process is published."""
    return f"ray/server/{index}"


class ServerActor:
    """Hosts one server of a run in its own process. If Ray starts it again it continues from the workers' state."""

    def __init__(self, index: int, run: RunAddress) -> None:
        run.enter()
        hint = "this node reaches the program's machine"
        rendezvous = Rendezvous.connect(run.host, run.port, _START_S, hint, transport=run.transport)
        settings = ServerSettings(interface_of(ray.util.get_node_ip_address()), run.transport, run=run.run_id)
        self._supervisor = Supervisor(rendezvous, settings, first=index)
        self._supervisor.start()
        before = rendezvous.peek(first_key(index), str)
        self._supervisor.add_servers(1, succeed=before is not None)
        [key] = self._supervisor.keys(1)
        rendezvous.put(first_key(index) if before is None else successor_of(before), key)

    def check(self) -> None:
        """Raise a :class:`LaunchError` if a server was lost that could not be replaced."""
        self._supervisor.check_servers()


class WorkerActor:
    """Runs the training function as one worker of a run. When it dies, Ray starts it again, and it joins once more."""

    def __init__(self, number: int, run: RunAddress) -> None:
        run.enter()
        self._number = number

    def train(self, function: Callable[..., Any], arguments: tuple[Any, ...], storage: Storage, board: Any) -> str:
        """Run the training function; how it has ended."""
        place = ray.get_runtime_context().get_node_id(), os.getpid(), reaper.started(os.getpid())
        if ray.get(board.begin.remote(self._number, place)):
            return STOPPED  # started again after it, or the run, had ended
        # Lightning handles SIGTERM by leaving the run in good order, but only where no other handler is set, as by Ray.
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        reports.enter(self._number, board, storage)
        try:
            function(*arguments)
        except BaseException as error:
            if not ray.get(board.is_stopping.remote(self._number)):
                if isinstance(error, SystemExit) and error.code in (None, 0):
                    return FINISHED
                raise
            if isinstance(error, Exception):
                log.warning("Worker %d was asked to end and then failed.", self._number, exc_info=True)
            return STOPPED
        finally:
            reports.leave()
            signal.signal(signal.SIGTERM, before)
        return STOPPED if ray.get(board.is_stopping.remote(self._number)) else FINISHED

    def end(self) -> None:
        """End this process: its exit hooks run, and are cut off if they take long."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_EXIT_S)
        ray.actor.exit_actor()


@dataclass
class _Report:
    metrics: dict[str, Any]
    checkpoint: str | None  # its path in the storage


class Board:
    """What workers post, and the driver reads: where they run, their reports, and whether the run is over."""

    def __init__(self, keep: int | None, score: str | None, order: str, checkpoints: list[str]) -> None:
        self._keep, self._score, self._sign = keep, score, -1.0 if order == "min" else 1.0
        self._reports: list[_Report] = []
        self._number = 1 + max((int(path.rpartition("_")[2]) for path in checkpoints), default=-1)
        self._latest = checkpoints[-1] if checkpoints else None
        self._places: dict[int, tuple[str, int, str]] = {}
        self._begun: dict[int, list[float]] = {}
        self._stopping: set[int] = set()
        self._over = False

    def begin(self, worker: int, place: tuple[str, int, str]) -> bool:
        """A worker's process begins; whether the run is over."""
        self._places[worker] = place
        self._begun.setdefault(worker, []).append(time.time())
        return self._over or worker in self._stopping

    def places(self) -> dict[int, tuple[str, int, str]]:
        """Node, process number and the process's start of every worker that has begun."""
        return self._places

    def begun(self) -> dict[int, list[float]]:
        """When the processes of each worker began, in seconds since 1970."""
        return self._begun

    def stop(self, worker: int) -> None:
        """A worker is to end."""
        self._stopping.add(worker)

    def is_stopping(self, worker: int) -> bool:
        """Whether a worker is to end."""
        return worker in self._stopping

    def end(self) -> None:
        """The run is over: a worker that is started again trains no more."""
        self._over = True

    def next_checkpoint(self) -> str:
        """A name for the next checkpoint's folder."""
        self._number += 1
        return f"checkpoint_{self._number - 1:06d}"

    def add(self, metrics: dict[str, Any], checkpoint: str | None) -> list[str]:
        """Take a report. Returns checkpoints that are kept no longer."""
        self._reports.append(_Report(metrics, checkpoint))
        self._latest = checkpoint or self._latest
        kept = [each for each in self._reports if each.checkpoint is not None]
        if self._keep is None or len(kept) <= self._keep:
            return []
        ranked = sorted(kept, key=self._rank)
        dropped = [each for each in ranked if each is not kept[-1]][: len(kept) - self._keep]
        paths = [str(each.checkpoint) for each in dropped]
        for each in dropped:
            each.checkpoint = None
        return paths

    def _rank(self, report: _Report) -> float:
        """Higher is better; without a score the order is that of the reports."""
        if self._score is None:
            return 0.0
        value = report.metrics.get(self._score, math.nan)
        return -math.inf if math.isnan(value) else self._sign * float(value)

    def latest(self) -> str | None:
        """The latest checkpoint."""
        return self._latest

    def reports(self) -> list[tuple[dict[str, Any], str | None]]:
        """All reports with the checkpoints that are kept."""
        return [(each.metrics, each.checkpoint) for each in self._reports]


def end_process(pid: int, started: str) -> None:
    """Ask a process of this node to end, unless it has ended already and another one has its number."""
    with contextlib.suppress(ProcessLookupError, psutil.Error):
        if reaper.started(pid) == started:
            os.kill(pid, signal.SIGTERM)
