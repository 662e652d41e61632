"""Two machines: two network namespaces joined by a cable, where the system allows them."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import network
from lightning_asgd.cli.command_line import main
from lightning_asgd.core.algorithms.config import SECRET_ENV
from tests.helpers.listeners import check_listeners, listening
from tests.lightning import test_runs as runs
from tests.lightning.test_processes import check_finished, start, training, wait_until

STORE = "torchrun's agent, or a process where DDP has hosted it"
RESERVE = "each further worker of a job on several machines, and each that torchrun or SLURM has started"
PORTS = ("29555", "29559", "29557", "29558", "29556")  # in a namespace of its own every port is free

REASON = network.available()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def machines() -> Iterator[network.Network]:
    with network.two_machines() as pair:
        yield pair


def addresses_in(pid: int) -> set[str]:
    """Addresses that any process listens on in the network namespace of a process."""
    return {ip for _, ip, _ in listening(pid).values()}


def expected(machines: network.Network, transport: str) -> set[str]:
    """Where the first machine's processes listen: one interface, never all; servers behind a gateway on loopback."""
    return {machines.addresses[0], *(["127.0.0.1"] if transport == "zmq" else [])}


def on_both(folder: Path, machines: network.Network, port: str, **options: Any) -> list[Any]:
    """A job with a worker on each machine, in Lightning's own environment."""
    return [
        start(
            folder,
            repr({"num_nodes": 2, "devices": 1, **options}),
            command=[*machines.prefix(node), sys.executable],
            NODE_RANK=str(node),
            MASTER_ADDR=machines.addresses[0],
            MASTER_PORT=port,
            LIGHTNING_ASGD_SECRET="known to both machines",
        )
        for node in (0, 1)
    ]


@pytest.mark.slow  # of the usual tests the last one starts so, and torchrun's goes to the end
@pytest.mark.parametrize(("transport", "said"), [("rpc", "rpc (as given)"), ("auto", f"zmq ({SECRET_ENV} is set)")])
def test_lightnings_own_environment(tmp_path: Path, machines: network.Network, transport: str, said: str) -> None:
    jobs = on_both(tmp_path, machines, PORTS[transport == "auto"], max_epochs=60, settings={"transport": transport})
    wait_until(lambda: (tmp_path / "training0").exists() or jobs[0].poll() is not None, 90, "training")
    kind = "rpc" if transport == "rpc" else "zmq"
    assert jobs[0].poll() is None, (tmp_path / "output0").read_text()
    seen = addresses_in(jobs[0].pid)
    main = ["a job's main process", "a job's main process on several machines", "each worker"]
    further = ["each worker", RESERVE]
    check_listeners({jobs[0].pid: main, jobs[1].pid: further}, kind, *machines.addresses)
    check_finished(tmp_path, jobs)
    assert seen == expected(machines, kind)
    assert [(tmp_path / f"output{node}").read_text().count(f"transport {said}") for node in (0, 1)] == [1, 0]


def test_torchrun_on_two_nodes(tmp_path: Path, machines: network.Network) -> None:
    jobs = [
        start(
            tmp_path,
            "{'num_nodes': 2, 'devices': 1, 'max_epochs': 60}",
            command=[
                *machines.prefix(node),
                *[sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"],
                *[f"--node-rank={node}", f"--master-addr={machines.addresses[0]}", f"--master-port={PORTS[4]}"],
            ],
            NODE_RANK=str(node),
        )
        for node in (0, 1)
    ]
    wait_until(lambda: training(tmp_path) or jobs[0].poll() is not None, 90, "training")
    assert jobs[0].poll() is None, (tmp_path / "output0").read_text()
    agents = [psutil.Process(job.pid) for job in jobs]
    check_listeners(
        {agents[0].pid: [STORE], **{agent.children()[0].pid: ["each worker", RESERVE] for agent in agents}},
        "rpc",
        *machines.addresses,
    )
    check_finished(tmp_path, jobs)


@pytest.mark.slow
def test_a_cable_that_is_pulled_for_some_seconds(tmp_path: Path, machines: network.Network) -> None:
    jobs = on_both(tmp_path, machines, PORTS[3], max_epochs=300, settings={"transport": "rpc"})
    wait_until(lambda: training(tmp_path) or jobs[0].poll() is not None, 90, "training")
    for seconds in (1.0, 5.0):
        network.pull(machines, 1, seconds)
        time.sleep(1.0)
    assert jobs[0].poll() is None, "training was over before the cable was pulled"
    check_finished(tmp_path, jobs)


def test_when_worker_0_dies_the_other_machine_continues(tmp_path: Path, machines: network.Network) -> None:
    jobs = on_both(tmp_path, machines, PORTS[2], max_epochs=1_000_000, settings={"transport": "rpc"})
    try:
        wait_until(lambda: training(tmp_path), 90, "training")
        assert addresses_in(jobs[0].pid) == {machines.addresses[0]}  # one interface, never all
        jobs[0].kill()
        said = tmp_path / "output1"
        wait_until(lambda: "A server was lost and restored" in said.read_text() or jobs[1].poll() is not None, 30, "it")
        assert addresses_in(jobs[1].pid) == {machines.addresses[1]}
        (tmp_path / "stop").touch()
        assert jobs[1].wait(30) == 0, said.read_text()
        wait_until(lambda: not any(machines.processes(node) for node in (0, 1)), 10, "the end of all processes")
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert "Worker 0 is lost: its process has ended. This process hosts the servers from now on." in said.read_text()
    assert "Worker 0 is lost. Worker 1 logs and writes the checkpoints from now on." in said.read_text()


@pytest.mark.slow
def test_when_worker_0_dies_the_other_machine_aborts(tmp_path: Path, machines: network.Network) -> None:
    settings = {"transport": "rpc", "on_worker_failure": "abort"}
    jobs = on_both(tmp_path, machines, PORTS[2], max_epochs=1_000_000, settings=settings)
    try:
        wait_until(lambda: training(tmp_path), 90, "training")
        jobs[0].kill()
        assert jobs[1].wait(20) == 1
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    said = (tmp_path / "output1").read_text()
    assert re.search("WorkerLostError: The main process .* has ended unexpectedly", said), said


# ---------------------------------------------------------------------- a run that workers attach themselves to


def inside(machines: network.Network, node: int, program: Callable[..., None], *arguments: Any) -> None:
    machines.enter(node)
    program(*arguments)


def status(folder: Path, address: str, transport: str) -> None:
    runs.to_file(folder / "status.log")
    if transport == "rpc":
        del os.environ[SECRET_ENV]
    raise SystemExit(main(["status", address]))


@pytest.mark.parametrize("transport", ["rpc", pytest.param("zmq", marks=pytest.mark.slow)])
def test_when_the_chief_on_one_machine_is_killed_the_worker_on_the_other_ends_the_run(
    tmp_path: Path, mains: Any, machines: network.Network, transport: str
) -> None:
    started: dict[str, Any] = {}

    def on(node: int, name: str, program: Callable[..., None], *arguments: Any) -> Any:
        started[name] = mains(target=inside, args=(machines, node, program, tmp_path, *arguments))
        started[name].start()
        return started[name]

    def said(name: str) -> str:
        return (tmp_path / f"{name}.log").read_text()

    try:
        served = on(0, "serve", partial(runs.serve, host=machines.addresses[0]), transport)
        address = runs.address_of_run(tmp_path)
        first = on(0, "a", runs.attach, "a", address, transport, 0.005)
        wait_until(lambda: runs.epochs_of(tmp_path, "a") >= 1, 30, "training")
        second = on(1, "b", runs.attach, "b", address, transport, 0.005)
        wait_until(lambda: runs.Diary.read(tmp_path / "b.json") != [], 30, "training on the other machine")
        assert addresses_in(served.pid) == expected(machines, transport)
        assert addresses_in(second.pid) <= {machines.addresses[1]}
        first.kill()
        before = runs.epochs_of(tmp_path, "b")
        wait_until(lambda: runs.epochs_of(tmp_path, "b") > before + 1, 20, "an epoch of the other machine alone")
        look = on(1, "status", status, address, transport)
        look.join(100)
        assert look.exitcode == 0, said("status")
        assert re.search(r"\b2 chief", said("status")), said("status")
        assert re.search(r"Worker 1 has left: its\s+process has\s+ended", said("status")), said("status")
        second.join(100)
        assert second.exitcode == 0, said("b")
        os.kill(served.pid, signal.SIGTERM)
        served.join(60)
        assert served.exitcode == 0, said("serve")
        wait_until(lambda: not any(machines.processes(node) for node in (0, 1)), 10, "the end of all processes")
    finally:
        for process in started.values():
            process.kill()
            process.join()
    end = runs.Diary.read(tmp_path / "b.json")[-1]
    assert (end["what"], end["rank"], end["chief"]) == ("end", 0, True)
    assert end["seen"] == [float(runs.EPOCHS)] * runs.SAMPLES  # what the dead one held was trained by the other
    assert (tmp_path / "b" / "last.ckpt").is_file()
