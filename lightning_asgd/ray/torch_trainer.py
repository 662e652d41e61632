"""Inside Ray Train's own ``TorchTrainer``: a backend without a process group, and a strategy that Ray Train accepts."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import ray.train
import torch
from ray.train.backend import Backend
from ray.train.lightning import RayDDPStrategy
from ray.train.torch import TorchConfig, get_device

from lightning_asgd.core.job.addresses import LOOPBACK, family_of
from lightning_asgd.core.lightning.strategy import ASGDStrategy


class _ASGDBackend(Backend):  # type: ignore[misc]
    """Gives the workers their ranks and the address of the job. There is no process group to make or to destroy."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Before the training function."""
        host, port = worker_group.execute_single(0, _address)
        worker_group.execute(_announce, host, port)


def _address() -> tuple[str, int]:
    """An address of the first worker's machine with a port that is free there."""
    host = ray.util.get_node_ip_address() or LOOPBACK
    with socket.socket(family_of(host)) as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]


def _announce(host: str, port: int) -> None:
    context = ray.train.get_context()
    os.environ |= {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
    }


@dataclass
class ASGDConfig(TorchConfig):  # type: ignore[misc]
    """``TorchTrainer(torch_config=ASGDConfig())`` makes no process group, which would take the servers' port."""

    @property
    def backend_cls(self) -> Any:
        """What Ray Train starts the workers with."""
        return _ASGDBackend


class RayASGDStrategy(ASGDStrategy):
    """:class:`~lightning_asgd.ASGDStrategy` for a training function of Ray Train's ``TorchTrainer``.

    It takes the place of ``RayDDPStrategy``; ``plugins=[RayLightningEnvironment()]`` and ``prepare_trainer`` stay as
    they are. The ``TorchTrainer`` needs ``torch_config=ASGDConfig()``. Ray Train restarts all workers from a checkpoint
    when one dies, and its reports are barriers: report when an epoch ends. :class:`ASGDTrainer` has neither limit.
    """

    @property
    def root_device(self) -> torch.device:
        """The device that Ray has given this worker."""
        device: torch.device = get_device()
        return device


RayDDPStrategy.register(RayASGDStrategy)  # `prepare_trainer` asks for a subclass of Ray's strategies
