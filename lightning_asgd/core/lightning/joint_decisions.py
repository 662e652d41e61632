"""Decisions that all workers take together within an epoch, in Lightning's loop: validate, end the epoch, stop.

Under DDP all ranks count the same batches, so each decides by itself when to validate, when the epoch ends and whether
training stops, and all decide alike. Here the workers are at different batches, and a clock or a module may have
stopped only one of them. So a worker that would validate, or end its epoch, reports that, waits for the reports of the
others, and does what follows from all of them:

- training stops for all if it stops for one,
- all validate if one does,
- the epoch ends if it ends for all. A worker that has nothing left to train validates with the others until then.

Methods of the Trainer's loops that are replaced here: ``run_epoch``, ``end_batch``, ``validates_now``, ``end_epoch``,
``note_sigterm`` and ``broadcast_sigterm``, as :mod:`~lightning_asgd.core.lightning.private_names` calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.private_names import end_batch, run_epoch, validates_now
from lightning_asgd.core.protocol import Place


class Peers(Protocol):
    """What a worker decides together with its peers."""

    @property
    def in_search(self) -> bool:
        """Whether a callback searches a learning rate or batch size, which every worker does for itself."""

    @property
    def halted(self) -> bool:
        """Whether another worker has ended the epoch for all, before all of its data were trained."""

    def end_batch(self) -> None:
        """A batch has ended: adopt what is decided together after every batch."""

    def synchronize_within_epoch(self, mine: Place, *, stops: bool) -> Place:
        """Wait for the others, adopt their ``should_stop`` and count of steps, and return the joint place."""

    def on_epoch_begin(self) -> None:
        """An epoch begins."""

    def any_stops(self, should_stop: bool) -> bool:
        """Whether any worker is to stop."""

    def take_set_weights(self) -> None:
        """The hooks at a sync point within the epoch are over: adopt the weights that they have set."""

    def on_epoch_end(self, batches: int) -> None:
        """The epoch has ended for all: set the counts that all agreed on."""


class JointDecisions:
    """The joint decisions of one fit. The trainer's strategy has been set up."""

    def __init__(self, trainer: Any, peers: Peers) -> None:
        self._trainer = trainer
        self._peers = peers
        self._ended = False  # whether the epoch has ended for all
        self._batches = 0  # of the epoch, as all have agreed
        self._undo = run_epoch.replace(trainer, self._run), end_batch.replace(trainer, self._end_batch)

    def close(self) -> None:
        """Restore the loop."""
        for undo in self._undo:
            undo()

    # ------------------------------------------------------------------ replacements of Lightning's methods

    def _run(self, fetcher: Any) -> None:
        """Train an epoch, and wait until all workers have."""
        self._ended = False
        self._peers.on_epoch_begin()
        train = run_epoch.original(self._trainer)
        if self._peers.in_search:
            train(fetcher)
            return
        # Hooks of the epoch's beginning may have stopped some workers only. Those would not open the epoch's data.
        self._trainer.should_stop = self._peers.any_stops(self._trainer.should_stop)
        train(fetcher)
        self._peers.end_batch()  # a hook may have skipped the rest of the epoch
        while not self._ended:
            if self._all_validate(ends=True, validates=False):
                self._validate()
                self._agree_to_stop()
        self._peers.on_epoch_end(self._batches)

    def _end_batch(self, fetcher: Any) -> None:
        """Decide with the others what follows a batch, if it may end the epoch or validate."""
        trainer, end = self._trainer, end_batch.original(self._trainer)
        if self._peers.in_search:
            end(fetcher)
            return
        self._peers.end_batch()
        ends = self._stops or private_names.is_trained(trainer) or self._peers.halted
        validates = not private_names.skips_validation(trainer) and validates_now(trainer)(fetcher)
        joint = ends or validates
        if joint:
            validates = self._all_validate(ends=ends, validates=validates)
        undo = validates_now.replace(trainer, lambda *_: validates)  # asked again, the clock may answer something else
        try:
            end(fetcher)
        finally:
            undo()
        if not joint:
            return
        if validates:
            self._agree_to_stop()
        if self._ended and not trainer.fit_loop.epoch_loop.done:
            raise StopIteration  # as where a hook skips the rest of the epoch

    # ------------------------------------------------------------------ helpers

    @property
    def _stops(self) -> bool:
        return bool(self._trainer.should_stop and private_names.may_stop_early(self._trainer))

    def _all_validate(self, *, ends: bool, validates: bool) -> bool:
        """Synchronise with the others. Whether all validate."""
        trainer = self._trainer
        mine = Place(ends, validates, trainer.global_step, private_names.batch_in_epoch(trainer))
        together = self._peers.synchronize_within_epoch(mine, stops=self._stops)
        self._batches = together.batches
        stepped = -1 < trainer.max_steps <= trainer.global_step
        self._ended = together.ends or self._stops or stepped
        due = private_names.validates_this_epoch(trainer)
        return together.validates or (self._stops and self._batches > 0 and due())

    def _validate(self) -> None:
        """Validate as Lightning does after a batch."""
        trainer = self._trainer
        trainer.validating = True
        first = private_names.first_batch_flag(trainer)
        private_names.validate(trainer)()
        trainer.training = True
        private_names.first_batch_flag.set(trainer, first)

    def _agree_to_stop(self) -> None:
        """Agree after a validation within an epoch: its hooks may have stopped training on some workers only."""
        if not self._ended:  # else all do so once the epoch has ended
            self._trainer.should_stop = self._peers.any_stops(self._trainer.should_stop)
            self._ended = self._stops
            self._peers.take_set_weights()


class Sigterm:
    """Handles SIGTERM, and an engine's warning, as without a process group: the fit ends after a batch.

    Lightning broadcasts the flag within its handler, and worker 0's before every batch (since 2.5.2). That would put
    all workers in lock-step, or come between two collectives of an island. Unless ``alone``, the fit ends when all
    processes of the island call :meth:`end_fit`. ``came``: whether this process has got the signal.
    """

    def __init__(self, trainer: Any, *, alone: bool) -> None:
        self._trainer, self._alone, self.came = trainer, alone, False
        undo_note = private_names.note_sigterm.replace(trainer, self.note)
        undo_broadcast = private_names.broadcast_sigterm.replace(trainer, lambda: None)
        self._undo = undo_note, undo_broadcast

    def note(self, signum: int, _: Any) -> None:
        """Handle the signal."""
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self.came:
            launcher.kill(signum)
        self.came = True
        if self._alone:
            self.end_fit()

    def end_fit(self) -> None:
        """End the fit after the present batch."""
        private_names.sigterm_came.set(self._trainer, True)

    def undo(self) -> None:
        """Let Lightning handle the signal again. If it has come already, Lightning learns of it here."""
        if self.came:
            self.end_fit()
        for each in self._undo:
            each()


def when_epochs_end(trainer: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Call a function after an epoch's last hook, before the loop decides whether to continue. Returns the undo."""

    def end_and_call() -> None:
        private_names.end_epoch.original(trainer)()
        call()

    return private_names.end_epoch.replace(trainer, end_and_call)
