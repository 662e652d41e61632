"""One worker's part in a fit: what it does before and after batches, and at sync points."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_asgd.adapter.checkpointing import (
    KEY,
    Resumption,
    adopt_checkpoint_states,
    checkpoint_states,
    entry_of,
    follow_progress,
    progress_of,
)
from lightning_asgd.adapter.class_trees import apply_to_collection, looks_at_gradients
from lightning_asgd.adapter.data_choice import DataChoice
from lightning_asgd.adapter.data_mode import when_data_are_set_up
from lightning_asgd.adapter.elastic_run import AnyFleet, ElasticFleet
from lightning_asgd.adapter.fit_messages import FitMessages
from lightning_asgd.adapter.fixed_fleet import FixedFleet
from lightning_asgd.adapter.fixed_split import FixedSplit
from lightning_asgd.adapter.joint_decisions import JointDecisions, when_epochs_end
from lightning_asgd.adapter.last_checkpoint import LastState
from lightning_asgd.adapter.leased_loop import LeasedLoop
from lightning_asgd.adapter.partitioned_caches import PartitionedCaches
from lightning_asgd.adapter.restarted_nsync import restarted_nsync
from lightning_asgd.adapter.sync_callback import SyncPoints, is_monitored
from lightning_asgd.algorithms.base import Payload, Run
from lightning_asgd.config import ExchangeConfig
from lightning_asgd.monitoring.meter import Meter, Waited
from lightning_asgd.numerics import zero_nonfinite
from lightning_asgd.optim import share_posterior
from lightning_asgd.protocol import Place, SyncReport
from lightning_asgd.worker.collectives import Collectives, Phase
from lightning_asgd.worker.lease_client import DataLeases
from lightning_asgd.worker.sync_point import all_together, synchronize
from lightning_asgd.worker.synchronizer import Synchronizer, Training, run
from lightning_asgd.worker.trained_units import TrainedUnits
from lightning_asgd.worker.worker_setup import Start, make_identical, named_state, newly_trainable, set_up

__all__ = ["FitSession"]

log = logging.getLogger(__name__)


class FitSession:
    """One fit of one worker, from the strategy's set-up to its teardown. All workers create theirs together.

    Args:
        trainer: the Trainer; its module is on its device.
        membership: the worker's membership; it has joined.
        config: when and how to exchange.
        resume: what to resume from.
        split: every worker is to have its own part of the data.

    Attributes:
        synchronizer: shares the worker's weights.
        samples: what the servers have collected of the weights, on worker 0 at the end.

    Raises:
        ConfigurationError: the module has no trainable parameter, or one without a shape yet.
        LayoutMismatchError: the workers' modules differ.
    """

    def __init__(
        self,
        trainer: Any,
        membership: AnyFleet,
        config: ExchangeConfig,
        resume: Resumption,
        units: TrainedUnits,
        *,
        split: bool,
    ) -> None:
        self._trainer = trainer
        self._membership = membership
        self._run = membership if isinstance(membership, ElasticFleet) else None
        self._config, self._resume, self._units = config, resume, units
        self._meter: Meter | None = None  # None until metrics are collected
        self._period = 0  # steps between two exchanges, if it follows from the fit
        self.samples: list[dict[str, Tensor]] = []
        self.last: LastState | None = None  # set when the main process is gone
        waits = config.algorithm.waits or config.algorithm.payload is Payload.LAYERS
        self._messages = FitMessages(trainer, membership, config, self._waited)
        collective_s = config.timeouts.collective_s
        self._leases = DataLeases(lambda: membership.client, timeout_s=collective_s, rejoin=self._rejoin)
        split = split or waits or membership.alone
        self._choice = DataChoice(trainer, membership, self._leases, resume.take_data, split=split)
        self._caches = PartitionedCaches(trainer, membership)
        if membership.entry is not None:  # the others have continued since the checkpoint
            resume.versions, resume.servers = None, ()
            resume.data = (membership.entry.progress or {}).get("data", {})
        about = self._leases, is_monitored(trainer), units, lambda: self._period, lambda: trainer.optimizers
        late = not looks_at_gradients(self._module)
        self._training = Training(self._reset_nonfinite_state, self._lr, *about, late_steps=late)
        self.synchronizer = self._set_up()
        if (servers := resume.take_servers()) and trainer.is_global_zero:
            self.synchronizer.restore(servers)
        self._undo = [
            JointDecisions(trainer, self).close,
            when_epochs_end(trainer, self._agree_to_stop),
            when_data_are_set_up(trainer, self._on_data),
            self._caches.close,
        ]

    @property
    def data(self) -> FixedSplit | LeasedLoop:
        """The loop over the training data; another object may take its place at the start of an epoch."""
        return self._choice.loop

    @property
    def _module(self) -> Any:
        return self._trainer.lightning_module

    @property
    def _collectives(self) -> Collectives:
        return self._membership.collectives

    def _on_data(self) -> None:
        self._choice.on_data()
        self._caches.on_data()

    def begin(self) -> None:
        """Start from the progress of the others. The optimizers exist by now."""
        trainer, entry = self._trainer, self._membership.entry
        if entry is not None:
            follow_progress(trainer, entry.progress)
        if self._run is not None and self._run.entry is not None:
            self._run.adopt_checkpoints(trainer)
        workers = self._membership.rank_and_size[1]
        share_posterior(trainer.optimizers, trainer.global_rank, self._config.algorithm.chains(workers))
        self._period = restarted_nsync(self._config, trainer, workers)
        if isinstance(self._membership, FixedFleet):
            self._membership.publish_chief_state(trainer)
        optimizers, precision = tuple(trainer.optimizers), str(trainer.precision_plugin.precision)
        run = Run(trainer.world_size, trainer.num_nodes, self._config.npush, optimizers, precision)
        self._config.algorithm.check(run)

    def close(self) -> None:
        """Restore the Trainer and free the buffers."""
        for undo in self._undo:
            undo()
        self.synchronizer.close()

    def _set_up(self) -> Synchronizer:
        module, membership, run, entry = self._module, self._membership, self._run, self._membership.entry
        start = Start(self._resume.take_versions(), fill=True if run is not None else None)
        if entry is not None:
            start = replace(start, fill=False, layout=entry.layout, constants=entry.constants if run is None else None)
        client, collectives = membership.client, membership.collectives
        synchronizer = set_up(client, collectives, module, self._config, self._training, start)
        exchanged = {spec.name for spec in synchronizer.layout.tensors}
        constants = {n: t for n, t in named_state(module).items() if n not in exchanged}
        membership.share_first_values(self._trainer, synchronizer.layout, constants, self._resume)
        membership.restore_servers(synchronizer, lambda: self._leases.part)
        return synchronizer

    def set_up_again(self) -> None:
        """Allocate the module's shards again, with the chief's weights. All workers call it together."""
        before = self.synchronizer
        if isinstance(self._membership, ElasticFleet):
            self._membership.refuse_another_layout()
        make_identical(self._collectives, newly_trainable(self._module, before.layout), mean=True)
        self._resume.versions = list(before.versions)
        self._collectives.barrier("new layout")
        before.close()
        self._membership.begin_generation()
        self.synchronizer = self._set_up()
        self.synchronizer.stats = before.stats

    def _has_grown(self) -> bool:
        """Whether parameters were unfrozen: by a callback, on every worker."""
        return bool(newly_trainable(self._module, self.synchronizer.layout))

    # ------------------------------------------------------------------ every batch

    def share_data(self) -> None:
        """Have the training dataloader yield what this worker is granted, if the data can be leased.

        Called when training and epochs begin.
        """
        self._choice.choose()
        if self._run is not None:  # others may have joined or left since the latest epoch
            self._run.begin_epoch()
            self._trainer.strategy.announce()
            self._period = restarted_nsync(self._config, self._trainer, self._run.rank_and_size[1])
        self._messages.start("data by speed" if self.data.installed else "data in fixed parts", self._period)

    def before_batch(self, batch: Any) -> None:
        """Between two batches: merge a reply that has arrived, and exchange if that is due."""
        self._membership.check_session()
        if self._run is not None:
            self._run.attachment.update()
        if self._collectives.phase in (Phase.SYNC, Phase.ENTERING):
            if self._run is not None and self.in_search:
                self._run.refuse_a_search()
            if self._has_grown():
                self.set_up_again()
            run(self.synchronizer.begin())
            self._membership.begin_interval(self.synchronizer, self.data.place, self._progress)
        for _ in self.synchronizer.advance():
            pass  # what it yields it waits for itself
        self.data.before_batch(batch)
        if self._units.name:
            self._units.begin(batch)

    def after_step(self) -> None:
        """An optimizer has taken its step."""
        if self._units.name:
            self._units.step()
        self.synchronizer.count_step()
        if self._module.automatic_optimization:
            self.data.after_batch(self.synchronizer, self._discard)

    def after_batch(self) -> None:
        """Decide what follows a training batch."""
        self.data.after_batch(self.synchronizer, self._discard)
        self.data.before_next()

    def _discard(self) -> None:
        """Discard the update of a batch that other workers have trained."""
        self._units.discard()
        if self.synchronizer.moved:  # else the module may hold a callback's weights, which the servers do not have
            run(self.synchronizer.fetch())
        self._module.zero_grad()

    def _rejoin(self) -> None:
        """Rejoin: this worker missed its heartbeats and was excluded."""
        rank = self._trainer.global_rank
        log.warning("Worker %d missed its heartbeats and was excluded; it rejoins with the servers' weights.", rank)
        run(self.synchronizer.come_back())

    def _lr(self) -> float:
        """Learning rate of the first parameter group; 0 if there is no optimizer."""
        groups = [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
        return float(groups[0]["lr"]) if groups and "lr" in groups[0] else 0.0

    def _reset_nonfinite_state(self) -> None:
        """After a rejected update: zero non-finite optimizer state, or the next update would be rejected too."""
        log.warning(
            "[worker %d step %d] The servers rejected an update with NaN or infinity (%d so far); training continues "
            "from the servers' weights. Lower the learning rate or clip gradients if this repeats.",
            self._trainer.global_rank,
            self.synchronizer.stats.steps,
            self.synchronizer.stats.refused,
        )
        for optimizer in self._trainer.optimizers:
            zero_nonfinite(optimizer.state)

    # ------------------------------------------------------------------ sync points

    @property
    def in_search(self) -> bool:
        """Whether a callback searches a learning rate or batch size, which every worker does for itself."""
        return not any(isinstance(callback, SyncPoints) for callback in self._trainer.callbacks)

    @property
    def halted(self) -> bool:
        """Whether another worker has ended the epoch for all, before all of its data were trained."""
        return self.data.halted

    def synchronize_within_epoch(self, mine: Place, *, stops: bool) -> Place:
        """Synchronise where a worker validates, or where its epoch ends; see :class:`JointDecisions`."""
        mine = replace(mine, batches=self.data.batches)
        met = self.sync_point("validation or epoch end", mine, halt=stops and not self._membership.comes_and_goes)
        together = all_together(m.place or mine for m in met.values())
        return replace(together, batches=self.data.count(together.step, together.batches))

    def on_epoch_begin(self) -> None:
        """An epoch begins."""
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
        if self._collectives.phase is not Phase.SYNC or self._membership.comes_and_goes:
            self.sync_point("epoch end")

    def sync_point(self, name: str, place: Place | None = None, *, halt: bool = False) -> dict[int, SyncReport]:
        """Wait for all living workers, give all the same bits of the servers' weights, and return their reports."""
        trainer, membership, synchronizer = self._trainer, self._membership, self.synchronizer
        if self._run is not None:
            self._run.attachment.update()
        if self._collectives.phase is Phase.ENTERING:  # stopped before its first batch
            membership.begin_interval(synchronizer, self.data.place, self._progress)
        run(synchronizer.flush())
        all_have_pushed = self.data.leave(synchronizer.stats.steps, halt=halt)
        trained = self._collectives.phase is Phase.ASYNC
        self._collectives.phase = Phase.SYNC
        grown = self._has_grown()
        self.report_metrics()
        board, waits = membership.board, self._config.algorithm.waits
        checkpoints, chief = checkpoint_states(trainer), self._collectives.chief
        mine = SyncReport(
            synchronizer.moved, trainer.should_stop, grown, checkpoints, board.mine, None, place, trained, halt
        )
        met = synchronize(
            membership.client,
            self._collectives,
            synchronizer,
            name,
            mine,
            all_have_pushed=all_have_pushed,
            always=waits or membership.comes_and_goes,
        )
        self.data.check_first_batches()
        board.update({rank: m.figures for rank, m in met.items()}, board.living if membership.comes_and_goes else met)
        trainer.should_stop = any(m.should_stop for m in met.values())
        if isinstance(membership, FixedFleet):
            theirs = met[chief].checkpoints if chief in met else membership.published_checkpoints(checkpoints)
            adopt_checkpoint_states(trainer, theirs)
            membership.publish_chief_state(trainer)
        if any(m.grown for m in met.values()):
            self.set_up_again()
        if any(m.trained for m in met.values()) and not any(m.moved for m in met.values()):
            # A pass without steps is for batch-norm statistics, which reach the servers only with steps.
            make_identical(self._collectives, named_state(self._module), mean=True)
        for averaged in _callback_modules(trainer):
            make_identical(self._collectives, named_state(averaged), mean=True)
        return met

    def _agree_to_stop(self) -> None:
        """Stop all workers where one stops: hooks after the sync point may have set it on some workers only."""
        should_stop = self._trainer.should_stop
        self._trainer.should_stop = self._membership.agree_to_stop(should_stop, self._progress)

    def _progress(self) -> dict[str, Any]:
        """The progress that a joining worker needs."""
        progress = progress_of(self._trainer)
        self.data.to_ddp_counters(progress["loops"]["fit_loop"])
        return progress

    def end(self) -> None:
        """Synchronise the final weights, including what callbacks changed."""
        if self._collectives.phase is Phase.ASYNC:
            self.sync_point("train end")  # a search for a learning rate puts all callbacks aside, ours too
        elif self._trainer.is_global_zero:
            self._collect_samples()
        make_identical(self._collectives, named_state(self._module), mean=True)
        if self._run is not None and not self._trainer.is_global_zero:
            self._run.adopt_checkpoints(self._trainer)
        self._choice.end()
        self._membership.end_entries()
        self._note_losses()
        if not self.in_search:
            self._messages.end(self.synchronizer.stats)

    def _note_losses(self) -> None:
        """Note which workers and servers were lost during the fit."""
        stats, membership = self.synchronizer.stats, self._membership
        stats.servers_replaced = sum(membership.client.connection.restored)
        if isinstance(membership, FixedFleet) and self._trainer.is_global_zero:
            stats.lost_workers = membership.lost_workers()

    def _collect_samples(self) -> None:
        """Fetch the samples that the servers have kept. No worker pushes any more."""
        algorithm = self._config.algorithm
        if not algorithm.keep_at_most:
            return
        self.samples = self.synchronizer.samples()
        if not self.samples:
            log.warning(
                "%s kept no samples: training ended at version %d, which counts pushes. Train longer, or lower its "
                "burn_in and thin.",
                type(algorithm).__name__,
                max(self.synchronizer.versions),
            )

    # ------------------------------------------------------------------ metrics

    def measure(self, epoch: Callable[[], float]) -> Meter:
        """Start measuring what this worker trains and where its time goes."""
        self._meter = Meter(lambda: self.synchronizer.stats, self._waited, epoch, tokens=self._tokens)
        return self._meter

    def _tokens(self) -> float:
        return self._units.total if self._units.name == "tokens" else 0.0

    def report_metrics(self) -> None:
        """Post this worker's metrics to the board, if it is measured: the next heartbeat sends them."""
        if self._meter is not None:
            self._membership.board.post(self._collectives.rank, self._meter.read())

    def _waited(self) -> Waited:
        stats = self.synchronizer.stats
        sync_s = stats.sync_wait_s + self._collectives.waited_s + self._leases.others_wait_s
        return Waited(stats.wait_s, sync_s, self._leases.granted_wait_s)

    # ------------------------------------------------------------------ checkpoints

    @property
    def _writes_alone(self) -> bool:
        """Whether this worker writes checkpoints without asking the others: the chief between two sync points."""
        return self._collectives.phase is Phase.ASYNC and bool(self._trainer.is_global_zero)

    def catch_up(self) -> dict[str, Tensor]:
        """What a checkpoint holds instead of the module's tensors on the chief between sync points, by their keys."""
        instead = self.last.weights if self.last else self.synchronizer.catch_up() if self._writes_alone else {}
        if not instead:
            return {}
        names = {id(t): name for name, t in named_state(self._module).items()}
        keys = {key: names.get(id(t)) for key, t in self._module.state_dict(keep_vars=True).items()}
        return {key: instead[name] for key, name in keys.items() if name in instead}

    def complete(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint what a fit needs to resume, with every worker's optimizers and schedulers.

        In the asynchronous phase the others are not asked: they resume with the chief's.
        """
        mine = {key: checkpoint[key] for key in ("optimizer_states", "lr_schedulers")}
        mine = apply_to_collection(mine, Tensor, lambda t: t.detach().cpu())
        workers = self._membership.gather_optimizer_states(mine)
        is_writer = self._trainer.is_global_zero
        servers = self.last.servers if self.last else self.synchronizer.state() if is_writer else []
        entry = entry_of(self.synchronizer.versions, self._config.algorithm_name, servers, workers)
        if is_writer:
            held = self.last.held if self.last else self.synchronizer.caught_up if self._writes_alone else None
            self.data.save(entry, checkpoint["loops"]["fit_loop"], held, final=self.last is not None)
        checkpoint[KEY] = entry


def _callback_modules(trainer: Any) -> list[Any]:
    """Extra modules that callbacks keep, such as averages of the trained module's weights."""
    held = (value for callback in trainer.callbacks for value in vars(callback).values())
    return [value for value in held if isinstance(value, Module) and value is not trainer.lightning_module]
