"""How torchmetrics' metrics measure over all workers: only at sync points."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_asgd.core.lightning.class_trees import torchmetrics
from lightning_asgd.core.worker.collectives import Collectives


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
    library = torchmetrics()
    for metric in metrics_of(*owners):
        _let_the_coordinator_reduce()
        for name, kind, asked in (
            ("distributed_available_fn", _InPlaceOf, available),
            ("dist_sync_fn", _OfAllWorkers, collectives),
        ):
            before = getattr(metric, name)
            before = before.before if isinstance(before, _InPlaceOf) else before
            if before in (None, library.metric.jit_distributed_available):  # else the program has its own way
                setattr(metric, name, kind(before, asked))


@functools.cache
def _let_the_coordinator_reduce() -> None:
    """Have metrics that sync with :class:`_OfAllWorkers` gather only the states that the coordinator cannot reduce."""
    library = torchmetrics()
    declared, gather = library.Metric, library.utilities.distributed.gather_all_tensors
    sync = declared._sync_dist

    @functools.wraps(sync)
    def sync_dist(self: Any, dist_sync_fn: Any = gather, process_group: Any = None) -> None:
        ways = _reductions(self) if isinstance(dist_sync_fn, _OfAllWorkers) else {}
        reduced = {name: dist_sync_fn.reduced(getattr(self, name), how) for name, how in ways.items()}
        functions = self._reductions
        self._reductions = {name: function for name, function in functions.items() if name not in ways}
        try:
            sync(self, dist_sync_fn, process_group)
        finally:
            self._reductions = functions
        for name, state in reduced.items():  # now, since a sync that fails changes no state
            setattr(self, name, state)

    declared._sync_dist = sync_dist


def _reductions(metric: Any) -> dict[str, str]:
    """How the coordinator reduces a metric's states, by name. All workers decide this by what they declare alike."""
    # The dtype of a state is not such a thing: where a worker has no data, it may be another one.
    data = torchmetrics().utilities.data
    known = {data.dim_zero_sum: "sum", data.dim_zero_mean: "mean", data.dim_zero_max: "max", data.dim_zero_min: "min"}
    return {
        name: f"metric {known[function]}"
        for name, function in metric._reductions.items()
        if function in known and isinstance(metric._defaults[name], Tensor)
    }


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


class _OfAllWorkers(_InPlaceOf):
    """All workers' tensors of a state."""

    def __call__(self, state: Tensor, group: Any = None) -> Any:
        return self._function().all_gather(state, "metric")

    def reduced(self, state: Tensor, how: str) -> Tensor:
        """They reduced by the coordinator, as torchmetrics would reduce them."""
        result: Tensor = self._function().reduce(state, how, "metric")
        return result
