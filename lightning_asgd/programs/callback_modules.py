"""Modules that callbacks keep, such as averages of the trained weights."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from lightning_asgd.core.worker.feature import WorkerFeature
from lightning_asgd.core.worker.module_state import average, digest_of, make_identical, named_state, persistent_buffers


class CallbackModules(WorkerFeature):
    """Gives all workers the mean of each such module's parameters, and the chief's buffers.

    Only of those that all workers have: a network that makes pictures may be on one alone.
    """

    def at_sync_point(self) -> None:
        """See :class:`WorkerFeature`."""
        collectives = self._fit.membership.collectives
        if not collectives.real:
            return
        found = _callback_modules(self._fit.trainer)
        states = {key: named_state(module) for key, module in found.items()}
        tensors = {f"{key}.{name}": tensor for key, state in states.items() for name, tensor in state.items()}
        if collectives.reduced("all_reduce", "modules of callbacks", digest_of(tensors), "same").value:
            return
        forms = {key: repr([(n, t.shape, t.dtype) for n, t in state.items()]) for key, state in states.items()}
        theirs = collectives.gather("all_gather", "modules of callbacks", forms).values()
        for key, module in found.items():
            if all(each.get(key) == forms[key] for each in theirs):
                average(collectives, dict(module.named_parameters()))
                make_identical(collectives, module, persistent_buffers(module))


def _callback_modules(trainer: Any) -> dict[str, Module]:
    """The modules, by the class of their callback and the attribute, in an order all workers have."""
    found: dict[str, Module] = {}
    for callback in trainer.callbacks:
        for attribute, value in vars(callback).items():
            key, number = f"{type(callback).__qualname__}.{attribute}", 0
            while f"{key}.{number}" in found:
                number += 1
            if isinstance(value, Module) and value is not trainer.lightning_module:
                found[f"{key}.{number}"] = value
    return dict(sorted(found.items()))
