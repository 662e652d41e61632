"""Checks of settings that users give."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from lightning_asgd.core.foundation.errors import ConfigurationError

_LONGEST_S = 10_000_000  # 115 days: more than clocks and sockets can be trusted with
_FEW = ("num_servers", "min_workers", "server_machines", "machines", "num_nodes", "island", "programs")


def written(it: Any) -> str:
    """An object of a dataclass as a program has it, without the fields that have their usual values."""
    given = {f.name: getattr(it, f.name) for f in fields(it)}
    return call_of(type(it).__name__, given, {f.name: f.default for f in fields(it)})


class Configurable:
    """What a configuration file of a ``LightningCLI`` may name by its class.

    A class that is a dataclass all the way up would be taken literally there, and not for its subclasses.
    """

    def __init_subclass__(cls) -> None:
        cls.__repr__ = vars(cls).get("__repr__", written)  # type: ignore[method-assign]  # instead of dataclass's


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


def whole(name: str, value: Any, least: int = 1, most: float = math.inf, *, instead: str = "") -> int:
    """Check that a setting is a whole number of at least ``least``, and at most ``most``."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    own = name.rpartition(".")[2]
    example = f", such as {own}={2 if own in _FEW else 10}" if own.isidentifier() else ""
    end = "" if math.isinf(most) else f" and at most {most}"
    raise ConfigurationError(f"{name}={value!r}. Expected a whole number of at least {least}{end}{example}{instead}.")


def seconds(name: str, value: Any) -> float:
    """Check that a setting is a time: above 0, and not too long for a clock."""
    if _is_number(value) and 0 < value <= _LONGEST_S:
        return float(value)
    raise ConfigurationError(
        f"{name}={value!r}. Expected a number of seconds above 0 and at most {_LONGEST_S}. To wait as long as "
        f"possible, pass the largest."
    )


def one_of(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Check that a setting is one of some values."""
    *others, last = map(repr, choices)
    if repr(value) not in (*others, last):
        raise ConfigurationError(f"{name}={value!r}. Expected {', '.join(others)} or {last}.")


def by_name(setting: str, value: Any, known: Mapping[str, Any], kind: type, example: str) -> Any:
    """An object of a kind, or what is ``known`` by its name: case, hyphens and underscores do not matter."""
    if isinstance(value, kind):
        return value
    if isinstance(value, type) and issubclass(value, kind):
        raise ConfigurationError(f"{setting}={value.__name__} is a class. Expected an object: {value.__name__}().")
    plain = {_plain(name): name for name in known}
    if isinstance(value, str) and _plain(value) in plain:
        return known[plain[_plain(value)]]
    near = difflib.get_close_matches(_plain(value), plain, 1) if isinstance(value, str) else ()
    hint = "".join(f" Did you mean {plain[name]!r}?" for name in near)
    raise ConfigurationError(
        f"{setting}={value!r} is unknown.{hint} Expected an object such as {example}, or one of the names "
        f"{', '.join(sorted(known))}."
    )


def call_of(name: str, given: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """A call as a program has it, without the arguments that have their usual values."""
    differ = [f"{key}={value!r}" for key, value in given.items() if key not in usual or value != usual[key]]
    return f"{name}({', '.join(differ)})"


def _plain(name: str) -> str:
    return re.sub("[-_ ]", "", name).lower()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
