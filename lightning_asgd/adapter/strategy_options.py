"""The arguments of ``ASGDStrategy``, checked, and what follows from them."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch

from lightning_asgd.adapter.batch_units import check_units, name_of_units
from lightning_asgd.algorithms import Algorithm
from lightning_asgd.algorithms.base import Payload
from lightning_asgd.compression import Compression
from lightning_asgd.config import RUN_ENV, SERVER_ENV, ExchangeConfig, Timeouts, positive_int, server_address
from lightning_asgd.errors import ConfigurationError
from lightning_asgd.protocol import Policy
from lightning_asgd.transports.registry import check_name

__all__ = ["StrategyOptions"]

_DATA = ("leases", "split")
_ON_FAILURE = ("continue", "abort")
_START_METHODS = ("popen", "spawn", "fork", "forkserver")

# Arguments of ExchangeConfig.create, of Lightning's DDPStrategy, and those that ``settings`` lists.
_EXCHANGE = (
    *("nsync", "nfetch", "npush", "algorithm", "scale", "overlap", "max_offline_steps", "timeouts", "compression"),
    "snapshot_every_s",
)
_LIGHTNING = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    "start_method",
)
_SETTINGS = (
    *("nsync", "nfetch", "npush", "algorithm", "overlap", "data", "compression", "num_servers", "start_method"),
    *("min_workers", "on_worker_failure", "transport", "max_offline_steps", "snapshot_every_s"),
)


def _check_importable(kind: type) -> None:
    """Raise a :class:`ConfigurationError` for a class that other processes cannot import."""
    inside = "the script that is run" if kind.__module__ == "__main__" else f"a function of {kind.__module__}"
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ConfigurationError(
            f"{kind.__name__} is defined in {inside}. Expected a class in a module, since servers are processes "
            "of their own and import it: move it to a file of its own beside the script, and import it from there."
        )


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """What a user gave; ``ASGDStrategy`` describes it."""

    nsync: int | str
    nfetch: int | None
    npush: int | None
    algorithm: Algorithm | str | None
    scale: str | float | None
    overlap: bool | None
    data: str
    units: Any
    compression: Compression | str | None
    num_servers: int
    start_method: str
    min_workers: int
    on_worker_failure: str
    timeouts: Timeouts | None
    transport: str
    server: str | None
    run_id: str | None
    monitor: bool
    max_offline_steps: int
    snapshot_every_s: float
    accelerator: Any
    parallel_devices: list[torch.device] | None
    cluster_environment: Any
    checkpoint_io: Any
    precision_plugin: Any

    def __post_init__(self) -> None:
        """Raise a :class:`ConfigurationError` if one is of the wrong type or out of range."""
        if self.server is None and self.run_id is None:  # an engine may have started this process for a run
            object.__setattr__(self, "server", os.environ.get(SERVER_ENV))
            object.__setattr__(self, "run_id", os.environ.get(RUN_ENV))
        config = self.config
        for rule in (config.algorithm, *config.algorithm.transforms, config.compression):
            _check_importable(type(rule))
        if self.start_method not in _START_METHODS:
            expected = ", ".join(_START_METHODS)
            raise ConfigurationError(f"start_method={self.start_method!r}. Expected one of {expected}.")
        check_name(self.transport)
        if self.data not in _DATA:
            raise ConfigurationError(f"data={self.data!r}. Expected one of {', '.join(map(repr, _DATA))}.")
        check_units(self.units)
        if self.on_worker_failure not in _ON_FAILURE:
            expected = " or ".join(map(repr, _ON_FAILURE))
            raise ConfigurationError(f"on_worker_failure={self.on_worker_failure!r}. Expected {expected}.")
        _ = self.policy
        if not isinstance(self.monitor, bool):
            raise ConfigurationError(
                f"monitor={self.monitor!r}. Expected True or False. Give an ASGDMonitor to Trainer(callbacks=[...])."
            )
        positive_int("num_servers", self.num_servers)
        if self.server is not None or self.run_id is not None:
            self._check_attaches()
            _ = self.address

    def _check_attaches(self) -> None:
        """Check what was given together with ``server=`` or ``run_id=``."""
        server, algorithm = self.server, self.config.algorithm
        if not server or not self.run_id:
            raise ConfigurationError(f"server={server!r} and run_id={self.run_id!r}. Expected both, or neither.")
        if algorithm.waits or algorithm.payload in (Payload.LAYERS, Payload.NONE):
            raise ConfigurationError(
                f"{type(algorithm).__name__} was given with server={server!r}. Expected an algorithm whose workers do "
                "not wait for each other, such as ASGD: workers of an elastic run join and leave."
            )
        if self.data == "split":
            raise ConfigurationError(
                f"data='split' was given with server={server!r}. Expected data='leases': the number of workers of an "
                f"elastic run is not known in advance."
            )
        if self.policy.abort or self.policy.min_workers > 1:
            raise ConfigurationError(
                "on_worker_failure='abort' or min_workers was given with server=... Expected neither: workers of an "
                "elastic run join and leave at any time."
            )

    @functools.cached_property
    def config(self) -> ExchangeConfig:
        """When and how a worker exchanges."""
        return ExchangeConfig.create(**self._named(_EXCHANGE))

    @functools.cached_property
    def policy(self) -> Policy:
        """What becomes of a session when workers fail."""
        return Policy(
            silence_s=self.config.timeouts.silence_s,
            min_workers=positive_int("min_workers", self.min_workers),
            abort=self.on_worker_failure == "abort",
            another_chief=self.start_method != "popen",  # else worker 0's process hosts the servers
        )

    @property
    def address(self) -> tuple[str, int] | None:
        """Where the servers of a run are; None in a job of its own."""
        return None if self.server is None else server_address(self.server)

    @property
    def for_lightning(self) -> dict[str, Any]:
        """Arguments of Lightning's ``DDPStrategy``."""
        return self._named(_LIGHTNING)

    @property
    def settings(self) -> dict[str, Any]:
        """Those that say how it trains, as plain values."""
        config = self.config
        found = {"nfetch": config.nfetch, "npush": config.npush, "overlap": config.overlap}
        code = None if config.compression is None else repr(config.compression)
        rules = {"algorithm": repr(config.algorithm), "compression": code}
        return {**self._named(_SETTINGS), **found, **rules, "units": name_of_units(self.units)}

    def _named(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}
