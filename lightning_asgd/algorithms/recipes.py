"""Settings of published systems, by name: ``ASGDStrategy(**recipe("sparknet"))``.

SparkNet: workers take a number of steps, a driver averages their weights. Its programs use 50 steps for ImageNet
(later 5) and 10 for CIFAR-10.

SpeeDO: a master merges what each worker changed in one mini-batch (``--train``, default 1); the worker waits for it.
Its five models are asynchronous, synchronous (``--sync``), partially synchronous (``--maxAdvance``), weed-out
(``--weedout``) and elastic averaging (``--movingRate``).

References:
    P. Moritz, R. Nishihara, I. Stoica, M. Jordan, "SparkNet: Training Deep Networks in Spark", ICLR 2016 (arXiv
    1511.06051), and its programs ``ImageNetApp``, ``AlexNetMultiGPUApp`` and ``CifarApp`` (amplab/SparkNet).
    Z. Zheng, W. Jiang, G. Wu, E. Chang, "SpeeDO: Parallelizing Stochastic Gradient Descent for Deep Convolutional
    Neural Network", NIPS workshop on machine learning systems 2015, and the documentation of its source.

Departures:
    Learning rates and batch sizes are yours: the systems take them from Caffe's files. SpeeDO's partially synchronous
    master, once workers are ``maxAdvance`` apart, stops them all until the others have trained once more; here only the
    fast worker waits. Its weed-out master counts every push that has arrived since a worker's last one; here dropped
    pushes do not count. Its example ``--movingRate 0.5`` with three workers exceeds what is stable, which is refused
    here: the moving rate is 0.9 divided by the number of workers, as in the paper on elastic averaging.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_asgd.algorithms.averaging import LocalSGD
from lightning_asgd.algorithms.elastic import EASGD
from lightning_asgd.algorithms.staleness import DropStale, StaleSynchronous
from lightning_asgd.core.algorithms.asgd import ASGD
from lightning_asgd.core.algorithms.base import Algorithm
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.settings import Advanced

_PERIODS = {"sparknet": 50, "sparknet_cifar10": 10}

_SPEEDO: dict[str, Callable[[], Algorithm]] = {
    "speedo": lambda: ASGD("sum"),
    "speedo_sync": LocalSGD,
    "speedo_partially_sync": lambda: ASGD("sum", transforms=[StaleSynchronous(2)]),
    "speedo_weed_out": lambda: ASGD("sum", transforms=[DropStale(8)]),
    "speedo_easgd": EASGD,
}


def recipe(name: str) -> dict[str, Any]:
    """Arguments of :class:`~lightning_asgd.ASGDStrategy` with the settings of a published system.

    Args:
        name: ``"sparknet"``, ``"sparknet_cifar10"``, ``"speedo"``, ``"speedo_sync"``, ``"speedo_partially_sync"``,
            ``"speedo_weed_out"`` or ``"speedo_easgd"``.

    Returns:
        ``algorithm``, ``nsync``, and for SpeeDO ``advanced=Advanced(overlap=False)``.

    Raises:
        ConfigurationError: there is no such recipe.

    Example:
        >>> recipe("sparknet")
        {'algorithm': LocalSGD(transforms=(), post=0), 'nsync': 50}
    """
    if name in _PERIODS:
        return {"algorithm": LocalSGD(), "nsync": _PERIODS[name]}
    if name in _SPEEDO:
        return {"algorithm": _SPEEDO[name](), "nsync": 1, "advanced": Advanced(overlap=False)}
    raise ConfigurationError(f"There is no recipe {name!r}. Expected one of {', '.join([*_PERIODS, *_SPEEDO])}.")
