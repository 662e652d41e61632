"""How pushes pass through an algorithm and its transforms into one group's weights, and what these keep for it.

Rules that work element by element are called with chunks, so that both operands stay in the cache. A rule may want
each tensor of the module by itself, or the whole vector instead.

Weights of 16 bits are kept in float32, too, as in mixed precision: rules compute there and keep their state there, and
workers get the rounded weights. In 16 bits the mean of small updates would be rounded away, and squares would be 0 or
infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_asgd.core.algorithms.base import Algorithm, Answer, Payload, Push, Transform
from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.foundation.numerics import wide

CHUNK = 1 << 18
"""Scalars worked on at a time: 1 MiB of float32, so that two operands stay in a core's cache."""

Tensors = Sequence[tuple[str, int]]
"""The parts of a group that belong to one tensor each: its name, and how many of its scalars this server holds."""

Before = Callable[[slice], None]
"""Called before a part of the group changes."""


class PiecewiseCopy(Protocol):
    """A copy of a shard's vectors, which is made piece by piece while pushes continue."""

    @property
    def left(self) -> Mapping[tuple[int, int], None]:
        """The pieces that are not copied yet: group and first scalar."""

    def of(self, group: int, value: Any, first: int = 0) -> Any:
        """The copy of what is kept for a group. Vectors are of its scalars from ``first`` on, and are filled later."""

    def before_change(self, group: int, part: slice) -> None:
        """Copy the pieces of a part of a group's vectors, unless they are copied already."""

    def finish(self) -> None:
        """Copy all that is left."""


@dataclass(frozen=True)
class _Part:
    """What a rule is called with."""

    where: slice
    number: int = 0
    name: str = ""  # of the tensor, where a rule wants each by itself


class GroupRules:
    """One group of parameters, and the state that the rules keep for it."""

    def __init__(self, algorithm: Algorithm, weights: Tensor, tensors: Tensors = ()) -> None:
        self.weights = weights  # as workers get them
        self.exact = weights.to(wide(weights.dtype))  # as rules change them: the same tensor unless it has 16 bits
        self._algorithm = algorithm
        self._tensors = _cut(tensors, weights.numel())
        self._slots: Any = self._start(algorithm)
        self._kept: list[Any] = [self._start(transform) for transform in algorithm.transforms]
        self.pending = torch.zeros_like(self.exact) if any(t.gathers for t in algorithm.transforms) else None
        n = weights.numel()
        whole = [_Part(where) for where in (chunks(n) if algorithm.chunked else [slice(0, n)])]
        self._parts = self._tensors if algorithm.per_tensor else whole  # that the algorithm is called with

    def push(
        self, update: Tensor, push: Push, scale: float, backup: Tensor, *, copy_back: bool, before: Before
    ) -> None:
        """Pass a push through the transforms into weights or aggregate. ``backup``: weights last sent to its worker."""
        algorithm, pending, ahead = self._algorithm, self.pending, self._algorithm.ahead(push)
        by_tensor = algorithm.knows_tensors
        for part in self._tensors if by_tensor else self._parts:
            before(part.where)
            w, pushed, dtype = self.weights[part.where], update[part.where], self.exact.dtype
            u = pushed.to(dtype)
            about = replace(push, tensor=part.name) if by_tensor else push
            for transform, own in zip(algorithm.transforms, self._kept, strict=True):
                mine = self._of(transform, own, part)
                mine = {**mine, "backup": backup[part.where].to(dtype)} if transform.backup else mine
                seen = _real(w.to(dtype))  # rounded, as a backup is: both are weights that workers had
                # Real and imaginary parts are numbers of their own, as to torch's optimizers.
                transform.change(_real(u), seen, {name: _real(each) for name, each in mine.items()}, about)
            if scale != 1.0:
                u.mul_(scale)
            if pending is not None:
                pending[part.where].add_(u)
                continue
            if self._rounds:
                self._apply(part, u, about)
            else:
                algorithm.apply(w, u, self._of(algorithm, self._slots, part), about)
            if algorithm.answer is Answer.FORCE:
                pushed.copy_(u)  # nothing is done if it is the same tensor
            elif copy_back and algorithm.answer is Answer.WEIGHTS:
                torch.add(w, pushed, alpha=ahead, out=pushed) if ahead else pushed.copy_(w)

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
            if self._rounds:
                self._apply(part, mean, about)
            else:
                algorithm.apply(self.weights[part.where], mean, self._of(algorithm, self._slots, part), about)
            mean.zero_()

    def _apply(self, part: _Part, update: Tensor, push: Push) -> None:
        """Have the algorithm change a part of the exact weights, and round it."""
        exact, slots = self.exact[part.where], self._of(self._algorithm, self._slots, part)
        whole = exact + update if self._is_alone(push) else None
        self._algorithm.apply(exact, update, slots, push)
        self.weights[part.where].copy_(exact)
        if whole is not None:
            exact.copy_(torch.where(exact == whole, self.weights[part.where], exact))

    @property
    def _rounds(self) -> bool:
        return self.exact is not self.weights

    def _is_alone(self, push: Push) -> bool:
        """Whether a worker that trains alone keeps what rounding removes: it pushes that again, and not the shard."""
        return push.live == 1 and self._algorithm.payload is Payload.DELTA

    def replaced(self) -> None:
        """The weights were replaced: workers push again what the new ones lack."""
        if self._rounds:
            self.exact.copy_(self.weights)
        self.forget_gathered()

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

    def snapshot(self, index: int, copy: PiecewiseCopy) -> dict[str, Any]:
        """The same, with the exact weights; its vectors are filled as the copy proceeds."""
        kept = self.state(lambda value, start: copy.of(index, value, start))
        return {**kept, "exact": copy.of(index, self.exact)} if self._rounds else kept

    def restore(self, saved: dict[str, Any]) -> None:
        """Take what :meth:`state` or :meth:`snapshot` returned.

        Before release 0.2 no state was kept tensor by tensor, and none of 16-bit weights in float32. A checkpoint has
        no exact weights: its weights may hold steps that the servers lack.
        """
        if self._rounds and "exact" in saved:
            self.exact.copy_(saved["exact"])
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
            return [rule.start(self.exact[part.where]) for part in self._tensors]
        return rule.start(self.exact)

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
