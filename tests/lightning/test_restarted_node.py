"""A node that is killed and started again, in a job of two: here two nodes are two processes of this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ports import free_port
from tests.helpers.programs import ROOT, environment
from tests.helpers.servers import servers_of
from tests.lightning.test_processes import wait_until

SCRIPT = """
import os, sys
from collections import Counter
from pathlib import Path
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from lightning_asgd import ASGDStrategy
from lightning_asgd.algorithms import ASGD
sys.path.insert(0, sys.argv[2])
from counts import Counts

folder = Path(sys.argv[1])


class Tell(pl.Callback):
    def on_train_batch_end(self, *args):
        (folder / f"in{os.getpid()}").touch()

    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop |= trainer.strategy.broadcast((folder / "stop").exists())


module = Counts(200, 0.005)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
strategy = ASGDStrategy(nsync=2, algorithm=ASGD("sum"))
trainer = pl.Trainer(
    accelerator="cpu", devices=1, num_nodes=2, strategy=strategy, max_epochs=1_000_000, callbacks=[Tell()], **quiet
)
trainer.fit(module, DataLoader(TensorDataset(torch.arange(200)), 2, shuffle=True))
print("seen:", sorted(Counter(module.seen.tolist()).items()), trainer.current_epoch, strategy.stats.lost_workers)
"""


def node(folder: Path, rank: int, port: int, name: str) -> Any:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with (folder / f"output{name}").open("w") as output:
        return subprocess.Popen(
            [sys.executable, str(script), str(folder), str(ROOT / "benchmarks")],
            env=environment(NODE_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.slow  # `make strangers` does so ten times, on two machines too
def test_a_restarted_node_trains_with_the_others_again(tmp_path: Path) -> None:
    port = free_port()
    jobs = [node(tmp_path, rank, port, str(rank)) for rank in (0, 1)]

    def train(job: Any) -> None:
        wait_until(
            lambda: (tmp_path / f"in{job.pid}").exists() or any(j.poll() for j in (jobs[0], job)), 60, "training"
        )

    try:
        for job in jobs:
            train(job)
        for name in ("again", "and again"):
            jobs[-1].kill()
            jobs[-1].wait()
            jobs.append(node(tmp_path, 1, port, name))
            train(jobs[-1])
        (tmp_path / "stop").touch()
        assert [jobs[0].wait(30), jobs[-1].wait(30)] == [0, 0]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    said = [(tmp_path / f"output{name}").read_text() for name in ("0", "and again")]
    for text in said:
        seen = text.partition("seen: ")[2].split()
        assert seen, text
        epochs = float(seen[2])
        assert f"seen: [({epochs}, 200)] {int(epochs)} {{}}" in text
    assert f"replaces process {jobs[1].pid} on" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("secret", [None, "of this job"], ids=["rpc", "zmq"])
def test_the_first_node_may_be_started_again_while_another_hosts_the_servers(
    tmp_path: Path, secret: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if secret is not None:
        monkeypatch.setenv("LIGHTNING_ASGD_SECRET", secret)
    port = free_port()
    jobs = [node(tmp_path, rank, port, str(rank)) for rank in (0, 1)]

    def train(job: Any) -> None:
        wait_until(lambda: (tmp_path / f"in{job.pid}").exists() or job.poll() is not None, 60, "training")

    try:
        for job in jobs:
            train(job)
        for before, name in ((0, "again"), (-1, "and again")):
            jobs[before].kill()
            jobs[before].wait()
            jobs.append(node(tmp_path, 0, port, name))
            train(jobs[-1])
        (server, *_) = servers_of(jobs[1].pid)
        server.kill()  # its replacement knows that worker 0 is there again, and that worker 1 is chief
        for job in (jobs[1], jobs[-1]):
            (tmp_path / f"in{job.pid}").unlink()
            train(job)
        (tmp_path / "stop").touch()
        assert [jobs[1].wait(30), jobs[-1].wait(30)] == [0, 0]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    first, last = ((tmp_path / f"output{name}").read_text() for name in ("1", "and again"))
    for text in (first, last):
        seen = text.partition("seen: ")[2].split()
        assert seen, text
        epochs = float(seen[2])
        assert f"seen: [({epochs}, 200)] {int(epochs)} {{}}" in text
    assert re.search(rf"Process {jobs[2].pid} on \S+ replaces worker 0", first)
    assert "Worker 1 hosts the servers since their host was lost. This process joins them." in last
