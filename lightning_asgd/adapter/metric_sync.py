"""How torchmetrics' metrics measure over all workers: only at sync points."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_asgd.adapter.class_trees import torchmetrics
from lightning_asgd.worker.collectives import Collectives

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


def synchronise_metrics(available: Callable[[], bool], collectives: Callable[[], Collectives], *owners: Any) -> None:
    """Have every metric of modules and callbacks measure over all workers while ``available()`` is true."""
    for metric in metrics_of(*owners):
        sync = functools.partial(_of_all, weakref.ref(metric), collectives)
        for name, function in (("distributed_available_fn", available), ("dist_sync_fn", sync)):
            before = getattr(metric, name)
            before = before.before if isinstance(before, _InPlaceOf) else before
            setattr(metric, name, _InPlaceOf(before, function))


def _of_all(metric: Any, collectives: Callable[[], Collectives], state: Tensor, group: Any = None) -> list[Tensor]:
    """All workers' tensors of a metric's state, which torchmetrics reduces; the coordinator's reduction where it can.

    The reduction of one tensor is that tensor.
    """
    op = _reduction(metric(), state)
    return collectives().all_gather(state, "metric") if op is None else [collectives().reduce(state, op, "metric")]


def _reduction(metric: Any, state: Tensor) -> str | None:
    """How the coordinator reduces a tensor of a metric's state as torchmetrics would; None if it cannot."""
    library = torchmetrics()
    if metric is None or type(metric)._sync_dist is not library.Metric._sync_dist:
        return None
    data = library.utilities.data
    known = {data.dim_zero_sum: "sum", data.dim_zero_mean: "mean", data.dim_zero_max: "max", data.dim_zero_min: "min"}
    functions = [function for name, function in metric._reductions.items() if getattr(metric, name) is state]
    op = known.get(functions[0]) if functions else None
    exact = state.is_floating_point() or state.is_complex() or (state.dtype is torch.int64 and op != "mean")
    return op if exact else None  # torch adds up other integers as int64


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
