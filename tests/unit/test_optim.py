"""The samplers: their laws on Gaussian potentials, and their random streams."""

from __future__ import annotations

import copy
import doctest
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.sampling import optim
from lightning_asgd.sampling.optim import PSGLD, SGHMC, SGLD, PosteriorSampler

SAMPLERS = [SGLD, PSGLD, SGHMC]
N = 100  # examples


def make(cls: type[PosteriorSampler], size: int = 5, **settings: Any) -> tuple[Parameter, PosteriorSampler]:
    weight = Parameter(torch.ones(size))
    return weight, cls([weight], **{"lr": 1e-3, "num_data": N, "seed": 1, **settings})


def walk(weight: Parameter, sampler: PosteriorSampler, steps: int) -> torch.Tensor:
    for _ in range(steps):
        weight.grad = weight.detach() / N
        sampler.step()
    return weight.detach().clone()


def stationary(
    weight: Parameter,
    sampler: PosteriorSampler,
    gradient: Callable[[torch.Tensor], torch.Tensor],
    *,
    burn_in: int,
    thin: int,
    samples: int,
) -> torch.Tensor:
    found = []
    for step in range(burn_in + thin * samples):
        weight.grad = gradient(weight.detach())
        sampler.step()
        if step >= burn_in and (step - burn_in) % thin == thin - 1:
            found.append(weight.detach().clone())
    return torch.stack(found)


def test_examples_in_the_docstrings_run() -> None:
    result = doctest.testmod(optim)
    assert result.attempted >= 12
    assert result.failed == 0


# U(x) = x^2 / 2 per coordinate, as the mean loss x^2 / 2N of N examples; 2000 coordinates at once. The standard error
# of the variance is 1 % and the bias of these steps up to 1 %.
@pytest.mark.parametrize("temperature", [1.0, 0.25])
@pytest.mark.parametrize(("cls", "settings"), [(SGLD, {"lr": 0.02}), (SGHMC, {"lr": 0.01, "friction": 0.2})])
def test_stationary_variance_is_the_posteriors(cls: Any, settings: Any, temperature: float) -> None:
    weight, sampler = make(cls, 2000, temperature=temperature, **settings)
    x = stationary(weight, sampler, lambda x: x / N, burn_in=300, thin=100, samples=10)
    assert abs(x.mean()) < 3 * (temperature / x.numel()) ** 0.5
    assert 0.95 * temperature < x.var() < 1.05 * temperature


def test_stationary_variance_of_the_preconditioned_sampler() -> None:
    """Coordinates of two scales, with batches whose noise is three times the posterior's slopes and governs V."""
    precision = torch.tensor([1.0, 16.0]).repeat(1000)
    noise = torch.Generator().manual_seed(3)
    weight, sampler = make(PSGLD, 2000, lr=3e-5, alpha=0.9995)
    weight.data = torch.randn(2000, generator=noise) * precision**-0.5

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return (precision * x + 3 * precision**0.5 * torch.randn(x.shape, generator=noise)) / N

    x = stationary(weight, sampler, gradient, burn_in=3000, thin=600, samples=6)
    for part, expected in ((x[:, ::2], 1.0), (x[:, 1::2], 1 / 16)):
        assert abs(part.mean()) < 4 * (expected / part.numel()) ** 0.5
        assert 0.9 * expected < part.var() < 1.1 * expected


def test_the_prior_is_part_of_the_potential() -> None:
    """N examples of precision 1 / N each and a prior of precision 3: posterior precision 4."""
    weight, sampler = make(SGLD, 2000, lr=0.005, weight_decay=3.0)
    x = stationary(weight, sampler, lambda x: (x - 4.0) / N, burn_in=300, thin=100, samples=10)
    assert x.mean() == pytest.approx(1.0, abs=0.02)
    assert x.var() == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize("cls", SAMPLERS)
def test_without_temperature_the_step_is_the_optimizers(cls: Any) -> None:
    weight, sampler = make(cls, temperature=0.0)
    walk(weight, sampler, 1)
    expected = {
        SGLD: 1 - 1e-3,
        SGHMC: 1 - 1e-3,
        PSGLD: 1 - 1e-3 / (1e-5 + 1 / N),
    }[cls]
    assert torch.allclose(weight.detach(), torch.full((5,), expected))


@pytest.mark.parametrize("cls", SAMPLERS)
def test_a_state_dict_brings_back_the_same_bits(cls: Any) -> None:
    weight, sampler = make(cls)
    walk(weight, sampler, 7)
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    at = weight.detach().clone()
    expected = walk(weight, sampler, 5)
    torch.randn(3)  # others' random numbers do not matter

    other, again = make(cls, seed=99)
    other.data.copy_(at)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(walk(other, again, 5), expected)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
@pytest.mark.parametrize("cls", SAMPLERS)
def test_a_copy_goes_on_with_the_same_bits(cls: Any, how: Any) -> None:
    weight, sampler = make(cls)
    walk(weight, sampler, 3)
    other, again = how((weight, sampler))
    assert torch.equal(walk(weight, sampler, 5), walk(other, again, 5))


def test_another_workers_state_begins_a_stream_of_ones_own() -> None:
    """As when a checkpoint from the middle of an epoch holds worker 0's state only: noise must not be shared."""
    results = {}
    weight, sampler = make(SGLD, stream=0)
    walk(weight, sampler, 3)
    saved, at = sampler.state_dict(), weight.detach().clone()
    for stream in (0, 1, 2, 1):
        other, again = make(SGLD, stream=stream)
        fresh = walk(*make(SGLD, stream=stream), 5) - 1
        other.data.copy_(at)
        again.load_state_dict(saved)
        moved = walk(other, again, 5)
        assert torch.equal(moved, results.setdefault(stream, moved))
        assert not torch.allclose(moved - at, fresh, atol=1e-3), "the noise of the run's beginning would come again"
    assert len({tuple(moved.tolist()) for moved in results.values()}) == 3


def test_streams_and_seeds_differ_and_repeat() -> None:
    first = {(seed, stream): walk(*make(SGLD, seed=seed, stream=stream), 3) for seed in (1, 2) for stream in (0, 1, 2)}
    assert len({tuple(w.tolist()) for w in first.values()}) == 6
    for (seed, stream), expected in first.items():
        assert torch.equal(walk(*make(SGLD, seed=seed, stream=stream), 3), expected)


def test_streams_are_not_correlated() -> None:
    noise = torch.stack([walk(*make(SGLD, 20_000, lr=0.5, stream=k), 1) for k in range(4)])
    assert (torch.corrcoef(noise) - torch.eye(4)).abs().max() < 0.03


def test_a_workers_rank_is_taken_unless_the_user_has_given_a_stream() -> None:
    by_rank = make(SGLD)
    by_rank[1].state_dict()  # looks at the stream, and draws nothing from it
    by_rank[1].use_stream(2)
    assert torch.equal(walk(*by_rank, 3), walk(*make(SGLD, stream=2), 3))
    by_user = make(SGLD, stream=1)
    by_user[1].use_stream(2)
    assert torch.equal(walk(*by_user, 3), walk(*make(SGLD, stream=1), 3))


def test_without_a_seed_torchs_decides_and_two_samplers_differ() -> None:
    def two() -> list[torch.Tensor]:
        torch.manual_seed(5)
        return [walk(*make(SGLD, seed=None), 3) for _ in range(2)]

    first, again = two(), two()
    assert not torch.equal(*first)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_generator_is_drawn_from_and_its_state_saved() -> None:
    generator = torch.Generator().manual_seed(4)
    weight, sampler = make(SGLD, seed=None, generator=generator)
    sampler.use_stream(3)
    before = generator.get_state()
    saved = sampler.state_dict()
    first = walk(weight, sampler, 2)
    assert not torch.equal(generator.get_state(), before)
    sampler.load_state_dict(saved)
    weight.data.fill_(1.0)
    assert torch.equal(walk(weight, sampler, 2), first)


def test_a_stream_continues_where_it_was_if_it_is_known_after_the_state() -> None:
    weight, sampler = make(SGLD)
    sampler.use_stream(2)
    walk(weight, sampler, 3)
    saved, begins = sampler.state_dict(), weight.data.clone()
    expected = walk(weight, sampler, 3)
    for stream in (2, 1):
        again, other = make(SGLD)
        other.load_state_dict(saved)
        other.use_stream(stream)
        again.data.copy_(begins)
        assert torch.equal(walk(again, other, 3), expected) is (stream == 2)


def test_workers_with_generators_that_load_one_state_draw_different_noise() -> None:
    saved, found = make(SGLD, seed=None, generator=torch.Generator().manual_seed(100))[1].state_dict(), []
    for rank in range(3):
        weight, sampler = make(SGLD, seed=None, generator=torch.Generator().manual_seed(100 + rank))
        sampler.use_stream(rank)
        sampler.load_state_dict(saved)
        found.append(tuple(walk(weight, sampler, 2).tolist()))
    assert len(set(found)) == 3


def test_a_state_without_a_stream_is_taken() -> None:
    weight, sampler = make(SGHMC)
    plain = sampler.state_dict()
    del plain["rng"]
    sampler.load_state_dict(plain)
    walk(weight, sampler, 1)


@pytest.mark.parametrize("cls", SAMPLERS)
def test_parameters_without_gradient_rest_and_odd_ones_move(cls: Any) -> None:
    still, sparse, complex_ = (Parameter(torch.ones(2, 2)), Parameter(torch.ones(2, 2)), Parameter(torch.ones(2) + 0j))
    sampler = cls([still, sparse, complex_], lr=1e-3, num_data=N, seed=1)
    sparse.grad = torch.ones(2, 2).to_sparse()
    complex_.grad = torch.ones(2) + 0j
    sampler.step()
    assert torch.equal(still, torch.ones(2, 2))
    assert (sparse != 1).all()
    assert (complex_.imag != 0).all()


def test_a_closure_is_called_with_gradients() -> None:
    weight, sampler = make(SGLD)

    def closure() -> float:
        sampler.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss.item()

    assert sampler.step(closure) == 5.0
    assert sampler.step() is None


def test_a_scheduler_changes_the_step() -> None:
    weight, sampler = make(SGLD)
    scheduler = torch.optim.lr_scheduler.StepLR(sampler, 1, gamma=0.0)
    walk(weight, sampler, 1)
    scheduler.step()
    before = weight.detach().clone()
    assert torch.equal(walk(weight, sampler, 3), before)


@pytest.mark.parametrize(
    ("cls", "settings", "text"),
    [
        (SGLD, {"lr": -1.0}, r"SGLD\(lr\)=-1.0. Expected a number of at least 0"),
        (SGLD, {"lr": float("nan")}, r"SGLD\(lr\)=nan"),
        (SGLD, {"num_data": 0}, r"SGLD\(num_data\)=0. Expected a number of at least 1"),
        (SGLD, {"num_data": None}, r"SGLD\(num_data\)=None"),
        (SGLD, {"weight_decay": -1}, r"SGLD\(weight_decay\)=-1"),
        (SGLD, {"temperature": "hot"}, r"SGLD\(temperature\)='hot'"),
        (SGLD, {"seed": 1.5}, r"SGLD\(seed\)=1.5. Expected a whole number"),
        (SGLD, {"stream": True}, r"SGLD\(stream\)=True. Expected a whole number"),
        (SGLD, {"generator": torch.Generator()}, r"given a generator beside seed=1"),
        (PSGLD, {"alpha": 1.0}, r"PSGLD\(alpha\)=1.0. Expected a number below 1"),
        (PSGLD, {"alpha": 2.0}, r"PSGLD\(alpha\)=2.0. Expected a number from 0 to 1"),
        (PSGLD, {"eps": 0}, r"PSGLD\(eps\)=0"),
        (SGHMC, {"friction": 0}, r"SGHMC\(friction\)=0"),
        (SGHMC, {"friction": 1.1}, r"SGHMC\(friction\)=1.1. Expected a number from 0 to 1"),
    ],
)
def test_misuse_is_refused_by_name(cls: Any, settings: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make(cls, **settings)
