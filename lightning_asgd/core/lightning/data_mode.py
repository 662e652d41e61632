"""What there is to train in an epoch: the batches that Lightning has counted, and whether workers can share them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from lightning_asgd.core.leases.sampler import LeasedBatches
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.private_names import expected_batches, training_loaders, validates_after
from lightning_asgd.features import FINDERS, load


def place_in_batch(trainer: Any) -> tuple[int, int]:
    """This process's place among those that share each batch, and their number: those of an island, or one."""
    place: tuple[int, int] = getattr(trainer.strategy, "place_in_batch", (0, 1))
    return place


def workers_of(trainer: Any) -> int:
    """How many workers an epoch is for, as Lightning counts it; an island is one."""
    return 1 if hasattr(trainer.strategy, "place_in_batch") else int(trainer.world_size)


def batch_size_of(trainer: Any) -> int:
    """Samples per batch of this worker or island; 0 if the loader forms no batches, or there are several loaders."""
    loaders = training_loaders(trainer)
    sampler = getattr(loaders[0], "batch_sampler", None) if len(loaders) == 1 else None
    sampler = sampler.inner if isinstance(sampler, LeasedBatches) else sampler
    endless = expected_batches(trainer) == float("inf")
    _, ranks = place_in_batch(trainer)
    return ranks * int(sampler.batch_size) if type(sampler) is BatchSampler and not endless else 0


def count_in(trainer: Any, batch: int) -> None:
    """Have Lightning count in batches of the reference size, unless every worker trains a part of its own."""
    before = expected_batches(trainer), validates_after(trainer)
    (loader,) = training_loaders(trainer)
    samples = len(loader.batch_sampler.sampler) * place_in_batch(trainer)[1]
    set_length(trainer, samples / batch, drop_last=loader.drop_last)
    if why_split(trainer, batch) is not None:
        expected_batches.set(trainer, before[0])
        validates_after.set(trainer, before[1])


def set_length(trainer: Any, batches: float, *, drop_last: bool) -> None:
    """Set the number of batches that Lightning expects in an epoch. With ``drop_last`` only full batches count."""
    limit, length = trainer.limit_train_batches, math.floor(batches) if drop_last else math.ceil(batches)
    expected = min(length, limit) if isinstance(limit, int) else int(length * limit)
    expected_batches.set(trainer, expected)
    if isinstance(trainer.val_check_interval, float) and validates_after(trainer) != float("inf"):
        validates_after.set(trainer, max(1, int(expected * trainer.val_check_interval)))


def why_split(trainer: Any, batch: int = 0) -> str | None:
    """Why the workers of a fit must each train a fixed part of the data; None if they can share it."""
    loaders, batches = training_loaders(trainer), expected_batches(trainer)
    if not loaders:
        return "there is no training dataloader"
    for loader in loaders:
        if (reason := _why_undivided(trainer, loader, combined=len(loaders) > 1)) is not None:
            return reason
    if batches == float("inf"):
        return "the training dataloader has no length"
    if (reason := why_not_shared(trainer)) is not None:
        return reason
    workers = workers_of(trainer)
    batches = batches * workers  # of one worker, as Lightning has counted
    if len(loaders) == 1:  # it may have padded them
        (loader,) = loaders
        batches = min(batches, math.ceil(len(loader.batch_sampler.sampler.dataset) / (batch or loader.batch_size or 1)))
    if batches // accumulation(trainer, trainer.current_epoch) < workers:
        return f"{batches} batches per epoch are too few for {workers} workers"
    return None


def _why_undivided(trainer: Any, loader: Any, *, combined: bool) -> str | None:
    """Why the samples of a training dataloader, for all workers together, cannot be known; None if they can."""
    sampler: Any = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if not private_names.deals_samples_out(sampler):
        return "the training dataloader has no distributed sampler from Lightning, or no batch sampler"
    own = type(getattr(loader.batch_sampler, "inner", loader.batch_sampler)) is not BatchSampler
    if own and not private_names.may_replace_samplers(trainer):
        return "use_distributed_sampler=False, and the training dataloader has a batch sampler of its own"
    parts = workers_of(trainer) * place_in_batch(trainer)[1]
    if sampler.num_replicas != parts:
        return f"the sampler divides the samples among {sampler.num_replicas} instead of {parts} workers"
    about = f"{type(loader).__name__}, one of {len(training_loaders(trainer))} training dataloaders,"
    iterate = type(loader).__iter__
    resumes = iterate.__module__.startswith("torchdata.") and not combined  # a StatefulDataLoader's, as torch's
    if iterate is not DataLoader.__iter__ and not resumes:  # it may not continue once it was exhausted
        return f"{about if combined else type(loader).__name__} has its own way to iterate"
    if combined and not len(loader):
        return f"{about} has no batch"
    return None


def why_not_shared(trainer: Any) -> str | None:
    """Why the workers of a fit cannot share data of any kind; None if they can."""
    if hasattr(trainer.strategy, "place_in_batch"):
        shares = "the processes of an island share batches of samples"
        if any(map(load(FINDERS["is streamed"]), training_loaders(trainer))):
            return f"{shares}, and these data are an IterableDataset or have shards"
        if not batch_size_of(trainer):
            return f"{shares}, and these data are not one dataloader of batches"
    if type(private_names.fetcher(trainer)).__name__ != private_names.prefetching.attribute:
        return "training_step takes the dataloader's iterator"
    if private_names.validation_interval_s(trainer) is not None:
        return "validations are scheduled by time"
    if trainer.max_steps != -1 and not trainer.lightning_module.automatic_optimization:
        return "max_steps counts optimizer steps, and only the module knows how many it takes per batch"
    return None


def accumulation(trainer: Any, epoch: int) -> int:
    """Batches per optimizer step in an epoch, also before Lightning's callback for it has set them."""
    for callback in trainer.callbacks:
        if (per_step := private_names.accumulation_in.of(callback)) is not None:
            return int(per_step(epoch))
    return int(trainer.accumulate_grad_batches)


def when_data_are_set_up(trainer: Any, *calls: Callable[[], None]) -> Callable[[], None]:
    """Have functions called whenever Lightning has set up training data, and counted their batches.

    At once if it has already: a ``setup`` hook may have asked for numbers that depend on them.
    """

    def set_up_and_call() -> None:
        before = private_names.combined_loader(trainer)
        private_names.set_up_data.original(trainer)()
        if private_names.combined_loader(trainer) is not before:
            for call in calls:
                call()

    undo = private_names.set_up_data.replace(trainer, set_up_and_call)
    for call in calls if private_names.combined_loader(trainer) is not None else ():
        call()
    return undo
