"""Starting a job: the rendezvous, the servers, and the workers with Lightning's own launchers.

Lightning's launchers start the workers. What is added here: servers come first, worker processes end with the main
process, and one worker's death does not end the others (Lightning's observer would kill the job).
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from lightning_asgd.adapter import job_address, private_names
from lightning_asgd.adapter.checkpointing import save_on_exception
from lightning_asgd.adapter.class_trees import Extension, is_foreign
from lightning_asgd.adapter.strategy_options import StrategyOptions
from lightning_asgd.errors import ConfigurationError, LaunchError, ServerLostError
from lightning_asgd.processes import rank_variables, supervisor
from lightning_asgd.protocol import Policy
from lightning_asgd.server.server_process import ServerSettings
from lightning_asgd.stats import ExchangeStats
from lightning_asgd.transports import registry
from lightning_asgd.transports.rendezvous import Rendezvous, interface_of, local_address_towards
from lightning_asgd.transports.transport import Transport

__all__ = ["MultiProcessLauncher", "ScriptLauncher", "TrainingJob"]

log = logging.getLogger(__name__)

_STOP_S = 3.0  # for a worker to end after SIGTERM, or to say why it ends
_jobs = itertools.count()
_connected = False  # whether this process has been a worker
_transport: Transport | None = None  # kept from one call of the Trainer to the next
_inherited: list[Any] = []  # the parent's, of a forked process, which must not close it


def _after_fork() -> None:
    global _transport
    _inherited.append(_transport)
    _transport = None


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _close_transport() -> None:
    """After the fleet's own handler. A thread that completes futures of torch while Python ends aborts the process."""
    if _transport is not None:
        _transport.close()


@dataclass
class TrainingJob:
    """What all processes of a job agree on. Copied into the workers, so it holds plain values only.

    Attributes:
        num_servers: servers to start.
        start_timeout_s: seconds to wait for servers and workers.
        hot_standby: whether a server is kept ready to replace one that dies.
        snapshot_every_s: seconds between two snapshots for that one; 0 for none.
        asked: for the transport, by its name or ``"auto"``.
        transport: how messages are sent, once a job has begun or a run was found.
        number: how many strategies were made before this one in this process; equal on all workers, which run the
            same program.
        launches: how often the Trainer was called with this strategy.
        address: ``(host, port)`` of the rendezvous, None before the first launch.
        name: random; two jobs that use one address one after the other have two. None before the first launch.
        interface: network interface for everything, ``"lo"`` on one machine.
        run_id: name of the elastic run that this process joins; empty for a job.
    """

    num_servers: int
    start_timeout_s: float
    hot_standby: bool = False
    asked: str = registry.AUTO
    snapshot_every_s: float = 0.0
    number: int = field(default_factory=lambda: next(_jobs))
    launches: int = 0
    transport: str = "rpc"
    address: tuple[str, int] | None = None
    name: str | None = None
    interface: str = "lo"
    run_id: str = ""

    @classmethod
    def of(cls, options: StrategyOptions) -> TrainingJob:
        """The job of a new strategy."""
        config = options.config
        writes = config.restorable and config.algorithm.keeps_state
        return cls(
            options.num_servers,
            config.timeouts.start_s,
            config.restorable,
            options.transport,
            config.snapshot_every_s if writes else 0.0,
            address=options.address,
            run_id=options.run_id or "",
        )

    @property
    def attaches(self) -> bool:
        """Whether this process joins an elastic run."""
        return bool(self.run_id)

    @property
    def session(self) -> str:
        """Name of the present run of fit, validate, test or predict."""
        return self.run_id or f"{self.name}.{self.number}.{self.launches}"

    def begin(self, environment: Any, num_nodes: int, tree: Any, *, is_main: bool) -> None:
        """Find or host the rendezvous. In the main process, start the servers, and say which transport it is."""
        one_machine = num_nodes == 1 and not environment.creates_processes_externally
        say = tree.info if is_main else None
        self.transport, kind = job_address.choose_transport(self.asked, one_machine=one_machine, say=say)
        kind.provide_secret(one_machine=one_machine)
        self.launches += 1
        self.address = job_address.find_address(kind, environment, num_nodes, is_main=is_main)
        # Environments of others, such as Ray's, start workers on several machines and leave num_nodes at 1.
        if num_nodes > 1 or is_foreign(environment):
            self.interface = interface_of(local_address_towards(self.address[0]))
        if is_main:
            rendezvous = job_address.rendezvous_at(self.address, self.start_timeout_s)
            self.name = rendezvous.announce_job()
            several = environment.world_size() > 1
            every_s = self.snapshot_every_s if several else 0.0
            settings = ServerSettings(self.interface, self.transport, job=self.name, snapshot_every_s=every_s)
            overseer = supervisor.ensure(self.num_servers, rendezvous, settings)
            overseer.hot_standby = self.hot_standby and several
            rendezvous.announce_session(self.session, self.transport, overseer.keys(self.num_servers))

    def find_run(self) -> None:
        """Find the servers of the run, which are running already."""
        if self.address is None:
            raise LaunchError("No address of the servers was given.")
        self.transport, _ = job_address.choose_transport(self.asked, one_machine=False)
        rendezvous, served, keys = Rendezvous.find_run(*self.address, self.start_timeout_s)
        rendezvous.close()
        self.interface = interface_of(local_address_towards(self.address[0]))
        mine = {"run_id": self.run_id, "transport": self.transport}
        if served != mine:
            raise LaunchError(
                f"{self.address[0]}:{self.address[1]} serves run_id={served['run_id']!r} with "
                f"transport={served['transport']!r}. Expected run_id={self.run_id!r} and transport={self.transport!r}, "
                "as given to ASGDStrategy."
            )
        self.num_servers = len(keys)

    def connect(self) -> Transport:
        """Wait for the session's servers and connect to them; the transport is kept while the servers stay the same."""
        global _transport, _connected
        with self._rendezvous() as rendezvous:
            if not self.attaches:
                self.name = rendezvous.get("job", "The main process", self.start_timeout_s, kind=str)
            keys = rendezvous.session(self.session, self.transport, self.start_timeout_s)
            addresses = [rendezvous.server(index, key, self.start_timeout_s) for index, key in enumerate(keys)]
        if _transport is None or _transport.addresses != tuple(addresses) or not _transport.alive:
            if _transport is not None:
                _transport.close()
            _transport = registry.kind_of(self.transport).connect(addresses, self.interface)
        _connected = True
        return _transport

    def store(self) -> Any:
        """A key-value store that all workers of the present session reach."""
        return self._rendezvous().shared(f"session/{self.session}/")

    def _rendezvous(self) -> Rendezvous:
        if self.address is None:
            raise LaunchError("The strategy was not launched by a Trainer. Expected Trainer(strategy=...).fit(...).")
        return Rendezvous.connect(*self.address, self.start_timeout_s, elsewhere=self.attaches)

    def successor(self, server: int) -> str:
        """Wait for the replacement of a lost server that this process was connected to. Returns its address."""
        lost = f"Server {server} is gone, and no replacement has started"
        transport = _transport
        if self.address is None or transport is None:
            raise ServerLostError(f"{lost}: no job was launched.")
        before = transport.addresses[server]
        try:
            with self._rendezvous() as rendezvous:
                keys = rendezvous.session(self.session, self.transport, self.start_timeout_s)
                return rendezvous.server(server, keys[server], self.start_timeout_s, other_than=before)
        except RuntimeError as error:
            raise ServerLostError(supervisor.with_last_output(f"{lost}: {error}")) from error

    def excuse(self, rank: int) -> None:
        """Report to the main process that a worker fails within a fit that continues without it."""
        if self.address is not None and not self.attaches and rank:
            with contextlib.suppress(RuntimeError), Rendezvous.connect(*self.address, _STOP_S) as rendezvous:
                rendezvous.put(supervisor.excuse_of(os.getpid()), True)  # unless the main process is gone


class ScriptLauncher(private_names.ScriptLauncherHooks, Extension):  # type: ignore[misc]
    """Starts the servers, then the script once more for every further device. Extends Lightning's script launcher.

    Args:
        job: shared with the strategy.
        cluster_environment: Lightning's.
        num_processes: workers on this machine.
        num_nodes: number of machines.
    """

    def __init__(self, job: TrainingJob, cluster_environment: Any, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self.job = job

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start what is not running yet, then run ``function`` in this process, which is a worker itself."""
        trainer.strategy.check_trainer(trainer)
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        external = environment.creates_processes_externally
        rank, world_size = environment.global_rank(), environment.world_size()
        if rank >= world_size:
            raise ConfigurationError(
                f"This process has rank {rank}, and the Trainer has {world_size} worker(s), with devices="
                f"{self.num_processes} and num_nodes={self.num_nodes}. Expected a worker for every process. Give every "
                f"Trainer of a script the same devices, or create Trainers with fewer devices on the first ranks only."
            )
        self.job.begin(environment, self.num_nodes, self.tree, is_main=rank == 0)
        if not external:
            with rank_variables.launching():
                processes = self.start_scripts()
            first = environment.node_rank() * self.num_processes
            watch = supervisor.ensure_watch()
            for local_rank, process in enumerate(processes, start=1):
                watch.add_worker(first + local_rank, process)
        self.tree.set_num_threads(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Send the workers a signal. However they end then, it is no failure."""
        overseer = supervisor.current()
        if overseer is not None:
            overseer.excuse()
        super().kill(signum)


class _Worker:
    """The process of a worker.

    Args:
        session: that it trains in.
        rank: the worker's.
        process: to which all other attributes are delegated.
        needed: whether the others cannot continue without it. If they can, its exit code never counts as a failure.
    """

    def __init__(self, session: str, rank: int, process: Any, *, needed: bool) -> None:
        self._session = session
        self._rank = rank
        self._process = process
        self._needed = needed
        self._reported = False
        self.on_end: Callable[[], None] | None = None
        """Called once, when it has ended without an error."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def terminate(self) -> None:
        """End it soon: a stopped process would handle SIGTERM only once it continues."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED:
                self._process.kill()
        self._process.terminate()

    @property
    def exitcode(self) -> int | None:
        code: int | None = self._process.exitcode
        if code == 0 and self.on_end is not None:
            on_end, self.on_end = self.on_end, None
            on_end()
        if self._needed:
            return code
        if code and not self._reported:
            self._reported = True
            overseer = supervisor.current()
            if overseer is not None:
                overseer.report_exit(self._session, self._rank, f"its process ended with exit code {code}")
            if code < 0:  # else it has said why
                log.warning("Worker %d ended with exit code %d; the others continue without it.", self._rank, code)
        return 0 if code else code


class MultiProcessLauncher(private_names.ProcessLauncherHooks, Extension):  # type: ignore[misc]
    """Starts the servers, then forks or spawns every worker; this process only waits for them.

    Extends Lightning's multi-processing launcher.

    Args:
        job: shared with the strategy.
        strategy: the strategy, whose copies the workers use.
        start_method: ``"fork"``, ``"spawn"`` or ``"forkserver"``.
        policy: whether the failure of any worker ends the others, and how long one may be silent.
    """

    def __init__(self, job: TrainingJob, strategy: Any, start_method: str, policy: Policy) -> None:
        super().__init__(strategy, start_method=start_method)
        self.job = job
        self.policy = policy
        self._last: threading.Timer | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the processes: libraries save a strategy together with a model."""
        return {**self.__dict__, "processes": [], "_last": None}

    def watch(self, processes: list[Any]) -> None:
        """Register the workers' processes with the reaper, and keep one's end from ending the others."""
        if processes:
            watch = supervisor.ensure_watch()
            for process in processes:
                watch.register(process.pid)
            # In place: the list is that of torch's context, which ends all workers when one of them has failed.
            needed = {0} if not self.policy.abort else set(range(len(processes)))
            processes[:] = [_Worker(self.job.session, r, p, needed=r in needed) for r, p in enumerate(processes)]
            processes[0].on_end = self._start_grace_period

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the servers and the workers, wait for the workers, return worker 0's result."""
        self.strategy.check_trainer(trainer)
        registry.release()  # an agent cannot be shared with forked children
        self.job.begin(self.strategy.cluster_environment, 1, self.strategy.tree, is_main=True)
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException:
            # Ctrl-C or a failed worker: at exit this process would wait for those that still run.
            self.kill(signal.SIGTERM)
            deadline = time.monotonic() + _STOP_S
            for process in self.processes:
                process.join(max(deadline - time.monotonic(), 0))
            self.kill(signal.SIGKILL)
            self.strategy.has_failed_elsewhere()
            raise
        finally:
            if self._last is not None:
                self._last.cancel()
                self._last.join()
                self._last = None
            overseer = supervisor.current()
            if overseer is not None:
                overseer.rest()

    def _start_grace_period(self) -> None:
        """Worker 0 has finished: kill workers that hang, after a grace period."""
        self._last = threading.Timer(self.policy.silence_s + _STOP_S, self.kill, (signal.SIGKILL,))
        self._last.daemon = True
        self._last.start()

    def run_worker(self, local_rank: int, trainer: Any, run: Callable[[], None]) -> None:
        """Run Lightning's part of a worker's process."""
        if self.start_method == "fork" and _connected:
            # This worker's parent has trained by itself. OpenMP's threads did not survive the fork, and code that
            # waits for them hangs.
            torch.set_num_threads(1)
            os.environ["OMP_NUM_THREADS"] = "1"
        with rank_variables.owning():
            os.environ["LOCAL_RANK"] = str(local_rank)  # as Lightning does next
        try:
            run()
        except BaseException as error:
            # Lightning reports exceptions to callbacks and the strategy in the main process only, which is not a worker
            # here.
            self._save(trainer, error)
            self.strategy.on_exception(error)
            rank = int(os.environ.get("LOCAL_RANK", "0"))
            if rank and not self.policy.abort and isinstance(error, Exception):
                log.warning("Worker %d failed; the others continue without it.", rank, exc_info=True)
            raise
        finally:
            self.strategy.leave_job()  # such a process ends without calling its atexit handlers

    def _save(self, trainer: Any, error: BaseException) -> None:
        """Let checkpoint callbacks save what worker 0 has trained."""
        if trainer is None or not self.strategy.is_global_zero:
            return
        try:
            self.strategy.go_offline()
            save_on_exception(trainer, error)
        except Exception:  # the program's own error is the one to report
            log.warning("Worker 0 could not write a checkpoint after an exception.", exc_info=True)

    def remove_weights(self, path: str | None) -> None:
        """Remove the folder of the file with worker 0's weights, which Lightning leaves when it removes the file."""
        if path is not None:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))

    def send_results(self, trainer: Any) -> dict[str, Any]:
        """Send worker 0's statistics and samples along with Lightning's results.

        In a file, as Lightning sends the weights: its queue is a pipe that the main process reads when all workers have
        ended, and a worker that puts more there than the pipe takes (64 KiB) never ends.
        """
        strategy = trainer.strategy
        descriptor, path = tempfile.mkstemp(prefix="lightning_asgd-")
        with os.fdopen(descriptor, "wb") as file:
            pickle.dump((strategy.stats, strategy.samples), file)
        return {"lightning_asgd": path}

    def take_results(self, trainer: Any, sent: dict[str, Any]) -> None:
        """Keep worker 0's statistics and samples."""
        path = Path(sent["lightning_asgd"])
        results: tuple[ExchangeStats, list[dict[str, Tensor]]] = pickle.loads(path.read_bytes())  # our own child's
        path.unlink()
        trainer.strategy.stats, trainer.strategy.samples = results
