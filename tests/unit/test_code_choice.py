"""Which code ``compression="auto"`` takes, given what was measured."""

from __future__ import annotations

import math

import pytest

from lightning_asgd.algorithms import EASGD, SparseLoCo
from lightning_asgd.compression.codes import NO_CODE, CodeCost, LinkSpeed, choose_code, expected_s
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.errors import ConfigurationError

COSTS = [
    NO_CODE,
    CodeCost("bf16", 2e-9, 2.0, 2.0),
    CodeCost("int8", 8e-9, 1.02, 1.02),
    CodeCost("4bit", 12e-9, 0.52, 1.02),
]
MANY = 10_000_000  # values


def link(up_mb: float, down_mb: float | None = None, latency_s: float = 0.001) -> LinkSpeed:
    return LinkSpeed(latency_s, up_mb * 1e6, (up_mb if down_mb is None else down_mb) * 1e6)


@pytest.mark.parametrize(
    ("megabytes", "expected"), [(1.25, "4bit"), (12.5, "4bit"), (125.0, "int8"), (500.0, "bf16"), (2500.0, "no codec")]
)
def test_the_slower_the_link_the_fewer_bytes(megabytes: float, expected: str) -> None:
    assert choose_code(COSTS, link(megabytes), MANY).name == expected


def test_the_time_is_that_of_the_bytes_both_ways_and_of_coding() -> None:
    assert expected_s(NO_CODE, link(10.0, 40.0, 0.5), 1_000_000) == pytest.approx(0.5 + 0.4 + 0.1)
    assert expected_s(COSTS[2], link(10.0, 40.0, 0.5), 1_000_000) == pytest.approx(0.5 + 0.102 + 0.0255 + 0.008)


@pytest.mark.parametrize(("seconds", "expected"), [(0.89, "less"), (0.91, "no codec")])
def test_a_code_that_loses_more_has_to_save_a_tenth(seconds: float, expected: str) -> None:
    plain = expected_s(NO_CODE, link(1.0, latency_s=0.0), 1)
    assert choose_code([NO_CODE, CodeCost("less", seconds * plain, 0.0, 0.0)], link(1.0), MANY).name == expected


def test_a_tenth_is_saved_of_the_best_code_that_loses_less() -> None:
    slow = CodeCost("slow", math.inf, 2.0, 2.0)
    assert choose_code([NO_CODE, slow, COSTS[2]], link(1.0), MANY).name == "int8"
    hardly = CodeCost("hardly", 0.0, 0.95, 0.95)
    assert choose_code([NO_CODE, COSTS[2], hardly], link(1.0), MANY).name == "int8"


def test_updates_that_are_small_beside_the_latency_are_not_coded() -> None:
    far = link(12.5, latency_s=0.05)
    assert choose_code(COSTS, far, 1000).name == "no codec"
    assert choose_code(COSTS, far, 0).name == "no codec"
    assert choose_code(COSTS, far, MANY).name == "4bit"


def test_bytes_to_the_server_count_where_only_these_are_fewer() -> None:
    assert choose_code(COSTS, link(up_mb=1.0, down_mb=100.0), MANY).name == "4bit"
    assert choose_code(COSTS, link(up_mb=500.0, down_mb=1.0), MANY).name == "int8"


# ---------------------------------------------------------------------- the setting


def test_it_counts_as_compression_before_a_code_is_chosen() -> None:
    config = ExchangeConfig.create(nsync=1, compression="auto")
    assert not config.restorable
    assert repr(config.compression) == "auto"


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [(EASGD(), "cannot be used with EASGD"), (SparseLoCo(), "was given with SparseLoCo, which compresses")],
)
def test_it_is_refused_like_a_named_code(algorithm: object, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"compression='auto' {text}"):
        ExchangeConfig.create(nsync=1, algorithm=algorithm, compression="auto")
