from __future__ import annotations

import doctest
import importlib
import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_asgd.algorithms import ASGD, parse_scale
from lightning_asgd.errors import ConfigurationError
from lightning_asgd.messages import Role


def apply(rule: ASGD, role: Role, weights: torch.Tensor, update: torch.Tensor, live: int) -> torch.Tensor:
    out = torch.empty_like(weights)
    rule.apply(role, weights, update, live=live, out=out)
    return out


def test_example_in_the_docstring_runs() -> None:
    result = doctest.testmod(importlib.import_module("lightning_asgd.algorithms.asgd"))
    assert result.attempted >= 3
    assert result.failed == 0


def test_docstring_tells_state_staleness_and_sources() -> None:
    for heading in ("Args:", "State:", "Staleness:", "Example:"):
        assert heading in (inspect.getdoc(ASGD) or "")
    module = importlib.import_module("lightning_asgd.algorithms.asgd").__doc__ or ""
    assert "References:" in module
    assert "Departures:" in module


@pytest.mark.parametrize(
    ("scale", "live", "factor"),
    [("mean", 1, 1.0), ("mean", 4, 0.25), ("sum", 4, 1.0), (0.5, 4, 0.5), (3.0, 1, 3.0), ("mean", 0, 1.0)],
)
def test_parameters_are_moved_by_the_scaled_update(scale: str | float, live: int, factor: float) -> None:
    w, u = torch.tensor([1.0, -2.0]), torch.tensor([4.0, 8.0])
    assert torch.equal(apply(ASGD(scale), Role.PARAMETER, w, u, live), w + factor * u)


@pytest.mark.parametrize("scale", ["mean", "sum", 0.5])
def test_averaged_buffers_move_by_the_mean_whatever_the_scale(scale: str | float) -> None:
    w, u = torch.tensor([1.0, -2.0]), torch.tensor([4.0, 8.0])
    assert torch.equal(apply(ASGD(scale), Role.AVERAGE, w, u, 4), w + 0.25 * u)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_counters_take_the_largest(dtype: torch.dtype) -> None:
    w, u = torch.tensor([1, 5, 0]).to(dtype), torch.tensor([3, 2, 0]).to(dtype)
    assert apply(ASGD("sum"), Role.LARGEST, w, u, 4).tolist() == torch.tensor([3, 5, 0]).to(dtype).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_every_dtype_of_a_parameter_is_kept(dtype: torch.dtype) -> None:
    w, u = torch.tensor([1, 2]).to(dtype), torch.tensor([4, 4]).to(dtype)
    out = apply(ASGD("mean"), Role.PARAMETER, w, u, 2)
    assert out.dtype is dtype
    assert torch.equal(out, torch.tensor([3, 4]).to(dtype))


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("target", ["weights", "update"])
def test_the_result_may_go_where_an_operand_lies(role: Role, target: str) -> None:
    w, u = torch.randn(100), torch.randn(100)
    expected = apply(ASGD(0.3), role, w, u, 3)
    operands = {"weights": w.clone(), "update": u.clone()}
    ASGD(0.3).apply(role, operands["weights"], operands["update"], live=3, out=operands[target])
    assert torch.equal(operands[target], expected)
    other = "update" if target == "weights" else "weights"
    assert torch.equal(operands[other], {"weights": w, "update": u}[other])


def test_operands_are_left_alone_when_the_result_goes_elsewhere() -> None:
    w, u = torch.randn(10), torch.randn(10)
    before = w.clone(), u.clone()
    apply(ASGD("mean"), Role.PARAMETER, w, u, 2)
    assert torch.equal(w, before[0])
    assert torch.equal(u, before[1])


@given(
    updates=st.lists(st.lists(st.integers(-1000, 1000), min_size=3, max_size=3), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
    role=st.sampled_from(list(Role)),
    scale=st.sampled_from(["sum", "mean", 0.5]),
)
def test_the_order_of_updates_does_not_matter(
    updates: list[list[int]], order: object, role: Role, scale: str | float
) -> None:
    shuffled = list(updates)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    results = []
    for sequence in (updates, shuffled):
        w = torch.zeros(3)
        for u in sequence:
            ASGD(scale).apply(role, w, torch.tensor(u, dtype=torch.float32), live=4, out=w)
        results.append(w)
    assert torch.equal(*results)


@pytest.mark.parametrize(("given_", "parsed"), [("mean", "mean"), ("sum", "sum"), (1, 1.0), (0.25, 0.25)])
def test_scale_is_parsed(given_: str | float, parsed: str | float) -> None:
    result = parse_scale(given_)
    assert result == parsed
    assert type(result) is type(parsed)


def test_unknown_scale_names_the_choices() -> None:
    with pytest.raises(ConfigurationError, match=r"scale='median' is unknown. Expected 'mean', 'sum' or a positive"):
        parse_scale("median")
