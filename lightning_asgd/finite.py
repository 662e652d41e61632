"""Whether a tensor holds a NaN or an infinity."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_finite"]


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is finite, in one pass over memory unless the sum overflows.

    A sum is NaN or infinite if any element is; the converse fails only for sums beyond the dtype's range, and then
    the elements are looked at one by one.
    """
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return True
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    return bool(torch.isfinite(tensor.sum(dtype=wide)).item()) or bool(torch.isfinite(tensor).all().item())
