"""Recipes: the settings of published systems are accepted, and train."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_asgd.algorithms import ASGD, EASGD, DropStale, LocalSGD, StaleSynchronous, recipe
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.errors import ConfigurationError

NAMES: dict[str, tuple[Any, int, bool]] = {
    "sparknet": (LocalSGD(), 50, False),
    "sparknet_cifar10": (LocalSGD(), 10, False),
    "speedo": (ASGD("sum"), 1, False),
    "speedo_sync": (LocalSGD(), 1, False),
    "speedo_partially_sync": (ASGD("sum", transforms=[StaleSynchronous(2)]), 1, False),
    "speedo_weed_out": (ASGD("sum", transforms=[DropStale(8)]), 1, False),
    "speedo_easgd": (EASGD(), 1, False),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_a_configuration(name: str) -> None:
    config = ExchangeConfig.create(**recipe(name))
    assert (config.algorithm, config.nfetch, config.overlap) == NAMES[name]
    assert config.npush == config.nfetch


def test_an_unknown_recipe_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigurationError, match="no recipe 'spark'") as error:
        recipe("spark")
    assert all(name in str(error.value) for name in NAMES)
