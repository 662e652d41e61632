"""What a training batch counts: its samples or its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.programs.trained_units import TrainedUnits

_IGNORED = -100  # as a label: torch's cross entropy ignores it


def counter_of(units: str | Callable[[Any], Any] | None) -> TrainedUnits:
    """What counts the batches that a worker trains."""
    if units is None:
        return TrainedUnits()
    name = "samples" if units == "samples" else "tokens"
    return TrainedUnits(name, units if callable(units) else samples_in if units == "samples" else tokens_in)


def name_of_units(units: Any) -> str | None:
    """What a user has given, as a plain value."""
    return getattr(units, "__name__", None) or repr(units) if callable(units) else units


def samples_in(batch: Any) -> int:
    """Rows of a batch's first tensor; a batch without any counts as one sample."""
    found = next(iter(_tensors(batch)), None)
    return found.shape[0] if found is not None and found.ndim else 1


def tokens_in(batch: Any) -> Any:
    """Tokens of one batch or of several. Raises a ``ConfigurationError`` if a batch does not show its tokens."""
    parts = [_marked(part) for part in _mappings(batch)]
    if known := [count for count in parts if count is not None]:
        return sum(known)
    for tensor in _tensors(batch):
        if not tensor.is_floating_point() and tensor.ndim:
            return tensor.numel()
    raise ConfigurationError(
        f"Advanced.units='tokens', but a batch of type {type(batch).__name__} has no attention_mask, labels or tensor "
        "of integers. Expected one, or a function: Advanced(units=lambda batch: ...)."
    )


def _marked(batch: Mapping[Any, Any]) -> Any:
    """Tokens that a loss is a mean over: labels of a token each, or what the attention mask shows; None if unknown."""
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if isinstance(labels, Tensor) and (not isinstance(mask, Tensor) or labels.shape == mask.shape):
        return (labels != _IGNORED).sum()
    return mask.sum() if isinstance(mask, Tensor) else None


def _mappings(batch: Any) -> Iterator[Mapping[Any, Any]]:
    """The mappings that a batch consists of."""
    if isinstance(batch, Mapping):
        yield batch
    for value in _parts(batch):
        yield from _mappings(value)


def _tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, in its order."""
    if isinstance(batch, Tensor):
        yield batch
    for value in _parts(batch):
        yield from _tensors(value)


def _parts(batch: Any) -> Iterable[Any]:
    """What a mapping, a sequence or an object of a dataclass holds; nothing of anything else."""
    if isinstance(batch, Mapping):
        return batch.values()
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, each.name) for each in fields(batch)]
    return batch if isinstance(batch, Sequence) and not isinstance(batch, str | bytes) else ()
