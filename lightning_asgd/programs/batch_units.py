"""What a training batch counts: its samples or its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from lightning_asgd.core.foundation.errors import ConfigurationError


class TrainedUnits:
    """Counts batches, and knows which of them are in optimizer steps.

    ``name`` is a plural; empty if batches are not counted. A tensor that ``count`` returns is read for totals only.
    """

    def __init__(self, name: str = "", count: Callable[[Any], Any] = lambda batch: 0) -> None:
        self.name = name
        self._count = count
        self._steps: Any = 0  # in all steps
        self._batches: Any = 0  # since the latest step
        self._step: Any = 0  # in the latest step, or in those that followed the latest batch
        self._stepped = False  # whether it followed the latest batch
        self._batch: Any = 0  # in the latest batch

    def begin(self, batch: Any) -> None:
        """A batch is about to be trained."""
        self._batch, self._stepped = self._count(batch), False
        self._batches = self._batches + self._batch

    def step(self) -> None:
        """An optimizer has taken a step: with it the batches since the one before count."""
        self._step = self._step + self._batches if self._stepped else self._batches  # of another optimizer, maybe
        self._steps, self._batches, self._stepped = self._steps + self._batches, 0, True

    def discard(self) -> None:
        """The latest batch, or the step that followed it, does not count: other workers have trained it."""
        if self._stepped:
            self._steps = self._steps - self._step
        else:
            self._batches = self._batches - self._batch
        self._step = self._batch = 0

    @property
    def total(self) -> float:
        """Units in all steps. Waits for the device where batches are counted there."""
        total = self._steps = float(self._steps)
        return total


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
