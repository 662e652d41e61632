"""``ASGDStrategy(island=...)``: Lightning's own strategy trains in lock-step inside, and islands exchange outside.

An island is a Trainer with several devices that attaches to an elastic run as one worker. Inside, the process group,
the wrappers and the collectives are those of Lightning's strategy. After every step the island counts as a worker does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_asgd.adapter import private_names
from lightning_asgd.adapter.checkpointing import Resumption
from lightning_asgd.adapter.class_trees import Tree, tree_of
from lightning_asgd.adapter.engine_signals import heed_engine
from lightning_asgd.adapter.island_session import IslandSession
from lightning_asgd.adapter.sync_callback import put_first
from lightning_asgd.adapter.trainer_shell import TrainerShell
from lightning_asgd.adapter.unattached import Takeable
from lightning_asgd.errors import ConfigurationError
from lightning_asgd.islands.island_fleet import IslandFleet
from lightning_asgd.islands.island_group import IslandGroup
from lightning_asgd.loop.batch_units import counter_of
from lightning_asgd.loop.training_job import TrainingJob
from lightning_asgd.monitoring.metrics_board import MetricsBoard
from lightning_asgd.worker.connection import GRACE_S

__all__ = ["IslandStrategy", "become_island"]

_INSIDE = ("DDPStrategy", "ModelParallelStrategy")


def become_island(strategy: Any, tree: Tree, accelerator: Any) -> None:
    """Have a strategy that was given ``island`` become one of a tree.

    Raises a :class:`ConfigurationError` if it was given anything but one of the tree's strategies for islands.
    """
    inside = strategy.options.island
    if inside == "ddp":
        inside = tree.DDPStrategy(**{**strategy._given, "accelerator": accelerator})
    base = type(inside).__name__
    if base not in _INSIDE or not isinstance(inside, getattr(tree, base)):
        raise ConfigurationError(
            f"island={strategy.options.island!r} was given to a Trainer of {tree.package}. Expected 'ddp', or a "
            f"{' or '.join(_INSIDE)} of {tree.package}.strategies."
        )
    strategy.__class__ = tree.derive(IslandStrategy, base)
    vars(strategy).update(vars(inside))
    strategy._resume = Resumption()  # another Trainer may have used the strategy and read a checkpoint
    private_names.accelerator.set_of(strategy, accelerator)


class IslandStrategy(private_names.RestoringHooks, Takeable):
    """One process of an island; see :class:`~lightning_asgd.ASGDStrategy`. Extends Lightning's strategy inside it."""

    strategy_name = "asgd"
    _job: TrainingJob
    _resume: Resumption
    _group: IslandGroup | None = None
    _membership: IslandFleet | None = None
    fit_session: IslandSession | None = None
    """What the island does while it fits; None else."""
    samples: list[dict[str, Any]]
    _failed = False
    _undo: tuple[Callable[[], None], ...] = ()

    def _become(self, tree: Tree, accelerator: Any) -> None:
        become_island(self, tree, accelerator)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, saved or in another process: without this process's session."""
        state = private_names.StrategyHooks.__getstate__(self)  # type: ignore[arg-type]
        return {**state, "_group": None, "_membership": None, "fit_session": None, "_undo": ()}

    @property
    def place_in_batch(self) -> tuple[int, int]:
        """This process's place among those that share a batch, and their number."""
        kwargs: dict[str, int] = self.distributed_sampler_kwargs  # type: ignore[attr-defined]
        return kwargs["rank"], kwargs["num_replicas"]

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first process of the island that logs and writes checkpoints."""
        if self._membership is None:
            return bool(self.global_rank == 0)  # type: ignore[attr-defined]
        return self._membership.is_chief

    def announce(self) -> None:
        """Nothing: torch's process group is the island's."""

    # ------------------------------------------------------------------ starting and stopping

    def setup_environment(self) -> None:
        """Make the island's process group, and attach to the run."""
        super().setup_environment()  # type: ignore[misc]
        mine: Any = self
        trainer = mine.lightning_module.trainer
        tree = tree_of(trainer)
        tree.check_trainer(trainer, leases=True)
        self.board = MetricsBoard()
        if private_names.called_method(trainer) != tree.TrainerFn.FITTING:
            return
        self._failed = False
        self._group = IslandGroup(self.options.config.timeouts.collective_s + GRACE_S)
        shell = TrainerShell(trainer, mine.root_device)
        about = self._job, self.options.config, self.options.policy, self.board, shell
        self._membership = IslandFleet(self._group, *about)
        self._membership.join()
        self._undo = put_first(trainer, monitor=self.options.monitor), heed_engine(trainer)

    def setup(self, trainer: Any) -> None:
        """Wrap the module, and take the run's weights and progress.

        A strategy that shards loads a checkpoint afterwards. Its weights go to the servers, or are replaced by theirs.
        """
        super().setup(trainer)  # type: ignore[misc]
        if self._membership is None or self._group is None:
            return
        about = trainer, self._group, self._membership
        if not self.restore_checkpoint_after_setup:  # type: ignore[attr-defined]
            self._enter(*about)
            return
        restore = private_names.restore_progress(trainer)

        def enter_and_restore() -> None:
            undo()
            self._enter(*about)
            restore()

        undo = private_names.restore_progress.replace(trainer, enter_and_restore)

    def _enter(self, trainer: Any, group: IslandGroup, membership: IslandFleet) -> None:
        about = trainer, membership, self.options.config, self._resume, counter_of(self.options.units)
        session = IslandSession(group, self.place_in_batch, *about)
        self.fit_session, self.stats, self.samples = session, session.synchronizer.stats, []
        session.begin()

    def teardown(self) -> None:
        """Leave the run."""
        membership, session, undo, group = self._membership, self.fit_session, self._undo, self._group
        self._membership, self.fit_session, self._group, self._undo = None, None, None, ()
        try:
            if membership is not None:
                membership.leave()
        finally:
            for each in undo:
                each()
            if session is not None:
                session.close()
            if group is not None and not self._failed:
                group.close()
        super().teardown()  # type: ignore[misc]

    def go_offline(self) -> None:
        """Nothing: collectives are the island's."""

    def on_exception(self, exception: BaseException) -> None:
        """Report the failure at once, so that no worker waits for this island."""
        self._failed = True
        if self._membership is not None:
            self._membership.fail(exception)
        super().on_exception(exception)  # type: ignore[misc]

    # ------------------------------------------------------------------ training

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Between two batches: merge a reply that has arrived, and exchange if that is due."""
        if self.fit_session is not None:
            self.fit_session.before_batch(batch)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take the step, and count it."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]
        if self.fit_session is not None:
            self.fit_session.after_step()
        return output

    def on_train_end(self) -> None:
        """Take the final weights."""
        if self.fit_session is not None:
            self.fit_session.end()

    # ------------------------------------------------------------------ checkpoints

    @property
    def _restores_optimizers(self) -> bool:
        """Whether a checkpoint holds optimizer states; the progress that an attaching island receives does not."""
        return self._membership is None or self._membership.entry is None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, if this is the island that does; all of its processes together."""
        if self._membership is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
            return
        if not self._membership.writes():
            return
        if self.fit_session is not None and "optimizer_states" in checkpoint:
            self.fit_session.complete(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
        self._membership.publish_chief_state()

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint, and note what the run resumes from if it has no weights yet."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self._resume.read(checkpoint, 0, self.options.config.algorithm_name, self._job.num_servers)
        return checkpoint

    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load weights before a fit. During one the servers' weights would differ: an elastic run refuses that."""
        if self.fit_session is not None and self._membership is not None:
            self._membership.refuse_another_layout()
        super().load_model_state_dict(*args, **kwargs)  # type: ignore[misc]
