"""SLURM's signal before a time limit.

The job of each worker of a run is requeued, and the worker leaves. A job with a fixed number of workers is requeued by
Lightning, with a checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import SLURMEnvironment
from torch import nn

from lightning_asgd import Advanced, ASGDStrategy
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.fit_session import FitSession
from lightning_asgd.core.lightning.joint_decisions import Sigterm
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.replica import Replica
from lightning_asgd.engines.signals import defer_requeueing, heed_engine, requeueing_of
from tests.lightning.models import Recorder, Regression, digest, loader
from tests.lightning.models import trainer as trainer_of

ARRAY = {"SLURM_JOB_ID": "80", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


def requests_to_scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a stub of scontrol notes what it is asked for."""
    scontrol, requests = folder / "scontrol", folder / "requests"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {requests}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return requests


def signalled(trainer: Any) -> bool:
    """Whether the worker leaves."""
    undo = heed_engine(trainer, Sigterm(trainer, alone=True).note)
    try:
        private_names.requeue_job(trainer)(signal.SIGUSR1, None)
    finally:
        undo()
    return bool(trainer.received_sigterm)


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({"SLURM_JOB_ID": "80"}, ["requeue 80"]),
        (ARRAY, ["requeue 77_3"]),
        ({**ARRAY, "SLURM_PROCID": "0"}, ["requeue 77_3"]),
        ({"SLURM_JOB_ID": "80", "SLURM_PROCID": "1"}, []),  # task 0 asks for all
    ],
)
def test_slurm_is_asked_once_for_every_job(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], asked: list[str]
) -> None:
    requests = requests_to_scontrol(tmp_path, monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert signalled(trainer)
    assert (requests.read_text().splitlines() if requests.exists() else []) == asked


@pytest.mark.parametrize("script", [None, "#!/bin/sh\necho 'Job is not requeueable' >&2\nexit 1\n"])
def test_a_job_that_cannot_be_requeued_is_named(
    trainer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: str | None,
) -> None:
    if script is not None:
        (tmp_path / "scontrol").write_text(script)
        (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if script else str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "80")
    with caplog.at_level(logging.WARNING):
        assert signalled(trainer)
    (record,) = [r for r in caplog.records if r.name.startswith("lightning_asgd")]
    assert record.getMessage().startswith("SLURM job 80 could not be requeued: ")
    assert ("Job is not requeueable" if script else "scontrol") in record.getMessage()
    assert record.getMessage().endswith("Submit it again. This worker leaves the run.")


# ---------------------------------------------------------------------- a job


def before_first(call: Callable[..., Any], what: Callable[[Any], None]) -> Callable[..., Any]:
    """A method that does something before its first call."""
    done: list[bool] = []

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not done:
            done.append(True)
            what(self)
        return call(self, *args, **kwargs)

    return method


class Weights(pl.Callback):
    """Notes the weights after every batch, and whether a checkpoint has been written for SLURM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[tuple[str, bool]] = []

    def written(self) -> bool:
        return any(self.folder.glob("hpc_ckpt_*.ckpt"))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.seen.append((digest(pl_module), self.written()))


def saved_digest(folder: Path) -> str:
    (file,) = folder.glob("hpc_ckpt_*.ckpt")
    module: nn.Module = Regression()
    module.load_state_dict(torch.load(file, weights_only=False)["state_dict"])
    return digest(module)


def test_a_job_s_checkpoint_waits_for_the_end_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes while an answer of the servers is merged."""
    requests = requests_to_scontrol(tmp_path, monkeypatch)
    about = {"JOB_ID": "80", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_NAME": "train"}
    for name, value in about.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    weights, came = Weights(tmp_path), list[int]()

    def come(_: Replica) -> None:
        signal.raise_signal(signal.SIGUSR1)
        assert not weights.written()
        came.append(len(weights.seen))

    monkeypatch.setattr(Replica, "merge", before_first(Replica.merge, come))
    options: dict[str, Any] = {"devices": 1, "max_epochs": 1, "plugins": [SLURMEnvironment()]}
    run = trainer_of(tmp_path, ASGDStrategy(nsync=2, advanced=Advanced(overlap=False)), callbacks=[weights], **options)
    run.fit(Regression(), loader(64))
    (batch,) = came
    assert 0 < batch < 7
    assert [written for _, written in weights.seen] == [False] * batch + [True] * (8 - batch)
    assert saved_digest(tmp_path) == weights.seen[batch][0]
    assert requests.read_text().splitlines() == ["requeue 80"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_s_checkpoint_waits_for_the_end_of_a_sync_point(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker alone gets the signal, while it meets the other: that one takes no part in the checkpoint."""
    requests = requests_to_scontrol(tmp_path, monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "80")

    def come(session: FitSession) -> None:
        if session.trainer.global_rank == rank:
            private_names.requeue_job(session.trainer)(signal.SIGUSR1, None)
            assert not [*tmp_path.glob("hpc_ckpt_*.ckpt")]

    monkeypatch.setattr(FitSession, "_meet", before_first(FitSession._meet, come))
    run = trainer_of(tmp_path, ASGDStrategy(nsync=2, start_method="fork"), callbacks=[Recorder(tmp_path)])
    run.fit(Regression(), loader(64))
    first = next(each for each in Recorder.read(tmp_path, 1) if each["what"] == "epoch end")
    if rank == 0:
        assert saved_digest(tmp_path) == first["digest"]
    assert [*tmp_path.glob("hpc_ckpt_*.ckpt")] == [tmp_path / "hpc_ckpt_1.ckpt"][rank:]
    assert (requests.read_text().splitlines() if requests.exists() else []) == ["requeue 80"][rank:]


class Validations(pl.Callback):
    """Notes in which epochs a validation ended; SLURM's signal comes in the ``signalled`` batch."""

    def __init__(self, signalled: int | None = None) -> None:
        self.signalled = signalled
        self.ended: list[int] = []

    def on_validation_batch_start(self, *_: Any) -> None:
        if self.signalled is not None:
            self.signalled -= 1
            if self.signalled == 0:
                signal.raise_signal(signal.SIGUSR1)

    def on_validation_epoch_end(self, trainer: pl.Trainer, _: Any) -> None:
        self.ended.append(trainer.current_epoch)


def test_a_job_that_is_requeued_in_a_validation_completes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests_to_scontrol(tmp_path, monkeypatch)
    about = {"JOB_ID": "80", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_NAME": "train"}
    for name, value in about.items():
        monkeypatch.setenv(f"SLURM_{name}", value)

    def fit(validations: Validations, epochs: int) -> pl.Trainer:
        options: dict[str, Any] = {"devices": 1, "max_epochs": epochs, "plugins": [SLURMEnvironment()]}
        run = trainer_of(tmp_path, ASGDStrategy(nsync=2), callbacks=[validations], num_sanity_val_steps=0, **options)
        run.fit(Regression(), loader(64), loader(64))
        return run

    fit(Validations(signalled=3), epochs=1)
    assert [*tmp_path.glob("hpc_ckpt_*.ckpt")] == [tmp_path / "hpc_ckpt_1.ckpt"]
    resumed = Validations()
    run = fit(resumed, epochs=2)  # from that checkpoint, which Lightning finds by itself
    assert resumed.ended == [0, 1]
    assert run.global_step == 16


def test_a_job_is_requeued_at_once_outside_of_a_fit(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[int] = []
    connector = type(trainer._signal_connector)
    monkeypatch.setattr(connector, "_slurm_sigusr_handler_fn", lambda _, signum, frame: handled.append(signum))
    trainer.strategy.collectives = Collectives()
    undo = defer_requeueing(trainer)
    try:
        private_names.requeue_job(trainer)(signal.SIGUSR1, None)
        assert handled == [signal.SIGUSR1]
        requeueing_of(trainer).defers = lambda: None  # a fit begins
        private_names.requeue_job(trainer)(signal.SIGUSR1, None)
        assert len(handled) == 1
        requeueing_of(trainer).defers = None
        requeueing_of(trainer).handle()
        private_names.requeue_job(trainer)(signal.SIGUSR1, None)
        assert len(handled) == 3
    finally:
        undo()
