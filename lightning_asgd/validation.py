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


def at_least(name: str, value: Any, least: float, *, above: bool = False, finite: bool = False) -> None:
    """Check that a setting is a number of at least ``least``, or ``above`` it."""
    if not _is_number(value) or value < least or (above and value == least) or (finite and math.isinf(value)):
        kind = "finite number" if finite and value == math.inf else "number"
        raise ConfigurationError(f"{name}={value!r}. Expected a {kind} {'above' if above else 'of at least'} {least}.")


def between(name: str, value: Any, least: float, most: float, *, above: bool = False) -> None:
    """Check that a setting lies in ``[least, most]``, or in ``(least, most]`` if ``above``."""
    if not _is_number(value) or not least <= value <= most or (above and value == least):
        relation = "above" if above else "from"
        raise ConfigurationError(f"{name}={value!r}. Expected a number {relation} {least} to {most}.")


def whole(name: str, value: Any, least: int = 1, most: float = math.inf) -> int:
    """Check that a setting is a whole number of at least ``least``, and at most ``most``."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    example = f", such as {name}=10" if name.isidentifier() else ""
    end = "" if math.isinf(most) else f" and at most {most}"
    raise ConfigurationError(f"{name}={value!r}. Expected a whole number of at least {least}{end}{example}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
