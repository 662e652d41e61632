"""A worker's weight is that of a sum over all, whatever joined, changed and left before."""

from __future__ import annotations

import random

from lightning_asgd.core.algorithms.base import SampleShares


def by_hand(sizes: dict[int, float], mine: float) -> float:
    """The weight by a look at every worker."""
    total = sum(size or mine for size in sizes.values())
    return mine * len(sizes) / total if mine and sizes else 1.0


def test_sums_are_those_of_a_look_at_every_worker() -> None:
    chance, shares, sizes = random.Random(1), SampleShares(), dict[int, float]()
    for _ in range(2000):
        worker = chance.randrange(20)
        size = chance.choice([None, 0.0, 1.0, 32.0, 4096.0])
        shares.put(worker, size)
        sizes.pop(worker, None)
        if size is not None:
            sizes[worker] = size
        assert len(shares) == len(sizes)
        for mine in (0.0, 8.0, 32.0):
            assert shares.weight(mine) == by_hand(sizes, mine)


def test_nothing_is_left_of_sizes_that_cannot_be_added_exactly() -> None:
    shares = SampleShares()
    shares.put(0, 3.0)
    for worker in range(1, 1000):
        shares.put(worker, 1e16 / worker)
    for worker in range(1, 1000):
        shares.put(worker, None)
    assert shares.weight(3.0) == 1.0
    assert shares.weight(1.5) == 0.5


def test_without_workers_or_a_size_the_weight_is_one() -> None:
    shares = SampleShares()
    assert shares.weight(2.0) == 1.0
    shares.put(0, 0.0)
    assert shares.weight(2.0) == 1.0
    assert shares.weight(0.0) == 1.0
