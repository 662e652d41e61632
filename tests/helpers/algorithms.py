"""Every algorithm, and what it is combined with, for batteries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_asgd import algorithms
from lightning_asgd.algorithms import (
    ASGD,
    Algorithm,
    Barrier,
    DelayCompensation,
    DelayedNesterov,
    Downpour,
    DropStale,
    DynamicSteps,
    ElasticSGMCMC,
    GapAware,
    Hogwild,
    LayerWise,
    Rennala,
    ScaleByStaleness,
    SoftSync,
    StalenessAware,
    StaleSynchronous,
    WarmStart,
)
from lightning_asgd.core.algorithms.base import Push

__all__ = ["EVERY", "ON_SERVERS", "SUM_OF_ROUND"]


@dataclass(frozen=True)
class SumOfRound(ASGD):
    """Adds the updates that were aggregated, of batches of the same size, not their mean."""

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        weights.add_(update, alpha=push.count)


SUM_OF_ROUND = SumOfRound(transforms=[Barrier()])

EVERY: dict[str, Algorithm] = {
    **{name: cls() for name, cls in algorithms._NAMED.items()},
    "elastic_sgmcmc": ElasticSGMCMC(temperature=1e-6),  # nearly without noise
    "downpour_adagrad": Downpour("adagrad", lr=0.1),
    "downpour_adadelta": Downpour("adadelta", accrued="mean"),
    "downpour_adam": Downpour("adam", lr=0.01),
    "downpour_dc": Downpour("sgd", lr=0.1, transforms=[DelayCompensation()]),
    "downpour_dc_adaptive": Downpour("sgd", lr=0.1, transforms=[DelayCompensation(2.0, adaptive=True)]),
    "scaled": ASGD(transforms=[ScaleByStaleness()]),
    "staleness_aware": ASGD(transforms=[StalenessAware()]),
    "gap_aware": ASGD("sum", transforms=[GapAware()]),
    "ringmaster": ASGD(transforms=[DropStale(3)]),
    "softsync": ASGD(transforms=[SoftSync(2), StalenessAware()]),
    "rennala": ASGD("sum", transforms=[Rennala(2)]),
    "ssp": ASGD(transforms=[StaleSynchronous(1)]),
    "warm": ASGD("sum", transforms=[WarmStart(3)]),
    "dylu": DelayedNesterov(lr=0.3, transforms=[DynamicSteps()]),
    "hogwild_copies": Hogwild(copies=True),
    "layerwise_delayed": LayerWise(delay=2),
}

ON_SERVERS = {name: rule for name, rule in EVERY.items() if not isinstance(rule, (Hogwild, LayerWise))}
"""Those whose weights lie on servers."""
