"""One worker's part in a fit: what it does before and after batches, and at sync points."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_asgd.core.algorithms.base import Payload, Run
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.lightning.checkpointing import (
    KEY,
    Resumption,
    checkpoint_states,
    entry_of,
    follow_progress,
    left_in,
    progress_in,
    progress_of,
    states_in,
)
from lightning_asgd.core.lightning.class_trees import looks_at_gradients, rank_zero_warn
from lightning_asgd.core.lightning.data_choice import DataChoice
from lightning_asgd.core.lightning.data_mode import when_data_are_set_up
from lightning_asgd.core.lightning.joint_decisions import JointDecisions, when_epochs_end
from lightning_asgd.core.lightning.leased_loop import LeasedLoop
from lightning_asgd.core.lightning.loop_counters import PassedSteps, steps_of_fit
from lightning_asgd.core.lightning.private_names import loaded_checkpoint
from lightning_asgd.core.lightning.sync_callback import SyncPoints, is_monitored
from lightning_asgd.core.protocol import JointReport, Place, SyncReport
from lightning_asgd.core.worker.collectives import Phase
from lightning_asgd.core.worker.feature import moments_of
from lightning_asgd.core.worker.fleet import Fleet
from lightning_asgd.core.worker.participation import Participation
from lightning_asgd.core.worker.session_client import pickled
from lightning_asgd.core.worker.synchronizer import Held, Skipped, run
from lightning_asgd.programs.batch_units import TrainedUnits
from lightning_asgd.programs.fit_messages import FitMessages
from lightning_asgd.programs.fixed_split import FixedSplit
from lightning_asgd.replacement.last_checkpoint import LastState


class FitSession(Participation):
    """One fit of one worker, from the strategy's set-up to its teardown. All workers create theirs together.

    With ``split`` every worker is to have its own part of the data. Raises a ``ConfigurationError`` if the module has
    no trainable parameter, or one without a shape yet, and a ``LayoutMismatchError`` if the workers' modules differ.
    """

    def __init__(
        self,
        trainer: Any,
        membership: Fleet,
        config: ExchangeConfig,
        resume: Resumption,
        units: TrainedUnits,
        *,
        split: bool,
    ) -> None:
        self._fetched, self._in_step = math.inf, False
        self._watched: list[Any] = []  # optimizers
        self.due: list[Callable[[], None]] = []
        late = not looks_at_gradients(trainer.lightning_module)
        about = trainer.lightning_module, membership, config, units
        super().__init__(*about, measure=is_monitored(trainer), late_steps=late)
        self.trainer, self._resume = trainer, resume
        self._moments = moments_of(self)
        self.last: LastState | None = None  # set when the main process is gone
        self.whole: dict[str, Any] | None = None  # a checkpoint with optimizer states that Lightning makes
        waits = config.algorithm.lockstep and not membership.comes_and_goes
        self._messages = FitMessages(trainer, membership, config, self._waited)
        split = split or waits or config.algorithm.payload is Payload.LAYERS or membership.alone
        split = split or (bool(trainer.overfit_batches) and not membership.comes_and_goes)  # validation has the same
        self._choice = DataChoice(trainer, membership, self._leases, lambda: resume.take("data"), split=split)
        resume.keep_for(None if membership.entry is not None else loaded_checkpoint(trainer))
        if membership.entry is not None:  # the others have continued since the checkpoint
            resume.data = (membership.entry.progress or {}).get("data", {})
        self._passed = PassedSteps(trainer, lambda: self._writes_files)
        self.synchronizer = self._set_up(resume.take("versions"))
        self._restore_servers()
        self._undo = [
            JointDecisions(trainer, self).close,
            when_epochs_end(trainer, self._agree_to_stop),
            when_data_are_set_up(trainer, self._choice.on_data, *self._moments["data_ready"]),
            *self._moments["close"],
        ]

    @property
    def data(self) -> FixedSplit | LeasedLoop:
        """The loop over the training data; another object may take its place at the start of an epoch."""
        return self._choice.loop

    @property
    def optimizers(self) -> Sequence[Any]:
        """The Trainer's."""
        optimizers: Sequence[Any] = self.trainer.optimizers
        return optimizers

    def _first_progress(self) -> dict[str, Any] | None:
        progress = progress_in(self.trainer)
        return None if progress is None else {**progress, "data": self._resume.data}

    def begin(self) -> None:
        """Start from the progress of the others. The optimizers exist by now."""
        trainer, entry = self.trainer, self.membership.entry
        if entry is not None:
            follow_progress(trainer, entry.progress)
            self.membership.adopt_checkpoints()
        self._share_posterior()
        self._find_period(steps_of_fit(trainer, self.config), rank_zero_warn)
        self.membership.publish_chief_state()
        optimizers, precision = tuple(trainer.optimizers), str(trainer.precision_plugin.precision)
        run = Run(trainer.world_size, trainer.num_nodes, self.config.npush, optimizers, precision)
        self.config.algorithm.check(run)
        self._watch_optimizers()
        self._load_tables()
        self.call_features("begin")

    def _watch_optimizers(self) -> None:
        """Be told of the steps of the Trainer's optimizers, also of those that a hook has put in their place."""
        for optimizer in self.trainer.optimizers:
            if any(optimizer is each for each in self._watched):
                continue
            self._watched.append(optimizer)
            self.tables.watch([optimizer])
            if self.config.gain:
                self._gain.watch([optimizer])
            if hasattr(optimizer, "register_step_post_hook"):
                self._undo.append(optimizer.register_step_post_hook(self.count_own_step).remove)

    def start_from_loaded(self) -> None:
        """Have the servers take what was loaded during the fit; all workers call it."""
        self._load_tables()
        self.set_up_again()
        self._restore_servers()
        self._resume.forget()  # what the search's checkpoint says of versions and data is not for this fit

    def _restore_servers(self) -> None:
        """Have the servers take what they had kept beside the weights of a checkpoint that was read."""
        if (servers := self._resume.take("servers")) and self._writes_files:
            self.synchronizer.restore(servers)

    def _load_tables(self) -> None:
        """Have the servers take the tables of a checkpoint that was read; all workers call it."""
        folder = self._resume.take("tables")
        if self.tables and folder is not None:
            self.tables.load(folder, asks=self._writes_files)

    def close(self) -> None:
        """Restore the Trainer and free the buffers."""
        for undo in (*self._undo, self._passed.unmute):
            undo()
        super().close()

    # ------------------------------------------------------------------ every batch

    def share_data(self) -> None:
        """Have the dataloader yield what this worker is granted, if the data can be leased. Called for each epoch."""
        self._choice.choose()
        if self.membership.comes_and_goes:  # others may have joined or left since the latest epoch
            self.membership.begin_epoch()
            self._share_posterior()
            self.trainer.strategy.announce()
            self._find_period(steps_of_fit(self.trainer, self.config), rank_zero_warn)
        self._messages.start("data shared dynamically" if self.data.installed else "data split equally", self._period)

    def note_fetched(self) -> None:
        """A batch has been fetched, and no other callback has been called for it."""
        self._passed.mute()
        self._fetched = time.perf_counter()

    def before_batch(self, batch: Any) -> None:
        """Between two batches: merge a reply that has arrived, and exchange if that is due."""
        callbacks_s = max(0.0, time.perf_counter() - self._fetched)
        self._passed.unmute()
        self.membership.check_session()
        if self.membership.comes_and_goes:
            self.membership.follow_chief()
        if self._collectives.phase in (Phase.SYNC, Phase.ENTERING):
            if self.in_search:
                self.membership.refuse_a_search()
            if self._has_grown():
                self.set_up_again()
            self._warn_of_mixed_weights()
            run(self.synchronizer.begin())
            self.membership.begin_interval(self.synchronizer, self.data.place, self._progress)
            self._untrained.begin_interval(self.synchronizer.stats.steps)
        else:
            self.call_features("between_batches")
        for _ in self.synchronizer.advance():
            pass  # what it yields it waits for itself
        self._leases.begin_batch(callbacks_s)
        self.data.before_batch(batch)
        if self._units.name:
            self._units.begin(batch)
        self.call_features("before_batch")

    @contextlib.contextmanager
    def step_of(self, optimizer: Any) -> Iterator[None]:
        """An optimizer takes a step inside, unless Lightning's GradScaler skips it."""
        self._watch_optimizers()
        hook, taken = None, [False]  # whether steps were skipped; left empty by a step that is not taken
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if scaled and hasattr(optimizer, "register_step_post_hook"):
            taken = []  # a fused optimizer decides on the device
            hook = optimizer.register_step_post_hook(lambda *_: taken.append(getattr(optimizer, "found_inf", False)))
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
            if hook is not None:
                hook.remove()
        skipped: Skipped = taken[-1] if taken else True
        if self._units.name:
            self._units.step()
        self.synchronizer.count_step(skipped)
        if self._module.automatic_optimization:
            self.data.after_batch(self.synchronizer, self._discard)

    def count_own_step(self, optimizer: object, *_: object) -> None:
        """Count an optimizer's step, unless the strategy counts it already."""
        if self._in_step:
            return
        if self._units.name:  # a step of optimizers(use_pl_optimizer=False), which the strategy does not see
            self._units.step()
        self.synchronizer.count_step(getattr(optimizer, "found_inf", False))

    def after_batch(self, outputs: Any, batch: Any) -> None:
        """Decide what follows a training batch."""
        self._passed.note(self.data.counts)
        self.call_features("after_batch")
        self.data.after_batch(self.synchronizer, self._discard)
        self.data.before_next()
        self._passed.write(self.data.counts, outputs, batch)
        self.call_features("batch_done")
        while self.due:
            self.due.pop()()

    def call_features(self, moment: str) -> None:
        """Call what features do at a moment; see :class:`~lightning_asgd.core.worker.feature.WorkerFeature`."""
        for call in self._moments[moment]:
            call()

    def _rejoin(self) -> None:
        super()._rejoin()
        self.call_features("rejoin")

    # ------------------------------------------------------------------ sync points

    @property
    def in_search(self) -> bool:
        """Whether a callback searches a learning rate or batch size, which every worker does for itself."""
        return not any(isinstance(callback, SyncPoints) for callback in self.trainer.callbacks)

    @property
    def halted(self) -> bool:
        """Whether another worker has ended the epoch for all, before all of its data were trained."""
        return self.data.halted

    def synchronize_within_epoch(self, mine: Place, *, stops: bool) -> Place:
        """Synchronise where a worker validates, or where its epoch ends; see :class:`JointDecisions`."""
        mine = replace(mine, batches=self.data.batches)
        met = self.sync_point("validation or epoch end", mine, halt=stops and not self.membership.comes_and_goes)
        together = met.place or mine
        self._passed.note(self.data.counts)
        batches = self.data.count(together.step, together.batches)
        self._passed.write_at_sync_point(self.data.counts, self._collectives)
        return replace(together, batches=batches)

    def end_batch(self) -> None:
        """Let Lightning log again: workers decide together at sync points only."""
        self._passed.unmute()

    def on_epoch_begin(self) -> None:
        """An epoch begins."""
        self._watch_optimizers()
        if not self.in_search:
            self.take_set_weights()
        self.data.begin_epoch()

    def any_stops(self, should_stop: bool) -> bool:
        """Whether any worker is to stop training, before an epoch or after a validation."""
        return self._collectives.decide(should_stop, all=False)

    def on_epoch_end(self, batches: int) -> None:
        """The epoch has ended for all: set the counts that all agreed on."""
        self.data.end_epoch(batches)

    def sync_before_validation(self) -> None:
        """Synchronise before a validation, unless all have just done so."""
        if self._collectives.phase not in (Phase.SYNC, Phase.ENTERING):
            self.sync_point("validation")

    def sync_at_epoch_end(self) -> None:
        """Synchronise, unless all have done so and nothing was trained since."""
        if self._collectives.phase is not Phase.SYNC or self.membership.comes_and_goes:
            self.sync_point("epoch end")
        self.call_features("pause")

    def sync_at_train_end(self) -> None:
        """Synchronise, and take what hooks have set since a sync point at which training ended."""
        if self._collectives.phase is Phase.SYNC:
            self.take_set_weights()
        self.sync_point("train end")

    def sync_point(self, name: str, place: Place | None = None, *, halt: bool = False) -> JointReport:
        """Wait for all living workers, give all the same bits of the servers' weights, and return the joint report."""
        trainer, membership, synchronizer = self.trainer, self.membership, self.synchronizer
        membership.follow_chief()
        if self._collectives.phase is Phase.ENTERING:  # stopped before its first batch
            membership.begin_interval(synchronizer, self.data.place, self._progress)
        run(synchronizer.flush())
        all_have_pushed = self.data.leave(synchronizer.stats.steps, halt=halt)
        trained = self._collectives.phase is Phase.ASYNC
        self._collectives.phase = Phase.SYNC
        grown = self._has_grown()
        self.report_metrics()
        board = membership.board
        collectives = self._collectives
        shares = collectives.real and collectives.rank == collectives.chief
        told = pickled(checkpoint_states(trainer)) if shares else None
        mine = SyncReport(synchronizer.moved, trainer.should_stop, grown, told, board.mine, None, place, trained, halt)
        met = self._meet(name, mine, all_have_pushed=all_have_pushed)
        self.data.check_first_batches()
        board.update(met.figures, board.living if membership.comes_and_goes else met.workers)
        trainer.should_stop = met.should_stop
        membership.agree_on_checkpoints(met.checkpoints, final=name == "train end")
        if self._check_grown(met):
            self.set_up_again(trained=True)
        membership.share_untrained(self._untrained, synchronizer.stats.steps)
        self.call_features("at_sync_point")
        return met

    def _agree_to_stop(self) -> None:
        """Stop all workers where one stops: hooks after the sync point may have set it on some workers only."""
        self.trainer.should_stop = self.membership.agree_to_stop(self.trainer.should_stop, self._progress)

    def _progress(self) -> dict[str, Any]:
        """The progress that a joining worker needs."""
        progress = progress_of(self.trainer)
        self.data.to_ddp_counters(progress["loops"]["fit_loop"])
        return progress

    def end(self) -> None:
        """Synchronise the final weights, including what callbacks changed."""
        if self._collectives.phase is Phase.ASYNC:
            self.sync_point("train end")  # a search for a learning rate puts all callbacks aside, ours too
        elif self.trainer.is_global_zero:
            self._collect_samples()
        self._share_last()
        if not self._writes_files:
            self.membership.adopt_checkpoints()
        self._choice.end()
        self.membership.end_entries()
        self._note_losses()
        if not self.in_search:
            self._messages.end(self.synchronizer.stats)
            self.call_features("end")

    # ------------------------------------------------------------------ checkpoints

    @property
    def _writes_files(self) -> bool:
        """Whether this worker writes checkpoints."""
        return bool(self.trainer.is_global_zero)

    @property
    def _writes_alone(self) -> bool:
        """Whether this worker writes checkpoints without asking the others: the chief between two sync points."""
        return self._collectives.phase is Phase.ASYNC and bool(self.trainer.is_global_zero)

    def catch_up(self) -> dict[str, Tensor]:
        """What a checkpoint holds instead of the module's tensors on the chief between sync points, by their keys."""
        instead = self.last.weights if self.last else self.synchronizer.catch_up() if self._writes_alone else {}
        return self._by_key(instead) if instead else {}

    @property
    def _held(self) -> Held | None:
        """What the weights of a checkpoint hold of others' updates; None if all workers wait."""
        alone = self._writes_alone or self.membership.comes_and_goes  # where others may train on meanwhile
        return self.synchronizer.caught_up if alone else None

    def complete(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint, unless of weights only, what a fit needs to resume, and every worker's optimizers.

        In the asynchronous phase the others are not asked. What is taken out on the chief is left out for all.
        """
        if checkpoint is not self.whole:
            return
        left = left_in(checkpoint) if self.trainer.is_global_zero else set()
        workers = self.membership.gather_optimizer_states(states_in(checkpoint))
        servers = (self.last.servers if self.last else self.synchronizer.state()) if "optimizer_states" in left else []
        entry = entry_of(self.synchronizer.versions, self.config.algorithm_name, servers, workers, left)
        if "loops" in left:
            self.data.save(entry, self.last.held if self.last else self._held, final=self.last is not None)
            self._passed.count_all_in(checkpoint["loops"]["fit_loop"])
            self.data.to_ddp_counters(checkpoint["loops"]["fit_loop"])
        checkpoint[KEY] = entry
