from __future__ import annotations

import doctest
import importlib
import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_asgd.algorithms import (
    ASGD,
    EASGD,
    Algorithm,
    DANASlim,
    DelayCompensation,
    Downpour,
    GapAware,
    StaleSynchronous,
)
from lightning_asgd.core.algorithms.base import Push, Table
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.server.group_rules import GroupRules


def apply(rule: ASGD, weights: torch.Tensor, update: torch.Tensor, live: int) -> torch.Tensor:
    result = weights.clone()
    rule.apply(result, update.clone(), {}, Push(live=live))
    return result


def test_example_in_the_docstring_runs() -> None:
    result = doctest.testmod(importlib.import_module("lightning_asgd.core.algorithms.asgd"))
    assert result.attempted >= 3
    assert result.failed == 0


def test_docstring_tells_state_staleness_and_sources() -> None:
    for heading in ("Args:", "State:", "Staleness:", "Example:"):
        assert heading in (inspect.getdoc(ASGD) or "")
    module = importlib.import_module("lightning_asgd.core.algorithms.asgd").__doc__ or ""
    assert "References:" in module
    assert "Departures:" in module


@pytest.mark.parametrize(
    ("scale", "live", "factor"),
    [("mean", 1, 1.0), ("mean", 4, 0.25), ("sum", 4, 1.0), (0.5, 4, 0.5), (3.0, 1, 3.0), ("mean", 0, 1.0)],
)
def test_parameters_are_moved_by_the_scaled_update(scale: str | float, live: int, factor: float) -> None:
    w, u = torch.tensor([1.0, -2.0]), torch.tensor([4.0, 8.0])
    assert torch.equal(apply(ASGD(scale), w, u, live), w + factor * u)


class Whole(ASGD):
    """A user's rule."""

    def apply(self, weights: torch.Tensor, update: torch.Tensor, slots: dict[str, Any], push: Push) -> None:
        weights.add_(update.mul_(push.live))


@pytest.mark.parametrize(
    ("rule", "about", "expected"),
    [
        (ASGD(), {"live": 2}, 0.5),
        (ASGD(), {"live": 4, "steps": 3}, 0.25),
        (ASGD(), {"live": 2, "weight": 0.5}, 0.75),
        (ASGD(), {"live": 1, "steps": 3}, 0.0),
        (ASGD("sum"), {"live": 2}, 0.0),
        (ASGD(transforms=[GapAware()]), {"live": 2}, 0.0),
        (ASGD(transforms=[StaleSynchronous(4)]), {"live": 2}, 0.5),
        (Whole(), {"live": 2}, 0.0),
        (DANASlim("mean"), {"live": 2}, 0.0),
    ],
    ids=str,
)
def test_a_reply_is_ahead_by_what_others_add_in_a_step(rule: Algorithm, about: dict[str, Any], expected: float) -> None:
    assert rule.ahead(Push(**about)) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_every_dtype_of_a_parameter_is_kept(dtype: torch.dtype) -> None:
    w, u = torch.tensor([1, 2]).to(dtype), torch.tensor([4, 4]).to(dtype)
    out = apply(ASGD("mean"), w, u, 2)
    assert out.dtype is dtype
    assert torch.equal(out, torch.tensor([3, 4]).to(dtype))


@given(
    updates=st.lists(st.lists(st.integers(-1000, 1000), min_size=3, max_size=3), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
    scale=st.sampled_from(["sum", "mean", 0.5]),
)
def test_the_order_of_updates_does_not_matter(updates: list[list[int]], order: object, scale: str | float) -> None:
    shuffled = list(updates)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    results = []
    for sequence in (updates, shuffled):
        w = torch.zeros(3)
        for u in sequence:
            w = apply(ASGD(scale), w, torch.tensor(u, dtype=torch.float32), 4)
        results.append(w)
    assert torch.equal(*results)


@pytest.mark.parametrize(("given_", "parsed"), [("mean", "mean"), ("sum", "sum"), (1, 1.0), (0.25, 0.25)])
def test_scale_is_parsed(given_: str | float, parsed: str | float) -> None:
    result = ASGD(given_).scale
    assert result == parsed
    assert type(result) is type(parsed)


def test_unknown_scale_names_the_choices() -> None:
    with pytest.raises(ConfigurationError, match=r"scale='median' is unknown. Expected 'mean', 'sum' or a positive"):
        ASGD("median")


def pushed(rule: Algorithm, dtype: torch.dtype, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of 0, and the answer, after a push of equal values by a worker that started at -1e-4."""
    weights, update = torch.zeros(3, dtype=dtype), torch.full((3,), value).half().to(dtype)
    rules, backup = GroupRules(rule, weights), torch.full((3,), -1e-4).half().to(dtype)
    push = Push(payload=rule.payload, live=2, lr=0.1)
    rules.push(update, push, 1.0, backup, copy_back=True, before=lambda part: None)
    return weights, update


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        (Downpour("sgd", lr=0.1, transforms=[DelayCompensation()]), 300.0),  # whose square is infinite
        (Downpour("adam", lr=0.1), 1e-4),  # whose square is 0, as eps is
        (ASGD(transforms=[GapAware()]), 1e-4),
        (EASGD(), 300.0),
    ],
    ids=["DelayCompensation", "adam", "GapAware", "EASGD"],
)
def test_rules_compute_with_16_bits_as_with_32(rule: Algorithm, value: float) -> None:
    (narrow, answer), (plain, expected) = (pushed(rule, dtype, value) for dtype in (torch.float16, torch.float32))
    assert narrow.dtype is torch.float16
    assert plain.isfinite().all()
    assert torch.equal(narrow, plain.half())
    assert torch.equal(answer, expected.half())


@given(
    clocks=st.dictionaries(st.integers(0, 5), st.integers(0, 9)),
    living=st.sets(st.integers(0, 5), min_size=1),
    resting=st.sets(st.integers(0, 5)),
    bound=st.integers(0, 4),
)
def test_a_worker_waits_if_it_is_ahead_of_the_slowest_that_trains(
    clocks: dict[int, int], living: set[int], resting: set[int], bound: int
) -> None:
    table = Table(living=living, resting=resting)
    table.clocks.update(clocks)
    for worker in table.active:  # no other one waits
        ahead = table.clocks[worker] - min(table.clocks[each] for each in table.active)
        assert StaleSynchronous(bound).holds(worker, table) == (ahead > bound)
