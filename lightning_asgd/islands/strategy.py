"""``ASGDStrategy(island=...)``: Lightning's own strategy trains in lock-step inside, and islands exchange outside.

An island is a Trainer with several devices that attaches to an elastic run as one worker, or a part of the devices of
one Trainer, which hosts the run itself. Inside, the process group, the wrappers and the collectives are those of
Lightning's strategy. After every step the island counts as a worker does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.whole_file import check_archive
from lightning_asgd.core.job.interruptions import end_briefly
from lightning_asgd.core.job.training_job import TrainingJob
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.checkpointing import Resumption, is_last
from lightning_asgd.core.lightning.class_trees import Tree
from lightning_asgd.core.lightning.joint_decisions import Sigterm
from lightning_asgd.core.lightning.launchers import ScriptLauncher
from lightning_asgd.core.lightning.sync_callback import put_first
from lightning_asgd.core.lightning.trainer_shell import TrainerShell
from lightning_asgd.core.lightning.unattached import Takeable
from lightning_asgd.core.worker.connection import GRACE_S
from lightning_asgd.core.worker.metrics_board import MetricsBoard
from lightning_asgd.engines.signals import heed_engine
from lightning_asgd.islands import store as island_store
from lightning_asgd.islands.division import Division, size_of_islands
from lightning_asgd.islands.fleet import IslandFleet
from lightning_asgd.islands.group import IslandGroup, peer_has_ended
from lightning_asgd.islands.hosted_run import HostedRun
from lightning_asgd.islands.session import IslandSession
from lightning_asgd.programs.batch_units import counter_of

log = logging.getLogger(__name__)

_INSIDE = ("DDPStrategy", "ModelParallelStrategy")


def become_island(strategy: Any, tree: Tree, accelerator: Any) -> None:
    """Have a strategy that was given ``island`` become one of a tree.

    Raises a :class:`ConfigurationError` if it was given anything but one of the tree's strategies for islands.
    """
    inside = strategy.options.island
    if inside == "ddp" or isinstance(inside, int):
        inside = tree.DDPStrategy(**{**strategy._given, "accelerator": accelerator})
    base = type(inside).__name__
    if base not in _INSIDE or not isinstance(inside, getattr(tree, base)):
        raise ConfigurationError(
            f"island={strategy.options.island!r} was given to a Trainer of {tree.package}. Expected 'ddp', a "
            f"number of devices, or a {' or '.join(_INSIDE)} of {tree.package}.strategies."
        )
    if base == "DDPStrategy" and (period := private_names.averaging_period.of(inside)) is not None:
        raise ConfigurationError(
            f"island=DDPStrategy(model_averaging_period={period}) was given. Expected a strategy that keeps the "
            "weights of its processes equal: each process exchanges a part of them. Leave model_averaging_period out, "
            "and make islands of the processes that average their gradients in every step."
        )
    strategy.__class__ = tree.derive(IslandStrategy, base)
    vars(strategy).update(vars(inside))
    strategy._inside, strategy.tree, strategy._division = inside, tree, None
    strategy._resume = Resumption()  # another Trainer may have used the strategy and read a checkpoint
    private_names.accelerator.set_of(strategy, accelerator)


class MeetingLauncher:
    """Lightning's launcher of forked or spawned processes, which meet in a file."""

    island: IslandStrategy

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Start the processes, and wait for them."""
        with island_store.offered() as self.island._meeting:
            return super().launch(*args, **kwargs)  # type: ignore[misc]


class IslandStrategy(private_names.CommonHooks, Takeable):
    """One process of an island; see :class:`~lightning_asgd.ASGDStrategy`. Extends Lightning's strategy inside it."""

    strategy_name = "asgd"
    tree: Tree
    _job: TrainingJob
    _inside: Any
    _resume: Resumption
    _division: Division | None = None  # of a Trainer that hosts the run itself
    _meeting = ""  # the file in which the processes of another one meet
    _group: IslandGroup | None = None
    _membership: IslandFleet | None = None
    fit_session: IslandSession | None = None
    """What the island does while it fits; None else."""
    samples: list[dict[str, Any]]
    _failed = False
    _alone = False  # whether this process has failed, and the others of its island have not
    _sigterm: Sigterm
    _undo: tuple[Callable[[], object], ...] = ()

    def _become(self, tree: Tree, accelerator: Any) -> None:
        become_island(self, tree, accelerator)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, saved or in another process: without this process's session."""
        state = private_names.CommonHooks.__getstate__(self)
        state.pop("_sigterm", None)
        return {**state, "_group": None, "_membership": None, "fit_session": None, "_undo": ()}

    @property
    def place_in_batch(self) -> tuple[int, int]:
        """This process's place among those that share a batch, and their number."""
        kwargs: dict[str, int] = self.distributed_sampler_kwargs  # type: ignore[attr-defined]
        return kwargs["rank"], kwargs["num_replicas"]

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first process of the island that logs and writes checkpoints."""
        if self._membership is not None:
            return self._membership.is_chief
        first = self._division is None or self._division.is_first
        return first and bool(self.global_rank == 0)  # type: ignore[attr-defined]

    def announce(self) -> None:
        """Nothing: torch's process group is the island's."""

    # ------------------------------------------------------------------ starting and stopping

    def _make_launcher(self) -> Any:
        """The launcher of a Trainer that hosts the run itself; None where Lightning's own was made."""
        mine: Any = self
        size = size_of_islands(self.options.island, self._inside, mine.num_processes)
        if self.options.run is not None:
            if isinstance(self.options.island, int) and size != mine.num_processes * mine.num_nodes:
                raise ConfigurationError(
                    f"island={size} was given with run=... to a Trainer with devices={mine.num_processes} and "
                    f"num_nodes={mine.num_nodes}. Expected as many: such a Trainer is one island."
                )
            launcher = self.make_lightnings_launcher()
            self._meeting = ""
            if mine.num_nodes > 1:
                return None
            if private_names.is_a(launcher, private_names.script_launcher):
                starts = not mine.cluster_environment.creates_processes_externally
                self._meeting = island_store.place_of_script(starts=starts)
            elif private_names.is_a(launcher, private_names.multi_process_launcher):
                meeting = object.__new__(self.tree.derive(MeetingLauncher, "MultiProcessLauncher"))
                vars(meeting).update(vars(launcher), island=self)
                return meeting
            return None
        timeouts = self.options.config.timeouts
        about = self.options.num_servers, self.options.transport
        run = HostedRun(*about, timeouts.start_s, timeouts.collective_s)
        environment = mine.cluster_environment
        self._division = Division(run, size, environment, mine.parallel_devices, mine.num_nodes)
        launcher = self.tree.derive(ScriptLauncher, "ScriptLauncher")
        return launcher(run, environment, mine.num_processes, mine.num_nodes)

    def check_trainer(self, trainer: Any) -> None:
        """Raise if the Trainer's release of Lightning lacks a name that is used. Called before anything is started."""
        self.tree.check_trainer(trainer, leases=True)
        if self._division is not None:
            self._division.run.fits = self._is_fitting(trainer)

    def _is_fitting(self, trainer: Any) -> bool:
        return bool(private_names.called_method(trainer) == self.tree.TrainerFn.FITTING)

    def setup_environment(self) -> None:
        """Make the island's process group, and attach to the run."""
        mine: Any = self
        trainer = mine.lightning_module.trainer
        if self._division is not None or self._meeting:
            self._undo = (island_store.stay_on_this_machine(),)
        if self._division is None:
            with island_store.meet_in(self._meeting, mine.num_processes):
                super().setup_environment()  # type: ignore[misc]
            self.check_trainer(trainer)
        else:
            with self._division.enter(self):
                super().setup_environment()  # type: ignore[misc]
            self._division.speak()
            self._division.await_turn()
        self.board = MetricsBoard()
        if self._is_fitting(trainer):
            self._attach(trainer)

    def _attach(self, trainer: Any) -> None:
        self.tree.say("Inside an island torch's process groups (gloo, NCCL) are neither encrypted nor authenticated.")
        self._failed = self._alone = False
        self._group = IslandGroup(self.options.config.timeouts.collective_s + GRACE_S)
        run = None if self._division is None else self._division.run
        if run is not None:
            address, self._job.run_id = self._group.share(run.find)
            self._job.given, self._job.finder, self._job.asked = (address,), None, run.transport
        shell = TrainerShell(trainer, self.root_device)  # type: ignore[attr-defined]
        about = self._job, self.options.config, self.options.policy, self.board, shell
        self._membership = IslandFleet(self._group, *about, islands=self._division.islands if self._division else 0)
        self._membership.join()
        if run is not None:
            self._job.why = run.why
        self._sigterm = shell.sigterm = Sigterm(trainer, alone=False)
        self._undo += self._sigterm.undo, put_first(trainer, monitor=self.options.monitor)
        heeds = heed_engine(trainer, self._sigterm.note) if self._division is None else self._division.watch()
        self._undo += (heeds,)

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
        about = trainer, membership, self.options.config, self._resume, counter_of(self.options.config.units)
        session = IslandSession(group, self.place_in_batch, *about)
        session.sigterm = self._sigterm
        self.fit_session, self.stats, self.samples = session, session.synchronizer.stats, []
        session.begin()
        membership.begin_together()

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
            if self._division is not None:
                self._division.run.end()
                self._division.speak()
        super().teardown()  # type: ignore[misc]

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for the island's processes. The first call in a Trainer's run follows the preparation of its data."""
        if self._alone:
            return
        if self._division is not None:
            self._division.pass_turn()
        super().barrier(name, *args, **kwargs)  # type: ignore[misc]

    def go_offline(self, exception: BaseException | None = None) -> None:
        """If only this process has failed, its callbacks save nothing: the others would not take part."""
        if self._group is None or exception is None or private_names.is_a(exception, private_names.sigterm):
            return  # all have been told of the signal
        if (why := self._group.difference) and why != str(exception):
            log.error("%s", why)  # another process found it first and ended, so this one fails, too
        self._alone = not self._group.all_fail()
        if self._alone:
            if peer_has_ended(exception):
                end_briefly(exception)
                if self._division is not None:
                    self._division.await_report()
            self._report(exception)

    def on_exception(self, exception: BaseException) -> None:
        """Report the failure at once, so that no worker waits for this island."""
        if not self._alone:
            self._report(exception)
        super().on_exception(exception)  # type: ignore[misc]

    def _report(self, exception: BaseException) -> None:
        self._failed = True
        if self._membership is not None:
            self._membership.fail(exception)

    # ------------------------------------------------------------------ training

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Between two batches: merge a reply that has arrived, and exchange if that is due."""
        if self.fit_session is not None:
            self.fit_session.before_batch(batch)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take the step, and count it."""
        counted = contextlib.nullcontext() if self.fit_session is None else self.fit_session.step_of(optimizer)
        with counted:
            return super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]

    def on_train_end(self) -> None:
        """Take the final weights."""
        if self.fit_session is not None:
            self.fit_session.end()

    # ------------------------------------------------------------------ checkpoints

    @property
    def _restores_optimizers(self) -> bool:
        """Whether a checkpoint holds optimizer states. The progress that an attaching island receives does not."""
        return self._division is not None or self._membership is None or self._membership.entry is None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, if this is the island that does; all of its processes together."""
        if self._alone:
            log.warning("%s was not written: only this process of its island has raised an exception.", filepath)
            return
        if self._membership is None:
            if self._division is None or self._division.is_first:
                super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
            return
        if not self._membership.writes():
            return
        if self.fit_session is not None:
            self.fit_session.complete(checkpoint)
        if is_last(self.lightning_module.trainer, filepath):  # type: ignore[attr-defined]
            self._membership.publish_chief_state()  # if the island ends meanwhile, the next chief replaces the file
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
        self._membership.publish_chief_state()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights for a checkpoint, for which all processes are needed."""
        return {} if self._alone else super().lightning_module_state_dict()  # type: ignore[misc]

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """An optimizer's state for a checkpoint, likewise."""
        return {} if self._alone else super().optimizer_state(optimizer)  # type: ignore[misc]

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint, and note what the run resumes from if it has no weights yet."""
        check_archive(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]
        resume = Resumption.of(self)
        resume.read(checkpoint, 0, self.options.config.algorithm_name, self._job.num_servers)
        return checkpoint

    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load weights before a fit. During one the servers' weights would differ: an elastic run refuses that."""
        if self.fit_session is not None and self._membership is not None:
            self._membership.begin_generation()
        super().load_model_state_dict(*args, **kwargs)  # type: ignore[misc]
