"""Whether a tensor is finite and within bounds, what to do if it is not, and sums that depend on no library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_CHUNK = 1 << 20
_PIECE = 1 << 14  # values: so few are added up by one thread
MAX_UPDATE = 1e10
"""No step changes a weight by this much, or by this many times the largest weight where that is above 1."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that servers compute in for weights of ``dtype``: float32 where these have 16 bits, else the same."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is finite, in one pass over memory unless the sum overflows.

    A sum is NaN or infinite if any element is; the converse fails only for sums beyond the dtype's range, and then
    the elements are checked one by one.
    """
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return True
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    return bool(torch.isfinite(tensor.sum(dtype=wide)).item()) or bool(torch.isfinite(tensor).all().item())


def largest(tensor: Tensor) -> float:
    """The largest absolute value of real and imaginary parts; NaN if one is, 0 for no elements or whole numbers."""
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) or not tensor.numel():
        return 0.0
    least, most = torch.aminmax(torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor)
    return float(torch.maximum(-least, most))


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's values, which are copied only if the tensor is not contiguous."""
    flat = tensor.detach().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # a single value may have any stride


def checksum(tensor: Tensor) -> int:
    """A number that is the same for the same values, and almost certainly another one for others or another order."""
    flat = as_bytes(tensor)
    flat = flat if flat.data_ptr() % 4 == 0 else flat.clone()
    size = next(size for size in (4, 2, 1) if flat.numel() % size == 0)
    numbers = flat.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[size])
    weights, total = torch.arange(1, min(_CHUNK, len(numbers)) + 1, device=flat.device), 0
    for begin in range(0, len(numbers), _CHUNK):
        chunk = numbers[begin : begin + _CHUNK]
        total = total * 1_000_003 + int((chunk.to(torch.int64) * weights[: len(chunk)]).sum())
    return total % (1 << 61)


def inner_product(one: Tensor, other: Tensor) -> float:
    """The inner product of two vectors of a real dtype, with the same bits for any number of threads.

    On processors with AVX2 or AVX-512 they are the same, too. ``torch.dot`` is a library's, which adds up in another
    order on some of these.
    """
    wide = torch.float64 if one.dtype is torch.float64 else torch.float32  # a product of 16 bits would overflow
    pieces = zip(torch.split(one, _PIECE), torch.split(other, _PIECE), strict=True)
    return sum(float((a.to(wide) * b.to(wide)).sum()) for a, b in pieces)


def is_small_enough(update: Tensor, weights: Tensor) -> bool:
    """Whether an update is not larger by orders of magnitude than training can make it, and leaves weights finite."""
    if not (update.dtype.is_floating_point or update.dtype.is_complex):
        return True
    size, end = largest(update), torch.finfo(weights.dtype).max
    if size <= (1.0 if end < MAX_UPDATE else MAX_UPDATE):
        return True  # the usual case, without a pass over the weights
    most = largest(weights)
    return size <= MAX_UPDATE * max(most, 1.0) and size + most <= end


def is_within_bounds(tensor: Tensor) -> bool:
    """Whether every element is finite and below :data:`MAX_UPDATE`; False also if only a closer check would show it.

    From the Euclidean norm, which is cheaper than the largest value while the tensor is in the cache.
    """
    if not tensor.dtype.is_floating_point:
        return not tensor.dtype.is_complex
    return torch.dot(tensor, tensor).item() <= min(MAX_UPDATE**2, torch.finfo(tensor.dtype).max)  # of float16: 65,504


def zero_nonfinite(state: Mapping[Any, Any]) -> None:
    """Set the tensors of an optimizer's state to zero that hold a NaN or an infinity."""
    for values in state.values():
        for value in values.values() if isinstance(values, dict) else ():
            if isinstance(value, Tensor) and not is_finite(value):
                value.zero_()
