"""Lightning's counters and schedules, as they would be if all workers were equally fast.

There are two counts of steps. ``global_step`` counts optimizer steps. Loggers count *stepped* batches, those after
which an optimizer has stepped: with manual optimization a batch may take any number of steps.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from typing import Any

from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.class_trees import rank_zero_warn
from lightning_asgd.core.lightning.private_names import (
    automatic_steps,
    batch_in_epoch,
    batches_begun,
    expected_batches,
    first_batch_flag,
    is_a,
    last_batch_flag,
    latest_batch,
    log_row,
    logged_step,
    loop_states,
    manual_steps,
    rate_monitor,
    rich_bar,
    rich_task,
    steps_between_checkpoints,
    tqdm_bar,
)
from lightning_asgd.core.worker.collectives import Collectives, Phase

NEVER = sys.maxsize
"""A number of batches or steps that is not reached."""

_UNKNOWN = 1 << 31  # batches: more are no estimate, but the numbers of shards of unknown length
_MOST_MARKS = 1 << 14


def is_automatic(trainer: Any) -> bool:
    """Whether Lightning takes the optimizer steps, one after each batch or after several."""
    return bool(trainer.lightning_module.automatic_optimization)


def set_steps(trainer: Any, step: int) -> None:
    """Set ``trainer.global_step``."""
    (automatic_steps if is_automatic(trainer) else manual_steps).shift(trainer, step - trainer.global_step)


def count_batches(trainer: Any, batches: int) -> None:
    """Set the number of batches of the present epoch that Lightning has counted."""
    by = batches - batch_in_epoch(trainer)
    batch_in_epoch.shift(trainer, by)
    batches_begun.shift(trainer, by)


def tell_last(trainer: Any, *, last: bool) -> None:
    """Tell Lightning and the program whether the present batch, which has been trained, is the epoch's last.

    Lightning ends the epoch, and steps the schedules of epochs, if either of the two says so.
    """
    last_batch_flag.set(trainer, last)
    begun = batch_in_epoch(trainer)
    expected_batches.set(trainer, begun if last else max(begun + 1, expected_batches(trainer)))


def show_expected(bar: Any, batches: int) -> None:
    """Set the number of batches that a progress bar expects, if it is known.

    Not by ``Progress.update(total=...)`` of rich, which forgets the batches that the speed is computed from: 0.00it/s
    would be shown until two more are trained, and after the last one for good.
    """
    total = batches if batches < _UNKNOWN else None
    if tqdm_bar.of(bar) is not None:
        tqdm_bar.of(bar).total = total
    elif rich_bar.of(bar) is not None and rich_task.of(bar) is not None:
        for task in rich_bar.of(bar).tasks:
            if task.id == rich_task.of(bar):
                task.total = total


def validation_marks(trainer: Any, every: Any, batches: int, before: int) -> list[int]:
    """The numbers of batches in an epoch after which validations run.

    ``every``: batches between two, infinity where Lightning knows no length; ``before``: batches before the epoch.
    """
    if not private_names.validates_this_epoch(trainer)():
        return []
    if every == float("inf"):
        return [batches]
    across = trainer.check_val_every_n_epoch is None
    first = every - (before % every if across else 0)
    return list(range(first, min(batches, first + every * _MOST_MARKS) + 1, every))


def sync_intervals(
    units: int, step: int, workers: int, marks: Collection[int], most: int | None
) -> tuple[tuple[int, ...], frozenset[int]]:
    """Where the sync intervals of an epoch end, in units; and which intervals a validation follows.

    An epoch has ``units``, and at ``most`` that number of steps, of ``step`` units. ``marks`` are the numbers of steps,
    of all workers, after which validations follow. Every worker needs a step in each interval.
    """
    steps = math.ceil(units / step)
    # The last batches are not always enough for all workers: the last sync interval ends with the epoch.
    wanted = {min(steps, mark) for mark in marks}
    if most is not None:
        steps = max(workers, min(steps, most))
    ends: list[int] = []
    for end in sorted({*(mark for mark in wanted if mark <= steps), steps}):
        # Too few for every worker to get one: they belong to the interval before.
        if ends and end - ends[-1] < workers and ends.pop() in wanted:
            wanted.add(end)
        ends.append(end)
    validates = frozenset(i for i, end in enumerate(ends) if end in wanted)
    return tuple(min(units, end * step) for end in ends), validates


class StepCounts:
    """Both counts of a worker: ``step``, of optimizer steps, follows from ``stepped``, of batches that have stepped."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.step = self.stepped = 0
        self._first = (0, 0)  # both before the epoch's first batch
        self._own = (0, 0)  # batches and optimizer steps of this worker in the epoch

    def begin_epoch(self) -> None:
        """An epoch begins."""
        self.step = self._trainer.global_step
        self.stepped = self.step if is_automatic(self._trainer) else logged_step(self._trainer)
        self._own = (0, 0)

    def begin_batch(self) -> bool:
        """A batch begins. Returns whether it is an epoch's first, and its module takes the steps."""
        if is_automatic(self._trainer) or self._own[0]:
            return False
        self.stepped = logged_step(self._trainer)
        self._first = self.step, self.stepped
        return True

    def end_batch(self) -> None:
        """A batch has been trained, and Lightning has counted its steps."""
        self._own = self._own[0] + 1, self._own[1] + self._trainer.global_step - self.step

    def set(self, stepped: int, *, ends: bool) -> None:
        """Set Lightning's counts, before it counts that the present batch has stepped. ``ends``: it ends the epoch."""
        if is_automatic(self._trainer):
            self.step = stepped
        else:  # only the module knows how many a batch takes
            taken = (stepped - self._first[1]) * self._own[1] / max(1, self._own[0])
            self.step = max(self.step, self._first[0] + (math.ceil(taken - 1e-6) if ends else math.floor(taken + 1e-6)))
        set_steps(self._trainer, self.step)
        logged_step.set(self._trainer, max(0, stepped - 1))
        self.stepped = stepped

    def take(self) -> None:
        """Take Lightning's counts, after a batch."""
        self.step = self._trainer.global_step
        self.stepped = self.step if is_automatic(self._trainer) else logged_step(self._trainer) + 1

    def raise_to(self, step: int, stepped: int) -> None:
        """Count as many as all have agreed on."""
        set_steps(self._trainer, step)
        logged_step.set(self._trainer, logged_step(self._trainer) + stepped - self.stepped)
        self.step, self.stepped = step, stepped


class BatchSchedules:
    """The schedules of a fit that step with batches. They are stepped as if all workers were equally fast."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._frequencies: dict[int, int] = {}
        self.stepped = 0
        self._warned = False

    def suspend(self) -> None:
        """Keep Lightning from stepping them."""
        for config in private_names.schedules(self._trainer):
            if config.interval != "step":
                continue
            if config.reduce_on_plateau:
                self._warn_of(config)
            elif config.frequency != NEVER:
                self._frequencies[id(config)] = config.frequency
                config.frequency = NEVER

    def _warn_of(self, config: Any) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{type(config.scheduler).__name__} has interval='step' and is stepped after each worker's own "
                "batches: workers may then have different learning rates. Use interval='epoch', or pass data='split' "
                "to the strategy."
            )

    def advance_to(self, position: int, accumulate: int, batches: int, steps_before: float) -> None:
        """Advance them to a position in an epoch of ``batches``, of which each optimizer step takes ``accumulate``."""
        module = self._trainer.lightning_module
        for batch in range(self.stepped + 1, position + 1):
            if not module.automatic_optimization or (batch % accumulate and batch < batches):
                continue
            for config in private_names.schedules(self._trainer):
                frequency = self._frequencies.get(id(config))
                if frequency is not None and batch % frequency == 0:
                    self._step(config.scheduler, math.ceil(steps_before + batch / accumulate - 1e-6))
        self.stepped = max(self.stepped, position)

    def _step(self, scheduler: Any, step: int) -> None:
        """Step one, with ``global_step`` as it is after this optimizer step: a module's own hook may read it."""
        trainer = self._trainer
        before = trainer.global_step
        set_steps(trainer, max(before, step))
        try:
            trainer.lightning_module.lr_scheduler_step(scheduler, None)
        finally:
            set_steps(trainer, before)

    def restore(self) -> None:
        """Let Lightning step them again."""
        for config in private_names.schedules(self._trainer):
            config.frequency = self._frequencies.get(id(config), config.frequency)


def steps_of_fit(trainer: Any, config: ExchangeConfig) -> float:
    """Steps of a fit, where they are asked for; raises a :class:`ConfigurationError` if they are not known then."""
    steps: float = trainer.estimated_stepping_batches if config.restarted else 0
    if config.restarted and not 0 < steps < math.inf:
        raise ConfigurationError(
            f"nsync='restarted' follows from the number of steps, which is {steps}. Expected a Trainer with "
            "max_steps=..., or with max_epochs=... and data that have a length."
        )
    return steps


class PassedSteps:
    """Steps that a worker's count passes in a fit, since others take them: the chief writes what is due there.

    Lightning's checkpoint callbacks, loggers and ``LearningRateMonitor`` act at multiples of their own numbers. A slow
    worker's count advances in leaps, and any worker's may where an epoch ends. A fast worker's stays for several
    batches, of which only the first is logged. ``writes``: whether this worker writes.
    """

    def __init__(self, trainer: Any, writes: Callable[[], bool]) -> None:
        self._trainer, self._writes = trainer, writes
        self._step = self._stepped = 0  # both counts that hooks have seen
        self._own = False  # whether the latest batch has stepped
        self._behind = (0, 0)  # by how much both are too small, while something is written
        self._stays, self._every = False, NEVER  # whether they have not changed; the Trainer's steps between two rows

    def note(self, counts: StepCounts) -> None:
        """Note what hooks have seen, before these counts are set. Lightning has counted the steps of a batch."""
        self._step, self._stepped = counts.step, counts.stepped
        self._own = not is_automatic(self._trainer) or self._trainer.global_step > self._step

    def write(self, counts: StepCounts, outputs: Any, batch: Any) -> None:
        """Write what is due, before hooks see the latest number after that batch: rows are in the order of steps."""
        self._stays = self._own and counts.stepped == self._stepped
        self._write(counts.stepped, outputs, batch, shows=True)
        self.mute()

    def write_at_sync_point(self, counts: StepCounts, collectives: Collectives) -> None:
        """Write what is due at steps that others have taken. No hook sees the latest number."""
        self._stays &= counts.stepped == self._stepped
        phase, collectives.phase = collectives.phase, Phase.OFFLINE  # the others may have nothing to write
        try:
            self._write(counts.stepped, None, None, shows=False)
        finally:
            collectives.phase = phase

    def mute(self) -> None:
        """Keep Lightning from logging a step again, until :meth:`unmute`: around hooks of a batch."""
        if self._stays and self._trainer.log_every_n_steps != NEVER:
            self._every, self._trainer.log_every_n_steps = self._trainer.log_every_n_steps, NEVER

    def unmute(self) -> None:
        """Have it log again."""
        if self._trainer.log_every_n_steps == NEVER:
            self._trainer.log_every_n_steps = self._every

    def _write(self, now: int, *trained: Any, shows: bool) -> None:
        trainer, before, first, last = self._trainer, self._stepped, self._step, self._trainer.global_step
        passed = range(before + 1, now + 1)
        if not passed or (passed[0] == now and shows and self._own) or not self._writes():
            return
        logged = logged_step(trainer)
        try:
            for each in passed:
                step = last - (now - each) * (last - first) // (now - before)
                self._behind = last - step, now - each
                set_steps(trainer, step)
                logged_step.set(trainer, each - 1)
                unseen = each < now or not shows
                self._act(trained, saves=unseen, logs=unseen or not self._own, rates=each > before + 1 or not shows)
        finally:
            self._behind = 0, 0
            set_steps(trainer, last)
            logged_step.set(trainer, logged)

    def count_all_in(self, loops: dict[str, Any]) -> None:
        """Have a checkpoint that is written meanwhile count all steps that its weights have taken."""
        trainer, step, logged = self._trainer, self._trainer.global_step, logged_step(self._trainer)
        if any(self._behind):
            set_steps(trainer, step + self._behind[0])
            logged_step.set(trainer, logged + self._behind[1])
            loops.update(loop_states(trainer)()["fit_loop"])
            set_steps(trainer, step)
            logged_step.set(trainer, logged)

    def _act(self, trained: tuple[Any, Any], *, saves: bool, logs: bool, rates: bool) -> None:
        """Have Lightning's callbacks and loggers act at a step: ``logs`` its metrics, ``rates`` its learning rates."""
        trainer, (outputs, batch) = self._trainer, trained
        about, number = (trainer, trainer.lightning_module), latest_batch(trainer)
        for callback in trainer.checkpoint_callbacks if saves else ():
            every = steps_between_checkpoints.of(callback)
            if every and trainer.global_step % every == 0:
                callback.on_train_batch_end(*about, outputs, batch, number)
        if not trainer.loggers or (1 + logged_step(trainer)) % max(1, trainer.log_every_n_steps):
            return
        for callback in trainer.callbacks if rates else ():
            if is_a(callback, rate_monitor):
                callback.on_train_batch_start(*about, batch, number)
        if logs and first_batch_flag(trainer) is not None:  # it has trained a batch
            last = last_batch_flag(trainer)
            last_batch_flag.set(trainer, True)  # else nothing is logged within a step of several batches
            log_row(trainer)()
            last_batch_flag.set(trainer, last)
