from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asgd.algorithms import EASGD, SGMCMC, Hogwild
from lightning_asgd.compression import Cast, Compression, Int8, TopK, Updates, Weights, find, nbytes
from lightning_asgd.config import ExchangeConfig
from lightning_asgd.messages import Role

CODES = [Cast("bfloat16"), Cast("float16"), Int8(), Int8(7), TopK(0.05), TopK(0.5)]
GROUPS = [(Role.PARAMETER, "float32", 1000), (Role.AVERAGE, "float32", 3), (Role.LARGEST, "int64", 2)]


def vector(n: int = 1000, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) * 10 ** torch.randn(n, generator=generator)


def decoded(code: Compression, values: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(values, 7.0)
    code.decode(code.encode(values), out)
    return out


@pytest.mark.parametrize("code", CODES, ids=repr)
@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 700), seed=st.integers(0, 9), scale=st.sampled_from([0.0, 1e-30, 1e-3, 1e4]))
def test_a_code_loses_no_more_than_it_says(code: Compression, n: int, seed: int, scale: float) -> None:
    values = vector(n, seed) * scale
    before = values.clone()
    result = decoded(code, values)
    assert torch.equal(values, before)
    assert result.isfinite().all()
    error = (result - values).abs()
    if isinstance(code, Cast):
        limit = values.abs() * 2.0 ** (-8 if code.dtype == "bfloat16" else -11) + 1e-7
        assert (error <= limit)[values.abs() < 65504].all()
    elif isinstance(code, Int8):
        assert (error <= values.abs().max() / 127 * 0.501 + 1e-30).all()
    else:
        kept = result != 0
        assert kept.sum() <= max(1, int(code.fraction * n))
        assert (error[kept] <= values[kept].abs() / 256).all()
        if kept.any() and not kept.all():
            assert values[~kept].abs().min() <= values[kept].abs().min()


def test_the_largest_values_are_sent() -> None:
    values = torch.zeros(100_000)
    values[::1000] = torch.arange(1.0, 101.0)
    result = decoded(TopK(0.0005), values)
    assert result.nonzero().flatten().tolist() == list(range(50_000, 100_000, 1000))


@pytest.mark.parametrize("code", CODES, ids=repr)
def test_a_code_takes_as_few_bytes_as_it_says(code: Compression) -> None:
    values = vector(100_000)
    ratio = values.nbytes / nbytes([code.encode(values)])
    # What is sampled to find the largest values leaves some uncertainty about how many they are.
    assert ratio == pytest.approx(code.factor, rel=0.25 if isinstance(code, TopK) else 0.01)
    assert ratio >= 0.99 * code.factor


@pytest.mark.parametrize("code", CODES, ids=repr)
def test_what_is_lost_comes_later(code: Compression) -> None:
    stream, total, received = Updates(code, GROUPS), torch.zeros(1000), torch.zeros(1000)
    out = [torch.empty(n, dtype=getattr(torch, dtype)) for _, dtype, n in GROUPS]
    for seed in range(5):
        update = vector(seed=seed).clamp(-100, 100)
        total += update
        others = (torch.ones(3), torch.tensor([1, 2]))
        parts = stream.encode([update.clone(), *others])
        values = stream.decode(parts, out)
        received += values[0]
        assert values[1] is others[0]
        assert values[2] is others[1]
    for _ in range(60):
        received += stream.decode(stream.encode([torch.zeros(1000), *others]), out)[0]
    assert torch.allclose(received, total, atol=2e-2)


def test_an_update_that_is_not_finite_is_sent_as_it_is_and_spoils_nothing() -> None:
    stream = Updates(Int8(), GROUPS[:1])
    stream.encode([vector()])
    bad = vector()
    bad[3] = torch.nan
    assert stream.encode([bad])[0] is bad
    (whole, scales), out = stream.encode([vector(seed=1)])[0], torch.empty(1000)
    Int8().decode((whole, scales), out)
    assert torch.equal(out, decoded(Int8(), vector(seed=1)))  # nothing of what was before


@pytest.mark.parametrize("code", CODES, ids=repr)
def test_both_ends_know_the_same_weights(code: Compression) -> None:
    here, there = Weights(code, GROUPS[:1]), Weights(code, GROUPS[:1])
    weights = vector().clamp(-100, 100)
    out = [torch.empty(1000)]
    (first,) = there.decode(here.encode([weights], full=True), out)
    assert torch.equal(first, weights)
    for seed in range(40):
        if seed < 5:
            weights = weights + 0.1 * vector(seed=seed).clamp(-1, 1)
        (received,) = there.decode(here.encode([weights]), out)
        if code.differences:
            assert torch.equal(received, here._known[0])
    assert torch.allclose(received, weights, rtol=2**-8, atol=1e-3)
    (last,) = there.decode(here.encode([weights], full=True), out)
    assert torch.equal(last, weights)


def test_names_and_misuse() -> None:
    assert find("int8") == Int8()
    assert find(None) is None
    with pytest.raises(
        ValueError, match=r"compression='zip' is unknown. Expected None, .*TopK\(0.01\).* bf16, fp16, int8"
    ):
        find("zip")
    for wrong in (lambda: Cast("int8"), lambda: Int8(0), lambda: TopK(0.0), lambda: TopK(0.7)):
        with pytest.raises(ValueError, match="Expected"):
            wrong()
    for algorithm in (EASGD(), SGMCMC(), Hogwild(), "layerwise"):
        with pytest.raises(ValueError, match="compression='bf16' cannot be used with"):
            ExchangeConfig.create(nsync=1, algorithm=algorithm, compression="bf16")
