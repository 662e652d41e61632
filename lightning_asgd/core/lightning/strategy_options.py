"""The arguments of ``ASGDStrategy``, checked, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_asgd.core.algorithms.config import Advanced
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import whole
from lightning_asgd.core.job.options import JobOptions
from lightning_asgd.programs.batch_units import name_of_units


@dataclass(frozen=True, kw_only=True)
class StrategyOptions(JobOptions):
    """What a user gave; ``ASGDStrategy`` describes it."""

    data: Literal["leases", "split"]
    start_method: Literal["popen", "spawn", "fork", "forkserver"]
    monitor: bool
    island: Any

    def __post_init__(self) -> None:
        """Raise a :class:`ConfigurationError` if one is of the wrong type or out of range."""
        super().__post_init__()
        if self.config.server_machines > 1 and self.start_method != "popen":
            raise ConfigurationError(
                f"Advanced.server_machines={self.config.server_machines} was given with start_method="
                f"{self.start_method!r}. Expected 'popen': the other methods start processes of one node."
            )
        if not isinstance(self.monitor, bool):
            raise ConfigurationError(
                f"monitor={self.monitor!r}. Expected True or False. Give an ASGDMonitor to Trainer(callbacks=[...])."
            )

        if self.island is not None:
            self._check_island()

    def _check_island(self) -> None:
        """Check what was given together with ``island``."""
        algorithm = self.config.algorithm
        if isinstance(self.island, int):
            whole("island", self.island)
        if self.run is None:
            self._check_run(f"island={self.island!r}", "the servers of islands run on the first machine.")
            if self.start_method != "popen":
                raise ConfigurationError(
                    f"start_method={self.start_method!r} was given with island={self.island!r}. Expected 'popen': the "
                    "processes of one Trainer's islands are started as scripts."
                )
        if algorithm.code is not None:
            raise ConfigurationError(
                f"algorithm={type(algorithm).__name__} was given with island={self.island!r}. Expected an algorithm "
                "without a codec of its own: the processes of an island send their parts uncompressed."
            )
        if algorithm.merge_after:
            raise ConfigurationError(
                f"algorithm={algorithm!r} was given with island={self.island!r}. Expected delay=0: the processes of "
                "an island merge a reply once all have their part of it."
            )
        if self.config.compression is not None:
            raise ConfigurationError(
                f"compression={self.compression!r} was given with island={self.island!r}. Expected none: the processes "
                "of an island send their parts uncompressed."
            )
        if self.config.units is not None:
            raise ConfigurationError(
                f"Advanced.units={name_of_units(self.config.units)!r} was given with island={self.island!r}. Expected "
                "none: each process of an island counts its own part of a batch."
            )
        if algorithm.keep_at_most:
            raise ConfigurationError(
                f"{type(algorithm).__name__} was given with island={self.island!r}. Expected an algorithm that keeps "
                "no samples of the weights."
            )

    def _check_run(self, given: str, why: str) -> None:
        super()._check_run(given, why)
        if self.data == "split":
            raise ConfigurationError(
                f"data='split' was given with {given}. Expected data='leases': the number of workers of an elastic run "
                "is not known in advance."
            )

    @property
    def another_chief(self) -> bool:
        """Whether another worker becomes chief when worker 0 is gone."""
        return self.start_method != "popen"  # else worker 0's process hosts the servers

    @property
    def settings(self) -> dict[str, Any]:
        """Those that say how it trains, as plain values."""
        config, given = self.config, self.advanced or Advanced()
        names = ("data", "num_servers", "start_method", "on_worker_failure", "transport")
        found = {"nfetch": config.nfetch, "npush": config.npush, "overlap": config.overlap}
        code = None if config.compression is None else repr(config.compression)
        nsync = ("auto" if config.auto else config.npush) if self.nsync is None else self.nsync
        rules = {"nsync": nsync, "algorithm": repr(config.algorithm), "compression": code}
        mine = {name: getattr(self, name) for name in names}
        return {**rules, **mine, **vars(given), **found, "units": name_of_units(config.units)}
