"""Copies between a module's device and host memory that the training thread does not wait for.

On a CPU there is nothing to copy, and no lane. On a device with streams (CUDA, ROCm, XPU, ...) all work of exchanges is
queued on a separate stream, ordered with training: a *turn* runs after the kernels queued before it and before those
queued after it. So the training thread only queues work. Once the device has finished a turn, its copies have
*arrived*, and the device no longer reads host memory; until then no request may be sent whose answer overwrites that
memory. The worker trains meanwhile and checks after every step. Copies use pinned memory, which the device accesses by
itself.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.core.calls.shared_memory import SharedBlock

_TURNS = 16  # whose durations are kept
_STREAMS = ("Stream", "Event", "stream", "current_stream")  # what a lane takes from torch's module for a device
# Some releases of torch have streams for these as well. But a CPU has nothing to copy, and MPS shares the CPU's memory.
_WITHOUT_LANE = ("cpu", "mps")

log = logging.getLogger(__name__)


class DeviceLane:
    """See the module's docstring; ``module`` is torch's for this kind of device, such as ``torch.cuda``."""

    def __init__(self, device: torch.device, module: ModuleType | None = None) -> None:
        self._device = device
        self._module: Any = module or torch.get_device_module(device)
        self._is_device = device.type != "cpu"
        self._stream = self._module.Stream(device)
        self._turns: deque[tuple[Any, Any]] = deque(maxlen=_TURNS)  # events around turns not yet reported by took_s
        self._latest: Any = None  # the event after the latest turn
        self._landing: list[tuple[Tensor, ...]] = []  # answers on their way to the device, where they came by value
        self._unpins: dict[int, Any] = {}  # by address of a block, what gives it back

    @property
    def arrived(self) -> bool:
        """Whether the latest :meth:`turn` and all earlier ones are done."""
        return self._latest is None or bool(self._latest.query())

    def wait(self) -> None:
        """Wait until it is."""
        if self._latest is not None:
            self._latest.synchronize()

    def took_s(self) -> float:
        """Seconds of device time in turns that finished since the last call."""
        took_s = 0.0
        while self._turns and self._turns[0][1].query():
            begin, end = self._turns.popleft()
            took_s += begin.elapsed_time(end) / 1000 if self._is_device else 0.0
        return took_s

    def buffer(self, length: int, dtype: torch.dtype) -> Tensor:
        """A flat vector of pinned host memory for updates and answers."""
        return torch.empty(length, dtype=dtype, pin_memory=self._is_device)

    def pin(self, block: SharedBlock) -> None:
        """Pin a shared block. Where that is impossible, copies may block the training thread."""
        if not self._is_device:
            return
        address, nbytes = block.span
        can_pin, error = hasattr(self._module, "cudart"), 0  # only CUDA and ROCm pin memory that is there already
        if can_pin:
            error = _registered(self._module, self._device, lambda cudart: cudart.cudaHostRegister(address, nbytes, 0))
        if error:
            log.warning(
                "The memory that this worker shares with a server (%d bytes) could not be pinned: CUDA's error %d. "
                "Exchanges will delay training slightly. Raise the limit of locked memory (ulimit -l).",
                *(nbytes, error),
            )
        # Memory that is unmapped first would stay pinned, and another block may be mapped there.
        pinned = address if can_pin and not error else None
        self._unpins[address] = weakref.finalize(block, _unpin, self._module, self._device, self._stream, pinned)
        self._unpins[address].atexit = False

    def unpin(self, block: SharedBlock) -> None:
        """Wait for the copies to and from a shared block, and unpin it, before it is closed."""
        give_back = self._unpins.pop(block.span[0], None)
        if give_back is not None:
            give_back()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Order the work queued inside after earlier training kernels and before later ones."""
        training = self._module.current_stream(self._device)
        begin, end = self._event(), self._event()
        self._stream.wait_stream(training)
        begin.record(self._stream)
        try:
            with self._module.stream(self._stream):
                yield
        finally:  # also where memory ran out inside
            training.wait_stream(self._stream)
            end.record(self._stream)
            self._latest = end
            self._turns.append((begin, end))

    def bring(self, answers: Sequence[tuple[Tensor, ...]], *, whole: bool = True) -> Sequence[tuple[Tensor, ...]]:
        """Servers' answers on the device, for the next :meth:`turn`; the copy overlaps with training.

        Unless they are wanted as a ``whole`` they stay in pinned memory.
        """
        self.wait()  # until the latest answers have been copied: done long ago, there was an exchange in between
        if not self._landing:
            self._landing = [()] * len(answers)
        with self._module.stream(self._stream):
            return [self._bring(server, shard, whole=whole) for server, shard in enumerate(answers)]

    def _event(self) -> Any:
        return self._module.Event(enable_timing=True) if self._is_device else self._module.Event()

    def _bring(self, server: int, shard: tuple[Tensor, ...], *, whole: bool) -> tuple[Tensor, ...]:
        if not all(answer.is_pinned() for answer in shard if answer.numel()):  # nothing is in no memory
            if not self._landing[server]:
                self._landing[server] = tuple(self.buffer(answer.numel(), answer.dtype) for answer in shard)
            for landing, answer in zip(self._landing[server], shard, strict=True):
                landing.copy_(answer)
            shard = self._landing[server]
        if not whole:
            return shard
        return tuple(answer.to(self._device, non_blocking=True, copy=True) for answer in shard)


def _unpin(module: Any, device: torch.device, stream: Any, address: int | None) -> None:
    try:
        stream.synchronize()
    except RuntimeError as error:  # the device is unusable after it, and the next call reports that
        log.warning("Copies to or from a device had not finished when training ended: %s", error)
    if address is not None:
        _registered(module, device, lambda cudart: cudart.cudaHostUnregister(address))


def _registered(module: Any, device: torch.device, call: Callable[[Any], Any]) -> int:
    """The error code of a CUDA call, 0 if none. CUDA itself would raise it at the next kernel of any caller."""
    with contextlib.suppress(RuntimeError):
        scalar = torch.empty(1, device=device)
        with module.device(device):
            error = int(call(module.cudart()))
        if error:
            with contextlib.suppress(RuntimeError):
                scalar.fill_(0)
        return error
    return -1


def lane_for(device: torch.device) -> DeviceLane | None:
    """The lane of a device; None on a CPU and on devices without streams of their own, where copies are synchronous."""
    module = getattr(torch, device.type, None)  # as torch.get_device_module, which raises if there is none
    if device.type in _WITHOUT_LANE or not all(hasattr(module, name) for name in _STREAMS):
        return None
    return DeviceLane(device, module)
