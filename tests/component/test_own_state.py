"""What a program changes by itself in buffers that are exchanged."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn

from lightning_asgd.adapter.own_state import OwnState
from lightning_asgd.config import ExchangeConfig
from lightning_asgd.layout import build_layout
from lightning_asgd.worker.collectives import Collectives, Phase
from lightning_asgd.worker.synchronizer import Synchronizer, Training, run
from lightning_asgd.worker.worker_setup import Start, exchanged_tensors, named_state, set_up
from tests.component.test_collectives import together


class Masked(nn.Module):
    def __init__(self, dtype: torch.dtype, *, persistent: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.01, 0.5, 1.0]))
        self.register_buffer("mask", torch.ones(3).to(dtype), persistent=persistent)


def own_state(module: nn.Module) -> OwnState:
    trainable, buffers = exchanged_tensors(module, named_state(module))
    layout = build_layout(trainable.items(), buffers.items(), 1)
    return OwnState(module, lambda: layout, Collectives)


@pytest.fixture(autouse=True)
def _worker_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)  # which warns


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_flag_or_mask_that_falls_is_warned_of_once(dtype: torch.dtype) -> None:
    module = Masked(dtype)
    state = own_state(module)
    module.mask &= (module.weight.abs() > 0.1).to(dtype)
    with pytest.warns(UserWarning, match=r"Buffer 'mask', a flag or mask of torch\.\w+, has fallen .*training_step"):
        state.check_counters()
    state.note()
    module.mask.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.check_counters()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_one_that_rises_or_is_not_exchanged_is_not(dtype: torch.dtype) -> None:
    rising, own = Masked(dtype), Masked(dtype, persistent=False)
    rising.mask.zero_()
    states = own_state(rising), own_state(own)
    rising.mask[1] = 1
    own.mask.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for state in states:
            state.check_counters()


class Flagged(Masked):
    """With a mask, flags that fall and rise, and a counter."""

    def __init__(self) -> None:
        super().__init__(torch.bool)
        self.register_buffer("warm", torch.ones((), dtype=torch.uint8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @property
    def flags(self) -> Any:
        return self.mask.tolist(), self.warm.item(), self.seen.item()


def enter(
    collectives: Collectives, module: nn.Module, training: Training | None = None, start: Start | None = None
) -> Synchronizer:
    assert collectives.client is not None
    return set_up(collectives.client, collectives, module, ExchangeConfig.create(nsync=1), training, start)


def train(collectives: Collectives, rank: int, module: Flagged, synchronizer: Synchronizer) -> None:
    """Both workers take a step, exchange and reach a sync point; worker 0 lowers flags and raises one."""
    run(synchronizer.begin())
    collectives.barrier("both have the first values")
    collectives.phase = Phase.ASYNC
    if rank == 0:
        module.mask[0] = False
        module.warm.zero_()
        module.seen = torch.tensor(True)  # another tensor
    module.count += rank + 1
    module.weight.data += 1.0
    synchronizer.count_step()
    run(synchronizer.advance())
    run(synchronizer.flush())
    collectives.phase = Phase.SYNC
    collectives.barrier("all have pushed")
    run(synchronizer.fetch())


LOWERED, FIRST = ([False, True, True], 0, True), ([True, True, True], 1, False)


def test_workers_take_the_flags_of_the_chief_at_sync_points() -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module = Flagged()
        if rank == 1:
            module.mask[2] = False  # workers begin with those of the chief
        synchronizer = enter(collectives, module)
        state = OwnState(module, lambda: synchronizer.layout, lambda: collectives)
        train(collectives, rank, module, synchronizer)
        exchanged = module.flags, module.count.item()
        state.check_counters()
        state.share()
        return exchanged, module.flags, module.weight.tolist()

    (mine, shared, weights), (theirs, same, others) = together(2, work)
    assert mine == (LOWERED, 2)
    assert theirs == (FIRST, 2)
    assert shared == same == LOWERED
    assert weights == others


@pytest.mark.parametrize("met", [False, True], ids=["first interval", "after a sync point"])
def test_a_replacement_enters_with_the_flags_of_the_others(met: bool) -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module = Flagged()
        synchronizer = enter(collectives, module)
        train(collectives, rank, module, synchronizer)
        if met:
            OwnState(module, lambda: synchronizer.layout, lambda: collectives).share()
            collectives.barrier("the chief has published them")
        if rank == 1:
            module = Flagged()
            collectives.phase = Phase.ENTERING
            about: Any = {"layout": synchronizer.layout.describe(), "constants": b""}
            again = enter(collectives, module, None, Start(fill=False, **about))
            OwnState(module, lambda: again.layout, lambda: collectives)
            again.close()
            collectives.phase = Phase.SYNC
        collectives.barrier("the other has entered")
        return module.flags

    raised = [True, True, True], 1, True  # servers know what was raised
    assert together(2, work) == [LOWERED, LOWERED if met else raised]


def test_in_a_plain_loop_flags_are_exchanged() -> None:
    """Nothing else shares them there."""

    def work(collectives: Collectives, rank: int) -> Any:
        module = Flagged()
        train(collectives, rank, module, enter(collectives, module, Training(closures=False)))
        return module.flags

    assert together(2, work) == [([True, True, True], 1, True)] * 2
