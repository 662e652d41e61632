"""The settings of a run, checked where they are given. Users find the environment variables here too."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from lightning_asgd.algorithms import ASGD, Algorithm, LocalSGD, find
from lightning_asgd.algorithms.base import Payload
from lightning_asgd.compression import Compression, find_compression
from lightning_asgd.environment import RUN_ENV, SECRET_ENV, SERVER_ENV, server_address
from lightning_asgd.errors import ConfigurationError
from lightning_asgd.validation import whole

__all__ = ["RUN_ENV", "SECRET_ENV", "SERVER_ENV", "ExchangeConfig", "Timeouts", "seconds", "server_address"]

_NSYNC = 10  # where it is not "auto", and until a worker has measured something
_LONGEST_S = 10_000_000  # 115 days: more than clocks and sockets can be trusted with


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


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """When and how a worker exchanges with the servers."""

    nfetch: int
    """Optimizer steps between two fetches."""
    npush: int
    """Optimizer steps between two pushes."""
    algorithm: Algorithm = field(default_factory=ASGD)
    """What workers push and what servers do with it."""
    auto: bool = False
    """Whether a worker chooses both by itself; these are its first values."""
    restarted: bool = False
    """Whether both follow from the run: see :func:`~lightning_asgd.algorithms.averaging.restarted_period`."""
    overlap: bool = True
    """Continue training while an exchange is in flight."""
    max_offline_steps: int = 1000
    """Steps a worker takes alone while an exchange is in flight before it waits for the reply."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    compression: Compression | None = None
    """Code of what goes over the network; an ``Auto`` where each worker chooses its own."""
    snapshot_every_s: float = 60.0
    """Seconds between two snapshots of the state that the algorithm keeps on the servers besides the weights."""
    offload: bool = False
    """Keep in host memory what exchanges need of a module that is on a device."""
    gain: bool = True
    """Whether steps are lengthened that an optimizer divides by the size of gradients: :mod:`lightning_asgd.gain`."""

    @property
    def algorithm_name(self) -> str:
        """Name of the algorithm's class."""
        return type(self.algorithm).__name__

    @property
    def reply_s(self) -> float:
        """Seconds within which exchanges are answered; where a reply waits for other workers, as long as these need."""
        return self.timeouts.collective_s if self.algorithm.waits else self.timeouts.exchange_s

    @property
    def restorable(self) -> bool:
        """Whether the workers hold the weights that a server has, so that a lost server can be restored from them.

        Aggregated pushes are in no worker's weights yet. If workers push more often than they fetch, the latest pushes
        are in no reply. And compressed weights are not the servers' exact weights. Where each worker chooses its codec,
        this has to be known before: they count as compressed.
        """
        exact = self.nfetch == self.npush and self.compression is None
        return exact and self.algorithm.leaves_weights

    @classmethod
    def create(
        cls,
        *,
        nsync: Any = None,
        nfetch: Any = None,
        npush: Any = None,
        algorithm: Any = None,
        scale: Any = None,
        overlap: Any = None,
        max_offline_steps: Any = 1000,
        timeouts: Timeouts | None = None,
        compression: Any = None,
        snapshot_every_s: Any = 60.0,
        offload: Any = False,
        gain: Any = True,
    ) -> ExchangeConfig:
        """Check what a user gave; see the attributes. Raises a :class:`ConfigurationError` for a wrong value.

        ``nsync`` is the default of ``nfetch`` and ``npush``; or ``"auto"`` or ``"restarted"``, without these. None
        means ``"auto"`` with :class:`ASGD` without transforms, and 10 with other algorithms or beside these.
        ``overlap=None`` is what the algorithm does by itself. ``gain`` needs an algorithm that applies means.
        """
        rule = find(algorithm, scale)
        if nsync is None:
            plain = type(rule) is ASGD and not rule.transforms
            nsync = "auto" if plain and nfetch is None is npush else _NSYNC
        _check_period(nsync, nfetch, npush, rule)
        _check_rounds(nsync, overlap, rule)
        auto, restarted = nsync == "auto", nsync == "restarted"
        nsync = _NSYNC if auto or restarted else whole("nsync", nsync)
        _check_others(timeouts, offload, gain, rule)
        return cls(
            nfetch=nsync if nfetch is None else whole("nfetch", nfetch),
            npush=nsync if npush is None else whole("npush", npush),
            auto=auto,
            restarted=restarted,
            algorithm=rule,
            overlap=rule.overlap if overlap is None else overlap,
            max_offline_steps=whole("max_offline_steps", max_offline_steps),
            timeouts=timeouts or Timeouts(),
            compression=_code(compression, rule),
            snapshot_every_s=seconds("snapshot_every_s", snapshot_every_s),
            offload=offload,
            gain=gain and isinstance(rule, ASGD) and rule.scale == "mean",
        )


def _code(compression: Any, rule: Algorithm) -> Compression | None:
    """Find the codec that compresses pushes. An algorithm may have its own; otherwise the user chooses one."""
    code = find_compression(compression)
    if code is not None and rule.code is not None:
        raise ConfigurationError(
            f"compression={compression!r} was given with {type(rule).__name__}, which compresses pushes with its own "
            "codec. Expected none."
        )
    if code is not None and not rule.compressible:
        raise ConfigurationError(
            f"compression={compression!r} cannot be used with {type(rule).__name__}. Expected an algorithm whose "
            "workers push differences or gradients and take the servers' weights, such as ASGD: with these, later "
            "pushes make up for what a codec loses."
        )
    return code or rule.code


def _check_period(nsync: Any, nfetch: Any, npush: Any, rule: Algorithm) -> None:
    if nsync in ("auto", "restarted") and (nfetch is not None or npush is not None):
        raise ConfigurationError(
            f"nsync={nsync!r} was given together with nfetch={nfetch!r} and npush={npush!r}. Expected only one."
        )
    if nsync == "restarted" and not isinstance(rule, LocalSGD):
        raise ConfigurationError(
            f"nsync='restarted' was given with the algorithm {type(rule).__name__}. Expected algorithm='local_sgd': "
            "the rule holds where all workers continue from the mean of their weights."
        )


def _check_rounds(nsync: Any, overlap: Any, rule: Algorithm) -> None:
    """Raise if workers that train on until a round is over are to wait, or to exchange as often as that lasts."""
    name = type(rule).__name__
    if overlap is not None and not isinstance(overlap, bool):
        raise ConfigurationError(
            f"overlap={overlap!r}. Expected True to train during an exchange, False to wait for it."
        )
    if rule.timed and nsync == "auto":
        raise ConfigurationError(
            f"nsync='auto' was given with {name}, whose replies wait for other workers. Expected a number of steps."
        )
    if rule.waits and not rule.lockstep and overlap is False:
        raise ConfigurationError(
            f"overlap=False was given with {name}. Expected True or None: its workers train on while a round lasts."
        )
    if rule.merge_after and overlap is False:
        raise ConfigurationError(
            f"overlap=False was given with {rule!r}. Expected True or None with delay={rule.merge_after}: a worker "
            "that waits for a reply merges it at once."
        )


def _check_others(timeouts: Any, offload: Any, gain: Any, rule: Algorithm) -> None:
    if not isinstance(gain, bool):
        raise ConfigurationError(f"gain={gain!r}. Expected True or False.")
    if timeouts is not None and not isinstance(timeouts, Timeouts):
        raise ConfigurationError(f"timeouts={timeouts!r}. Expected a lightning_asgd.Timeouts(...).")
    if not isinstance(offload, bool) or (offload and rule.payload not in (Payload.DELTA, Payload.WEIGHTS)):
        raise ConfigurationError(
            f"offload={offload!r} was given with {type(rule).__name__}. Expected False, or True with an algorithm "
            "whose workers push differences or weights, such as ASGD: sums of gradients stay on the device."
        )


def seconds(name: str, value: Any) -> float:
    """Check a setting that is a time. Raises a ``ConfigurationError`` if it is not above 0, or too long for a clock."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _LONGEST_S:
        return value
    raise ConfigurationError(
        f"{name}={value!r}. Expected a number of seconds above 0 and at most {_LONGEST_S}. To wait as long as "
        f"possible, pass the largest."
    )
