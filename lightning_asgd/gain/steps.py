"""An optimizer's steps on a worker, with the gain. Schedulers, logs and checkpoints see the user's learning rate."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from lightning_asgd.gain.estimate import signal_of

_EVERY = 10  # steps between two looks at the states


class Gain:
    """Multiplies the learning rate of a worker's optimizers while they step; ``summed``: see :meth:`Signal.add`."""

    def __init__(self, workers: Callable[[], float], summed: Callable[[Tensor], Tensor] = lambda sums: sums) -> None:
        self._workers, self._summed = workers, summed
        self._watched: dict[int, _Steps] = {}

    def watch(self, optimizers: Iterable[Any]) -> None:
        """Have these take longer steps; those that are watched already stay as they are."""
        for optimizer in optimizers:
            if id(optimizer) not in self._watched and hasattr(optimizer, "register_step_pre_hook"):
                self._watched[id(optimizer)] = _Steps(optimizer, self._workers, self._summed)

    @property
    def latest(self) -> float:
        """The largest of the optimizers' latest steps; 0 if none has a known share of signal."""
        return max((steps.gain for steps in self._watched.values()), default=0.0)

    def close(self) -> None:
        """Leave the optimizers as they were."""
        for steps in self._watched.values():
            steps.close()
        self._watched.clear()


class _Steps:
    """The steps of one optimizer."""

    def __init__(self, optimizer: Any, workers: Callable[[], float], summed: Callable[[Tensor], Tensor]) -> None:
        self._optimizer, self._workers, self._summed = optimizer, workers, summed
        self._signal, self._taken, self.gain = signal_of(optimizer), 0, 0.0
        names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
        self._decouples = any(re.search("adamw|adafactor|muon|lion|soap", name) for name in names)
        self._before: list[tuple[dict[str, Any], str, Any, Any]] = []  # group, name, the user's value, ours
        self._before_step = optimizer.register_step_pre_hook(self._begin)
        self._after_step = optimizer.register_step_post_hook(self._end)

    def close(self) -> None:
        self._restore()  # a step may have failed
        self._before_step.remove()
        self._after_step.remove()

    def _begin(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A closure trains a batch, and may log or set the learning rate: the gain is for what follows it."""
        self._restore()  # the step before may have failed
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._lengthen()
            return None

        def train() -> Any:
            self._restore()
            loss = closure()
            self._lengthen()
            return loss

        if len(args) > 1:
            return (optimizer, train, *args[2:]), kwargs
        return args, {**kwargs, "closure": train}

    def _end(self, *_: Any) -> None:
        self._restore()
        if self._before_step.id in (hooks := self._before_step.hooks_dict_ref() or {}):
            hooks.move_to_end(self._before_step.id)  # type: ignore[union-attr]  # others may set the rate

    def _lengthen(self) -> None:
        self._restore()  # an optimizer whose step calls that of its base class has hooks around both
        workers, signal = self._workers(), self._signal
        if signal is None:
            return
        if workers > 1 and (self._taken % _EVERY == 0 or not signal.span):
            signal.add(self._optimizer.param_groups, self._optimizer.state, self._summed)
        self._taken += 1
        if not signal.span:
            return
        self.gain = signal.gain(workers)
        if self.gain == 1.0:
            return
        for group in self._optimizer.param_groups:
            if group.get("lr") is None:  # an optimizer that finds its own
                continue
            self._set(group, "lr", self.gain)
            if group.get("weight_decay") and self._is_decoupled(group):
                self._set(group, "weight_decay", 1 / self.gain)

    def _is_decoupled(self, group: dict[str, Any]) -> bool:
        """Whether the decay is subtracted from the weights, and not added to the gradient: as by AdamW."""
        decoupled = group.get("decoupled_weight_decay", group.get("weight_decouple", self._decouples))
        return bool(decoupled and not group.get("fixed_decay"))

    def _set(self, group: dict[str, Any], name: str, factor: float) -> None:
        before = group[name]
        if isinstance(before, Tensor):  # a captured graph may hold it, and several groups
            if any(before is each for *_, each in self._before):
                return
            kept = before.clone()
            before.mul_(factor)
            self._before.append((group, name, kept, before))
        else:
            group[name] = before * factor
            self._before.append((group, name, before, group[name]))

    def _restore(self) -> None:
        """Give the user's values back, unless they were set meanwhile."""
        for group, name, before, ours in self._before:
            if group[name] is not ours:
                continue
            if isinstance(ours, Tensor):
                ours.copy_(before)
            else:
                group[name] = before
        self._before.clear()
