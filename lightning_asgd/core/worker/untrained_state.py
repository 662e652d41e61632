"""How workers share what a module keeps beside its trained parameters: its buffers, and frozen parameters.

At sync points all workers take the chief's, whatever their shapes and values; between them each worker's are its own.
Statistics of batch norm and its kin are the exception: they are averaged as values, weighted by the squares of the
batches that each worker has seen since the last sync point, so that they remain statistics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_asgd.core.foundation.numerics import is_finite
from lightning_asgd.core.protocol import JointState, UntrainedState
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.module_state import digest_of, named_state, on_cpu, persistent_buffers, take_values
from lightning_asgd.core.worker.session_client import pickled, unpickled

log = logging.getLogger(__name__)

_STATISTICS = ("running_mean", "running_var")  # as torch's normalisation layers and those of other libraries call them
_COUNTER = "num_batches_tracked"
_SHORT = 1 << 16  # bytes of a buffer that is sent without a look at whether workers differ
_LOOKED_AT = 16  # values of a frozen parameter: a program that changes it changes all of them


def is_statistic(name: str, buffer: Tensor) -> bool:
    """Whether a buffer is a running mean or variance, by the names of batch norm's and its kin's in all libraries."""
    return name.rpartition(".")[2] in _STATISTICS and (buffer.is_floating_point() or buffer.is_complex())


class UntrainedTensors:
    """The untrained tensors of one worker's module; ``trained`` names the parameters that are exchanged at present."""

    def __init__(self, module: Module, trained: Callable[[], Collection[str]]) -> None:
        self._module, self._trained = module, trained
        self._warned: set[str] = set()
        self.begin_interval(0)

    def begin_interval(self, steps: int) -> None:
        """Training continues: note how many batches the statistics have seen, and how many ``steps`` were taken."""
        self._steps, self._seen = steps, self._counts()

    def share(self, collectives: Collectives, steps: int) -> None:
        """Share them; all workers call it together, at a sync point. ``steps`` have been taken."""
        if not collectives.real:
            return
        buffers, counts = persistent_buffers(self._module), self._counts()
        statistics = {name: buffer for name, buffer in buffers.items() if is_statistic(name, buffer)}
        parts = {n: (self._batches_seen(n, counts, steps), on_cpu(buffer)) for n, buffer in statistics.items()}
        self._warn_of_nonfinite(parts, collectives.rank)
        others = {name: buffer for name, buffer in buffers.items() if name not in statistics}
        short = {name: buffer for name, buffer in others.items() if _size(buffer) <= _SHORT}
        digests = {name: digest_of({"": buffer})[:16] for name, buffer in others.items() if name not in short}
        digests |= {name: digest_of({"": _sample(parameter)})[:16] for name, parameter in self._frozen().items()}
        while True:
            mine = _packed(short) if collectives.rank == collectives.chief else None
            report = UntrainedState(parts, digests, mine)
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
        self.begin_interval(steps)

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

    def _counts(self) -> dict[str, float]:
        """How many batches each layer with a counter has seen, by the layer's name."""
        found = {n: b for n, b in persistent_buffers(self._module).items() if n.rpartition(".")[2] == _COUNTER}
        flat = {name.rpartition(".")[0]: b.detach().reshape(-1)[:1] for name, b in found.items() if b.numel()}
        if not flat:
            return {}
        device = next(iter(flat.values())).device  # layers may be on several; it is read once
        return dict(zip(flat, torch.cat([counter.to(device) for counter in flat.values()]).tolist(), strict=True))

    def _batches_seen(self, name: str, counts: Mapping[str, float], steps: int) -> float:
        """The batches since the last sync point: by the layer's own counter, or else by the steps."""
        layer = name.rpartition(".")[0]
        if layer in counts:
            return max(0.0, counts[layer] - self._seen.get(layer, 0.0))
        return float(max(0, steps - self._steps))

    def _warn_of_nonfinite(self, parts: Mapping[str, tuple[float, Tensor]], rank: int) -> None:
        if broken := self._not_warned_of(name for name, (_, value) in parts.items() if not is_finite(value)):
            log.warning(
                "The statistics %s of worker %d hold NaN or infinity, so they are left out of the mean of all "
                "workers. Look at its data.",
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
