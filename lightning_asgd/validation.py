"""Checks of settings that users give."""

from __future__ import annotations

import math
from typing import Any

from lightning_asgd.errors import ConfigurationError

__all__ = ["Configurable", "at_least", "between", "whole"]


class Configurable:
    """What a configuration file of a ``LightningCLI`` may name by its class.

    A class that is a dataclass all the way up would be taken literally there, and not for its subclasses.
    """


def at_least(name: str, value: Any, least: float, *, above: bool = False) -> None:
    """Check that a setting is a number of at least ``least``."""
    if not _is_number(value) or value < least or (above and value == least):
        relation = "above" if above else "of at least"
        raise ConfigurationError(f"{name}={value!r}. Expected a number {relation} {least}.")


def between(name: str, value: Any, least: float, most: float, *, above: bool = False) -> None:
    """Check that a setting lies in ``[least, most]``, or in ``(least, most]`` if ``above``."""
    if not _is_number(value) or not least <= value <= most or (above and value == least):
        relation = "above" if above else "from"
        raise ConfigurationError(f"{name}={value!r}. Expected a number {relation} {least} to {most}.")


def whole(name: str, value: Any, least: int) -> None:
    """Check that a setting is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}={value!r}. Expected a whole number of at least {least}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
