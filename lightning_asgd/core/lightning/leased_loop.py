"""Lightning's training loop where workers train different numbers of batches: what is set in it, and when.

Lightning counts each worker's own batches, and derives from this count the epoch's end, validations, steps of
learning-rate schedules and ``max_steps``. Under DDP the count is equal everywhere. Here all of these follow the joint
progress of all workers divided by their number, which is what the count would be if all were equally fast. So does
``trainer.global_step``. ``batch_idx`` stays the worker's own, and ``trainer.num_training_batches`` is the number of
batches that it will probably train in the epoch.

Where batch sizes differ, progress counts in batches of the *reference* size, the first worker's.

Set here, as :mod:`~lightning_asgd.core.lightning.private_names` calls it: ``expected_batches``, ``validates_after``,
``last_batch_flag``, the fetcher's length and whether it is done, the ``frequency`` of schedulers that step with
batches, and the counts behind ``global_step`` and the loggers' step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from lightning_asgd.core.foundation.ranges import common, merged
from lightning_asgd.core.leases.client import DataLeases, Live
from lightning_asgd.core.leases.plan import Plan
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.data_mode import accumulation, workers_of
from lightning_asgd.core.lightning.loop_counters import (
    NEVER,
    BatchSchedules,
    StepCounts,
    count_batches,
    is_automatic,
    show_expected,
    sync_intervals,
    tell_last,
    validation_marks,
)
from lightning_asgd.core.lightning.private_names import (
    batch_in_epoch,
    batches_begun,
    count_saved_batches,
    epochs_begun,
    expected_batches,
    keep_loading,
    last_batch_flag,
    resumes_epoch,
    validates_after,
)
from lightning_asgd.core.lightning.sampled_data import LeasedData
from lightning_asgd.core.protocol import Epoch
from lightning_asgd.core.worker.fleet import Fleet
from lightning_asgd.core.worker.synchronizer import Held, Synchronizer, run


class LeasedLoop(Live):
    """The training loop of one fit whose data are set up and can be leased; ``resumed``: see :meth:`save`."""

    def __init__(
        self, trainer: Any, membership: Fleet, leases: DataLeases, resumed: Mapping[str, Any], data: LeasedData
    ) -> None:
        self.trainer, self.leases, self._data = trainer, leases, data
        self._membership = membership
        self.workers = workers_of(trainer)
        self._share = 1 / self.workers  # this worker's part of the batches that are left, as known last
        self._batch = 1  # units
        self._resumed = dict(resumed)
        self._begins = False  # whether an epoch has begun, and none of its batches was fetched
        self._most = self._expected = 0.0  # batches of an epoch per worker that Lightning counts; infinity if unknown
        self._batches = 0  # the same; of the reference size, if all are equally fast
        self.nominal: float | None = None  # _expected while an epoch runs, when Lightning is given other numbers
        self._interval: Any = 0  # batches between two validations
        self._schedules = BatchSchedules(trainer)
        within = resumes_epoch(trainer) and not last_batch_flag(trainer)
        self._batches_before = batches_begun(trainer) - (batch_in_epoch(trainer) if within else 0)
        self._steps_before = 0.0  # the present epoch, or as many as if it had begun with its present number of batches
        self._joins = True  # whether its very first batch has not begun
        # Of the present epoch.
        self._accumulate = 1  # batches per optimizer step, as all count them
        self._given = 1  # the same, as this worker's Trainer had it last
        self._uniform = True  # whether all count alike
        self._validates: frozenset[int] = frozenset()  # sync intervals that end with a validation
        self._cut = False  # whether max_steps ends it before its data does
        self.counts = StepCounts(trainer)
        self._idle = True  # whether none of its batches has begun
        self._ended = True  # whether the latest batch is finished
        self._interval_done = False  # whether all have trained the sync interval, and this worker knows
        self._epoch_done = False  # whether it was the epoch's last, and all data have been trained
        self._stopped = False  # whether this worker trains no more of the epoch
        self._told_last = False  # whether the program knows of its last batch
        self._trained: int | None = None  # units of the epoch that all have trained, between two batches
        self._counted = 0  # batches of a worker that others have counted, between two batches
        self._missing_batches = 0  # batches of the step that ends with the present one, of those that Lightning expects
        self._steps_kept: int | None = None  # Lightning's batches per step, while it must take none

    # ------------------------------------------------------------------ once per epoch

    @property
    def installed(self) -> bool:
        """Whether the training dataloader is still the same."""
        return self._data.installed

    def install(self, data: LeasedData, batch: int) -> None:
        """Have the training dataloader, a new one, yield what is granted. To be called when an epoch begins."""
        self._batch = batch or 1
        self._data.uninstall()
        self._data = data
        self._data.install(self._batch, self._opened)
        self._most = expected_batches(self.trainer)
        self._batches = self._data.count(self._most)
        self._begins = True
        self._data.start()
        self._begins = False

    def begin_epoch(self) -> None:
        """An epoch begins: until its first batch, the data are iterated over by Lightning, not by the program."""
        self._begins = True

    def _opened(self) -> Plan | None:
        """The epoch that begins now; None if the program iterates over the data."""
        return self._plan() if self._begins else None

    def _plan(self) -> Plan:
        """The epoch that begins now."""
        trainer, leases = self.trainer, self.leases
        number = epochs_begun(trainer)
        key = f"{self._membership.session}/{number}"
        if leases.opened == key:
            return leases.plan
        units, order, shards = self._data.begin_epoch(number, self.workers * self._data.count(self._most))
        self._expected = self.nominal = min(self._most, expected_batches(trainer))  # callbacks may have changed it
        self._batches = self._data.count(self._expected)
        self._interval = validates_after(trainer)
        own = accumulation(trainer, number)
        self._accumulate, self._uniform = self._membership.of_first_worker(own), True
        accumulate = self._per_step(self._accumulate, units)
        position = batch_in_epoch(trainer) if resumes_epoch(trainer) else 0  # of a file from within an epoch
        self.counts.begin_epoch()
        resumed, self._resumed = self._resumed, {}
        resumes = (resumed.get("epoch"), resumed.get("order")) == (number, order)
        workers = resumed.get("workers", self.workers) if resumes else self.workers  # when it was written
        fewer = position - round(position * workers / self.workers)  # batches, with the present number of workers
        position -= fewer
        self._schedules.stepped = position if position < self._batches else 0
        # The worker that wrote it may not have counted all steps that its batches stand for.
        counted = self.counts.step - self._schedules.stepped // self._accumulate
        known = resumes and "steps_before" in resumed
        self._steps_before = resumed["steps_before"] + fewer / self._accumulate if known else counted
        self._idle, self._given = True, own
        self._interval_done = self._epoch_done = self._stopped = self._told_last = False
        ends, self._validates = self._sync_intervals(units, accumulate)
        units, step = ends[-1], self._batch * accumulate
        done: tuple[tuple[int, int], ...] = ()
        if resumes and (not shards or resumed.get("units") == shards[-1]):
            done = tuple(common(resumed["done"], 0, shards[-1] if shards else units))  # max_steps may be smaller now
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
        elif self._schedules.stepped and not shards:  # the checkpoint is of another kind of run
            trained = round(self._schedules.stepped * self.workers / accumulate) * step
            done = ((0, trained),) if trained <= units - self.workers * step else ()
        return self._data.plan(Epoch(key, units, ends, order, done, step, shards), self._per_step(own, units))

    def _per_step(self, batches: int, units: int) -> int:
        """Batches per step of what is granted: every worker needs one in each sync interval."""
        return max(1, min(batches, units // (self._batch * self.workers)))

    def _sync_intervals(self, units: int, accumulate: int) -> tuple[tuple[int, ...], frozenset[int]]:
        """Ends of the sync intervals in units; and which intervals a validation follows."""
        trainer, workers, most = self.trainer, self.workers, None
        if trainer.max_steps != -1:
            left = trainer.max_steps - math.floor(self._steps_before)
            most = workers * left * self._accumulate // accumulate
        self._cut = most is not None and left < math.ceil(self._batches / self._accumulate)
        step = self._batch * accumulate
        marks = validation_marks(trainer, self._interval, self._batches, self._batches_before)
        last = {mark: math.ceil(units / step) for mark in marks if mark == self._batches}
        wanted = {last.get(mark, round(mark * workers / accumulate)) for mark in marks}
        return sync_intervals(units, step, workers, wanted, most)

    # ------------------------------------------------------------------ every batch

    def before_batch(self, batch: Any) -> None:
        """A batch has been fetched: keep Lightning from ending the epoch by its own count."""
        trainer, leases = self.trainer, self.leases
        if self.counts.begin_batch():
            self._steps_before = self.counts.stepped - self._schedules.stepped
        self._idle = self._interval_done = self._epoch_done = self._stopped = self._ended = self._begins = False
        self._trained, self._counted = None, 0
        private_names.keep_fetching(trainer)
        last = self._end_step()
        validates_after.set(trainer, NEVER)
        if leases.share < 0.999:  # else no other worker's speed is known yet
            self._share = leases.share
        units, begun = leases.plan.epoch.units - leases.progress, batch_in_epoch(trainer)
        left = units * self._share / (leases.plan.batch or 1) - (begun - 1) % self._given  # a step counts at its end
        expected_batches.set(trainer, begun + (0 if last else max(1, math.ceil(left) - 1)))
        show_expected(trainer.progress_bar_callback, max(begun + 1, expected_batches(trainer)))  # no end yet
        self._schedules.suspend()
        if self._joins and (self._membership.comes_and_goes or self._membership.entry is not None):
            self._catch_up()
        self._joins = False

    def _end_step(self) -> bool:
        """Have Lightning step with the last batch granted for a step. Returns whether it probably ends the epoch."""
        trainer, leases = self.trainer, self.leases
        if private_names.trains_statistics_only(trainer):  # no gradients: a pass for statistics only
            if trainer.accumulate_grad_batches != NEVER:
                self._steps_kept = trainer.accumulate_grad_batches
                trainer.accumulate_grad_batches = NEVER
        elif trainer.accumulate_grad_batches != self._given:
            self._given = trainer.accumulate_grad_batches
            self._steps_before += self._position / self._accumulate - self._position / self._given
            self._accumulate, self._uniform = self._given, False  # others may change it at another time
            leases.accumulate(self._per_step(self._given, leases.plan.epoch.units))
        steps = leases.closes and trainer.accumulate_grad_batches != NEVER
        self._missing_batches = -batch_in_epoch(trainer) % trainer.accumulate_grad_batches if steps else 0
        manual = not is_automatic(trainer)  # it may take a last step, or step a schedule
        last = not (self._told_last or self._cut) and leases.ends(waits=manual)  # told once: more may come all the same
        self._told_last |= last
        last_batch_flag.set(trainer, self._missing_batches > 0 or last)
        return last

    def after_batch(self, synchronizer: Synchronizer, discard: Callable[[], None]) -> None:
        """Find out whether there is another batch before the next sync point. ``discard`` drops what is not pushed."""
        if self._ended:
            return
        self._ended = True
        leases, steps, resumes = self.leases, synchronizer.stats.steps, False
        if not leases.end_batch(steps):
            discard()
        more = leases.more(steps - synchronizer.unacknowledged)
        if not more:
            with leases.flushing():
                run(synchronizer.flush())
            more = resumes = leases.wait(steps - synchronizer.unacknowledged)
        self._interval_done = not more
        self._epoch_done = self._interval_done and self._over and not leases.halted
        if self._interval_done and leases.exhausted:  # now it is known how many there are
            self._batches = math.ceil(leases.reached / self._batch / self.workers)
        tell_last(self.trainer, last=self._epoch_done)
        self._step_schedules()
        if more and leases.dry:
            keep_loading(self.trainer)
        if resumes:
            run(synchronizer.begin())

    def before_next(self) -> None:
        """Set the counters after a batch, before Lightning decides what follows."""
        trainer, leases, shown = self.trainer, self.leases, batch_in_epoch(self.trainer)
        if self._missing_batches:  # the next step begins where Lightning's count has it begin
            batch_in_epoch.shift(trainer, self._missing_batches)
            expected_batches.set(trainer, expected_batches(trainer) + self._missing_batches)
            self._missing_batches = 0
        self.counts.end_batch()
        self.counts.set(self._next_stepped(), ends=self._epoch_done)
        if not self._interval_done or leases.halted:
            return
        self._trained = leases.reached
        if self._validates_now:
            across = trainer.check_val_every_n_epoch is None
            latest = private_names.latest_batch_ever if across else private_names.latest_batch
            validates_after.set(trainer, 1 + latest(trainer))
        if self._epoch_done:
            expected_batches.set(trainer, batch_in_epoch(trainer))
        if leases.last:  # also where max_steps ends the epoch
            show_expected(trainer.progress_bar_callback, shown)
        leases.next_interval()
        if not self._epoch_done:
            keep_loading(trainer)  # while others wait, or validation runs

    # ------------------------------------------------------------------ sync points and the end

    @property
    def halted(self) -> bool:
        """Whether another worker has ended the epoch for all, before all of it was trained."""
        return self._interval_done and self.leases.halted

    @property
    def batches(self) -> int:
        """Batches of the epoch that count for this worker: as if all were equally fast."""
        return self._schedules.stepped

    def check_first_batches(self) -> None:
        """Nothing to do: leases give no two workers the same data."""

    def leave(self, acknowledged: int, *, halt: bool) -> bool:
        """Train no more of this epoch. True if this worker knows that all data were trained and pushed."""
        if self._idle or self._interval_done:
            return not self._idle
        self._interval_done = self._stopped = True
        self.leases.stop(acknowledged, halt=halt)
        return False

    def count(self, step: int, batches: int) -> int:
        """Count the optimizer steps that all have taken; return the batches that all have counted now.

        The arguments are the most that a worker has counted, by estimates: schedules have stepped as often.
        """
        if self._idle:
            return batches
        known = not self._membership.comes_and_goes  # else others may train on
        if self._stopped or self.leases.halted:  # else it is known where all are
            epoch = self.leases.plan.epoch
            self._trained = sum(last - first for first, last in self.leases.done())
            self._epoch_done = self._over if self.leases.exhausted else self._trained == epoch.units and not self._cut
        self._counted = 0 if known else batches
        stepped = self._next_stepped()
        if is_automatic(self.trainer):
            if self._uniform:  # else each worker has its own count
                step = stepped if known else max(step, stepped)
            stepped = step
        self._step_schedules(batches)
        self.counts.raise_to(step, stepped)
        return self._position

    def end_epoch(self, batches: int) -> None:
        """Set Lightning's counts to the joint ones, and restore its own settings until the next epoch."""
        skipped, self._ended = not self._ended, True  # the latest batch, of which Lightning counts that it has begun
        count_batches(self.trainer, batches + skipped)
        self.nominal = None
        if self._idle:
            return
        self._idle = True
        self._batches_before += batches
        last_batch_flag.set(self.trainer, self._epoch_done)
        self._restore_counts()

    @property
    def _over(self) -> bool:
        """Whether all data of the epoch have been trained once the present sync interval is over."""
        return self.leases.exhausted or (self.leases.last and not self._cut)

    @property
    def _validates_now(self) -> bool:
        """Whether a validation follows the present sync interval."""
        leases = self.leases
        if leases.reached == leases.plan.epoch.ends[leases.segment]:
            return leases.segment in self._validates
        every = math.inf if self.trainer.val_check_interval == 1.0 else self._interval  # a length was too large
        return self._batches in validation_marks(self.trainer, every, self._batches, self._batches_before)

    def _restore_counts(self) -> None:
        self.nominal = None
        if self.installed:
            expected_batches.set(self.trainer, self._expected)
            validates_after.set(self.trainer, self._interval)
        if self._steps_kept is not None:
            self.trainer.accumulate_grad_batches, self._steps_kept = self._steps_kept, None

    def save(self, entry: dict[str, Any], held: Held | None, *, final: bool = False) -> None:
        """Add to a checkpoint the trained part of the present epoch.

        ``held``: units in its weights, on the chief between two sync points. ``final``: the servers answer no more.
        """
        entry["data"] = {} if self._idle or self._epoch_done else self._trained_of_epoch(held, final=final)

    @property
    def place(self) -> dict[str, Any] | None:
        """What :meth:`save` adds, between two sync intervals of an epoch; else empty."""
        if self._idle or not self._trained:
            return {}
        shards = self.leases.plan.epoch.shards  # of which any units may have been trained
        return self._about(self.leases.done() if shards else ((0, self._trained),))

    def _trained_of_epoch(self, held: Held | None, *, final: bool) -> dict[str, Any]:
        epoch = self.leases.plan.epoch
        if held is None:
            return self._about(self.leases.done())
        if held[1] is None and not final:
            others = self.leases.done()
        else:
            others = held[1] or () if held[0] == epoch.key else epoch.done  # else of an earlier epoch
        return self._about(tuple(merged(sorted([*others, *self.leases.own]))))  # without what others have pushed since

    def _about(self, done: tuple[tuple[int, int], ...]) -> dict[str, Any]:
        epoch = self.leases.plan.epoch
        number = int(epoch.key.rpartition("/")[2])
        about = {"epoch": number, "order": epoch.order, "units": epoch.numbers, "steps_before": self._steps_before}
        return {**about, "workers": self.workers, "done": done}

    def to_ddp_counters(self, loops: dict[str, Any]) -> None:
        """Set a checkpoint's counts of batches to those of equally fast workers: DDP's."""
        if not self._idle:
            count_saved_batches(loops, self._position, self._batches_before + self._position)

    def restore(self) -> None:
        """Restore Lightning's own dataloader and counts."""
        self.leases.reset()
        self._restore_counts()
        self._data.uninstall()
        batches_begun.shift(self.trainer, self._batches_before - batches_begun(self.trainer))
        self._schedules.restore()

    # ------------------------------------------------------------------ helpers

    @property
    def _position(self) -> int:
        """Batches of this epoch that a worker would have trained by now, if all were equally fast."""
        if self._epoch_done:
            return self._batches
        trained = self.leases.progress if self._trained is None else self._trained
        return min(self._batches, max(self._counted, round(trained / self._batch / self.workers)))

    def _step_schedules(self, least: int = 0) -> None:
        """Advance the schedules that step with batches to where all workers would be if equally fast."""
        position = max(least, self._position) if self._interval_done else min(self._position, self._batches - 1)
        self._schedules.advance_to(position, self._accumulate, self._batches, self._steps_before)

    def _next_stepped(self) -> int:
        """The number of batches that have stepped, after a batch."""
        whole = math.ceil if self._epoch_done else math.floor
        position = self._position / self._accumulate
        target = whole(self._steps_before + position + 1e-6 * (-1 if self._epoch_done else 1))
        if self._interval_done:
            return target
        end = round(self.leases.plan.epoch.ends[self.leases.segment] / self._batch / self.workers)
        target = min(target, math.floor(self._steps_before + end / self._accumulate + 1e-6) - 1)
        # Estimates fluctuate; a worker as fast as the others should see every step.
        meanwhile = (self.leases.plan.batch or 1) / self._batch / self._accumulate / self.workers / self.leases.share
        return self.counts.stepped + max(0, min(target - self.counts.stepped, math.ceil(meanwhile)))

    def _catch_up(self) -> None:
        """Count the steps that the others have made in an epoch during which this worker joins."""
        self._step_schedules()
        if is_automatic(self.trainer):  # else only the module knows how many, after a batch
            steps = int(self._steps_before) + self._position // self._accumulate
            self.counts.set(max(self.counts.stepped, steps), ends=False)
