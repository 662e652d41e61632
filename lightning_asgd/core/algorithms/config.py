"""The settings of a run, checked where they are given. Users find the environment variables here too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_asgd.core.algorithms.asgd import ASGD
from lightning_asgd.core.algorithms.base import Algorithm, Payload
from lightning_asgd.core.algorithms.compression import Compression
from lightning_asgd.core.foundation.environment import SECRET_ENV
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.settings import Advanced, Timeouts
from lightning_asgd.core.foundation.validation import whole
from lightning_asgd.features import FINDERS, load

__all__ = ["SECRET_ENV", "Advanced", "ExchangeConfig", "Timeouts"]

_NSYNC = 10  # where it is not "auto", and until a worker has measured something


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig(Advanced):
    """When and how a worker exchanges with the servers: what a user gave, and what follows from it."""

    nfetch: int  # these three without None
    npush: int
    overlap: bool
    auto: bool = False
    """Whether a worker chooses both periods by itself; these are the first ones."""
    restarted: bool = False
    """Whether both follow from the run: see :func:`~lightning_asgd.algorithms.averaging.restarted_period`."""
    algorithm: Algorithm = field(default_factory=ASGD)
    """What workers push and what servers do with it."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    compression: Compression | None = None
    """Code of what goes over the network; an ``Auto`` where each worker chooses its own."""

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
        algorithm: Any = None,
        compression: Any = None,
        timeouts: Timeouts | None = None,
        advanced: Advanced | None = None,
    ) -> ExchangeConfig:
        """Check what a user gave; see the attributes. Raises a :class:`ConfigurationError` for a wrong value.

        ``nsync`` is the default of ``nfetch`` and ``npush``; or ``"auto"`` or ``"restarted"``, without these. None
        means ``"auto"`` with :class:`ASGD` without transforms, and 10 with other algorithms or beside these.
        """
        for name, value, kind in (("timeouts", timeouts, Timeouts), ("advanced", advanced, Advanced)):
            if value is not None and not isinstance(value, kind):
                raise ConfigurationError(f"{name}={value!r}. Expected a lightning_asgd.{kind.__name__}(...).")
        rule: Algorithm = ASGD() if algorithm is None else load(FINDERS["algorithm"])(algorithm)
        advanced = advanced or Advanced()
        if nsync is None:
            plain = type(rule) is ASGD and not rule.transforms
            nsync = "auto" if plain and advanced.nfetch is None is advanced.npush else _NSYNC
        _check_period(nsync, advanced, rule)
        _check_rounds(nsync, advanced.overlap, rule)
        if advanced.offload and rule.payload not in (Payload.DELTA, Payload.WEIGHTS):
            raise ConfigurationError(
                f"Advanced.offload=True was given with {type(rule).__name__}. Expected False, or an algorithm whose "
                "workers push differences or weights, such as ASGD: sums of gradients stay on the device."
            )
        auto, restarted = nsync == "auto", nsync == "restarted"
        period = _NSYNC if auto or restarted else whole("nsync", nsync, instead=", or 'auto' or 'restarted'")
        given = vars(advanced) | {
            "nfetch": period if advanced.nfetch is None else advanced.nfetch,
            "npush": period if advanced.npush is None else advanced.npush,
            "overlap": rule.overlap if advanced.overlap is None else advanced.overlap,
            "gain": advanced.gain and isinstance(rule, ASGD) and rule.scale == "mean",
            "compression": _code(compression, rule),
        }
        return cls(**given, auto=auto, restarted=restarted, algorithm=rule, timeouts=timeouts or Timeouts())


def _code(compression: Any, rule: Algorithm) -> Compression | None:
    """Find the codec that compresses pushes. An algorithm may have its own; otherwise the user chooses one."""
    code: Compression | None = None if compression is None else load(FINDERS["compression"])(compression)
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


def _check_period(nsync: Any, advanced: Advanced, rule: Algorithm) -> None:
    if nsync in ("auto", "restarted") and (advanced.nfetch is not None or advanced.npush is not None):
        raise ConfigurationError(
            f"nsync={nsync!r} was given together with {advanced!r}. Expected only one of nsync, nfetch and npush."
        )
    if nsync == "restarted" and not rule.averages:
        raise ConfigurationError(
            f"nsync='restarted' was given with the algorithm {type(rule).__name__}. Expected algorithm='local_sgd': "
            "the rule holds where all workers continue from the mean of their weights."
        )


def _check_rounds(nsync: Any, overlap: bool | None, rule: Algorithm) -> None:
    """Raise if workers that train on until a round is over are to wait, or to exchange as often as that lasts."""
    name = type(rule).__name__
    if rule.timed and nsync == "auto":
        raise ConfigurationError(
            f"nsync='auto' was given with {name}, whose replies wait for other workers. Expected a number of steps."
        )
    if rule.waits and not rule.lockstep and overlap is False:
        raise ConfigurationError(
            f"Advanced.overlap=False was given with {name}. Expected True or None: its workers train on while a round "
            "lasts."
        )
    if rule.merge_after and overlap is False:
        raise ConfigurationError(
            f"Advanced.overlap=False was given with {rule!r}. Expected True or None with delay={rule.merge_after}: a "
            "worker that waits for a reply merges it at once."
        )
