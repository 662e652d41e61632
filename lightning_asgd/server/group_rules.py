"""How pushes pass through an algorithm and its transforms into one group's weights, and what these keep for it.

Rules that work element by element are called with chunks, so that both operands stay in the cache. A rule may want
each tensor of the module by itself, or the whole vector instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.algorithms.base import Algorithm, Answer, Push, Transform
from lightning_asgd.errors import ProtocolError
from lightning_asgd.layout import Role
from lightning_asgd.server.shard_copy import CHUNK, ShardCopy

__all__ = ["Before", "GroupRules", "Tensors", "combine_buffers"]

Tensors = Sequence[tuple[str, int]]
"""The parts of a group that belong to one tensor each: its name, and how many of its scalars this server holds."""

Before = Callable[[slice], None]
"""Called before a part of the group changes."""


@dataclass(frozen=True)
class _Part:
    """What a rule is called with."""

    where: slice
    number: int = 0
    name: str = ""  # of the tensor, where a rule wants each by itself


class GroupRules:
    """One group of parameters, and the state that the rules keep for it."""

    def __init__(self, algorithm: Algorithm, weights: Tensor, tensors: Tensors = ()) -> None:
        self.weights = weights
        self._algorithm = algorithm
        self._tensors = _cut(tensors, weights.numel())
        self._slots: Any = self._start(algorithm)
        self._kept: list[Any] = [self._start(transform) for transform in algorithm.transforms]
        self.pending = torch.zeros_like(weights) if any(t.gathers for t in algorithm.transforms) else None
        n = weights.numel()
        whole = [_Part(where) for where in (chunks(n) if algorithm.chunked else [slice(0, n)])]
        self._parts = self._tensors if algorithm.per_tensor else whole  # that the algorithm is called with

    def push(
        self, update: Tensor, push: Push, scale: float, backup: Tensor, *, copy_back: bool, before: Before
    ) -> None:
        """Pass a push through the transforms, and into the weights or the aggregate.

        ``backup`` are the weights in the latest reply to its worker.
        """
        algorithm, pending = self._algorithm, self.pending
        by_tensor = algorithm.knows_tensors
        for part in self._tensors if by_tensor else self._parts:
            before(part.where)
            w, u = self.weights[part.where], update[part.where]
            about = replace(push, tensor=part.name) if by_tensor else push
            for transform, own in zip(algorithm.transforms, self._kept, strict=True):
                mine = self._of(transform, own, part)
                mine = {**mine, "backup": backup[part.where]} if transform.backup else mine
                # Real and imaginary parts are numbers of their own, as to torch's optimizers.
                transform.change(_real(u), _real(w), {name: _real(each) for name, each in mine.items()}, about)
            if scale != 1.0:
                u.mul_(scale)
            if pending is not None:
                pending[part.where].add_(u)
                continue
            algorithm.apply(w, u, self._of(algorithm, self._slots, part), about)
            if copy_back and algorithm.answer is Answer.WEIGHTS:
                u.copy_(w)

    def apply_gathered(self, weight: float, push: Push, before: Before) -> None:
        """Apply the mean of the aggregated pushes as one update. They weigh ``weight`` together."""
        algorithm, pending = self._algorithm, self.pending
        if pending is None:
            return
        merging = [(t, own) for t, own in zip(algorithm.transforms, self._kept, strict=True) if t.per_tensor]
        for part in self._tensors if merging else ():
            before(part.where)
            mean = pending[part.where].div_(weight)
            for transform, own in merging:
                transform.merge(mean, own[part.number], replace(push, tensor=part.name, scale=weight))
        for part in self._parts:
            before(part.where)
            mean = pending[part.where]
            if not merging:
                mean.div_(weight)
            about = replace(push, tensor=part.name) if algorithm.per_tensor else push
            algorithm.apply(self.weights[part.where], mean, self._of(algorithm, self._slots, part), about)
            mean.zero_()

    def forget_gathered(self) -> None:
        """Drop the aggregated pushes."""
        if self.pending is not None:
            self.pending.zero_()
        for transform, kept in zip(self._algorithm.transforms, self._kept, strict=True):
            for slots in kept if transform.per_tensor else ():
                transform.forget(slots)

    @property
    def gain(self) -> float:
        """See :meth:`Algorithm.gain`: the mean over the scalars of tensors whose gain is known."""
        if not self._algorithm.per_tensor:
            return self._algorithm.gain(self._slots)
        gains = [self._algorithm.gain(slots) for slots in self._slots]
        sizes = [part.where.stop - part.where.start for part in self._tensors]
        known = [(gain, size) for gain, size in zip(gains, sizes, strict=True) if gain]
        mean: float = sum(gain * size for gain, size in known) / max(sum(size for _, size in known), 1)
        return mean

    # ------------------------------------------------------------------ checkpoints and snapshots

    def state(self, copy: Callable[[Any, int], Any]) -> dict[str, Any]:
        """What the rules keep. ``copy`` is called with each vector, or a container, and its first scalar."""
        algorithm = self._algorithm
        if algorithm.per_tensor:
            slots = [
                copy(algorithm.save(mine), part.where.start)
                for mine, part in zip(self._slots, self._tensors, strict=True)
            ]
        else:
            slots = copy(algorithm.save(self._slots), 0)
        return {"slots": slots, "transforms": [self._copied(kept, copy) for kept in self._kept]}

    def snapshot(self, index: int, copy: ShardCopy) -> dict[str, Any]:
        """The same; its vectors are filled as the copy proceeds."""
        return self.state(lambda value, start: copy.of(index, value, start))

    def restore(self, saved: dict[str, Any]) -> None:
        """Take what :meth:`state` returned. Before release 0.2 no state was kept tensor by tensor."""
        algorithm, slots = self._algorithm, saved["slots"]
        if algorithm.per_tensor:
            slots = slots if isinstance(slots, list) else [self._piece(slots, part) for part in self._tensors]
            for mine, theirs in zip(self._slots, slots, strict=True):
                algorithm.load(mine, theirs)
        else:
            algorithm.load(self._slots, slots)
        for kept, theirs in zip(self._kept, saved["transforms"], strict=True):
            pairs = zip(kept, theirs, strict=True) if isinstance(kept, list) else [(kept, theirs)]
            for mine, their in pairs:
                for name, tensor in mine.items():
                    tensor.copy_(their[name])

    # ------------------------------------------------------------------ helpers

    def _start(self, rule: Algorithm | Transform) -> Any:
        if rule.per_tensor:
            return [rule.start(self.weights[part.where]) for part in self._tensors]
        return rule.start(self.weights)

    def _of(self, rule: Algorithm | Transform, kept: Any, part: _Part) -> dict[str, Any]:
        """What a rule keeps for a part."""
        if rule.per_tensor:
            kept = kept[part.number]
        if rule.per_tensor or (isinstance(rule, Algorithm) and not rule.chunked):
            mine: dict[str, Any] = kept
            return mine
        return {name: tensor[part.where] for name, tensor in kept.items()}

    def _copied(self, kept: Any, copy: Callable[[Any, int], Any]) -> Any:
        if not isinstance(kept, list):
            return copy(kept, 0)
        return [copy(mine, part.where.start) for mine, part in zip(kept, self._tensors, strict=True)]

    def _piece(self, slots: dict[str, Any], part: _Part) -> dict[str, Any]:
        n = self.weights.numel()
        return {name: each[part.where] if each.shape == (n,) else each for name, each in slots.items()}


def combine_buffers(
    role: Role, weights: Tensor, update: Tensor, share: float, *, copy_back: bool, before: Before
) -> None:
    """Change a group that is not of parameters: no algorithm changes how these combine."""
    for part in chunks(len(update)):
        before(part)
        w, u = weights[part], update[part]
        if role is Role.LARGEST:
            torch.maximum(w, u, out=w)
        else:
            w.add_(u, alpha=share)
        if copy_back:
            u.copy_(w)


def chunks(n: int) -> list[slice]:
    """Pieces of a vector of ``n`` scalars, to change one after the other."""
    return [slice(start, min(start + CHUNK, n)) for start in range(0, max(n, 1), CHUNK)]


def _cut(tensors: Tensors, n: int) -> list[_Part]:
    """The parts of a group that belong to one tensor each: all of it, if that is not known."""
    named = list(tensors) or [("", n)]
    if sum(length for _, length in named) != n or any(length < (n > 0) for _, length in named):
        raise ProtocolError(
            f"A shard of {n} scalars was laid out as tensors of {[length for _, length in named][:20]} scalars. "
            "Expected lengths that add up. Look for a broken worker, or one of another version."
        )
    parts, start = [], 0
    for number, (name, length) in enumerate(named):
        parts.append(_Part(slice(start, start + length), number, name))
        start += length
    return parts


def _real(value: Any) -> Any:
    """The real numbers of a complex tensor, shape ``(n, 2)``; anything else as it is."""
    return torch.view_as_real(value) if isinstance(value, Tensor) and value.is_complex() else value
