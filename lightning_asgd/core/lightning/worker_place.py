"""Who a worker is to Lightning: its rank, its world and its device; and its collectives with the other workers.

A worker of an elastic run is the only one of its Trainer, whatever started its process. torchrun, SLURM and other
engines number the processes that they start together; of these numbers only the local rank matters in a run, which says
which device of the machine is the worker's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.job import rank_variables
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.class_trees import rank_zero_warn
from lightning_asgd.core.worker.collectives import GATHERED_ALONE, Phase
from lightning_asgd.core.worker.fleet import idle_membership


class WorkerPlace:
    """The part of the strategy that answers these questions."""

    _job: Any
    _membership: Any
    collectives: Any
    accelerator: Any
    parallel_devices: list[torch.device] | None

    @property
    def global_rank(self) -> int:
        """The worker's. In an elastic run the chief's is 0, and that of others their number."""
        if self._membership is not None:
            return int(self._membership.rank)
        return 0 if self._job.attaches else int(super().global_rank)  # type: ignore[misc]

    @property
    def world_size(self) -> int:
        """Workers of the job; 1 in an elastic run, however many processes the engine has started."""
        return 1 if self._job.attaches else int(super().world_size)  # type: ignore[misc]

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker is chief: it logs and writes checkpoints."""
        return self.global_rank == 0 if (m := self._membership or idle_membership()) is None else m.is_chief

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How Lightning's samplers split the samples. For a worker of an elastic run: not at all."""
        alone = self._job.attaches
        return {"num_replicas": 1 if alone else self.world_size, "rank": 0 if alone else self.global_rank}

    @property
    def root_device(self) -> torch.device:
        """The worker's device: the only visible one, or the one of its local rank."""
        devices, local_rank = self.parallel_devices or [], int(self.local_rank)  # type: ignore[attr-defined]
        if self._job.attaches and len(devices) == 1:
            return own_device(devices[0], local_rank, self.accelerator.auto_device_count())
        if len(devices) > 1 and local_rank >= len(devices):
            raise ConfigurationError(
                f"This worker's local rank is {local_rank}, but it was given {len(devices)} devices. Expected "
                "one device for every worker on the machine, or a single device that only this worker can see."
            )
        return devices[local_rank if len(devices) > 1 else 0]

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all living workers; does nothing between two sync points."""
        self.collectives.barrier(name or "")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Worker ``src``'s object, with 0 the chief's; this worker's own between two sync points."""
        return self.collectives.broadcast(obj, src) if src else self.collectives.broadcast_of_chief(obj)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all workers, stacked in a new first dimension; in the asynchronous phase this one's alone."""
        if self.collectives.phase is Phase.ASYNC and self.world_size > 1:
            rank_zero_warn(GATHERED_ALONE)
        return self.collectives.stacked(tensor) if self.world_size > 1 else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) workers decide True; this worker's own decision between two sync points."""
        return bool(self.collectives.decide(decision, all=all))


def own_device(given: torch.device, local_rank: int, visible: int) -> torch.device:
    """The device of one process of a machine whose Trainer has ``devices=1``, where Lightning gives all the first one.

    A device that the program chose by number is used as given, and so is the only device that the process can see.
    """
    if given.index != 0 or local_rank >= visible:
        return given
    return torch.device(given.type, local_rank)


def _is_started_by_others(environment: Any) -> bool:
    """Whether an engine has started this process. An earlier launch by hand leaves a LOCAL_RANK in the environment."""
    by_hand = private_names.is_a(environment, private_names.one_machine)
    return bool(environment.creates_processes_externally) and (
        not by_hand or "LOCAL_RANK" in rank_variables.set_by_others()
    )


def check_is_one_worker(devices: int, num_nodes: int, environment: Any) -> None:
    """Check that a Trainer of an elastic run is a single worker: one of the processes of ``environment``, or alone."""
    given = f"devices={devices} and num_nodes={num_nodes} were given with run=..."
    if environment is not None and _is_started_by_others(environment):
        local_rank = environment.local_rank()
        if devices > 1 and local_rank >= devices:
            raise ConfigurationError(
                f"{given}, but this process has local rank {local_rank}. Expected devices=1, or a device for each "
                "process of the machine: each attaches as one worker with its own device. Start fewer processes on "
                "this machine, or pass devices=1."
            )
    elif devices * num_nodes != 1:
        raise ConfigurationError(
            f"{given} Expected devices=1 and num_nodes=1: a Trainer attaches as one worker. Start one process for "
            f"every device, on each machine: `torchrun --standalone --nproc-per-node={devices} train.py`."
        )
