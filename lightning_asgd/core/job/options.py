"""The arguments that any program gives for its worker's part in a job or a run, checked, and what follows from them."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightning_asgd.core.algorithms.base import Algorithm, Payload
from lightning_asgd.core.algorithms.compression import Compression
from lightning_asgd.core.algorithms.config import Advanced, ExchangeConfig, Timeouts
from lightning_asgd.core.foundation.environment import RUN_ENV, TRANSPORT_ENV, run_place
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import one_of, whole
from lightning_asgd.core.job.registry import AUTO, check_name
from lightning_asgd.core.protocol import Policy


def _check_importable(kind: type) -> None:
    """Raise a :class:`ConfigurationError` for a class that other processes cannot import."""
    inside = "the script that is run" if kind.__module__ == "__main__" else f"a function of {kind.__module__}"
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ConfigurationError(
            f"{kind.__name__} is defined in {inside}. Expected a class in a module, because servers are processes "
            "of their own and import it: move it to a file of its own beside the script, and import it from there."
        )


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a user gave; ``ASGDStrategy`` and ``AsyncSGD`` describe it."""

    nsync: int | str | None
    algorithm: Algorithm | str | None
    compression: Compression | str | None
    num_servers: int
    on_worker_failure: Literal["continue", "abort"]
    timeouts: Timeouts | None
    transport: Literal["auto", "rpc", "zmq"]
    run: str | None
    advanced: Advanced | None

    def __post_init__(self) -> None:
        """Raise a :class:`ConfigurationError` if one is of the wrong type or out of range."""
        if self.run is None:  # an engine may have started this process for a run
            self._take_from_environment()
        config = self.config
        for rule in (config.algorithm, *config.algorithm.transforms, config.compression):
            _check_importable(type(rule))
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal:
                one_of(name, getattr(self, name), get_args(kind))
        if config.server_machines > whole("num_servers", self.num_servers):
            raise ConfigurationError(
                f"Advanced.server_machines={config.server_machines} was given with num_servers={self.num_servers}. "
                "Expected at least one server per machine."
            )
        if self.run is not None:
            run_place(self.run)
            given = f"{RUN_ENV if os.environ.get(RUN_ENV) == self.run else 'run'}={self.run!r}"
            self._check_run(given, "`lightning-asgd serve --machines` divides the servers of an elastic run.")

    def _take_from_environment(self) -> None:
        if (run := os.environ.get(RUN_ENV)) is None:
            return
        run_place(run, f"The environment has {RUN_ENV}")
        object.__setattr__(self, "run", run)
        if self.transport == AUTO:
            object.__setattr__(self, "transport", os.environ.get(TRANSPORT_ENV, AUTO))
            check_name(self.transport, f"The environment has {TRANSPORT_ENV}")

    def _check_run(self, given: str, why: str) -> None:
        """Check what was given together with what makes this process a worker of an elastic run."""
        if self.config.server_machines > 1:
            raise ConfigurationError(
                f"Advanced.server_machines={self.config.server_machines} was given with {given}. Expected none: {why}"
            )
        algorithm = self.config.algorithm
        awaits = any(t.waits and not t.gathers for t in algorithm.transforms)
        if awaits or algorithm.payload in (Payload.LAYERS, Payload.NONE):
            raise ConfigurationError(
                f"{type(algorithm).__name__} was given with {given}. Expected an algorithm without WarmStart and "
                "StaleSynchronous, such as ASGD or DiLoCo: workers of an elastic run join and leave, and none waits "
                "for a worker that has taken fewer steps."
            )
        if algorithm.fragments > 1 and not self.config.overlap:
            raise ConfigurationError(
                f"Advanced.overlap=False was given with {type(algorithm).__name__}(parts={algorithm.fragments}) and "
                f"{given}. Expected True or None: workers of an elastic run are at different fragments, and would wait "
                "for each other forever."
            )
        if self.config.restarted:
            raise ConfigurationError(
                f"nsync='restarted' was given with {given}. Expected a number: the period depends on the number of "
                "workers, and those of an elastic run join and leave."
            )
        if self.policy.abort or self.policy.min_workers > 1:
            raise ConfigurationError(
                f"on_worker_failure='abort' or Advanced.min_workers was given with {given}. Expected neither: workers "
                "of an elastic run join and leave at any time."
            )

    @functools.cached_property
    def config(self) -> ExchangeConfig:
        """When and how a worker exchanges."""
        given = ("nsync", "algorithm", "compression", "timeouts", "advanced")
        return ExchangeConfig.create(**{name: getattr(self, name) for name in given})

    @property
    def another_chief(self) -> bool:
        """Whether another worker becomes chief when worker 0 is gone, though its process hosts the servers."""
        return False

    @functools.cached_property
    def policy(self) -> Policy:
        """What becomes of a session when workers fail."""
        return Policy(
            silence_s=self.config.timeouts.silence_s,
            min_workers=self.config.min_workers,
            abort=self.on_worker_failure == "abort",
            another_chief=self.another_chief,
        )

    @property
    def place(self) -> tuple[tuple[tuple[str, int], ...], str]:
        """Where the servers of a run may be, and its name; empty in a job of its own."""
        return ((), "") if self.run is None else run_place(self.run)


@dataclass(frozen=True, kw_only=True)
class LoopOptions(JobOptions):
    """What a user gave for a loop of the program's own; ``AsyncSGD`` describes it."""

    total_steps: int | None

    def __post_init__(self) -> None:
        """Raise a :class:`ConfigurationError` if one is of the wrong type or out of range."""
        super().__post_init__()
        if self.total_steps is not None:
            whole("total_steps", self.total_steps)
        if self.config.restarted and self.total_steps is None:
            raise ConfigurationError(
                "nsync='restarted' was given without total_steps. Expected total_steps=..., the number of optimizer "
                "steps that each worker takes: it is not known in a loop of your own, and the period follows from it."
            )
        if self.total_steps is not None and not self.config.restarted:
            raise ConfigurationError(
                f"total_steps={self.total_steps!r} was given without nsync='restarted'. Expected it only with that: it "
                "does not end the training."
            )


def options_among(kind: Any, given: Mapping[str, Any]) -> Any:
    """The options of a kind of program among ``given``, the local variables of a constructor."""
    return kind(**{each.name: given[each.name] for each in fields(kind)})
