"""What another worker takes over when it becomes chief in a job: loggers, the progress bar, news of checkpoints."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from typing import Any

from lightning_asgd.core.lightning.checkpointing import checkpoint_states
from lightning_asgd.core.lightning.private_names import batches_begun, csv_logger, csv_version, is_a, wandb_logger

log = logging.getLogger(__name__)


def chief_state(trainer: Any) -> dict[str, Any]:
    """What the next chief needs to know: what the checkpoint callbacks know of their files, and the loggers' runs."""
    return {"checkpoints": checkpoint_states(trainer), "loggers": [_version_of(logger) for logger in trainer.loggers]}


def _version_of(logger: Any) -> Any:
    try:
        return logger.version
    except Exception:  # of a logger of another library
        return None


def take_over(trainer: Any, worker: int, before: int, versions: Sequence[Any]) -> None:
    """Begin to log on this worker. ``versions`` are those of the loggers of the chief ``before``; empty if unknown."""
    pairs = itertools.zip_longest(trainer.loggers, versions[: len(trainer.loggers)])
    done = [_start(logger, version, worker) for logger, version in pairs]
    what = "".join(f" {each}." for each in done)
    log.warning("Worker %d is lost. Worker %d logs and writes the checkpoints from now on.%s", before, worker, what)
    if batches_begun(trainer):  # else Lightning starts both
        _log_hyperparameters(trainer)
        _show_progress(trainer)


def _start(logger: Any, version: Any, worker: int) -> str:
    """Let a logger begin in this process; returns what it does."""
    name = type(logger).__name__
    try:
        return _begin(logger, name, version, worker)
    except Exception:  # a logger of another library; training is worth more
        log.warning("The logger %s could not begin on worker %d.", name, worker, exc_info=True)
        return f"{name} logs nothing"


def _begin(logger: Any, name: str, version: Any, worker: int) -> str:
    if is_a(logger, csv_logger):  # it would empty the files that are there
        csv_version.set_of(logger, f"{version}-worker{worker}" if isinstance(version, str) else None)
        _ = logger.experiment  # makes the folder, and would warn if there were other files in it
        return f"{name} begins files of its own in {logger.log_dir}"
    if is_a(logger, wandb_logger) and version is not None:
        os.environ["WANDB_RUN_ID"] = str(version)  # of the run that its next wandb.init resumes
        return f"{name} resumes run {version}"
    return f"{name} starts as it would have on worker 0"


def _log_hyperparameters(trainer: Any) -> None:
    hyperparameters = trainer.lightning_module.hparams_initial
    for logger in trainer.loggers if hyperparameters else ():
        try:
            logger.log_hyperparams(hyperparameters)
        except Exception:  # the same
            log.warning("%s could not log the hyperparameters.", type(logger).__name__, exc_info=True)


def _show_progress(trainer: Any) -> None:
    """Show the progress bar, which has been disabled on this worker."""
    bar, module = trainer.progress_bar_callback, trainer.lightning_module
    if bar is None:
        return
    try:
        bar.enable()
        bar.on_train_start(trainer, module)
        bar.on_train_epoch_start(trainer, module)
    except Exception:  # a program's own bar
        log.warning("The progress bar %s could not be shown on this worker.", type(bar).__name__, exc_info=True)
