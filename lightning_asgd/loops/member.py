"""How a worker whose loop is the program's own joins a job or a run, and how it leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import Module

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.job.interruptions import TIME_IS_UP, Interruptions
from lightning_asgd.core.job.options import LoopOptions
from lightning_asgd.core.job.training_job import TrainingJob
from lightning_asgd.core.worker.fixed_fleet import FixedFleet
from lightning_asgd.core.worker.fleet import Fleet, end_idle_membership
from lightning_asgd.core.worker.metrics_board import MetricsBoard
from lightning_asgd.core.worker.shell import Shell
from lightning_asgd.elastic.elastic_run import ElasticFleet
from lightning_asgd.engines.engine import end_with_agent, requeue_job
from lightning_asgd.loops.session import LoopSession
from lightning_asgd.loops.state import LoopState
from lightning_asgd.monitor.fit_summary import count

log = logging.getLogger(__name__)


class LoopMember:
    """One worker, from joining to leaving. A job has begun before; a run is joined."""

    def __init__(self, options: LoopOptions, job: TrainingJob, shell: Shell, interruptions: Interruptions) -> None:
        self._options, self._job, self._shell, self._interruptions = options, job, shell, interruptions
        shell.interruptions = interruptions
        self.membership: Fleet | None = None
        self.session: LoopSession | None = None

    def join(self, rank: int, world_size: int) -> None:
        """Join; ``rank`` and ``world_size`` are those of a job."""
        end_idle_membership()
        about = self._job, self._options.config, self._options.policy, MetricsBoard(), self._shell
        if self._job.attaches:
            end_with_agent()
            self.membership = ElasticFleet(*about)
        else:
            self.membership = FixedFleet(*about, (rank, world_size), fits=True)
        self.membership.join()

    def begin(
        self,
        module: Module,
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        loaded: Mapping[str, Any] | None,
        say: Callable[[str], None],
        seed: int,
    ) -> LoopSession:
        """Take the weights and the progress of the others, or bring the first ones; ``loaded`` is a checkpoint."""
        _check_parameters(module, optimizers)
        config, state, membership = self._options.config, LoopState(seed=seed), self.membership
        if membership is None:
            raise RuntimeError("the worker has not joined")
        if loaded is not None:
            state.load(loaded, config.algorithm_name, self._job.num_servers)
        about = membership, self._options, state, self._interruptions
        session = LoopSession(module, optimizers, schedulers, *about)
        self.session = session
        workers = count(session.workers, "worker")
        servers = count(membership.client.connection.transport.num_servers, "server")
        number = membership.client.connection.worker
        say(f"A-SGD: {workers}, {servers}, transport {membership.transport}; this is worker {number}.")
        return session

    def leave(self, error: BaseException | None) -> None:
        """Leave with the final weights, or report an ``error``. The others continue."""
        membership, session = self.membership, self.session
        self.membership = self.session = None
        try:
            if self._job.attaches and isinstance(error, KeyboardInterrupt | SystemExit):
                self._interruptions.leave()
                if isinstance(error, SystemExit) and error.code == TIME_IS_UP:
                    requeue_job()  # first, since SLURM may not wait until this worker has left
            if membership is None:
                return
            if error is None:
                membership.leave()
            elif session is None or not self._leaves_in_order(membership, session, error):
                membership.fail(error)
        finally:
            if membership is not None:
                membership.end_membership()
            if session is not None:
                session.close()

    def _leaves_in_order(self, membership: Fleet, session: LoopSession, error: BaseException) -> bool:
        """Leave in order if this worker was interrupted, and a run continues without it; whether that was done."""
        given_up = membership.client.connection.given_up
        if given_up or not (isinstance(error, KeyboardInterrupt | SystemExit) and membership.comes_and_goes):
            return False
        try:
            session.give_back()
            membership.leave()
        except Exception:  # a lost server, for instance
            log.warning("This worker could not push its last steps before it left.", exc_info=True)
            return False
        return True


def _check_parameters(module: Module, optimizers: Sequence[Any]) -> None:
    """Raise a :class:`ConfigurationError` if an optimizer trains what is not in the module, so is not exchanged."""
    known = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if others:
            raise ConfigurationError(
                f"{type(optimizer).__name__} trains {len(others)} parameters that are not in the module, the first one "
                f"of shape {tuple(others[0].shape)}: they would not be exchanged. Expected the module's parameters "
                "only. Put all modules that are trained into a torch.nn.ModuleDict, and give that."
            )
