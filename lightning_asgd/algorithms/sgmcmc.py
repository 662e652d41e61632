r"""Asynchronous stochastic-gradient MCMC: workers run the chain, the servers collect samples of the posterior.

The workers' optimizer is one of :mod:`lightning_asgd.optim`, so what they do is a gradient step *and* noise. Two ways
to share it:

*Downpour.* A worker pushes what its steps have changed, drift and noise together, and every push is added whole:

.. math::  w \leftarrow w + (x_i - w_i)

*Elastic.* Every worker runs a chain of its own, which a spring ties to the servers' centre, and the centre has noise
of its own:

.. math::
    E = \alpha\,(x_i - w), \qquad x_i \leftarrow x_i - E, \qquad
    w \leftarrow w + E + \sqrt{2\, h\, n_{sync}}\; \xi

After ``burn_in`` versions the servers keep a copy of their weights every ``thin`` versions. When ``fit`` ends these
copies are ``strategy.samples``; :func:`lightning_asgd.averaged_prediction` averages predictions over them.

With N workers the downpour chain moves N times as fast as one worker's: a round of N pushes of ``nsync`` steps of size
*h* is a time of :math:`N\,n_{sync}\,h`. So burn-in and thinning count versions, which are pushes, not epochs. Stale
gradients make the samples too wide, by about *h* times the local steps in which the others' pushes are not seen, about
:math:`(N - 1)\,n_{sync}`, times the curvature of :math:`U`: use a step that is smaller by as much as there are workers.

References:
    C. Li, C. Chen, Y. Pu, R. Henao, L. Carin, "Communication-Efficient Stochastic Gradient MCMC for Neural Networks",
    AAAI 2019: both protocols, samples collected by the servers.
    J. T. Springenberg, A. Klein, S. Falkner, F. Hutter, "Asynchronous Stochastic Gradient MCMC with Elastic Coupling",
    2016 (arXiv 1612.00767).
    C. Chen et al., "Stochastic Gradient MCMC with Stale Gradients", NIPS 2016 (arXiv 1610.06664): what staleness does.

Departures:
    Only the abstract of the first paper was available: the protocols are derived from it, from Downpour SGD and from
    EASGD. Springenberg's chains have momentum, ours in the elastic protocol have none. The centre's noise is
    Langevin's: with the potential :math:`\sum_i U(x_i) / N + \frac k2 \sum_i |x_i - w|^2` an exchange is a step of the
    spring, of length :math:`\alpha / k = N h n_{sync}`. The centre takes N of them in the time in which each worker
    takes one, so that the variance of one is :math:`2 N h n_{sync} / N`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_asgd.algorithms.elastic import EASGD
from lightning_asgd.core.algorithms.asgd import leaves_pushes
from lightning_asgd.core.algorithms.base import Algorithm, Push, Run, Transform
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import at_least, whole
from lightning_asgd.sampling.optim import SGLD, PosteriorSampler

__all__ = ["SGMCMC", "ElasticSGMCMC"]


@dataclass(frozen=True)
class _Collects(Algorithm):
    """The common part of both protocols: which versions are samples, and which settings would spoil them."""

    burn_in: int = field(default=1000, kw_only=True)
    thin: int = field(default=100, kw_only=True)
    max_samples: int = field(default=20, kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        whole(f"{name}(burn_in)", self.burn_in, 0)
        whole(f"{name}(thin)", self.thin, 1)
        whole(f"{name}(max_samples)", self.max_samples, 1)
        for transform in self.transforms:
            if isinstance(transform, Transform) and not leaves_pushes(transform):
                raise ConfigurationError(
                    f"{type(transform).__name__} cannot be used with {name}: it scales, changes, drops or averages "
                    "pushes and with them the noise, so the spread of the samples would be wrong. Expected transforms "
                    "that leave pushes as they are: StaleSynchronous, DynamicSteps."
                )
        super().__post_init__()

    @property
    def compressible(self) -> bool:
        """No: what a codec loses would be noise that the sampler knows nothing of."""
        return False

    def keeps(self, version: int) -> bool:
        """See :class:`Algorithm`."""
        return version > self.burn_in and (version - self.burn_in) % self.thin == 0

    @property
    def keep_at_most(self) -> int:
        """See :class:`Algorithm`."""
        return self.max_samples

    def check(self, run: Run) -> None:
        """See :class:`Algorithm`."""
        super().check(run)
        for optimizer in run.optimizers:
            if not isinstance(optimizer, PosteriorSampler):
                raise ConfigurationError(
                    f"{type(self).__name__} was given the optimizer {type(optimizer).__name__}, which adds no noise, "
                    f"so the servers would not collect samples of the posterior. Expected SGLD, PSGLD or SGHMC of "
                    "lightning_asgd.sampling.optim."
                )


@dataclass(frozen=True)
class SGMCMC(_Collects):
    r"""The downpour protocol: every push is added whole, noise and all.

    Args:
        burn_in: versions before the first sample. Versions continue after a checkpoint is loaded.
        thin: versions between two samples; the first is kept at version ``burn_in + thin``. Samples that are closer
            than the chain takes to move across the posterior add little information.
        max_samples: number of samples that are kept; the oldest are dropped. A server needs memory for this many
            copies of its shard. Samples are not part of checkpoints.

    State:
        none beside the weights; the samples are copies of the shard.

    Staleness:
        ignored: a push is added whole however old its base is, since noise must not be scaled. It makes samples too
        wide, see the module's docstring. ``StaleSynchronous`` bounds it.

    Example:
        >>> import torch
        >>> rule, w = SGMCMC(burn_in=2, thin=3), torch.zeros(2)
        >>> rule.apply(w, torch.tensor([1.0, 3.0]), {}, Push(live=2))
        >>> w.tolist()
        [1.0, 3.0]
        >>> [version for version in range(12) if rule.keeps(version)]
        [5, 8, 11]
    """

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """See :class:`Algorithm`."""
        weights.add_(update)


@dataclass(frozen=True)
class ElasticSGMCMC(EASGD, _Collects):
    r"""The elastic protocol: workers run chains of their own; samples are copies of the centre that ties them together.

    Every worker stands for an equal part of the potential, :math:`U / N`; with steps on *U* this means
    :math:`\sqrt N` times the noise (``PosteriorSampler.use_chains``). A weak spring makes
    samples too wide, by about *h* times the steps of all workers between two exchanges of one, :math:`N n_{sync}`,
    times the curvature of *U*, divided by *beta*. That is as in :class:`SGMCMC`; but the centre moves only as fast as
    one worker's chain: burn-in and thinning have to be about N times as long.

    Args:
        beta: see :class:`EASGD`.
        alpha: see :class:`EASGD`.
        temperature: that of the workers' optimizers.
        burn_in: see :class:`SGMCMC`.
        thin: see :class:`SGMCMC`.
        max_samples: see :class:`SGMCMC`.

    State:
        none beside the weights; every worker has its own, and the samples are copies of the centre.

    Staleness:
        of the centre does not arise; a worker's weights are its own.

    Raises:
        ConfigurationError: before a fit, the optimizer is not SGLD at this temperature: the centre's noise is derived
            for it.

    Example:
        >>> import torch
        >>> w, x = torch.tensor([0.0]), torch.tensor([1.0])
        >>> ElasticSGMCMC(beta=0.5, burn_in=100).apply(w, x, {}, Push(live=2, lr=0.0))  # lr=0: no noise
        >>> w.item(), x.item()  # x holds the force now
        (0.25, 0.25)
    """

    temperature: float = field(default=1.0, kw_only=True)

    chunked: ClassVar[bool] = False  # noise is drawn for a shard at once, so that it does not depend on chunks

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("ElasticSGMCMC(temperature)", self.temperature, 0, finite=True)

    def chains(self, workers: int) -> int:
        """See :class:`Algorithm`."""
        return workers

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """See :class:`Algorithm`. The noise follows from what is pushed, so that a run can be repeated."""
        noise = torch.Generator(weights.device)
        noise.manual_seed(_seed(update, push.worker, push.seq))
        super().apply(weights, update, slots, push)
        xi = torch.randn(weights.shape, generator=noise, dtype=weights.dtype, device=weights.device)
        weights.add_(xi, alpha=math.sqrt(2 * push.lr * push.steps * self.temperature))

    def check(self, run: Run) -> None:
        """See :class:`Algorithm`."""
        super().check(run)
        for optimizer in run.optimizers:
            temperatures = {group["temperature"] for group in optimizer.param_groups}
            if not isinstance(optimizer, SGLD) or temperatures != {self.temperature}:
                raise ConfigurationError(
                    f"ElasticSGMCMC was given the optimizer {type(optimizer).__name__} with temperatures "
                    f"{sorted(temperatures)}. Expected SGLD with temperature={self.temperature:g}, as the algorithm's, "
                    "for which the centre's noise is derived. With other samplers use SGMCMC."
                )


def _seed(update: Tensor, *numbers: int) -> int:
    """A seed for a push's noise, from its first values, its worker and its number."""
    start = update[:16].cpu().to(torch.float64).numpy().tobytes()
    return int.from_bytes(hashlib.sha256(start + repr(numbers).encode()).digest()[:8], "big") >> 1
