from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

os.environ["OMP_NUM_THREADS"] = "1"  # OpenMP's threads do not survive a fork

from lightning_asgd.core.job import registry, supervisor
from tests.helpers.programs import environment, forking_servers


@pytest.fixture(autouse=True, scope="session")
def _one_set_of_servers() -> Iterator[None]:
    """Servers are started once and shared by the tests of this folder; one thread, so that forking is safe."""
    torch.set_num_threads(1)
    yield
    registry.release()
    supervisor.close_current()


@pytest.fixture(autouse=True, scope="package")
def _lean_processes() -> Iterator[None]:
    with mock.patch.dict(os.environ, environment()), forking_servers():
        yield


@pytest.fixture(scope="session")
def mains() -> Any:
    """Makes main processes. A fork server imports Lightning once and does nothing else that a fork would inherit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.lightning.models"])
    return context.Process


@pytest.fixture(autouse=True)
def _environment_of_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning marks a launched process by environment variables; every test starts as an unlaunched one."""
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED"):
        monkeypatch.delenv(name, raising=False)
