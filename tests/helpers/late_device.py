"""A device of queues: its tensors are computed when a test lets them, in any order that its streams and events allow.

:class:`LateDevice` takes the place of ``torch.cuda``. While it is entered, torch's ``meta`` device is this one: what a
program does with tensors there is put into the queue of the present stream, and waits there for as long as the test
says. Time passes by one with everything that the program asks of the device. As on a real device

* a stream works through its queue in order, and streams know of each other by events only;
* a copy from or to pinned memory happens later, when the stream is there;
* a copy from or to other memory, and a look at a value, blocks the program until the stream is there;
* memory that is given back is used again by the stream that it came from.

With ``cuda=False`` it is another kind of device: memory that exists already cannot be pinned, and a copy that need not
block the program happens later, whatever the memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")

_LOOKS = ("_local_scalar_dense", "equal", "is_nonzero")


class LateTensor(torch.Tensor):
    """A tensor on the device. Its values are in ``raw``, once the queues have come so far."""

    raw: Tensor
    memory: object  # its memory, which its views share

    @staticmethod
    def __new__(cls, raw: Tensor, memory: object) -> LateTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=DEVICE
        )
        made.raw, made.memory = raw, memory
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the device")


class Memory:
    """So that it is seen when the last view of a tensor is gone."""


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.reached: list[bool] = []  # by the latest record, a new list for each; empty where there was none

    def record(self, stream: LateStream) -> None:
        self.reached = reached = [False]
        stream.put(lambda: reached.__setitem__(0, True))

    def query(self) -> bool:
        self._device.tick()
        return all(self.reached)

    def synchronize(self) -> None:
        reached = self.reached
        self._device.wait(lambda: all(reached))

    def elapsed_time(self, end: LateEvent) -> float:
        assert self.reached == end.reached == [True], "an event was not recorded, or not reached yet"
        return 1.0


class Entry(NamedTuple):
    due: int
    when: Callable[[], bool]
    run: Callable[[], Any]
    host: tuple[Tensor, ...]  # the program's memory that it reads or writes


class LateStream:
    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.queue: deque[Entry] = deque()
        device.streams.append(self)

    def put(
        self, run: Callable[[], Any], when: Callable[[], bool] = lambda: True, host: tuple[Tensor, ...] = ()
    ) -> None:
        """Queue something, with a delay of its own."""
        self.queue.append(Entry(self.device.now + next(self.device.delays), when, run, host))
        self.device.tick()

    def wait_stream(self, other: LateStream) -> None:
        event = LateEvent(self.device)
        event.record(other)
        reached = event.reached
        self.put(lambda: None, lambda: reached[0])

    def synchronize(self) -> None:
        self.device.wait(lambda: not self.queue)


class LateDevice(TorchDispatchMode):
    """See the module's docstring. ``delays`` gives every entry's, in the order in which they are queued."""

    def __init__(self, delays: Iterable[int], *, cuda: bool = True) -> None:
        super().__init__()
        self.cuda = cuda
        self.delays = iter(delays)
        self.now = 0
        self.blocked = 0  # times that the program waited for a copy that does not wait for pinned memory
        self.held = self.peak = 0  # bytes of the device's memory, now and at most since `peak` was set back
        self.streams: list[LateStream] = []
        self.present = LateStream(self)
        self._pinned: dict[int, int] = {}  # bytes by address
        self._kept: list[Tensor] = []  # no address comes twice

    # ------------------------------------------------------------------ what torch.cuda has

    def Stream(self, device: torch.device) -> LateStream:
        return LateStream(self)

    def Event(self, enable_timing: bool = False) -> LateEvent:
        return LateEvent(self)

    def current_stream(self, device: torch.device) -> LateStream:
        return self.present

    @contextlib.contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        before, self.present = self.present, stream
        try:
            yield
        finally:
            self.present = before

    def device(self, device: torch.device) -> Any:
        return contextlib.nullcontext()

    @property
    def cudart(self) -> Callable[[], LateDevice]:
        if not self.cuda:
            raise AttributeError("cudart")
        return lambda: self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self._pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        last = address + self._pinned.pop(address)
        used = any(address <= memory.data_ptr() < last for memory in self.host_memory())
        assert not used, "unpinned while the device reads or writes it"
        return 0

    # ------------------------------------------------------------------ time

    def tick(self, by: int = 1) -> None:
        """Let so much time pass, and do what has become due."""
        self.now += by
        self._work()

    def wait(self, until: Callable[[], bool]) -> None:
        """Let so much time pass."""
        while not until():
            due = [stream.queue[0].due for stream in self.streams if stream.queue]
            assert due, "the program waits for what will not happen"
            self.now = max(self.now, min((time for time in due if time > self.now), default=self.now))
            assert self._work() or any(time > self.now for time in due), "the streams wait for each other"

    def _work(self) -> bool:
        done, goes_on = False, True
        while goes_on:
            goes_on = False
            for stream in self.streams:
                while stream.queue and stream.queue[0].due <= self.now and stream.queue[0].when():
                    stream.queue.popleft().run()
                    done = goes_on = True
        return done

    # ------------------------------------------------------------------ tensors

    def on_device(self, values: Tensor) -> LateTensor:
        """A tensor with these values."""
        return self._new(values.clone())

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor of the program's is in pinned memory."""
        return any(start <= tensor.data_ptr() < start + nbytes for start, nbytes in self._pinned.items())

    def host_memory(self) -> list[Tensor]:
        """The program's memory that the device has still to read or write."""
        return [memory for stream in self.streams for entry in stream.queue for memory in entry.host]

    def _new(self, raw: Tensor) -> LateTensor:
        memory, stream = Memory(), self.present
        self.held += raw.nbytes
        self.peak = max(self.peak, self.held)

        def give_back() -> None:
            self.held -= raw.nbytes
            stream.put(lambda: _spoil(raw))

        weakref.finalize(memory, give_back).atexit = False
        return LateTensor(raw, memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        given = (*args, *kwargs.values())
        late = [each for arg in given for each in _listed(arg) if isinstance(each, LateTensor)]
        if name == "is_pinned":
            return self.is_pinned(args[0])
        if name == "_to_copy" and (late or kwargs.get("device") == DEVICE):
            return self._to_copy(args[0], **kwargs)
        if name == "copy_" and late:
            return self._copy(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if late:
            return self._compute(func, name, late, args, kwargs)
        if kwargs.get("device") == DEVICE:
            return self._new(_spoil(func(*args, **{**kwargs, "device": "cpu"})))
        if kwargs.get("pin_memory"):
            made: Tensor = _spoil(func(*args, **{**kwargs, "pin_memory": False}))
            self._pinned[made.data_ptr()] = made.nbytes
            self._kept.append(made)
            return made
        return func(*args, **kwargs)

    def _compute(self, func: Any, name: str, late: list[LateTensor], args: Any, kwargs: Any) -> Any:
        about = {**kwargs, **({"device": "cpu"} if kwargs.get("device") == DEVICE else {})}
        raw_args, raw_kwargs = [_raw(arg) for arg in args], {name: _raw(arg) for name, arg in about.items()}
        if name in _LOOKS:
            self.present.synchronize()
            return func(*raw_args, **raw_kwargs)
        returns = func._schema.returns
        if any(each.alias_info is not None and not each.alias_info.is_write for each in returns):  # a view
            views = func(*raw_args, **raw_kwargs)
            if isinstance(views, Tensor):
                return LateTensor(views, late[0].memory)
            return [LateTensor(view, late[0].memory) for view in views]
        changed = [
            kwargs[arg.name] if arg.name in kwargs else args[place]
            for place, arg in enumerate(func._schema.arguments)
            if arg.alias_info is not None and arg.alias_info.is_write
        ]
        if changed:
            self.present.put(lambda: func(*raw_args, **raw_kwargs))
            return changed[0] if len(changed) == 1 else tuple(changed)
        made = self._new(_spoil(func(*raw_args, **raw_kwargs).clone()))
        self.present.put(lambda raw=made.raw: raw.copy_(func(*raw_args, **raw_kwargs)))
        return made

    def _to_copy(self, source: Tensor, **about: Any) -> Tensor:
        away, non_blocking = about.get("device", source.device) == DEVICE, about.get("non_blocking", False)
        made = torch.empty(source.shape, dtype=about.get("dtype") or source.dtype)
        target: Tensor = self._new(_spoil(made)) if away else made
        return self._copy(target, source, non_blocking)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        raw = [_raw(each) for each in (target, source)]
        host = tuple(each for each in (target, source) if not isinstance(each, LateTensor))
        self.present.put(lambda: raw[0].copy_(raw[1]), host=host)
        later = non_blocking and (not self.cuda or all(self.is_pinned(each) for each in host if each.numel()))
        if host and not later:
            self.blocked += 1
            self.present.synchronize()
        return target


def _listed(arg: Any) -> Iterable[Any]:
    return arg if isinstance(arg, list | tuple) else (arg,)


def _raw(arg: Any) -> Any:
    """What is behind an argument that is a tensor of the device, or has some in it."""
    if isinstance(arg, list | tuple):
        return [_raw(each) for each in arg]
    return arg.raw if isinstance(arg, LateTensor) else arg


def _spoil(tensor: Tensor) -> Tensor:
    """Values that show where they are used."""
    return tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 99)
