"""A module's tensors by name: their values' digest, and how workers get the same ones."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_asgd.core.foundation.numerics import as_bytes
from lightning_asgd.core.worker.collectives import Collectives


def named_state(module: Module) -> dict[str, Tensor]:
    """A module's parameters and buffers by name, tied ones once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def persistent_buffers(module: Module) -> dict[str, Tensor]:
    """A module's buffers by name, but for those that were registered with ``persistent=False`` or have no shape yet."""
    return {name: buffer for name, buffer, persistent in _buffers(module) if persistent}


def fixed_tensors(module: Module, trained: Collection[str]) -> dict[str, Tensor]:
    """Frozen parameters, and the buffers that each worker keeps for itself once it has the chief's first ones."""
    frozen = {name: parameter for name, parameter in module.named_parameters() if name not in trained}
    return frozen | {name: buffer for name, buffer, persistent in _buffers(module) if not persistent}


def _buffers(module: Module) -> Iterator[tuple[str, Tensor, bool]]:
    for name, buffer in module.named_buffers():
        path, _, key = name.rpartition(".")
        if not torch.nn.parameter.is_lazy(buffer) and not hasattr(buffer, "placements"):  # a DTensor's blocks differ
            yield name, buffer, key not in module.get_submodule(path)._non_persistent_buffers_set


def on_cpu(tensor: Tensor) -> Tensor:
    """A copy of a tensor's values, which holds no more memory than these take."""
    return tensor.detach().cpu().clone()


def digest_of(tensors: Mapping[str, Tensor]) -> bytes:
    """Equal for equal names, shapes and values; empty for none."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_bytes_of(tensor.detach().cpu()))
    return digest.digest() if tensors else b""


def _bytes_of(tensor: Tensor) -> Any:
    try:  # of a copy: NumPy would keep a program from resizing the tensor itself
        return as_bytes(tensor.clone().resolve_conj().resolve_neg()).numpy()
    except (RuntimeError, TypeError, ValueError):  # a sparse or quantised one, or one without elements
        saved = io.BytesIO()
        torch.save(tensor.clone(), saved)  # pickle alone writes the addresses of a sparse tensor's parts
        return saved.getvalue()


def take_values(module: Module, values: Mapping[str, Tensor]) -> list[str]:
    """Give a module's tensors these values, in place if possible; returns the names that it has no place for.

    A buffer takes the shape and dtype of its value. A missing buffer is registered.
    """
    homeless = []
    with torch.no_grad():
        for name, value in values.items():
            path, _, key = name.rpartition(".")
            try:
                _take(module.get_submodule(path), key, value)
            except (AttributeError, KeyError):  # this worker's module has no such part, or an attribute of that name
                homeless.append(name)
    return homeless


def _take(owner: Module, key: str, value: Tensor) -> None:
    if (parameter := owner._parameters.get(key)) is not None:
        parameter.copy_(value)
        return
    mine = owner._buffers.get(key)
    if mine is None:
        device = next((t.device for t in (*owner.parameters(), *owner.buffers())), value.device)
        owner.register_buffer(key, value.to(device, copy=True))
        return
    if torch.nn.parameter.is_lazy(mine):
        mine.materialize(value.shape, dtype=value.dtype)
    alike = (mine.dtype, mine.layout) == (value.dtype, value.layout) and not mine.is_inference()
    expanded = mine.layout is torch.strided and 0 in mine.stride() and mine.numel() > 1  # elements share a place
    if alike and mine.shape == value.shape and not expanded:
        mine.copy_(value)
    elif alike:
        mine.data = value.to(mine.device, copy=True)  # those that hold this tensor see the values, too
    else:
        owner._buffers[key] = value.to(mine.device, copy=True)


def make_identical(collectives: Collectives, module: Module, tensors: Mapping[str, Tensor]) -> bytes:
    """Give all workers the chief's values of some of a module's tensors; sent only if any differ.

    All workers call it together. A persistent buffer takes the chief's shape. A buffer with ``persistent=False`` keeps
    its values if its shape differs from the chief's. Returns a digest of the chief's values.
    """
    if not collectives.real:
        return b""
    digest = digest_of(tensors)
    if collectives.reduced("all_reduce", "state digest", digest, "same").value:
        return digest
    theirs = collectives.broadcast_of_chief({name: on_cpu(tensor) for name, tensor in tensors.items()}, "state")
    if collectives.rank != collectives.chief:
        own = {name: buffer.shape for name, buffer, persistent in _buffers(module) if not persistent}
        take_values(module, {n: value for n, value in theirs.items() if own.get(n, value.shape) == value.shape})
    return digest_of(theirs)


def average(collectives: Collectives, tensors: Mapping[str, Tensor]) -> None:
    """Give all workers the mean of each tensor, of integers the largest values; all have the same names and shapes."""
    if not collectives.real or collectives.reduced("all_reduce", "digest", digest_of(tensors), "same").value:
        return
    with torch.no_grad():
        for name, tensor in tensors.items():
            op = "mean" if tensor.is_floating_point() or tensor.is_complex() else "max"
            tensor.copy_(collectives.reduce(tensor, op, f"state {name}"))
