"""What a worker's membership asks of the program around it: a Trainer's strategy, Fabric's, or a plain loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lightning_asgd.core.job.interruptions import TERMINATED, TIME_IS_UP, Interruptions

log = logging.getLogger(__name__)

_SIGNALS: dict[object, str] = {TERMINATED: "SIGTERM", TIME_IS_UP: "SIGUSR1"}


class Shell:
    """A program that neither logs nor writes checkpoints by itself, such as a plain loop. Others override methods.

    ``loop`` is the kind of loop in which a worker trains; a run's workers have the same.
    """

    device: Any = "cpu"
    loop = "a plain loop or Fabric"
    interruptions: Interruptions | None = None

    @property
    def trains(self) -> bool:
        """Whether there is something to write a last checkpoint of."""
        return False

    def ended_by(self, error: BaseException) -> str:
        """The signal that ends the worker; empty if the error is a failure."""
        if isinstance(error, KeyboardInterrupt):
            return "Ctrl-C"
        return _SIGNALS.get(error.code, "") if isinstance(error, SystemExit) else ""

    def raise_signal(self) -> None:
        """Raise the exception of a pending signal. The present batch waits for lost servers, and would never end."""
        if self.interruptions is not None and self.interruptions.came:
            self.interruptions.raise_now()

    def speak_as(self, rank: int) -> None:
        """Log and warn in this process if ``rank`` is 0, else not."""

    def checkpoint_states(self) -> list[Any]:
        """What is known of the checkpoint files that were written."""
        return []

    def adopt_checkpoint_states(self, states: list[Any], *, agrees: bool = False) -> None:
        """Know what another worker knows of the files that it has written. With ``agrees`` the other one decides."""

    def chief_state(self) -> dict[str, Any]:
        """What the next chief needs to know."""
        return {"checkpoints": self.checkpoint_states(), "loggers": []}

    def take_over(self, worker: int, before: int, versions: Sequence[Any]) -> None:
        """This worker is chief from now on; ``versions`` are what the chief ``before`` published of its loggers."""
        log.warning("Worker %d is lost. Worker %d is chief from now on.", before, worker)

    def write_last_checkpoint(self, worker: int, *, main: bool) -> None:
        """Write a checkpoint before this worker ends: the servers are gone, or the ``main`` process that hosts them."""
