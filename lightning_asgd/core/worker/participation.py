"""One worker's part in training a module, for any program: its weights, its leases, what happens at sync points.

A Trainer's fit (``core/lightning/fit_session.py``) and a plain loop (``loops/session.py``) extend it with how they
count and when they end. What happens between two batches they do by themselves, since that costs time in every step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.numerics import zero_nonfinite
from lightning_asgd.core.leases.client import DataLeases, Live
from lightning_asgd.core.protocol import JointReport, SyncReport
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.fleet import Fleet
from lightning_asgd.core.worker.module_state import (
    average,
    fixed_tensors,
    make_identical,
    named_state,
    on_cpu,
    persistent_buffers,
)
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.setup import Start, newly_trainable, set_up, trainable_parameters
from lightning_asgd.core.worker.sync_point import synchronize
from lightning_asgd.core.worker.synchronizer import Synchronizer, Training, run
from lightning_asgd.core.worker.untrained_state import UntrainedTensors
from lightning_asgd.gain import Gain
from lightning_asgd.monitor.meter import Meter, Waited
from lightning_asgd.programs.batch_units import TrainedUnits
from lightning_asgd.programs.restarted_nsync import restarted_nsync
from lightning_asgd.programs.weight_changes import normed_embeddings
from lightning_asgd.sampling.optim import share_posterior
from lightning_asgd.tables.served.clients import TableClients

log = logging.getLogger(__name__)


class Participation(Live):
    """One worker's part in training a module. All workers of a job create theirs together, once they have joined.

    ``measure``: whether the distance to the servers is measured now and then. ``late_steps``: see :class:`Training`.
    ``samples``: what the servers have collected of the weights, on worker 0 at the end.
    """

    synchronizer: Synchronizer
    _leases: DataLeases
    _kind_of_leases = DataLeases

    def __init__(
        self,
        module: Module,
        membership: Fleet,
        config: ExchangeConfig,
        units: TrainedUnits,
        *,
        measure: bool,
        late_steps: bool,
    ) -> None:
        self._module = module
        self.membership = membership
        self.config, self._units = config, units
        self._gain = Gain(lambda: self._peers, self._summed)
        self._meter: Meter | None = None  # None until metrics are collected
        self._period = 0  # steps between two exchanges, if it follows from the training
        self._warned_of_mixing = False
        self.samples: list[dict[str, Tensor]] = []
        self._untrained = UntrainedTensors(module, lambda: self._exchanged)
        self.tables = TableClients(
            module, lambda: membership.client.connection, lambda: 1.0 / membership.rank_and_size[1]
        )
        collective_s = config.timeouts.collective_s
        leases = self._kind_of_leases(lambda: membership.client, timeout_s=collective_s, rejoin=self._rejoin)
        self._leases = self._leases_of_loop(leases)
        about = leases, measure, units, lambda: self._period, lambda: self.optimizers
        self._training = Training(self._reset_nonfinite_state, self._lr, *about, late_steps=late_steps)

    @property
    def optimizers(self) -> Sequence[Any]:
        """This worker's; none before they exist."""
        raise NotImplementedError

    @property
    def workers(self) -> int:
        """How many take part."""
        return self.membership.rank_and_size[1]

    def _summed(self, values: Tensor) -> Tensor:
        """The sum over the processes that have a part of the optimizers' states each."""
        return values

    @property
    def _peers(self) -> int:
        """How many take part now."""
        return len(self.membership.client.heard.living) or self.workers

    def _first_progress(self) -> dict[str, Any] | None:
        """Where training begins, for workers that join meanwhile; None at the very beginning."""
        raise NotImplementedError

    def _leases_of_loop(self, leases: DataLeases) -> Any:
        """The leases as the training loop sees them."""
        return leases

    @property
    def _collectives(self) -> Collectives:
        return self.membership.collectives

    # ------------------------------------------------------------------ set-up

    def _set_up(self, versions: list[int] | None, *, again: bool = False) -> Synchronizer:
        """Lay the module out over the servers; the first worker's weights begin at ``versions``, if these are given."""
        module, membership, entry = self._module, self.membership, self.membership.entry
        start = Start(versions, fill=True if membership.comes_and_goes else None, again=again)
        if entry is not None:
            constants = None if membership.comes_and_goes else entry.constants
            start = replace(start, fill=False, layout=entry.layout, constants=constants)
        synchronizer = self._enter(start)
        fixed = fixed_tensors(module, {spec.name for spec in synchronizer.layout.tensors})
        membership.share_first_values(synchronizer.layout, fixed, self._first_progress)
        membership.begin_untrained(self._untrained)
        membership.restore_servers(synchronizer, lambda: self._leases.part)
        self.tables.attach()
        return synchronizer

    def _enter(self, start: Start) -> Synchronizer:
        """Lay the module out over the servers, and take their weights."""
        return set_up(self.membership.client, self._collectives, self._module, self.config, self._training, start)

    @staticmethod
    def _check_grown(met: JointReport) -> bool:
        """Whether parameters were unfrozen; raises unless that is so on all workers or on none."""
        if met.grown and met.grown != met.workers:
            raise ConfigurationError(
                f"Parameters were unfrozen on workers {list(met.grown)}, not on "
                f"{sorted(set(met.workers).difference(met.grown))}. Expected the same on all: unfreeze them between "
                "two passes or epochs, because workers train different numbers of batches."
            )
        return bool(met.grown)

    def set_up_again(self, *, trained: bool = False) -> None:
        """Allocate the module's shards again, with the chief's weights. All workers call it together.

        With ``trained`` each worker may have trained by itself what was unfrozen since the last sync point.
        """
        before = self.synchronizer
        if trained:
            average(self._collectives, newly_trainable(self._module, before.layout))
        self.membership.begin_generation()
        before.close()
        self.synchronizer = self._set_up(list(before.versions), again=True)
        self.synchronizer.stats = before.stats

    def _has_grown(self) -> bool:
        """Whether parameters were unfrozen, on every worker."""
        return bool(newly_trainable(self._module, self.synchronizer.layout))

    def _find_period(self, steps: float, warn: Callable[[str], None]) -> None:
        """With ``nsync="restarted"``, set the period for a training in which each worker takes ``steps``."""
        self._period = restarted_nsync(steps, self.workers, self.optimizers, warn) if self.config.restarted else 0

    @property
    def _exchanged(self) -> set[str]:
        return {spec.name for spec in self.synchronizer.layout.tensors}

    # ------------------------------------------------------------------ what a program sets at a sync point

    def _set_by_program(self) -> list[str]:
        """Weights that the program has set since the latest fetch; None if it has replaced or unfrozen parameters."""
        if self._has_grown():
            return []
        normed = normed_embeddings(self._module)
        return [name for name in self.synchronizer.changed() if name not in normed]

    def take_set_weights(self) -> None:
        """Weights that a program has set at this sync point are the weights: the chief's, for all, unmixed.

        All workers call it together, after the program's hooks. Does nothing in an elastic run, whose workers have no
        sync point in common.
        """
        collectives, synchronizer = self._collectives, self.synchronizer
        if not collectives.real:
            return
        names = self._set_by_program()
        if not collectives.reduced("all_reduce", "weights that were set", bool(names), "any").value:
            return
        self._warn_of_ranks(collectives.gather("all_gather", "which weights were set", names))
        weights, connection, again = synchronizer.weights(), self.membership.client.connection, True
        while again:  # a server that was lost meanwhile was restored with the weights of before
            restored = list(connection.restored)
            synchronizer.replace(weights, sends=collectives.rank == collectives.chief)
            collectives.barrier("servers have the weights that were set")
            run(synchronizer.fetch())  # parks nothing: what others have kept for themselves is gone, too
            again = collectives.reduced("barrier", "all have them", restored != connection.restored, "any").value

    def _warn_of_ranks(self, names: Mapping[int, list[str]]) -> None:
        chief, setting = self._collectives.chief, sorted(rank for rank, theirs in names.items() if theirs)
        if len(setting) == len(names) or self._collectives.rank != chief:
            return
        log.warning(
            "Weights such as %r were set at a sync point on workers %s, not on %s. All workers take those of worker "
            "%d, which logs. Expected the same on all workers: set weights in code that does not depend on the rank.",
            names[setting[0]][0],
            setting,
            sorted(set(names).difference(setting)),
            chief,
        )

    def _warn_of_mixed_weights(self) -> None:
        """Warn once where weights were set at a sync point, and will be mixed with others."""
        if self._warned_of_mixing or self.membership.alone:
            return
        if names := self._set_by_program():
            self._warned_of_mixing = True
            log.warning(
                "Weights such as %r were set on worker %d while other workers train, and are pushed as if a step had "
                "made the change: the servers mix it with the updates of others. Expected weights to be set at a sync "
                "point of all workers, which an elastic run does not have: in on_train_start, on_train_epoch_start, "
                "on_train_epoch_end or on_validation_end of a Trainer, or before batches() or sync() of a plain loop.",
                names[0],
                self.membership.rank,
            )

    # ------------------------------------------------------------------ what happens to a worker's steps

    def _discard(self) -> None:
        """Discard the update of a batch that other workers have trained."""
        self._units.discard()
        if self.synchronizer.moved:  # else the module may hold other weights, which the servers do not have
            run(self.synchronizer.fetch())
        self._module.zero_grad()
        self.tables.discard()

    def _rejoin(self) -> None:
        """Rejoin: this worker missed its heartbeats and was excluded."""
        rank = self.membership.rank
        log.warning("Worker %d missed its heartbeats and was excluded; it rejoins with the servers' weights.", rank)
        run(self.synchronizer.come_back())

    def _lr(self) -> float:
        """Learning rate of the first parameter group; 0 if there is no optimizer."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return float(groups[0]["lr"]) if groups and "lr" in groups[0] else 0.0

    def _reset_nonfinite_state(self) -> None:
        """After a rejected update: zero non-finite optimizer state, or the next update would be rejected too."""
        log.warning(
            "[worker %d step %d] The servers rejected an update with NaN or infinity (%d so far); training continues "
            "from the servers' weights. Lower the learning rate or clip gradients if this repeats.",
            self.membership.rank,
            self.synchronizer.stats.steps,
            self.synchronizer.stats.refused,
        )
        for optimizer in self.optimizers:
            zero_nonfinite(optimizer.state)

    # ------------------------------------------------------------------ sync points and the end

    def _share_last(self) -> None:
        """Give all workers the chief's module at the end, with what a program has changed since the last sync point."""
        self.membership.share_untrained(self._untrained, self.synchronizer.stats.steps)
        make_identical(self._collectives, self._module, trainable_parameters(self._module))

    def close(self) -> None:
        """Detach the tables and the gain, and free the buffers."""
        self.tables.close()
        self._gain.close()
        self.synchronizer.close()

    def _meet(self, name: str, mine: SyncReport, *, all_have_pushed: bool) -> JointReport:
        """Wait for all living workers, and give all the same bits of the weights. Returns what the reports come to."""
        membership = self.membership
        self.tables.forget()
        return synchronize(
            membership.client,
            self._collectives,
            self.synchronizer,
            name,
            mine,
            all_have_pushed=all_have_pushed,
            always=self.config.algorithm.waits or membership.comes_and_goes,
        )

    def _note_losses(self) -> None:
        """Note which workers and servers were lost during the training."""
        stats, membership = self.synchronizer.stats, self.membership
        stats.servers_replaced = sum(membership.client.connection.restored)
        if membership.is_chief:
            stats.lost_workers = membership.lost_workers()

    def _collect_samples(self) -> None:
        """Fetch the samples that the servers have kept. No worker pushes any more."""
        algorithm = self.config.algorithm
        if not algorithm.keep_at_most:
            return
        self.samples = self.synchronizer.samples()
        buffers = {name: on_cpu(buffer) for name, buffer in persistent_buffers(self._module).items()}
        self.samples = [{**buffers, **sample} for sample in self.samples]
        if not self.samples:
            log.warning(
                "%s kept no samples: training ended at version %d, which counts pushes. Train longer, or lower its "
                "burn_in and thin.",
                type(algorithm).__name__,
                max(self.synchronizer.versions),
            )

    def _share_posterior(self) -> None:
        """Give samplers this worker's random stream, and the number of chains, which follows that of the workers."""
        # The stream is the worker's number, also of all processes of an island: in elastic runs the chief's rank is 0.
        membership = self.membership
        client: SessionClient | None = membership.client
        stream = membership.rank if client is None else client.connection.worker
        share_posterior(self.optimizers, stream, self.config.algorithm.chains(membership.rank_and_size[1]))

    def _by_key(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the module, given by its parameters' and buffers' names, by the keys of its ``state_dict()``."""
        state = named_state(self._module)
        tensors = {name: tensor for name, tensor in tensors.items() if name in state}
        names = {_place(state[name]): name for name in tensors}
        kept = {key: t for key, t in self._module.state_dict().items() if isinstance(t, Tensor)}
        found = {key: names[_place(t)] for key, t in kept.items() if _place(t) in names}
        known = {_place(t) for t in state.values()}
        if len({*found.values()}) < len(tensors) and any(_place(t) not in known for t in kept.values()):
            return self._saved_with(tensors)
        return {key: tensors[name] for key, name in found.items()}

    def _saved_with(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Call a ``state_dict()`` that copies or converts tensors, while the module has these values."""
        state = named_state(self._module)
        before = {name: state[name].detach().clone() for name in tensors}
        with torch.no_grad():
            for name, tensor in tensors.items():
                state[name].copy_(tensor)
            try:
                saved = self._module.state_dict()
                return {key: t.detach().clone() for key, t in saved.items() if isinstance(t, Tensor)}
            finally:
                for name, tensor in before.items():
                    state[name].copy_(tensor)

    # ------------------------------------------------------------------ metrics

    def measure(self, epoch: Callable[[], float]) -> Meter:
        """Start measuring what this worker trains and where its time goes."""
        self._meter = Meter(
            lambda: self.synchronizer.stats, self._waited, epoch, tokens=self._tokens, rows=self.tables.used
        )
        return self._meter

    def _tokens(self) -> float:
        return self._units.total if self._units.name == "tokens" else 0.0

    def report_metrics(self) -> None:
        """Post this worker's metrics to the board, if it is measured: the next heartbeat sends them."""
        if self._meter is not None:
            self.synchronizer.stats.gain = self._gain.latest
            self.membership.board.post(self._collectives.rank, self._meter.read())

    def _waited(self) -> Waited:
        stats = self.synchronizer.stats
        sync_s = stats.sync_wait_s + self._collectives.waited_s + self._leases.others_wait_s
        return Waited(stats.wait_s, sync_s, self._leases.granted_wait_s)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor's memory: equal for a tensor and its detached alias."""
    if tensor.layout is not torch.strided:  # such tensors are not exchanged
        return tensor.layout, tensor.shape, tensor.dtype
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
