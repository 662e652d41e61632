"""``ASGDStrategy``: Lightning's hooks, translated into exchanges and collectives. Nothing else lives here."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asgd import resume, supervisor
from lightning_asgd._lightning import (
    Extension,
    StrategyExtension,
    adopt_checkpoint_states,
    apply_to_collection,
    become_global_zero,
    begin_epochs_anew,
    callback_modules,
    checkpoint_states,
    follow_progress,
    looks_at_gradients,
    metrics_of,
    progress_in,
    progress_of,
    rank_zero_warn,
    when_epochs_end,
)
from lightning_asgd._loop import LeasedLoop, why_split
from lightning_asgd.algorithms import Algorithm
from lightning_asgd.algorithms.base import Payload, Run
from lightning_asgd.callbacks import SyncPoints
from lightning_asgd.compression import Compression
from lightning_asgd.config import ExchangeConfig, Timeouts, positive_int, server_address
from lightning_asgd.errors import ASGDError, ConfigurationError, ServerLostError
from lightning_asgd.finite import zero_what_is_not_finite
from lightning_asgd.launcher import Job, MultiProcessLauncher, ScriptLauncher
from lightning_asgd.messages import Meeting, Part, Policy
from lightning_asgd.monitor import ASGDMonitor
from lightning_asgd.optim import PosteriorSampler
from lightning_asgd.stats import Board, ExchangeStats
from lightning_asgd.transport.choose import TRANSPORTS
from lightning_asgd.worker.attachment import Attachment
from lightning_asgd.worker.client import Client
from lightning_asgd.worker.collectives import Collectives, Phase, reduce_op_name
from lightning_asgd.worker.entry import agree, enter, named_state, newly_trainable
from lightning_asgd.worker.heartbeat import Heartbeat
from lightning_asgd.worker.meter import Meter, Waited
from lightning_asgd.worker.recovery import Recovery
from lightning_asgd.worker.sharing import Sharing

__all__ = ["ASGDStrategy"]

log = logging.getLogger(__name__)

_DATA = ("leases", "split")
_ON_FAILURE = ("continue", "abort")
_START_METHODS = ("popen", "spawn", "fork", "forkserver")


class ASGDStrategy(StrategyExtension, Extension):  # type: ignore[misc]
    """Trains with asynchronous SGD: every worker at its own speed, with weights exchanged over parameter servers.

    Every ``nsync`` optimizer steps a worker sends what it learnt to the servers and takes back what all have learnt,
    while it goes on training. At the ends of epochs and before validations all workers meet and hold the same weights.

    Args:
        nsync: optimizer steps between two exchanges. Smaller follows the others more closely, larger costs less.
            ``"auto"``: as few as cost next to nothing. Every worker measures steps, exchanges and the servers while it
            trains, and follows their changes.
        nfetch: steps between two fetches of the weights, if not ``nsync``.
        npush: steps between two pushes of what was learnt, if not ``nsync``.
        algorithm: what workers push and what servers do with it: an object of :mod:`lightning_asgd.algorithms`, or its
            name. None means :class:`~lightning_asgd.algorithms.ASGD`.
        scale: for ``ASGD``, what a push is multiplied with on the servers: ``"mean"`` (1 / live workers) converges like
            DDP with the same hyper-parameters; ``"sum"`` is the founding paper's rule, which needs a warm start and a
            smaller learning rate; a number is taken as it is.
        overlap: train on while an exchange is under way. False waits for the answer, which is slower, and takes no step
            on weights that are older than it. None means what the algorithm does by itself.
        data: ``"leases"``: workers take batches of an epoch as they come, so that faster ones train more of them, and
            every sample is trained once per epoch. ``"split"``: everybody trains an equal part, as under DDP, and a
            slow worker holds the others up at the end of every epoch. Split anyway are iterable datasets, several
            loaders, samplers that Lightning does not replace, and the data of algorithms whose workers wait for each
            other, such as :class:`~lightning_asgd.algorithms.LocalSGD`.
        compression: fewer bytes for workers on other machines than the servers: ``"bf16"``, ``"fp16"``, ``"int8"``,
            ``"topk"``, or an object of :mod:`lightning_asgd.compression`. Weights at sync points are sent in full.
        num_servers: processes that share the weights equally. Raise it if one server's core or link is busy.
        start_method: how workers are started: ``"popen"``, ``"spawn"`` or ``"fork"``, as for DDP.
        min_workers: training is ended when fewer than these are left.
        on_worker_failure: ``"continue"``: when a worker dies or hangs the others take its data and go on; one that
            hung joins again when it wakes. ``"abort"``: end training on all workers, and say why. Worker 0 logs and
            writes the checkpoints: nothing goes on without it.
        timeouts: how long to wait for processes that hang.
        transport: ``"rpc"``: torch's own, fast, without authentication. ``"zmq"``: every connection is encrypted and
            nobody gets in without the job's secret; it needs ``pip install 'lightning-asgd[zmq]'`` and, on several
            machines, the same ``LIGHTNING_ASGD_SECRET`` in the environment of each.
        server: where `lightning-asgd serve` serves a run, as ``"host:port"``. This Trainer attaches itself as one more
            worker, with one device, at any time: it takes over weights and progress, and leaves when it ends. None
            means a job of its own, whose workers start and end together.
        run_id: name of that run.
        monitor: have an :class:`~lightning_asgd.ASGDMonitor` log what the workers do, if the Trainer has a logger. One
            that you put into the Trainer's callbacks takes its place.
        max_offline_steps: steps that a worker takes alone while an exchange is under way before it waits for it.
        accelerator: these five are as for Lightning's ``DDPStrategy``, and seldom given: the Trainer has arguments for
            them.
        parallel_devices: see above.
        cluster_environment: see above.
        checkpoint_io: see above.
        precision_plugin: see above.

    Attributes:
        stats: what this worker's exchanges were like; of worker 0 in the main process.
        settings: the arguments above that say how it trains, as plain values.
        board: the latest figures of every worker in the process of worker 0, where a monitor takes any; elsewhere those
            of the latest sync point.
        samples: after a fit with an algorithm that samples from a posterior, such as
            :class:`~lightning_asgd.algorithms.SGMCMC`: what the servers have collected, oldest first, on the CPU, by
            the names of the module's ``state_dict()``. On worker 0 and in the main process only; empty on the others.
            Samples end with the layout: those from before parameters were unfrozen during fit are not among them.

    It becomes a ``DDPStrategy`` of ``pytorch_lightning`` or of ``lightning.pytorch`` when a Trainer of the one or the
    other takes it: attributes such as ``world_size`` are there from then on.

    Raises:
        ConfigurationError: an argument is of the wrong type or out of range.

    Example:
        >>> from pytorch_lightning import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=2, strategy=ASGDStrategy(nsync=10), logger=False)

    References:
        Paine et al., "GPU Asynchronous Stochastic Gradient Descent to Speed Up Neural Network Training" (2013);
        Dean et al., "Large Scale Distributed Deep Networks" (2012).
    """

    strategy_name = "asgd"
    model: Any

    def __init__(
        self,
        nsync: int | str = 10,
        *,
        nfetch: int | None = None,
        npush: int | None = None,
        algorithm: Algorithm | str | None = None,
        scale: str | float | None = None,
        overlap: bool | None = None,
        data: str = "leases",
        compression: Compression | str | None = None,
        num_servers: int = 1,
        start_method: str = "popen",
        min_workers: int = 1,
        on_worker_failure: str = "continue",
        timeouts: Timeouts | None = None,
        transport: str = "rpc",
        server: str | None = None,
        run_id: str | None = None,
        monitor: bool = True,
        max_offline_steps: int = 1000,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        self.config = ExchangeConfig.create(
            nsync=nsync,
            nfetch=nfetch,
            npush=npush,
            algorithm=algorithm,
            scale=scale,
            overlap=overlap,
            max_offline_steps=max_offline_steps,
            timeouts=timeouts,
            compression=compression,
        )
        if start_method not in _START_METHODS:
            raise ConfigurationError(f"start_method={start_method!r}. Expected one of {', '.join(_START_METHODS)}.")
        if transport not in TRANSPORTS:
            raise ConfigurationError(f"transport={transport!r}. Expected {' or '.join(map(repr, TRANSPORTS))}.")
        if data not in _DATA:
            raise ConfigurationError(f"data={data!r}. Expected one of {', '.join(map(repr, _DATA))}.")
        if on_worker_failure not in _ON_FAILURE:
            expected = " or ".join(map(repr, _ON_FAILURE))
            raise ConfigurationError(f"on_worker_failure={on_worker_failure!r}. Expected {expected}.")
        self._policy = Policy(
            silence_s=self.config.timeouts.silence_s,
            min_workers=positive_int("min_workers", min_workers),
            abort=on_worker_failure == "abort",
        )
        self._given = {
            "accelerator": accelerator,
            "parallel_devices": parallel_devices,
            "cluster_environment": cluster_environment,
            "checkpoint_io": checkpoint_io,
            "precision_plugin": precision_plugin,
            "start_method": start_method,
        }
        if not isinstance(monitor, bool):
            raise ConfigurationError(
                f"monitor={monitor!r}. Expected True or False. Give an ASGDMonitor to Trainer(callbacks=[...])."
            )
        self._monitor = monitor
        self.settings: dict[str, Any] = {
            "nsync": nsync,
            "nfetch": self.config.nfetch,
            "npush": self.config.npush,
            "algorithm": repr(self.config.algorithm),
            "overlap": self.config.overlap,
            "data": data,
            "compression": None if self.config.compression is None else repr(self.config.compression),
            "num_servers": num_servers,
            "start_method": start_method,
            "min_workers": min_workers,
            "on_worker_failure": on_worker_failure,
            "transport": transport,
            "max_offline_steps": max_offline_steps,
        }
        self.board = Board()
        self._meter: Meter | None = None  # None unless somebody wants figures
        self.stats = ExchangeStats()
        self.samples: list[dict[str, Tensor]] = []
        self.collectives = Collectives()
        self._heartbeat: Heartbeat | None = None
        self._recovery: Recovery | None = None
        servers = positive_int("num_servers", num_servers)
        self._job = Job(servers, self.config.timeouts.start_s, self.config.restorable, transport)
        self._data = data
        self._attaches = server is not None
        self._attachment: Attachment | None = None  # while it fits
        if server is not None or run_id is not None:
            self._check_attaches(server, run_id)
            self._job.address, self._job.run_id = server_address(server or ""), run_id or ""
        self._sharing: Sharing | None = None
        self._data = data
        self._leased: LeasedLoop | None = None  # None while every worker has its own part of the data
        self._resume_data: dict[str, Any] = {}
        self._resume_versions: list[int] | None = None
        self._resume_servers: Sequence[Any] = ()
        self._layouts = 0  # made in this session
        self._failed = False
        self._told = False  # that the data are split
        self._undo: list[Callable[[], None]] = []  # of changes to the Trainer

    # ------------------------------------------------------------------ starting and stopping

    def _check_attaches(self, server: str | None, run_id: str | None) -> None:
        algorithm = self.config.algorithm
        if not server or not run_id:
            raise ConfigurationError(f"server={server!r} and run_id={run_id!r}. Expected both, or neither.")
        if algorithm.waits or algorithm.payload in (Payload.LAYERS, Payload.NONE):
            raise ConfigurationError(
                f"{type(algorithm).__name__} was given with server={server!r}. Expected an algorithm whose workers do "
                "not wait for each other, such as ASGD: here they come and go."
            )
        if self._data == "split":
            raise ConfigurationError(
                f"data='split' was given with server={server!r}. Expected data='leases': nobody knows how many workers "
                "there will be to split them among."
            )
        if self._policy.abort or self._policy.min_workers > 1:
            raise ConfigurationError(
                "on_worker_failure='abort' or min_workers was given with server=... Expected neither: workers come and "
                "go as they like."
            )

    def _configure_launcher(self) -> None:
        if self._attaches:
            if self.num_processes * self.num_nodes != 1:
                raise ConfigurationError(
                    f"devices={self.num_processes} and num_nodes={self.num_nodes} were given with server=... Expected "
                    "devices=1 and num_nodes=1: a Trainer attaches itself as one worker. Start one for every device."
                )
            return  # this process is the worker
        if self._start_method == "popen":
            launcher = self.tree.derive(ScriptLauncher, "SubprocessScriptLauncher")
            self._launcher = launcher(self._job, self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            launcher = self.tree.derive(MultiProcessLauncher, "MultiProcessingLauncher")
            self._launcher = launcher(self._job, self, self._start_method, self._policy)

    @property
    def global_rank(self) -> int:
        """The worker's. In a run whose workers come and go the chief's is 0, and that of others their number."""
        if self._attachment is None:
            return int(super().global_rank)
        return 0 if self._attachment.chief else self._attachment.client.worker

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker logs and writes checkpoints."""
        return self.global_rank == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How Lightning's samplers deal samples out: one that attaches itself is alone, as far as they know."""
        return {"num_replicas": 1, "rank": 0} if self._attaches else dict(super().distributed_sampler_kwargs)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether a checkpoint holds optimizer states; what a worker is told when it attaches itself does not."""
        return self._attachment is None or self._attachment.founder

    def setup_distributed(self) -> None:
        """Join the session instead of a process group."""
        self.tree.reset_seed()
        self.set_world_ranks()
        if dist.is_available() and dist.is_initialized() and self.world_size > 1:
            rank_zero_warn(
                "torch.distributed is initialized, by an earlier strategy of this process perhaps: Lightning will "
                "keep all workers in lock-step with worker 0. Run A-SGD in a process of its own."
            )
        self._failed = self._told = False
        self._leased = self._meter = None
        self._layouts = 0
        self.board = Board(living=tuple(range(self.world_size)))
        if not self._attaches:
            self._join(self._job.session)
        elif self.lightning_module.trainer.state.fn == self.tree.TrainerFn.FITTING:
            self._attach()
        self._add_callbacks(self.lightning_module.trainer)

    def _add_callbacks(self, trainer: Any) -> None:
        callbacks = trainer.callbacks
        if not any(isinstance(callback, SyncPoints) for callback in callbacks):
            callbacks.insert(0, self.tree.derive(SyncPoints, "Callback")())
        if self._monitor and trainer.loggers and not trainer.fast_dev_run and not self._monitored:
            callbacks.insert(1, ASGDMonitor())

    @property
    def _monitored(self) -> bool:
        return any(isinstance(callback, ASGDMonitor) for callback in self.lightning_module.trainer.callbacks)

    def setup(self, trainer: Any) -> None:
        """Put the module on its device, its weights on the servers, and set up optimizers and metrics."""
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == self.tree.TrainerFn.FITTING
        if fitting and self._layer_sync:
            rank_zero_warn(
                "sync_batchnorm=True has no effect under A-SGD: workers take their steps at different times, so there "
                "is no common batch. Each normalises by its own batches; the running statistics are averaged."
            )
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        module = self.lightning_module
        for metric in metrics_of(module, *trainer.callbacks):
            metric.distributed_available_fn = self._metrics_sync
            metric.dist_sync_fn = self._gather_metric
        with self._explained():
            if fitting:
                if self._attachment is not None and not self._attachment.founder:
                    # What a checkpoint says is not what the run has come to.
                    self._resume_versions, self._resume_servers = None, ()
                    self._resume_data = (self._attachment.progress or {}).get("data", {})
                self._sharing = self._enter(module)
                self._undo.append(when_epochs_end(trainer, self._agree_to_stop))
                if self._resume_servers and self.is_global_zero:
                    self._sharing.restore(self._resume_servers)
                self._resume_servers = ()
                self.stats = self._sharing.stats
                self.samples = []
                self.setup_optimizers(trainer)
                if self._attachment is not None and not self._attachment.founder:
                    follow_progress(trainer, self._attachment.progress)
                for optimizer in self.optimizers:
                    if isinstance(optimizer, PosteriorSampler):
                        optimizer.use_stream(self.global_rank)
                precision = str(self.precision_plugin.precision)
                run = Run(self.world_size, self.num_nodes, self.config.npush, tuple(self.optimizers), precision)
                self.config.algorithm.check(run)
            else:
                agree(self.collectives, named_state(module))
        self.setup_precision_plugin()
        if fitting:
            self.tree.optimizers_to_device(self.optimizers, self.root_device)

    def teardown(self) -> None:
        """End the session. Servers and connection stay for the Trainer's next call."""
        while self._undo:
            self._undo.pop()()
        client = self.collectives.client
        if client is not None:
            try:
                if not self._failed:
                    with self._explained():
                        self.collectives.phase = Phase.SYNC
                        self.collectives.barrier("teardown")
            finally:
                self._stop_recovery()
                self._stop_heartbeat()
            if not self._failed:
                client.leave()
            self.collectives = Collectives()
        if self._attachment is not None:
            self._attachment = None
            become_global_zero(0)
        overseer = supervisor.current()
        if overseer is not None:
            overseer.on_worker_exit(None)
        self._meter = None
        if self._sharing is not None:
            self._sharing.close()
            self._sharing = None
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the others at once, so that nobody waits for this worker."""
        self._failed = True
        self._stop_recovery()
        self._stop_heartbeat()
        client = self.collectives.client
        if client is not None:
            client.leave(f"it raised {type(exception).__name__}: {exception}" if str(exception) else repr(exception))

    # ------------------------------------------------------------------ training

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Between two batches: merge what has come, exchange if it is time."""
        if self._sharing is None:
            return
        if self._heartbeat is not None and self._heartbeat.error is not None:
            raise self._heartbeat.error  # the session was ended: do not train on until the next exchange
        if self._attachment is not None:
            self._attachment.update()
        with self._explained():
            if self.collectives.phase is Phase.SYNC:
                self._check_is_no_search()
                if newly_trainable(self.lightning_module, self._sharing.layout):
                    self._enter_again()  # a callback has unfrozen parameters since the last epoch, on every worker
                self._sharing.begin()
                self.collectives.phase = Phase.ASYNC
            self._sharing.advance()
            if self._leased is not None:
                self._leased.before_batch()

    def _check_is_no_search(self) -> None:
        """A search for a learning rate or batch size puts callbacks aside, and would train the others' weights."""
        callbacks = self.lightning_module.trainer.callbacks
        if self._attaches and not any(isinstance(callback, SyncPoints) for callback in callbacks):
            raise ConfigurationError(
                "A search for a learning rate or batch size was begun in a run that workers attach themselves to. "
                "Expected it to be done before, with a Trainer of its own: it would spoil the weights of all."
            )

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Let the worker's own optimizer take its step, and count it."""
        if self._sharing is not None:
            closure = self._sharing.wrap(optimizer, closure)
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._sharing is not None:
            self._sharing.count_step()
            if self.lightning_module.automatic_optimization:
                self._after_batch(self._sharing)
        return output

    def share_data(self) -> None:
        """Let the training dataloader yield what this worker is granted. Called when training and epochs begin."""
        algorithm = self.config.algorithm
        together = algorithm.waits or algorithm.payload is Payload.LAYERS
        alone = self.world_size == 1 and not self._attaches
        if self._sharing is None or self._data == "split" or alone or together:
            return
        if self._leased is not None and self._leased.installed:
            return
        trainer = self.lightning_module.trainer
        if self._leased is None and self._attachment is not None and self._attachment.between_epochs:
            begin_epochs_anew(trainer)
        reason = why_split(trainer)
        if reason is not None and self._attaches:
            raise ConfigurationError(
                f"{reason}. Expected training data that workers can share in a run that they attach themselves to: one "
                "dataloader over a dataset with a length, whose batches Lightning may deal out."
            )
        if reason is not None:
            if self._leased is not None:
                self._leased.restore()
                self._leased = None
            if not self._told and self.is_global_zero:
                self._told = True
                self.tree.info(
                    f"Every worker trains a fixed part of the data, since {reason}: a slow worker holds the others up "
                    "at the end of an epoch. ASGDStrategy(data='split') says that this is meant."
                )
            return
        with self._explained():
            if self._leased is None:
                resumed, self._resume_data = self._resume_data, {}
                patience = self.config.timeouts.collective_s
                self._leased = LeasedLoop(
                    trainer, self._connected, self._job.session, patience, resumed, self._come_back
                )
            self._leased.install()

    def measure(self, epoch: Callable[[], float]) -> Meter:
        """Begin to count what this worker trains, and where its time goes.

        Args:
            epoch: gives the epochs trained, with the fraction of the present one.
        """
        self._meter = Meter(lambda: self.stats, self._waited, epoch)
        return self._meter

    def take_figures(self) -> None:
        """Put this worker's figures on the board, if it is measured: the next sign of life tells the others."""
        if self._meter is not None:
            self.board.post(self.collectives.rank, self._meter.read())

    def _waited(self) -> Waited:
        leases = None if self._leased is None else self._leased.leases
        granted_s, others_s = (0.0, 0.0) if leases is None else (leases.granted_wait_s, leases.others_wait_s)
        sync_s = self.stats.sync_wait_s + self.collectives.waited_s + others_s
        return Waited(self.stats.wait_s, sync_s, granted_s)

    def end_batch(self) -> None:
        """Decide what follows a training batch. Called when it ends."""
        if self._leased is not None and self._sharing is not None:
            self._after_batch(self._sharing)
            self._leased.before_next()

    def _after_batch(self, sharing: Sharing) -> None:
        if self._leased is not None:
            with self._explained():
                steps = sharing.stats.steps
                if self._leased.after_batch(
                    steps, lambda: steps - sharing.unacknowledged, sharing.flush, self._discard
                ):
                    sharing.begin()

    def sync_point(self, name: str) -> None:
        """Wait for all living workers and give them the servers' weights, the same bits everywhere.

        Args:
            name: which sync point, for error texts.

        Raises:
            CollectiveTimeoutError: a worker did not come; the message names it.
        """
        sharing = self._sharing
        if sharing is None:
            return
        if self._attachment is not None:
            self._attachment.update()
        with self._explained():
            sharing.flush()
            if self._leased is not None:
                self._leased.leave(sharing.stats.steps)
            self.collectives.phase = Phase.SYNC
            trainer = self.lightning_module.trainer
            grown = bool(newly_trainable(self.lightning_module, sharing.layout))
            restored = list(self._connected().restored)
            self.take_figures()
            mine = Meeting(sharing.moved, trainer.should_stop, grown, checkpoint_states(trainer), self.board.mine)
            met = self.collectives.gather("sync point", name, mine)
            self.board.hear({rank: m.figures for rank, m in met.items()}, self.board.living if self._attaches else met)
            trainer.should_stop = any(m.should_stop for m in met.values())
            adopt_checkpoint_states(trainer, met.get(0, mine).checkpoints)
            # A fetch also tells the servers that the worker rests no more: all must have done it before anybody trains.
            if any(m.moved for m in met.values()) or self.config.algorithm.waits or self._attaches:
                self._fetch_together(sharing, name, restored)
            if any(m.grown for m in met.values()):
                self._enter_again()
            for averaged in callback_modules(trainer):
                agree(self.collectives, named_state(averaged), mean=True)

    def _fetch_together(self, sharing: Sharing, name: str, restored: list[int]) -> None:
        """Take the servers' weights, the same bits on all workers.

        Args:
            sharing: what they are fetched through.
            name: of the sync point.
            restored: how often each server had been restored when this worker had pushed all.
        """
        client, again = self._connected(), True
        while again:  # where a server was lost some may have fetched before others had pushed again
            sharing.fetch(park=True)
            changed, restored = client.restored != restored, list(client.restored)
            again = any(self.collectives.gather("barrier", f"{name}: all have the weights", changed).values())

    def _agree_to_stop(self) -> None:
        """Let all stop where one does: hooks that run after the sync point may have said so on some workers only."""
        trainer = self.lightning_module.trainer
        if self._attachment is None:
            trainer.should_stop = self.reduce_boolean_decision(trainer.should_stop, all=False)
        else:
            with self._explained():
                trainer.should_stop = self._attachment.end_epoch(self._progress, trainer.should_stop)

    def _progress(self) -> dict[str, Any]:
        """What a worker that attaches itself now has to know."""
        progress = progress_of(self.lightning_module.trainer)
        if self._leased is not None:
            self._leased.as_if_equal(progress["loops"]["fit_loop"])
        return progress

    def on_train_end(self) -> None:
        """Let everybody leave with the same weights, whatever callbacks have put into the module at the end."""
        if self._sharing is not None:
            if self.collectives.phase is Phase.ASYNC:
                self.sync_point("train end")  # a search for a learning rate puts all callbacks aside, ours too
            elif self.is_global_zero:
                self._collect_samples(self._sharing)
            with self._explained():
                agree(self.collectives, named_state(self.lightning_module), mean=True)
            if self._leased is not None:
                self._leased.restore()
                self._leased = None

    # ------------------------------------------------------------------ collectives

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all living workers; does nothing in the asynchronous phase."""
        with self._explained():
            self.collectives.barrier(name or "")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Worker ``src``'s object; this worker's own in the asynchronous phase."""
        with self._explained():
            return self.collectives.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Combine a tensor over the living workers; this worker's own in the asynchronous phase."""
        if not isinstance(tensor, Tensor):
            return tensor
        if self.collectives.phase is Phase.ASYNC and self.world_size > 1:
            rank_zero_warn(
                "sync_dist=True on a value logged at step level has no effect under A-SGD: workers take their steps at "
                "different times. The value of worker 0 is logged. Log it with on_epoch=True to have it reduced."
            )
        with self._explained():
            return self.collectives.reduce(tensor, reduce_op_name(reduce_op))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Everybody's tensor, stacked along a new first dimension; no gradients flow."""
        if not self.collectives.real:
            return tensor
        with self._explained():
            return torch.stack(self.collectives.all_gather(tensor))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) of the workers say yes; this worker's own word in the asynchronous phase."""
        with self._explained():
            return self.collectives.decide(decision, all=all)

    def _metrics_sync(self) -> bool:
        return self.collectives.real

    def _gather_metric(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        with self._explained():
            return self.collectives.all_gather(tensor, "metric")

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state with the servers' weights."""
        state: dict[str, Any] = super().lightning_module_state_dict()
        if self._sharing is not None and self.collectives.phase is Phase.ASYNC and self.is_global_zero:
            with self._explained():
                fresh = self._sharing.peek()
            names = {id(t): name for name, t in named_state(self.lightning_module).items()}
            for key, tensor in self.lightning_module.state_dict(keep_vars=True).items():
                name = names.get(id(tensor))
                if name in fresh and key in state:
                    state[key] = fresh[name]
        return state

    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load weights; during fit, after a search for a learning rate for instance, into the servers too."""
        super().load_model_state_dict(*args, **kwargs)
        if self._sharing is not None and self.collectives.phase is Phase.SYNC:
            with self._explained():
                self._enter_again()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the checkpoint on worker 0, with every worker's optimizer and scheduler state.

        In the asynchronous phase the others are not asked: they resume with worker 0's.
        """
        if self._sharing is not None and "optimizer_states" in checkpoint:
            mine = {key: checkpoint[key] for key in ("optimizer_states", "lr_schedulers")}
            mine = apply_to_collection(mine, Tensor, lambda t: t.detach().cpu())
            with self._explained():
                workers = self.collectives.gather("gather", "checkpoint", mine, target=0) if not self._attaches else {}
            servers = self._sharing.state() if self.is_global_zero else []
            entry = resume.entry_of(self._sharing.versions, self._algorithm_name, servers, workers)
            if self._leased is not None and self.is_global_zero:
                entry["data"] = self._leased.state()
                self._leased.as_if_equal(checkpoint["loops"]["fit_loop"])
            checkpoint[resume.KEY] = entry
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint, and put this worker's own optimizer and scheduler state in its place."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        entry = checkpoint.get(resume.KEY)
        if entry:
            found = resume.resumed(entry, self.global_rank, self._algorithm_name, self._job.num_servers)
            checkpoint.update(found.mine)
            self._resume_versions, self._resume_servers = found.versions, found.servers
            self._resume_data = entry.get("data", {})
            if found.warning:
                rank_zero_warn(found.warning)
        return checkpoint

    # ------------------------------------------------------------------ helpers

    def _join(self, session: str) -> None:
        """Become a member of a session, and wait until all are."""
        transport = self._job.connect()
        timeouts = self.config.timeouts
        # Where answers are held back for other workers, those may take as long as to a sync point.
        patience = timeouts.collective_s if self.config.algorithm.waits else timeouts.exchange_s
        before = self.collectives.client
        # Who is alone is missed by nobody; and what these algorithms share as they go cannot be taken back.
        watched = self.world_size > 1 and self.config.algorithm.payload not in (Payload.LAYERS, Payload.NONE)
        policy = self._policy if watched else replace(self._policy, silence_s=0.0)
        client = Client(
            transport,
            session,
            self.global_rank,
            self.world_size,
            timeout_s=patience,
            patience_s=timeouts.collective_s,
            policy=policy,
            after="" if before is None else before.session,
        )
        self._stop_recovery()
        self._stop_heartbeat()
        waited_s, self.collectives = self.collectives.waited_s, Collectives(client, timeouts.collective_s)
        self.collectives.waited_s = waited_s
        with self._explained():
            self._enter_session(client)
            overseer = supervisor.current()
            if overseer is not None:
                overseer.on_worker_exit(self._report_exit)
            if watched:
                news = log.warning if self.is_global_zero else None
                self._heartbeat = Heartbeat(client, policy.silence_s, news, self.board)
            self.collectives.barrier("join")

    def _attach(self) -> None:
        """Become a worker of a run that is served elsewhere."""
        self._job.find_run()
        transport, timeouts = self._job.connect(), self.config.timeouts
        client = Client(
            transport,
            self._job.session,
            worker=0,  # until it is told
            world_size=0,
            timeout_s=timeouts.exchange_s,
            patience_s=timeouts.collective_s,
            policy=self._policy,
        )
        attachment = Attachment(client, self._change_chief)
        self.collectives = Collectives(client, timeouts.collective_s)
        with self._explained():
            heard = attachment.arrive(self.root_device)
            self._attachment = attachment
            become_global_zero(self.global_rank)
            self.board.living = (client.worker,)
            about = (self._tell, self.board, attachment.follow, heard)
            self._heartbeat = Heartbeat(client, timeouts.silence_s, *about)

    def _change_chief(self, chief: bool) -> None:
        worker = self._connected().worker
        log.info("Worker %d %s checkpoints from now on.", worker, "logs and writes" if chief else "writes no")
        become_global_zero(0 if chief else worker)

    def _tell(self, news: str) -> None:
        if self.is_global_zero:
            log.warning(news)

    def _enter_session(self, client: Client) -> None:
        try:
            client.join()
        except ServerLostError as error:  # it has ended since the latest session, when nobody needed it
            if error.server is None:
                raise
            client.transport.prepare(error.server, self._job.successor(error.server))
            client.transport.replace(error.server)
            client.join()

    def _stop_recovery(self) -> None:
        if self._recovery is not None:
            self._recovery.close()
            self._recovery = None

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def _come_back(self) -> None:
        """The others have gone on without this worker, which was silent."""
        log.warning("Worker %d was silent for long: it joins again, with the servers' weights.", self.global_rank)
        if self._sharing is not None:
            self._sharing.come_back()

    def _discard(self) -> None:
        """Forget what was made of a batch that others have trained."""
        if self._sharing is not None:
            self._sharing.fetch()
            self.lightning_module.zero_grad()

    def _lose_leases(self) -> None:
        if self._leased is not None:
            self._leased.leases.lose()

    def _units_trained(self) -> tuple[str, int]:
        return ("", 0) if self._leased is None else self._leased.leases.trained

    def _connected(self) -> Client:
        client = self.collectives.client
        if client is None:
            raise ASGDError("The strategy is not connected. Expected setup_environment() to be called before setup().")
        return client

    def _enter(self, module: Any) -> Sharing:
        client, attachment = self._connected(), self._attachment
        versions, self._resume_versions = self._resume_versions, None
        sharing = enter(
            client,
            self.collectives,
            module,
            self.config,
            self._job.num_servers,
            versions=versions,
            on_refused=self._heal_optimizers,
            lr=self._lr,
            on_away=self._lose_leases,
            trained=self._units_trained,
            late=not looks_at_gradients(self.lightning_module),
            fill=None if attachment is None else attachment.founder,
            theirs=None if attachment is None else attachment.layout,
            measure=self._monitored,
        )
        if attachment is not None:
            exchanged = {spec.name for spec in sharing.layout.tensors}
            constants = {n: t for n, t in named_state(module).items() if n not in exchanged}
            if attachment.founder:
                progress = progress_in(module.trainer)
                if progress is not None:
                    progress["data"] = self._resume_data
                attachment.found(sharing.layout.describe(), constants, progress)
            else:
                attachment.adopt(constants)
        if self.config.restorable and (self.world_size > 1 or self._attaches):
            self._recovery = Recovery(client, sharing, self._part, self._job.successor)
        return sharing

    def _part(self) -> Part | None:
        return None if self._leased is None else self._leased.leases.part

    @property
    def _algorithm_name(self) -> str:
        return type(self.config.algorithm).__name__

    def _lr(self) -> float:
        """Learning rate of the first parameter group; 0 if there is no optimizer."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return float(groups[0]["lr"]) if groups and "lr" in groups[0] else 0.0

    def _enter_again(self) -> None:
        """Lay the module out anew and fill the servers from worker 0's. All workers call it together."""
        before = self._sharing
        if before is None:
            return
        if self._attachment is not None:
            raise ConfigurationError(
                "Weights were replaced, or parameters unfrozen, during fit in a run that workers attach themselves to. "
                "Expected the same trainable parameters from the first batch to the last: there is nobody to agree "
                "with about others."
            )
        agree(self.collectives, newly_trainable(self.lightning_module, before.layout), mean=True)
        self._resume_versions = list(before.versions)
        self.collectives.barrier("new layout")
        before.close()
        self._layouts += 1
        self._join(f"{self._job.session}.{self._layouts}")
        self._sharing = self._enter(self.lightning_module)
        self._sharing.stats = before.stats

    def _collect_samples(self, sharing: Sharing) -> None:
        """Fetch what the servers have kept of the weights. Nobody pushes any more."""
        algorithm = self.config.algorithm
        if not algorithm.keep_at_most:
            return
        with self._explained():
            self.samples = sharing.samples()
        if not self.samples:
            log.warning(
                "%s kept no samples: training ended at version %d, which counts pushes. Train longer, or lower its "
                "burn_in and thin.",
                type(algorithm).__name__,
                max(sharing.versions),
            )

    def _heal_optimizers(self) -> None:
        """After a refused update: drop optimizer state that is not finite, or the next update would be refused too."""
        self._warn_of_refused_update()
        for optimizer in self.optimizers:
            zero_what_is_not_finite(optimizer.state)

    def _warn_of_refused_update(self) -> None:
        """Say that an update was refused, and what to do."""
        log.warning(
            "[worker %d step %d] The servers refused an update that held NaN or infinity (%d so far); training goes on "
            "from the servers' weights. Lower the learning rate or clip gradients if this repeats.",
            self.global_rank,
            self.stats.steps,
            self.stats.refused,
        )

    def _report_exit(self, rank: int, code: int) -> None:
        """Called by the supervisor's thread when a worker's process has ended."""
        client = self.collectives.client
        if client is not None:
            if code != 0:
                log.warning("Worker %d ended with exit code %d; the others go on without it.", rank, code)
            client.leave(f"its process ended with exit code {code}", worker=rank)

    @contextlib.contextmanager
    def _explained(self) -> Any:
        """Add a dead server's last words to the error, where this process knows them."""
        try:
            yield
        except ServerLostError as error:
            overseer = supervisor.current()
            words = overseer.obituary() if overseer is not None else None
            if words is None:
                raise
            raise ServerLostError(f"{error}\n{words}") from error
