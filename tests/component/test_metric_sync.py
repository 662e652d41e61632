"""torchmetrics' metrics over all workers: which states the coordinator reduces, with the bits of torchmetrics' way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_asgd.adapter.metric_sync import synchronise_metrics
from lightning_asgd.worker.collectives import Collectives
from tests.component.test_collectives import together

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


REDUCED = {"sums", "count", "average", "largest", "least"}


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


def test_a_copy_of_a_metric_gathers_its_states() -> None:
    for states, kinds in measured(2, reduces=True, copied=True):
        assert "reduce" not in kinds
        assert int(states["count"]) == 1
