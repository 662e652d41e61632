"""What a program changes otherwise than by optimizer steps: frozen parameters, counters, and modules of callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_asgd.adapter.class_trees import rank_zero_warn
from lightning_asgd.layout import Layout
from lightning_asgd.worker.collectives import Collectives
from lightning_asgd.worker.worker_setup import digest_of, make_identical, named_state

__all__ = ["OwnState", "share_callback_modules"]

_LOOKED_AT = 16  # values of a frozen parameter
_RESET = "num_batches_tracked"  # a counter that StochasticWeightAveraging sets back


class OwnState:
    """A module's frozen parameters and integer buffers, as they were when a sync point was passed.

    Args:
        module: the module.
        layout: gives what is exchanged at present.
        collectives: gives those with the other workers, which are not real in an elastic run.
    """

    def __init__(self, module: Module, layout: Callable[[], Layout], collectives: Callable[[], Collectives]) -> None:
        self._module, self._layout, self._collectives = module, layout, collectives
        self._warned = False
        self.note()

    def note(self) -> None:
        """A sync point has been passed."""
        self._samples = {name: _sample(parameter) for name, parameter in self._frozen().items()}
        self._counters = {name: buffer.detach().cpu().clone() for name, buffer in self._integers().items()}

    def check_counters(self) -> None:
        """Warn once if a buffer of integers has fallen: servers take it for a counter, and keep the largest value."""
        found = self._integers()
        for name, before in self._counters.items() if not self._warned else ():
            if name in found and bool((found[name].detach().cpu() < before).any()):
                self._warned = True
                rank_zero_warn(
                    f"Buffer {name!r} has fallen since the last sync point. Buffers are exchanged: of integers all "
                    "workers take the largest value, as of counters, and of floating-point numbers the mean. If it is "
                    "a position in a queue that each worker fills by itself, register it and the queue with "
                    "persistent=False. Each worker then keeps its own."
                )
                return

    def share(self) -> None:
        """Give all workers the chief's frozen parameters, if any were changed. All call it at a sync point."""
        frozen = self._frozen()
        if not frozen:
            return
        changed = any(not torch.equal(self._samples[n], _sample(p)) for n, p in frozen.items() if n in self._samples)
        if self._collectives().decide(changed, all=False):
            make_identical(self._collectives(), frozen)

    @property
    def _exchanged(self) -> set[str]:
        return {spec.name for spec in self._layout().tensors}

    def _frozen(self) -> Mapping[str, Tensor]:
        if not self._collectives().real:
            return {}
        exchanged = self._exchanged
        return {name: p for name, p in self._module.named_parameters() if name not in exchanged}

    def _integers(self) -> Mapping[str, Tensor]:
        kinds, exchanged = (torch.int64, torch.int32, torch.int16, torch.int8), self._exchanged
        found = {n: b for n, b in self._module.named_buffers() if n in exchanged and b.dtype in kinds}
        return {n: b for n, b in found.items() if not n.endswith(_RESET)}


def _sample(parameter: Tensor) -> Tensor:
    """A few of its values: a program that averages weights changes all of them."""
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _LOOKED_AT)].clone()


def share_callback_modules(trainer: Any, collectives: Collectives) -> None:
    """Give all workers the mean of each module that callbacks keep, such as averages of the trained weights.

    Only of those that all workers have: a network that makes pictures may be on one alone. All call it together.
    """
    found = _callback_modules(trainer)
    if not collectives.real:
        return
    tensors = {f"{key}.{name}": tensor for key in found for name, tensor in found[key].items()}
    if collectives.reduced("all_reduce", "modules of callbacks", digest_of(tensors), "same").value:
        return
    forms = {key: repr([(n, t.shape, t.dtype) for n, t in state.items()]) for key, state in found.items()}
    theirs = collectives.gather("all_gather", "modules of callbacks", forms).values()
    for key, state in found.items():
        if all(each.get(key) == forms[key] for each in theirs):
            make_identical(collectives, state, mean=True)


def _callback_modules(trainer: Any) -> dict[str, Mapping[str, Tensor]]:
    """The states of the modules, by the class of their callback and the attribute, in an order all workers have."""
    found: dict[str, Mapping[str, Tensor]] = {}
    for callback in trainer.callbacks:
        for attribute, value in vars(callback).items():
            key, number = f"{type(callback).__qualname__}.{attribute}", 0
            while f"{key}.{number}" in found:
                number += 1
            if isinstance(value, Module) and value is not trainer.lightning_module:
                found[f"{key}.{number}"] = named_state(value)
    return dict(sorted(found.items()))
