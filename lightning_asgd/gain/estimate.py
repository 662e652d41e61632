r"""The share of signal in a worker's gradients, from an optimizer's running means of them and of their squares. Pure.

With bias-corrected means :math:`\hat m` and :math:`\hat v` after *n* steps, :math:`\rho` is the mean of
:math:`\hat m^2 / \hat v` over all elements. It is 1 where all gradients were equal, and for pure noise

.. math::  c = \frac{1 - \beta_1}{1 + \beta_1} \cdot \frac{1 + \beta_1^n}{1 - \beta_1^n}

so :math:`\gamma = (\rho - c) / (1 - c)` estimates :math:`G^2 / (G^2 + \sigma^2)`, the signal's share of a squared
gradient. The mean of N workers' gradients has the noise :math:`\sigma^2 / N`, thus DDP's steps are longer than a
worker's by :math:`1 / \sqrt{\gamma + (1 - \gamma) / N}`: between 1 and :math:`\sqrt N`.

Muon and Lion keep one running mean only, and their steps have one size. Its cosine with the gradient that follows tells
:math:`\kappa = \sigma^2 / G^2`. A step is along *w* of that mean and :math:`1 - w` of the gradient; :math:`\gamma` is
the share of signal in that sum:

.. math::  \cos^2 = \frac{1}{(1 + \kappa) (1 + c \kappa)}, \qquad
    \gamma = \frac{1}{1 + ((1 - w)^2 + w^2 c) \kappa}
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Groups = Iterable[Mapping[str, Any]]
States = Mapping[Any, Mapping[str, Any]]
Summed = Callable[[Tensor], Tensor]
_FRESH = 0.3  # weight of the latest estimate
_ELEMENTS = 1 << 12  # looked at, evenly spread: the mean over more is the same, and takes longer


@dataclass
class Signal:
    """Smoothed: how far the mean ratio, and that of pure signal, lie above that of pure noise. 0 before the first."""

    above: float = 0.0
    span: float = 0.0

    def add(self, groups: Groups, state: States, summed: Summed = lambda sums: sums) -> None:
        """Look at an optimizer's states; ``summed`` adds up over the processes among which a DTensor is sharded."""
        moments = [found for group in groups for found in _moments(group, state)]
        every = math.ceil(sum(m.numel() for m, *_ in moments) / _ELEMENTS) | 1  # odd: not the same columns of each row
        alike: dict[tuple[float, float, torch.device], list[tuple[Tensor, Tensor]]] = {}
        for m, v, noise, bias in moments:
            alike.setdefault((noise, bias, m.device), []).append((_some(m, every), _some(v, every)))
        above = span = seen = 0.0
        for (noise, bias, _), pairs in alike.items():
            m, v = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
            counts = int((v > 0).sum())
            ratios = float(torch.where(v > 0, m * m / v, 0).sum()) * bias
            above, span, seen = above + ratios - noise * counts, span + (1 - noise) * counts, seen + counts
        if any(hasattr(m, "to_local") for m, *_ in moments):
            above, span, seen = summed(torch.tensor([above, span, seen], dtype=torch.float64)).tolist()
        if not seen or not math.isfinite(above):
            return
        fresh = _FRESH if self.span else 1.0
        self.above += fresh * (above / seen - self.above)
        self.span += fresh * (span / seen - self.span)

    @property
    def share(self) -> float:
        """The share of signal, once something is known."""
        return min(1.0, max(0.0, self.above / self.span))

    def gain(self, workers: float) -> float:
        """What a step of one of N workers is to be multiplied with; 1 while nothing is known."""
        if self.span <= 0 or workers <= 1:
            return 1.0
        return 1 / math.sqrt(self.share + (1 - self.share) / workers)


@dataclass
class MomentumSignal(Signal):
    """The same for steps of one size, along a running mean of gradients: smoothed, its cosine with the gradient."""

    noise: float = 0.0  # what is left of a gradient's noise in the running mean
    left: float = 0.0  # the same in a step

    def add(self, groups: Groups, state: States, summed: Summed = lambda sums: sums) -> None:
        """Look at the gradients of the coming step and an optimizer's states; ``summed``: see :class:`Signal`."""
        each = []
        for m, g, *noise in self._pairs(groups, state):
            about = m.new_tensor([1.0, *noise]) * len(m)
            each.append(torch.cat((torch.stack((m @ g, m @ m, g @ g)), about)))
        if not each:
            return
        sums = torch.stack([one.to(each[0].device) for one in each]).cpu().double()
        if any(hasattr(p, "to_local") for group in groups for p in group["params"]):
            sums = summed(sums)
        sizes = (sums[:, 1] * sums[:, 2]).sqrt()
        known = (sizes > 0) & sizes.isfinite()
        counts, *noises = sums[known, 3:].T
        cosine = float((sums[known, 0] / sizes[known]) @ counts / counts.sum())
        if math.isfinite(cosine):
            self.above += (_FRESH if self.span else 1.0) * (cosine - self.above)
            self.noise, self.left = (float(noise.sum() / counts.sum()) for noise in noises)
            self.span = 1.0

    def _pairs(self, groups: Groups, state: States) -> list[tuple[Tensor, Tensor, float, float]]:
        """Elements of running means, and of gradients; what is left of a gradient's noise in the mean and in a step."""
        pairs = [found for group in groups for found in _momenta(group, state)]
        every = math.ceil(sum(m.numel() for m, *_ in pairs) / _ELEMENTS) | 1
        return [(_some(m, every), _some(g, every), noise, left) for m, g, noise, left in pairs]

    @property
    def share(self) -> float:
        """The share of signal in a step."""
        rest, linear = 1 / min(max(self.above, 1e-6), 1.0) ** 2 - 1, 1 + self.noise
        return 1 / (1 + 2 * self.left * rest / (linear + math.sqrt(linear**2 + 4 * self.noise * rest)))


class GradientSignal(MomentumSignal):
    """The same for optimizers that divide by sizes of gradients and keep no mean: the cosine of two gradients."""

    last: Mapping[Tensor, Tensor] = {}  # elements of the gradients at the latest look, by parameter

    def _pairs(self, groups: Groups, state: States) -> list[tuple[Tensor, Tensor, float, float]]:
        parameters = [p for group in groups for p in group["params"] if p.grad is not None and not p.grad.is_sparse]
        every = math.ceil(sum(p.numel() for p in parameters) / _ELEMENTS) | 1
        old, self.last = self.last, {p: _some(p.grad, every).clone() for p in parameters}
        return [(old[p].to(g.device), g, 1.0, 1.0) for p, g in self.last.items() if p in old and len(old[p]) == len(g)]

    @property
    def share(self) -> float:
        """The share of signal in a squared gradient: two gradients have nothing else in common."""
        return min(1.0, max(0.0, self.above))


def signal_of(optimizer: Any) -> Signal | None:
    """What estimates the share, by the names of an optimizer's classes: the states do not tell, LAMB's are Adam's."""
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    if any(re.search("adam(?!ax|od)", name.lower()) for name in names):
        return Signal()
    if any(re.search("Muon|Lion", name) for name in names):
        return MomentumSignal()
    divides = r"RMSprop|Ada(grad|delta|factor|max)|SOAP|\bShampoo"  # ScalableShampoo's steps grow with gradients
    return GradientSignal() if any(re.search(divides, name) for name in names) else None


def _some(tensor: Tensor, every: int) -> Tensor:
    """Every ``every``-th element, of the part that is on this device."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if type(local).dequantize is not Tensor.dequantize:  # of 8 or 4 bits, of another library
        local = local.dequantize()
    local = torch.view_as_real(local) if local.is_complex() else local
    return local.detach().reshape(-1)[::every].float()


def _moments(group: Mapping[str, Any], state: States) -> Iterable[tuple[Tensor, Tensor, float, float]]:
    """Per parameter: its two running means, the ratio of pure noise, and the correction of biases."""
    betas = group.get("betas")
    if not betas:
        return
    first, second = (float(beta) for beta in betas[:2])
    for parameter in group["params"]:
        kept = state.get(parameter)
        sparse = parameter.grad is not None and parameter.grad.is_sparse  # then only some rows have taken these steps
        if sparse or not kept or first <= 0 or not {"exp_avg", "exp_avg_sq"} <= kept.keys():
            continue
        if kept["exp_avg"].shape != kept["exp_avg_sq"].shape:  # one square for a whole tensor
            continue
        n = float(kept.get("step", group.get("step", 0)))
        if n < 2:
            continue
        past = first**n
        noise = (1 - first) / (1 + first) * (1 + past) / (1 - past)
        yield kept["exp_avg"], kept["exp_avg_sq"], noise, (1 - second**n) / (1 - past) ** 2


def _momenta(group: Mapping[str, Any], state: States) -> Iterable[tuple[Tensor, Tensor, float, float]]:
    """Per parameter: its running mean, its gradient, and what is left of this one's noise in the mean and in a step."""
    try:
        if (beta := group.get("momentum")) is None:
            kept, beta = map(float, group.get("betas"))  # type: ignore[arg-type]
        else:
            kept, beta = float(beta**2 if group.get("nesterov") else beta), float(beta)
    except (TypeError, ValueError):  # none, or of another kind
        return
    noise = (1 - beta) / (1 + beta)
    for parameter in group["params"]:
        states, gradient = state.get(parameter) or {}, parameter.grad
        mean = states.get("momentum_buffer", states.get("exp_avg"))
        if mean is None or gradient is None or gradient.is_sparse or "exp_avg_sq" in states:
            continue  # the last are Adam's, in a class that has both
        if mean.shape == gradient.shape and mean.device == gradient.device:
            yield mean, -gradient if group.get("maximize") else gradient, noise, (1 - kept) ** 2 + kept**2 * noise
