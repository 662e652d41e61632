from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asgd.algorithms import EASGD, SGMCMC, Hogwild
from lightning_asgd.compression import Cast, Compression, Int2, Int8, TopK, find_compression
from lightning_asgd.compression.streams import SyncPointCodec, Updates, Weights
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.protocol import nbytes

CODES = [Cast("bfloat16"), Cast("float16"), Int8(), Int8(7), TopK(0.05), TopK(0.5)]
GROUPS = [(Role.PARAMETER, "float32", 1000), (Role.PARAMETER, "bfloat16", 3), (Role.PARAMETER, "complex64", 2)]


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


@pytest.mark.parametrize("code", CODES, ids=repr)
def test_a_group_of_which_a_server_holds_nothing_is_coded(code: Compression) -> None:
    assert decoded(code, torch.empty(0)).numel() == 0


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
        others = (torch.ones(3, dtype=torch.bfloat16), torch.tensor([1j, 2]))
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
    lost = vector() - decoded(Int8(), vector())
    bad = vector()
    bad[3] = torch.nan
    assert stream.encode([bad])[0] is bad
    (whole, scales), out = stream.encode([vector(seed=1)])[0], torch.empty(1000)
    Int8().decode((whole, scales), out)
    assert torch.equal(out, decoded(Int8(), vector(seed=1) + lost))


@pytest.mark.parametrize("code", [Cast("float16"), TopK(), find_compression("1bit")], ids=str)
def test_an_update_that_servers_reject_is_sent_as_it_is(code: Compression) -> None:
    stream, spike = Updates(code, [(Role.PARAMETER, "float32", 400)]), torch.zeros(400)
    spike[7] = 1e20
    (sent,) = stream.encode([spike])
    assert sent is spike  # a code would clamp it, and servers apply what is left of it


def test_weights_beyond_float16_are_sent_whole() -> None:
    stream = Weights(Cast("float16"), [(Role.PARAMETER, "float32", 2)])
    (sent,) = stream.encode([torch.tensor([1.0, 7e4])])
    assert sent.tolist() == [1.0, 7e4]
    (sent,) = stream.encode([torch.tensor([1.0, 6e4])])
    assert isinstance(sent, tuple)


@pytest.mark.parametrize("code", [TopK(0.05), TopK(0.2)], ids=str)
def test_what_a_worker_keeps_of_a_push_is_not_sent_twice(code: Compression) -> None:
    """A worker that mixes keeps a part of what the code has lost in its weights, and pushes that part again."""
    groups, kept = [(Role.PARAMETER, "float32", 300)], 0.5
    worker, server = Updates(code, groups, kept), Updates(code, groups)
    drift = torch.rand(300, generator=torch.Generator().manual_seed(0)) + 0.5
    weights, held = torch.zeros(300), torch.zeros(300)
    for step in range(400):
        weights += drift if step < 100 else 0.0
        held = held + server.decode(worker.encode([weights - held]), [torch.empty(300)])[0]
        weights = torch.lerp(held, weights, kept)
    assert torch.allclose(held, 100 * drift, rtol=0.01)


def test_an_update_that_was_not_applied_is_taken_back() -> None:
    stream, other, out = Updates(Int2(), GROUPS[:1]), Updates(Int2(), GROUPS[:1]), [torch.empty(1000)]
    for seed in range(3):
        stream.encode([vector(seed=seed)])
        other.encode([vector(seed=seed)])
    stream.encode([vector(seed=9)])
    for _ in range(2):  # once has the same effect
        stream.take_back()
    sent, expected = (each.encode([vector(seed=5)]) for each in (stream, other))
    assert torch.equal(stream.decode(sent, out)[0].clone(), other.decode(expected, out)[0])


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


@settings(max_examples=100, deadline=None)
@given(events=st.lists(st.tuples(st.sampled_from(["train", "fetch"]), st.integers(0, 2)), max_size=12))
def test_all_take_the_same_bits_at_sync_points(events: list[tuple[str, int]]) -> None:
    """Workers may miss some; whatever they hold, they end with what the others do, near the servers' weights."""
    server, workers = SyncPointCodec(GROUPS), [SyncPointCodec(GROUPS) for _ in range(3)]
    weights = [vector().clamp(-100, 100), torch.ones(3, dtype=torch.bfloat16), torch.tensor([3j, 4])]
    for seed, (event, who) in enumerate([*events, ("train", 0), ("fetch", 0), ("fetch", 1), ("fetch", 2)]):
        if event == "train":
            weights = [weights[0] + 0.1 * vector(seed=seed).clamp(-1, 1), weights[1] * 0.5, weights[2] + 1]
            continue
        parts = server.encode(weights, workers[who].digest)
        taken = workers[who].decode(parts, [torch.empty_like(w) for w in weights])
        assert all(map(torch.equal, taken, server.take(weights)))
        assert torch.equal(taken[1], weights[1])
        assert torch.equal(taken[2], weights[2])
        # What 16 bits lose of the change since the last sync point, at most 13 times 0.1; it does not add up.
        assert torch.allclose(taken[0], weights[0], atol=1.3 * 2**-15, rtol=2**-20)


def test_only_what_has_changed_since_the_last_sync_point_is_sent() -> None:
    group = [(Role.PARAMETER, "float32", 100_000)]
    server, same, other = (SyncPointCodec(group) for _ in range(3))
    weights, out = torch.randn(100_000), [torch.empty(100_000)]
    server.hold([weights])
    same.hold([weights])
    other.hold([torch.randn(100_000)])
    assert nbytes(server.encode([weights], same.digest)) == 0
    assert nbytes(server.encode([weights], other.digest)) == 400_000
    for worker in (same, other):
        worker.decode(server.encode([weights], worker.digest), out)
    weights = weights + 0.01 * torch.randn(100_000)
    for worker in (same, other):
        parts = server.encode([weights], worker.digest)
        assert 400_000 / nbytes(parts) == pytest.approx(2, rel=0.05)
        worker.decode(parts, out)
        assert nbytes(server.encode([weights], worker.digest)) == 0


def test_names_and_misuse() -> None:
    assert find_compression("int8") == Int8()
    assert find_compression(None) is None
    with pytest.raises(
        ValueError, match=r"compression='zip' is unknown. Expected an object such as TopK\(0.01\).* bf16, fp16, int8"
    ):
        find_compression("zip")
    for wrong in (lambda: Cast("int8"), lambda: Int8(0), lambda: TopK(0.0), lambda: TopK(0.7)):
        with pytest.raises(ValueError, match="Expected"):
            wrong()
    for algorithm in (EASGD(), SGMCMC(), Hogwild(), "layerwise"):
        with pytest.raises(ValueError, match="compression='bf16' cannot be used with"):
            ExchangeConfig.create(nsync=1, algorithm=algorithm, compression="bf16")
