"""A SLURM cluster of this one machine, with the real daemons, where they are installed and may run."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.lightning.test_processes import check_finished, start, training, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian: slurmctld slurmd munge)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's daemons need root"),
    pytest.mark.timeout(300),
    pytest.mark.slow,  # torchrun on two nodes, which starts the workers too, is among the usual tests
]
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Starts the daemons; gives the path of their configuration."""
    folder = tmp_path_factory.mktemp("slurm")
    for part in (folder, *folder.parents):
        if part.stat().st_uid == os.geteuid() and part != Path("/"):
            part.chmod(part.stat().st_mode | 0o055)  # munged insists that its socket can be reached
    key = folder / "key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    configuration = folder / "slurm.conf"
    host, cpus = socket.gethostname().split(".")[0], psutil.cpu_count() or 1
    configuration.write_text(CONFIGURATION.format(folder=folder, host=host, cpus=cpus, ports=free_ports(2)))
    munge = {"key-file": "key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
    munge["seed-file"] = "munge.seed"
    commands = [
        ["munged", "--foreground", "--force", *(f"--{option}={folder / name}" for option, name in munge.items())],
        ["slurmctld", "-D", "-f", str(configuration)],
        ["slurmd", "-D", "-f", str(configuration)],
    ]
    daemons = []
    try:
        with (folder / "daemons").open("wb") as output:
            for command in commands:
                daemons.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
                time.sleep(0.5)
        environment = {**os.environ, "SLURM_CONF": str(configuration)}
        deadline = time.monotonic() + 30
        while True:
            ask = ["sinfo", "--noheader", "--format=%T"]
            state = subprocess.run(ask, env=environment, capture_output=True, text=True, timeout=60, check=False).stdout
            if state.strip() == "idle":
                break
            assert time.monotonic() < deadline, (folder / "daemons").read_text()[-3000:]
            time.sleep(0.2)
        yield str(configuration)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(20)


def test_srun_starts_the_workers(tmp_path: Path, cluster: str) -> None:
    srun = ["srun", "--ntasks=2", "--ntasks-per-node=2", "--job-name=train", sys.executable]
    check_finished(tmp_path, [start(tmp_path, command=srun, SLURM_CONF=cluster)])


def test_the_other_tasks_continue_without_task_0(tmp_path: Path, cluster: str) -> None:
    """As docs/tutorials/slurm.md starts them. Task 0 is worker 0, and hosts the servers."""
    srun = ["srun", "--ntasks=2", "--ntasks-per-node=2", "--job-name=train", "--no-kill", "--kill-on-bad-exit=0"]
    options = "{'max_epochs': 1_000_000}"
    job = start(tmp_path, options, command=[*srun, "--wait=0", sys.executable], SLURM_CONF=cluster)
    said = tmp_path / "output"
    try:
        wait_until(lambda: training(tmp_path) or job.poll() is not None, 60, "training")
        os.kill(int((tmp_path / "training0").read_text()), signal.SIGKILL)
        wait_until(lambda: "A server was lost and restored" in said.read_text() or job.poll() is not None, 30, "it")
        (tmp_path / "stop").touch()
        assert job.wait(40) != 0  # srun's own: a task has failed
    finally:
        job.kill()
        job.wait()
    assert "Worker 0 is lost. Worker 1 logs and writes the checkpoints from now on." in said.read_text()
    assert "1 of 2 workers were lost during this fit:\n  worker 0: its process has ended" in said.read_text()
