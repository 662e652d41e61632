"""SLURM's signal before a time limit: the job of each worker of a run is requeued, and the worker leaves."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

from lightning_asgd.adapter import private_names
from lightning_asgd.adapter.engine_signals import heed_engine
from lightning_asgd.adapter.joint_decisions import Sigterm

ARRAY = {"SLURM_JOB_ID": "80", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


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
    scontrol, requests = tmp_path / "scontrol", tmp_path / "requests"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {requests}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
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
