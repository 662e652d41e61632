"""``AsyncSGD``: asynchronous SGD in a plain training loop."""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Literal

from torch.nn import Module

from lightning_asgd.core.algorithms.base import Algorithm
from lightning_asgd.core.algorithms.compression import Compression
from lightning_asgd.core.algorithms.config import Advanced, Timeouts
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError
from lightning_asgd.core.foundation.settings import refuse
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.job import rank_variables
from lightning_asgd.core.job.address import Surroundings
from lightning_asgd.core.job.interruptions import Interruptions
from lightning_asgd.core.job.options import LoopOptions, options_among
from lightning_asgd.core.job.training_job import TrainingJob
from lightning_asgd.core.worker.shell import Shell
from lightning_asgd.loops.controls import LoopControls
from lightning_asgd.loops.member import LoopMember
from lightning_asgd.loops.session import LoopSession

log = logging.getLogger(__name__)


class AsyncSGD(LoopControls):
    """Asynchronous SGD in a plain training loop, without Lightning.

    Within its ``with`` block the module is trained together with other workers. Module and optimizers are used as they
    are: hooks of the optimizers count the steps that are taken, and between two batches updates are exchanged.

    Args:
        module: what is trained, on its device.
        optimizers: one or several, in any order.
        schedulers: learning-rate schedulers, whose state a worker that joins later takes over from the others.
        run: elastic run that `lightning-asgd serve` hosts, such as ``"10.0.0.1:29400/my-model"``; several hosts have
            commas between them. The worker joins it at any time. None: what ``LIGHTNING_ASGD_RUN`` names; else a job
            whose workers start and end together, with the variables that torchrun sets; or a worker alone without them.
        seed: of the order of the samples in :meth:`batches`, the same on all workers.
        total_steps: optimizer steps that each worker takes, for ``nsync="restarted"``. It does not end the training.

    All other arguments are those of :class:`~lightning_asgd.ASGDStrategy`.

    Attributes:
        stats: statistics of this worker's exchanges.

    Raises:
        ConfigurationError: an argument is of the wrong type or out of range.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> model, data = torch.nn.Linear(2, 1), TensorDataset(torch.randn(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with AsyncSGD(model, optimizer) as asgd:
        ...     for epoch in asgd.epochs(2):
        ...         for (x,) in asgd.batches(data, batch_size=4, shuffle=True):
        ...             optimizer.zero_grad()
        ...             model(x).square().mean().backward()
        ...             _ = optimizer.step()
    """

    _in_job: ClassVar[AsyncSGD | None] = None  # the one of this process whose with block has begun

    def __init__(
        self,
        module: Module,
        optimizers: Any,
        *,
        schedulers: Any = (),
        run: str | None = None,
        seed: int = 0,
        nsync: int | str | None = None,
        algorithm: Algorithm | str | None = None,
        compression: Compression | str | None = None,
        num_servers: int = 1,
        on_worker_failure: Literal["continue", "abort"] = "continue",
        timeouts: Timeouts | None = None,
        transport: Literal["auto", "rpc", "zmq"] = "auto",
        total_steps: int | None = None,
        advanced: Advanced | None = None,
        **unknown: Any,
    ) -> None:
        for name, value in unknown.items():
            refuse(name, value, list(inspect.signature(AsyncSGD).parameters)[:-1])
        self._options = options_among(LoopOptions, locals())
        self._module = module
        self._listed_optimizers, self._listed_schedulers = _listed(optimizers), _listed(schedulers)
        _check(module, self._listed_optimizers, self._listed_schedulers)
        self._job = TrainingJob.of(self._options)
        self._seed = seed
        self._loaded: Mapping[str, Any] | None = None
        self.stats = ExchangeStats()
        self._member: LoopMember | None = None  # within the with block
        self._interruptions: Interruptions | None = None

    # ------------------------------------------------------------------ joining and leaving

    def __enter__(self) -> AsyncSGD:
        """Join, and take the weights and the progress of the other workers."""
        if self._member is not None:
            raise ASGDError("This AsyncSGD is in use already. Expected one with block at a time.")
        if AsyncSGD._in_job is not None and not self._job.attaches:
            raise ASGDError(
                "Another AsyncSGD of this process is in use in a job. Expected one with block at a time. To "
                "train several modules together, put them into a torch.nn.ModuleDict, and give all their optimizers."
            )
        shell = Shell()
        shell.device = next(self._module.parameters()).device
        self._interruptions = interruptions = Interruptions()
        if not self._job.attaches:
            AsyncSGD._in_job = self
        self._member = member = LoopMember(self._options, self._job, shell, interruptions)
        try:
            if self._job.attaches:
                member.join(0, 1)
            else:
                place = surroundings()
                self._job.begin(place, log.info, is_main=place.rank == 0)
                member.join(place.rank, place.world_size)
            mine = self._module, self._listed_optimizers, self._listed_schedulers
            session = member.begin(*mine, self._loaded, log.info, self._seed)
        except BaseException as error:
            self._leave(error)
            raise
        self.stats = session.synchronizer.stats
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave with the final weights; after an exception report it, and let the others continue."""
        try:
            if error is None:
                self._in_use.end()
        except BaseException as failure:
            self._leave(failure)
            raise
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        member, interruptions = self._member, self._interruptions
        self._member = self._interruptions = None
        if AsyncSGD._in_job is self:
            AsyncSGD._in_job = None
        try:
            if member is not None:
                member.leave(error)
        finally:
            self._close_data()
            if interruptions is not None:
                interruptions.close()

    @property
    def _in_use(self) -> LoopSession:
        if self._member is None or self._member.session is None:
            raise ASGDError("This AsyncSGD is not in use. Expected the call within its with block.")
        return self._member.session

    # ------------------------------------------------------------------ this worker

    @property
    def is_chief(self) -> bool:
        """Whether this worker is to log and to write checkpoints. It may become chief between two batches."""
        return self._in_use.is_chief

    @property
    def rank(self) -> int:
        """The worker's rank among those that took part when its epoch began."""
        return self._in_use.rank

    @property
    def world_size(self) -> int:
        """How many workers took part when its epoch began."""
        return self._in_use.workers

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What training continues from: weights with all of this worker's steps, optimizers, schedulers, progress.

        ``["model"]`` is the module's ``state_dict()`` with the servers' weights, also between two sync points.
        """
        return self._in_use.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned. To be called before the ``with`` block.

        In a job every worker loads it. A worker that joins others takes their weights and progress instead.
        """
        if self._member is not None:
            raise ASGDError("load_state_dict() was called within the with block. Expected the call before it.")
        self._module.load_state_dict(state["model"])
        for optimizer, theirs in zip(self._listed_optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(theirs)
        for scheduler, theirs in zip(self._listed_schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(theirs)
        self._loaded = state


def surroundings() -> Surroundings:
    """This process's place in a job that torchrun or a user has started; a worker alone without their variables."""
    number = rank_variables.number
    has_rank = "RANK" in os.environ
    given = has_rank or "WORLD_SIZE" in rank_variables.set_by_others()  # a Trainer's workers have no RANK
    rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1) if given else 1
    if rank >= world_size or (world_size > 1 and not has_rank):
        raise ConfigurationError(
            f"{rank_variables.listed()}. Expected RANK below WORLD_SIZE, the number of workers. Start the processes "
            "with torchrun, set both for each process, or unset both to train alone."
        )
    if not has_rank and os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        log.warning(
            "SLURM_STEP_NUM_TASKS=%s is set, but RANK is not: each process trains alone. Set "
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each if they are to be one job.",
            os.environ["SLURM_STEP_NUM_TASKS"],
        )
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
    here = world_size if host in ("localhost", "127.0.0.1") else 1
    each = number("LOCAL_WORLD_SIZE", here)
    nodes = number("GROUP_WORLD_SIZE", math.ceil(world_size / each))  # torchrun's number of machines
    by_hand = not {"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"} & set(os.environ)
    local_rank, node = number("LOCAL_RANK", rank % each), number("GROUP_RANK", rank // each)
    return Surroundings(
        rank, world_size, local_rank, nodes, world_size > 1, by_hand, lambda: (host, int(port)), lambda: node
    )


def _listed(given: Any) -> Sequence[Any]:
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def _check(module: Module, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
    """Raise a :class:`ConfigurationError` for what cannot be trained, or whose steps cannot be counted."""
    if not isinstance(module, Module) or next(module.parameters(), None) is None:
        raise ConfigurationError(
            f"AsyncSGD was given {type(module).__name__}. Expected a torch.nn.Module with weights."
        )
    if not optimizers:
        raise ConfigurationError("AsyncSGD was given no optimizer. Expected at least one: its steps are counted.")
    for optimizer in optimizers:
        if not hasattr(optimizer, "register_step_post_hook"):
            raise ConfigurationError(
                f"AsyncSGD was given the optimizer {type(optimizer).__name__}. Expected torch.optim.Optimizer, whose "
                "step hooks count the steps."
            )
    for scheduler in schedulers:
        if not callable(getattr(scheduler, "state_dict", None)):
            raise ConfigurationError(
                f"AsyncSGD was given the scheduler {type(scheduler).__name__}. Expected one of torch's, whose "
                "state_dict() a worker that joins later takes over."
            )
