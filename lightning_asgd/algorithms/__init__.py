"""The update rules: pure tensor functions without network, threads, clock or Lightning."""

from __future__ import annotations

from typing import Any

from lightning_asgd.algorithms.averaging import LocalSGD
from lightning_asgd.algorithms.dana import DANASlim
from lightning_asgd.algorithms.decoupled_diloco import DecoupledDiLoCo, Quorum
from lightning_asgd.algorithms.diloco import DelayedNesterov, DiLoCo, StreamingDiLoCo
from lightning_asgd.algorithms.downpour import Downpour
from lightning_asgd.algorithms.elastic import EAMSGD, EASGD
from lightning_asgd.algorithms.hogwild import Hogwild
from lightning_asgd.algorithms.layerwise import LayerWise
from lightning_asgd.algorithms.merging import RadialDirectional
from lightning_asgd.algorithms.recipes import recipe
from lightning_asgd.algorithms.rounds import Barrier, WarmStart
from lightning_asgd.algorithms.sgmcmc import SGMCMC, ElasticSGMCMC
from lightning_asgd.algorithms.sparse_loco import SparseLoCo
from lightning_asgd.algorithms.staleness import (
    DelayCompensation,
    DropStale,
    DynamicSteps,
    GapAware,
    Rennala,
    ScaleByStaleness,
    SoftSync,
    StalenessAware,
    StaleSynchronous,
)
from lightning_asgd.core.algorithms.asgd import ASGD
from lightning_asgd.core.algorithms.base import Algorithm, Transform
from lightning_asgd.core.foundation.validation import by_name

__all__ = [
    "ASGD",
    "EAMSGD",
    "EASGD",
    "SGMCMC",
    "Algorithm",
    "Barrier",
    "DANASlim",
    "DecoupledDiLoCo",
    "DelayCompensation",
    "DelayedNesterov",
    "DiLoCo",
    "Downpour",
    "DropStale",
    "DynamicSteps",
    "ElasticSGMCMC",
    "GapAware",
    "Hogwild",
    "LayerWise",
    "LocalSGD",
    "Quorum",
    "RadialDirectional",
    "Rennala",
    "ScaleByStaleness",
    "SoftSync",
    "SparseLoCo",
    "StaleSynchronous",
    "StalenessAware",
    "StreamingDiLoCo",
    "Transform",
    "WarmStart",
    "find",
    "recipe",
]

_NAMED: dict[str, type[Algorithm]] = {
    "asgd": ASGD,
    "dana_slim": DANASlim,
    "decoupled_diloco": DecoupledDiLoCo,
    "delayed_nesterov": DelayedNesterov,
    "diloco": DiLoCo,
    "downpour": Downpour,
    "eamsgd": EAMSGD,
    "easgd": EASGD,
    "elastic_sgmcmc": ElasticSGMCMC,
    "hogwild": Hogwild,
    "layerwise": LayerWise,
    "local_sgd": LocalSGD,
    "sparse_loco": SparseLoCo,
    "streaming_diloco": StreamingDiLoCo,
    "sgmcmc": SGMCMC,
}


def find(algorithm: Any = None) -> Algorithm:
    """The algorithm that a user means.

    Args:
        algorithm: an algorithm, the name of one with its defaults, or None for :class:`ASGD`.

    Raises:
        ConfigurationError: there is no such algorithm.
    """
    found = by_name("algorithm", "asgd" if algorithm is None else algorithm, _NAMED, Algorithm, "ASGD()")
    made: Algorithm = found() if isinstance(found, type) else found
    return made
