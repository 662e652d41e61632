"""A plain loop's part in a job or a run: around a batch, at sync points, at the end of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_asgd.core.algorithms.base import Payload, Run
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.ranges import merged
from lightning_asgd.core.job.interruptions import Interruptions
from lightning_asgd.core.job.options import LoopOptions
from lightning_asgd.core.protocol import UNKNOWN, Epoch, SyncReport
from lightning_asgd.core.worker.collectives import Phase
from lightning_asgd.core.worker.fleet import Fleet
from lightning_asgd.core.worker.participation import Participation
from lightning_asgd.core.worker.synchronizer import Held, Synchronizer, Waits, run
from lightning_asgd.layerwise.worker import ProgramGradients
from lightning_asgd.loops.leased_pass import SharedData, Trainee
from lightning_asgd.loops.state import LoopState
from lightning_asgd.programs.batch_units import counter_of
from lightning_asgd.programs.weight_changes import WeightChanges

_PATIENCE = 16  # rounds in a row


class Rounds:
    """Learns in which order optimizers step. ``number`` is how many there are.

    A round ends when an optimizer steps that has stepped in it. The longest round is the usual one. After 16 in a row
    that differ from it, as in a phase of one optimizer alone, the latest becomes the usual one. Until a round has held
    all optimizers, or 16 have passed, none is known, and no step closes a round.

    Example:
        >>> rounds = Rounds(2)
        >>> [rounds.ends(each) for each in "DGDDG"]  # the second step of G was skipped
        [False, True, False, False, True]
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._present: list[Hashable] = []  # the steps of the present round
        self._usual: tuple[Hashable, ...] = ()
        self._others = 0  # rounds in a row that were not the usual one

    def ends(self, optimizer: Hashable) -> bool:
        """Note a step, taken or skipped. Returns whether it closes the usual round."""
        usual, present = self._usual, self._present
        closed = bool(usual and present) and present[-1] == usual[-1] and optimizer in usual
        if optimizer in present or closed:
            self._learn(tuple(present))
            present = self._present = []
        present.append(optimizer)
        if len(present) == self._number > len(self._usual):
            self._usual, self._others = tuple(present), 0
        return bool(self._usual) and optimizer == self._usual[-1]

    def _learn(self, past: tuple[Hashable, ...]) -> None:
        self._others = 0 if past == self._usual else self._others + 1
        if self._others >= _PATIENCE or 0 < len(self._usual) < len(past):
            self._usual, self._others = past, 0


log = logging.getLogger(__name__)


class LoopSession(Participation, Trainee):
    """One worker's training in a plain loop, from joining to leaving. See :class:`Participation` and :class:`Trainee`.

    If others train already, their ``state`` replaces this one. A worker that joins later continues the ``schedulers``.
    """

    def __init__(
        self,
        module: Module,
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        membership: Fleet,
        options: LoopOptions,
        state: LoopState,
        interruptions: Interruptions,
    ) -> None:
        config, units = options.config, counter_of(options.config.units)
        super().__init__(module, membership, config, units, measure=False, late_steps=False)
        self._all_optimizers, self._all_schedulers = optimizers, schedulers
        self._rounds = Rounds(len(optimizers))
        self.state, self._interruptions, self._changes = state, interruptions, WeightChanges(module)
        self.stops = False  # whether this worker is to train no more
        self._in_pass = self._in_batch = self._noted = False  # noted: that the present batch was trained
        self._abandoned = False  # whether the program has left the loop of the present pass
        self._exchanges = False  # whether an exchange has begun, and a signal may have ended it half done
        self._present: tuple[bytes, int] = b"", 0  # order and units of the present pass
        self._after_pass = False  # whether some workers may have trained since they have ended a pass together
        self._steps = 0  # when the present batch began
        self._flushes = self._counted = False  # whether steps with late gradients are taken; a batch was counted
        if membership.entry is not None:
            state.follow(membership.entry.progress, optimizers, schedulers)
        self._passes_before = state.passes  # when the present epoch began
        config.algorithm.check(Run(self.workers, 1, config.npush, tuple(optimizers), "32-true"))
        self._training = replace(self._training, closures=False)
        self.synchronizer = self._set_up(state.versions)
        if state.servers and (self.membership.comes_and_goes or membership.is_chief):
            self.synchronizer.restore(state.servers)
        if options.total_steps is not None:
            self._find_period(membership.of_first_worker(options.total_steps, "total_steps"), self._warn)
        self._share_posterior()
        self.tables.watch(optimizers)
        self._undo = [each.register_step_pre_hook(self._before_step).remove for each in optimizers]
        if config.gain:  # between these hooks, which see the program's rate
            self._gain.watch(optimizers)
        self._undo += [each.register_step_post_hook(self._count_step).remove for each in optimizers]

    @property
    def optimizers(self) -> Sequence[Any]:
        """This worker's."""
        return self._all_optimizers

    def _first_progress(self) -> dict[str, Any] | None:
        return self._progress() if self.state.epoch or self.state.passes or self.state.data else None

    def _progress(self) -> dict[str, Any]:
        return self.state.progress(self._all_optimizers, self._all_schedulers)

    def accumulating(self) -> AbstractContextManager[None]:
        """Backward passes within it are followed by another one before the optimizer steps."""
        layers = self.synchronizer
        return layers.accumulating() if isinstance(layers, ProgramGradients) else nullcontext()

    def _warn(self, message: str) -> None:
        if self.membership.is_chief:
            log.warning(message)

    @property
    def is_chief(self) -> bool:
        """Whether this worker is to log and to write checkpoints."""
        self.membership.follow_chief()
        return self.membership.is_chief

    @property
    def rank(self) -> int:
        """This worker's rank among those that take part."""
        return self.membership.rank_and_size[0]

    # ------------------------------------------------------------------ steps

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """An optimizer is about to take a step, for a batch of ours or of the program's own data."""
        if self._flushes:
            return None
        if self._abandoned:
            self.leave_pass()
        if not self._in_batch:
            self._enter_interval()
            self._check_counted()
        layers = self.synchronizer
        return layers.before_step(optimizer, args, kwargs) if isinstance(layers, ProgramGradients) else None

    def _count_step(self, optimizer: Any, *_: Any) -> None:
        """An optimizer has taken a step."""
        if self._flushes:
            return
        found_inf = getattr(optimizer, "found_inf", None)  # a GradScaler's, for an optimizer that skips steps itself
        if found_inf is None or found_inf.device.type != "cpu" or not found_inf.item():
            self.synchronizer.count_step(False if found_inf is None else found_inf)
            self._units.step()
        if not self._in_batch and self._rounds.ends(optimizer):  # the program has data of its own
            self._advance()

    def count_batch(self, batch: Any) -> None:
        """Count what a batch of the program's own data holds."""
        if self._in_batch:
            raise ConfigurationError(
                "count_batch() was called within a pass over batches(), which counts its batches itself. Expected the "
                "call for batches of your own only."
            )
        self._units.begin(batch)
        self._counted = True

    def _check_counted(self) -> None:
        if self._units.name and not self._counted:
            raise ConfigurationError(
                f"Advanced.units={self._units.name!r} was given, but an optimizer takes a step for a batch that was "
                "not counted. Expected count_batch(batch) before the step, if the batch is not one of batches()."
            )

    def _enter_interval(self) -> None:
        """Leave a sync point, if this worker is at one."""
        if self._collectives.phase in (Phase.SYNC, Phase.ENTERING):
            if not self._in_pass:
                self._follow_growth()
            self._warn_of_mixed_weights()  # first: then a worker may take its own weights again
            self._whole(self.synchronizer.begin())
            place = {"pass": self.state.passes} if self._in_pass else None
            self.membership.begin_interval(self.synchronizer, place, self._progress)
            self._untrained.begin_interval(self.synchronizer.stats.steps)
            self._changes.note()

    def _advance(self) -> None:
        """Between two steps: merge a reply that has arrived, and exchange if that is due."""
        self.membership.check_session()
        self.membership.follow_chief()
        self._whole(self.synchronizer.advance())

    def _whole(self, exchange: Waits) -> None:
        """Exchange. What a second signal leaves half done may lack steps: see :meth:`give_back`."""
        self._exchanges = True
        run(exchange)
        self._exchanges = False

    # ------------------------------------------------------------------ passes over leased data

    def begin_pass(self, data: SharedData, accumulate: int) -> Iterable[Any] | None:
        """See :class:`Trainee`, here and below."""
        rule, meets = self.config.algorithm, not self.membership.comes_and_goes
        if (rule.lockstep and meets) or rule.payload is Payload.LAYERS:
            raise ConfigurationError(
                f"batches() was called with {type(rule).__name__}, whose workers wait for each other. Expected a "
                "dataloader of your own that gives every worker an equal part, or an elastic run."
            )
        self.leave_pass()
        if meets and (self._is_uneven or self._collectives.phase is Phase.ASYNC):
            self._sync("beginning of a pass", all_have_pushed=False)
        self._follow_growth()
        self.take_set_weights()
        self._leases.batch = data.batch
        reference = self.membership.reference_batch(data.batch) or data.batch or 1  # in which all workers count
        if not meets and not self.state.in_epoch:
            self.membership.begin_epoch()
            self._share_posterior()
        state = self.state
        key, agree = f"{self.membership.session}/{state.passes}", self.membership.common_order
        begun = data.begin(state.passes, reference, lambda own, mine: agree(key, own, [mine], unites=True).parts[0])
        order, units, shards = begun
        if not units:
            raise ConfigurationError("batches() was called with data without a batch. Expected at least one.")
        done, self._present = state.done_of(order, units), (order, units)
        step = reference * accumulate
        self._in_pass, self.pass_token = True, object()
        if done == ((0, units),):
            return None
        return data.open(self._leases, Epoch(key, units, (units,), order, done, step, shards), accumulate)

    def _follow_growth(self) -> None:
        """Exchange parameters that were unfrozen since the latest sync point, too. All workers call it together."""
        if self._collectives.phase is Phase.SYNC and self._has_grown():
            self.set_up_again()

    def before_batch(self, batch: Any) -> None:
        """Exchange, if that is due."""
        self._interruptions.raise_now()
        self._interruptions.defers = True
        self._enter_interval()
        self._advance()
        self._leases.begin_batch()
        self._units.begin(batch)
        self._counted = True
        self._in_batch, self._noted, self._steps = True, False, self.synchronizer.stats.steps

    def after_batch(self) -> bool:
        """Note that a batch was trained."""
        self._note_batch()
        self._in_batch = False
        return self.has_more()

    def _note_batch(self) -> None:
        if not self._noted and not self._leases.end_batch(self.synchronizer.stats.steps):
            self._discard()
            self._changes.note()
        self._noted = True

    def _note_step(self) -> None:
        """Note that the present batch was trained, if a step was taken for it."""
        if self._in_batch and self.synchronizer.stats.steps > self._steps:
            self._note_batch()

    def has_more(self) -> bool:
        """Find out whether there is another batch before the pass is over for all."""
        leases, synchronizer = self._leases, self.synchronizer
        if leases.more(self._acknowledged):
            return True
        with leases.flushing():
            self._whole(synchronizer.flush())
        self._interruptions.raise_now()  # others may train for long
        more = leases.wait(self._acknowledged)
        if more and self._collectives.phase is Phase.ASYNC:
            self._whole(synchronizer.begin())
        return more

    @property
    def _acknowledged(self) -> int:
        return self.synchronizer.stats.steps - self.synchronizer.unacknowledged

    @property
    def must_reload(self) -> bool:
        """Whether the loader has ended."""
        return self._leases.dry

    def end_pass(self, *, trained: bool = True) -> None:
        """Synchronise, unless this worker's part has ended meanwhile."""
        if not self._in_pass:
            return
        self._abandoned = False
        if not trained:
            self._note_step()
            self._whole(self.synchronizer.flush())
            self._leases.stop(self._acknowledged)
        self._in_pass = self._in_batch = False
        self.pass_token = None
        self._sync("end of a pass", all_have_pushed=trained)
        self.state.end_pass(*self._present)
        if not self.state.in_epoch:
            self.end_epoch()
        self._after_pass = True

    def abandon_pass(self) -> None:
        """Have the next call of the program end the pass; see :meth:`leave_pass`."""
        self._abandoned, self._interruptions.defers = self._in_pass, False

    def leave_pass(self) -> None:
        """End a pass that was not iterated to its end."""
        self.end_pass(trained=False)

    # ------------------------------------------------------------------ sync points

    def sync(self) -> None:
        """Synchronise; within a pass of an elastic run, take the servers' weights."""
        if self._abandoned:
            self.leave_pass()
        if not self._in_pass:
            self._sync("sync", all_have_pushed=False)
        elif self.membership.comes_and_goes:
            for procedure in (self.synchronizer.flush, self.synchronizer.fetch, self.synchronizer.begin):
                self._whole(procedure())
            self._changes.note()
        else:
            raise ConfigurationError(
                "sync() was called within a pass over batches(). Expected it between two passes: within one, workers "
                "train different numbers of batches."
            )

    @property
    def _is_uneven(self) -> bool:
        """Whether other workers may have taken a step since the end of a pass, with gradients that were left over."""
        enters = self._collectives.phase is Phase.ENTERING
        return self._after_pass and not self.membership.comes_and_goes and not self.membership.alone and not enters

    def _set_up(self, versions: list[int] | None, *, again: bool = False) -> Synchronizer:
        synchronizer = super()._set_up(versions, again=again)
        self._changes.note()
        return synchronizer

    def _rejoin(self) -> None:
        super()._rejoin()
        self._changes.note()

    def _sync(self, name: str, *, all_have_pushed: bool) -> None:
        self._interruptions.raise_now()
        self.membership.follow_chief()
        if self._collectives.phase is Phase.ENTERING:  # it has trained nothing since it joined
            self.membership.begin_interval(self.synchronizer, None, self._progress)
        self._changes.check(self.membership.rank, moved=self.synchronizer.moved)
        self._flushes = True
        run(self.synchronizer.flush())
        self._flushes = False
        trained = self._collectives.phase is Phase.ASYNC
        self._collectives.phase = Phase.SYNC
        grown = self._has_grown()
        mine = SyncReport(self.synchronizer.moved, self.stops, grown, None, trained=trained)
        met = self._meet(name, mine, all_have_pushed=all_have_pushed)
        self.stops |= met.should_stop
        if self._check_grown(met):
            self.set_up_again(trained=True)
        if not met.trained:
            self.take_set_weights()
        self.membership.share_untrained(self._untrained, self.synchronizer.stats.steps)
        self._after_pass = False
        self._changes.note()

    def begin_epoch(self) -> None:
        """An epoch of ``epochs()`` begins."""
        self.leave_pass()
        self.state.in_epoch = True
        if self.membership.comes_and_goes:
            self.membership.begin_epoch()
            self._share_posterior()

    def end_epoch(self) -> None:
        """An epoch has ended: agree on whether training does, and publish where it is."""
        self.leave_pass()
        self.state.end_epoch()
        if self._collectives.phase is Phase.ASYNC or self.state.passes == self._passes_before or self._is_uneven:
            self._sync("end of an epoch", all_have_pushed=False)
        self._passes_before = self.state.passes
        self.stops = self.membership.agree_to_stop(self.stops, self._progress)

    @property
    def progress(self) -> float:
        """Epochs that all workers have trained, with the part of the present one."""
        units = self._leases.plan.epoch.units if self._in_pass and self._leases.opened else UNKNOWN
        if units >= UNKNOWN:  # a shard has an unknown length
            return float(self.state.epoch)
        return self.state.epoch + min(1.0, self._leases.progress / units)

    def end(self) -> None:
        """Synchronise the final weights."""
        self._interruptions.raise_now()
        self.leave_pass()
        if not self.membership.comes_and_goes or self._collectives.phase is not Phase.SYNC or self.synchronizer.moved:
            self._sync("end of training", all_have_pushed=False)
        if self.membership.is_chief:
            self._collect_samples()
        self._share_last()
        self.membership.end_entries()
        self._note_losses()

    def give_back(self) -> None:
        """Push what was trained, and release what was not: this worker leaves before the end.

        Within a step or an exchange nothing is pushed: then others train this worker's batches since its last push.
        """
        if self._in_pass:
            self._note_step()
        if self._in_pass and not self._exchanges and (self._noted or not self._in_batch):
            self._whole(self.synchronizer.flush())
            self._leases.stop(self._acknowledged)

    def close(self) -> None:
        """Remove the hooks and free the buffers."""
        self._in_pass = False
        self._leases.reset()
        for undo in self._undo:
            undo()
        super().close()

    # ------------------------------------------------------------------ checkpoints

    def weights(self) -> dict[str, Tensor]:
        """The module's state with the servers' weights and all of this worker's steps."""
        weights: dict[str, Tensor] = self._module.state_dict()
        if self._collectives.phase is Phase.ASYNC:
            weights.update(self._by_key(self.synchronizer.catch_up()))
        return weights

    def state_dict(self) -> dict[str, Any]:
        """What training continues from."""
        self._note_step()
        weights, held = self.weights(), self.synchronizer.caught_up
        return {
            "model": weights,
            **self._progress(),
            **self.state.present_epoch(),
            "optimizers": [each.state_dict() for each in self._all_optimizers],
            "data": self._trained_of_pass(held) if self._in_pass else {},
            "versions": list(self.synchronizer.versions),
            "algorithm": self.config.algorithm_name,
            "servers": self.synchronizer.state(),
        }

    def _trained_of_pass(self, held: Held) -> Mapping[str, Any]:
        leases = self._leases
        if not leases.opened:
            return {}
        epoch = leases.plan.epoch
        if held[1] is None:
            others = leases.done()
        else:
            others = held[1] if held[0] == epoch.key else epoch.done  # else the weights are of an earlier pass
        done = merged(sorted([*others, *leases.own]))  # without what others have pushed since
        return {"order": epoch.order, "units": epoch.units, "done": done}
