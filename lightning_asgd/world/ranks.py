"""The rank and world size that this process's libraries see.

Samplers, streaming data sets, metrics and savers read their rank from ``torch.distributed`` or environment variables.
:func:`announce` sets it: a default process group (:mod:`lightning_asgd.world.process_group`) and the
variables that a process of torchrun would have.
"""

from __future__ import annotations

import functools
import logging
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_asgd.core.foundation.errors import CollectiveUnavailableError, ConfigurationError
from lightning_asgd.core.job import address as job_address
from lightning_asgd.core.job import rank_variables
from lightning_asgd.core.worker.fleet import end_idle_membership
from lightning_asgd.world.process_group import BACKEND, GuardedStore, RankInfo, WorkersGroup

log = logging.getLogger(__name__)

_dist: Any = dist  # a build without it lacks the names below; asked for only when used
_place: RankInfo | None = None
_has_island_group = False
_replaced: dict[str, str | None] = {}  # environment variables as they were before the first announcement


def _here() -> RankInfo | None:
    return _place


_PREPARE_DATA = timedelta(days=10000)  # time-out of the group that Lightning makes for its barrier around prepare_data
_store: Any = None  # torch keeps the part in C++ only


def announce(place: RankInfo) -> None:
    """Set rank and world size for this process's libraries, until :func:`withdraw` or the process's end.

    A default process group that another library has made stays, with a warning if its rank or size differs.
    """
    global _place, _store
    _place = place
    with rank_variables.owning():  # or programs that this worker starts would take themselves for it
        for name, value in place.variables().items():
            _replaced.setdefault(name, os.environ.get(name))
            os.environ[name] = value
    if not dist.is_available():
        return
    _prepare_torch()
    if not dist.is_initialized():
        _store = GuardedStore(_here)
        dist.init_process_group(BACKEND, store=_store, rank=place.rank, world_size=place.world_size)
    elif is_ours():
        ranks = _dist.distributed_c10d._world.pg_group_ranks  # torch's own note of them
        ranks[_dist.group.WORLD] = {rank: rank for rank in range(place.world_size)}
    elif (dist.get_rank(), dist.get_world_size()) != (place.rank, place.world_size):
        log.warning(
            "torch.distributed was initialized before this fit, with rank %d of %d. This worker is rank %d of %d. "
            "Libraries that ask torch.distributed get the former. Call torch.distributed.destroy_process_group() "
            "before the fit, or run A-SGD in a separate process.",
            dist.get_rank(),
            dist.get_world_size(),
            place.rank,
            place.world_size,
        )


def withdraw() -> None:
    """Undo :func:`announce`. A default process group of another library stays."""
    global _place
    _place = None
    for name, value in _replaced.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _replaced.clear()
    if is_ours():
        dist.destroy_process_group()


def release_process_group(world_size: int) -> None:
    """Release the default process group to another strategy of this process, which is about to make its own.

    Lightning makes none if there is one. Raises a :class:`ConfigurationError` if that is of another size: a part of the
    processes would train and test as if they were all.
    """
    end_idle_membership()
    job_address.release_port()
    if is_ours():
        withdraw()
    if _has_island_group and dist.is_initialized() and dist.get_world_size() != world_size:
        raise ConfigurationError(
            f"This process has a process group of {dist.get_world_size()}, of a Trainer that divided its devices into "
            f"islands, but this Trainer has {world_size} processes. Expected islands of the same size in all Trainers "
            "of a script, or a script for each."
        )


def note_island_group() -> None:
    """A Trainer makes the default process group of its island only, which stays until the process ends."""
    global _has_island_group
    _has_island_group = True


def is_ours() -> bool:
    """Whether the default process group is the one that :func:`announce` made."""
    return bool(dist.is_available() and dist.is_initialized() and isinstance(_dist.group.WORLD, WorkersGroup))


def collectives_are_real() -> bool:
    """Whether a collective of ``torch.distributed`` reaches other processes now: what metrics ask before they sync."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    if _place is None:
        return True  # another library's group, and no fit of ours
    return not _place.forked and _place.meets and _place.collectives().real


def check_module(module: nn.Module) -> None:
    """Check that no part of a module synchronises gradients by itself, which would put all workers in lock-step."""
    for name, part in module.named_modules():
        if any(cls.__name__ in ("DistributedDataParallel", "FullyShardedDataParallel") for cls in type(part).__mro__):
            raise ConfigurationError(
                f"The module's part {name!r} is a {type(part).__name__}, which reduces gradients over all workers in "
                f"every backward pass. Expected a plain module: under A-SGD workers take their steps at different "
                f"times. Assign the wrapped module itself."
            )


@functools.cache
def _prepare_torch() -> None:
    """Register the backend, and keep layers and metrics from waiting for other workers within a training step."""
    devices = sorted({"cpu", "cuda", *_dist.Backend.default_device_backend_map})
    _dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=devices)

    batch_norm = nn.SyncBatchNorm.forward

    def normalise_locally(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        if _place is None:
            return batch_norm(self, input)
        return nn.modules.batchnorm._BatchNorm.forward(self, input)

    nn.SyncBatchNorm.forward = normalise_locally  # type: ignore[method-assign]

    c10d = _dist.distributed_c10d
    make_group = getattr(c10d, "_new_group_with_tag", None)  # every way to make a group calls it
    if make_group is None:
        return  # then the store rejects groups that would not be encrypted

    @functools.wraps(make_group)
    def make_encrypted(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        prepares = timeout == _PREPARE_DATA
        if str(backend).lower() == "gloo" and _place is not None and (_place.encrypted or prepares) and is_ours():
            backend = BACKEND
            if not prepares:
                _say_that_ours_serves()
        return make_group(ranks, timeout, backend, *args, **kwargs)

    c10d._new_group_with_tag = make_encrypted


@functools.cache
def _say_that_ours_serves() -> None:
    log.warning(
        "A process group with backend 'gloo' was requested. A-SGD's own backend serves it: gloo would send its "
        "data unencrypted, while transport='zmq' encrypts everything. Call its collectives at sync points and outside "
        "of fit only."
    )


def _after_fork() -> None:
    if _place is not None:
        _place.forked = True


os.register_at_fork(after_in_child=_after_fork)


def _create(options: Any, _: Any) -> Any:
    """What ``torch.distributed`` calls for the default group, and for those that ``new_group`` makes."""
    if _place is None:
        raise ConfigurationError(
            f"A process group with backend {BACKEND!r} was requested outside of A-SGD training. Expected a Trainer "
            f"with ASGDStrategy to create it."
        )
    ranks = list(options.global_ranks_in_group)
    if ranks and len(ranks) not in (1, _place.world_size):
        instead = f"Give new_group(ranks={ranks}, backend='gloo') to have torch's own group."
        if _place.encrypted:
            instead = "With transport='zmq' there are no others: torch's own groups would send data unencrypted."
        raise CollectiveUnavailableError(
            f"torch.distributed.new_group({ranks}) was called among {_place.world_size} workers of A-SGD. Expected all "
            f"ranks or a single one. {instead}"
        )
    return WorkersGroup(options.group_rank, options.group_size, *([] if len(ranks) == 1 else [_here]))
