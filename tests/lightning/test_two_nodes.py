"""Two machines: two network namespaces joined by a cable, where the system allows them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks import network
from tests.lightning.test_processes import check_finished, start, wait_until

PORT = "29555"  # in a namespace of its own every port is free

REASON = network.available()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def machines() -> Iterator[network.Network]:
    with network.two_machines() as pair:
        yield pair


def listening(pid: int) -> set[str]:
    found = set()
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            connections = process.net_connections(kind="inet")
        except psutil.Error:
            continue
        found |= {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def test_lightnings_own_environment(tmp_path: Path, machines: network.Network) -> None:
    jobs = [
        start(
            tmp_path,
            "{'num_nodes': 2, 'devices': 1, 'max_epochs': 60}",
            command=[*machines.prefix(node), sys.executable],
            NODE_RANK=str(node),
            MASTER_ADDR=machines.addresses[0],
            MASTER_PORT=PORT,
        )
        for node in (0, 1)
    ]
    wait_until(lambda: (tmp_path / "training0").exists() or jobs[0].poll() is not None, 90, "training")
    seen = listening(jobs[0].pid) if jobs[0].poll() is None else set()
    check_finished(tmp_path, jobs)
    assert seen == {machines.addresses[0]}  # one interface, never all


def test_torchrun_on_two_nodes(tmp_path: Path, machines: network.Network) -> None:
    jobs = [
        start(
            tmp_path,
            "{'num_nodes': 2, 'devices': 1}",
            command=[
                *machines.prefix(node),
                *[sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"],
                *[f"--node-rank={node}", f"--master-addr={machines.addresses[0]}", f"--master-port={PORT}"],
            ],
            NODE_RANK=str(node),
        )
        for node in (0, 1)
    ]
    check_finished(tmp_path, jobs)
