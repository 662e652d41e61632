"""What users set beside the arguments of strategies and loops, and what is said of an argument that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import seconds, whole, written

_COUNTS = ("nfetch", "npush", "min_workers", "server_machines", "max_offline_steps")


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long to wait, in seconds. A process that dies is noticed at once; these are for processes that hang."""

    silence_s: float = 10.0
    """For a worker's heartbeat. A worker that sends none is excluded: the others continue without it until it rejoins.
    Raise it if your network may be interrupted for longer and the others should wait."""

    start_s: float = 120.0
    """For servers and workers to start. Raise it if importing your script takes minutes."""
    exchange_s: float = 300.0
    """For an exchange to be answered. Raise it if the weights take longer than that through your network."""
    collective_s: float = 1800.0
    """For all workers to reach a sync point: the epoch's end, a validation. Must exceed the slowest worker's lag."""

    def __post_init__(self) -> None:
        for f in fields(self):
            seconds(f"Timeouts.{f.name}", getattr(self, f.name))

    __repr__ = written


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """Settings that few jobs need: ``advanced=Advanced(gain=False)``, for strategies, plain loops and simulations."""

    nfetch: int | None = None
    """Optimizer steps between two fetches of the weights. None, the default, means ``nsync``."""
    npush: int | None = None
    """Optimizer steps between two pushes. None, the default, means ``nsync``."""
    overlap: bool | None = None
    """Whether to continue training while an exchange is in flight. False waits for the reply, which is slower, but no
    step uses weights that are older than the reply. None, the default, means what the algorithm does by itself."""
    units: str | Callable[[Any], Any] | None = None
    """What counts where batches differ in size: a push weighs as much as what was trained for it. ``"samples"`` or
    ``"tokens"`` (labels that are not -100, an attention mask's, or a tensor of integers), or a function of a batch that
    returns its tokens. None, the default: a worker's batches count the same, by the loader's batch size."""
    min_workers: int = 1
    """Number of workers; training ends when fewer are left. The default is 1."""
    server_machines: int = 1
    """Number of nodes among which the servers of a job are divided, from the first one on. The default is 1."""
    max_offline_steps: int = 1000
    """Optimizer steps that a worker takes during an exchange before it waits for the reply. The default is 1000."""
    snapshot_every_s: float = 60.0
    """Seconds between two snapshots of the state that the algorithm keeps on the servers besides the weights, such as
    an optimizer's; the default is 60. They go to a temporary file. The replacement of a lost server gets the weights
    from the workers, and this state from the file. In an elastic run the option of `serve` applies."""
    offload: bool = False
    """Whether to keep in host memory what exchanges need of a module on a GPU. With False, the default, a vector as
    long as the parameters lies on the device, and two while weights arrive; with True 64 MB at most."""
    gain: bool = True
    """Whether to lengthen the steps of optimizers such as Adam, by the noise of a worker's gradients, with
    ``ASGD(scale="mean")``. The default is True."""

    def __post_init__(self) -> None:
        for f in fields(Advanced):
            if f.name in _COUNTS and getattr(self, f.name) is not f.default:
                whole(f"Advanced.{f.name}", getattr(self, f.name))
        seconds("Advanced.snapshot_every_s", self.snapshot_every_s)
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise ConfigurationError(
                f"Advanced.overlap={self.overlap!r}. Expected True to train during an exchange, False to wait for it."
            )
        if self.units not in (None, "samples", "tokens") and not callable(self.units):
            raise ConfigurationError(
                f"Advanced.units={self.units!r}. Expected 'samples', 'tokens', a function that returns the tokens of "
                "a batch, or None."
            )
        for name in ("offload", "gain"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"Advanced.{name}={getattr(self, name)!r}. Expected True or False.")

    __repr__ = written


def refuse(name: str, value: Any, known: Iterable[str]) -> NoReturn:
    """Raise a :class:`ConfigurationError` for an argument that is none of those ``known``: say what may be meant."""
    own = [f.name for f in fields(Advanced)]
    if name in own:
        raise ConfigurationError(f"{name}={value!r}. Expected advanced=Advanced({name}={value!r}).")
    for near in difflib.get_close_matches(name, [*known, *own], 1):
        meant = f"advanced=Advanced({near}={value!r})" if near in own else near
        raise ConfigurationError(f"{name}={value!r}. Did you mean {meant}?")
    raise ConfigurationError(f"{name}={value!r} is no argument. Expected some of {', '.join(known)}.")
