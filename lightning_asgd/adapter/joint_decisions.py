"""Where all workers meet within an epoch: Lightning's loop waits there, and does the same on every worker.

Under DDP all ranks count the same batches. Each of them decides by itself when to validate, when the epoch ends and
whether training stops, and all decide alike. Here the workers are at different batches, and a clock or a module may
have stopped one of them only. So a worker that would validate, or end its epoch, says so and waits for the others, and
then does what follows from what all have said:

- training stops for all where it stops for one,
- all validate where one does,
- the epoch ends where it ends for all. A worker that has nothing left to train validates with the others until then.

The loop's attributes that are set here: ``epoch_loop.run``, ``on_advance_end`` and ``_should_check_val_fx``.
"""

from __future__ import annotations

from typing import Any, Protocol

from lightning_asgd.protocol import Place

__all__ = ["Others", "Places", "count_batches", "count_steps", "shift"]


class Others(Protocol):
    """What a worker does together with the others."""

    @property
    def apart(self) -> bool:
        """Whether nobody is met: in a callback's search, which every worker makes for itself."""

    @property
    def halted(self) -> bool:
        """Whether another worker has ended the epoch for all, before all of its data were trained."""

    def meet_within(self, mine: Place, *, stops: bool) -> Place:
        """Wait for the others, and have ``should_stop`` and the count of steps of all.

        Args:
            mine: where this worker is.
            stops: whether it is to train no more.

        Returns:
            where all are together.
        """

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
        self._loop = trainer.fit_loop.epoch_loop
        self._ended = False  # whether the epoch has ended for all
        self._batches = 0  # of it, that all have counted
        self._loop.run, self._loop.on_advance_end = self._run, self._end_batch

    def close(self) -> None:
        """Give the loop back."""
        for name in ("run", "on_advance_end"):
            vars(self._loop).pop(name, None)

    # ------------------------------------------------------------------ in place of Lightning's methods

    def _run(self, fetcher: Any) -> None:
        """Train an epoch, and wait until all have."""
        self._ended = False
        self._others.begin_within()
        if self._others.apart:
            type(self._loop).run(self._loop, fetcher)
            return
        # Hooks of the epoch's beginning may have stopped some workers only. These would not open the epoch's data.
        self._trainer.should_stop = self._others.any_stops(self._trainer.should_stop)
        type(self._loop).run(self._loop, fetcher)
        while not self._ended:
            if self._all_validate(ends=True, validates=False):
                self._validate()
                self._agree_to_stop()
        self._others.end_within(self._batches)

    def _end_batch(self, fetcher: Any) -> None:
        """Decide with the others what follows a batch, if anything does."""
        loop, end_batch = self._loop, type(self._loop).on_advance_end
        ends = self._stops or loop._is_training_done or self._others.halted
        validates = not loop._skip_next_val and loop._should_check_val_fx(fetcher)
        if self._others.apart or not (ends or validates):
            end_batch(loop, fetcher)
            return
        validates = self._all_validate(ends=ends, validates=validates)
        loop._should_check_val_fx = lambda *_: validates
        try:
            end_batch(loop, fetcher)
        finally:
            del loop._should_check_val_fx
        if validates:
            self._agree_to_stop()
        if self._ended and not loop.done:
            raise StopIteration  # as where a hook skips the rest of the epoch

    # ------------------------------------------------------------------ helpers

    @property
    def _stops(self) -> bool:
        return bool(self._trainer.should_stop and self._trainer.fit_loop._can_stop_early)

    def _all_validate(self, *, ends: bool, validates: bool) -> bool:
        """Meet the others. Whether all validate."""
        loop = self._loop
        mine = Place(ends, validates, self._trainer.global_step, loop.batch_progress.current.ready)
        together = self._others.meet_within(mine, stops=self._stops)
        self._batches = together.batches
        stepped = -1 < loop.max_steps <= loop.global_step
        self._ended = together.ends or self._stops or stepped
        return together.validates or (self._stops and self._batches > 0 and loop._should_check_val_epoch())

    def _validate(self) -> None:
        """What Lightning does after a batch."""
        trainer = self._trainer
        trainer.validating = True
        first = trainer._logger_connector._first_loop_iter
        self._loop.val_loop.run()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = first

    def _agree_to_stop(self) -> None:
        """After a validation in mid-epoch: its hooks may have stopped training on some workers only."""
        if not self._ended:  # else all do so once the epoch has ended
            self._trainer.should_stop = self._others.any_stops(self._trainer.should_stop)
            self._ended = self._stops


# ---------------------------------------------------------------------- Lightning's counts


def count_steps(trainer: Any, step: int) -> None:
    """Have Lightning and its loggers count so many optimizer steps."""
    loop, by = trainer.fit_loop.epoch_loop, step - trainer.global_step
    if trainer.lightning_module.automatic_optimization:
        shift(vars(loop.automatic_optimization.optim_progress.optimizer.step.total), by)
    else:
        shift(vars(loop.manual_optimization.optim_step_progress.total), by)
    loop._batches_that_stepped += by


def count_batches(trainer: Any, batches: int) -> None:
    """Have Lightning count so many batches of the present epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    by = batches - progress.current.ready
    shift(vars(progress.current), by)
    shift(vars(progress.total), by)


def shift(counts: dict[str, int], by: int) -> None:
    """Add to all of Lightning's counts of the stages of something."""
    for name in counts:
        counts[name] += by
