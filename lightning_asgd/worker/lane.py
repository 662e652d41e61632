"""Between a module's device and this machine's memory: copies that the training thread does not wait for.

On a CPU there is nothing to copy. On a CUDA device all that concerns exchanges is queued on a stream of its own, which
the device works through between two training steps: it takes its *turn* after what the device was given before, and
what it is given later comes after it. So the training thread only queues work. An update is on the wire once its copy
has *arrived*; the worker trains meanwhile, and looks again after every step. What is copied lies in pinned memory,
which the device reads and writes by itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.transport.shared_memory import SharedBlock

__all__ = ["DeviceLane", "Lane", "lane_for"]

log = logging.getLogger(__name__)


class Lane:
    """Where copies are done when the call returns: on a CPU, and on devices without streams."""

    @property
    def arrived(self) -> bool:
        """Whether this machine's memory holds what was copied in the latest :meth:`turn`."""
        return True

    def wait(self) -> None:
        """Return once that has arrived."""

    def buffer(self, length: int, dtype: torch.dtype) -> Tensor:
        """Memory of this machine to copy to and from.

        Args:
            length: number of scalars.
            dtype: of them.

        Returns:
            a tensor of so many scalars of any value.
        """
        return torch.empty(length, dtype=dtype)

    def pin(self, block: SharedBlock) -> None:
        """Let the device read and write a shared block by itself, if it can."""

    def unpin(self, block: SharedBlock) -> None:
        """No more of that: to be called before the block is closed."""

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """What is computed and copied within comes after what was before, and before what will be."""
        yield

    def bring(self, answers: Sequence[tuple[Tensor, ...]]) -> Sequence[tuple[Tensor, ...]]:
        """Servers' answers where the next :meth:`turn` computes.

        Args:
            answers: per server, one tensor per group, in this machine's memory.
        """
        return answers


class DeviceLane(Lane):
    """See the module's docstring.

    Args:
        device: the module's.
        module: torch's for this kind of device; given by tests.
    """

    def __init__(self, device: torch.device, module: ModuleType | None = None) -> None:
        self._device = device
        self._module: Any = module or torch.get_device_module(device)
        self._pins = device.type != "cpu"
        self._stream = self._module.Stream(device)
        self._left: Any = None  # the event after the latest turn
        self._landed: Any = None  # the event after the latest answers were copied
        self._landing: list[tuple[Tensor, ...]] = []  # answers on their way to the device, where they came by value
        self._pinned: set[int] = set()  # addresses of blocks

    @property
    def arrived(self) -> bool:
        """See :class:`Lane`."""
        return self._left is None or bool(self._left.query())

    def wait(self) -> None:
        """See :class:`Lane`."""
        if self._left is not None:
            self._left.synchronize()

    def buffer(self, length: int, dtype: torch.dtype) -> Tensor:
        """See :class:`Lane`."""
        return torch.empty(length, dtype=dtype, pin_memory=self._pins)

    def pin(self, block: SharedBlock) -> None:
        """See :class:`Lane`. Where it cannot, the training thread waits for every copy."""
        if not self._pins:
            return
        address, nbytes = block.span
        error = int(self._module.cudart().cudaHostRegister(address, nbytes, 0))
        if error:
            log.warning(
                "The memory that this worker shares with a server (%d bytes) could not be pinned: CUDA's error %d. "
                "Exchanges will hold training up a little. Raise the limit of locked memory (ulimit -l).",
                *(nbytes, error),
            )
        else:
            self._pinned.add(address)

    def unpin(self, block: SharedBlock) -> None:
        """See :class:`Lane`."""
        address, _ = block.span
        if address in self._pinned:
            self._pinned.remove(address)
            self.wait()
            self._module.cudart().cudaHostUnregister(address)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """See :class:`Lane`."""
        training = self._module.current_stream(self._device)
        self._stream.wait_stream(training)
        with self._module.stream(self._stream):
            yield
        training.wait_stream(self._stream)
        self._left = self._module.Event()
        self._left.record(self._stream)

    def bring(self, answers: Sequence[tuple[Tensor, ...]]) -> Sequence[tuple[Tensor, ...]]:
        """See :class:`Lane`. They are copied beside what the device computes."""
        if self._landed is not None:
            self._landed.synchronize()  # through long since: an exchange lies between
        if not self._landing:
            self._landing = [()] * len(answers)
        with self._module.stream(self._stream):
            there = [self._bring(server, shard) for server, shard in enumerate(answers)]
        self._landed = self._module.Event()
        self._landed.record(self._stream)
        return there

    def _bring(self, server: int, shard: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not all(answer.is_pinned() for answer in shard):
            if not self._landing[server]:
                self._landing[server] = tuple(self.buffer(answer.numel(), answer.dtype) for answer in shard)
            for landing, answer in zip(self._landing[server], shard, strict=True):
                landing.copy_(answer)
            shard = self._landing[server]
        return tuple(answer.to(self._device, non_blocking=True, copy=True) for answer in shard)


def lane_for(device: torch.device) -> Lane:
    """The lane between a device and this machine's memory."""
    return DeviceLane(device) if device.type == "cuda" else Lane()
