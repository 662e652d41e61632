"""Every algorithm in real processes: two ranks, a server, Lightning; the same bits everywhere at sync points."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asgd import Advanced, ASGDStrategy
from lightning_asgd.algorithms import SGMCMC, ElasticSGMCMC, Hogwild, LayerWise, StreamingDiLoCo
from lightning_asgd.sampling.optim import SGHMC, SGLD
from tests.conformance.lab import STEPS, VARIANCE, Lab, loss_of
from tests.conformance.pair import DDP, Outcome, Pair
from tests.conformance.test_battery import check_same_bits
from tests.helpers.algorithms import EVERY

DEADLINE_S = 60.0
SLOW_LEARNERS = {"downpour_adadelta": 1.01, "diloco": 1.0, "delayed_nesterov": 1.0, "dylu": 1.0}  # in so few steps


def nesterov(self: Any) -> Any:
    return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5, nesterov=True)


def sampler(self: Any) -> Any:
    """The same, nearly without noise."""
    return SGHMC(self.parameters(), lr=self.lr, num_data=1, friction=0.5, temperature=1e-6)


def without_momentum(self: Any) -> Any:
    """As fast, for an algorithm that needs it."""
    return SGLD(self.parameters(), lr=2 * self.lr, num_data=1, temperature=1e-6)


def fit(lab: Lab, name: str, servers: int = 1) -> dict[str, Any]:
    algorithm = EVERY[name]
    nsync = 1 if name == "dana_slim" else 2
    strategy = ASGDStrategy(nsync=nsync, algorithm=algorithm, num_servers=servers)
    own = {SGMCMC: sampler, ElasticSGMCMC: without_momentum}.get(type(algorithm), nesterov)
    module = lab.regression(type("Own", (), {"configure_optimizers": own}))
    trainer = lab.fit(module, strategy=strategy, max_epochs=4)
    return {"loss": loss_of(module), "step": trainer.global_step, "pushes": strategy.stats.pushes}


# One of each kind; the others differ in pure functions, which other tests run over RPC too.
USUAL = {
    "downpour_adam",
    "dylu",
    "easgd",
    "hogwild",
    "layerwise",
    "local_sgd",
    "sgmcmc",
    "softsync",
    "ssp",
    "streaming_diloco",
}


SERVERS = {"easgd": 2, "layerwise": 2}  # one for all others


def names() -> list[Any]:
    """Those with the same servers one after the other: for other ones, or snapshots, a Trainer starts others."""
    ordered = sorted(EVERY, key=lambda name: (EVERY[name].keeps_state, SERVERS.get(name, 1), name))
    return [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.slow]) for name in ordered]


@pytest.mark.parametrize("name", names())
def test_every_algorithm_trains(name: str, pair: Pair, tmp_path: Path) -> None:
    outcomes = pair.run(partial(fit, name=name, servers=SERVERS.get(name, 1)), tmp_path, DEADLINE_S)
    for outcome in outcomes:
        assert not outcome.error, outcome.trace
        assert outcome.facts["step"] == 4 * STEPS
        assert outcome.facts["loss"] < SLOW_LEARNERS.get(name, 0.2) * VARIANCE
    check_same_bits(outcomes)
    alone = isinstance(EVERY[name], (Hogwild, LayerWise))
    assert all((outcome.facts["pushes"] == 0) == alone for outcome in outcomes)


def collect(lab: Lab, elastic: bool) -> dict[str, Any]:
    class Noisy:
        def configure_optimizers(self: Any) -> Any:
            return SGLD(self.parameters(), lr=1e-4, num_data=100)

    rule = (ElasticSGMCMC if elastic else SGMCMC)(burn_in=4, thin=3, max_samples=3)
    # So no exchange is deferred and no worker trains another one's data: on a busy machine there were too few samples.
    strategy = ASGDStrategy(nsync=4, algorithm=rule, num_servers=2, advanced=Advanced(overlap=False), data="split")
    module = lab.regression(Noisy)
    trainer = lab.fit(module, strategy=strategy, max_epochs=1)
    optimizer = strategy.optimizers[0]
    last = strategy.samples[-1] if strategy.samples else {}
    mine = {**dict(module.named_parameters()), **{n: b for n, b in module.named_buffers() if n in module.state_dict()}}
    result = {
        "samples": len(strategy.samples),
        "names": set(last) == set(mine),
        "finite": all(bool(torch.isfinite(v).all()) for s in strategy.samples for v in s.values()),
        "stream": optimizer.state_dict()["rng"]["stream"],
        "noise": optimizer._noise(torch.zeros(3)).tolist(),
    }
    lab.fit(module, strategy=ASGDStrategy(), max_epochs=1)
    return {**result, "again": len(trainer.strategy.samples)}


@pytest.mark.parametrize("elastic", [False, True])
def test_worker_0_gets_the_servers_samples_and_noise_differs(elastic: bool, pair: Pair, tmp_path: Path) -> None:
    outcomes = pair.run(partial(collect, elastic=elastic), tmp_path, DEADLINE_S)
    for outcome in outcomes:
        assert not outcome.error, outcome.trace
    zero, one = (outcome.facts for outcome in outcomes)
    assert zero["samples"] == zero["again"] == 3
    assert one["samples"] == 0
    assert zero["names"]
    assert zero["finite"]
    assert (zero["stream"], one["stream"]) == (0, 1)
    assert zero["noise"] != one["noise"]


class Attentive:
    """Attention, which uses the weights of a submodule that it never calls; a learning rate for every step."""

    def build(self: Any) -> None:
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        pair = x.view(-1, 2, 4)
        y: torch.Tensor = self.net(self.attention(pair, pair, pair)[0].flatten(1))
        return y

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit_plain(lab: Lab, asgd: bool, kind: type = object, **options: Any) -> dict[str, Any]:
    late: list[int] = []

    def note(self: Any, trainer: Any, *args: Any) -> None:
        late.append(len(vars(trainer.strategy.fit_session.synchronizer)["_called"] or ()))

    if asgd:
        options["strategy"] = ASGDStrategy(algorithm="layerwise")
        options["callbacks"] = [type("Noter", (lab.pl.Callback,), {"on_train_epoch_end": note})()]
    module = lab.regression(kind)
    lab.fit(module, **options)
    return {"weights": [p.detach().clone() for p in module.parameters()], "late": late}


@pytest.mark.parametrize(
    ("options", "late"),
    [
        ({}, 2),
        pytest.param({"gradient_clip_val": 0.5}, 0, marks=pytest.mark.slow),
        pytest.param({"accumulate_grad_batches": 3}, 2, marks=pytest.mark.slow),
        ({"kind": Attentive}, 3),  # two linear layers and the attention, but not its output layer
    ],
    ids=["plain", "clipped", "accumulated", "attentive"],
)
def test_layerwise_without_delay_has_the_bits_of_ddp(options: Any, late: int, pair: Pair, tmp_path: Path) -> None:
    ddp = Pair("pytorch_lightning", DDP)
    try:
        theirs = ddp.run(partial(fit_plain, asgd=False, **options), tmp_path, DEADLINE_S)
    finally:
        ddp.close()
    ours = pair.run(partial(fit_plain, asgd=True, **options), tmp_path, DEADLINE_S)
    assert all(outcome.facts.get("late", [None])[-1] == late for outcome in ours), ours[0].trace
    for mine, other in zip(weights(ours), weights(theirs), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def weights(outcomes: list[Outcome]) -> list[list[torch.Tensor]]:
    for outcome in outcomes:
        assert not outcome.error, outcome.trace
    return [outcome.facts["weights"] for outcome in outcomes]


LR = 0.05


def delayed(lab: Lab, delay: int, momentum: float, compensate: bool) -> dict[str, Any]:
    """SGD on one weight, f = w^2 / 2, whose gradients are those of ``delay`` steps ago."""

    class Scalar(lab.pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
            self.path: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.path.append(float(self.w))
            return (self.w**2).sum() / 2

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=LR, momentum=momentum)

    module = Scalar()
    strategy = ASGDStrategy(algorithm=LayerWise(delay, compensate))
    lab.trainer(strategy=strategy, max_epochs=1, limit_train_batches=10).fit(module, lab.loader())
    return {"path": module.path, "end": float(module.w), "lr": strategy.optimizers[0].param_groups[0]["lr"]}


@pytest.mark.parametrize(
    ("delay", "momentum", "compensate"),
    [(0, 0.9, True), (1, 0.0, False), (3, 0.9, False), (1, 0.9, True), (3, 0.9, True)],
)
def test_a_delayed_gradient_is_used_so_many_steps_later(
    delay: int, momentum: float, compensate: bool, pair: Pair, tmp_path: Path
) -> None:
    job = partial(delayed, delay=delay, momentum=momentum, compensate=compensate)
    outcomes = pair.run(job, tmp_path, DEADLINE_S)
    w, v, past, path = 1.0, 0.0, [], []
    for _ in range(10 + delay):  # nothing is lost at the end
        path.append(w)
        past.append(w)
        if len(past) > delay:
            gradient = past[-1 - delay]
            v = momentum * v + gradient
            if compensate and delay:
                a, b = momentum**delay, sum(momentum**i for i in range(delay))
                w -= LR / (delay + 1) * (a * v + b * gradient)
            else:
                w -= LR * v
    for outcome in outcomes:
        assert not outcome.error, outcome.trace
        assert outcome.facts["path"] == pytest.approx(path[:10], rel=1e-12)
        assert outcome.facts["end"] == pytest.approx(w, rel=1e-12)
        assert outcome.facts["lr"] == LR


def rounds(lab: Lab) -> dict[str, Any]:
    strategy = ASGDStrategy(nsync=2, algorithm="local_sgd")
    versions: list[int] = []

    def note(self: Any, trainer: Any, module: Any) -> None:
        versions.append(trainer.strategy.fit_session.synchronizer.versions[0])

    noter = type("Noter", (lab.pl.Callback,), {"on_train_epoch_end": note})()
    lab.fit(strategy=strategy, callbacks=[noter], max_epochs=3)  # a validation and an epoch's end: two sync points
    return {"versions": versions, "stale": strategy.stats.staleness_max, "per_epoch": STEPS // 2}


def test_workers_wait_for_each_other_again_after_two_sync_points_in_a_row(pair: Pair, tmp_path: Path) -> None:
    for outcome in pair.run(rounds, tmp_path, DEADLINE_S):
        assert not outcome.error, outcome.trace
        per_epoch = outcome.facts["per_epoch"]
        assert outcome.facts["versions"] == [per_epoch, 2 * per_epoch, 3 * per_epoch]
        assert outcome.facts["stale"] == 0


def stream(lab: Lab) -> dict[str, Any]:
    strategy = ASGDStrategy(
        nsync=8, algorithm=StreamingDiLoCo(parts=4, lr=1.0, momentum=0.0), advanced=Advanced(overlap=False)
    )
    module = lab.regression()
    lab.fit(module, strategy=strategy, max_epochs=1, limit_train_batches=24)
    records = [r for r in strategy.stats.records if r.local_steps == 8 and r.bytes_fetched]
    return {"steps": [r.step for r in records], "bytes": [r.bytes_pushed for r in records]}


def test_fragments_take_turns_and_share_the_traffic(pair: Pair, tmp_path: Path) -> None:
    for outcome in pair.run(stream, tmp_path, DEADLINE_S):
        assert not outcome.error, outcome.trace
        assert outcome.facts["steps"] == [8, 10, 12, 14, 16, 18, 20, 22]  # the first round comes 6, 4, 2, 0 steps early
        assert outcome.facts["bytes"] == [4, 512, 64, 64] * 2  # the regression's four tensors
