"""How torchmetrics' metrics measure over all workers: only at sync points."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from lightning_asgd.adapter.class_trees import torchmetrics

__all__ = ["let_metrics_ask", "synchronise_metrics"]


def metrics_of(*owners: Any) -> list[Any]:
    """Every torchmetrics ``Metric`` of modules and callbacks, also those in their plain lists and dictionaries."""
    metric = torchmetrics().Metric

    def parts(thing: Any) -> list[Any]:
        return list(thing.modules()) if isinstance(thing, Module) else [thing]

    found: dict[int, Any] = {}
    for part in (part for owner in owners for part in parts(owner)):
        for value in (part, *vars(part).values()):
            held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            found |= {id(m): m for item in held for m in parts(item) if isinstance(m, metric)}
    return list(found.values())


@functools.cache
def let_metrics_ask(distributed_available: Callable[[], bool]) -> None:
    """Have every torchmetrics ``Metric`` that is made from now on ask this before it syncs with other processes."""
    declared = torchmetrics().metric
    make, before = declared.Metric.__init__, declared.jit_distributed_available

    @functools.wraps(make)
    def make_and_ask(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self.distributed_available_fn is before:
            self.distributed_available_fn = _InPlaceOf(before, distributed_available)

    declared.Metric.__init__ = make_and_ask


def synchronise_metrics(available: Callable[[], bool], gather: Callable[..., Any], *owners: Any) -> None:
    """Have every metric of modules and callbacks measure over all workers while ``available()`` is true."""
    for metric in metrics_of(*owners):
        for name, function in (("distributed_available_fn", available), ("dist_sync_fn", gather)):
            before = getattr(metric, name)
            before = before.before if isinstance(before, _InPlaceOf) else before
            setattr(metric, name, _InPlaceOf(before, function))


class _InPlaceOf:
    """Replaces a function of a metric during this run. A saved metric holds the original function."""

    def __init__(self, before: Any, function: Callable[..., Any]) -> None:
        self.before, self._function = before, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> _InPlaceOf:
        return self

    def __reduce__(self) -> Any:
        return operator.itemgetter(0), ((self.before,),)
