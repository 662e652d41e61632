from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_asgd.core.foundation.numerics import (
    MAX_UPDATE,
    checksum,
    inner_product,
    is_finite,
    is_within_bounds,
    largest,
)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BAD = [math.nan, math.inf, -math.inf]


@given(
    dtype=st.sampled_from(FLOATS),
    size=st.integers(0, 300),
    bad=st.lists(st.tuples(st.integers(0, 299), st.sampled_from(BAD)), max_size=3),
    magnitude=st.sampled_from([0.0, 1.0, 0.9]),
)
def test_one_bad_element_anywhere_is_seen(
    dtype: torch.dtype, size: int, bad: list[tuple[int, float]], magnitude: float
) -> None:
    # 0.9 of the largest value: finite elements whose sum is not.
    value = torch.finfo(dtype).max * magnitude if magnitude != 1.0 else 1.0
    tensor = torch.full((size,), value, dtype=dtype)
    for position, what in bad:
        if position < size:
            tensor[position] = what
    assert is_finite(tensor) == bool(torch.isfinite(tensor).all())


@pytest.mark.parametrize("dtype", FLOATS)
def test_huge_values_are_finite_though_their_sum_is_not(dtype: torch.dtype) -> None:
    tensor = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(tensor)
    tensor[999] = math.inf
    assert not is_finite(tensor)


@pytest.mark.parametrize("dtype", FLOATS)
def test_infinities_that_cancel_are_seen(dtype: torch.dtype) -> None:
    assert not is_finite(torch.tensor([math.inf, -math.inf], dtype=dtype))
    assert not is_finite(torch.tensor([1.0, math.nan], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_both_parts_of_complex_numbers_are_looked_at(dtype: torch.dtype) -> None:
    assert is_finite(torch.tensor([1 + 2j, 3 - 4j], dtype=dtype))
    assert not is_finite(torch.tensor([1 + 2j, complex(0, math.nan)], dtype=dtype))
    assert not is_finite(torch.tensor([1 + 2j, complex(math.inf, 0)], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_whole_numbers_are_always_finite(dtype: torch.dtype) -> None:
    assert is_finite(torch.ones(5, dtype=dtype))


def test_an_empty_tensor_is_finite() -> None:
    assert is_finite(torch.empty(0))


@given(
    dtype=st.sampled_from(FLOATS),
    values=st.lists(st.floats(width=16) | st.sampled_from([*BAD, 1e9, 1e11, 1e38]), max_size=50),
)
def test_what_is_called_sane_is_finite_and_small(dtype: torch.dtype, values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    if is_within_bounds(tensor):
        assert is_finite(tensor)
        assert largest(tensor) <= MAX_UPDATE


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool])
def test_an_ordinary_update_is_called_sane(dtype: torch.dtype) -> None:
    assert is_within_bounds(torch.ones(1000, dtype=dtype))
    assert is_within_bounds(torch.ones(0, dtype=dtype))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64])
def test_nothing_bad_is_called_sane(dtype: torch.dtype, bad: float) -> None:
    tensor = torch.ones(1000, dtype=dtype)
    tensor[777] = bad
    assert not is_within_bounds(tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("length", [0, 1, 1 << 16, (1 << 17) + 5])
def test_an_inner_product_is_that_of_64_bits(dtype: torch.dtype, length: int) -> None:
    one, other = (torch.randn(length, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    expected = float(torch.dot(one.double(), other.double()))
    assert inner_product(one, other) == pytest.approx(expected, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_inner_product_of_what_is_not_finite_is_not_finite(bad: float) -> None:
    values = torch.ones(1 << 17)
    values[[0, -1]] = torch.tensor([bad, -bad])
    assert not math.isfinite(inner_product(values, torch.ones(1 << 17)))


def test_checksums_differ_with_the_bits() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64):
        ones = torch.ones(5, 3).to(dtype)
        assert checksum(ones) == checksum(ones.clone())
        assert checksum(ones.T) == checksum(ones.T.contiguous())
        other = ones.clone()
        other[4, 2] = 0
        assert checksum(other) != checksum(ones)
    assert checksum(torch.arange(5.0)[::5]) == checksum(torch.zeros(1))
    assert checksum(torch.tensor(2.0)) != checksum(torch.tensor(-2.0))
    assert checksum(torch.empty(0)) == 0
