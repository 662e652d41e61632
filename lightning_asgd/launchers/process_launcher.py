"""Starting workers with Lightning's multi-processing launcher: the main process only waits for them.

Any worker may fail while the others continue, worker 0 too. The main process takes the results of the chief.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from lightning_asgd.core.foundation.errors import WorkerLostError
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.job import rank_variables, registry, supervisor
from lightning_asgd.core.job import secret as job_secret
from lightning_asgd.core.job.interruptions import ignoring_children
from lightning_asgd.core.job.training_job import STOP_S, TrainingJob, has_connected
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.checkpointing import save_on_exception
from lightning_asgd.core.lightning.class_trees import Extension, apply_to_collection
from lightning_asgd.core.lightning.launchers import check_rank, surroundings_of
from lightning_asgd.core.protocol import Policy
from lightning_asgd.core.worker.fleet import end_idle_membership, idle_membership

log = logging.getLogger(__name__)

_mp: Any = torch.multiprocessing


class _Worker:
    """A worker's process. Lightning learns ``code`` as its exit code, which ends all workers if it is a failure."""

    def __init__(self, rank: int, process: Any, code: Callable[[_Worker], int | None]) -> None:
        self.rank = rank
        self.process = process
        self.reported = False
        self._code = code

    def __getattr__(self, name: str) -> Any:
        return getattr(self.process, name)

    def terminate(self) -> None:
        """End it soon: a stopped process would handle SIGTERM only once it continues."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED:
                self.process.kill()
        self.process.terminate()

    @property
    def exitcode(self) -> int | None:
        return self._code(self)


class MultiProcessLauncher(private_names.ProcessLauncherHooks, Extension):  # type: ignore[misc]
    """Starts the servers, then forks or spawns every worker; this process only waits for them.

    ``policy`` says whether the failure of any worker ends the others, and how long one may be silent.
    """

    def __init__(self, job: TrainingJob, strategy: Any, start_method: str, policy: Policy) -> None:
        self._terminated = False  # whether the main process got SIGTERM
        super().__init__(strategy, start_method=start_method)
        self.job = job
        self.policy = policy
        self._folder = ""  # during a launch: the chief's results, the secret, and sockets of loaders
        self._last: threading.Timer | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the processes: libraries save a strategy together with a model."""
        return {**self.__dict__, "processes": [], "_last": None, "_queue": None}

    def _file(self, name: str) -> Path:
        return Path(self._folder, name)

    @property
    def _sends_results(self) -> bool:
        """Whether this process is the worker that sends its results to the main process."""
        membership = idle_membership()
        return self.strategy.local_rank == 0 if membership is None else membership.is_chief

    def watch(self, processes: list[Any]) -> None:
        """Register the workers' processes with the reaper, and keep one's end from ending the others."""
        if processes:
            watch = supervisor.ensure_watch()
            for process in processes:
                watch.register(process.pid)
            # In place: the list is that of torch's context, which ends all workers when one of them has failed.
            processes[:] = [_Worker(rank, process, self._code_of) for rank, process in enumerate(processes)]
        if self._terminated:
            self.kill(signal.SIGTERM)

    def _pass_on(self, number: int, _: Any) -> None:
        """Handle SIGTERM in the main process: the workers get it, and end after their batches."""
        again, self._terminated = self._terminated, True
        self.kill(signal.SIGKILL if again else number)  # a worker may hang

    @contextlib.contextmanager
    def _passing_on(self) -> Iterator[None]:
        """Pass SIGTERM on to the workers, unless the program handles it."""
        self.processes, self._terminated = [], False  # an earlier launch's are no children of the forked workers
        in_main_thread = threading.current_thread() is threading.main_thread()
        handles = in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if handles:
            signal.signal(signal.SIGTERM, self._pass_on)
        try:
            yield
        finally:
            if handles:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _code_of(self, worker: _Worker) -> int | None:
        """A worker's exit code; 0 if it has failed and the others continue, unless none has sent results."""
        code: int | None = worker.process.exitcode
        if code is None or (code and self.policy.abort):
            return code
        sent = self._file("sent").exists()
        if sent and not code:
            self._start_grace_period()
        if code and not worker.reported:
            self._report(worker, code)
        codes = [each.process.exitcode for each in self.processes]
        if sent or None in codes:
            return 0
        if code:
            return code
        failed = {rank: each for rank, each in enumerate(codes) if each}
        ended = ", ".join(f"worker {rank} with exit code {each}" for rank, each in failed.items()) or "none failed"
        raise WorkerLostError(
            f"All workers have ended, but none has sent its results ({ended}). Expected those of the worker that logs "
            "and writes the checkpoints. Load its last checkpoint."
        )

    def _report(self, worker: _Worker, code: int) -> None:
        worker.reported = True
        overseer = supervisor.current()
        if overseer is not None:
            overseer.report_exit(self.job.session, worker.rank, f"its process ended with exit code {code}")
        if code < 0:  # else it has said why
            log.warning("Worker %d ended with exit code %d; the others continue without it.", worker.rank, code)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the servers and the workers, wait for the workers, return the chief's result."""
        self.strategy.check_trainer(trainer)
        registry.release()  # an agent cannot be shared with forked children
        environment, devices = self.strategy.cluster_environment, self.strategy.num_processes
        check_rank(environment.node_rank() * devices, devices, devices, 1)
        self.job.begin(surroundings_of(environment, 1), self.strategy.tree.say, is_main=True)
        self._folder = tempfile.mkdtemp(prefix="asgd-")  # short: a socket's path has 107 bytes at most
        supervisor.ensure_watch().remove_if_killed(self._folder)
        if self.start_method == "forkserver":  # which has no secret if it was started earlier
            self._file("secret").write_text(json.dumps(job_secret.variables()))
        try:
            with self._passing_on():
                results = self._launch(function, args, trainer, kwargs)
            if self._terminated:
                raise private_names.sigterm.imported(self.strategy.tree)
            return results
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
            if self._last is not None:
                self._last.cancel()
                self._last.join()
                self._last = None
            overseer = supervisor.current()
            if overseer is not None:
                overseer.rest()

    def _launch(self, function: Callable[..., Any], args: Any, trainer: Any, kwargs: Any) -> Any:
        try:
            results = super().launch(function, *args, trainer=trainer, **kwargs)
            self._report_losses()
            return results
        except BaseException as error:
            # Ctrl-C or a failed worker: at exit this process would wait for those that still run.
            self.kill(signal.SIGTERM)
            deadline = time.monotonic() + STOP_S
            for process in self.processes:
                process.join(max(deadline - time.monotonic(), 0))
            self.kill(signal.SIGKILL)
            self.strategy.has_failed_elsewhere()
            if self._terminated and not isinstance(error, _mp.ProcessRaisedException):  # no failure
                raise private_names.sigterm.imported(self.strategy.tree) from None
            raise

    def _report_losses(self) -> None:
        """Name the workers whose processes have failed, unless the chief knew of them when it summed up its fit."""
        lost, watch = self.strategy.stats.lost_workers, supervisor.ensure_watch()
        failed = [w for w in self.processes if w.process.exitcode]
        watch.refused |= {w.rank: w.process.exitcode for w in failed if watch.noted_excuse(w.process.pid) is False}
        late = {w.rank: w.process.exitcode for w in failed if w.rank not in lost}
        if late:
            each = "".join(f"\n  worker {rank}: its process ended with exit code {c}" for rank, c in late.items())
            log.warning("%d of %d workers were lost:%s", len(late), len(self.processes), each)

    def _start_grace_period(self) -> None:
        """The chief has finished: kill workers that hang, after a grace period."""
        if self._last is None:
            self._last = threading.Timer(self.policy.silence_s + STOP_S, self.kill, (signal.SIGKILL,))
            self._last.daemon = True
            self._last.start()

    def run_worker(self, local_rank: int, trainer: Any, run: Callable[[], None]) -> None:
        """Run Lightning's part of a worker's process."""
        if self.start_method == "fork" and has_connected():
            # This worker's parent has trained: OpenMP's threads did not survive the fork, and code waits for them.
            torch.set_num_threads(1)
            os.environ["OMP_NUM_THREADS"] = "1"
        if signal.getsignal(signal.SIGTERM) == self._pass_on:  # inherited
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._terminated:
                raise private_names.sigterm.imported(self.strategy.tree)
        _mp._prctl_pr_set_pdeathsig(0)  # torch's SIGINT at the main process's end would prevent a last checkpoint
        if self.start_method == "forkserver":
            job_secret.take(json.loads(self._file("secret").read_text()))
        rank_variables.note_main(os.getppid())
        rank_variables.use_folder(self._folder)
        with rank_variables.owning():
            os.environ["LOCAL_RANK"] = str(local_rank)  # as Lightning does next
        try:
            run()
            if self._sends_results:
                self._file("sent").touch()
        except BaseException as error:
            # Lightning reports exceptions to callbacks and the strategy in the main process only.
            with ignoring_children():
                self._save(trainer, error)
                self.strategy.on_exception(error)
            if not self.policy.abort and isinstance(error, Exception):
                log.warning("Worker %d failed; the others continue without it.", local_rank, exc_info=True)
            raise
        finally:
            end_idle_membership()  # such a process ends without calling its atexit handlers

    def _save(self, trainer: Any, error: BaseException) -> None:
        """Let checkpoint callbacks save what the chief has trained."""
        if trainer is None or not self.strategy.is_global_zero:
            return
        try:
            self.strategy.go_offline()
            save_on_exception(trainer, error)
        except Exception:  # the program's own error is the one to report
            log.warning("This worker could not write a checkpoint after an exception.", exc_info=True)

    def collect_results(self, collect: Callable[[], Any], send: Callable[[Any], None]) -> Any:
        """Collect this worker's results for the main process, if it is chief. Lightning sends those of worker 0."""
        mine = os.environ["LOCAL_RANK"]
        if mine == "0" or not self._sends_results:
            return collect()
        os.environ["LOCAL_RANK"] = "0"  # else nothing is collected
        try:
            results = collect()
        finally:
            os.environ["LOCAL_RANK"] = mine
        send(apply_to_collection(results, Tensor, lambda t: t.cpu()))
        return results

    def remove_weights(self, path: str | None) -> None:
        """Remove the folder of the file with the chief's weights, which Lightning leaves when it removes the file."""
        if path is not None:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))

    def send_results(self, trainer: Any) -> dict[str, Any]:
        """Send the chief's statistics and samples along with Lightning's results.

        In a file, as Lightning sends the weights: its queue is a pipe that the main process reads when all workers have
        ended, and a worker that puts more there than the pipe takes (64 KiB) never ends.
        """
        strategy = trainer.strategy
        path = self._file("results")
        path.write_bytes(pickle.dumps((strategy.stats, strategy.samples)))
        return {"lightning_asgd": str(path)}

    def take_results(self, trainer: Any, sent: dict[str, Any]) -> None:
        """Keep the chief's statistics and samples."""
        path = Path(sent["lightning_asgd"])
        results: tuple[ExchangeStats, list[dict[str, Tensor]]] = pickle.loads(path.read_bytes())  # our own child's
        trainer.strategy.stats, trainer.strategy.samples = results
