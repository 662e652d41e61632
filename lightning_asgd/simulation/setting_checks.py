"""Checks of a simulation's settings."""

from __future__ import annotations

import math
from typing import Any

from lightning_asgd.errors import ConfigurationError

__all__ = ["number", "whole"]


def number(name: str, value: Any, *, above: bool = False, infinite: bool = False) -> None:
    """Check that a setting is a number of at least 0.

    Args:
        name: the setting's.
        value: what was given.
        above: whether 0 itself is wrong.
        infinite: whether infinity is right.

    Raises:
        ConfigurationError: it is not.
    """
    right = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    if not right or value < 0 or (above and value == 0) or (math.isinf(value) and not infinite):
        raise ConfigurationError(
            f"{name}={value!r}. Expected a {'' if infinite else 'finite '}number {'above' if above else 'of at least'} "
            f"0: give another {name}."
        )


def whole(name: str, value: Any, least: int = 1) -> None:
    """Check that a setting is a whole number of at least ``least``.

    Raises:
        ConfigurationError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}={value!r}. Expected a whole number of at least {least}, such as {name}=10.")
