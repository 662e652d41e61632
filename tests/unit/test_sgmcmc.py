"""Sampling from a posterior that is known: the mean of a Gaussian, from data and a Gaussian prior.

2000 independent coordinates at once, each with data of its own, make one sample tell the variance to 3 %. The workers
take turns in a fixed order, one step each, so every push is N - 1 versions stale.
"""

from __future__ import annotations

import doctest
import importlib
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_asgd import Advanced, algorithms
from lightning_asgd.algorithms import (
    ASGD,
    SGMCMC,
    Algorithm,
    DropStale,
    DynamicSteps,
    ElasticSGMCMC,
    GapAware,
    Rennala,
    ScaleByStaleness,
    SoftSync,
    StaleSynchronous,
    WarmStart,
)
from lightning_asgd.algorithms.rounds import Barrier
from lightning_asgd.core.algorithms.base import Push, Run, Transform
from lightning_asgd.core.foundation.errors import ConfigurationError, ProtocolError
from lightning_asgd.core.worker.exchanger import Exchanger
from lightning_asgd.core.worker.synchronizer import run
from lightning_asgd.fragments.fragments import kept_samples
from lightning_asgd.sampling.messages import Samples
from lightning_asgd.sampling.optim import PSGLD, SGHMC, SGLD, PosteriorSampler
from lightning_asgd.sampling.posterior import averaged_prediction
from tests.helpers.cluster import SESSION, Cluster

COORDINATES, NUM_DATA, PRIOR = 2000, 20, 5.0
PRECISION = NUM_DATA + PRIOR  # of the posterior; a datum's is 1
DATA = 1 + torch.randn(NUM_DATA, COORDINATES, generator=torch.Generator().manual_seed(1))
MEAN = DATA.sum(0) / PRECISION


@dataclass
class Found:
    """What the samples say, in units of the posterior's standard deviation."""

    samples: list[Tensor]

    @property
    def z(self) -> Tensor:
        return (torch.stack(self.samples) - MEAN) * PRECISION**0.5

    @property
    def bias(self) -> float:
        """The mean's, in standard errors; these are told from the coordinates, since samples are correlated."""
        mean = self.z.mean(0)
        return float(mean.mean() / mean.std() * COORDINATES**0.5)

    @property
    def variance_ratio(self) -> float:
        return float(self.z.square().mean())

    @property
    def predictive_loss(self) -> float:
        """Nats per coordinate that the samples' predictive density loses beside as many exact samples.

        Predicted is an observation whose noise is as large as the posterior's standard deviation.
        """
        draw = torch.Generator().manual_seed(4)
        y = 2**0.5 * torch.randn(1000, COORDINATES, generator=draw)
        exact = torch.randn(len(self.samples), COORDINATES, generator=draw)

        def density(samples: Tensor) -> float:
            logs = torch.stack([-0.5 * (y - z).square() for z in samples])
            return float((logs.logsumexp(0)).mean())

        return density(exact) - density(self.z)


def sample(
    workers: int,
    nsync: int,
    algorithm: Algorithm,
    sampler: type[PosteriorSampler] = SGLD,
    *,
    steps: int,
    batch: int = 10,
    servers: int = 1,
    **settings: Any,
) -> Found:
    """Let the workers take ``steps`` optimizer steps together, from a bad start."""
    cluster = Cluster(servers, workers)
    weights = [(MEAN + 2 * PRECISION**-0.5).requires_grad_() for _ in range(workers)]
    samplers = [
        sampler([w], num_data=NUM_DATA, weight_decay=PRIOR, seed=2, stream=rank, **settings)  # type: ignore[call-arg]
        for rank, w in enumerate(weights)
    ]
    for optimizer in samplers:
        optimizer.use_chains(algorithm.chains(workers))
    lr = settings["lr"]
    exchangers = [
        cluster.enter(rank, {"w": w}, nsync=nsync, algorithm=algorithm, advanced=Advanced(overlap=False), lr=lambda: lr)
        for rank, w in enumerate(weights)
    ]
    shuffle = random.Random(3)
    means = DATA.view(-1, batch, COORDINATES).mean(1)
    for exchanger in exchangers:
        run(exchanger.begin())
    for _ in range(steps // workers):
        for w, optimizer, exchanger in zip(weights, samplers, exchangers, strict=True):
            run(exchanger.advance())
            w.grad = w.detach() - means[shuffle.randrange(len(means))]  # of the mean loss over the batch
            optimizer.step()
            exchanger.count_step()
    return Found([s["w"] for s in collected(exchangers[0]).values()])


def collected(exchanger: Exchanger) -> dict[int, dict[str, Tensor]]:
    (channel,) = exchanger.channels
    return {version: channel.replica.read(shards) for version, shards in kept_samples(channel.shards.connection)}


def plan(workers: int, nsync: int, rate: float, cls: Any = SGMCMC, samples: int = 8, **settings: Any) -> Any:
    """An algorithm that burns in for 6 times the time in which the chain forgets, and samples every twice this time.

    ``rate`` is what one step does to a deviation from the mean; each of the workers' steps counts.
    """
    once = 1 / (rate * nsync)  # in versions
    burn_in, thin = round(6 * once), round(2 * once)
    rule = cls(burn_in=burn_in, thin=thin, max_samples=samples, **settings)
    return rule, (burn_in + thin * samples + workers) * nsync


# ---------------------------------------------------------------------- the posterior

# The rates keep the pushes of others that a step does not see, up to (workers - 1) * nsync steps, below 4 % of the time
# in which the chain forgets: that is the bias of the variance, beside half a rate of the discretisation.
RATES = {(1, 1): 0.04, (1, 10): 0.04, (4, 1): 0.015, (4, 10): 0.0013}


@pytest.mark.parametrize(
    ("workers", "nsync"), [pytest.param(*k, marks=[pytest.mark.slow] if k == (4, 10) else []) for k in RATES]
)
def test_mean_and_variance_are_the_posteriors(workers: int, nsync: int) -> None:
    rate = RATES[workers, nsync]
    rule, steps = plan(workers, nsync, rate)
    found = sample(workers, nsync, rule, lr=rate / PRECISION, steps=steps)
    assert len(found.samples) == 8
    assert abs(found.bias) < 3
    assert 0.9 < found.variance_ratio < 1.1
    assert abs(found.predictive_loss) < 0.02


def test_momentum_samples_the_same_posterior() -> None:
    rate, friction = 0.0016, 0.2
    rule, steps = plan(4, 10, rate, samples=5)
    found = sample(4, 10, rule, SGHMC, lr=rate * friction / PRECISION, friction=friction, steps=steps)
    assert abs(found.bias) < 3
    assert 0.9 < found.variance_ratio < 1.1


@pytest.mark.slow
def test_preconditioning_samples_the_same_posterior() -> None:
    """V is averaged over more steps than the chain takes to forget, so that it does not follow the weights."""
    rate = 0.004
    rule, steps = plan(4, 1, rate, samples=5)
    found = sample(4, 1, rule, PSGLD, lr=rate / PRECISION, alpha=0.999, batch=2, steps=steps)
    assert abs(found.bias) < 3
    assert 0.9 < found.variance_ratio < 1.1


def test_staleness_makes_samples_too_wide() -> None:
    """About 1 + rate * steps that are not seen: what the docstring warns of."""
    rule, steps = plan(4, 10, 0.008)
    found = sample(4, 10, rule, lr=0.008 / PRECISION, steps=steps)
    assert 1.1 < found.variance_ratio < 1.6


@dataclass(frozen=True)
class Averaging(ASGD):
    """The mistake: the same samples of a server that adds 1 / N of every push."""

    burn_in: int = 0
    thin: int = 1
    max_samples: int = 10
    keeps = SGMCMC.keeps
    keep_at_most = SGMCMC.keep_at_most


def test_averaging_pushes_would_give_too_little_variance() -> None:
    rate = 0.02
    rule, steps = plan(4, 4, rate / 4, Averaging, samples=8)  # its mean moves four times as slowly
    assert rule.scale == "mean"
    found = sample(4, 4, rule, lr=rate / PRECISION, steps=steps)
    assert len(found.samples) == 8
    assert abs(found.bias) < 3
    assert 0.2 < found.variance_ratio < 0.3
    assert found.predictive_loss > 0.025


def test_equal_noise_on_all_workers_would_give_too_much_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why random streams must differ."""
    monkeypatch.setattr(PosteriorSampler, "_number", 0)
    rate = 0.008
    rule, steps = plan(4, 4, rate, samples=3)
    assert 3 < sample(4, 4, rule, lr=rate / PRECISION, steps=steps).variance_ratio < 5


# The spring's weakness widens the samples by rate * workers * nsync / beta, 4 % here. The centre moves as fast as one
# worker's chain, and lags behind the workers: hence the rate divided by one more than there are workers.
ELASTIC = {(1, 2): 0.012, (2, 2): 0.008, (4, 4): 0.002}


@pytest.mark.parametrize(
    ("workers", "nsync"), [pytest.param(*k, marks=[] if k == (2, 2) else [pytest.mark.slow]) for k in ELASTIC]
)
def test_the_elastic_centre_samples_the_posterior(workers: int, nsync: int) -> None:
    rate = ELASTIC[workers, nsync]
    rule, steps = plan(workers, nsync, rate / (workers + 1), ElasticSGMCMC)
    found = sample(workers, nsync, rule, lr=rate / PRECISION, steps=steps)
    assert len(found.samples) == 8
    assert abs(found.bias) < 3
    assert 0.9 < found.variance_ratio < 1.12
    assert abs(found.predictive_loss) < 0.02


def test_the_centres_noise_repeats_itself_and_differs_between_pushes() -> None:
    def pushed(seq: int, value: float = 1.0) -> Tensor:
        shard, update = torch.zeros(50), torch.full((50,), value)
        ElasticSGMCMC().apply(shard, update, {}, Push(seq=seq, lr=0.5))
        return shard - shard.mean()

    assert torch.equal(pushed(1), pushed(1))
    for other in (pushed(2), pushed(1, 2.0)):
        assert float((pushed(1) * other).mean()) < 0.5
    assert 0.5 < float(pushed(1).std()) < 1.5


# ---------------------------------------------------------------------- samples


def push_ones(exchanger: Exchanger, weight: Tensor, times: int) -> None:
    for _ in range(times):
        weight.data += 1
        exchanger.count_step()
        run(exchanger.advance())


@pytest.mark.parametrize("cls", [SGMCMC, ElasticSGMCMC])
@pytest.mark.parametrize("servers", [1, 3])
def test_burn_in_thinning_and_bound_are_exact(cls: Any, servers: int) -> None:
    weight, other = torch.zeros(7, requires_grad=True), torch.zeros(2, dtype=torch.float64)
    rule = cls(burn_in=4, thin=3, max_samples=2)
    exchanger = Cluster(servers).enter(
        0, {"w": weight, "b": other}, nsync=1, algorithm=rule, advanced=Advanced(overlap=False)
    )
    run(exchanger.begin())
    seen = {}
    for version in range(1, 15):
        push_ones(exchanger, weight, 1)
        seen[version] = exchanger.peek()
        expected = [v for v in (7, 10, 13) if v <= version][-2:]
        assert list(collected(exchanger)) == expected
    for version, state in collected(exchanger).items():
        assert state.keys() == {"w", "b"}
        assert all(torch.equal(state[name], seen[version][name]) for name in state)


def test_samples_that_not_all_servers_have_are_left_out() -> None:
    cluster = Cluster(2)
    weight = torch.zeros(6, requires_grad=True)
    rule = SGMCMC(burn_in=0, thin=2, max_samples=3)
    exchanger = cluster.enter(0, {"w": weight}, nsync=1, algorithm=rule, advanced=Advanced(overlap=False))
    run(exchanger.begin())
    push_ones(exchanger, weight, 3)
    weight.data[0] = torch.nan  # one server refuses its part
    push_ones(exchanger, weight, 1)
    assert cluster.versions() == [3, 4]
    push_ones(exchanger, weight, 1)
    assert [len(s.session.shards[0].samples) for s in cluster.services] == [2, 2]
    assert list(collected(exchanger)) == [2, 4]
    push_ones(exchanger, weight, 3)
    assert list(collected(exchanger)) == [4, 6]  # the second server has dropped version 2 for version 8


def test_no_other_algorithm_keeps_samples() -> None:
    for name in sorted(set(algorithms._NAMED) - {"sgmcmc", "elastic_sgmcmc"}):
        rule = algorithms.find(name)
        assert not any(rule.keeps(version) for version in range(3000))
        assert rule.keep_at_most == 0


def test_samples_of_another_session_are_refused() -> None:
    cluster = Cluster()
    weight = torch.zeros(2)
    exchanger = cluster.enter(0, {"w": weight}, nsync=1, algorithm=SGMCMC())
    assert kept_samples(exchanger.channels[0].shards.connection) == []
    exchanger.client.connection.session = "another"
    with pytest.raises(ProtocolError, match="Session 'another' is not the current one"):
        kept_samples(exchanger.channels[0].shards.connection)
    client = cluster.client()
    client.join()
    assert cluster.transport.call(0, Samples(SESSION, 0), 1.0).wait() == []


# ---------------------------------------------------------------------- misuse


@pytest.mark.parametrize("cls", [SGMCMC, ElasticSGMCMC])
@pytest.mark.parametrize(
    "transform",
    [ScaleByStaleness(), DropStale(3), GapAware(), SoftSync(2), Rennala(2), Barrier(), WarmStart(5), WarmStart(0)],
    ids=repr,
)
def test_what_changes_or_averages_pushes_is_refused(cls: Any, transform: Transform) -> None:
    with pytest.raises(ConfigurationError, match=rf"{type(transform).__name__} cannot be used with {cls.__name__}"):
        cls(transforms=[transform])


@pytest.mark.parametrize("cls", [SGMCMC, ElasticSGMCMC])
def test_what_leaves_pushes_as_they_are_is_taken(cls: Any) -> None:
    assert len(cls(transforms=[StaleSynchronous(2), DynamicSteps()]).transforms) == 2
    with pytest.raises(ConfigurationError, match="was given the transform 'mean'"):
        cls(transforms=["mean"])


@pytest.mark.parametrize("name", ["sgmcmc", "elastic_sgmcmc"])
def test_there_is_no_scale(name: str) -> None:
    with pytest.raises(TypeError, match="scale"):
        type(algorithms.find(name))(scale="mean")  # type: ignore[call-arg]


@pytest.mark.parametrize("cls", [SGMCMC, ElasticSGMCMC])
def test_an_optimizer_without_noise_is_refused(cls: Any) -> None:
    weight = [torch.zeros(1, requires_grad=True)]
    for sampler in (SGLD,) if cls is ElasticSGMCMC else (SGLD, PSGLD, SGHMC):
        cls().check(Run(4, optimizers=(sampler(weight, lr=0.1, num_data=1),)))
    with pytest.raises(ConfigurationError, match=rf"{cls.__name__} was given the optimizer Adam, which adds no noise"):
        cls().check(Run(4, optimizers=(SGLD(weight, lr=0.1, num_data=1), torch.optim.Adam(weight))))


def test_the_elastic_centre_needs_a_sampler_whose_noise_it_knows() -> None:
    weight = [torch.zeros(1, requires_grad=True)]
    for optimizer in (SGHMC(weight, lr=0.1, num_data=1), SGLD(weight, lr=0.1, num_data=1, temperature=0.5)):
        with pytest.raises(ConfigurationError, match="Expected SGLD with temperature=1"):
            ElasticSGMCMC().check(Run(4, optimizers=(optimizer,)))


@pytest.mark.parametrize("cls", [SGMCMC, ElasticSGMCMC])
@pytest.mark.parametrize(
    ("setting", "value"),
    [("burn_in", -1), ("burn_in", 1.5), ("thin", 0), ("thin", "often"), ("max_samples", 0), ("max_samples", None)],
)
def test_settings_out_of_range_are_named(cls: Any, setting: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"{cls.__name__}\({setting}\)={value!r}. Expected a whole number"):
        cls(**{setting: value})


def test_the_springs_settings_are_checked_too() -> None:
    with pytest.raises(ConfigurationError, match=r"ElasticSGMCMC\(beta\)=1.5"):
        ElasticSGMCMC(1.5)
    with pytest.raises(ConfigurationError, match=r"ElasticSGMCMC\(alpha=0.5\) with 4 workers"):
        ElasticSGMCMC(alpha=0.5).check(Run(4))


# ---------------------------------------------------------------------- predictions


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.5)
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        out: Tensor = self.last(self.drop(self.norm(self.first(x)))) * scale
        return out


def test_predictions_are_averaged_and_nothing_is_changed() -> None:
    torch.manual_seed(0)
    nets = [Net() for _ in range(3)]
    samples = [{k: v.clone() for k, v in net.state_dict().items()} for net in nets]
    x = torch.randn(5, 3)
    module = Net()
    module.norm.eval()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    copies = [{k: v.clone() for k, v in s.items()} for s in samples]

    mean = averaged_prediction(module, samples, x, scale=2.0)
    expected = torch.stack([net.eval()(x, scale=2.0) for net in nets]).mean(0)
    assert torch.allclose(mean, expected, atol=1e-6)
    assert not mean.requires_grad

    probabilities = averaged_prediction(module, samples, x, transform=lambda out: out.softmax(-1))
    expected = torch.stack([net(x).softmax(-1) for net in nets]).mean(0)
    assert torch.allclose(probabilities, expected, atol=1e-6)

    assert module.training
    assert module.drop.training
    assert not module.norm.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    for sample_, copy in zip(samples, copies, strict=True):
        assert all(torch.equal(sample_[name], copy[name]) for name in copy)


def test_tensors_that_a_sample_does_not_name_are_the_modules_own() -> None:
    layer = torch.nn.Linear(1, 1)
    layer.bias.data.fill_(5.0)
    weights = [{"weight": torch.tensor([[float(k)]])} for k in (1, 2)]
    assert averaged_prediction(layer, weights, torch.ones(1, 1)).item() == 6.5


def test_misused_predictions_are_refused() -> None:
    module = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigurationError, match="given no samples"):
        averaged_prediction(module, [], torch.ones(1, 1))
    with pytest.raises(ConfigurationError, match="names 'wieght', which Linear does not have"):
        averaged_prediction(module, [{"wieght": torch.ones(1, 1)}], torch.ones(1, 1))
    assert module.training


@pytest.mark.parametrize("module", ["algorithms.sgmcmc", "sampling.posterior"])
def test_examples_in_the_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"lightning_asgd.{module}"))
    assert result.attempted >= 3
    assert result.failed == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_of_many_outputs_of_16_bits(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(1, 1, bias=False).to(dtype)
    samples = [{"weight": torch.full((1, 1), 0.5, dtype=dtype)}] * 1000
    found = averaged_prediction(layer, samples, torch.ones(1, 1, dtype=dtype))
    assert (found.dtype, found.item()) == (dtype, 0.5)
    votes = averaged_prediction(
        layer, samples[:2], torch.ones(1, 1, dtype=dtype), transform=lambda output: torch.tensor([1, 0])
    )
    assert votes.tolist() == [1.0, 0.0]
