"""Processes that should not be there, and failures on another machine: here two nodes are two processes of this one."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ports import free_port
from tests.helpers.programs import environment
from tests.lightning.test_processes import training, wait_until

SCRIPT = """
import logging
import sys
from pathlib import Path
from lightning_asgd import ASGDStrategy
from tests.lightning.models import Regression, loader, trainer
from tests.lightning.test_processes import Signpost

folder = Path(sys.argv[1])
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)  # losses are shown all the same


class Fails(Regression):
    def on_train_batch_end(self, *args):
        if self.global_rank == 1 and (folder / "fail").exists():
            raise KeyError("no such sample")


strategy = ASGDStrategy(nsync=2)
fit = trainer(folder, strategy, max_epochs=1_000_000, num_nodes=2, devices=1, callbacks=[Signpost(folder)])
fit.fit(Fails(), loader())
print("lost:", strategy.stats.lost_workers)
"""


def node(folder: Path, rank: int, port: int, name: str = "") -> Any:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with (folder / f"output{name or rank}").open("w") as output:
        return subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env=environment(NODE_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.timeout(600)
def test_a_second_start_of_a_node_is_refused_and_a_failure_on_another_node_is_reported(tmp_path: Path) -> None:
    port = free_port()
    said = tmp_path / "output0"
    jobs = [node(tmp_path, rank, port) for rank in (0, 1)]
    try:
        wait_until(lambda: training(tmp_path) or any(job.poll() for job in jobs), 60, "training")
        stray = node(tmp_path, 1, port, "stray")
        jobs.append(stray)
        assert stray.wait(90) == 1
        claim = f"Process {stray.pid} on {socket.gethostname()} claimed rank 1, which process {jobs[1].pid} on"
        assert claim in (tmp_path / "outputstray").read_text()
        assert [job.poll() for job in jobs[:2]] == [None, None]
        wait_until(lambda: claim in said.read_text(), 20, "the warning")

        (tmp_path / "fail").touch()
        assert jobs[1].wait(60) == 1
        wait_until(lambda: "KeyError: 'no such sample'" in said.read_text(), 20, "the traceback")
        assert "in on_train_batch_end" in said.read_text()
        (tmp_path / "stop").touch()
        assert jobs[0].wait(60) == 0
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    why = f"it raised KeyError: 'no such sample' (process {jobs[1].pid} on {socket.gethostname()})"
    first = f"  worker 1: {why}"[:79]  # the name of the machine may be long
    assert f"1 of 2 workers were lost during this fit:\n{first}" in said.read_text()
    assert f"lost: { ({1: why}) }" in said.read_text()
