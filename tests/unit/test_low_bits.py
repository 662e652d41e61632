"""Codes of a few bits, beside what their definitions say value by value."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asgd.compression import Cast, Compression, Float4, Int2, Int8, Sign, TopK, TopTiles, find_compression
from lightning_asgd.compression.streams import Updates
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.protocol import nbytes
from tests.unit.test_compression import decoded, vector

LOW = [Float4(), Int2(), Sign(), Float4(8), Int2(24)]
SCALES = st.sampled_from([0.0, 1e-30, 1e-3, 1e4])


def by_hand(code: Compression, block: list[float]) -> list[float]:
    """Compute the decoded values of a block. The last block of a vector may be shorter than the others."""
    if isinstance(code, Float4):
        top = max(map(abs, block))
        found = []
        for value in block:
            exponent = -math.inf if not value or not top else math.log2(abs(value) / top)
            found.append(0.0 if exponent < -6.5 else math.copysign(2.0 ** round(exponent) * top, value))
        return found
    if isinstance(code, Int2):
        step = 1.25 * sum(map(abs, block)) / len(block)
        return [math.copysign(1.5 if abs(v) >= step else 0.5, v) * step for v in block]
    mean = sum(map(abs, block)) / len(block)
    return [math.copysign(mean, v) for v in block]


@pytest.mark.parametrize("code", LOW, ids=repr)
@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 700), seed=st.integers(0, 9), scale=SCALES)
def test_a_low_code_is_what_its_definition_says(code: Compression, n: int, seed: int, scale: float) -> None:
    values = vector(n, seed) * scale
    before = values.clone()
    result = decoded(code, values)
    assert torch.equal(values, before)
    width = code.block  # type: ignore[attr-defined]
    expected = [each for block in values.split(width) for each in by_hand(code, block.tolist())]
    wrong = (result - torch.tensor(expected)).abs() > 1e-5 * torch.tensor(expected).abs() + 1e-37
    # A value in the middle between two codes may be rounded either way.
    middle = torch.zeros(n, dtype=torch.bool)
    for number, block in enumerate(values.split(width)):
        parts = block.abs() / block.abs().max().clamp(min=1e-37)
        exponent = torch.log2(parts.clamp(min=1e-9))
        step = block.abs().mean().mul(1.25).clamp(min=1e-37)
        near = ((exponent + 0.5) % 1 - 0).abs().minimum(1 - (exponent + 0.5) % 1) < 0.01
        near |= ((block.abs() / step) - 1).abs() < 1e-5
        middle[number * width : number * width + len(block)] = near | (block == 0)
    assert not (wrong & ~middle).any()


@pytest.mark.parametrize("code", LOW, ids=repr)
def test_vectors_of_several_pieces_and_both_precisions(code: Compression) -> None:
    values = vector(300_001)
    whole = decoded(code, values)
    width = 131_072 // code.block * code.block  # type: ignore[attr-defined]
    assert torch.equal(whole[width : 2 * width], decoded(code, values[width : 2 * width]))
    assert torch.equal(decoded(code, values.double()).float(), whole)
    assert decoded(code, values[:0]).numel() == 0


@pytest.mark.parametrize("code", [Float4(), Float4(8), Sign()], ids=repr)
def test_what_a_low_code_stands_for_is_coded_as_itself(code: Compression) -> None:
    once = decoded(code, vector(10_240))
    torch.testing.assert_close(decoded(code, once), once, rtol=1e-5, atol=0)


@pytest.mark.parametrize("code", [*LOW, TopTiles(), TopTiles(32), TopTiles(4096)], ids=repr)
def test_a_low_code_takes_as_few_bytes_as_it_says(code: Compression) -> None:
    values = vector(40 * 4096)
    ratio = values.nbytes / nbytes([code.encode(values)])
    assert ratio == pytest.approx(code.factor, rel=0.01)


@pytest.mark.parametrize("code", [*LOW, TopTiles(), TopTiles(512, residual_decay=1.0)], ids=repr)
def test_what_was_sent_and_what_is_kept_add_up_to_what_was_pushed(code: Compression) -> None:
    groups = [(Role.PARAMETER, "float64", 5000)]
    stream = Updates(code, groups)
    kept, out = torch.zeros(5000, dtype=torch.float64), [torch.empty(5000, dtype=torch.float64)]
    for seed in range(8):
        update = vector(5000, seed).double().clamp(-100, 100)
        wanted = update + code.decay * kept
        (sent,) = stream.decode(stream.encode([update.clone()]), out)
        kept = stream._residual[0].clone()
        torch.testing.assert_close(sent + kept, wanted, rtol=1e-12, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 9000), seed=st.integers(0, 9), largest=st.sampled_from([2, 32, 128]), scale=SCALES)
def test_a_tiles_largest_values_are_sent(n: int, seed: int, largest: int, scale: float) -> None:
    values = vector(n, seed) * scale
    result = decoded(TopTiles(largest), values)
    assert result.isfinite().all()
    for tile, found in zip(values.split(4096), result.split(4096), strict=True):
        size = tile.abs()
        top = size.topk(min(largest, len(tile))).values
        assert (found != 0).sum() <= largest
        sent = found != 0
        assert (found[sent].sign() == tile[sent].sign()).all()
        if scale and sent.any() and not sent.all():
            assert size[~sent].max() <= size[sent].min() * (1 + 2**-11)
        if scale and n >= 4096 and len(tile) == 4096:
            large = top > top.mean()
            expected = {top[large].mean().bfloat16().item(), top[~large].mean().bfloat16().item()}
            assert {round(each, 9) for each in found[sent].abs().tolist()} <= {round(each, 9) for each in expected}


def test_tiles_decode_to_their_places() -> None:
    values = torch.zeros(3 * 4096)
    places = [0, 1, 2, 4095, 4096, 4097, 5000, 8191, 8192, 8193, 12286, 12287]
    values[places] = torch.tensor([1.0, -2, 2, -1, -1, 2, -2, 1, -3, 3, 3, 3])
    result = decoded(TopTiles(4), values)
    assert result.nonzero().flatten().tolist() == places
    assert (result.sign() == values.sign()).all()
    assert result[[8192, 12287]].tolist() == [-3.0, 3.0]


def test_a_tile_with_few_values_sends_no_others() -> None:
    values = torch.zeros(2 * 4096)
    values[100:164] = torch.linspace(-2, 1, 64)
    values[164] = 0.0
    result = decoded(TopTiles(), values)
    assert torch.equal(result != 0, values != 0)
    assert torch.equal(result.sign(), values.sign())


@pytest.mark.parametrize("code", [Float4(), Int2(), Sign(), TopTiles(), Cast(), Int8(), TopK()], ids=repr)
def test_what_a_peer_sends_in_another_length_is_refused(code: Compression) -> None:
    coded = code.encode(vector(9000))
    for wrong in range(len(coded)):
        for part in (coded[wrong][:-1], coded[wrong].repeat(2, *[1] * (coded[wrong].dim() - 1))):
            with pytest.raises(ProtocolError, match=r"was received as vectors of shapes .* Expected lengths"):
                code.decode((*coded[:wrong], part, *coded[wrong + 1 :]), torch.empty(9000))


def test_places_outside_of_the_vector_are_refused() -> None:
    places, values = TopK().encode(vector(9000))
    for outside in (-1, 9000):
        places[3] = outside
        with pytest.raises(ProtocolError, match="places outside of a vector of 9000"):
            TopK().decode((places, values), torch.empty(9000))


def test_names_and_what_goes_with_what() -> None:
    assert {name: find_compression(name) for name in ("4bit", "2bit", "1bit")} == {
        "4bit": Float4(),
        "2bit": Int2(),
        "1bit": Sign(),
    }
    for code in (Float4(), Int2(), Sign()):
        assert code.downward == Int8()
    assert TopTiles().downward == Cast("bfloat16")
    assert ExchangeConfig.create(nsync=1, algorithm="sparse_loco").compression == TopTiles()
    with pytest.raises(ValueError, match="was given with SparseLoCo, which compresses pushes with its own"):
        ExchangeConfig.create(nsync=1, algorithm="sparse_loco", compression="bf16")
    for wrong in (lambda: Float4(12), lambda: Sign(0), lambda: TopTiles(3), lambda: TopTiles(5000)):
        with pytest.raises(ValueError, match="Expected"):
            wrong()
    with pytest.raises(ValueError, match="residual_decay"):
        TopTiles(residual_decay=1.5)
