"""What the batches of an interval of training have added to running means and variances: batch norm's and its kin's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

from lightning_asgd.numerics import is_finite
from lightning_asgd.worker.module_state import on_cpu

__all__ = ["Interval", "is_statistic"]

_STATISTICS = ("running_mean", "running_var")  # as torch's normalisation layers and those of other libraries call them
_COUNTER = "num_batches_tracked"
_ROUNDING = 1e-3  # of the first value: a variance that is below zero by more has been set by the program


def is_statistic(name: str, buffer: Tensor) -> bool:
    """Whether a buffer is a running mean or variance, by the names of batch norm's and its kin's in all libraries."""
    return name.rpartition(".")[2] in _STATISTICS and (buffer.is_floating_point() or buffer.is_complex())


class Interval:
    """What a module's ``buffers`` held when this worker continued to train, after ``steps``."""

    def __init__(self, module: Module, buffers: Mapping[str, Tensor], steps: int) -> None:
        self._module, self._steps, self._counts = module, steps, _counts(buffers)
        self._first = {name: (_left(module, name, value), value) for name, value in _copies(buffers).items()}

    def parts(self, buffers: Mapping[str, Tensor], steps: int) -> dict[str, tuple[float, Tensor]]:
        """Of each statistic the batches since then, and what they have added; or its value, where that is not known."""
        counts, found = _counts(buffers), {}
        for name, value in _copies(buffers).items():
            layer = name.rpartition(".")[0]
            counted = counts.get(layer, 0.0) - self._counts.get(layer, 0.0)
            start = self._start(name, value) if counted > 0 else None
            if counted < 0:  # a program has reset it
                counted = counts[layer]
            elif counted == 0 and not self._is_first(name, value):  # the layer does not count
                counted = float(max(0, steps - self._steps))
            found[name] = counted, value if start is None else _added(name, value, counted, *start)
        return found

    def starts(self, buffers: Mapping[str, Tensor]) -> dict[str, tuple[float, Tensor]]:
        """Of statistics that layers average as torch's do, the part that a batch leaves, and their first values."""
        found = {name: self._start(name, value) for name, value in _copies(buffers).items()}
        return {name: start for name, start in found.items() if start is not None}

    def _start(self, name: str, value: Tensor) -> tuple[float, Tensor] | None:
        left, first = self._first.get(name, (None, value))
        if left is None or left != _left(self._module, name, value):
            return None
        return (left, first) if first.shape == value.shape and is_finite(first) else None

    def _is_first(self, name: str, value: Tensor) -> bool:
        return name in self._first and torch.equal(self._first[name][1], value)


def _added(name: str, value: Tensor, batches: float, left: float, first: Tensor) -> Tensor:
    """A statistic without what its batches have left of its first value."""
    rest = left**batches
    found: Tensor = (value.double() - rest * first.double()) / (1.0 - rest)
    if name.endswith("var"):
        if (found < -_ROUNDING * first).any():
            return value
        found.clamp_(min=0.0)
    return found.to(value.dtype)


def _left(module: Module, name: str, value: Tensor) -> float | None:
    """The part that a batch leaves of a statistic; None for layers that may average in another way than torch's."""
    layer = module.get_submodule(name.rpartition(".")[0])
    momentum = layer.momentum if isinstance(layer, _NormBase) else None
    exact = value.dtype in (torch.float32, torch.float64)  # others round too much
    return 1.0 - momentum if exact and isinstance(momentum, float) and 0.0 < momentum <= 1.0 else None


def _copies(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: on_cpu(buffer) for name, buffer in buffers.items() if is_statistic(name, buffer)}


def _counts(buffers: Mapping[str, Tensor]) -> dict[str, float]:
    """How many batches each layer with a counter has seen, by the layer's name."""
    found = {n: b for n, b in buffers.items() if n.rpartition(".")[2] == _COUNTER}
    flat = {name.rpartition(".")[0]: b.detach().reshape(-1)[:1] for name, b in found.items() if b.numel()}
    if not flat:
        return {}
    device = next(iter(flat.values())).device  # layers may be on several; it is read once
    return dict(zip(flat, torch.cat([counter.to(device) for counter in flat.values()]).tolist(), strict=True))
