"""Whether a message's fields have the types and ranges that their annotations name: a broken peer may send anything.

Objects within a message may have ``can_be``, whether their values are possible, and ``expected``, a text about that.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections import abc
from types import UnionType
from typing import Any

from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.protocol.session import Failure

__all__ = ["checked"]

_LARGEST = 1 << 62  # of whole numbers: what is counted here fits
_PLAIN = frozenset((str, bool, bytes, float))  # there is nothing to look for within these


def checked(handle: abc.Callable[[Any], Any]) -> abc.Callable[[Any], Any]:
    """A handler of messages that answers one whose fields have other types with an error that names the first."""

    def check_and_handle(message: Any) -> Any:
        try:
            if dataclasses.is_dataclass(message):
                _check_types(message)
        except ProtocolError as error:
            return Failure(type(error).__name__, str(error))
        return handle(message)

    return check_and_handle


def _check_types(message: Any) -> None:
    """Raise a ``ProtocolError`` that names the first field of another type."""
    for name, hint in _hints(message.__class__):
        value = getattr(message, name)
        if (type(value) is not hint or hint not in _PLAIN) and not _fits(value, hint):
            raise ProtocolError(
                f"A server was sent a {type(message).__name__} whose {name} is {repr(value)[:80]}. Expected "
                f"{_named(hint)}. Look for a broken worker, or one of another version."
            )


@functools.cache
def _hints(kind: Any) -> tuple[tuple[str, Any], ...]:
    """The types of a message's fields, but for those that may have any."""
    hints = typing.get_type_hints(kind, kind.__init__.__globals__, include_extras=True)  # the names of its own file
    return tuple((f.name, hints[f.name]) for f in dataclasses.fields(kind) if hints[f.name] is not Any)


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if hint is int:
        return type(value) is int and -_LARGEST < value < _LARGEST
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    origin, inner = _parts(hint)
    if origin is typing.Annotated:
        return _fits(value, inner[0]) and inner[1][0] <= value <= inner[1][1]
    if origin is None and isinstance(hint, type):  # to Python 3.10 dict[int, str] is a type, too
        return isinstance(value, hint) and (not dataclasses.is_dataclass(hint) or _all_fit(value))
    if origin in (typing.Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is tuple and inner[-1] is not Ellipsis:
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(_fits, value, inner))
    if origin in (dict, abc.Mapping):
        return isinstance(value, dict) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if origin is not None and isinstance(value, abc.Collection):
        return isinstance(value, origin) and all(_fits(each, inner[0]) for each in value)
    return origin is None


def _named(hint: Any) -> str:
    kind, bounds = _parts(hint)[1] if _parts(hint)[0] is typing.Annotated else (hint, None)
    return getattr(kind, "__name__", str(kind)) + (f" from {bounds[0]:g} to {bounds[1]:g}" if bounds else "")


@functools.cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


def _all_fit(value: Any) -> bool:
    fit = all(_fits(getattr(value, name), hint) for name, hint in _hints(value.__class__))
    if fit and not getattr(value, "can_be", True):
        raise ProtocolError(
            f"A server was sent {repr(value)[:300]}. Expected {value.expected}. Look for a broken worker, or one of "
            "another version."
        )
    return fit
