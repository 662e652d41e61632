"""torchmetrics' metrics over all workers: which states the coordinator reduces, with the bits of torchmetrics' way."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_asgd.core.foundation.errors import CollectiveMismatchError
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.world.metric_sync import synchronise_metrics
from tests.component.test_collectives import together
from tests.component.test_reductions import FLOATS, INTEGERS, bits, parts_of

torchmetrics = pytest.importorskip("torchmetrics")


class Everything(torchmetrics.Metric):  # type: ignore[misc,name-defined]
    """A metric with a state of every kind; its result are all states."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(3), "sum")
        self.add_state("count", torch.tensor(0), "sum")
        self.add_state("small", torch.tensor(0, dtype=torch.int8), "sum")
        self.add_state("average", torch.zeros(2), "mean")
        self.add_state("largest", torch.full((2,), -torch.inf), "max")
        self.add_state("least", torch.tensor(10**6), "min")
        self.add_state("rows", [], "cat")
        self.add_state("own", torch.zeros(1), lambda parts: parts.prod(0))
        self.add_state("all", torch.zeros(1), None)

    def update(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.sums += torch.randn(3, generator=generator) * 10.0**rank
        self.count += rank
        self.small += 100
        self.average += torch.randn(2, generator=generator)
        self.largest = torch.maximum(self.largest, torch.randn(2, generator=generator))
        self.least = torch.minimum(self.least, torch.tensor(7 - rank))
        self.rows.append(torch.full((rank,), float(rank)))
        self.own += rank + 1
        self.all += rank

    def compute(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self._reductions}


REDUCED = {"sums", "count", "small", "average", "largest", "least"}


def measured(workers: int, *, reduces: bool, copied: bool = False) -> list[tuple[dict[str, Any], list[str]]]:
    """Every worker's states, and the kinds of its collectives."""

    def work(collectives: Collectives, rank: int) -> tuple[dict[str, Any], list[str]]:
        kinds: list[str] = []
        contribute, reduced = collectives.contribute, collectives.reduced

        def gathers(kind: str, *args: Any, **about: Any) -> Any:
            kinds.append("gather")
            return contribute(kind, *args, **about)

        def reduces_it(kind: str, *args: Any, **about: Any) -> Any:
            kinds.append("reduce")
            return reduced(kind, *args, **about)

        collectives.contribute, collectives.reduced = gathers, reduces_it  # type: ignore[method-assign]
        metric = Everything()
        if reduces:
            synchronise_metrics(lambda: True, lambda: collectives, torch.nn.ModuleList([metric]))
        else:
            metric.distributed_available_fn = lambda: True
            metric.dist_sync_fn = lambda tensor, group=None: collectives.all_gather(tensor, "metric")
        metric = copy.deepcopy(metric) if copied else metric
        metric.update(rank)
        return metric.compute(), kinds

    return together(workers, work)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_states_have_the_bits_that_torchmetrics_makes_of_all_workers_tensors(workers: int) -> None:
    ours, theirs = measured(workers, reduces=True), measured(workers, reduces=False)
    for (states, kinds), (expected, _) in zip(ours, theirs, strict=True):
        assert kinds.count("reduce") == len(REDUCED)
        assert kinds.count("gather") == len(expected) - len(REDUCED)
        for name, value in expected.items():
            assert states[name].dtype == value.dtype, name
            assert torch.equal(states[name], value), name
    assert int(ours[0][0]["small"]) == 100 * workers  # torch adds up small integers as int64


def test_a_copy_of_a_metric_measures_over_all_workers_too() -> None:
    for states, kinds in measured(2, reduces=True, copied=True):
        assert kinds.count("reduce") == len(REDUCED)
        assert int(states["count"]) == 1


def of_all(metrics: list[Any]) -> list[Any]:
    """What each worker's metric computes over all of them."""

    def work(collectives: Collectives, rank: int) -> Any:
        synchronise_metrics(lambda: True, lambda: collectives, torch.nn.ModuleList([metrics[rank]]))
        return metrics[rank].compute()

    return together(len(metrics), work)


class Declared(torchmetrics.Metric):  # type: ignore[misc,name-defined]
    """A metric with states of other tensors than it declares; its result are all states."""

    full_state_update = False

    def __init__(self, **states: tuple[Tensor, str]) -> None:
        super().__init__()
        for name, (default, reduction) in states.items():
            self.add_state(name, default, reduction)

    def update(self, **states: Tensor) -> None:
        for name, value in states.items():
            setattr(self, name, value)

    def compute(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self._reductions}


def test_two_states_that_are_one_tensor_are_each_reduced_in_its_way() -> None:
    metrics = [Declared(least=(torch.tensor(0.0), "min"), most=(torch.tensor(0.0), "max")) for _ in range(3)]
    for rank, metric in enumerate(metrics):
        one = torch.tensor(float(rank))
        metric.update(least=one, most=one if rank else one.clone())
    assert of_all(metrics) == [{"least": torch.tensor(0.0), "most": torch.tensor(2.0)}] * 3


SUMS = [*INTEGERS, torch.bool, *FLOATS]


@pytest.mark.parametrize("reduction", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("mine", SUMS, ids=str)
def test_workers_may_have_other_dtypes_and_torchmetrics_decides_the_result(reduction: str, mine: torch.dtype) -> None:
    for theirs in SUMS:
        tensors = [part.to(kind) for part, kind in zip(parts_of(2, torch.int8, (5,)), (mine, theirs), strict=True)]
        metrics = [Declared(state=(torch.zeros(5, dtype=mine), reduction)) for _ in tensors]
        for metric, tensor in zip(metrics, tensors, strict=True):
            metric.update(state=tensor)
        try:
            expected = metrics[0]._reductions["state"](torch.stack(tensors))
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error).splitlines()[0])):
                of_all(metrics)
            continue
        assert [bits(states["state"]) for states in of_all(metrics)] == [bits(expected)] * 2


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_means_are_rounded_once_and_do_not_overflow(dtype: torch.dtype) -> None:
    for tensors in (parts_of(7, dtype, (257,)), [torch.full((2,), 30000.0, dtype=dtype)] * 4):
        metrics = [Declared(state=(torch.zeros(1), "mean")) for _ in tensors]
        for metric, tensor in zip(metrics, tensors, strict=True):
            metric.update(state=tensor)
        expected = bits(torch.stack(tensors).mean(0))
        assert [bits(states["state"]) for states in of_all(metrics)] == [expected] * len(tensors)


def test_a_sync_that_fails_leaves_a_metric_as_it_was() -> None:
    metrics = [Declared(state=(torch.zeros(1 + rank), "sum")) for rank in range(2)]
    declared = dict(metrics[0]._reductions)
    with pytest.raises(
        CollectiveMismatchError, match=r"'metric' .* could not be reduced by 'metric sum': stack expects"
    ):
        of_all(metrics)
    assert metrics[0]._reductions == declared
    assert torch.equal(metrics[0].state, torch.zeros(1))
