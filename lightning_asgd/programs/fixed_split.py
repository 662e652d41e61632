"""Lightning's training loop where every worker trains a part of the data of its own: nothing is leased.

The strategy does not divide iterable datasets, or samplers that Lightning does not replace: each worker trains what its
own dataloader yields. That is right where the dataset divides itself, by ``torch.distributed``'s rank or by ``RANK``;
any other is trained in full by every worker, and a warning says so.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.core.lightning.class_trees import apply_to_collection, tree_of
from lightning_asgd.core.lightning.loop_counters import StepCounts, count_batches, is_automatic
from lightning_asgd.core.lightning.private_names import batch_in_epoch, training_loaders
from lightning_asgd.core.worker.fleet import Fleet
from lightning_asgd.core.worker.synchronizer import Synchronizer

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


class FixedSplit:
    """The training loop of one fit."""

    installed = False
    """Whether the training dataloader yields what is leased."""
    place: dict[str, Any] | None = None
    """Where a process could begin that replaces a lost worker: nowhere."""

    def __init__(self, trainer: Any, membership: Fleet) -> None:
        self._trainer = trainer
        self._membership = membership
        self.counts = StepCounts(trainer)
        self._told = False  # why it is used
        self._digest: bytes | None = None  # of the first batch
        self._compared = False

    def explain(self, reason: str) -> None:
        """Tell once, on worker 0, why the data are not leased."""
        if self._told or not self._trainer.is_global_zero:
            return
        self._told = True
        what = f"Workers do not share the data because {reason}."
        if not is_dealt(self._trainer):
            what = (
                f"Every worker trains what its own dataloader yields, because {reason}. Expected "
                f"{datasets_of(self._trainer)} to give each worker its share, by the rank and world size of "
                "torch.distributed or by RANK and WORLD_SIZE."
            )
        tree_of(self._trainer).say(
            f"{what} A slow worker delays the others at the end of an epoch. Pass ASGDStrategy(data='split') if this "
            f"is intended."
        )

    @property
    def _undealt(self) -> bool:
        """Whether the dataset itself must divide the data among the workers."""
        alone = self._membership.alone or self._membership.comes_and_goes
        return not alone and not is_dealt(self._trainer)

    def before_batch(self, batch: Any) -> None:
        """A batch has been fetched: note the first."""
        self.counts.begin_batch()
        if self._digest is None and self._undealt:
            try:
                self._digest = _digest(batch)
            except Exception:  # of a batch's own classes: it is for a warning only
                self._digest = b""

    def check_first_batches(self) -> None:
        """Warn once where the dataset yields the same first batch to several workers. All workers call it together."""
        if self._compared or not self._undealt:
            return
        self._compared = True
        workers: dict[bytes, list[int]] = {}
        mine = self._digest or b""
        collectives = self._membership.collectives
        for rank, digest in collectives.gather("gather", "first batch", mine, target=collectives.chief).items():
            workers.setdefault(digest, []).append(rank)
        for digest, ranks in workers.items():
            if digest and len(ranks) > 1 and self._trainer.is_global_zero:
                log.warning(
                    "Workers %s have trained the same first batch: %s seems to yield the same samples to each of them, "
                    "which are then trained %d times per epoch. Expected each worker to get a different part: divide "
                    "the dataset by torch.distributed.get_rank() and get_world_size(), or use a dataset with a length, "
                    "which workers share.",
                    ", ".join(map(str, ranks)),
                    datasets_of(self._trainer),
                    len(ranks),
                )

    @property
    def halted(self) -> bool:
        """Whether another worker has ended the epoch for all, before all of its data were trained."""
        return self._membership.collectives.others_stopped

    @property
    def batches(self) -> int:
        """Batches of the epoch that this worker has counted."""
        return int(batch_in_epoch(self._trainer))

    def count(self, step: int, batches: int) -> int:
        """Count at least as many optimizer steps as others have; return the batches that all have counted now."""
        more = step - self.counts.step if is_automatic(self._trainer) else max(0, batches - self.batches)
        self.counts.raise_to(step, self.counts.stepped + more)
        return batches

    def end_epoch(self, batches: int) -> None:
        """Have Lightning count what all have counted."""
        count_batches(self._trainer, batches)

    # ------------------------------------------------------------------ where only leases have something to do

    def begin_epoch(self) -> None:
        """Lightning opens its own data."""
        self.counts.begin_epoch()

    def after_batch(self, synchronizer: Synchronizer, discard: Callable[[], None]) -> None:
        """Lightning knows whether there is another batch."""

    def before_next(self) -> None:
        """Lightning's counters are right."""
        self.counts.take()

    def leave(self, acknowledged: int, *, halt: bool) -> bool:
        """Whether the others have trained and pushed all is not known."""
        return False

    def save(self, entry: dict[str, Any], held: Any, *, final: bool = False) -> None:
        """Lightning's own checkpoint holds how far an epoch is."""

    def to_ddp_counters(self, loops: dict[str, Any]) -> None:
        """They are."""

    def restore(self) -> None:
        """Nothing was changed."""


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
