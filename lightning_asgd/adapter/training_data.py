"""Whether the workers of a fit share its training data or each have a part of their own, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_asgd.adapter.checkpointing import Resumption, begin_epochs_anew
from lightning_asgd.adapter.class_trees import tree_of
from lightning_asgd.adapter.data_mode import batch_size_of, count_in, why_split
from lightning_asgd.adapter.fleet import Fleet
from lightning_asgd.adapter.leased_loop import LeasedLoop
from lightning_asgd.adapter.private_names import batch_in_epoch, count_batches, count_steps
from lightning_asgd.adapter.undivided_data import FirstBatch, datasets_of, is_dealt
from lightning_asgd.algorithms.base import Payload
from lightning_asgd.config import ExchangeConfig
from lightning_asgd.protocol import LeaseHoldings
from lightning_asgd.ranges import merged
from lightning_asgd.worker.collectives import Collectives
from lightning_asgd.worker.synchronizer import Synchronizer, WorkFeed

__all__ = ["TrainingData"]


class TrainingData(WorkFeed):
    """The training data of one fit of one worker.

    Args:
        trainer: the Trainer.
        membership: the worker's place among the others.
        config: says whose workers wait for each other.
        resume: says what has been trained of the epoch that training begins in.
        split: every worker is to have a part of its own.
        come_back: called when the others have gone on without this worker.
    """

    def __init__(
        self,
        trainer: Any,
        membership: Fleet,
        config: ExchangeConfig,
        resume: Resumption,
        *,
        split: bool,
        come_back: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._membership = membership
        self._timeout_s = config.timeouts.collective_s
        self._resume = resume
        together = config.algorithm.waits or config.algorithm.payload is Payload.LAYERS
        self._never = split or together or membership.alone
        self._come_back = come_back
        self._loop: LeasedLoop | None = None  # None while every worker has its own part
        self._told = False  # that the data are split
        self._first = FirstBatch()
        self.batch = 0
        """Samples of this worker's batches, once they are known."""
        self._common_batch = 0  # of those that all count progress in

    # ------------------------------------------------------------------ when training and epochs begin

    def agree_on_batches(self) -> None:
        """Let progress count in batches of the same size on all workers. Called when the data have been set up."""
        self.batch = self._common_batch = batch_size_of(self._trainer)
        if self._never:
            return
        self._common_batch = self._membership.common_batch(self.batch)
        if self.batch and self._common_batch not in (0, self.batch):
            count_in(self._trainer, self._common_batch)

    def share(self) -> None:
        """Let the training dataloader yield what this worker is granted, if the data can be shared."""
        if self._never or (self._loop is not None and self._loop.installed):
            return
        if self._loop is None and self._membership.between_epochs:
            begin_epochs_anew(self._trainer)
        reason = why_split(self._trainer, self._common_batch)
        if reason is not None:
            self._split(reason)
            return
        if self._loop is None:
            resumed, session = self._resume.take_data(), self._membership.session
            about = (session, self._timeout_s, resumed, self._come_back, self._membership.of_the_first)
            self._loop = LeasedLoop(self._trainer, lambda: self._membership.client, *about)
        self._loop.install(self._common_batch)

    def _split(self, reason: str) -> None:
        self._membership.check_data_may_be_split(f"{datasets_of(self._trainer)}: {reason}")
        self.restore()
        if self._told or not self._trainer.is_global_zero:
            return
        self._told = True
        what = f"Every worker trains a fixed part of the data, since {reason}."
        if not is_dealt(self._trainer):
            what = (
                f"Every worker trains what its own dataloader yields, since {reason}. Expected "
                f"{datasets_of(self._trainer)} to give each worker its share, by the rank and world size of "
                "torch.distributed or by RANK and WORLD_SIZE."
            )
        tree_of(self._trainer).info(
            f"{what} A slow worker holds the others up at the end of an epoch. ASGDStrategy(data='split') says that "
            "this is meant."
        )

    def begin_epoch(self) -> None:
        """Lightning is about to iterate over the data, if it has not yet."""
        if self._loop is not None:
            self._loop.expect()

    # ------------------------------------------------------------------ every batch

    def before_batch(self, batch: Any) -> None:
        """A batch has been fetched."""
        if self._loop is not None:
            self._loop.before_batch()
        elif self._undealt:
            self._first.note(batch)

    @property
    def _undealt(self) -> bool:
        """Whether nobody but the dataset itself gives workers their shares."""
        if self._loop is not None or self._membership.alone or self._membership.comes_and_goes:
            return False
        return not is_dealt(self._trainer)

    def compare(self, collectives: Collectives) -> None:
        """Warn where the dataset yields the same to several workers. All workers call it together."""
        if self._undealt:
            self._first.compare(self._trainer, collectives)

    def after_batch(self, synchronizer: Synchronizer, discard: Callable[[], None]) -> None:
        """A batch has been trained: find out whether there is another one before all workers meet."""
        if self._loop is not None:
            steps = synchronizer.stats.steps
            if self._loop.after_batch(steps, lambda: steps - synchronizer.unacknowledged, synchronizer.flush, discard):
                synchronizer.begin()

    def before_next(self) -> None:
        """The last thing that is done with a batch."""
        if self._loop is not None:
            self._loop.before_next()

    # ------------------------------------------------------------------ where all meet, and at the end

    def leave(self, acknowledged: int, *, halt: bool = False) -> bool:
        """Train no more of this epoch; True if all have trained and pushed what there was, as far as is known here."""
        return self._loop is not None and self._loop.leave(acknowledged, halt=halt)

    @property
    def halted(self) -> bool:
        """Whether another worker has ended the epoch for all, before all of its data were trained."""
        return self._membership.collectives.others_stopped if self._loop is None else self._loop.halted

    @property
    def batches(self) -> int:
        """Batches of the epoch that this worker has counted, of those that it would train if all were equally fast."""
        return int(batch_in_epoch(self._trainer)) if self._loop is None else self._loop.stepped

    def count(self, step: int, batches: int) -> int:
        """Count at least as many optimizer steps as others have; return the batches that all have counted now."""
        if self._loop is not None:
            return self._loop.count(step, batches)
        count_steps(self._trainer, step)
        return batches

    def end_epoch(self, batches: int) -> None:
        """Have Lightning count what all have counted: the epoch has ended for all."""
        count_batches(self._trainer, batches)
        if self._loop is not None:
            self._loop.end_epoch(batches)

    def restore(self) -> None:
        """Give Lightning its own dataloader and numbers back."""
        if self._loop is not None:
            self._loop.restore()
            self._loop = None

    # ------------------------------------------------------------------ for checkpoints

    @property
    def state(self) -> dict[str, Any] | None:
        """What has been trained of the present epoch; None while every worker has its own part."""
        return None if self._loop is None else self._loop.state()

    def in_checkpoint(self, state: dict[str, Any], found: tuple[str, tuple[tuple[int, int], ...]]) -> None:
        """Put into a checkpoint's state what its weights hold, on worker 0 between two sync points."""
        if self._loop is not None and state:
            if found[0] == self.trained[0]:
                state["done"] = found[1]  # not what others have pushed since
            state["done"] = merged(sorted([*state["done"], *self._loop.leases.own]))

    def to_ddp_counters(self, loops: dict[str, Any]) -> None:
        """Put the counts of batches into a checkpoint that a worker would have if all were equally fast."""
        if self._loop is not None:
            self._loop.to_ddp_counters(loops)

    # ------------------------------------------------------------------ for exchanges, restorations and figures

    def lose(self) -> None:
        """The others have this worker's batches."""
        if self._loop is not None:
            self._loop.leases.lose()

    @property
    def trained(self) -> tuple[str, int]:
        """The epoch, and how many of its units this worker has trained."""
        return super().trained if self._loop is None else self._loop.leases.trained

    @property
    def left_s(self) -> float:
        """Seconds until this worker will probably push the rest for the next sync point; infinite if unknown."""
        return super().left_s if self._loop is None else self._loop.leases.left_s

    def ask_ahead(self, seconds: float) -> None:
        """Ask for data to train in the next seconds, if there are not enough: see :meth:`DataLeases.ask_ahead`."""
        if self._loop is not None:
            self._loop.leases.ask_ahead(seconds)

    def part(self) -> LeaseHoldings | None:
        """What this worker has of the present epoch."""
        return None if self._loop is None else self._loop.leases.part

    @property
    def waited_s(self) -> tuple[float, float]:
        """Seconds waited for data to be granted, and for others to train theirs."""
        return (0.0, 0.0) if self._loop is None else (self._loop.leases.granted_wait_s, self._loop.leases.others_wait_s)
