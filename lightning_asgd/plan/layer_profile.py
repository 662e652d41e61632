"""What a LightningModule's layers cost in time and memory, and how to have some of them recomputed in backward."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_asgd.plan.mini_batch import KEPT, RECOMPUTED, StepProfile, Way
from lightning_asgd.plan.timing import TrainingStep, seconds_per_step

__all__ = ["profile_step", "recompute"]


def recompute(module: nn.Module, layers: Sequence[str]) -> None:
    """Have layers compute their inner tensors again in backward rather than keep them: activation checkpointing.

    Call it at the end of ``__init__`` or ``configure_model``; a second call changes nothing. Batch normalization inside
    such a layer updates its running statistics twice in a step.

    Args:
        module: that has them.
        layers: names of submodules, as in ``named_modules()``.
    """
    for name in layers:
        layer = module.get_submodule(name)
        if getattr(layer.forward, "func", None) is not checkpoint:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def profile_step(step: TrainingStep, batch: Any, beside: float = 0.0, steps: int = 5) -> StepProfile:
    """Measure a step with a batch, and what would change if a layer were recomputed.

    Layers are the module's children. Those that hold a list of blocks are looked into.

    Args:
        step: what is measured.
        batch: as the loader gives it.
        beside: bytes that training needs besides, such as those of exchanges.
        steps: how often it is timed.

    Returns:
        seconds and bytes of the step, with the ways ``"kept"`` and ``"recomputed"`` for each layer.
    """
    seconds = seconds_per_step(step, batch, steps)
    there = step.to_device(batch)
    layers = dict(_layers(step.module, ""))
    watches = []
    for _ in range(max(1, steps // 2)):
        watch = _Watch(step, layers)
        watch.run(there)
        watches.append(watch)
    last = watches[-1]
    ways = {}
    for name in dict.fromkeys((*last.order, *layers)):
        inner, inputs, largest = last.inner(name), last.only_as_input(name), last.largest(name)
        again = statistics.median(watch.seconds[name] for watch in watches)
        ways[name] = [Way(KEPT, 0.0, inner, largest)]
        if inner > inputs:
            ways[name].append(Way(RECOMPUTED, again, inputs, inner + largest))
    return StepProfile(seconds, beside + step.state_bytes + last.shared(), ways)


def _layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """A module's children; where a child holds a list of blocks, its own children in its place."""
    for name, child in module.named_children():
        if any(map(_lists_blocks, child.modules())):
            yield from _layers(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _lists_blocks(module: nn.Module) -> bool:
    """Whether this is a container of modules that have modules of their own."""
    container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return container and any(any(part.children()) for part in module.children())


class _Watch:
    """Notes which tensors a step keeps for backward, which layer made them, and how long the layers' forwards take."""

    def __init__(self, step: TrainingStep, layers: dict[str, nn.Module]) -> None:
        self._step, self._layers = step, layers
        self._present: list[tuple[str, float]] = []  # layers whose forward runs, and since when
        self._held: list[Tensor] = []  # an address must not be given out again while it stands for a tensor
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.order: list[str] = []  # of the forwards
        own = [*step.module.parameters(), *step.module.buffers()]
        self._own = {tensor.untyped_storage().data_ptr() for tensor in _tensors(own)}
        self._sizes: dict[int, int] = {}  # bytes of what is kept, by storage
        self._keepers: defaultdict[int, set[str]] = defaultdict(set)
        self._inputs: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._between: set[int] = set()  # what layers take in and give out

    def run(self, batch: Any) -> None:
        """Train a batch."""
        handles = []
        for name, layer in self._layers.items():
            handles.append(layer.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leave))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept):
                self._step(batch)
        finally:
            self._held.clear()
            for handle in handles:
                handle.remove()

    def inner(self, name: str) -> int:
        """Bytes that a layer alone keeps."""
        return sum(
            size
            for storage, size in self._sizes.items()
            if self._keepers[storage] == {name} and storage not in self._between
        )

    def largest(self, name: str) -> int:
        """Bytes of the largest tensor that a layer keeps: its gradient needs as many."""
        return max((size for storage, size in self._sizes.items() if name in self._keepers[storage]), default=0)

    def only_as_input(self, name: str) -> int:
        """Bytes of a layer's inputs that are kept only if it is recomputed."""
        return sum(size for storage, size in self._inputs[name].items() if storage not in self._sizes)

    def shared(self) -> int:
        """Bytes that are kept whatever is recomputed."""
        return sum(self._sizes.values()) - sum(self.inner(name) for name in self._layers)

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            self._between.add(storage.data_ptr())
            self._held.append(tensor)
            if storage.data_ptr() not in self._own:
                self._inputs[name][storage.data_ptr()] = storage.nbytes()
        self.order.append(name)
        self._present.append((name, self._now()))

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        name, begun = self._present.pop()
        self.seconds[name] += self._now() - begun
        for tensor in _tensors(output):
            self._between.add(tensor.untyped_storage().data_ptr())
            self._held.append(tensor)

    def _now(self) -> float:
        if self._step.device.type != "cpu":
            torch.accelerator.synchronize(self._step.device)
        return time.perf_counter()

    def _keep(self, tensor: Tensor) -> Tensor:
        for one in _tensors(tensor):
            storage = one.untyped_storage()
            if storage.data_ptr() not in self._own:
                self._sizes[storage.data_ptr()] = storage.nbytes()
                self._keepers[storage.data_ptr()].add(self._present[-1][0] if self._present else "")
        return tensor


def _tensors(values: Any) -> Iterator[Tensor]:
    """The dense ones among them: others have no storage."""
    if isinstance(values, Tensor):
        if values.layout is torch.strided:
            yield values
    elif isinstance(values, (Mapping, list, tuple)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _tensors(value)
