"""``all_gather`` of the strategies in the asynchronous phase, where it reaches no other worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_asgd import ASGDStrategy
from lightning_asgd.core.worker.collectives import Collectives, Phase
from lightning_asgd.loops.fabric import FabricASGDStrategy

STRATEGIES = [ASGDStrategy, FabricASGDStrategy]


@pytest.fixture(autouse=True)
def _worker_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)  # which warns


def gathered(strategy: Any, phase: Phase, workers: int) -> torch.Tensor:
    collectives = Collectives()
    collectives.phase = phase
    result: torch.Tensor = strategy.all_gather(
        SimpleNamespace(collectives=collectives, world_size=workers), torch.tensor([1.0, 2.0])
    )
    return result


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gathering_within_a_batch_warns_that_it_is_local(strategy: Any) -> None:
    with pytest.warns(UserWarning, match="all_gather in the asynchronous phase.*memory bank.*island") as found:
        assert gathered(strategy, Phase.ASYNC, 2).tolist() == [[1.0, 2.0]]
    assert len(found) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("phase", "workers"), [(Phase.ASYNC, 1), (Phase.SYNC, 2), (Phase.OFFLINE, 2)])
def test_other_calls_do_not_warn(strategy: Any, phase: Phase, workers: int, recwarn: pytest.WarningsRecorder) -> None:
    assert gathered(strategy, phase, workers).flatten().tolist() == [1.0, 2.0]
    assert not recwarn.list
