"""``ASGDStrategy``: Lightning's hooks, translated into exchanges and collectives, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from lightning_asgd.core.algorithms.base import Algorithm
from lightning_asgd.core.algorithms.compression import Compression
from lightning_asgd.core.algorithms.config import Advanced, Timeouts
from lightning_asgd.core.foundation.errors import ASGDError
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.foundation.whole_file import check_archive
from lightning_asgd.core.job import rank_variables
from lightning_asgd.core.job.options import options_among
from lightning_asgd.core.job.registry import kind_of
from lightning_asgd.core.job.training_job import TrainingJob
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.checkpointing import Resumption, is_last, read_tables, remove_tables, tables_saved
from lightning_asgd.core.lightning.class_trees import Extension, Tree, rank_zero_warn
from lightning_asgd.core.lightning.fit_session import FitSession
from lightning_asgd.core.lightning.joint_decisions import Sigterm
from lightning_asgd.core.lightning.launchers import ScriptLauncher
from lightning_asgd.core.lightning.strategy_options import StrategyOptions
from lightning_asgd.core.lightning.sync_callback import put_first
from lightning_asgd.core.lightning.trainer_shell import TrainerShell
from lightning_asgd.core.lightning.unattached import StrategyExtension, passed_on
from lightning_asgd.core.lightning.worker_place import WorkerPlace, check_is_one_worker
from lightning_asgd.core.worker.collectives import REDUCED_ALONE, Collectives, Phase, reduce_op_name
from lightning_asgd.core.worker.fixed_fleet import FixedFleet
from lightning_asgd.core.worker.fleet import Fleet, end_idle_membership, idle_membership
from lightning_asgd.core.worker.metrics_board import MetricsBoard
from lightning_asgd.core.worker.module_state import fixed_tensors, make_identical, persistent_buffers
from lightning_asgd.engines.signals import HeedsInValidation, defer_requeueing, heed_engine
from lightning_asgd.features import FINDERS, load
from lightning_asgd.programs.batch_units import counter_of
from lightning_asgd.world import ranks as world
from lightning_asgd.world.metric_sync import synchronise_metrics
from lightning_asgd.world.process_group import RankInfo

log = logging.getLogger(__name__)


class ASGDStrategy(HeedsInValidation, WorkerPlace, StrategyExtension, Extension):  # type: ignore[misc]
    """Trains with asynchronous SGD: every worker at its own speed, with weights exchanged over parameter servers.

    Every ``nsync`` optimizer steps a worker sends its update to the servers and receives the combined weights of all
    workers, while it continues training. At the ends of epochs and before validations all workers synchronise and hold
    the same weights.

    Args:
        nsync: optimizer steps between two exchanges. Smaller follows the others more closely, larger costs less.
            ``"auto"``: the smallest whose cost each worker finds negligible, and less at first. ``"restarted"``: what
            theory gives for ``algorithm="local_sgd"``. None: ``"auto"`` for ``ASGD`` without transforms, else 10.
        algorithm: what workers push and what servers do with it: an object of :mod:`lightning_asgd.algorithms`, or its
            name. None means :class:`~lightning_asgd.algorithms.ASGD`.
        data: ``"leases"``: workers request batches of an epoch as they need them, so that faster workers train more of
            them, and every sample is trained once per epoch. ``"split"``: every worker trains an equal part, as under
            DDP, and a slow worker delays the others at the end of every epoch. Always split are the data of algorithms
            whose workers wait for each other, such as :class:`~lightning_asgd.algorithms.LocalSGD`, except in elastic
            runs, and what cannot be shared: a message says why.
        compression: fewer bytes for workers on other machines than the servers: ``"bf16"``, ``"fp16"``, ``"int8"``,
            ``"4bit"``, ``"2bit"``, ``"1bit"``, ``"topk"``, or an object of :mod:`lightning_asgd.compression`.
            ``"auto"``: each worker measures its link and the codecs when it sets up, and uses none, ``"bf16"``,
            ``"int8"`` or ``"4bit"``, whichever makes an exchange shortest. At sync points 16 bits per value are sent.
        num_servers: processes that share the weights equally. Raise it if one server's core or link is busy.
        start_method: how workers are started, as for DDP: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        on_worker_failure: ``"continue"``: when a worker dies or hangs, the others take over its data and continue; a
            worker that hung rejoins when it resumes. ``"abort"``: end training on all workers, with an error that says
            why. On one machine, with ``"popen"``, none continues without worker 0.
        timeouts: how long to wait for processes that hang.
        transport: ``"rpc"``: torch's own, without authentication. ``"zmq"``: every connection is encrypted and
            authenticated with the job's secret; it needs ``pip install pyzmq`` and, on several machines, the same
            ``LIGHTNING_ASGD_SECRET`` on each. ``"auto"``: ``"zmq"`` where that is given. The first lines say which.
        run: elastic run that `lightning-asgd serve` hosts, such as ``"10.0.0.1:29400/my-model"``; several hosts have
            commas between them. This Trainer joins it as one more worker, with one device, at any time: it receives
            weights and progress, and leaves when it ends. None: what ``LIGHTNING_ASGD_RUN`` names, else a separate job.
        island: divide the devices into groups that train in lock-step, each of which exchanges as one worker. A number:
            groups of as many devices, with DDP inside. ``"ddp"``, or a ``DDPStrategy`` or ``ModelParallelStrategy`` of
            Lightning's: how each machine's devices train, or as many as the latter's sizes say. With ``run`` the
            Trainer is one such group.
        monitor: have an :class:`~lightning_asgd.ASGDMonitor` log what the workers do, if the Trainer has a logger. A
            monitor among the Trainer's callbacks is used instead.
        advanced: settings that few jobs need, such as ``Advanced(overlap=False)`` or ``Advanced(gain=False)``.
        lightning: ``accelerator``, ``parallel_devices``, ``cluster_environment``, ``checkpoint_io`` and
            ``precision_plugin`` as for ``DDPStrategy``, rarely needed: the Trainer has arguments for them. Arguments of
            DDP's that could only change how it reduces gradients are accepted, and a line says so.

    Attributes:
        stats: statistics of this worker's exchanges; in the main process those of worker 0.
        settings: the arguments and fields of ``advanced`` that define how it trains, as plain values by name.
        board: the latest metrics of every worker, in the process of worker 0 if a monitor collects them; elsewhere
            those of the latest sync point.
        samples: after a fit with an algorithm that samples from a posterior, such as
            :class:`~lightning_asgd.algorithms.SGMCMC`: the samples that the servers have collected, oldest first, on
            the CPU, by the names of the module's ``state_dict()``. On worker 0 and in the main process only; empty on
            the others. Samples from before parameters were unfrozen during fit are not included.

    It becomes a ``DDPStrategy`` of ``pytorch_lightning`` or of ``lightning.pytorch`` when a Trainer of that package
    uses it; attributes such as ``world_size`` exist from then on. Several Trainers of either package may use it one
    after another: the object belongs to the latest one, and earlier Trainers keep a copy.

    Raises:
        ConfigurationError: an argument is of the wrong type or out of range.

    Example:
        >>> from pytorch_lightning import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=2, strategy=ASGDStrategy(), logger=False)

    References:
        Paine et al., "GPU Asynchronous Stochastic Gradient Descent to Speed Up Neural Network Training" (2013);
        Dean et al., "Large Scale Distributed Deep Networks" (2012).
    """

    strategy_name = "asgd"
    model: Any

    def __init__(
        self,
        nsync: int | str | None = None,
        *,
        algorithm: Algorithm | str | None = None,
        data: Literal["leases", "split"] = "leases",
        compression: Compression | str | None = None,
        num_servers: int = 1,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        on_worker_failure: Literal["continue", "abort"] = "continue",
        timeouts: Timeouts | None = None,
        transport: Literal["auto", "rpc", "zmq"] = "auto",
        run: str | None = None,
        island: Any = None,
        monitor: bool = True,
        advanced: Advanced | None = None,
        **lightning: Any,
    ) -> None:
        self._given, others = passed_on(**lightning)
        self._record_call(ASGDStrategy.__init__, locals(), others)
        self.options = options_among(StrategyOptions, locals())
        self._given["start_method"], self.settings = start_method, self.options.settings
        self.board, self.stats = MetricsBoard(), ExchangeStats()
        self.samples: list[dict[str, Tensor]] = []
        self._job = TrainingJob.of(self.options)
        self._resume = Resumption()
        self._offline = Collectives()  # before a session, and after one of a lone worker

    def _become(self, tree: Tree, accelerator: Any) -> None:
        if self.options.island is None:
            super()._become(tree, accelerator)
        else:
            load(FINDERS["island"])(self, tree, accelerator)

    # Of the present session, from set-up to teardown.
    _membership: Fleet | None = None
    fit_session: FitSession | None = None
    """What the worker does while it fits; None else."""
    _undo: tuple[Callable[[], None], ...] = ()  # restore the Trainer
    _saves_nothing = False  # set between a failure of the workers' processes and on_exception

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, saved or in another process: without this process's session."""
        return {**super().__getstate__(), "_membership": None, "fit_session": None, "_undo": ()}

    @property
    def collectives(self) -> Collectives:
        """Collectives of all workers, also between two sessions."""
        membership = self._membership or idle_membership()
        return self._offline if membership is None else membership.collectives

    # ------------------------------------------------------------------ starting and stopping

    def _make_launcher(self) -> Any:
        """The launcher; None in an elastic run."""
        self._resume = Resumption()  # another Trainer may have used the strategy and read a checkpoint
        if self._job.attaches:
            check_is_one_worker(self.num_processes, self.num_nodes, self.cluster_environment)
            return None
        start_method = private_names.start_method.of(self)
        if start_method == "popen":
            launcher = self.tree.derive(ScriptLauncher, "ScriptLauncher")
            return launcher(self._job, self.cluster_environment, self.num_processes, self.num_nodes)
        launcher = self.tree.derive(load(FINDERS["start_method"]), "MultiProcessLauncher")
        return launcher(self._job, self, start_method, self.options.policy)

    def check_trainer(self, trainer: Any) -> None:
        """Raise if the Trainer's release of Lightning lacks a name that is used. Called before anything is started."""
        self.tree.check_trainer(trainer, leases=self.options.data == "leases")

    def set_world_ranks(self) -> None:
        """Ask the cluster environment for them."""
        with rank_variables.naming():
            super().set_world_ranks()

    def setup_distributed(self) -> None:
        """Join the session instead of a process group."""
        self.set_world_ranks()
        end_idle_membership()
        if self.world_size > 1 or self._job.attaches:  # else random numbers are those of single-device training
            self.tree.restart_random_numbers()
        trainer = self.lightning_module.trainer
        if self._job.attaches:  # there is no launcher that has done so
            self.check_trainer(trainer)
        self.board = MetricsBoard(living=tuple(range(self.world_size)))
        shell = TrainerShell(trainer, self.root_device)
        about = (self._job, self.options.config, self.options.policy, self.board, shell)
        fits = self._is_fitting(trainer)
        if not self._job.attaches:
            self._membership = FixedFleet(*about, (int(super().global_rank), self.world_size), fits=fits)
        elif fits:
            self._membership = load(FINDERS["run"])(*about)
        if self._membership is not None:
            self._membership.join()
            self.settings |= {"transport": self._job.transport, "num_servers": self._job.num_servers}
        self.announce()
        sigterm = shell.sigterm = Sigterm(trainer, alone=True)
        heeds = heed_engine(trainer, sigterm.note) if self._job.attaches else defer_requeueing(trainer)
        self._undo = sigterm.undo, put_first(trainer, monitor=self.options.monitor), heeds

    def announce(self) -> None:
        """Publish this worker's rank and world size in torch.distributed and the environment."""
        environment, membership = self.cluster_environment, self._membership
        rank, size = (self.global_rank, self.world_size) if membership is None else membership.rank_and_size
        world.announce(
            RankInfo(
                rank=rank,
                world_size=size,
                local_rank=self.local_rank,
                local_world_size=self.num_processes,
                node_rank=environment.node_rank() if environment is not None else 0,
                num_nodes=self.num_nodes,
                collectives=lambda: self.collectives,
                meets=not self._job.attaches,
                store=self._job.store,
                encrypted=kind_of(self._job.transport).encrypted,
            )
        )

    def _is_fitting(self, trainer: Any) -> bool:
        return bool(private_names.called_method(trainer) == self.tree.TrainerFn.FITTING)

    def setup(self, trainer: Any) -> None:
        """Put the module on its device, its weights on the servers, and set up optimizers and metrics."""
        self.accelerator.setup(trainer)
        fitting = self._is_fitting(trainer)
        if fitting and private_names.layer_sync.of(self):
            rank_zero_warn(
                "sync_batchnorm=True has no effect under A-SGD: workers take their steps at different times, so no "
                "batch spans all workers. Each normalises by its own batches; the running statistics are averaged."
            )
        world.check_module(self.lightning_module)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        synchronise_metrics(self._metrics_sync, lambda: self.collectives, self.lightning_module, *trainer.callbacks)
        if fitting:
            self._begin_fit(trainer)
        else:
            module = self.lightning_module
            make_identical(self.collectives, module, fixed_tensors(module, ()) | persistent_buffers(module))
        self.setup_precision_plugin()
        if fitting:
            self.tree.optimizers_to_device(self.optimizers, self.root_device)

    def _begin_fit(self, trainer: Any) -> None:
        """Begin a fit: equal weights, this worker's optimizers, the progress of the others."""
        if self._membership is None:
            raise ASGDError("The strategy is not connected. Expected setup_environment() to be called before setup().")
        about = self.options.config, self._resume, counter_of(self.options.config.units)
        session = FitSession(trainer, self._membership, *about, split=self.options.data == "split")
        self.fit_session, self.stats, self.samples = session, session.synchronizer.stats, []
        self.setup_optimizers(trainer)
        session.begin()

    def teardown(self) -> None:
        """End the session. Servers and connection stay for the Trainer's next call."""
        try:
            if self._membership is not None:
                self._membership.leave()
        finally:
            for undo in self._undo:
                undo()
        self._membership, self._undo = None, ()
        if self.fit_session is not None:
            self.fit_session.close()
            self.fit_session = None
        super().teardown()
        if idle_membership() is None:  # not an idle member of a session
            world.withdraw()
        else:
            self.announce()  # Lightning's environment has removed a variable

    def go_offline(self, _: BaseException | None = None) -> None:
        """This worker has failed: its callbacks run without collectives from now on."""
        if self.collectives.phase is Phase.SYNC:
            self.collectives.phase = Phase.OFFLINE

    def has_failed_elsewhere(self) -> None:
        """The workers' processes have failed. This process only waited for them and has nothing to save."""
        self._saves_nothing = True

    def on_exception(self, exception: BaseException) -> None:
        """Report the failure at once, so that no worker waits for this one."""
        self._saves_nothing = False
        if self._membership is not None:
            self._membership.fail(exception)

    # ------------------------------------------------------------------ training

    def on_train_start(self) -> None:
        """Stop all workers if one stops before the first epoch."""
        if self.fit_session is not None and not self.fit_session.in_search:
            trainer = self.lightning_module.trainer
            trainer.should_stop = self.fit_session.any_stops(trainer.should_stop)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Between two batches: merge a reply that has arrived, and exchange if that is due."""
        if self.fit_session is not None:
            self.fit_session.before_batch(batch)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take the step of the worker's own optimizer, and count it."""
        if self.fit_session is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with self.fit_session.step_of(optimizer):
            return super().optimizer_step(
                optimizer, self.fit_session.synchronizer.wrap(optimizer, closure), model, **kwargs
            )

    def on_train_end(self) -> None:
        """Synchronise the final weights, including what callbacks changed."""
        if self.fit_session is not None:
            self.fit_session.end()
            self.samples = self.fit_session.samples

    # ------------------------------------------------------------------ collectives

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Combine a tensor over the living workers; this worker's own in the asynchronous phase."""
        if not isinstance(tensor, Tensor):
            return tensor
        if self.collectives.phase is Phase.ASYNC and self.world_size > 1:
            rank_zero_warn(REDUCED_ALONE)
        return self.collectives.reduce(tensor, reduce_op_name(reduce_op))

    def _metrics_sync(self) -> bool:
        # After the fit a program may have destroyed the process group, to test with one device for instance.
        return self.collectives.real if self._membership is not None else world.collectives_are_real()

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state, with the servers' weights and all of this worker's steps."""
        instead = {} if self.fit_session is None else self.fit_session.catch_up()
        state: dict[str, Any] = super().lightning_module_state_dict()
        state.update((key, value) for key, value in instead.items() if key in state)
        return state

    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load weights; during fit, after a search for a learning rate for instance, into the servers too."""
        super().load_model_state_dict(*args, **kwargs)
        if self.fit_session is not None and self.collectives.phase is Phase.SYNC:
            self.fit_session.start_from_loaded()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the checkpoint on the chief, with all workers' optimizers; between sync points with its own only."""
        if self._saves_nothing:
            log.warning(
                "The main process has not trained, so it does not write %s. Worker 0 writes it when it raises an "
                "exception. If worker 0 was killed or cannot write it, resume from an earlier checkpoint.",
                filepath,
            )
            return
        chief = None
        while chief != self.collectives.chief:  # else it died before it had written the checkpoint
            chief = self.collectives.chief
            if self.fit_session is not None:
                self.fit_session.complete(checkpoint)
            if self._membership is not None and is_last(self.lightning_module.trainer, filepath):
                self._membership.publish_chief_state()  # if this worker dies now, the next chief replaces the file
            with tables_saved(self, checkpoint, filepath):
                super().save_checkpoint(checkpoint, filepath, storage_options)
            if self._membership is not None:
                self._membership.publish_chief_state()
                if self._membership.another_chief:
                    self.collectives.barrier("checkpoint")
        if self.fit_session is not None:
            self.fit_session.whole = None

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint, with this worker's own optimizer and scheduler state in the place of worker 0's."""
        check_archive(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        resume, name = Resumption.of(self), self.options.config.algorithm_name
        resume.tables = read_tables(self, checkpoint, checkpoint_path)
        return {**checkpoint, **resume.read(checkpoint, self.global_rank, name, self._job.num_servers)}

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, and the tables beside it."""
        super().remove_checkpoint(filepath)
        remove_tables(self, filepath)

    @property
    def _restores_optimizers(self) -> bool:
        """Whether a checkpoint holds optimizer states; the progress that an attaching worker receives does not."""
        return self._membership is None or self._membership.entry is None
