"""A worker of a run among the processes that an engine has started: its device, and mistakes in the Trainer."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from lightning_fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning.worker_place import check_is_one_worker, own_device


@pytest.mark.parametrize(
    ("given", "local_rank", "visible", "device"),
    [
        ("cpu", 1, 1, "cpu"),
        ("cuda:0", 0, 4, "cuda:0"),
        ("cuda:0", 2, 4, "cuda:2"),  # devices=1
        ("cuda:0", 2, 1, "cuda:0"),  # the engine shows a device to each process
        ("cuda:3", 2, 4, "cuda:3"),  # devices=[3]
        ("mps:0", 1, 1, "mps:0"),
    ],
)
def test_each_process_of_a_machine_has_its_own_device(given: str, local_rank: int, visible: int, device: str) -> None:
    assert own_device(torch.device(given), local_rank, visible) == torch.device(device)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    return TorchElasticEnvironment()


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {"NTASKS": "4", "NTASKS_PER_NODE": "1", "PROCID": "3", "LOCALID": "0", "NODEID": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return SLURMEnvironment()


@pytest.mark.parametrize(("devices", "num_nodes"), [(1, 1), (2, 1), (2, 2), (8, 1), (1, 4)])
def test_whatever_number_of_machines_the_engine_has_started(torchrun: Any, devices: int, num_nodes: int) -> None:
    check_is_one_worker(devices, num_nodes, torchrun)


def test_the_tasks_of_any_number_of_nodes_attach(slurm: Any) -> None:
    check_is_one_worker(1, 1, slurm)


def test_fewer_devices_than_processes_are_refused(torchrun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigurationError, match=r"devices=2 .*this process has local rank 2\. Expected devices=1"):
        check_is_one_worker(2, 1, torchrun)


@pytest.mark.parametrize(("devices", "num_nodes"), [(4, 1), (1, 2)])
def test_without_an_engine_the_error_says_how_to_start_several(
    devices: int, num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    expected = re.escape(f"`torchrun --standalone --nproc-per-node={devices} train.py`")
    with pytest.raises(ConfigurationError, match=rf"devices={devices} and num_nodes={num_nodes} .*{expected}"):
        check_is_one_worker(devices, num_nodes, LightningEnvironment())
