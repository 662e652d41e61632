"""Starting a job: the rendezvous and the servers, and workers that run the script once more.

Lightning's launchers start the workers. What is added here: servers come first, worker processes end with the main
process, and one worker's death does not end the others (Lightning's observer would kill the job).
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_asgd.core.foundation.errors import ConfigurationError, LaunchError
from lightning_asgd.core.job import rank_variables, supervisor
from lightning_asgd.core.job.address import Surroundings
from lightning_asgd.core.job.training_job import TrainingJob
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.class_trees import Extension, is_foreign
from lightning_asgd.features import FINDERS, load


def surroundings_of(environment: Any, num_nodes: int) -> Surroundings:
    """What a cluster environment of Lightning's says of this process."""
    return Surroundings(
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        local_rank=environment.local_rank(),
        num_nodes=num_nodes,
        external=environment.creates_processes_externally,
        by_hand=private_names.is_a(environment, private_names.one_machine),
        node=environment.node_rank,
        foreign=is_foreign(environment),
        main=lambda: (str(environment.main_address), int(environment.main_port)),
    )


def check_rank(rank: int, world_size: int, devices: int, num_nodes: int) -> None:
    """Raise a ``ConfigurationError`` for a process that is beyond the workers of a Trainer."""
    if rank < world_size:
        return
    found = rank_variables.listed()
    raise ConfigurationError(
        f"This process has rank {rank}, but the Trainer has {world_size} worker(s), with devices={devices} and "
        f"num_nodes={num_nodes}. Expected a worker for every process. Give every Trainer of a script the same devices, "
        "or create Trainers with fewer devices on the first ranks only."
        f"{found and f' {found}: unset those of another job.'}"
    )


class ScriptLauncher(private_names.ScriptLauncherHooks, Extension):  # type: ignore[misc]
    """Starts the servers, then the script once more for every further device. Extends Lightning's script launcher."""

    _started = 0  # processes on this machine, by this one
    _sockets = ""  # the folder of all loaders' sockets

    def __init__(self, job: TrainingJob, cluster_environment: Any, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self.job = job

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start what is not running yet, then run ``function`` in this process, which is a worker itself."""
        if trainer is not None:  # else Fabric launches
            trainer.strategy.check_trainer(trainer)
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        with rank_variables.naming():
            place = surroundings_of(environment, self.num_nodes)
        self._check(place)
        program = None
        if not place.external and self.num_processes > 1:
            program = load(FINDERS["program in a task"])(trainer, function, args, kwargs)
            if program is None:
                _check_script()
        try:
            self.job.begin(place, self.tree.say, is_main=place.rank == 0)
            if not place.external:
                with contextlib.nullcontext() if program is None else program.as_script():
                    self._start_workers(environment.node_rank() * self.num_processes)
            self.tree.set_num_threads(num_processes=self.num_processes)
            return function(*args, **kwargs)
        finally:
            if program is not None:  # Ray ends its processes without their exit handlers
                program.remove()
                shutil.rmtree(self._sockets, ignore_errors=True)
                rank_variables.use_folder(None)

    def _check(self, place: Surroundings) -> None:
        """Raise where the environment names other workers than the Trainer; say that others start them, if they do."""
        check_rank(place.rank, place.world_size, self.num_processes, self.num_nodes)
        if not place.external or place.world_size == 1:
            return
        group = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
        given, found = rank_variables.set_by_others(), rank_variables.listed()
        if type(self.cluster_environment).__name__ == "SLURMEnvironment" and "SLURM_STEP_ID" not in os.environ:
            number = os.environ.get("SLURM_NTASKS")
            self.tree.say(f"SLURM_NTASKS={number} is set, but srun has not started this process. Use srun or unset it.")
        if not place.by_hand or place.foreign:
            return
        if "LOCAL_RANK" not in given:  # this script has started the workers
            if 0 < self._started < self.num_processes:
                raise ConfigurationError(
                    f"devices={self.num_processes} was given. An earlier Trainer has started {self._started} "
                    "process(es), the workers of all Trainers of the script. Expected no more devices than that. Give "
                    "every Trainer the same devices, or pass start_method='spawn', which starts processes for each fit."
                )
        elif group and (group == 1 or place.world_size % group):  # an island's has a part of the workers
            raise ConfigurationError(
                f"torch.distributed has {group} process(es), probably those of an earlier Trainer of this script, but "
                f"this Trainer has {place.world_size} workers. Expected no more devices than that one had. Give every "
                "Trainer the same devices, or pass start_method='spawn', which starts processes for each fit."
            )
        elif "MASTER_PORT" not in given and "STANDALONE_PORT" not in os.environ:  # Lightning's name of a fixed port
            raise LaunchError(
                f"{found}, so Lightning starts no workers: it expects {place.world_size} processes, which another "
                "program starts, and which meet at MASTER_PORT. That is not set. Unset these variables if this script "
                "is to start the workers. Else set MASTER_ADDR and MASTER_PORT, the same for every process."
            )
        elif "WORLD_SIZE" in given and rank_variables.number("WORLD_SIZE", 1) < place.world_size:
            raise ConfigurationError(
                f"{found}, but the Trainer has {place.world_size} workers, with devices={self.num_processes} and "
                f"num_nodes={self.num_nodes}. Expected WORLD_SIZE to be no smaller. Unset these variables if this "
                "script is to start the workers, or give the Trainer as many as there are processes."
            )
        else:
            self.tree.say(f"{found}, so Lightning starts no workers here. {place.world_size} have to join.")

    def _start_workers(self, first: int) -> None:
        """Start this machine's other workers; ``first`` is the rank of its first one."""
        watch, self._sockets = supervisor.ensure_watch(), tempfile.mkdtemp(prefix="pymp-")
        watch.remove_if_killed(self._sockets)
        multiprocessing.util.Finalize(None, _remove, (self._sockets, processes := list[Any]()), exitpriority=-100)
        rank_variables.use_folder(self._sockets)
        with rank_variables.launching(self._sockets), rank_variables.naming():
            processes += self.start_scripts()
        ScriptLauncher._started = 1 + len(processes)
        for local_rank, process in enumerate(processes, start=1):
            watch.add_worker(first + local_rank, process)

    def kill(self, signum: Any) -> None:
        """Send the workers a signal. However they end then, it is no failure."""
        overseer = supervisor.current()
        if overseer is not None:
            overseer.excuse()
        super().kill(signum)


def _remove(folder: str, users: list[subprocess.Popen[bytes]]) -> None:
    """Remove a folder, unless processes that use it still run: then the reaper does, which ends them."""
    if all(process.poll() is not None for process in users):
        shutil.rmtree(folder, ignore_errors=True)


def _check_script() -> None:
    """Raise a ``ConfigurationError`` if Lightning would not find the script that it runs again."""
    hydra, spec = sys.modules.get("hydra.core.hydra_config"), getattr(sys.modules["__main__"], "__spec__", None)
    if hydra is not None and hydra.HydraConfig.initialized():
        return  # it is found from the folder in which the program began
    script = os.path.abspath(sys.argv[0])
    if spec is not None and spec.name == "__main__":
        raise ConfigurationError(
            "The Trainer runs the script again for each further worker, but this program was started as a folder or an "
            "archive. Expected `python script.py`, or `python -m package.module`."
        )
    if spec is None and not os.path.isfile(script):
        raise ConfigurationError(
            f"The Trainer runs the script again for each further worker, but there is none at {script!r}. Expected a "
            "script in a file, found from the present working directory: give an absolute path, or do not change the "
            "directory before the fit."
        )
