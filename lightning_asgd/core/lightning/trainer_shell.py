"""What a worker's membership asks of a Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.checkpointing import adopt_checkpoint_states, checkpoint_states
from lightning_asgd.core.lightning.class_trees import become_global_zero
from lightning_asgd.core.worker.shell import Shell
from lightning_asgd.features import FINDERS, load


class TrainerShell(Shell):
    """A Trainer, whose strategy trains on ``device``."""

    loop = "a Trainer"
    sigterm: Any = None  # the handler of the signal; None before there is one

    def __init__(self, trainer: Any, device: Any) -> None:
        self._trainer = trainer
        self.device = device

    @property
    def trains(self) -> bool:
        """See :class:`Shell`, here and below."""
        return self._trainer.strategy.fit_session is not None

    def ended_by(self, error: BaseException) -> str:
        """SIGTERM, if it is what Lightning raises then."""
        return "SIGTERM" if private_names.is_a(error, private_names.sigterm) else super().ended_by(error)

    def raise_signal(self) -> None:
        """Raise the exception that Lightning raises after a batch."""
        if self.sigterm is not None and self.sigterm.came:
            raise private_names.sigterm.imported(self._trainer.strategy.tree)

    def speak_as(self, rank: int) -> None:
        """Let Lightning log and warn in this process if ``rank`` is 0."""
        become_global_zero(rank)

    def checkpoint_states(self) -> list[Any]:
        """The state of the Trainer's checkpoint callbacks."""
        return checkpoint_states(self._trainer)

    def adopt_checkpoint_states(self, states: list[Any], *, agrees: bool = False) -> None:
        """Give it to them, unless the other worker has other callbacks."""
        if len(states) == len(self._trainer.checkpoint_callbacks):
            adopt_checkpoint_states(self._trainer, states, agrees=agrees)

    def chief_state(self) -> dict[str, Any]:
        """What the callbacks know of their files, and the loggers' runs."""
        return dict(load(FINDERS["chief's state"])(self._trainer))

    def take_over(self, worker: int, before: int, versions: Sequence[Any]) -> None:
        """Begin to log on this worker."""
        load(FINDERS["next chief"])(self._trainer, worker, before, versions)

    def write_last_checkpoint(self, worker: int, *, main: bool) -> None:
        """Write a checkpoint that ``Trainer.fit(ckpt_path=...)`` can load."""
        load(FINDERS["last checkpoint"])(self._trainer, worker, main=main)
