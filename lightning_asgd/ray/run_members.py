"""A run's servers, workers and board, as its driver sees them."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_asgd.core.foundation.errors import ASGDError, LaunchError
from lightning_asgd.ray.actors import Board
from lightning_asgd.ray.reports import Storage
from lightning_asgd.ray.run_plan import RunPlan

log = logging.getLogger(__name__)

_SILENT_S = 30.0  # without an answer, after which a warning says that the workers wait for it


class RunWorker:
    """A worker of the run, as the driver sees it."""

    def __init__(self, number: int, actor: Any, ended: Any, place: int | None) -> None:
        self.number, self.actor, self.ended = number, actor, ended
        self.place = place  # of those that the run has reserved; None for one outside of them
        self.stop_at: float | None = None  # when it is killed, of one that was asked to stop


class RunServer:
    """A server of the run, as the driver sees it."""

    def __init__(self, index: int, actor: Any) -> None:
        self.actor, self._index, self._checked = actor, index, actor.check.remote()
        self._silent_at = math.inf

    def check(self) -> None:
        """Raise a :class:`LaunchError` if it is lost for good. It may not answer now: Ray may be restarting it."""
        if not ray.wait([self._checked], timeout=0)[0]:
            if time.monotonic() > self._silent_at:
                log.warning(
                    "Server %d has not answered for %g s. Ray starts it again once the cluster has room for "
                    "resources_per_server, and the workers wait for it.",
                    self._index,
                    _SILENT_S,
                )
                self._silent_at = math.inf
            return
        try:
            ray.get(self._checked)
        except RayTaskError as error:
            raise LaunchError(str(error.cause)) from error
        except RayActorError as error:
            raise LaunchError(f"A server cannot be started again: {error}") from error
        self._checked, self._silent_at = self.actor.check.remote(), time.monotonic() + _SILENT_S


class RunBoard:
    """The run's :class:`Board`, an actor beside the driver."""

    def __init__(self, plan: RunPlan, storage: Storage) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        keeps = plan.run.checkpoint_config
        score = keeps.checkpoint_score_attribute, keeps.checkpoint_score_order
        actor = ray.remote(Board).options(num_cpus=0, scheduling_strategy=here)
        self.actor = actor.remote(keeps.num_to_keep, *score, storage.create())
        self._about = f"run {plan.run.name!r}", storage.path

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method. Raises an :class:`ASGDError` if the board has died."""
        try:
            return ray.get(getattr(self.actor, method).remote(*arguments))
        except RayActorError as error:
            run, path = self._about
            raise ASGDError(
                f"The process that keeps what the workers of the {run} report has died: {error}. Expected it to live "
                "as long as this program, on the same machine. Find out what ended it, such as a lack of memory. A run "
                f"of the same name continues from its latest checkpoint in {path} if the training function uses "
                "get_checkpoint()."
            ) from error
