"""What a worker of an elastic run does when the engine that started it ends, or is about to end it.

Leaving is the same everywhere: Lightning's flag of a SIGTERM ends the fit after the present batch, the worker gives its
leases back, and the process ends with exit code 0. The others continue.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from lightning_asgd.adapter import private_names

__all__ = ["heed_engine"]

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_REQUEUE_S = 30.0  # in which SLURM's controller answers


def heed_engine(trainer: Any) -> Callable[[], None]:
    """Leave the run with torchrun's agent, and before SLURM's time limit. Returns the undo."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with_agent()

    def requeue_and_leave(signum: int, _: Any) -> None:
        _requeue_job(dict(os.environ))
        private_names.sigterm_came.set(trainer, True)

    return private_names.requeue_job.replace(trainer, requeue_and_leave)


def _end_with_agent() -> None:
    """Get SIGTERM when the agent is killed: a new one would start other workers on this worker's device."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _requeue_job(environment: dict[str, str]) -> None:
    """Have SLURM start this process's job again, once for all of its tasks.

    Lightning's own handler does so on its rank 0 only, which is one worker of the run and not one of each job, and
    writes a checkpoint first: here the servers hold the weights.
    """
    if environment.get("SLURM_PROCID", "0") != "0":
        return
    job = environment.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in environment:
        job = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    try:
        asked = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=_REQUEUE_S, check=False
        )
        why = "" if asked.returncode == 0 else asked.stderr.strip() or f"exit code {asked.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        log.warning("SLURM job %s could not be requeued: %s. Submit it again. This worker leaves the run.", job, why)
    else:
        log.warning("SLURM job %s is requeued. This worker leaves the run until then.", job)
