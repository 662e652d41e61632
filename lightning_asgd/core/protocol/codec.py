"""Messages as bytes, without pickle: a header in JSON that says what everything is, and the bytes of tensors after it.

Only what is listed here can be sent: numbers, texts, bytes, tensors, tuples, lists, dicts, sets, the messages
themselves, algorithms, transforms and compressions. Decoding makes nothing else. A user's own algorithm, transform or
compression is named by its module and class, and the receiver imports the module. What a program broadcasts can be any
object: its worker sends it as :class:`~lightning_asgd.core.protocol.Pickled`, which is bytes here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from array import array
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_asgd import features
from lightning_asgd.core import protocol
from lightning_asgd.core.algorithms.asgd import ASGD
from lightning_asgd.core.algorithms.base import Algorithm, Transform
from lightning_asgd.core.algorithms.compression import Compression
from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.foundation.layout import Role, dtype_from_name
from lightning_asgd.core.foundation.numerics import as_bytes
from lightning_asgd.core.foundation.stats import Verdict
from lightning_asgd.core.foundation.validation import Configurable

__all__ = ["decode", "encode"]

_DEEPEST = 40  # nested values
_RULES = (Algorithm, Transform, Compression)  # which users may extend
_CLASSES: dict[str, type] = {each.__name__: each for each in (ASGD, Role, Verdict)} | {
    name: value
    for name, value in vars(protocol).items()
    if isinstance(value, type) and (dataclasses.is_dataclass(value) or issubclass(value, Enum))
}
_PLAIN = frozenset((int, float, str, bool, type(None)))  # JSON has the same: a look at each would take long
_MANY = 64  # whole numbers from which on their bytes are sent
_LARGEST = 1 << 60  # size of a tensor, and whole number as a key: from 2^61 - 1 on many numbers have one hash
_MOST_NUMBERS = 20_000  # as keys of one dict: a peer can choose them so that each is compared with half of the others
_DIMENSIONS = 64
Buffer = Any
"""Bytes, a memoryview or a NumPy array."""


def encode(value: Any) -> tuple[bytes, list[Buffer]]:
    """A value as a header and the bytes that it refers to. Raises a ``ProtocolError`` if it cannot be sent.

    Contiguous tensors on the CPU are not copied, so they must not change until they are sent.
    """
    buffers: list[Buffer] = []
    return json.dumps(_encode(value, buffers), separators=(",", ":")).encode(), buffers


def decode(header: bytes, buffers: Sequence[Buffer]) -> Any:
    """The value that :func:`encode` was given; its tensors are views of the buffers.

    Each buffer is used once: else a small message could become a large value. Raises a ``ProtocolError`` for what
    :func:`encode` does not return.
    """
    try:
        return _decode(json.loads(header), dict(enumerate(buffers)), 0)
    except ProtocolError:
        raise
    except (Exception, SystemExit) as error:  # a module that is imported may end the program
        raise ProtocolError(f"A message could not be read: {error!r}. Expected a message of this package.") from error


# Every value that JSON does not know is a list that begins with a letter.


def _encode(value: Any, buffers: list[Buffer], depth: int = 0) -> Any:
    if depth > _DEEPEST // 2:
        raise ProtocolError(f"A value is nested more than {_DEEPEST // 2} deep. Expected a flatter value.")
    if value is None or isinstance(value, bool | float) or type(value) in (int, str):
        return value
    if isinstance(value, Tensor):
        flat, data = _flat(value)
        buffers.append(data)
        return ["T", len(buffers) - 1, str(flat.dtype).removeprefix("torch."), list(flat.shape)]
    if isinstance(value, bytes):
        buffers.append(value)
        return ["B", len(buffers) - 1]
    for letter, kind in _CONTAINERS.items():
        if type(value) is kind:
            items: Any = value
            kinds = set(map(type, items))
            if letter in "SF":
                _keys(list(items))
            if kinds <= _PLAIN:
                return [letter, list(items)]
            if kind is tuple and kinds == {tuple} and set(map(len, items)) == {2}:  # such as ranges, of which are many
                plain = list(chain.from_iterable(items))
                if (kinds := set(map(type, plain))) <= _PLAIN:
                    return ["P", _together(plain, kinds, buffers)]
            return [letter, [_encode(item, buffers, depth + 1) for item in items]]
    if type(value) is dict:
        _keys(list(value))
        plain = list(chain.from_iterable(value.items()))
        if (kinds := set(map(type, plain))) <= _PLAIN:
            return ["M", _together(plain, kinds, buffers)]
        return ["D", [[_encode(k, buffers, depth + 1), _encode(v, buffers, depth + 1)] for k, v in value.items()]]
    name = _name_of(type(value))
    if name is not None:
        if isinstance(value, Enum):
            return ["E", name, value.value]
        instance: Any = value
        fields = [f.name for f in dataclasses.fields(instance)]
        contents = {field: getattr(value, field) for field in fields}
        return ["O", name, {field: _encode(item, buffers, depth + 1) for field, item in contents.items()}]
    raise ProtocolError(
        f"A {type(value).__module__}.{type(value).__name__} cannot be sent without pickle. Expected plain values, "
        "tensors, or a module's algorithm, transform or compression. ASGDStrategy(transport='rpc') sends any object."
    )


def _together(values: list[Any], kinds: set[type], buffers: list[Buffer]) -> list[Any] | int:
    """Plain values of some kinds for JSON; many whole numbers as a buffer, of which this is the index."""
    if kinds == {int} and len(values) >= _MANY:
        with contextlib.suppress(OverflowError):
            buffers.append(array("q", values).tobytes())
            return len(buffers) - 1
    return values


def _flat(tensor: Tensor) -> tuple[Tensor, Buffer]:
    """A contiguous tensor on the CPU, and its bytes. Raises a ``ProtocolError`` if it has none."""
    try:
        if tensor.layout is not torch.strided:
            raise TypeError("it is not one array of numbers")
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return flat, as_bytes(flat).numpy() if flat.numel() else b""
    except Exception as error:  # what torch raises depends on the kind of tensor
        cause = str(error).partition("\n")[0].rstrip(".")
        raise ProtocolError(
            f"A tensor of {tensor.dtype} and {tensor.layout} on {tensor.device} cannot be sent without pickle: {cause}."
            " Expected numbers in memory, and the layout torch.strided. ASGDStrategy(transport='rpc') sends any."
        ) from error


def _known(name: str) -> type | None:
    """The class that can be sent by this name alone; None if there is none."""
    if name not in _CLASSES:
        found = features.sendable(name)
        if not isinstance(found, type) or not (dataclasses.is_dataclass(found) or issubclass(found, Enum)):
            return None
        _CLASSES[name] = found
    return _CLASSES[name]


def _name_of(kind: type) -> str | None:
    """A class's name in messages; None if its objects cannot be sent."""
    if _known(kind.__name__) is kind:
        return kind.__name__
    importable = kind.__module__ != "__main__" and kind.__qualname__ == kind.__name__
    is_rule = issubclass(kind, _RULES) and dataclasses.is_dataclass(kind)
    return f"{kind.__module__}:{kind.__name__}" if is_rule and importable else None


def _class_of(name: str) -> type:
    """The class of that name. Raises what an import raises, or a ``ProtocolError`` if it is none that can be sent."""
    module, colon, inner = name.partition(":")
    kind = getattr(importlib.import_module(module), inner) if colon else _known(name)
    if not isinstance(kind, type) or _name_of(kind) != name:
        raise ProtocolError(f"{name} is not an algorithm, a transform or a compression.")
    return kind


def _decode(value: Any, left: dict[int, Buffer], depth: int) -> Any:
    if depth > _DEEPEST:
        raise ProtocolError(f"A message is nested more than {_DEEPEST} deep.")
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ProtocolError("A message holds a bare dict.")
        return value

    def inner(item: Any) -> Any:
        return _decode(item, left, depth + 1)

    letter, *rest = value
    if letter in _CONTAINERS:
        items = rest[0] if set(map(type, rest[0])) <= _PLAIN else list(map(inner, rest[0]))
        return _CONTAINERS[letter](_keys(items) if letter in "SF" else items)
    return _MAKERS[letter](left, inner, *rest)


def _keys(items: list[Any]) -> list[Any]:
    """Members of a set or keys of a dict. Raises a ``ProtocolError`` if it could take minutes to build that."""
    kinds = set(map(type, items))
    numbers = items if kinds == {int} else [key for key in items if type(key) is int]
    few = not numbers or (len(numbers) <= _MOST_NUMBERS and -_LARGEST < min(numbers) <= max(numbers) < _LARGEST)
    if not kinds <= _KEYS or not few:
        raise ProtocolError(
            f"A set or a dict holds {len(items)} {', '.join(sorted(kind.__name__ for kind in kinds))} as members or "
            f"keys. Expected texts, bytes, enumerations, or at most {_MOST_NUMBERS} whole numbers below {_LARGEST}."
        )
    return items


def _make_tensor(left: dict[int, Buffer], inner: Any, index: int, dtype: str, shape: list[int]) -> Tensor:
    kind = dtype_from_name(dtype)
    numbers = 1
    for size in shape:
        if type(size) is not int or not 0 <= size < _LARGEST or len(shape) > _DIMENSIONS:
            raise ProtocolError(f"A tensor's shape is {repr(shape)[:80]}.")
        numbers *= size
    data = left.pop(index)
    nbytes = memoryview(data).nbytes
    if nbytes != numbers * kind.itemsize:
        raise ProtocolError(f"A tensor of shape {shape} and {dtype} has {nbytes} bytes.")
    if not numbers:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=torch.uint8).view(kind).view(shape)


def _apart(left: dict[int, Buffer], given: list[Any] | int) -> list[Any]:
    """The values that :func:`_together` was given."""
    if type(given) is int:
        values = array("q")
        values.frombytes(left.pop(given))
        return values.tolist()
    if not isinstance(given, list) or not set(map(type, given)) <= _PLAIN:
        raise ProtocolError("Plain values were expected.")
    return given


def _make_pairs(left: dict[int, Buffer], inner: Any, given: list[Any] | int) -> tuple[tuple[Any, Any], ...]:
    values = _apart(left, given)
    return tuple(zip(values[::2], values[1::2], strict=True))


def _make_dict(left: dict[int, Buffer], inner: Any, given: list[Any] | int) -> dict[Any, Any]:
    values = _apart(left, given)
    return dict(zip(_keys(values[::2]), values[1::2], strict=True))


def _make_object(left: dict[int, Buffer], inner: Any, name: str, contents: dict[str, Any]) -> Any:
    kind: Any = _class_of(name)
    if issubclass(kind, Enum):
        raise ProtocolError(f"{name} is an enumeration.")
    fields = {f.name for f in dataclasses.fields(kind)}
    if fields != contents.keys():
        raise ProtocolError(f"A {name} does not have {', '.join(sorted(contents.keys() ^ fields))}.")
    values = {field: inner(item) for field, item in contents.items()}
    if not issubclass(kind, Configurable):
        return kind(**values)
    made = object.__new__(kind)  # not again what its initializer makes of the arguments
    for field, item in values.items():
        object.__setattr__(made, field, item)
    return made


def _make_enum(left: dict[int, Buffer], inner: Any, name: str, value: Any) -> Any:
    kind = _known(name)
    if kind is None or not issubclass(kind, Enum):
        raise ProtocolError(f"{name} is not an enumeration.")
    return kind(value)


_KEYS = frozenset((int, str, bytes, bool, type(None), *(kind for kind in _CLASSES.values() if issubclass(kind, Enum))))
_CONTAINERS: dict[str, type] = {"L": list, "U": tuple, "S": set, "F": frozenset}
_MAKERS: dict[str, Callable[..., Any]] = {
    "T": _make_tensor,
    "B": lambda left, inner, index: bytes(left.pop(index)),
    "D": lambda left, inner, items: dict(
        zip(_keys([inner(k) for k, _ in items]), [inner(i) for _, i in items], strict=True)
    ),
    "P": _make_pairs,
    "M": _make_dict,
    "E": _make_enum,
    "O": _make_object,
}
