"""A data set for simulated workers: every epoch each worker gets another share, as with DDP's sampler."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lightning_asgd.simulation import Problem

__all__ = ["Shares", "train_together"]


class Shares(Problem):
    """Networks on the workers' shares of the samples.

    Args:
        make: makes a network. Each worker has one of its own, with its own batch statistics.
        loss: from a network's output and the targets to a scalar.
        train: inputs and targets.
        workers: number of workers.
        batch: samples of a worker's step.
        seed: of the first weights and of the order of the samples.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        loss: Callable[[Tensor, Tensor], Tensor],
        train: tuple[Tensor, Tensor],
        workers: int,
        batch: int,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        self.workers = workers
        self.nets = [make() for _ in range(workers)]
        self._loss, self._train, self._batch, self._seed = loss, train, batch, seed
        self.first = parameters_to_vector(self.nets[0].parameters()).detach().clone()
        self._samples = len(train[0])
        self.steps = self._samples // workers // batch  # of an epoch
        self._taken = [0] * workers
        self._orders: dict[int, Tensor] = {}

    def start(self) -> Tensor:
        return self.first.clone()

    def gradient(self, weights: Tensor, worker: int, generator: torch.Generator) -> tuple[float, Tensor]:
        epoch, step = divmod(self._taken[worker], self.steps)
        self._taken[worker] += 1
        if epoch not in self._orders:
            order = torch.Generator().manual_seed(1000 * self._seed + epoch)
            self._orders[epoch] = torch.randperm(self._samples, generator=order)
        mine = self._orders[epoch][worker :: self.workers][step * self._batch : (step + 1) * self._batch]
        net = self.nets[worker]
        vector_to_parameters(weights, net.parameters())
        inputs, targets = (part[mine] for part in self._train)
        with torch.enable_grad():
            loss = self._loss(net(inputs), targets)
            gradients = torch.autograd.grad(loss, list(net.parameters()))
        return float(loss.detach()), torch.cat([g.reshape(-1) for g in gradients])

    def synchronise(self, workers: Collection[int]) -> None:
        """Statistics are averaged. All workers see as many batches."""
        for buffers in zip(*(self.nets[worker].buffers() for worker in workers), strict=True):
            mean = torch.stack([each.double() for each in buffers]).mean(0)
            for each in buffers:
                each.copy_(mean)

    def loss(self, weights: Tensor) -> float:
        return 0.0  # only what training ends with is looked at


def train_together(problem: Shares, epochs: int, make: Callable[[Any], Any]) -> Tensor:
    """Take the mean of the workers' gradients in every step, as DDP does.

    Args:
        problem: what is trained.
        epochs: how often.
        make: makes an optimizer of parameters.

    Returns:
        the final weights, shape ``(n,)``.
    """
    weights = nn.Parameter(problem.start())
    optimizer = make([weights])
    unused = torch.Generator()
    for _ in range(epochs * problem.steps):
        gradients = [problem.gradient(weights.detach(), worker, unused)[1] for worker in range(problem.workers)]
        weights.grad = torch.stack(gradients).mean(0)
        optimizer.step()
    return weights.detach()
