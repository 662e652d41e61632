"""A run on a Ray cluster as its driver sees it: what the user asked for, the servers, the workers and the board."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError, LaunchError
from lightning_asgd.core.foundation.validation import seconds, whole
from lightning_asgd.core.job import registry
from lightning_asgd.ray.actors import Board
from lightning_asgd.ray.reports import Storage


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a user gave to :class:`ASGDTrainer`, checked."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    scaling: Any
    run: Any
    num_servers: int
    resources_per_server: dict[str, float]
    max_restarts: int
    transport: str
    place_s: float

    @property
    def least(self) -> int:
        """Workers that a run begins with."""
        given = self.scaling.num_workers
        return given if isinstance(given, int) else given[0]

    @property
    def most(self) -> int:
        """Workers at most."""
        given = self.scaling.num_workers
        return given if isinstance(given, int) else given[1]

    @property
    def resources_per_worker(self) -> dict[str, float]:
        """One CPU if none are given; one GPU more with ``use_gpu``, as Ray Train has it."""
        given, kind = self.scaling.resources_per_worker, self.scaling.accelerator_type
        found = {"CPU": 1} if given is None else dict(given)
        if self.scaling.use_gpu:
            found.setdefault("GPU", 1)
        if kind is not None:
            found.setdefault(f"accelerator_type:{kind}", 0.001)
        return {name: amount for name, amount in found.items() if amount}

    def check(self) -> None:
        """Raise a :class:`ConfigurationError` for what is out of range, and for what would be ignored."""
        registry.check_name(self.transport)
        whole("max_restarts", self.max_restarts, -1)
        seconds("place_s", self.place_s)
        if self.least < 1:
            raise ConfigurationError(
                f"ScalingConfig(num_workers={self.scaling.num_workers!r}). Expected at least one worker."
            )
        if not self.run.name:
            raise ConfigurationError("RunConfig(name=None). Expected a name of the run.")
        ignored = {
            "ScalingConfig(label_selector)": getattr(self.scaling, "label_selector", None),
            "ScalingConfig(topology)": getattr(self.scaling, "topology", None),
            "ScalingConfig(use_tpu)": getattr(self.scaling, "use_tpu", False),
            "RunConfig(callbacks)": self.run.callbacks,
            "RunConfig(failure_config)": getattr(self.run.failure_config, "max_failures", 0),
        }
        for name, given in ignored.items():
            if given:
                raise ConfigurationError(
                    f"{name} was given, but ASGDTrainer has no use for it. Expected none. Custom resources select "
                    "nodes, max_restarts says how often Ray starts what dies, and callbacks belong to Lightning."
                )


def actor_options(resources: dict[str, float], max_restarts: int, at: Any) -> dict[str, Any]:
    """An actor's options. A restarted actor runs its method again."""
    rest = dict(resources)
    named = {"num_cpus": rest.pop("CPU", 0), "num_gpus": rest.pop("GPU", 0)}
    if "memory" in rest:
        named["memory"] = rest.pop("memory")
    restarts = {"max_restarts": max_restarts, "max_task_retries": -1}
    return {**named, "resources": rest, **restarts, "scheduling_strategy": at}


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
