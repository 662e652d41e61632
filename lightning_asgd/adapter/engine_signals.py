"""What a Trainer's worker of an elastic run does when the engine that started it ends, or is about to end it.

Leaving is the same everywhere: Lightning's flag of a SIGTERM ends the fit after the present batch, the worker gives its
leases back, and the process ends with exit code 0. The others continue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_asgd.adapter import private_names
from lightning_asgd.processes.engine import end_with_agent, requeue_job

__all__ = ["heed_engine"]


def heed_engine(trainer: Any, note: Callable[[int, Any], None]) -> Callable[[], None]:
    """Leave the run with torchrun's agent, and before SLURM's time limit. Returns the undo.

    ``note`` handles SIGTERM, as which SLURM's warning counts.

    Lightning's own handler requeues a job on its rank 0 only, which is one worker of the run and not one of each job,
    and writes a checkpoint first.
    """
    end_with_agent()

    def requeue_and_leave(signum: int, frame: Any) -> None:
        requeue_job()
        note(signum, frame)

    return private_names.requeue_job.replace(trainer, requeue_and_leave)
