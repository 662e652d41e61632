"""Worker 0, which hosts the servers, is lost where nothing ties workers together, as under torchrun."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.counts import Counts
from lightning_asgd import ASGDStrategy
from lightning_asgd.algorithms import ASGD
from lightning_asgd.monitor.metric_log import read
from tests.helpers.ports import free_port
from tests.lightning.test_processes import wait_until

SIZE = 3


class WithTest(Counts):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", 1.0, sync_dist=True)


class Tell(pl.Callback):
    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        (self.folder / f"steps{self.rank}").write_text(str(trainer.global_step))
        if (self.folder / f"raise{self.rank}").exists():
            raise KeyError("no such sample")
        if (self.folder / f"hold{self.rank}").exists():
            self.hold(*trainer.strategy.fit_session.synchronizer.channels)

    def hold(self, channel: Any) -> None:
        """Wait for the test's SIGKILL between two pushes: if it came during a push, one server could lack its half."""
        while channel.log.in_flight is not None and not channel.answered:
            time.sleep(0.01)
        (self.folder / f"held{self.rank}").touch()
        time.sleep(60)

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop |= trainer.strategy.broadcast((self.folder / "stop").exists())


def work(folder: Path, rank: int, port: int, transport: str) -> None:
    """A worker's process, with the environment that torchrun sets."""
    with (folder / f"output{rank}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(folder)
    about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_WORLD_SIZE": SIZE, "GROUP_RANK": 0}
    about |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    os.environ.update({name: str(value) for name, value in about.items()})
    os.environ["LIGHTNING_ASGD_SECRET"] = "of this test alone"
    module, data = WithTest(200, 0.005), TensorDataset(torch.arange(200))
    strategy = ASGDStrategy(nsync=2, algorithm=ASGD("sum"), transport=transport, num_servers=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=SIZE,
        strategy=strategy,
        max_epochs=1_000_000,
        default_root_dir=folder,
        callbacks=[Tell(folder, rank), ModelCheckpoint(folder / "checkpoints", every_n_train_steps=20, save_last=True)],
        logger=CSVLogger(folder, "logs", flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, 2, shuffle=True))
    seen = sorted(Counter(module.seen.tolist()).items())
    lost = sorted(strategy.stats.lost_workers)
    sys.stdout.write(f"seen: {seen} {trainer.current_epoch} {lost} {trainer.is_global_zero}\n")
    trainer.test(module, DataLoader(data, 2), verbose=False)
    copy = pickle.loads(pickle.dumps(strategy._job))
    assert (copy.hosts, copy.session) == (None, strategy._job.session)
    sys.stdout.write("tested\n")
    sys.stdout.flush()


@pytest.mark.parametrize("transport", ["zmq", pytest.param("rpc", marks=pytest.mark.slow)])
def test_others_continue_without_worker_0_and_its_servers(tmp_path: Path, mains: Any, transport: str) -> None:
    port = free_port()
    workers = [mains(target=work, args=(tmp_path, rank, port, transport)) for rank in range(SIZE)]

    def steps(rank: int) -> str:
        file = tmp_path / f"steps{rank}"
        return file.read_text() if file.exists() else ""

    def train(*ranks: int) -> None:
        """Wait until each of these has trained another batch."""
        for rank in ranks:
            before, worker = steps(rank), workers[rank]
            wait_until(lambda r=rank, b=before, w=worker: steps(r) != b or w.exitcode is not None, 60, "training")  # type: ignore[misc]
            assert worker.exitcode is None, (tmp_path / f"output{rank}").read_text()

    def newest() -> Path | None:
        files = (tmp_path / "checkpoints").glob("*.ckpt")
        return max(files, key=lambda file: file.stat().st_mtime, default=None)

    def written(since: float) -> bool:
        file = newest()
        return file is not None and file.stat().st_mtime > since

    family: list[psutil.Process] = []
    try:
        for worker in workers:
            worker.start()
        train(0, 1, 2)
        wait_until(lambda: written(0.0), 30, "a checkpoint")
        for lost in (0, 1):
            family += psutil.Process(workers[lost].pid).children(recursive=True)
            if lost == 0:
                (tmp_path / "raise0").touch()
                workers[0].join(100)
                assert workers[0].exitcode == 1, (tmp_path / "output0").read_text()
            else:
                (tmp_path / "hold1").touch()
                wait_until((tmp_path / "held1").exists, 60, "worker 1, between two pushes")
            workers[lost].kill()
            workers[lost].join()
            begun = time.time()
            train(*range(lost + 1, SIZE))
            wait_until(lambda begun=begun: written(begun), 60, "a checkpoint of the next chief")  # type: ignore[misc]
        family += psutil.Process(workers[2].pid).children(recursive=True)
        (tmp_path / "stop").touch()
        workers[2].join(100)
        assert workers[2].exitcode == 0, (tmp_path / "output2").read_text()
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    said = (tmp_path / "output2").read_text()
    seen = said.partition("seen: ")[2].split()
    assert seen, said
    epochs = float(seen[2])
    assert f"seen: [({epochs}, 200)] {int(epochs)} [0, 1] True\n" in said, "every sample once per epoch"
    assert said.rstrip().endswith("tested")
    assert said.count("Worker 2 logs and writes") == 1, "it stays chief in the next session"
    assert "Worker 1 is lost: its process has ended. This process hosts the servers from now on." in said
    assert "This process hosts the servers from now on." in (tmp_path / "output1").read_text()
    assert "2 of 3 workers were lost during this fit:" in said
    events = [text for _, text in read(tmp_path / "logs" / "version_2" / "asgd.jsonl")[0].events]
    assert "Worker 1 is lost. Worker 2 logs and writes the checkpoints from now on." in events, "for the report"
    assert torch.load(str(newest()), weights_only=False)["global_step"] > 0
    _, alive = psutil.wait_procs(family, 10)
    assert not alive
