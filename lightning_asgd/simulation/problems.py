"""What simulated workers train: a loss of one flat vector of weights, with its gradient."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import at_least, whole
from lightning_asgd.core.protocol import JointState, UntrainedState
from lightning_asgd.core.protocol.reductions import reduce
from lightning_asgd.core.worker.untrained_state import is_statistic


class Problem(ABC):
    """A loss to make small."""

    @abstractmethod
    def start(self) -> Tensor:
        """First weights of worker 0, which all take: a fresh tensor of shape ``(n,)``."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors that the weights consist of: their shapes by name, one after the other in the flat vector.

        Algorithms that exchange a module in fragments, or merge it tensor by tensor, go by them. By default there are
        none: the weights are one tensor, which is cut into pieces of equal sizes where fragments are exchanged.
        """
        return {}

    @abstractmethod
    def gradient(self, weights: Tensor, worker: int, generator: torch.Generator) -> tuple[float, Tensor]:
        """What a worker computes in one step.

        Args:
            weights: the worker's, shape ``(n,)``; not to be changed.
            worker: its rank, for data that differ between workers.
            generator: its own source of random numbers, for noise and batches.

        Returns:
            the loss of its batch, and the gradient, a fresh tensor of shape ``(n,)``.
        """

    def gradient_of(
        self, samples: Sequence[int], weights: Tensor, worker: int, generator: torch.Generator
    ) -> tuple[float, Tensor]:
        """The same where samples are leased. By default it does not matter which they are.

        Args:
            samples: numbers of the batch's samples, from 0 on.
            weights: the worker's, shape ``(n,)``; not to be changed.
            worker: its rank; in an elastic run its number.
            generator: its own source of random numbers.

        Returns:
            the loss of the batch, and the gradient, a fresh tensor of shape ``(n,)``.
        """
        return self.gradient(weights, worker, generator)

    def synchronise(self, workers: Collection[int]) -> None:
        """Share what workers keep beside the weights, such as statistics. By default there is nothing.

        Args:
            workers: the ranks of those that have met at a sync point. Each of them calls this.
        """
        return

    @abstractmethod
    def loss(self, weights: Tensor) -> float:
        """The loss that is reported, without noise.

        Args:
            weights: the servers', shape ``(n,)``; not to be changed.
        """


class Quadratic(Problem):
    r"""A bowl: :math:`\frac12 \sum_i h_i w_i^2`, from all ones; gradients have Gaussian noise.

    Args:
        dimension: number of weights.
        condition: the largest curvature, which is 1, divided by the smallest; those between are spaced evenly in their
            logarithm.
        noise: standard deviation of each element of a gradient.

    Raises:
        ConfigurationError: a value is out of range.
    """

    def __init__(self, dimension: int = 10, condition: float = 10.0, noise: float = 0.1) -> None:
        whole("Quadratic(dimension)", dimension)
        at_least("Quadratic(condition)", condition, 0, finite=True)
        at_least("Quadratic(noise)", noise, 0, finite=True)
        if condition < 1:
            raise ConfigurationError(
                f"Quadratic(condition)={condition!r}. Expected a number of at least 1: it is the largest curvature "
                "divided by the smallest."
            )
        self.dimension = dimension
        self.noise = noise
        self.curvature = torch.logspace(-math.log10(condition), 0.0, dimension)

    def start(self) -> Tensor:
        """See :class:`Problem`."""
        return torch.ones(self.dimension)

    def gradient(self, weights: Tensor, worker: int, generator: torch.Generator) -> tuple[float, Tensor]:
        """See :class:`Problem`."""
        slope = self.curvature * weights
        loss = 0.5 * float(weights.dot(slope))
        if self.noise:
            slope.add_(torch.randn(self.dimension, generator=generator), alpha=self.noise)
        return loss, slope

    def loss(self, weights: Tensor) -> float:
        """See :class:`Problem`."""
        return 0.5 * float(weights.dot(self.curvature * weights))


class ModuleProblem(Problem):
    """Any module, whose parameters are one flat vector here. Its frozen parameters stay as they are.

    Each worker has buffers of its own, which are shared at sync points as in a real run: running statistics are
    averaged, the others are the first worker's. The loss is reported in evaluation mode, with what a sync point would
    make of the buffers.

    Args:
        module: on the CPU; its trainable parameters are of one dtype. It is not changed.
        loss: from the module's output and the target to a scalar tensor.
        batches: from a worker's rank and its generator to a batch: input and target.
        whole_batch: input and target whose loss is reported.

    Raises:
        ConfigurationError: there is no trainable parameter, or they have several dtypes.
    """

    def __init__(
        self,
        module: Module,
        loss: Callable[[Any, Any], Tensor],
        batches: Callable[[int, torch.Generator], tuple[Any, Any]],
        whole_batch: tuple[Any, Any],
    ) -> None:
        self._module = module
        self._loss = loss
        self._batches = batches
        self._whole = whole_batch
        parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        dtypes = {p.dtype for p in parameters.values()}
        if len(dtypes) != 1:
            names = ", ".join(sorted(str(d) for d in dtypes)) or "none"
            raise ConfigurationError(
                f"ModuleProblem was given a module whose trainable parameters have the dtypes {names}. Expected one "
                "dtype: unfreeze some parameters, or convert the module with .float()."
            )
        self._shapes = {n: tuple(p.shape) for n, p in parameters.items()}
        self._sizes = [p.numel() for p in parameters.values()]
        self._buffers: dict[int, dict[str, Tensor]] = {}  # of each worker that has taken a step
        self._seen: Counter[int] = Counter()  # batches of each since the last sync point

    def start(self) -> Tensor:
        """See :class:`Problem`."""
        named = dict(self._module.named_parameters())
        return torch.cat([named[name].detach().reshape(-1) for name in self._shapes])

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See :class:`Problem`: those of the trainable parameters."""
        return self._shapes

    def gradient(self, weights: Tensor, worker: int, generator: torch.Generator) -> tuple[float, Tensor]:
        """See :class:`Problem`."""
        with torch.enable_grad():
            leaf = weights.detach().requires_grad_()
            if worker not in self._buffers:
                self._buffers[worker] = {name: b.clone() for name, b in self._module.named_buffers()}
            self._seen[worker] += 1
            loss = self._loss_of(leaf, self._buffers[worker], *self._batches(worker, generator))
            (gradient,) = torch.autograd.grad(loss, leaf)
        return float(loss.detach()), gradient

    def loss(self, weights: Tensor) -> float:
        """See :class:`Problem`."""
        modes = {each: each.training for each in self._module.modules()}
        self._module.eval()
        try:
            with torch.no_grad():
                return float(self._loss_of(weights.detach(), self._shared(self._buffers), *self._whole))
        finally:
            for each, training in modes.items():
                each.training = training

    def synchronise(self, workers: Collection[int]) -> None:
        """See :class:`Problem`."""
        for worker, buffers in self._buffers.items():
            if worker in workers:
                buffers.update({name: value.clone() for name, value in self._shared(workers).items()})
        for worker in workers:
            self._seen[worker] = 0

    def _shared(self, workers: Collection[int]) -> dict[str, Tensor]:
        """What these workers' buffers come to."""
        found = {worker: self._buffers[worker] for worker in sorted(workers) if worker in self._buffers}
        if not found:
            return dict(self._module.named_buffers())
        chief = next(iter(found.values()))
        statistics = [name for name, buffer in chief.items() if is_statistic(name, buffer)]
        reports = {
            worker: UntrainedState({n: (float(self._seen[worker]), buffers[n]) for n in statistics}, {}, {})
            for worker, buffers in found.items()
        }
        means: JointState = reduce("state", reports).value
        return {**chief, **means.statistics}

    def _loss_of(self, weights: Tensor, buffers: Mapping[str, Tensor], inputs: Any, target: Any) -> Tensor:
        pieces = torch.split(weights, self._sizes)
        state = {n: p.view(shape) for (n, shape), p in zip(self._shapes.items(), pieces, strict=True)}
        return self._loss(functional_call(self._module, state | dict(buffers), (inputs,)), target)  # which writes there
