"""Between a module's device and this machine's memory: copies that the training thread does not wait for.

On a CPU there is nothing to copy, and no lane. On a CUDA device all that concerns exchanges is queued on a stream of
its own, which the device works through between two training steps: it takes its *turn* after what the device was given
before, and what it is given later comes after it. So the training thread only queues work. Once the device has
finished a turn, what it copied has *arrived*, and it reads no more of this machine's memory: before that no server may
be sent anything that it answers there. The worker trains meanwhile, and looks again after every step. What is copied
lies in pinned memory, which the device reads and writes by itself.
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

from lightning_asgd.transports.shared_memory import SharedBlock

__all__ = ["DeviceLane", "lane_for"]

_TURNS = 16  # of which it is remembered how long they took

log = logging.getLogger(__name__)


class DeviceLane:
    """See the module's docstring; ``module`` is torch's for this kind of device."""

    def __init__(self, device: torch.device, module: ModuleType | None = None) -> None:
        self._device = device
        self._module: Any = module or torch.get_device_module(device)
        self._is_device = device.type != "cpu"
        self._stream = self._module.Stream(device)
        self._turns: deque[tuple[Any, Any]] = deque(maxlen=_TURNS)  # events before and after those not told of
        self._latest: Any = None  # the event after the latest turn
        self._landed: Any = None  # the event after the latest answers were copied
        self._landing: list[tuple[Tensor, ...]] = []  # answers on their way to the device, where they came by value
        self._unpins: dict[int, Any] = {}  # by address of a block, what gives it back

    @property
    def arrived(self) -> bool:
        """Whether the latest :meth:`turn` is over, and all before it."""
        return self._latest is None or bool(self._latest.query())

    def wait(self) -> None:
        """Return once it is."""
        if self._latest is not None:
            self._latest.synchronize()

    def took_s(self) -> float:
        """Seconds of turns that are over and were not told of, in which the device did nothing else."""
        took_s = 0.0
        while self._turns and self._turns[0][1].query():
            begin, end = self._turns.popleft()
            took_s += begin.elapsed_time(end) / 1000 if self._is_device else 0.0
        return took_s

    def buffer(self, length: int, dtype: torch.dtype) -> Tensor:
        """A flat vector of pinned host memory for what is sent and what comes back."""
        return torch.empty(length, dtype=dtype, pin_memory=self._is_device)

    def pin(self, block: SharedBlock) -> None:
        """Let the device read and write a shared block by itself. Where it cannot, the training thread waits."""
        if not self._is_device:
            return
        address, nbytes = block.span
        error = _registered(self._module, self._device, lambda cudart: cudart.cudaHostRegister(address, nbytes, 0))
        if error:
            log.warning(
                "The memory that this worker shares with a server (%d bytes) could not be pinned: CUDA's error %d. "
                "Exchanges will hold training up a little. Raise the limit of locked memory (ulimit -l).",
                *(nbytes, error),
            )
        else:  # memory that is unmapped before would stay pinned, and another block may come to lie there
            self._unpins[address] = weakref.finalize(block, _unpin, self._module, self._device, self._stream, address)
            self._unpins[address].atexit = False

    def unpin(self, block: SharedBlock) -> None:
        """No more of that: to be called before the block is closed."""
        give_back = self._unpins.pop(block.span[0], None)
        if give_back is not None:
            give_back()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """What is computed and copied within comes after what was before, and before what will be."""
        training = self._module.current_stream(self._device)
        begin, end = self._event(timed=True), self._event(timed=True)
        self._stream.wait_stream(training)
        begin.record(self._stream)
        try:
            with self._module.stream(self._stream):
                yield
        finally:  # also where memory ran out in the midst of it
            training.wait_stream(self._stream)
            end.record(self._stream)
            self._latest = end
            self._turns.append((begin, end))

    def bring(self, answers: Sequence[tuple[Tensor, ...]]) -> Sequence[tuple[Tensor, ...]]:
        """Servers' answers where the next :meth:`turn` computes; copied beside what the device computes until then."""
        if self._landed is not None:
            self._landed.synchronize()  # through long since: an exchange lies between
        if not self._landing:
            self._landing = [()] * len(answers)
        self._landed = self._event()
        try:
            with self._module.stream(self._stream):
                return [self._bring(server, shard) for server, shard in enumerate(answers)]
        finally:
            self._landed.record(self._stream)

    def _event(self, *, timed: bool = False) -> Any:
        return self._module.Event(enable_timing=timed) if self._is_device else self._module.Event()

    def _bring(self, server: int, shard: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not all(answer.is_pinned() for answer in shard):
            if not self._landing[server]:
                self._landing[server] = tuple(self.buffer(answer.numel(), answer.dtype) for answer in shard)
            for landing, answer in zip(self._landing[server], shard, strict=True):
                landing.copy_(answer)
            shard = self._landing[server]
        return tuple(answer.to(self._device, non_blocking=True, copy=True) for answer in shard)


def _unpin(module: Any, device: torch.device, stream: Any, address: int) -> None:
    try:
        stream.synchronize()
    except RuntimeError as error:  # after which the device can't be used any more; what follows tells its user
        log.warning("Copies to or from a device were not through when training ended: %s", error)
    _registered(module, device, lambda cudart: cudart.cudaHostUnregister(address))


def _registered(module: Any, device: torch.device, call: Callable[[Any], Any]) -> int:
    """CUDA's error of a call; 0 if there was none. CUDA itself would raise it at the next kernel of any caller."""
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
    """The lane between a device and this machine's memory; None where copies are done when the call returns.

    That is so on a CPU, and on devices without streams.
    """
    return DeviceLane(device) if device.type == "cuda" else None
