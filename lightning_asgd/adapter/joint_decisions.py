"""Where all workers meet within an epoch: Lightning's loop waits there, and does the same on every worker.

Under DDP all ranks count the same batches. Each of them decides by itself when to validate, when the epoch ends and
whether training stops, and all decide alike. Here the workers are at different batches, and a clock or a module may
have stopped one of them only. So a worker that would validate, or end its epoch, says so and waits for the others, and
then does what follows from what all have said:

- training stops for all where it stops for one,
- all validate where one does,
- the epoch ends where it ends for all. A worker that has nothing left to train validates with the others until then.

The Trainer's methods that are replaced here: ``run_epoch``, ``end_batch``, ``validates_now``, ``end_epoch``,
``note_sigterm`` and ``broadcast_sigterm``, as :mod:`~lightning_asgd.adapter.private_names` calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from lightning_asgd.adapter import private_names
from lightning_asgd.adapter.private_names import end_batch, run_epoch, validates_now
from lightning_asgd.protocol import Place

__all__ = ["Others", "Places", "keep_sigterm_local", "when_epochs_end"]


class Others(Protocol):
    """What a worker does together with the others."""

    @property
    def apart(self) -> bool:
        """Whether nobody is met: in a callback's search, which every worker makes for itself."""

    @property
    def halted(self) -> bool:
        """Whether another worker has ended the epoch for all, before all of its data were trained."""

    def meet_within(self, mine: Place, *, stops: bool) -> Place:
        """Wait for the others, take over ``should_stop`` and the count of steps, and return where all are together."""

    def begin_within(self) -> None:
        """An epoch begins."""

    def any_stops(self, should_stop: bool) -> bool:
        """Whether any worker says yes."""

    def end_within(self, batches: int) -> None:
        """Count what all have counted. The epoch has ended for all."""


class Places:
    """The places of one fit.

    Args:
        trainer: its strategy has been set up.
        others: those that are met.
    """

    def __init__(self, trainer: Any, others: Others) -> None:
        self._trainer = trainer
        self._others = others
        self._ended = False  # whether the epoch has ended for all
        self._batches = 0  # of it, that all have counted
        self._undo = run_epoch.replace(trainer, self._run), end_batch.replace(trainer, self._end_batch)

    def close(self) -> None:
        """Give the loop back."""
        for undo in self._undo:
            undo()

    # ------------------------------------------------------------------ in place of Lightning's methods

    def _run(self, fetcher: Any) -> None:
        """Train an epoch, and wait until all have."""
        self._ended = False
        self._others.begin_within()
        train = run_epoch.original(self._trainer)
        if self._others.apart:
            train(fetcher)
            return
        # Hooks of the epoch's beginning may have stopped some workers only. These would not open the epoch's data.
        self._trainer.should_stop = self._others.any_stops(self._trainer.should_stop)
        train(fetcher)
        while not self._ended:
            if self._all_validate(ends=True, validates=False):
                self._validate()
                self._agree_to_stop()
        self._others.end_within(self._batches)

    def _end_batch(self, fetcher: Any) -> None:
        """Decide with the others what follows a batch, if anything does."""
        trainer, end = self._trainer, end_batch.original(self._trainer)
        ends = self._stops or private_names.is_trained(trainer) or self._others.halted
        validates = not private_names.skips_validation(trainer) and validates_now(trainer)(fetcher)
        if self._others.apart or not (ends or validates):
            end(fetcher)
            return
        validates = self._all_validate(ends=ends, validates=validates)
        undo = validates_now.replace(trainer, lambda *_: validates)
        try:
            end(fetcher)
        finally:
            undo()
        if validates:
            self._agree_to_stop()
        if self._ended and not trainer.fit_loop.epoch_loop.done:
            raise StopIteration  # as where a hook skips the rest of the epoch

    # ------------------------------------------------------------------ helpers

    @property
    def _stops(self) -> bool:
        return bool(self._trainer.should_stop and private_names.may_stop_early(self._trainer))

    def _all_validate(self, *, ends: bool, validates: bool) -> bool:
        """Meet the others. Whether all validate."""
        trainer = self._trainer
        mine = Place(ends, validates, trainer.global_step, private_names.batch_in_epoch(trainer))
        together = self._others.meet_within(mine, stops=self._stops)
        self._batches = together.batches
        stepped = -1 < trainer.max_steps <= trainer.global_step
        self._ended = together.ends or self._stops or stepped
        due = private_names.validates_this_epoch(trainer)
        return together.validates or (self._stops and self._batches > 0 and due())

    def _validate(self) -> None:
        """What Lightning does after a batch."""
        trainer = self._trainer
        trainer.validating = True
        first = private_names.first_batch_flag(trainer)
        private_names.validate(trainer)()
        trainer.training = True
        private_names.first_batch_flag.set(trainer, first)

    def _agree_to_stop(self) -> None:
        """After a validation in mid-epoch: its hooks may have stopped training on some workers only."""
        if not self._ended:  # else all do so once the epoch has ended
            self._trainer.should_stop = self._others.any_stops(self._trainer.should_stop)
            self._ended = self._stops


def keep_sigterm_local(trainer: Any) -> Callable[[], None]:
    """Keep Lightning from asking worker 0 for a SIGTERM before every batch, by torch.distributed (since 2.5.2).

    That would put all workers in lock-step with worker 0. A worker that gets the signal ends after its batch, as it
    does without a process group.
    """

    def note(signum: int, _: Any) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not private_names.sigterm_came(trainer):
            launcher.kill(signum)
        private_names.sigterm_came.set(trainer, True)

    undo_note = private_names.note_sigterm.replace(trainer, note)
    undo_broadcast = private_names.broadcast_sigterm.replace(trainer, lambda: None)

    def undo() -> None:
        undo_note()
        undo_broadcast()

    return undo


def when_epochs_end(trainer: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Have something called after an epoch's last hook, before the loop decides to go on. Returns the undo."""

    def end_and_call() -> None:
        private_names.end_epoch.original(trainer)()
        call()

    return private_names.end_epoch.replace(trainer, end_and_call)
