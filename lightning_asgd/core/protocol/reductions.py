"""What the coordinator makes of the workers' parts in a collective that reduces them: one value, which all get.

The parts are reduced once, when all are there and in the order of ranks. So the result has the same bits whatever the
order of their arrival, and a worker that leaves before that does not count. A result of floating-point numbers could
not be had piece by piece: their sum depends on the order, and no part of one can be taken out again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.core.foundation.numerics import is_finite
from lightning_asgd.core.protocol.collective import (
    JointReport,
    JointState,
    Place,
    Ranks,
    Reduced,
    SyncReport,
    UntrainedState,
)
from lightning_asgd.core.protocol.session import WorkerMetrics

__all__ = ["TENSOR_REDUCTIONS", "combine", "metrics_in", "reduce"]


def reduce(how: str, payloads: Mapping[int, Any]) -> Reduced:
    """The payloads of workers, which are given in the order of ranks, reduced.

    ``how`` is one of :data:`TENSOR_REDUCTIONS` for lists of tensors of equal shapes, or ``"metric sum"``, ``"metric
    mean"``, ``"metric max"`` and ``"metric min"`` for states of metrics; ``"all"`` and ``"any"`` of flags; ``"same"``
    for whether all are equal; ``"given"`` for the first that is not None; ``"report"`` for :class:`SyncReport`;
    ``"state"`` for :class:`UntrainedState`. Raises what payloads of other kinds cause.
    """
    return Reduced(_REDUCTIONS[how](payloads), Ranks.of(payloads))


def combine(op: str, parts: Sequence[Tensor]) -> Tensor:
    """Reduce tensors by one of :data:`TENSOR_REDUCTIONS`, keeping shape and dtype; a mean of integers is a float."""
    stacked = torch.stack(list(parts))
    result = _OF_TENSORS[op](stacked)
    if stacked.dtype is torch.bool:
        return result.floor().bool() if op == "mean" else result.bool()  # whether all are set
    return result if op == "mean" else result.to(stacked.dtype)


def metrics_in(reports: Mapping[int, Any]) -> dict[int, WorkerMetrics]:
    """The workers' metrics in their reports, by rank."""
    found = {rank: report.figures for rank, report in reports.items() if isinstance(report, SyncReport)}
    return {rank: figures for rank, figures in found.items() if isinstance(figures, WorkerMetrics)}


_MANY = 1e18  # batches: more are no number of batches
_OF_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda parts: parts.sum(0) / len(parts),
    "sum": lambda parts: parts.sum(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
    "product": lambda parts: parts.prod(0),
    "band": lambda parts: functools.reduce(torch.bitwise_and, parts),
    "bor": lambda parts: functools.reduce(torch.bitwise_or, parts),
    "bxor": lambda parts: functools.reduce(torch.bitwise_xor, parts),
}
TENSOR_REDUCTIONS = tuple(_OF_TENSORS)
"""Reductions of tensors, element by element."""


# As torchmetrics: small integers are added as int64, a mean is rounded once, and integers have none.
_OF_STATES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda parts: torch.sum(parts, 0),
    "mean": lambda parts: torch.mean(parts, 0),
    "max": lambda parts: torch.max(parts, 0).values,
    "min": lambda parts: torch.min(parts, 0).values,
}


def _states(op: str, payloads: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
    return [_OF_STATES[op](torch.stack(parts)) for parts in zip(*payloads.values(), strict=True)]


def _tensors(op: str, payloads: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
    return [combine(op, parts) for parts in zip(*payloads.values(), strict=True)]


def _same(payloads: Mapping[int, Any]) -> bool:
    first, *others = payloads.values()
    return all(bool(first == other) for other in others)


def _given(payloads: Mapping[int, Any]) -> Any:
    return next((payload for payload in payloads.values() if payload is not None), None)


def _joint(reports: Mapping[int, SyncReport]) -> JointReport:
    versions = {report.versions for report in reports.values()}
    places = [report.place for report in reports.values() if report.place is not None]
    return JointReport(
        Ranks.of(reports),
        moved=any(report.moved for report in reports.values()),
        should_stop=any(report.should_stop for report in reports.values()),
        grown=Ranks.of(rank for rank, report in reports.items() if report.grown),
        trained=any(report.trained for report in reports.values()),
        checkpoints=_given({rank: report.checkpoints for rank, report in reports.items()}),
        versions=versions.pop() if len(versions) == 1 else None,
        place=_all_together(places) if places else None,
    )


def _all_together(places: Sequence[Place]) -> Place:
    """When sync points occur: at the end of an epoch if it ends for all, at a validation if any worker validates."""
    return Place(
        ends=all(place.ends for place in places),
        validates=any(place.validates for place in places),
        step=max(place.step for place in places),
        batches=max(place.batches for place in places),
    )


def _state(reports: Mapping[int, UntrainedState]) -> JointState:
    chief = next((report for report in reports.values() if report.short is not None), UntrainedState())
    found: dict[str, list[tuple[float, Tensor]]] = {name: [] for name in chief.statistics}
    for report in reports.values():
        for name, part in report.statistics.items():
            if name in found and part[1].shape == chief.statistics[name][1].shape:
                found[name].append(part)
    means = {name: _mean_of_statistics(parts, chief.statistics[name][1]) for name, parts in found.items()}
    names = {name for report in reports.values() for name in report.digests}
    differ = {n for n in names if len({report.digests.get(n) for report in reports.values()}) > 1}
    return JointState(means, frozenset(differ), chief.short)


def _mean_of_statistics(parts: Sequence[tuple[float, Tensor]], otherwise: Tensor) -> Tensor:
    """The mean of values that are finite, weighted by the squares of the batches seen; ``otherwise`` if none are."""
    # Once for the samples, and once for their age: a slow worker's few batches leave much of the old values.
    used = [(seen * seen, value) for seen, value in parts if 0 < seen < _MANY and is_finite(value)]
    if not used or all(torch.equal(value, used[0][1]) for _, value in used):
        return used[0][1] if used else otherwise  # not rounded
    wide = torch.complex128 if otherwise.is_complex() else torch.float64
    total = sum(weight * value.to(wide) for weight, value in used)
    return torch.as_tensor(total / sum(weight for weight, _ in used)).to(otherwise.dtype)


_REDUCTIONS: dict[str, Callable[[Mapping[int, Any]], Any]] = {
    **{op: functools.partial(_tensors, op) for op in TENSOR_REDUCTIONS},
    **{f"metric {op}": functools.partial(_states, op) for op in _OF_STATES},
    "all": lambda payloads: all(map(bool, payloads.values())),
    "any": lambda payloads: any(map(bool, payloads.values())),
    "same": _same,
    "given": _given,
    "report": _joint,
    "state": _state,
}
