"""How workers share what a module keeps beside its trained parameters: its buffers, and frozen parameters.

At sync points all workers take the chief's, whatever their shapes and values; between them each worker's are its own.
Statistics of batch norm and its kin are the exception: they become those of one layer that has seen the batches of all
workers since the last sync point (``running_statistics.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_asgd.numerics import is_finite
from lightning_asgd.protocol import JointState, UntrainedState
from lightning_asgd.worker.collectives import Collectives
from lightning_asgd.worker.module_state import (
    digest_of,
    named_state,
    on_cpu,
    persistent_buffers,
    take_values,
)
from lightning_asgd.worker.running_statistics import Interval, is_statistic
from lightning_asgd.worker.session_client import pickled, unpickled

__all__ = ["UntrainedTensors"]

log = logging.getLogger(__name__)

_SHORT = 1 << 16  # bytes of a buffer that is sent without a look at whether workers differ
_LOOKED_AT = 16  # values of a frozen parameter: a program that changes it changes all of them


class UntrainedTensors:
    """The untrained tensors of one worker's module; ``trained`` names the parameters that are exchanged at present."""

    def __init__(self, module: Module, trained: Callable[[], Collection[str]]) -> None:
        self._module, self._trained = module, trained
        self._warned: set[str] = set()
        self._interval: Interval | None = Interval(module, persistent_buffers(module), 0)

    def begin_interval(self, steps: int) -> None:
        """Training continues, after ``steps``: from now on batches count for the statistics."""
        self._interval = Interval(self._module, persistent_buffers(self._module), steps)

    def share(self, collectives: Collectives, steps: int) -> None:
        """Share them; all workers call it together, at a sync point. ``steps`` have been taken."""
        if not collectives.real:
            return
        buffers = persistent_buffers(self._module)
        interval = self._interval or Interval(self._module, buffers, steps)
        parts = interval.parts(buffers, steps)
        self._warn_of_nonfinite(parts, collectives.rank)
        others = {name: buffer for name, buffer in buffers.items() if name not in parts}
        short = {name: buffer for name, buffer in others.items() if _size(buffer) <= _SHORT}
        digests = {name: digest_of({"": buffer})[:16] for name, buffer in others.items() if name not in short}
        digests |= {name: digest_of({"": _sample(parameter)})[:16] for name, parameter in self._frozen().items()}
        while True:
            report = UntrainedState(parts, digests)
            if collectives.rank == collectives.chief:
                report = UntrainedState(parts, digests, _packed(short), interval.starts(buffers))
            met: JointState = collectives.reduced("all_reduce", "buffers", report, "state").value
            if met.short is not None:  # else the chief has died, and all know the next one
                break
        if collectives.rank != collectives.chief:
            self.take({**met.short["plain"], **unpickled("the chief", met.short["odd"])})
        self.take(met.statistics)
        if met.differing:
            named = named_state(self._module)
            mine = {name: on_cpu(named[name]) for name in met.differing if name in named}
            self.take(collectives.broadcast_of_chief(mine, "long buffers"))
        self._interval = None

    def values(self) -> dict[str, Tensor]:
        """Copies of the persistent buffers, on the CPU, for workers that join later."""
        return {name: on_cpu(buffer) for name, buffer in persistent_buffers(self._module).items()}

    def take(self, values: Mapping[str, Tensor], *, statistics: bool = True) -> None:
        """Take another worker's values, with its ``statistics`` or without. Warn of those that have no place here."""
        taken = {name: value for name, value in values.items() if statistics or not is_statistic(name, value)}
        if homeless := self._not_warned_of(take_values(self._module, taken)):
            log.warning(
                "This worker's module has no place for %s, which the chief's module has. Expected the same modules on "
                "all workers: it is left out here.",
                ", ".join(homeless),
            )

    def _frozen(self) -> dict[str, Tensor]:
        trained = self._trained()
        frozen = {name: p for name, p in self._module.named_parameters() if name not in trained}
        return {name: p for name, p in frozen.items() if not hasattr(p, "placements")}

    def _warn_of_nonfinite(self, parts: Mapping[str, tuple[float, Tensor]], rank: int) -> None:
        if broken := self._not_warned_of(name for name, (_, value) in parts.items() if not is_finite(value)):
            log.warning(
                "The statistics %s of worker %d hold NaN or infinity, so those of the other workers are used. Look at "
                "its data.",
                ", ".join(broken),
                rank,
            )

    def _not_warned_of(self, names: Iterable[str]) -> list[str]:
        new = sorted(set(names) - self._warned)
        self._warned.update(new)
        return new


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _LOOKED_AT)]


def _packed(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors as messages can hold them: what is no plain array of numbers is pickled."""
    plain = {name: t for name, t in tensors.items() if type(t) is Tensor and t.layout is torch.strided}
    plain = {name: t for name, t in plain.items() if not t.is_quantized}
    odd = {name: on_cpu(tensor) for name, tensor in tensors.items() if name not in plain}
    return {"plain": {name: on_cpu(tensor) for name, tensor in plain.items()}, "odd": pickled(odd)}
