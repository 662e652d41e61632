"""``AsyncSGD``: asynchronous SGD in a plain training loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch.nn import Module

from lightning_asgd.algorithms import Algorithm
from lightning_asgd.algorithms.base import Payload
from lightning_asgd.compression import Compression
from lightning_asgd.config import Timeouts
from lightning_asgd.errors import ASGDError, ConfigurationError
from lightning_asgd.loop.elastic_run import AnyFleet, ElasticFleet
from lightning_asgd.loop.fixed_fleet import FixedFleet
from lightning_asgd.loop.fleet import end_idle_membership
from lightning_asgd.loop.job_address import Surroundings
from lightning_asgd.loop.job_options import JobOptions
from lightning_asgd.loop.leased_pass import LeasedPass, SharedData
from lightning_asgd.loop.loop_session import LoopSession
from lightning_asgd.loop.loop_state import LoopState
from lightning_asgd.loop.shell import Shell
from lightning_asgd.loop.signals import Interruptions
from lightning_asgd.loop.training_job import TrainingJob
from lightning_asgd.monitoring.fit_summary import count
from lightning_asgd.monitoring.metrics_board import MetricsBoard
from lightning_asgd.stats import ExchangeStats

__all__ = ["AsyncSGD"]

log = logging.getLogger(__name__)


class AsyncSGD:
    """Asynchronous SGD in a plain training loop, without Lightning.

    Within its ``with`` block the module is trained together with other workers. Module and optimizers are used as they
    are: hooks of the optimizers count the steps that are taken, and between two batches updates are exchanged.

    Args:
        module: what is trained, on its device.
        optimizers: one or several. Of several, the last one takes the last step of a batch.
        schedulers: learning-rate schedulers, whose state a worker that joins later takes over from the others.
        server: address of an elastic run that `lightning-asgd serve` hosts, as ``"host:port"``. The worker joins it at
            any time. None means a job whose workers start and end together, with the variables that torchrun sets; or
            a worker alone without these.
        run_id: name of that run.
        seed: of the order of the samples in :meth:`batches`, the same on all workers.

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

    def __init__(
        self,
        module: Module,
        optimizers: Any,
        *,
        schedulers: Any = (),
        server: str | None = None,
        run_id: str | None = None,
        seed: int = 0,
        nsync: int | str = 10,
        nfetch: int | None = None,
        npush: int | None = None,
        algorithm: Algorithm | str | None = None,
        scale: str | float | None = None,
        overlap: bool | None = None,
        compression: Compression | str | None = None,
        num_servers: int = 1,
        min_workers: int = 1,
        on_worker_failure: str = "continue",
        timeouts: Timeouts | None = None,
        transport: str = "auto",
        max_offline_steps: int = 1000,
        snapshot_every_s: float = 60.0,
    ) -> None:
        given = dict(locals())
        names = JobOptions.__dataclass_fields__
        self._options = JobOptions(**{name: value for name, value in given.items() if name in names})
        self._module = module
        self._all_optimizers, self._all_schedulers = _listed(optimizers), _listed(schedulers)
        _check(module, self._all_optimizers, self._options)
        self._job = TrainingJob.of(self._options)
        self._seed = seed
        self._loaded: Mapping[str, Any] | None = None
        self._data: SharedData | None = None
        self.stats = ExchangeStats()
        # Within the with block.
        self._membership: AnyFleet | None = None
        self._session: LoopSession | None = None
        self._interruptions: Interruptions | None = None

    # ------------------------------------------------------------------ joining and leaving

    def __enter__(self) -> AsyncSGD:
        """Join, and take the weights and the progress of the other workers."""
        if self._session is not None:
            raise ASGDError("This AsyncSGD is in use already. Expected one with block at a time.")
        self._interruptions = Interruptions()
        try:
            self._join()
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def _join(self) -> None:
        end_idle_membership()
        config, state = self._options.config, LoopState(seed=self._seed)
        shell, board = Shell(), MetricsBoard()
        shell.device = next(self._module.parameters()).device
        about = self._job, config, self._options.policy, board, shell
        membership: AnyFleet
        if self._job.attaches:
            membership = ElasticFleet(*about)
        else:
            place = surroundings()
            self._job.begin(place, log.info, is_main=place.rank == 0)
            membership = FixedFleet(*about, (place.rank, place.world_size), fits=True)
        self._membership = membership
        membership.join()
        if self._loaded is not None:
            state.load(self._loaded, config.algorithm_name, self._job.num_servers)
        mine = self._module, self._all_optimizers, self._all_schedulers
        self._session = LoopSession(*mine, membership, config, state, self._interruptions or Interruptions())
        self.stats = self._session.synchronizer.stats
        log.info(
            "A-SGD: %s, %s, transport %s, nsync=%d; this is worker %d.",
            count(membership.rank_and_size[1], "worker"),
            count(membership.client.connection.transport.num_servers, "server"),
            membership.transport,
            config.npush,
            membership.client.connection.worker,
        )

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
        membership, session, interruptions = self._membership, self._session, self._interruptions
        self._membership = self._session = self._interruptions = None
        try:
            if membership is not None and session is not None and error is not None:
                self._report(membership, session, error)
            elif membership is not None and error is not None:
                membership.fail(error)
            if membership is not None and error is None:
                membership.leave()
                end_idle_membership()
        finally:
            if membership is not None:
                membership.end_membership()
            if session is not None:
                session.close()
            self._close_data()
            if interruptions is not None:
                interruptions.close()

    def _report(self, membership: AnyFleet, session: LoopSession, error: BaseException) -> None:
        """Leave in order if this worker was interrupted and the run continues without it; else report a failure."""
        ordered = isinstance(error, KeyboardInterrupt | SystemExit) and membership.comes_and_goes
        if ordered:
            try:
                session.give_back()
                membership.leave()
            except Exception as failure:  # a lost server, for instance
                log.warning("This worker could not push its last steps before it left.", exc_info=True)
                error, ordered = failure, False
        if not ordered:
            membership.fail(error)

    @property
    def _in_use(self) -> LoopSession:
        if self._session is None:
            raise ASGDError("This AsyncSGD is not in use. Expected the call within its with block.")
        return self._session

    # ------------------------------------------------------------------ training

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs until the workers have trained ``total`` together; see :meth:`stop`.

        A worker that joins later begins with the present one.
        """
        session = self._in_use
        while session.state.epoch < total and not session.stops:
            session.begin_epoch()
            yield session.state.epoch
            session.end_epoch()

    def batches(self, data: Any, *, accumulate: int = 1, **options: Any) -> LeasedPass:
        """One pass over a data set: the batches that this worker is granted.

        Each sample is trained once, on any worker; faster workers train more. Updates are exchanged between two
        batches. At the end all workers have trained, and hold the servers' weights.

        Args:
            data: a map-style data set, or a ``DataLoader`` of one. All workers have the same; batch sizes may differ.
            accumulate: batches per optimizer step.
            options: arguments of ``DataLoader`` for a data set: ``batch_size``, ``shuffle``, ``num_workers``, ...

        Returns:
            The batches. Their ``len()`` is the number of this worker's batches if all are equally fast.
        """
        session = self._in_use
        if accumulate < 1:
            raise ConfigurationError(f"accumulate={accumulate!r}. Expected a whole number of at least 1.")
        if self._data is None or self._data.data is not data or self._data.options != options:
            self._close_data()
            self._data = SharedData(data, options)
        return LeasedPass(session, self._data, accumulate)

    def _close_data(self) -> None:
        data, self._data = self._data, None
        if data is not None:
            data.close()

    def sync(self) -> None:
        """Push what was trained and take the weights of all workers.

        In a job all workers wait for each other here and leave with the same weights; so all must call it, between two
        passes over :meth:`batches`, which end with it. In an elastic run no worker waits.
        """
        self._in_use.sync()

    def stop(self) -> None:
        """End training with the present epoch of :meth:`epochs`: in a job and as the chief of a run for all workers."""
        self._in_use.stops = True

    # ------------------------------------------------------------------ where training is

    @property
    def epoch(self) -> int:
        """Epochs that are over; in a loop without :meth:`epochs`, each pass over :meth:`batches` is one."""
        return self._in_use.state.epoch

    @property
    def progress(self) -> float:
        """Epochs that all workers have trained, with the part of the present one. Schedules can follow it."""
        return self._in_use.progress

    @property
    def is_chief(self) -> bool:
        """Whether this worker is to log and to write checkpoints. It may become chief between two batches."""
        return self._in_use.is_chief

    @property
    def rank(self) -> int:
        """The worker's rank among those that took part when its epoch began."""
        return 0 if self._membership is None else self._membership.rank_and_size[0]

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

        A worker that joins others takes their weights and progress instead.
        """
        if self._session is not None:
            raise ASGDError("load_state_dict() was called within the with block. Expected the call before it.")
        self._module.load_state_dict(state["model"])
        for optimizer, theirs in zip(self._all_optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(theirs)
        for scheduler, theirs in zip(self._all_schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(theirs)
        self._loaded = state


def surroundings() -> Surroundings:
    """This process's place in a job that torchrun or a user has started; a worker alone without their variables."""
    rank, world_size = (
        int(os.environ.get("RANK", 0)),
        int(os.environ.get("WORLD_SIZE", 1) if "RANK" in os.environ else 1),
    )
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"RANK={rank} and WORLD_SIZE={world_size} are set. Expected a rank below the number of workers."
        )
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
    here = world_size if host in ("localhost", "127.0.0.1") else 1
    nodes = world_size // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", here)))
    by_hand = not {"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"} & set(os.environ)
    return Surroundings(rank, world_size, nodes, world_size > 1, by_hand, lambda: (host, int(port)))


def _listed(given: Any) -> Sequence[Any]:
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def _check(module: Module, optimizers: Sequence[Any], options: JobOptions) -> None:
    """Raise a :class:`ConfigurationError` for what a plain loop cannot do."""
    if not isinstance(module, Module) or next(module.parameters(), None) is None:
        raise ConfigurationError(
            f"AsyncSGD was given {type(module).__name__}. Expected a torch.nn.Module with weights."
        )
    for optimizer in optimizers:
        if not hasattr(optimizer, "register_step_post_hook"):
            raise ConfigurationError(
                f"AsyncSGD was given the optimizer {type(optimizer).__name__}. Expected torch.optim.Optimizer, whose "
                "step hooks count the steps."
            )
    config = options.config
    if config.algorithm.payload is Payload.LAYERS or config.restarted:
        what = config.algorithm_name if config.algorithm.payload is Payload.LAYERS else "nsync='restarted'"
        raise ConfigurationError(
            f"{what} was given to AsyncSGD. Expected another algorithm and a number, or a Trainer with ASGDStrategy: "
            "it needs to know the whole loop."
        )
