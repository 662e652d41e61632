r"""Optimizers that draw from a posterior instead of looking for its mode: SGLD, pSGLD, SGHMC.

Write :math:`g` for the gradient of the *mean* loss over a batch, where the loss of one example is its negative log
likelihood, :math:`N` for the size of the data set (``num_data``), and :math:`\lambda` for the precision of a Gaussian
prior (``weight_decay``). All three use

.. math::  \nabla\tilde U(x) = N g(x) + \lambda x,

an unbiased estimate of the gradient of :math:`U(x) = -\log p(x) - \sum \log p(d \mid x)`, and draw from
:math:`\exp(-U / T)`: the posterior for ``temperature`` *T* = 1. Because of the factor *N* the learning rates are about
*N* times smaller than SGD's. :math:`\xi` is standard normal noise, fresh at every step.

The noise comes from a random stream of the optimizer's own: its state is part of ``state_dict()``, and nothing else
that draws random numbers disturbs it. The stream has two coordinates. ``seed`` is drawn from torch's default generator
if it is not given, so ``seed_everything`` fixes it. ``stream`` must differ between workers, or their noise would add up
instead of averaging out. :class:`~lightning_asgd.ASGDStrategy` sets it to the worker's rank if it is not given;
elsewhere give it yourself, as in ``SGLD(..., stream=self.global_rank)`` in ``configure_optimizers``.

References:
    [Welling 2011] M. Welling, Y. W. Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics", ICML 2011.
    [Chen 2014] T. Chen, E. B. Fox, C. Guestrin, "Stochastic Gradient Hamiltonian Monte Carlo", ICML 2014
    (arXiv 1402.4102).
    [Li 2016] C. Li, C. Chen, D. Carlson, L. Carin, "Preconditioned Stochastic Gradient Langevin Dynamics for Deep
    Neural Networks", AAAI 2016 (arXiv 1512.07666).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import at_least, between

__all__ = ["PSGLD", "SGHMC", "SGLD", "PosteriorSampler", "share_posterior"]

_RNG = "rng"  # key of the random stream in a state_dict


class PosteriorSampler(Optimizer):
    """What the samplers have in common: the noise's random stream, and the gradient of the potential.

    Args:
        params: as for every optimizer of torch.
        defaults: the settings of a parameter group; ``lr``, ``num_data``, ``weight_decay`` and ``temperature`` among
            them.
        seed: of the random stream; None draws one from torch's default generator.
        stream: number of the random stream; must differ between workers. None: see the module's docstring.
        generator: draw from this one instead, on the parameters' device.

    Raises:
        ConfigurationError: a setting is of the wrong type or out of range.
    """

    _chains = 1  # that draw from the posterior together

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        seed: int | None = None,
        stream: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        name = type(self).__name__
        at_least(f"{name}(lr)", defaults["lr"], 0, finite=True)
        at_least(f"{name}(num_data)", defaults["num_data"], 1, finite=True)
        at_least(f"{name}(weight_decay)", defaults["weight_decay"], 0, finite=True)
        at_least(f"{name}(temperature)", defaults["temperature"], 0, finite=True)
        if generator is not None and (seed is not None or stream is not None):
            raise ConfigurationError(
                f"{name} was given a generator beside seed={seed!r}, stream={stream!r}. Expected one or the other: "
                f"seed a generator where you create it, differently on every worker."
            )
        for what, number in (("seed", seed), ("stream", stream)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
                raise ConfigurationError(f"{name}({what})={number!r}. Expected a whole number, or None.")
        super().__init__(params, defaults)
        if seed is None and generator is None:
            seed = int(torch.randint(2**63 - 1, ()))  # as DataLoader does: seed_everything fixes it
        self._seed = seed or 0
        self._stream = stream
        self._given = generator is not None
        self._generator = generator
        self._loaded: dict[str, Any] | None = None  # before this worker has its stream

    def use_stream(self, stream: int) -> None:
        """Take a random stream, unless the user has given one. A generator of the user's is used as it is.

        Called before the first step.

        Args:
            stream: its number: the worker's rank.
        """
        if self._stream is None:
            self._stream = stream
            self._generator = self._generator if self._given else None
            if self._loaded is not None:
                self._continue_from(self._loaded)

    def use_chains(self, chains: int) -> None:
        """Be one of several chains that draw from the posterior together, tied to each other by springs.

        Each chain stands for an equal part of the potential, :math:`U / chains`; their sum is *U*. The step on *U*
        stays as it is, and the noise is larger by the root of their number. See
        :class:`~lightning_asgd.algorithms.ElasticSGMCMC`.
        """
        self._chains = chains

    def _temperature(self, group: dict[str, Any]) -> float:
        return float(group["temperature"] * self._chains)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step of the chain. Parameters without a gradient stay as they are, without noise.

        Args:
            closure: computes the loss again, as for every optimizer of torch.
        """
        loss, self._loaded = None, None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                x, gradient = parameter, parameter.grad
                if gradient.is_sparse:
                    gradient = gradient.to_dense()
                if parameter.is_complex():
                    x, gradient = torch.view_as_real(x), torch.view_as_real(gradient)
                self._move(x, gradient, group, self.state[parameter])
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and its random stream's."""
        state = super().state_dict()
        state[_RNG] = {"stream": self._number, "state": self._source().get_state()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state.

        The random stream continues where it was. If the state is another worker's, as in a checkpoint that was written
        in the middle of an epoch, a stream begins that belongs to this worker and to that state alone.
        """
        super().load_state_dict(state_dict)
        saved = state_dict.get(_RNG)
        if saved is not None:
            self._loaded = saved if self._stream is None else None
            self._continue_from(saved)

    def _continue_from(self, saved: dict[str, Any]) -> None:
        state, generator = saved["state"].cpu(), self._source()
        if saved["stream"] == self._number and state.shape == generator.get_state().shape:
            generator.set_state(state)
        else:  # with the other worker's stream both would add the same noise
            generator.manual_seed(_digest(state.numpy().tobytes(), self._number))

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            **{key: getattr(self, key) for key in ("_seed", "_stream", "_given", "_chains")},
            "_generator": None,
            "_loaded": None,
            "_state": self._source().get_state(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        before = state.pop("_state", None)  # only in what was pickled; torch calls this for a state_dict, too
        super().__setstate__(state)
        if before is not None:
            self._source().set_state(before)

    def _move(self, x: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Move one parameter in place."""
        raise NotImplementedError

    def _noise(self, x: Tensor) -> Tensor:
        source = self._source()
        return torch.randn(x.shape, generator=source, dtype=x.dtype, device=source.device).to(x.device)

    @property
    def _number(self) -> int:
        return self._stream or 0

    def _source(self) -> torch.Generator:
        # Made when it is first needed: a module may change its device after its optimizer was made.
        if self._generator is None:
            self._generator = torch.Generator(self.param_groups[0]["params"][0].device)
            self._generator.manual_seed(_digest(str(self._seed).encode(), self._number))
        return self._generator


class SGLD(PosteriorSampler):
    r"""Stochastic gradient Langevin dynamics.

    .. math::  x \leftarrow x - h \nabla\tilde U(x) + \sqrt{2 h T}\, \xi

    Args:
        params: as for every optimizer of torch.
        lr: the step *h*.
        num_data: number of examples in the data set, which the batches' mean loss stands for.
        weight_decay: precision of the Gaussian prior.
        temperature: *T*; below 1 draws from a sharper distribution than the posterior, 0 is SGD.
        seed: see the module's docstring; with the same seed and stream a run repeats itself.
        stream: see the module's docstring.
        generator: see :class:`PosteriorSampler`.

    References:
        [Welling 2011, eq. 4], with :math:`\epsilon = 2 h`.

    Departures:
        The paper lets the step go to zero; here the user's scheduler sets it. A constant step has a bias of
        its own order, and no Metropolis test removes it.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> sampler = SGLD([weight], lr=1e-5, num_data=1000, weight_decay=1.0, seed=1)
        >>> weight.square().mean().backward()
        >>> sampler.step()
        >>> weight.abs().max().item() < 0.05  # a few times sqrt(2 * lr)
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        num_data: int,
        *,
        weight_decay: float = 0.0,
        temperature: float = 1.0,
        seed: int | None = None,
        stream: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        defaults = {"lr": lr, "num_data": num_data, "weight_decay": weight_decay, "temperature": temperature}
        super().__init__(params, defaults, seed=seed, stream=stream, generator=generator)

    def _move(self, x: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        slope = _slope(x, gradient, group)
        x.add_(slope, alpha=-group["lr"])
        x.add_(self._noise(x), alpha=math.sqrt(2 * group["lr"] * self._temperature(group)))


class PSGLD(PosteriorSampler):
    r"""SGLD whose step is scaled per coordinate, as RMSprop's is.

    .. math::
        V \leftarrow \alpha V + (1 - \alpha)\, g^2, \qquad G = 1 / (\epsilon + \sqrt{V}), \qquad
        x \leftarrow x - h\, G\, \nabla\tilde U(x) + \sqrt{2 h T G}\, \xi

    Args:
        params: as for every optimizer of torch.
        lr: the step *h*.
        num_data: number of examples in the data set, which the batches' mean loss stands for.
        alpha: of the average of squared gradients.
        eps: bounds *G*: added to the root.
        weight_decay: precision of the Gaussian prior.
        temperature: see :class:`SGLD`.
        seed: see the module's docstring; with the same seed and stream a run repeats itself.
        stream: see the module's docstring.
        generator: see :class:`PosteriorSampler`.

    References:
        [Li 2016, algorithm 1], with :math:`\epsilon_t = 2 h`; as there *V* is made of the batch's mean gradient.

    Departures:
        The correction :math:`\Gamma = \nabla \cdot G` is neglected, as in the paper's own experiments. That is
        right as long as *G* does not follow *x*: *V* must be governed by the noise of the batches, or averaged over
        more steps (1 / (1 - alpha)) than the chain takes to move across the posterior. Else the samples shun the mode.
        *V* starts at the mean square of the tensor's first gradient instead of 0: where that gradient happens to be
        small, a coordinate would be thrown far out, and return slowly.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> sampler = PSGLD([weight], lr=1e-5, num_data=1000, weight_decay=1.0, seed=1)
        >>> weight.sum().backward()
        >>> sampler.step()
        >>> sampler.state[weight]["square_avg"]
        tensor([1., 1., 1.])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        num_data: int,
        *,
        alpha: float = 0.99,
        eps: float = 1e-5,
        weight_decay: float = 0.0,
        temperature: float = 1.0,
        seed: int | None = None,
        stream: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        between("PSGLD(alpha)", alpha, 0, 1)
        if alpha == 1:
            raise ConfigurationError(f"PSGLD(alpha)={alpha!r}. Expected a number below 1, such as 0.99.")
        at_least("PSGLD(eps)", eps, 0, finite=True)
        if eps == 0:
            raise ConfigurationError("PSGLD(eps)=0: the step would be unbounded. Expected a number above 0.")
        defaults = {"lr": lr, "num_data": num_data, "alpha": alpha, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "temperature": temperature}
        super().__init__(params, defaults, seed=seed, stream=stream, generator=generator)

    def _move(self, x: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["square_avg"] = torch.full_like(x, float(gradient.square().mean()))
        average = state["square_avg"]
        average.mul_(group["alpha"]).addcmul_(gradient, gradient, value=1 - group["alpha"])
        scale = average.sqrt().add_(group["eps"]).reciprocal_()
        x.addcmul_(_slope(x, gradient, group), scale, value=-group["lr"])
        x.addcmul_(self._noise(x), scale.sqrt_(), value=math.sqrt(2 * group["lr"] * self._temperature(group)))


class SGHMC(PosteriorSampler):
    r"""Stochastic gradient Hamiltonian Monte Carlo: SGLD with momentum.

    .. math::
        v \leftarrow (1 - a)\, v - h \nabla\tilde U(x) + \sqrt{2 a h T}\, \xi, \qquad x \leftarrow x + v

    Args:
        params: as for every optimizer of torch.
        lr: the step *h*. The chain moves about as fast as SGLD's with *h* / *a*.
        num_data: number of examples in the data set, which the batches' mean loss stands for.
        friction: *a*; 1 - *a* is what SGD calls momentum.
        weight_decay: precision of the Gaussian prior.
        temperature: see :class:`SGLD`.
        seed: see the module's docstring; with the same seed and stream a run repeats itself.
        stream: see the module's docstring.
        generator: see :class:`PosteriorSampler`.

    References:
        [Chen 2014, eq. 15], with :math:`\eta = h`, :math:`\alpha = a`.

    Departures:
        The noise of the batches' gradients is not estimated (:math:`\hat\beta = 0`), as in the paper's own
        experiments, and momenta are not redrawn now and then.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> sampler = SGHMC([weight], lr=1e-6, num_data=1000, friction=0.1, weight_decay=1.0, seed=1)
        >>> weight.square().mean().backward()
        >>> sampler.step()
        >>> torch.equal(weight, sampler.state[weight]["momentum_buffer"])
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        num_data: int,
        *,
        friction: float = 0.1,
        weight_decay: float = 0.0,
        temperature: float = 1.0,
        seed: int | None = None,
        stream: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        between("SGHMC(friction)", friction, 0, 1)
        if friction == 0:
            raise ConfigurationError(
                "SGHMC(friction)=0: momentum would never decay. Expected a number above 0, up to 1."
            )
        defaults = {"lr": lr, "num_data": num_data, "friction": friction}
        defaults |= {"weight_decay": weight_decay, "temperature": temperature}
        super().__init__(params, defaults, seed=seed, stream=stream, generator=generator)

    def _move(self, x: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(x)
        v, h, friction = state["momentum_buffer"], group["lr"], group["friction"]
        v.mul_(1 - friction).add_(_slope(x, gradient, group), alpha=-h)
        v.add_(self._noise(x), alpha=math.sqrt(2 * friction * h * self._temperature(group)))
        x.add_(v)


def _slope(x: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
    """The estimate of the potential's gradient, with at least 32 bits: it is as large as the number of samples."""
    wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    slope: Tensor = wide * group["num_data"]
    return slope.add_(x, alpha=group["weight_decay"])


def share_posterior(optimizers: Iterable[Any], stream: int, chains: int) -> None:
    """Give a worker's samplers a random stream, and the number of chains that draw together."""
    for optimizer in optimizers:
        if isinstance(optimizer, PosteriorSampler):
            optimizer.use_stream(stream)
            optimizer.use_chains(chains)


def _digest(seed: bytes, stream: int) -> int:
    """A seed for a generator: streams of neighbouring numbers have nothing to do with each other."""
    return int.from_bytes(hashlib.sha256(seed + b"/" + str(stream).encode()).digest()[:8], "big") >> 1
