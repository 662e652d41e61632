"""The cap of the outer momentum, beside its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_asgd.algorithms import DelayedNesterov, DiLoCo
from lightning_asgd.algorithms.outer_momentum import MOST, Alignment
from lightning_asgd.algorithms.outer_momentum import capped_factor as factor_of
from lightning_asgd.core.algorithms.base import Push


def capped_factor(momentum: Tensor, update: Tensor, before: float) -> float:
    return factor_of(Alignment.of(momentum, update), before)


def parts(momentum: Tensor, update: Tensor) -> tuple[float, float]:
    """How far the momentum points along the update, and at right angles to it, in lengths of the update."""
    length = update.norm().item()
    along = torch.dot(momentum, update).item() / length**2
    return along, (momentum - along * update).norm().item() / length


def test_without_a_momentum_so_far_the_factor_is_nesterovs() -> None:
    assert capped_factor(torch.zeros(3), torch.ones(3), MOST) == MOST


def test_a_momentum_that_is_aligned_is_capped_at_once() -> None:
    update = torch.tensor([1.0, 0.0])
    factor = capped_factor(10 * update, update, MOST)
    assert factor + 10 * factor**2 == pytest.approx(MOST)


def test_a_momentum_at_right_angles_moves_no_further_than_the_update() -> None:
    factor = capped_factor(torch.tensor([0.0, 16.0]), torch.tensor([1.0, 0.0]), MOST)
    assert factor**2 * 16 == pytest.approx(1.0)


def test_a_momentum_that_would_turn_the_update_back_is_dropped() -> None:
    update = torch.tensor([1.0, 0.0])
    assert capped_factor(-3 * update, update, MOST) == 0.0
    assert capped_factor(-0.5 * update, update, MOST) == MOST


def test_the_factor_rises_slowly_and_falls_at_once() -> None:
    update = torch.tensor([1.0, 0.0])
    risen = capped_factor(torch.zeros(2), update, 0.4)
    assert risen == pytest.approx(0.4 + 0.1 * (MOST - 0.4))
    assert capped_factor(100 * update, update, 0.9) < 0.1


def test_an_update_of_length_0_changes_nothing() -> None:
    assert capped_factor(torch.ones(2), torch.zeros(2), 0.3) == 0.3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_dtype_of_parameters_has_a_factor(dtype: torch.dtype) -> None:
    update = torch.full((100_000,), 2.0).to(dtype)
    assert capped_factor(10 * update, update, MOST) == pytest.approx(
        capped_factor(torch.ones(1) * 10, torch.ones(1), MOST)
    )


def test_lengths_beyond_what_numbers_hold_give_no_momentum() -> None:
    tiny, huge = torch.full((2,), 1e-200, dtype=torch.float64), torch.full((2,), 1e200, dtype=torch.float64)
    one = torch.ones(2, dtype=torch.float64)
    assert capped_factor(huge, one, MOST) == capped_factor(huge, huge, MOST) == 0.0
    assert capped_factor(one, tiny, MOST) == MOST  # as an update of length 0


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.floats(1e-3, 1e3), before=st.floats(0, 0.9))
def test_the_cap_holds(seed: int, size: float, before: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    update = torch.randn(20, generator=generator)
    momentum = size * (torch.randn(20, generator=generator) + torch.rand(1, generator=generator) * update)
    factor = capped_factor(momentum, update, before)
    along, across = parts(momentum, update)
    assert 0 <= factor <= MOST
    assert factor + factor**2 * max(along, 0.0) <= MOST * 1.0001
    assert factor**2 * across <= 1.0001


def test_updates_that_stay_the_same_are_multiplied_by_less_than_two_instead_of_ten() -> None:
    moved = {}
    for momentum in (0.9, "capped"):
        rule, weights = DiLoCo(lr=1.0, momentum=momentum), torch.zeros(2)
        slots = rule.start(weights)
        for _ in range(100):
            before = weights.clone()
            rule.apply(weights, torch.tensor([1.0, 0.0]), slots, Push(count=4, live=4))
        moved[momentum] = (weights - before)[0].item()
    assert moved[0.9] == pytest.approx(10, rel=1e-3)
    assert 1.0 < moved["capped"] <= 1.0 + MOST


def test_one_push_in_four_turns_delayed_nesterovs_momentum_and_the_cap_holds() -> None:
    rule, weights = DelayedNesterov(lr=1.0), torch.zeros(1)
    slots = rule.start(weights)
    for version in range(400):
        before = weights.clone()
        rule.apply(weights, torch.ones(1), slots, Push(live=4, version=version))
        if version % 4 != 3:
            assert (weights - before).item() == pytest.approx(0.25, rel=1e-4)
    assert 0.25 < (weights - before).item() <= 0.25 + MOST


@pytest.mark.parametrize("rule", [DiLoCo(), DelayedNesterov()], ids=repr)
def test_a_checkpoint_keeps_the_factor_and_one_of_a_fixed_momentum_is_read(rule: DiLoCo | DelayedNesterov) -> None:
    weights = torch.zeros(2)
    slots = rule.start(weights)
    for version in range(8):
        rule.apply(weights, torch.ones(2), slots, Push(count=1, live=1, version=version))
    saved = {name: each.clone() for name, each in rule.save(slots).items()}
    again = rule.start(weights)
    rule.load(again, saved)
    assert again["factor"] == slots["factor"] < MOST
    assert torch.equal(again["momentum"], slots["momentum"])
    old = rule.start(weights)
    rule.load(old, {name: each for name, each in saved.items() if name != "factor"})
    assert old["factor"] == MOST


def test_wrong_momenta_are_refused() -> None:
    for wrong in ("fixed", 1.5, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"DiLoCo\(momentum\).*Expected"):
            DiLoCo(momentum=wrong)
