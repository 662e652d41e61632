r"""Downpour SGD: workers push gradients, and the optimizer runs on the servers.

.. math::  A_i = \sum_k g_k, \qquad w \leftarrow \mathrm{optimizer}(w, s A_i)

Between two exchanges a worker takes steps of its own with its own optimizer (the paper's
``parameters -= alpha * g``); the next fetch puts the servers' weights in their place.

References:
    J. Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1 and algorithm 1.1: Adagrad on the
    servers, :math:`\eta_{i,K} = \gamma / \sqrt{\sum_j \Delta w_{i,j}^2}`.
    J. Duchi, E. Hazan, Y. Singer, "Adaptive Subgradient Methods", JMLR 2011 (AdaGrad).
    M. Zeiler, "ADADELTA", arXiv 1212.5701, tested with DistBelief.
    D. Kingma, J. Ba, "Adam", arXiv 1412.6980.
    J. Hermans, "On Scalable Deep Learning and Parallelizing Gradient Descent", 2017: ``accrued="mean"`` (AGN).

Departures:
    Of a table of embeddings only the rows that a push holds move, and the optimizer's state of the others stays as it
    is: ``"adam"`` is then ``torch.optim.SparseAdam``, the lazy form.

    Gradients are scaled by 1 / live workers by default, as for :class:`ASGD`; the paper adds them whole. Adagrad starts
    from an accumulator of 0 with an ``eps`` of 1e-6, so that the first step is finite. Clipping and precision are the
    worker's: it pushes the gradients that its optimizer saw.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_asgd.core.algorithms.asgd import factor, parse_scale
from lightning_asgd.core.algorithms.base import Algorithm, Payload, Push, Run
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import at_least

__all__ = ["Downpour"]

_NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("torch.optim.SGD", {}),
    "adagrad": ("torch.optim.Adagrad", {"eps": 1e-6}),
    "adadelta": ("torch.optim.Adadelta", {"lr": 1.0}),
    "adam": ("torch.optim.Adam", {}),
}


@dataclass(frozen=True)
class Downpour(Algorithm):
    """Gradients to the servers, whose optimizer changes the weights.

    Args:
        optimizer: ``"sgd"``, ``"adagrad"``, ``"adadelta"``, ``"adam"``, or the dotted name of any class like
            ``torch.optim.RMSprop`` that the servers can import and that works element by element.
        lr: the servers' learning rate. None for the worker's own at that moment, schedules included (Adadelta: 1).
        scale: what a push is multiplied with, as for :class:`ASGD`.
        accrued: ``"sum"`` pushes the sum of the gradients since the last push, ``"mean"`` divides it by their number.
        options: further arguments of the optimizer, such as ``{"momentum": 0.9}``.

    State:
        the optimizer's, on the servers.

    Staleness:
        ignored, unless a transform looks at it.

    Raises:
        ConfigurationError: there is no such optimizer, or it does not take the arguments; when ``fit`` begins, also if
            it does not work element by element (LBFGS, Muon): servers hold slices of flat vectors, which have neither
            shapes nor neighbours.
    """

    optimizer: str = "sgd"
    lr: float | None = None
    scale: str | float = "mean"
    accrued: str = "sum"
    options: Mapping[str, Any] = field(default_factory=dict)

    payload: ClassVar[Payload] = Payload.GRADIENT
    chunked: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "scale", parse_scale(self.scale))
        if self.accrued not in ("sum", "mean"):
            raise ConfigurationError(f"Downpour(accrued={self.accrued!r}). Expected 'sum' or 'mean'.")
        if self.lr is not None:
            at_least("Downpour(lr)", self.lr, 0, above=True)
        self._make(torch.nn.Parameter(torch.zeros(1)))

    def check(self, run: Run) -> None:
        """See :class:`Algorithm`; tries the optimizer on a small vector.

        Not in the constructor: an optimizer's step looks for CUDA, after which the main process could not fork workers.
        """
        super().check(run)
        self._check_element_wise()

    @property
    def by_rows(self) -> bool:
        """See :class:`Algorithm`: if the optimizer takes sparse gradients and moves no other rows, which is tried."""
        if any(t.slots or t.backup or t.per_tensor for t in self.transforms):
            return False
        weights = torch.ones(3, 1)
        try:
            slots = self.start(weights)
            for row in (0, 1):
                before = weights.clone()
                self.apply_rows(weights, torch.tensor([row]), torch.ones(1, 1), slots, Push(lr=0.1))
                if set((weights != before).nonzero()[:, 0].tolist()) != {row}:
                    return False
        except (ConfigurationError, RuntimeError, TypeError):  # what optimizers raise for sparse gradients
            return False
        return True

    def start(self, weights: Tensor) -> dict[str, Any]:
        """See :class:`Algorithm`; the optimizer works on the weights themselves. A table has two dimensions."""
        parameter = torch.nn.Parameter(weights)
        return {"parameter": parameter, "optimizer": self._make(parameter)}

    def save(self, slots: dict[str, Any]) -> dict[str, Any]:
        """See :class:`Algorithm`."""
        return {"optimizer": slots["optimizer"].state_dict()}

    def load(self, slots: dict[str, Any], saved: dict[str, Any]) -> None:
        """See :class:`Algorithm`."""
        slots["optimizer"].load_state_dict(saved["optimizer"])

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """See :class:`Algorithm`; ``update`` is the accrued gradient."""
        self._step(update, slots, push)

    def apply_rows(self, weights: Tensor, rows: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """See :class:`Algorithm`."""
        moves = update.any(1)  # workers push zeros of rows that have no gradient, to learn what servers have of them
        rows, update = rows[moves], update[moves]
        sparse = torch.sparse_coo_tensor(rows[None], update, weights.shape, is_coalesced=True, check_invariants=False)
        self._step(sparse, slots, push)

    def _step(self, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        parameter, optimizer = slots["parameter"], slots["optimizer"]
        scale = factor(self.scale, push) / (push.steps if self.accrued == "mean" else 1)
        parameter.grad = update if scale == 1.0 else update.mul_(scale)
        if self.lr is None and "lr" not in self._settings()[1]:
            for group in optimizer.param_groups:
                group["lr"] = push.lr
        optimizer.step()
        parameter.grad = None

    def _settings(self, dimensions: int = 1) -> tuple[str, dict[str, Any]]:
        name, options = _NAMED.get(self.optimizer, (self.optimizer, {}))
        if dimensions == 2 and self.optimizer == "adam":
            name = "torch.optim.SparseAdam"
        return name, {**options, **self.options, **({} if self.lr is None else {"lr": self.lr})}

    def _make(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        name, options = self._settings(parameter.dim())
        module, _, last = name.rpartition(".")
        try:
            cls = getattr(importlib.import_module(module), last)
            if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):  # a message may name anything
                raise ValueError(f"{name} is not a torch.optim.Optimizer")
            optimizer: torch.optim.Optimizer = cls([parameter], **options)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigurationError(
                f"Downpour(optimizer={self.optimizer!r}, options={dict(self.options)!r}): {error}. Expected "
                f"{', '.join(map(repr, _NAMED))}, or a class like 'torch.optim.RMSprop' that works on vectors, "
                "with its own arguments."
            ) from error
        except TypeError as error:
            raise ConfigurationError(
                f"Downpour(optimizer={self.optimizer!r}, options={dict(self.options)!r}): {error}. "
                "Expected arguments that the optimizer accepts."
            ) from error
        return optimizer

    def _check_element_wise(self) -> None:
        """Try it: two halves of a vector must move as they do within the whole."""
        generator = torch.Generator().manual_seed(0)
        gradients = [torch.randn(6, generator=generator) * 10.0**k for k in range(3)]
        try:
            whole = self._moved(gradients)
            halves = torch.cat([self._moved([g[part] for g in gradients]) for part in (slice(0, 2), slice(2, 6))])
        except (RuntimeError, TypeError) as error:
            raise self._not_element_wise(str(error)) from error
        if not torch.allclose(whole, halves, rtol=1e-5, atol=1e-7):
            raise self._not_element_wise("a slice of a vector is updated differently from the whole vector")

    def _moved(self, gradients: list[Tensor]) -> Tensor:
        weights = torch.ones_like(gradients[0])
        slots = self.start(weights)
        for gradient in gradients:
            self.apply(weights, gradient.clone(), slots, Push(lr=0.01))
        return weights

    def _not_element_wise(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"Downpour(optimizer={self.optimizer!r}) does not work element by element: {why}. Expected an optimizer "
            "that does, such as 'adam': servers hold slices of flat vectors. Use this one on the workers, with ASGD()."
        )
