"""What a user gave for a run on a Ray cluster, checked, and what follows for its actors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import seconds, whole
from lightning_asgd.core.job import registry


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
