"""The checkpoint that a worker writes when the main process is gone, whose servers end soon."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_asgd.core.worker.exchanger import Exchanger
from lightning_asgd.core.worker.synchronizer import Held, Synchronizer

log = logging.getLogger(__name__)


@dataclass
class LastState:
    """What the checkpoint holds instead of what a worker would ask the servers for."""

    what: str  # the weights, as text
    held: Held = ("", ())  # what they hold of other workers' updates
    weights: dict[str, Tensor] = field(default_factory=dict)  # by name, tensors to save instead of the module's own
    servers: list[Any] = field(default_factory=list)  # what the servers keep beside the weights; empty if they are gone


def last_state(synchronizer: Synchronizer) -> LastState:
    """The servers' weights with this worker's latest steps, or this worker's weights if the servers are gone."""
    if isinstance(synchronizer, Exchanger):
        synchronizer.forget_exchanges()  # the servers have refused them
    try:
        weights = synchronizer.catch_up() if synchronizer.moved else {}
        what = "the servers' weights, with this worker's steps since its last push"
        return LastState(what, synchronizer.caught_up, weights, synchronizer.state())
    except RuntimeError:  # they are gone
        what = "the weights that this worker fetched last, plus its own steps since; nothing that servers keep"
        return LastState(what, synchronizer.caught_up)


def write_last_checkpoint(trainer: Any, worker: int, *, main: bool) -> None:
    """Write a whole checkpoint, which ``Trainer.fit(ckpt_path=...)`` loads, and print its path.

    Lost is the ``main`` process, or a machine that this worker cannot reach: then other workers may write theirs.
    """
    callback = trainer.checkpoint_callback
    folder = getattr(callback, "dirpath", None) or trainer.default_root_dir
    whose = "main-process-lost" if main else f"servers-lost-worker{worker}"
    path = os.path.join(str(folder), f"{whose}-epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt")
    session = trainer.strategy.fit_session
    session.last = last_state(session.synchronizer)
    trainer.save_checkpoint(path)
    lost = "The main process has exited." if main else "The servers have exited."
    log.error(
        f"{lost} Worker {worker} has written the checkpoint {path}. It holds {session.last.what}. Resume from it with "
        f"trainer.fit(..., ckpt_path={path!r})."
    )
