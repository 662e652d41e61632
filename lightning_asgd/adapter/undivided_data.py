"""Training data that nobody deals out: iterable datasets, and samplers that Lightning does not replace.

Each worker trains what its own dataloader yields. That is right where the dataset divides itself, by
``torch.distributed``'s rank or by ``RANK``; any other is trained whole by every worker, which is said.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.adapter.class_trees import apply_to_collection
from lightning_asgd.adapter.private_names import training_loaders
from lightning_asgd.worker.collectives import Collectives

__all__ = ["FirstBatch", "datasets_of", "is_dealt"]

log = logging.getLogger(__name__)

_DIGESTED = 1 << 20  # bytes of each tensor, at most


def is_dealt(trainer: Any) -> bool:
    """Whether a distributed sampler gives every worker its share of the training data."""
    samplers = [_sampler_of(loader) for loader in training_loaders(trainer)]
    return all(getattr(sampler, "num_replicas", None) == trainer.world_size for sampler in samplers)


def _sampler_of(loader: Any) -> Any:
    own = getattr(loader, "sampler", None)
    return own if hasattr(own, "num_replicas") else getattr(getattr(loader, "batch_sampler", None), "sampler", own)


def datasets_of(trainer: Any) -> str:
    """Class names of the training datasets."""
    datasets = (getattr(loader, "dataset", loader) for loader in training_loaders(trainer))
    return ", ".join(dict.fromkeys(type(dataset).__name__ for dataset in datasets))


class FirstBatch:
    """Finds out whether workers were given the same first batch."""

    def __init__(self) -> None:
        self._digest: bytes | None = None
        self._compared = False

    def note(self, batch: Any) -> None:
        """Look at a batch, if it is the first."""
        if self._digest is None:
            try:
                self._digest = _digest(batch)
            except Exception:  # of a batch's own classes: it is for a warning only
                self._digest = b""

    def compare(self, trainer: Any, collectives: Collectives) -> None:
        """Ask the others once, and warn. All workers call it together."""
        if self._compared:
            return
        self._compared = True
        workers: dict[bytes, list[int]] = {}
        for rank, digest in collectives.gather("all_gather", "first batch", self._digest or b"").items():
            workers.setdefault(digest, []).append(rank)
        for digest, ranks in workers.items():
            if digest and len(ranks) > 1 and trainer.is_global_zero:
                log.warning(
                    "Workers %s have trained the same first batch: %s seems to yield the same samples to each of them, "
                    "which are then trained %d times per epoch. Expected each worker to have its share: divide the "
                    "dataset by torch.distributed.get_rank() and get_world_size(), or give one with a length, which "
                    "workers share.",
                    ", ".join(map(str, ranks)),
                    datasets_of(trainer),
                    len(ranks),
                )


def _digest(batch: Any) -> bytes:
    """Equal for batches with equal tensors; empty if there are none."""
    total = hashlib.sha256()
    tensors: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    apply_to_collection(batch, Tensor, add)
    for tensor in tensors:
        start = tensor.detach().flatten()[: _DIGESTED // max(1, tensor.element_size())].cpu().contiguous()
        raw: Any = start.view(torch.uint8).numpy()
        total.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        total.update(raw)
    return total.digest()[:16] if tensors else b""
