"""Radial-directional averages beside their definition, and when a round of Decoupled DiLoCo is over."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_asgd.algorithms import ASGD, DecoupledDiLoCo, DiLoCo, LocalSGD, Quorum, RadialDirectional
from lightning_asgd.core.algorithms.base import Push, Table
from lightning_asgd.core.foundation.errors import ConfigurationError


def merged(updates: list[Tensor], weights: list[float] | None = None, tensor: str = "layer") -> Tensor:
    """What servers make of the pushes to one tensor."""
    rule, weights = RadialDirectional(), weights or [1.0] * len(updates)
    slots, total = rule.start(updates[0]), torch.zeros_like(updates[0])
    for update, weight in zip(updates, weights, strict=True):
        changed = update.clone()
        rule.change(changed, torch.zeros_like(update), slots, Push(tensor=tensor, scale=weight))
        total += weight * changed
    mean = total / sum(weights)
    rule.merge(mean, slots, Push(tensor=tensor, scale=sum(weights)))
    assert float(slots["length"]) == 0.0
    return mean


def test_one_push_stays_as_it_is() -> None:
    update = torch.tensor([3.0, -4.0])
    torch.testing.assert_close(merged([update]), update)


def test_equal_pushes_are_their_mean() -> None:
    update = torch.tensor([3.0, -4.0, 1.0])
    torch.testing.assert_close(merged([update] * 3), update)


def test_orthogonal_pushes_keep_their_length() -> None:
    updates = [2 * row for row in torch.eye(4)]
    result = merged(updates)
    assert result.norm().item() == pytest.approx(2.0)
    torch.testing.assert_close(result, torch.ones(4))


def test_pushes_that_cancel_give_nothing() -> None:
    assert torch.equal(merged([torch.ones(3), -torch.ones(3)]), torch.zeros(3))
    assert torch.equal(merged([torch.zeros(3), torch.zeros(3)]), torch.zeros(3))


def test_tensors_of_one_value_are_averaged() -> None:
    assert merged([torch.tensor([3.0]), torch.tensor([-1.0])]).item() == 1.0


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "wte.weight"])
def test_embeddings_are_averaged(name: str) -> None:
    torch.testing.assert_close(merged([torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0])], tensor=name), torch.ones(2))


@given(seed=st.integers(0, 10**6), count=st.integers(1, 6))
def test_the_definition(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    updates = [torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(count)]
    weights = [float(w) for w in torch.rand(count, generator=generator) + 0.1]
    total = sum(weights)
    length = sum(w * u.norm() for w, u in zip(weights, updates, strict=True)) / total
    direction = sum(w * u / u.norm() for w, u in zip(weights, updates, strict=True)) / total
    torch.testing.assert_close(merged(updates, weights), length * direction / direction.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_every_dtype_of_parameters_is_merged(dtype: torch.dtype) -> None:
    result = merged([torch.tensor([2.0, 0.0]).to(dtype), torch.tensor([0.0, 2.0]).to(dtype)])
    torch.testing.assert_close(result, torch.full((2,), math.sqrt(2)).to(dtype), rtol=1e-2, atol=0)


def test_without_rounds_there_is_nothing_to_merge() -> None:
    with pytest.raises(ConfigurationError, match=r"ASGD was given RadialDirectional.*DiLoCo or LocalSGD"):
        ASGD(transforms=[RadialDirectional()])
    for rule in (DiLoCo, LocalSGD):
        assert RadialDirectional() in rule(transforms=[RadialDirectional()]).transforms
    with pytest.raises(ConfigurationError, match=r"RadialDirectional\(averaged\)='embed'"):
        RadialDirectional(averaged="embed")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- rounds


def table(gathered: list[float], now: float, *, living: int = 4, **more: Any) -> Table:
    about = {"speeds": {0: 2.0, 1: 1.0}, "nsync": 8, **more}
    members = set(range(living))
    return Table(living=members, gathered=set(range(len(gathered))), arrivals=gathered, now=now, **about)


def test_a_round_is_over_at_once_when_all_that_train_have_pushed() -> None:
    assert Quorum(4).ready(table([1, 2, 3, 4], 4.0))
    assert Quorum(4).ready(table([1, 2], 2.0, resting={2, 3}))
    assert not Quorum(4).ready(table([1, 2, 3], 100.0))


def test_half_of_those_that_train_suffice_by_default() -> None:
    rule = Quorum(grace=0.0)
    assert not rule.ready(table([1], 9.0, living=3))
    assert rule.ready(table([1, 2], 9.0, living=3))
    assert rule.ready(table([1, 2], 9.0, living=4))
    assert not rule.ready(table([1, 2], 9.0, living=5))


def test_the_grace_period_is_what_waiting_for_the_quorum_has_left() -> None:
    # The fastest worker takes two steps per second: a period of 8 steps takes four seconds.
    for rule, end in ((Quorum(2), 13.0), (Quorum(2, grace=0.5), 11.5), (Quorum(2, overlap=0.25), 10.0)):
        assert not rule.ready(table([9.0, 10.0], end - 0.01)) or end == 10.0
        assert rule.ready(table([9.0, 10.0], end))
    assert Quorum(2).ready(table([9.0, 14.0], 14.0))  # the quorum has taken it all
    assert Quorum(2, most_s=1.0).ready(table([9.0, 10.0], 11.0))
    assert Quorum(2).ready(table([9.0, 10.0], 10.0, speeds={}))  # no speed is known


def test_a_push_weighs_what_it_has_trained_times_what_a_step_has() -> None:
    assert Quorum().share(32.0, 10) == 320 * 32  # samples**2 / steps
    assert DecoupledDiLoCo().transforms[-1].share(8.0, 5) == 8 * 5 * 8


def test_its_transforms_follow_from_its_arguments() -> None:
    rule = DecoupledDiLoCo(parts=2, quorum=3, grace=0.5)
    assert rule.transforms == (RadialDirectional(), Quorum(3, 0.5, 0.5))
    assert DecoupledDiLoCo(parts=2, quorum=3, grace=0.5, transforms=rule.transforms) == rule
    other = RadialDirectional(averaged=())
    assert DecoupledDiLoCo(transforms=[other]).transforms[0] is other
    assert dataclasses.replace(rule, quorum=1, parts=4).transforms[-1] == Quorum(1, 0.5, 0.25)
    assert rule.waits
    assert not rule.lockstep
    with pytest.raises(ConfigurationError, match=r"such as DecoupledDiLoCo\(quorum=3, grace=0\)"):
        DecoupledDiLoCo(transforms=[Quorum(3, grace=0.0)])  # it was replaced by one of half the workers
    assert DiLoCo().lockstep


@pytest.mark.parametrize("wrong", [{"quorum": 0}, {"grace": 2.0}, {"parts": 0}, {"alpha": -1.0}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="Expected"):
        DecoupledDiLoCo(**wrong)
