"""What a training batch counts: its samples or its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_asgd.errors import ConfigurationError
from lightning_asgd.worker.trained_units import TrainedUnits

__all__ = ["check_units", "counter_of", "samples_in", "tokens_in"]

_IGNORED = -100  # as a label: torch's cross entropy ignores it


def check_units(units: Any) -> None:
    """Raise a ``ConfigurationError`` unless :func:`counter_of` knows it."""
    if units is not None and units not in ("samples", "tokens") and not callable(units):
        raise ConfigurationError(
            f"units={units!r}. Expected 'samples', 'tokens', a function that returns the tokens of a batch, or None."
        )


def counter_of(units: str | Callable[[Any], Any] | None) -> TrainedUnits:
    """What counts the batches that a worker trains."""
    if units is None:
        return TrainedUnits()
    name = "samples" if units == "samples" else "tokens"
    return TrainedUnits(name, units if callable(units) else samples_in if units == "samples" else tokens_in)


def samples_in(batch: Any) -> int:
    """Rows of a batch's first tensor; a batch without any counts as one sample."""
    found = next((leaf for leaf in tree_leaves(_plain(batch)) if isinstance(leaf, Tensor)), None)
    return found.shape[0] if found is not None and found.ndim else 1


def tokens_in(batch: Any) -> Any:
    """Tokens of a batch, as a number or a tensor of one element.

    Raises a ``ConfigurationError`` if it cannot be seen what its tokens are.
    """
    batch = _plain(batch)
    if isinstance(batch, Mapping):
        if isinstance(mask := batch.get("attention_mask"), Tensor):
            return mask.sum()
        if isinstance(labels := batch.get("labels"), Tensor):
            return (labels != _IGNORED).sum()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.ndim:
            return leaf.numel()
    raise ConfigurationError(
        f"units='tokens', and a batch of type {type(batch).__name__} has no attention_mask, labels or tensor of "
        "integers. Expected one, or a function: ASGDStrategy(units=lambda batch: ...)."
    )


def _plain(batch: Any) -> Any:
    """A mapping of any kind as a dictionary, whose leaves can be found."""
    return dict(batch) if isinstance(batch, Mapping) else batch
