"""Workers whose samplers have orders of their own agree on one, and send no order where theirs are equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_asgd.core.leases.common_order import CommonOrder, agreed_order, overlap
from lightning_asgd.core.leases.sampler import in_common_order, own_samplers
from lightning_asgd.core.server.collective_table import CollectiveTable
from lightning_asgd.core.worker.collectives import Collectives
from tests.component.test_collectives import together

SAMPLES = 40
Make = Callable[[int], list[Any]]


def blocks(rank: int) -> list[int]:
    return list(range(rank * SAMPLES // 2, (rank + 1) * SAMPLES // 2))


def shuffled(rank: int) -> list[int]:
    return random.Random(rank).sample(range(SAMPLES), SAMPLES)


def drawn(rank: int) -> list[int]:
    return np.random.default_rng(rank).integers(0, SAMPLES, SAMPLES).tolist()


def agree(make: Make, *, unites: bool = False, workers: int = 2) -> list[CommonOrder]:
    def work(collectives: Collectives, rank: int) -> CommonOrder:
        return agreed_order(collectives, [make(rank)], unites=unites)

    return together(workers, work)


@pytest.mark.parametrize("make", [shuffled, drawn, lambda rank: [[n, n + 1] for n in shuffled(rank)]])
def test_orders_of_the_same_samples_give_way_to_the_chiefs(make: Make) -> None:
    found = agree(make, workers=3)
    assert [each.parts for each in found] == [[make(0)]] * 3
    assert all(each.differs and not each.divided for each in found)


@pytest.mark.parametrize("make", [blocks, lambda rank: [[n] for n in blocks(rank)], lambda rank: [*blocks(rank), 0]])
def test_a_sampler_that_divides_the_samples_is_known_by_what_it_yields(make: Make) -> None:
    found = agree(make)
    assert [each.parts for each in found] == [[make(0)], [make(1)]]
    assert all(each.divided for each in found)
    together_ = agree(make, unites=True)
    assert [each.parts for each in together_] == [[make(0) + make(1)]] * 2


def test_one_of_several_dataloaders_divides_its_samples() -> None:
    def work(collectives: Collectives, rank: int) -> bool:
        return agreed_order(collectives, [list(range(SAMPLES)), blocks(rank)], unites=False).divided

    assert together(2, work) == [True, True]


def test_equal_orders_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    keep = CollectiveTable.contribute
    monkeypatch.setattr(CollectiveTable, "contribute", lambda *about: (sent.append(about[1].payload), keep(*about))[1])
    found = agree(lambda _: list(range(100_000)))
    assert [each.parts for each in found] == [[list(range(100_000))]] * 2
    assert [len(each) for each in sent] == [16, 16]


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)))
def test_overlap(mine: list[int], theirs: list[int]) -> None:
    assert 0 <= overlap([mine], [theirs]) <= 1
    assert overlap([mine], [mine]) == 1
    if mine and not set(mine) & set(theirs):
        assert overlap([mine, theirs], [theirs, theirs]) == 0


class Own(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def test_samplers_of_the_programs_own_are_found_in_those_that_take_from_them() -> None:
    assert own_samplers(BatchSampler(Own(), 2, drop_last=False)) == ["Own"]
    data: Any = range(SAMPLES)
    assert own_samplers(BatchSampler(RandomSampler(data), 2, drop_last=False)) == []
    assert own_samplers(DistributedSampler(data, 2, 0)) == []
    assert in_common_order(Own(), 0) == list(range(SAMPLES))
