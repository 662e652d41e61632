from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from lightning_asgd.programs.fixed_split import datasets_of, is_dealt


def trainer(*loaders: Any) -> Any:
    """A Trainer of two workers with these training dataloaders; without any none were set up."""
    combined = SimpleNamespace(flattened=list(loaders)) if loaders else None
    return SimpleNamespace(world_size=2, fit_loop=SimpleNamespace(_combined_loader=combined))


@pytest.mark.parametrize("replicas", [1, 2])
def test_data_are_dealt_by_a_sampler_for_all_workers(replicas: int) -> None:
    sampler = DistributedSampler(range(4), num_replicas=replicas, rank=0)  # type: ignore[arg-type]
    loader = DataLoader(range(4), sampler=sampler)  # type: ignore[arg-type]
    assert is_dealt(trainer(loader)) is (replicas == 2)
    assert is_dealt(trainer(loader, object())) is False
    assert datasets_of(trainer(loader, loader, object())) == "range, object"


def test_data_that_were_not_set_up_need_not_be_dealt() -> None:
    assert is_dealt(trainer())
    assert datasets_of(trainer()) == ""
