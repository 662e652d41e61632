"""Worker 0, which hosts the servers, is killed where nothing ties the workers' processes together, as under SLURM."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_asgd.monitoring.metric_log import read
from tests.helpers.programs import ROOT, environment
from tests.lightning.test_processes import wait_until

SCRIPT = """
import os, pickle, sys
from collections import Counter
from pathlib import Path
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from lightning_asgd import ASGDStrategy
from lightning_asgd.algorithms import ASGD
sys.path.insert(0, sys.argv[2])
from counts import Counts

folder, rank, size, transport = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[3]


class Tell(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        (folder / f"steps{rank}").write_text(str(trainer.global_step))

    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop |= trainer.strategy.broadcast((folder / "stop").exists())


class Tested(Counts):
    def test_step(self, batch, batch_idx):
        self.log("tested", 1.0, sync_dist=True)


module = Tested(200, 0.005)
strategy = ASGDStrategy(nsync=2, algorithm=ASGD("sum"), transport=transport, num_servers=2)
trainer = pl.Trainer(
    accelerator="cpu", devices=size, strategy=strategy, max_epochs=1_000_000, default_root_dir=folder,
    callbacks=[Tell(), ModelCheckpoint(folder / "checkpoints", every_n_train_steps=20, save_last=True)],
    logger=CSVLogger(folder, "logs", flush_logs_every_n_steps=1), log_every_n_steps=1,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(module, DataLoader(TensorDataset(torch.arange(200)), 2, shuffle=True))
seen = sorted(Counter(module.seen.tolist()).items())
print("seen:", seen, trainer.current_epoch, sorted(strategy.stats.lost_workers), trainer.is_global_zero, flush=True)
trainer.test(module, DataLoader(TensorDataset(torch.arange(200)), 2), verbose=False)
copy = pickle.loads(pickle.dumps(trainer.strategy._job))
assert copy.hosts is None and copy.session == trainer.strategy._job.session
print("tested", flush=True)
"""


def start(folder: Path, transport: str, size: int) -> list[Any]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    about |= {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "LIGHTNING_ASGD_SECRET": "of this test alone"}
    workers = []
    for rank in range(size):
        with (folder / f"output{rank}").open("w") as output:
            workers.append(
                subprocess.Popen(
                    [sys.executable, str(script), str(folder), str(ROOT / "benchmarks"), transport],
                    env={**environment(RANK=str(rank), LOCAL_RANK=str(rank)), **about},
                    cwd=folder,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return workers


@pytest.mark.timeout(150)
@pytest.mark.parametrize("transport", ["zmq", pytest.param("rpc", marks=pytest.mark.slow)])
def test_others_go_on_without_worker_0_and_its_servers(tmp_path: Path, transport: str) -> None:
    workers = start(tmp_path, transport, 3)
    family = [psutil.Process(worker.pid) for worker in workers]

    def steps(rank: int) -> str:
        file = tmp_path / f"steps{rank}"
        return file.read_text() if file.exists() else ""

    def train(*ranks: int) -> None:
        """Wait until each of these has trained another batch."""
        for rank in ranks:
            before, worker = steps(rank), workers[rank]
            wait_until(lambda rank=rank, b=before, w=worker: steps(rank) != b or w.poll() is not None, 60, "training")  # type: ignore[misc]
            assert worker.poll() is None, (tmp_path / f"output{rank}").read_text()

    last = tmp_path / "checkpoints" / "last.ckpt"
    try:
        train(0, 1, 2)
        wait_until(last.exists, 30, "a checkpoint")
        for lost in (0, 1):
            family += psutil.Process(workers[lost].pid).children(recursive=True)
            workers[lost].kill()
            workers[lost].wait()
            begun = time.time()
            train(*range(lost + 1, 3))
            wait_until(lambda begun=begun: last.stat().st_mtime > begun, 60, "a checkpoint")  # type: ignore[misc]
        family += psutil.Process(workers[2].pid).children(recursive=True)
        (tmp_path / "stop").touch()
        assert workers[2].wait(60) == 0, (tmp_path / "output2").read_text()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    said = (tmp_path / "output2").read_text()
    seen = said.partition("seen: ")[2].split()
    assert seen, said
    epochs = float(seen[2])
    assert f"seen: [({epochs}, 200)] {int(epochs)} [0, 1] True\n" in said, "every sample once per epoch"
    assert said.rstrip().endswith("tested")
    assert said.count("Worker 2 logs and writes") == 1, "it stays chief in the next session"
    assert "Worker 1 is gone: its process has ended. This process hosts the servers from now on." in said
    assert "2 of 3 workers were lost during this fit:" in said
    events = [text for _, text in read(tmp_path / "logs" / "version_2" / "asgd.jsonl")[0].events]
    assert "Worker 1 is gone. Worker 2 logs and writes the checkpoints from now on." in events, "for the report"
    assert "A server was lost, and restored from the workers' copies." in events
    assert torch.load(last, weights_only=False)["global_step"] > 0
    _, alive = psutil.wait_procs(family, 10)
    assert not alive
