"""Worker 0 is killed: another worker logs and writes the checkpoints, or a last checkpoint is written."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, WandbLogger
from pytorch_lightning.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import ASGDStrategy
from lightning_asgd.algorithms import ASGD
from lightning_asgd.replacement.chief import take_over
from tests.lightning.models import Recorder, Regression, digest, loader, trainer
from tests.lightning.test_processes import Signpost, alive, epochs, training, wait_until, worker_of


class DiesWriting(TorchCheckpointIO):
    """Kills the process that first writes ``last.ckpt``, when it has written a part of it."""

    def __init__(self, died: Path) -> None:
        self.died = died

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if Path(path).name == "last.ckpt" and not self.died.exists():
            self.died.touch()
            Path(path).write_bytes(b"a part")
            os.kill(os.getpid(), signal.SIGKILL)
        super().save_checkpoint(checkpoint, path, storage_options)


def main_process(folder: Path, start_method: str, **settings: Any) -> None:
    """The main process of a job with two workers that log, write checkpoints and show their progress."""
    file = (folder / "output").open("w")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    tempfile.tempdir = str(folder)
    dies = settings.pop("dies", False)  # worker 0, while it writes its first file of this name
    strategy = ASGDStrategy(nsync=2, start_method=start_method, **settings)
    checkpoints = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=7, save_last=True)
    fit = trainer(
        folder,
        strategy,
        max_epochs=1_000_000,
        callbacks=[Signpost(folder), Recorder(folder), checkpoints],
        logger=CSVLogger(folder, "logs", flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        enable_progress_bar=True,
        enable_checkpointing=True,
        plugins=[DiesWriting(folder / "died")] if dies else None,
    )
    module = Regression()
    fit.fit(module, loader())
    result = {"best": checkpoints.best_model_path, "lost": sorted(fit.strategy.stats.lost_workers)}
    (folder / "result.json").write_text(json.dumps({**result, "digest": digest(module)}))


def steps_logged(file: Path) -> list[int]:
    lines = file.read_text().splitlines()
    column = lines[0].split(",").index("step")
    return [int(line.split(",")[column]) for line in lines[1:]]


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_another_worker_becomes_chief(tmp_path: Path, mains: Any, start_method: str) -> None:
    main = mains(target=main_process, args=(tmp_path, start_method))
    main.start()
    last = tmp_path / "checkpoints" / "last.ckpt"
    family: list[psutil.Process] = []
    try:
        wait_until(lambda: training(tmp_path) and last.exists(), 60, "training")
        family = psutil.Process(main.pid).children(recursive=True)
        worker_of(main, tmp_path, 0).kill()
        wait_until(lambda: "Worker 1 logs and writes" in (tmp_path / "output").read_text(), 30, "another chief")
        written = last.stat().st_mtime
        before = epochs(tmp_path, 1)
        wait_until(lambda: epochs(tmp_path, 1) > before + 3, 30, "training without worker 0")
        wait_until(lambda: last.stat().st_mtime > written, 30, "another checkpoint")
        (tmp_path / "stop").touch()
        main.join(100)
        wait_until(lambda: not alive(family), 10, f"the end of {alive(family)}")
    finally:
        main.kill()
        main.join()
    output = (tmp_path / "output").read_text()
    assert main.exitcode == 0, output
    assert "Worker 0 ended with exit code -9; the others continue without it." in output
    assert "Worker 0 is lost. Worker 1 logs and writes the checkpoints from now on. CSVLogger begins files" in output
    assert "1 of 2 workers were lost during this fit:\n  worker 0: its process ended" in output
    old, new = (steps_logged(tmp_path / "logs" / f"version_{n}" / "metrics.csv") for n in (0, 1))
    assert old
    assert max(new) > max(old)
    assert "Epoch" in output.split("Worker 1 logs and writes")[1]  # the progress bar
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["lost"] == [0]
    assert result["digest"] == Recorder.read(tmp_path, 1)[-1]["digest"]
    files = sorted((tmp_path / "checkpoints").iterdir())
    assert Path(result["best"]) in files
    assert len(files) <= 3  # the last one, the best one, and one that worker 0 may have been about to remove
    step = torch.load(last, weights_only=False)["global_step"]
    assert step >= max(old)
    resumed = trainer(tmp_path, "auto", devices=1, max_steps=step + 5, max_epochs=-1)
    resumed.fit(Regression(), loader(), ckpt_path=str(last))
    assert resumed.global_step == step + 5


def test_the_next_chief_replaces_a_last_checkpoint_that_was_written_in_part(tmp_path: Path, mains: Any) -> None:
    """It is not to leave that file behind, and to begin ``last-v1.ckpt``."""
    main = mains(target=main_process, args=(tmp_path, "fork"), kwargs={"dies": True})
    main.start()
    last = tmp_path / "checkpoints" / "last.ckpt"
    try:
        wait_until(lambda: last.exists() and last.stat().st_size > 100, 60, "another checkpoint")
        (tmp_path / "stop").touch()
        main.join(100)
    finally:
        main.kill()
        main.join()
    assert main.exitcode == 0, (tmp_path / "output").read_text()
    assert (tmp_path / "died").exists()
    assert "last-v1.ckpt" not in [file.name for file in last.parent.iterdir()]
    assert torch.load(last, weights_only=False)["global_step"] >= 7


def test_aborting_ends_all_when_worker_0_dies(tmp_path: Path, mains: Any) -> None:
    main = mains(target=main_process, args=(tmp_path, "fork"), kwargs={"on_worker_failure": "abort"})
    main.start()
    try:
        wait_until(lambda: training(tmp_path), 60, "training")
        family = psutil.Process(main.pid).children(recursive=True)
        worker_of(main, tmp_path, 0).kill()
        main.join(100)
        wait_until(lambda: not alive(family), 10, f"the end of {alive(family)}")
    finally:
        main.kill()
        main.join()
    assert main.exitcode == 1
    assert "process 0 terminated with signal SIGKILL" in (tmp_path / "output").read_text()


SAMPLES, BATCH = 1200, 2


class Counts(pl.LightningModule):
    """Learns how often each sample was trained."""

    def __init__(self, step_s: float = 0.0) -> None:
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(SAMPLES))
        self.step_s = step_s

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        time.sleep(self.step_s)  # an epoch must last until the main process is killed
        return -self.seen[batch[0]].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def count(folder: Path, module: Counts, **settings: Any) -> None:
    strategy = ASGDStrategy(nsync=2, start_method="fork", algorithm=ASGD("sum"))
    fit = trainer(folder, strategy, max_epochs=1, callbacks=[Signpost(folder)])
    fit.fit(module, DataLoader(TensorDataset(torch.arange(SAMPLES)), BATCH), **settings)


def main_process_that_counts(folder: Path) -> None:
    file = (folder / "output").open("w")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    count(folder, Counts(step_s=0.03))


def test_a_last_checkpoint_holds_what_it_says_and_a_resumed_run_trains_the_rest(tmp_path: Path, mains: Any) -> None:
    main = mains(target=main_process_that_counts, args=(tmp_path,))
    main.start()
    try:
        wait_until(lambda: training(tmp_path), 60, "training")
        family = psutil.Process(main.pid).children(recursive=True)
        main.kill()
        wait_until(lambda: not alive(family), 20, f"the end of {alive(family)}")
    finally:
        main.kill()
        main.join()
    output = (tmp_path / "output").read_text()
    (path,) = tmp_path.glob("main-process-lost-*.ckpt")
    assert f"has written the checkpoint {path}. It holds the servers' weights, with this worker's steps" in output
    assert "WorkerLostError: The main process" in output
    assert "main-process-lost-*.ckpt" in output.split("WorkerLostError: The main process")[1].splitlines()[0]
    checkpoint = torch.load(path, weights_only=False)
    seen, done = checkpoint["state_dict"]["seen"], checkpoint["lightning_asgd"]["data"]["done"]
    assert seen.unique().tolist() == [0.0, 1.0]  # each sample was trained once or not yet
    assert int(seen.sum()) == sum(last - first for first, last in done)
    assert 10 * BATCH < seen.sum() < SAMPLES, output

    module = Counts()
    count(tmp_path, module, ckpt_path=str(path))
    assert torch.equal(module.seen.detach(), torch.ones(SAMPLES))


def taking_over(*loggers: Any) -> Any:
    """What a worker knows of its Trainer when it becomes chief before its first batch."""
    batches = SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(ready=0)))
    return SimpleNamespace(loggers=list(loggers), fit_loop=SimpleNamespace(epoch_loop=batches))


@pytest.mark.parametrize(("version", "beside"), [(None, "version_1"), (0, "version_1"), ("mine", "mine-worker2")])
def test_a_csv_logger_begins_files_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: Any, beside: str
) -> None:
    old, new = (CSVLogger(tmp_path, "logs", version=version) for _ in range(2))
    old.log_metrics({"loss": 1.0}, step=1)
    old.save()
    before = (Path(old.log_dir) / "metrics.csv").read_text()
    take_over(taking_over(new), 2, 0, [old.version])
    new.log_metrics({"loss": 2.0}, step=2)
    new.save()
    assert (Path(old.log_dir) / "metrics.csv").read_text() == before
    assert Path(new.log_dir).name == beside
    assert steps_logged(Path(new.log_dir) / "metrics.csv") == [2]
    assert f"CSVLogger begins files of its own in {new.log_dir}." in caplog.text


@pytest.mark.slow  # it starts the service of Weights & Biases
def test_a_wandb_logger_resumes_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "")  # for this test's end
    monkeypatch.delenv("WANDB_RUN_ID")
    logger = WandbLogger(save_dir=str(tmp_path), offline=True)
    take_over(taking_over(logger), 2, 0, ["abc123"])
    try:
        assert logger.experiment.id == "abc123"
    finally:
        logger.experiment.finish()
