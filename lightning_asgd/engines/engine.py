"""What a worker of an elastic run has to do with the engine that started it: torchrun's agent, or SLURM."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_REQUEUE_S = 30.0  # in which SLURM's controller answers


def end_with_agent() -> None:
    """Get SIGTERM when torchrun's agent is killed: a new one would start other workers on this worker's device."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def requeue_job(environment: Mapping[str, str] = os.environ) -> None:
    """Have SLURM start this process's job again, once for all of its tasks. The servers hold the weights meanwhile."""
    job = environment.get("SLURM_JOB_ID")
    if job is None or environment.get("SLURM_PROCID", "0") != "0":
        return
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
