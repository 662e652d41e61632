"""``FabricASGDStrategy``: asynchronous SGD for Fabric, whose hooks are translated into those of a plain loop."""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from torch import Tensor
from torch.nn import Module

from lightning_asgd.core.algorithms.base import Algorithm
from lightning_asgd.core.algorithms.compression import Compression
from lightning_asgd.core.algorithms.config import Advanced, Timeouts
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.foundation.whole_file import check_archive
from lightning_asgd.core.job.interruptions import Interruptions, raised_by
from lightning_asgd.core.job.options import LoopOptions, options_among
from lightning_asgd.core.job.training_job import TrainingJob
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.class_trees import FABRICS, Extension, become_global_zero
from lightning_asgd.core.lightning.launchers import ScriptLauncher
from lightning_asgd.core.lightning.unattached import StrategyExtension
from lightning_asgd.core.lightning.worker_place import WorkerPlace, check_is_one_worker
from lightning_asgd.core.worker.collectives import Collectives, Phase, reduce_op_name
from lightning_asgd.core.worker.shell import Shell
from lightning_asgd.loops.controls import LoopControls
from lightning_asgd.loops.leased_pass import LeasedPass
from lightning_asgd.loops.member import LoopMember
from lightning_asgd.loops.session import LoopSession


class _FabricShell(Shell):
    """A program with Fabric, which trains on ``device``."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def speak_as(self, rank: int) -> None:
        """Let Fabric log and warn in this process if ``rank`` is 0."""
        become_global_zero(rank)


class _NoBackwardSync:
    """What ``fabric.no_backward_sync()`` asks for. Only ``LayerWise`` synchronises gradients in backward at all."""

    def __init__(self, strategy: FabricASGDStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Send nothing inside; the next backward sends the accumulated gradients."""
        member = self._strategy._member
        session = None if member is None else member.session
        return contextlib.nullcontext() if session is None or not enabled else session.accumulating()


class _OnDevice:
    """Batches that are moved to the worker's device."""

    def __init__(self, batches: LeasedPass, strategy: Any) -> None:
        self._batches, self._strategy = batches, strategy

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield self._strategy.batch_to_device(batch)


class FabricASGDStrategy(LoopControls, StrategyExtension, Extension):  # type: ignore[misc]
    """Trains with asynchronous SGD in a loop with Fabric: ``Fabric(strategy=FabricASGDStrategy(), devices=2)``.

    ``fabric.setup(module, optimizer)`` joins the other workers. ``fabric.strategy.batches(...)`` leases data to them as
    :class:`~lightning_asgd.AsyncSGD` does, ``fabric.strategy.epochs(...)`` and ``fabric.strategy.sync()`` likewise. A
    loop over ``fabric.setup_dataloaders(...)`` trains a fixed part of the data, with exchanges after optimizer steps.
    The worker leaves at the end of the script, or by ``fabric.strategy.teardown()``.

    Args:
        run: an elastic run that the worker joins, with ``devices=1``.
        seed: of the order of the samples in :meth:`batches`, the same on all workers.
        total_steps: optimizer steps that each worker takes, for ``nsync="restarted"``. It does not end the training.
        lightning: ``accelerator``, ``parallel_devices``, ``cluster_environment``, ``checkpoint_io`` and ``precision``
            as for Fabric's ``DDPStrategy``.

    All other arguments are those of :class:`~lightning_asgd.ASGDStrategy`.

    Attributes:
        stats: statistics of this worker's exchanges.

    It becomes a ``DDPStrategy`` of ``lightning.fabric`` or of ``lightning_fabric`` when a Fabric of that package takes
    it.

    Raises:
        ConfigurationError: an argument is of the wrong type or out of range.

    Example:
        >>> from lightning.fabric import Fabric
        >>> fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricASGDStrategy())
    """

    strategy_name = "asgd"
    trees = FABRICS

    def __init__(
        self,
        nsync: int | str | None = None,
        *,
        algorithm: Algorithm | str | None = None,
        compression: Compression | str | None = None,
        num_servers: int = 1,
        on_worker_failure: Literal["continue", "abort"] = "continue",
        timeouts: Timeouts | None = None,
        transport: Literal["auto", "rpc", "zmq"] = "auto",
        run: str | None = None,
        seed: int = 0,
        total_steps: int | None = None,
        advanced: Advanced | None = None,
        **lightning: Any,
    ) -> None:
        names = "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision"
        self._given = {name: lightning.get(name) for name in names}
        self._record_call(FabricASGDStrategy.__init__, locals(), {k: v for k, v in lightning.items() if k not in names})
        self.options = options_among(LoopOptions, locals())
        self.stats = ExchangeStats()
        self._seed = seed
        self._job = TrainingJob.of(self.options)
        self._offline = Collectives()

    _member: LoopMember | None = None
    _trained: Module | None = None  # what is trained
    _interruptions: Interruptions | None = None
    _loaders: tuple[Any, ...] = ()  # those that were set up

    # ------------------------------------------------------------------ starting and stopping

    def _make_launcher(self) -> Any:
        """The launcher; None in an elastic run."""
        private_names.backward_sync_control.set_of(self, _NoBackwardSync(self))
        if self._job.attaches:
            check_is_one_worker(self.num_processes, self.num_nodes, self.cluster_environment)
            return None
        launcher = self.tree.derive(ScriptLauncher, "ScriptLauncher")
        return launcher(self._job, self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Join the other workers of a job, instead of a process group."""
        self.accelerator.setup_device(self.root_device)
        if not self._job.attaches:
            self._join()

    def _join(self) -> LoopMember:
        shell, interruptions = _FabricShell(self.root_device), Interruptions()
        self._interruptions = interruptions
        self._member = member = LoopMember(self.options, self._job, shell, interruptions)
        atexit.register(self._leave_at_exit)
        try:
            member.join(int(super().global_rank), int(self.world_size))
        except BaseException as error:
            self._leave(error)
            raise
        return member

    def setup_module(self, module: Module) -> Module:
        """The module as it is."""
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Raise: an optimizer is set up together with its module."""
        raise ConfigurationError(
            "fabric.setup_optimizers() was called with FabricASGDStrategy. Expected fabric.setup(module, optimizer), "
            "which sets both up together."
        )

    def setup_module_and_optimizers(self, module: Module, optimizers: list[Any], scheduler: Any = ()) -> Any:
        """Take the weights and the progress of the other workers, or bring the first ones."""
        if self._trained is not None:
            raise ConfigurationError(
                "fabric.setup() was called with a second module and its optimizers. Expected one: put both modules "
                "into a torch.nn.ModuleDict, and call fabric.setup(modules, optimizer_1, optimizer_2)."
            )
        member = self._join() if self._member is None else self._member
        schedulers = [scheduler] if scheduler else []
        try:
            session = member.begin(module, optimizers, schedulers, None, self.tree.say, self._seed)
        except BaseException as error:
            self._leave(error)
            raise
        self._trained, self.stats = module, session.synchronizer.stats
        return (module, optimizers, scheduler)[: 2 if scheduler == () else 3]  # Fabric 2.5 hands over none

    def teardown(self) -> None:
        """Leave with the final weights."""
        try:
            if self._member is not None and self._member.session is not None:
                self._member.session.end()
        except BaseException as error:
            self._leave(error)
            raise
        self._leave(None)
        super().teardown()

    def _leave(self, error: BaseException | None) -> None:
        member, interruptions = self._member, self._interruptions
        self._member = self._trained = self._interruptions = None
        atexit.unregister(self._leave_at_exit)
        self._loaders = ()
        try:
            if member is not None:
                member.leave(error)
        finally:
            self._close_data()
            if interruptions is not None:
                interruptions.close()

    def _leave_at_exit(self) -> None:
        """The script has ended, by an exception or not."""
        error: BaseException | None = getattr(sys, "last_value", None)
        raised = None if self._interruptions is None else self._interruptions.raised
        if raised is not None:
            error = raised_by(raised)
        if error is not None:
            self._leave(error)
        else:
            self.teardown()

    # ------------------------------------------------------------------ this worker

    @property
    def _in_use(self) -> LoopSession:
        if self._member is None or self._member.session is None:
            raise ASGDError("No module was set up. Expected fabric.setup(module, optimizer) before this call.")
        return self._member.session

    @property
    def collectives(self) -> Collectives:
        """Collectives of all workers."""
        membership = None if self._member is None else self._member.membership
        return self._offline if membership is None else membership.collectives

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker is chief: it logs and writes checkpoints."""
        membership = None if self._member is None else self._member.membership
        return bool(super().is_global_zero) if membership is None else membership.is_chief

    root_device = WorkerPlace.root_device
    distributed_sampler_kwargs = WorkerPlace.distributed_sampler_kwargs

    # ------------------------------------------------------------------ data

    def process_dataloader(self, dataloader: Any) -> Any:
        """Remember a dataloader that Fabric wraps, for :meth:`batches`."""
        self._loaders = (*self._loaders, dataloader)
        return dataloader

    def batches(self, data: Any, *, accumulate: int = 1, **options: Any) -> Iterable[Any]:
        """See :meth:`AsyncSGD.batches`. The batches are on the worker's device; ``data`` may be Fabric's loader."""
        batches, each = getattr(data, "batch_sampler", None), getattr(data, "sampler", None)  # of a stream only each
        for loader in self._loaders:
            if (batches, each) != (None, None) and batches is loader.batch_sampler and each is loader.sampler:
                data = loader
        return _OnDevice(self._pass_over(data, accumulate, options), self)

    # ------------------------------------------------------------------ collectives

    barrier, broadcast = WorkerPlace.barrier, WorkerPlace.broadcast
    all_gather, reduce_boolean_decision = WorkerPlace.all_gather, WorkerPlace.reduce_boolean_decision

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Combine a tensor over the living workers; this worker's own between two sync points."""
        return self.collectives.reduce(tensor, reduce_op_name(reduce_op)) if isinstance(tensor, Tensor) else tensor

    # ------------------------------------------------------------------ checkpoints

    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        """The module's state, with the servers' weights and all of this worker's steps."""
        if module is not self._trained:
            return dict(super().get_module_state_dict(module))
        return self._in_use.weights()

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint; weights that are loaded after ``fabric.setup()`` go to the servers too."""
        check_archive(path)
        rest: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        if self._trained is not None:
            if self.collectives.phase is not Phase.SYNC:
                raise ConfigurationError(
                    "fabric.load() was called while the workers train. Expected it before training, or after sync()."
                )
            self._in_use.set_up_again()
        return rest
