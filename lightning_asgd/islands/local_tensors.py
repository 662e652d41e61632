"""The tensors that this process holds of a module whose parameters may be sharded (DTensor)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.layout import Layout
from lightning_asgd.core.worker.replica_spans import Place, places_of
from lightning_asgd.islands.blocks import Block


def is_sharded(tensor: Tensor) -> bool:
    """Whether a process holds a part of it only."""
    return hasattr(tensor, "placements")


def block_of(name: str, tensor: Tensor) -> Block:
    """The block of a tensor that this process holds. Raises a :class:`ConfigurationError` if it is in no one place."""
    if not is_sharded(tensor):
        return Block((0,) * tensor.ndim, tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    shape, begin = compute_local_shape_and_global_offset(tensor.shape, sharded.device_mesh, sharded.placements)
    local = tuple(sharded.to_local().shape)
    if local != tuple(shape) and 0 not in local:
        raise ConfigurationError(
            f"Parameter {name!r} is placed as {sharded.placements}: this process holds a block of shape {local}. "
            f"Expected {tuple(shape)}, as with Shard and Replicate placements that cut each dimension once. "
            "Shard it with fully_shard or parallelize_module, or leave it whole."
        )
    return Block(tuple(begin), local)


class _Local:
    """A module's tensors as this process holds them, by key."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = tensors

    def __getitem__(self, key: str) -> Any:
        tensor = self._tensors[key]
        return _LocalTensor(tensor) if is_sharded(tensor) else tensor


class _LocalTensor:
    """A sharded parameter's values and gradient on this process."""

    def __init__(self, tensor: Any) -> None:
        with torch.no_grad():
            self.data = tensor.to_local()
        self.device = self.data.device
        self._tensor = tensor

    @property
    def grad(self) -> Tensor | None:
        """This process's part of the gradient."""
        gradient: Any = self._tensor.grad
        local: Tensor | None = gradient.to_local() if gradient is not None and is_sharded(gradient) else gradient
        return local


def local_places(module: Module, layout: Layout) -> list[Place]:
    """Where this process keeps its blocks of a layout's tensors."""
    return [(_Local(container), key) for container, key in places_of(module, layout)]


def reshard(modules: Iterable[Module]) -> None:
    """Have FSDP free the whole parameters that it keeps between two forwards: they would hide changes to the blocks."""
    for module in modules:
        sharded: Any = module
        if hasattr(module, "set_requires_gradient_sync") and hasattr(module, "reshard"):
            sharded.reshard()
