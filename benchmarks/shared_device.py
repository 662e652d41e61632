"""A CUDA device that several processes share, as if each had one of its own."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning.accelerators import CUDAAccelerator

__all__ = ["SharedCUDA"]


class SharedCUDA(CUDAAccelerator):
    """Lightning's ``accelerator`` for as many workers as wanted on the machine's first CUDA device."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """The number of processes."""
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """The same device for each."""
        return [torch.device("cuda", 0)] * devices

    @classmethod
    def register_accelerators(cls, accelerator_registry: Any) -> None:
        """It is passed as an object, and has no name."""
